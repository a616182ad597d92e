"""The `embedded` upstream in an event loop: seeds, swaps, cancellation, deadlines, errors."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rookery.core import Message, Sampling, ToolSchema, Truncation, UpstreamError, UsageError, ints
from rookery.upstreams import ModelReply, ModelRequest, UpstreamConfig, absolute_address, open_upstream
from rookery.upstreams.embedded import EmbeddedUpstream, Weights, chat
from rookery.upstreams.embedded.batch import Batch
from rookery.upstreams.embedded.weights import LlamaShape
from rookery.upstreams.protocol import ToolSet
from tests.upstreams.embedded_reference import SMALL

HI = (Message("user", "What is 7 + 5?"),)


def make_request(**fields: Any) -> ModelRequest:
    sampling = Sampling(**{"seed": 3, "max_tokens": 30, **fields.pop("sampling", {})})
    return ModelRequest(**{"model": "", "messages": HI, "sampling": sampling, **fields})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Weights.random(SMALL, seed=1, scale=0.2, version=1).save(tmp_path / "weights")
    return tmp_path / "weights"


@pytest.fixture
async def upstream(folder: Path) -> AsyncIterator[EmbeddedUpstream]:
    built = open_upstream(UpstreamConfig(urls=(f"embedded:{folder}",)))
    assert isinstance(built, EmbeddedUpstream)
    yield built
    await built.close()


def sampled(reply: ModelReply) -> tuple[bytes, bytes]:
    return reply.sampled, reply.logprobs


async def test_token_ids_and_logprobs_in_and_out(upstream: EmbeddedUpstream) -> None:
    reply = await upstream.complete(make_request(), timeout=60)
    assert reply.prompt == ints(chat.prompt(HI).ids)
    assert len(reply.sampled) == len(reply.logprobs) == 4 * reply.sampled_tokens
    assert (reply.prompt_tokens, reply.version, reply.replica) == (len(reply.prompt) // 4, 1, "weights")
    by_ids = await upstream.complete(make_request(messages=(), tokens=reply.prompt), timeout=60)
    assert by_ids.prompt == reply.prompt


async def test_same_seed_same_tokens_whatever_else_is_in_flight(upstream: EmbeddedUpstream) -> None:
    alone = await upstream.complete(make_request(), timeout=60)
    async with asyncio.TaskGroup() as group:
        others = [
            group.create_task(upstream.complete(make_request(sampling={"seed": seed % 40}), timeout=60))
            for seed in range(80)
        ]
    replies = [other.result() for other in others]
    assert sampled(replies[3]) == sampled(replies[43]) == sampled(alone)
    assert len({sampled(reply) for reply in replies}) > 30
    assert any(reply.queued > 0 for reply in replies), "80 calls, 64 slots"


async def test_request_seed_is_used_if_sampling_has_none(upstream: EmbeddedUpstream) -> None:
    replies = [
        await upstream.complete(make_request(seed=seed, sampling={"seed": named}), timeout=60)
        for seed, named in ((8, None), (8, None), (9, None), (9, 8), (None, None), (None, None))
    ]
    tokens = [reply.sampled for reply in replies]
    assert tokens[0] == tokens[1] == tokens[3]
    assert len({tokens[0], tokens[2], tokens[4], tokens[5]}) == 4


async def test_new_weights_serve_calls_that_start_afterwards(upstream: EmbeddedUpstream) -> None:
    old = await upstream.complete(make_request(sampling={"max_tokens": 300}), timeout=60)
    began = asyncio.Event()
    request = upstream.prepare(make_request(sampling={"max_tokens": 300}))
    running = asyncio.create_task(upstream.service.run(request.job, lambda _: began.set()))
    await began.wait()
    await upstream.swap(Weights.random(SMALL, seed=2, scale=0.2, version=7))
    new = await upstream.complete(make_request(sampling={"max_tokens": 300}), timeout=60)
    assert await running == 1
    assert ints(request.job.tokens) == old.sampled, "one version samples the whole reply"
    assert new.version == upstream.version == 7
    assert new.sampled != old.sampled


async def test_weights_replaced_on_disk_are_loaded(upstream: EmbeddedUpstream, folder: Path) -> None:
    first = await upstream.complete(make_request(), timeout=60)
    Weights.random(SMALL, seed=2, scale=0.2, version=5).save(folder)
    second = await upstream.complete(make_request(), timeout=60)
    Weights.random(SMALL, seed=1, scale=0.2).save(folder)
    third = await upstream.complete(make_request(), timeout=60)
    assert [first.version, second.version, third.version] == [1, 5, 6], (
        "a version that is not higher becomes the next number"
    )
    assert sampled(first) == sampled(third) != sampled(second)
    (folder / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(UpstreamError) as caught:
        await upstream.complete(make_request(), timeout=60)
    assert caught.value.code == "upstream.error"


async def test_cancelling_ends_the_sampling_and_frees_the_slot(folder: Path) -> None:
    upstream = EmbeddedUpstream(UpstreamConfig(urls=(f"embedded:{folder}",), concurrency=1))
    try:
        for _ in range(50):
            prepared = upstream.prepare(make_request(sampling={"max_tokens": 300}))
            began = asyncio.Event()
            running = asyncio.create_task(upstream.service.run(prepared.job, lambda _, began=began: began.set()))
            await began.wait()
            running.cancel()
            await asyncio.wait({running})
            after = await upstream.complete(make_request(), timeout=60)
            assert after.finish
            if prepared.job.finish == "":  # otherwise it ended before the cancellation
                break
        assert prepared.job.finish == ""
        assert not upstream.service.sequences
        waiting = asyncio.create_task(upstream.complete(make_request(sampling={"max_tokens": 300}), timeout=60))
        await asyncio.sleep(0)
        second = asyncio.create_task(upstream.complete(make_request(), timeout=60))
        await asyncio.sleep(0)
        waiting.cancel()
        assert (await second).sampled == after.sampled
    finally:
        await upstream.close()


async def test_deadline_that_passes_is_a_timeout(upstream: EmbeddedUpstream) -> None:
    with pytest.raises(UpstreamError) as caught:
        await upstream.complete(make_request(sampling={"max_tokens": 300}), timeout=0.0)
    assert caught.value.code == "upstream.timeout"
    assert (await upstream.complete(make_request(), timeout=60)).sampled


async def test_error_in_a_step_fails_that_batch_and_no_other(
    upstream: EmbeddedUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Batch) -> None:
        raise MemoryError("no more")

    before = await upstream.complete(make_request(), timeout=60)
    with monkeypatch.context() as patch:
        patch.setattr(Batch, "step", broken)
        with pytest.raises(UpstreamError) as caught:
            await upstream.complete(make_request(), timeout=60)
    assert caught.value.code == "upstream.error"
    assert isinstance(caught.value.__cause__, MemoryError)
    assert sampled(await upstream.complete(make_request(), timeout=60)) == sampled(before)


async def test_closing_ends_the_thread_and_fails_waiting_calls(folder: Path) -> None:
    upstream = EmbeddedUpstream(UpstreamConfig(urls=(f"embedded:{folder}",)))
    before = {thread for thread in threading.enumerate() if thread.name == "embedded policy"}
    began = asyncio.Event()
    prepared = upstream.prepare(make_request(sampling={"max_tokens": 350}))
    running = asyncio.create_task(upstream.service.run(prepared.job, lambda _: began.set()))
    await began.wait()
    await upstream.close()
    await upstream.close()
    if not prepared.job.finish:
        with pytest.raises(UpstreamError):
            await running
    assert {thread for thread in threading.enumerate() if thread.name == "embedded policy"} <= before
    with pytest.raises(UpstreamError):
        await upstream.complete(make_request(), timeout=60)


async def test_conversation_that_no_longer_fits_is_truncated_by_its_context(upstream: EmbeddedUpstream) -> None:
    with pytest.raises(Truncation) as caught:
        await upstream.complete(make_request(messages=(Message("user", "x" * 500),)), timeout=60)
    assert caught.value.reason == "context"


@pytest.mark.parametrize(
    "request_fields",
    [
        {"messages": ()},
        {"tokens": ints([1])},
        {"messages": (), "tokens": ints([300])},
        {"messages": (), "tokens": ints([-1])},
        {"sampling": {"temperature": -1.0}},
        {"sampling": {"temperature": float("nan")}},
        {"sampling": {"top_p": 0.0}},
        {"sampling": {"max_tokens": 0}},
        {"sampling": {"extra": {"min_p": 0.1}}},
    ],
)
async def test_invalid_request_is_rejected(upstream: EmbeddedUpstream, request_fields: dict[str, Any]) -> None:
    with pytest.raises(UpstreamError) as caught:
        await upstream.complete(make_request(**request_fields), timeout=60)
    assert caught.value.code == "upstream.rejected"
    assert len(str(caught.value)) > 20


async def test_no_tool_call_is_sampled_without_tools(folder: Path) -> None:
    """Return weights that start every reply with a tool call."""
    weights = Weights.load(folder)
    rows = weights.tensors["model.embed_tokens.weight"]
    rows[chat.CALL] = 40 * rows[: chat.CALL].mean(0)
    upstream = EmbeddedUpstream(UpstreamConfig(urls=(f"embedded:{folder}",)))
    tool = ToolSchema("add", "Adds.", {"properties": {"a": {}}})
    try:
        await upstream.swap(weights)
        for seed in range(20):
            plain = await upstream.complete(make_request(sampling={"seed": seed}), timeout=60)
            assert not plain.message.tool_calls
            chosen = await upstream.complete(
                make_request(sampling={"seed": seed}, tools=ToolSet((tool,)), tool_choice="add"), timeout=60
            )
            assert chosen.message.tool_calls[0].name.startswith("add")
            assert chosen.finish in ("tool_calls", "length")
    finally:
        await upstream.close()


def test_invalid_configuration_raises_at_construction(tmp_path: Path) -> None:
    small = LlamaShape(**{name: getattr(SMALL, name) for name in SMALL.__struct_fields__} | {"vocab_size": 100})
    Weights.random(small).save(tmp_path / "small")
    for urls, named in (
        (("embedded", "embedded"), r"embedded\[:PATH\]"),
        ((f"embedded:{tmp_path}/nowhere",), f"{tmp_path}/nowhere"),
        ((f"embedded:{tmp_path}/small",), "272"),
        (("elsewhere",), "http"),
    ):
        with pytest.raises(UsageError, match=named):
            open_upstream(UpstreamConfig(urls=urls))
    with pytest.raises(UsageError, match="min_p"):
        open_upstream(UpstreamConfig(urls=("embedded",), sampling=Sampling(extra={"min_p": 0.1})))
    # Trainers also send options that have no effect, so that defaults of a server do not replace them.
    without_effect = Sampling(extra={"min_p": 0.0, "repetition_penalty": 1.0})
    open_upstream(UpstreamConfig(urls=("embedded",), sampling=without_effect))


async def test_check_reports_the_model_and_samples_nothing(upstream: EmbeddedUpstream) -> None:
    info = await upstream.check()
    assert (info.models, info.context) == (("weights",), 400)
    assert upstream.service._thread is None
    other = EmbeddedUpstream(UpstreamConfig(urls=("embedded",), model="gpt"))
    with pytest.raises(UpstreamError, match=r"'embedded'.*'gpt'"):
        await other.check()


def test_address_with_a_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute_address("embedded:here/weights") == f"embedded:{tmp_path}/here/weights"
    for address in ("embedded", "http://127.0.0.1:8000/v1", "localhost:8000", ""):
        assert absolute_address(address) == address
