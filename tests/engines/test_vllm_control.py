"""Control of a real vLLM while calls are in flight: cancellation, pauses, new weights, sleep, a full queue."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rookery.upstreams import ModelReply, open_upstream
from rookery.upstreams.http_upstream import HttpUpstream
from rookery.upstreams.pause import PausableUpstream
from tests.engines.conftest import QUEUE, SEQUENCES, WEIGHTS, RunningEngine
from tests.engines.helpers import (
    PROMPT,
    SECONDS,
    TokenCounter,
    load_weights,
    post,
    read_floats,
    read_ints,
    request_exactly,
    vllm_config,
    wait_until,
)

pytestmark = pytest.mark.engines

TOKENS = 48
RUNNING = "vllm:num_requests_running"
GENERATED = "vllm:generation_tokens_total"
PREFIX_HITS = "vllm:prefix_cache_hits_total"


@pytest.fixture
async def upstream(vllm: RunningEngine) -> AsyncIterator[PausableUpstream]:
    opened = PausableUpstream(open_upstream(vllm_config(vllm)))
    yield opened
    await opened.close()


async def start_call(upstream: PausableUpstream, count: int = TOKENS) -> "asyncio.Task[ModelReply]":
    """Start a streamed call and wait until its first tokens have arrived."""
    counter = TokenCounter()
    call = asyncio.create_task(upstream.complete(request_exactly(count), timeout=SECONDS, on_delta=counter))
    await asyncio.wait_for(counter.reached.wait(), SECONDS)
    return call


@pytest.fixture(scope="session")
def changed_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with its last normalisation scaled, which makes every distribution flatter."""
    from safetensors.torch import load_file, save_file

    directory = tmp_path_factory.mktemp("changed")
    for file in WEIGHTS.iterdir():
        if file.suffix != ".safetensors":
            (directory / file.name).write_bytes(file.read_bytes())
    tensors = load_file(WEIGHTS / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 0.5
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


async def test_cancelled_call_frees_its_slot(upstream: PausableUpstream, vllm: RunningEngine) -> None:
    call = await start_call(upstream, count=1500)
    await wait_until(lambda: vllm.metric(RUNNING) == 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await wait_until(lambda: vllm.metric(RUNNING) == 0)


async def test_next_turn_hits_the_prefix_cache(upstream: PausableUpstream, vllm: RunningEngine) -> None:
    prompt = [*PROMPT, *range(1000, 1300)]
    reply = await upstream.complete(request_exactly(8, prompt), timeout=SECONDS)
    hits = vllm.metric(PREFIX_HITS)
    next_prompt = [*prompt, *read_ints(reply.sampled), *range(2000, 2008)]
    await upstream.complete(request_exactly(2, next_prompt), timeout=SECONDS)
    # vLLM caches whole blocks; the block size on a CPU is 128 tokens.
    assert vllm.metric(PREFIX_HITS) - hits >= 256


@pytest.mark.parametrize("mode", ["keep", "abort", "drain"])
async def test_paused_call_continues_with_the_same_tokens(
    upstream: PausableUpstream, vllm: RunningEngine, mode: Any
) -> None:
    whole = await upstream.complete(request_exactly(TOKENS), timeout=SECONDS)
    call = await start_call(upstream)
    await upstream.pause(mode, timeout=SECONDS)
    assert call.done() == (mode == "drain")
    generated = vllm.metric(GENERATED)
    later = asyncio.create_task(upstream.complete(request_exactly(2), timeout=SECONDS))
    await wait_until(lambda: upstream.waiting >= 1)
    assert vllm.metric(GENERATED) == generated
    await upstream.resume()
    reply = await call
    await later
    assert read_ints(reply.sampled) == read_ints(whole.sampled)
    assert read_floats(reply.logprobs) == pytest.approx(read_floats(whole.logprobs), abs=1e-3)


@pytest.mark.parametrize("mode", ["keep", "abort"])
async def test_new_weights_change_the_tokens_after_them(
    upstream: PausableUpstream, vllm: RunningEngine, changed_weights: Path, mode: Any
) -> None:
    upstream.version = 1
    before = await upstream.complete(request_exactly(TOKENS), timeout=SECONDS)
    call = await start_call(upstream)
    try:
        async with upstream.sync(2, mode=mode, timeout=SECONDS):
            await load_weights(vllm, changed_weights)
        reply = await call
    finally:
        await load_weights(vllm, WEIGHTS)
    old, new = reply.spans
    assert (old.version, new.version) == (1, 2)
    assert (old.start, old.end, new.end) == (0, new.start, TOKENS)
    assert read_ints(reply.sampled)[: old.end] == read_ints(before.sampled)[: old.end]
    logprobs, unchanged = read_floats(reply.logprobs), read_floats(before.logprobs)
    assert logprobs[: old.end] == pytest.approx(unchanged[: old.end], abs=1e-3)
    # The first token after the update is recorded as new, and its distribution is the flatter one.
    assert abs(logprobs[new.start] - unchanged[new.start]) > 1e-2
    again = await upstream.complete(request_exactly(TOKENS), timeout=SECONDS)
    assert read_ints(again.sampled) == read_ints(before.sampled), "the original weights are back"


async def test_calls_wait_while_the_engine_sleeps(upstream: PausableUpstream, vllm: RunningEngine) -> None:
    """On a CPU sleeping frees no memory, but vLLM stops scheduling as it does on a GPU."""
    expected = await upstream.complete(request_exactly(4), timeout=SECONDS)
    await post(vllm, "/sleep?level=1&mode=keep")
    try:
        generated = vllm.metric(GENERATED)
        call = asyncio.create_task(upstream.complete(request_exactly(4), timeout=SECONDS))
        # A sleeping vLLM does not count waiting requests in its metrics.
        done, _ = await asyncio.wait({call}, timeout=5)
        assert not done
        assert vllm.metric(GENERATED) == generated
        (evidence,) = await upstream.examine("")
        assert evidence.reason == "engine_paused"
    finally:
        await post(vllm, "/wake_up")
    assert read_ints((await call).sampled) == read_ints(expected.sampled)


async def test_request_that_another_client_aborts_is_continued(
    upstream: PausableUpstream, vllm: RunningEngine
) -> None:
    whole = await upstream.complete(request_exactly(TOKENS), timeout=SECONDS)
    call = await start_call(upstream)
    await post(vllm, "/abort_requests", {"request_ids": []})
    reply = await call
    assert read_ints(reply.sampled) == read_ints(whole.sampled)


async def test_calls_beyond_the_queue_of_the_engine_are_retried(vllm: RunningEngine) -> None:
    upstream = open_upstream(vllm_config(vllm, concurrency=3 * QUEUE, retries=100))
    try:
        replies = await asyncio.gather(
            *(upstream.complete(request_exactly(6), timeout=SECONDS) for _ in range(2 * QUEUE))
        )
    finally:
        await upstream.close()
    assert {len(read_ints(reply.sampled)) for reply in replies} == {6}


async def test_concurrency_of_the_engine_is_read_and_respected(vllm: RunningEngine) -> None:
    upstream = open_upstream(vllm_config(vllm))
    assert isinstance(upstream, HttpUpstream)
    try:
        await upstream.complete(request_exactly(1), timeout=SECONDS)  # the limit is read after the first call
        await wait_until(lambda: {state.limit for state in upstream.states()} == {SEQUENCES})
        calls = [
            asyncio.create_task(upstream.complete(request_exactly(24), timeout=SECONDS))
            for _ in range(2 * SEQUENCES)
        ]
        await wait_until(lambda: vllm.metric(RUNNING) == SEQUENCES)
        assert vllm.metric("vllm:num_requests_waiting") == 0
        await asyncio.gather(*calls)
    finally:
        await upstream.close()
