"""The `vllm` and `sglang` upstreams against the stand-in engines."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from rookery.core import Message, Sampling, ToolSchema, Truncation, UpstreamError, ints
from rookery.upstreams import ModelReply, ModelRequest
from rookery.upstreams.http_upstream import HttpUpstream
from rookery.upstreams.pause import PausableUpstream
from rookery.upstreams.protocol import UNLIMITED, ToolSet
from tests.engine_standins import standin
from tests.upstreams.helpers import DeltaLog, of_kind

PROMPT = ints([1, 72, 105, 33, 40, 41])


def make_request(**fields: Any) -> ModelRequest:
    endless = {"extra": {"ignore_eos": True}}
    sampling = Sampling(**{"seed": 3, "max_tokens": 60, **endless, **fields.pop("sampling", {})})
    return ModelRequest(**{"model": "", "tokens": PROMPT, "sampling": sampling, **fields})


def chat(**fields: Any) -> ModelRequest:
    sampling = {"extra": {}}
    return make_request(
        **{"tokens": b"", "messages": (Message("user", "What is 7 + 5?"),), "sampling": sampling, **fields}
    )


@pytest.fixture(params=["vllm", "sglang"])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    async with standin(request.param) as server:
        yield server


@pytest.fixture
async def up(server: Any) -> AsyncIterator[HttpUpstream]:
    async with of_kind(server.engine_name, server.url) as built:
        built.config = msgspec.structs.replace(built.config, model="")
        yield built


def data(reply: ModelReply) -> tuple[Any, ...]:
    return reply.prompt, reply.sampled, reply.logprobs, reply.tops


@pytest.mark.parametrize("top_logprobs", [0, 3])
async def test_token_prompt_gives_the_same_reply_streamed_or_not(up, top_logprobs):
    request = make_request(top_logprobs=top_logprobs)
    whole = await up.complete(request, timeout=60)
    on_delta = DeltaLog()
    streamed = await up.complete(request, timeout=60, on_delta=on_delta)
    on_delta.begins(streamed)
    assert data(streamed) == data(whole)
    assert streamed.finish == whole.finish == "length"
    assert len(whole.sampled) == len(whole.logprobs) == 4 * 60
    assert len(whole.tops) == (60 if top_logprobs else 0)
    assert all(len(tops) >= top_logprobs for tops in whole.tops)
    assert len(on_delta.deltas) > 1


@pytest.mark.parametrize("tools", [(), (ToolSchema("add", "adds", {"type": "object", "properties": {}}),)])
async def test_chat_returns_the_prompts_ids_also_when_streamed(up, server, tools):
    request = chat(tools=ToolSet(tools))
    whole = await up.complete(request, timeout=60)
    on_delta = DeltaLog()
    streamed = await up.complete(request, timeout=60, on_delta=on_delta)
    assert data(streamed) == data(whole)
    # vLLM reports `tool_calls` for a tool call that the token limit cut, but only without streaming.
    cut_by_vllm = server.engine_name == "vllm" and whole.message.tool_calls and streamed.finish == "length"
    assert whole.finish == ("tool_calls" if cut_by_vllm else streamed.finish)
    assert whole.prompt
    assert whole.prompt_tokens == len(whole.prompt) // 4
    assert len(whole.sampled) == len(whole.logprobs) > 0
    assert streamed.message.text == whole.message.text
    plain = await up.complete(msgspec.structs.replace(request, want_tokens=False), timeout=60, on_delta=DeltaLog())
    assert plain.message.text == whole.message.text
    assert not plain.sampled


async def test_stop_ids_end_a_reply(up):
    whole = await up.complete(make_request(sampling={"extra": {}}), timeout=60)
    ids = list(memoryview(whole.sampled).cast("i"))
    stopped = await up.complete(make_request(sampling={"extra": {}}, stop_ids=(ids[5],)), timeout=60)
    assert stopped.finish == "stop"
    assert list(memoryview(stopped.sampled).cast("i")) == ids[: ids.index(ids[5]) + 1]


async def test_prompt_that_does_not_fit_truncates(up):
    with pytest.raises(Truncation):
        await up.complete(make_request(tokens=ints([40] * 5_000)), timeout=60)


async def test_concurrency_limit_is_read_from_the_engine(up, server):
    await up.check()
    await asyncio.gather(*up.maintenance.tasks)
    reports_size = (await server.get("/server_info"))[0] == 200
    assert up.replicas[0].limit == (64 if reports_size else UNLIMITED)


@pytest.mark.parametrize("streamed", [True, False])
async def test_call_that_is_cancelled_ends_in_the_engine(up, server, streamed):
    with server.freezing(10):
        call = asyncio.create_task(
            up.complete(
                make_request(sampling={"max_tokens": 900}), timeout=60, on_delta=DeltaLog() if streamed else None
            )
        )
        await server.frozen(10)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    await server.post("/resume" if server.engine_name == "vllm" else "/continue_generation", {})
    await server.until(0)


async def test_server_that_dies_in_the_middle_is_not_a_complete_reply(up, server):
    await server.fault(
        path="/generate" if server.engine_name == "sglang" else "/inference/v1/generate", after_events=5
    )
    on_delta = DeltaLog()
    with pytest.raises(UpstreamError) as caught:
        await up.complete(make_request(), timeout=60, on_delta=on_delta)
    assert caught.value.code == "upstream.cut"
    assert 0 < len(on_delta.sampled) < 240


# ---- pauses


@pytest.mark.parametrize("mode", ["keep", "abort"])
@pytest.mark.parametrize("streamed", [True, False])
async def test_call_continues_after_a_pause(up, server, mode, streamed):
    upstream, on_delta = PausableUpstream(up), DeltaLog()
    request = make_request(sampling={"max_tokens": 120, "temperature": 0.0})
    alone = await up.complete(request, timeout=60)
    with server.freezing(30):
        call = asyncio.create_task(upstream.complete(request, timeout=60, on_delta=on_delta if streamed else None))
        await server.frozen(30)
        await upstream.pause(mode, timeout=60)
        assert (upstream.in_flight == 1) == (mode == "keep")
    await upstream.resume(5)
    reply = await call
    assert (reply.sampled, reply.finish) == (alone.sampled, alone.finish)
    assert len(reply.logprobs) == len(reply.sampled)
    if streamed:
        on_delta.begins(reply)
    elif mode == "keep":
        assert (reply.version, reply.spans, upstream.mixed_replies) == (0, (), 1)
        return
    old, new = reply.spans
    assert (old.version, new.version, new.end) == (0, 5, 120)
    # An event with several tokens may contain both versions; the first one after the change then counts as old.
    assert old.end == 30 if not upstream.mixed_replies else old.end > 30
    assert not upstream.mixed_replies or mode == "keep"


async def test_many_calls_through_many_syncs(up, server):
    """The weights do not change and the temperature is 0, so every reply equals that of an uninterrupted call."""
    upstream = PausableUpstream(up)
    requests = [
        make_request(tokens=PROMPT + ints([48 + n]), sampling={"max_tokens": 80, "temperature": 0.0})
        for n in range(8)
    ]
    alone = [await up.complete(request, timeout=60) for request in requests]
    delta_logs = [DeltaLog() for _ in requests]
    calls = [
        asyncio.create_task(upstream.complete(request, timeout=60, on_delta=delta_logs[n] if n % 2 else None))
        for n, request in enumerate(requests)
    ]
    for version, mode in enumerate(["abort", "keep", "abort", "drain"], 1):
        async with upstream.sync(version, None, mode=mode, timeout=60):
            assert upstream.paused
    for n, (call, whole) in enumerate(zip(calls, alone, strict=True)):
        reply = await call
        assert (reply.sampled, reply.finish) == (whole.sampled, whole.finish)
        if n % 2:
            delta_logs[n].begins(reply)
    assert upstream.version == 4
