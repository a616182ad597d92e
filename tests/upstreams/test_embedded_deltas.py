"""The `embedded` upstream: deltas, versions, and calls that are aborted for new weights."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rookery.core import Message, Sampling, ToolSchema, UpstreamError, ints
from rookery.upstreams import ModelRequest, UpstreamConfig
from rookery.upstreams.embedded import EmbeddedUpstream
from rookery.upstreams.pause import PausableUpstream
from rookery.upstreams.protocol import Delta, ToolSet
from tests.upstreams.embedded_kit import gated, random_weights
from tests.upstreams.helpers import DeltaLog
from tests.waiting import wait_until

HI = (Message("user", "What is 7 + 5?"),)
TOOL = ToolSchema("add", "adds", {"type": "object", "properties": {"a": {}}})


def make_request(**fields: Any) -> ModelRequest:
    sampling = Sampling(**{"seed": 3, "max_tokens": 60, **fields.pop("sampling", {})})
    return ModelRequest(**{"model": "", "messages": HI, "sampling": sampling, **fields})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return random_weights(tmp_path / "weights")


@pytest.fixture
async def upstream(folder: Path) -> AsyncIterator[EmbeddedUpstream]:
    built = EmbeddedUpstream(UpstreamConfig(kind="embedded", urls=(f"embedded:{folder}",)))
    yield built
    await built.close()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("tool_choice", [None, "required"])
@pytest.mark.parametrize("stop", [(), ("e", "a ")])
async def test_joined_deltas_are_the_reply(upstream, seed, tool_choice, stop):
    request = make_request(sampling={"seed": seed, "stop": stop}, tools=ToolSet((TOOL,)), tool_choice=tool_choice)
    whole = await upstream.complete(request, timeout=60)
    on_delta = DeltaLog()
    streamed = await upstream.complete(request, timeout=60, on_delta=on_delta)
    on_delta.begins(streamed)
    assert streamed == whole
    assert on_delta.prompt == whole.prompt


async def test_first_piece_is_delivered_before_the_second_is_sampled(upstream):
    first = asyncio.Event()
    with gated(upstream) as gate:

        async def on_delta(_: Delta) -> None:
            first.set()

        call = asyncio.create_task(upstream.complete(make_request(), timeout=60, on_delta=on_delta))
        gate.step()
        await first.wait()
        assert not call.done()
    await call


async def test_slow_reader_does_not_delay_other_calls(upstream):
    hold, slow = asyncio.Event(), asyncio.Event()
    deltas = []

    async def on_delta(delta: Delta) -> None:
        deltas.append(delta)
        slow.set()
        await hold.wait()

    call = asyncio.create_task(upstream.complete(make_request(), timeout=60, on_delta=on_delta))
    await slow.wait()
    whole = await upstream.complete(make_request(), timeout=60)
    hold.set()
    assert await call == whole
    assert b"".join(delta.sampled for delta in deltas) == whole.sampled


async def test_exception_of_on_delta_ends_the_call_and_frees_its_slot(upstream):
    async def on_delta(_: Delta) -> None:
        raise ConnectionResetError("gone")

    with pytest.raises(ConnectionResetError):
        await upstream.complete(make_request(), timeout=60, on_delta=on_delta)
    assert not upstream.in_flight
    await upstream.complete(make_request(), timeout=60)


@pytest.mark.parametrize("streamed", [True, False])
async def test_freeze_ends_calls_with_their_tokens(upstream, streamed):
    whole = await upstream.complete(make_request(), timeout=60)
    on_delta = DeltaLog()
    with gated(upstream) as gate:
        call = asyncio.create_task(
            upstream.complete(make_request(), timeout=60, on_delta=on_delta if streamed else None)
        )
        while not upstream.in_flight:
            await asyncio.sleep(0)
        for _ in range(5):
            gate.step()
        await wait_until(lambda: any(len(job.logprobs) >= 4 for job in upstream.service.sequences))
        assert await upstream.freeze("abort", timeout=60)
        reply = await call
    assert reply.finish == "abort"
    assert 0 < len(reply.sampled) < len(whole.sampled)
    assert whole.sampled.startswith(reply.sampled)
    assert whole.logprobs.startswith(reply.logprobs)
    if streamed:
        on_delta.begins(reply)
    assert not upstream.in_flight
    assert not upstream._aborted


async def test_cancellation_propagates_during_a_freeze(upstream):
    with gated(upstream):
        call = asyncio.create_task(upstream.complete(make_request(), timeout=60))
        while not upstream.in_flight:
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert not await upstream.freeze("keep", timeout=60)
    await upstream.thaw(timeout=60)


async def test_messages_may_be_json(upstream):
    raw = tuple(msgspec.Raw(msgspec.json.encode({"role": m.role, "content": m.content})) for m in HI)
    assert await upstream.complete(make_request(messages=raw), timeout=60) == await upstream.complete(
        make_request(), timeout=60
    )
    with pytest.raises(UpstreamError) as caught:
        await upstream.complete(make_request(messages=(msgspec.Raw(b'{"role": 3}'),)), timeout=60)
    assert caught.value.code == "upstream.rejected"


async def test_reported_version_is_that_of_the_loaded_weights(upstream, folder):
    upstream.version = 7
    assert (await upstream.complete(make_request(), timeout=60)).version == 7
    random_weights(folder, seed=2, version=1)
    upstream.version = 9
    assert upstream.version == 9
    reply = await upstream.complete(make_request(), timeout=60)
    assert (reply.version, upstream.version) == (9, 9)


async def test_sync_replaces_weights_while_calls_are_in_flight(upstream, folder):
    pausable = PausableUpstream(upstream)
    request = make_request(sampling={"max_tokens": 100, "temperature": 0.0})
    tokens = msgspec.structs.replace(request, messages=(), tokens=ints(upstream.prepare(request).prompt))
    deltas = DeltaLog()
    begun = asyncio.Event()

    async def on_delta(delta: Delta) -> None:
        await deltas(delta)
        begun.set()

    call = asyncio.create_task(pausable.complete(tokens, timeout=60, on_delta=on_delta))
    await begun.wait()
    async with pausable.sync(2, lambda: random_weights(folder, seed=2)):
        assert pausable.in_flight == 0
    reply = await call
    deltas.begins(reply)
    assert (await pausable.complete(tokens, timeout=60)).version == 2
    assert {span.version for span in reply.spans} <= {1, 2}
