"""The `torch` upstream in an event loop: replies, streams, pauses, weight updates, deadlines, errors."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from rookery.core import Message, Sampling, Span, Truncation, UpstreamError, UsageError, ints
from rookery.upstreams import ModelReply, ModelRequest, UpstreamConfig, absolute_address, kind_of, open_upstream
from rookery.upstreams.pause import PausableUpstream
from rookery.upstreams.torch import ModelLoadError, SharedSampler, TorchUpstream
from rookery.upstreams.torch.batch import Batch, SampledSequence
from rookery.upstreams.torch.sampler import Sampler
from rookery.upstreams.torch.upstream import build_reply
from tests.upstreams.helpers import DeltaLog
from tests.upstreams.torch_kit import (
    END,
    WORDS,
    build_model,
    build_tokenizer,
    generate,
    read_floats,
    read_ints,
    rescore,
    save_model,
)
from tests.waiting import advance_clock, run_timers, wait_until

PROMPT = list(range(40, 60))
SECONDS = 60.0


def ask(**fields: Any) -> ModelRequest:
    sampling = Sampling(
        **{"seed": 3, "max_tokens": 12, "extra": {"ignore_eos": True}, **fields.pop("sampling", {})}
    )
    return ModelRequest(**{"tokens": ints(PROMPT), "sampling": sampling, **fields})


def long(**fields: Any) -> ModelRequest:
    return ask(sampling={"max_tokens": 400, **fields})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("torch") / "small")


@pytest.fixture
async def upstream(folder: Path) -> AsyncIterator[TorchUpstream]:
    built = open_upstream(UpstreamConfig(urls=(f"hf:{folder}?slots=4",)))
    assert isinstance(built, TorchUpstream)
    yield built
    await built.close()


def worst(one: list[float], other: list[float]) -> float:
    return max(abs(left - right) for left, right in zip(one, other, strict=True))


class Gate:
    """Let the sampler run its steps one by one, until it is opened."""

    def __init__(self, sampler: Sampler) -> None:
        self._steps = threading.Semaphore(0)
        self._open = False
        step = sampler.batch.step

        def gated() -> Any:
            if not self._open:
                self._steps.acquire()
            return step()

        sampler.batch.step = gated  # type: ignore[method-assign]

    def step(self) -> None:
        self._steps.release()

    def open(self) -> None:
        self._open = True
        self._steps.release()


class TokenCount:
    """Count the tokens of a streamed reply, and wait for a number of them."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = asyncio.Event()

    async def __call__(self, delta: Any) -> None:
        self.count += len(delta.sampled) // 4
        self._changed.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(SECONDS):
            while self.count < count:
                self._changed.clear()
                await self._changed.wait()


# ------------------------------------------------------------------------------------------------------- replies


async def test_token_ids_and_logprobs_in_and_out(upstream: TorchUpstream) -> None:
    reply = await upstream.complete(ask(), timeout=SECONDS)
    sampled = read_ints(reply.sampled)
    assert read_ints(reply.prompt) == PROMPT
    assert (reply.prompt_tokens, reply.sampled_tokens, reply.finish) == (20, 12, "length")
    assert (reply.version, reply.spans, reply.replica) == (0, (), "small")
    model = build_model()
    assert worst(read_floats(reply.logprobs), rescore(model, PROMPT, sampled)) < 1e-4
    greedy = await upstream.complete(ask(sampling={"temperature": 0.0}), timeout=SECONDS)
    assert read_ints(greedy.sampled) == generate(model, PROMPT, 12)


async def test_end_token_of_the_model_ends_a_reply_and_is_part_of_it(upstream: TorchUpstream) -> None:
    sampler = await upstream.open()
    greedy = read_ints((await upstream.complete(ask(sampling={"temperature": 0.0}), timeout=SECONDS)).sampled)
    end = greedy[5]
    expected = greedy[: greedy.index(end) + 1]
    assert sampler.end_tokens == {END}
    sampler.end_tokens = frozenset({end})
    plain = {"temperature": 0.0, "extra": {}}
    for request in (
        ask(sampling=plain),
        ask(sampling={"temperature": 0.0}, stop_ids=(end,)),
        ask(sampling={"temperature": 0.0, "extra": {"ignore_eos": True, "stop_token_ids": [end]}}),
    ):
        reply = await upstream.complete(request, timeout=SECONDS)
        assert (reply.finish, read_ints(reply.sampled)) == ("stop", expected)


async def test_stop_string_ends_a_reply_and_is_not_part_of_its_text(upstream: TorchUpstream) -> None:
    whole = await upstream.complete(ask(sampling={"max_tokens": 60}), timeout=SECONDS)
    text = whole.message.text
    stop = text[20:23]
    log = DeltaLog()
    for on_delta in (None, log):
        reply = await upstream.complete(
            ask(sampling={"max_tokens": 60, "stop": (stop,)}), timeout=SECONDS, on_delta=on_delta
        )
        assert (reply.finish, reply.message.text) == ("stop", text[: text.index(stop)])
        assert whole.sampled.startswith(reply.sampled)
        assert len(reply.sampled) < len(whole.sampled)
    log.begins(reply)


async def test_streamed_and_whole_replies_are_the_same(upstream: TorchUpstream) -> None:
    request = ask(sampling={"max_tokens": 60}, top_logprobs=3)
    whole = await upstream.complete(request, timeout=SECONDS)
    log = DeltaLog()
    streamed = await upstream.complete(request, timeout=SECONDS, on_delta=log)
    assert (streamed.sampled, streamed.message, streamed.tops) == (whole.sampled, whole.message, whole.tops)
    assert [len(tops) for tops in whole.tops] == [3] * 60
    log.begins(streamed)
    assert len(log.deltas) > 1
    assert log.prompt == streamed.prompt
    assert {delta.version for delta in log.deltas} == {0}


async def test_messages_are_rendered_with_the_chat_template(upstream: TorchUpstream) -> None:
    reply = await upstream.complete(ask(tokens=b"", messages=(Message("user", "hi"),)), timeout=SECONDS)
    assert build_tokenizer().decode(read_ints(reply.prompt)) == "user:hi\nA:"


async def test_same_seed_same_tokens_whatever_else_is_in_flight(upstream: TorchUpstream) -> None:
    alone = await upstream.complete(ask(), timeout=SECONDS)
    async with asyncio.TaskGroup() as group:
        calls = [
            group.create_task(upstream.complete(ask(sampling={"seed": seed % 8}), timeout=SECONDS))
            for seed in range(16)
        ]
    replies = [call.result() for call in calls]
    assert replies[3].sampled == replies[11].sampled == alone.sampled
    assert len({reply.sampled for reply in replies}) == 8
    assert any(reply.queued > 0 for reply in replies), "16 calls, 4 slots"


async def test_request_seed_is_used_if_sampling_has_none(upstream: TorchUpstream) -> None:
    replies = [
        await upstream.complete(ask(seed=seed, sampling={"seed": named}), timeout=SECONDS)
        for seed, named in ((8, None), (8, None), (9, 8), (None, None), (None, None))
    ]
    tokens = [reply.sampled for reply in replies]
    assert tokens[0] == tokens[1] == tokens[2]
    assert len({tokens[0], tokens[3], tokens[4]}) == 3


async def test_next_turn_uses_the_prefix_cache(upstream: TorchUpstream) -> None:
    first = await upstream.complete(ask(), timeout=SECONDS)
    prompt = [*PROMPT, *read_ints(first.sampled), 7, 8, 9]
    second = await upstream.complete(ask(tokens=ints(prompt)), timeout=SECONDS)
    sampler = await upstream.open()
    assert sampler.stats().reused_tokens == len(PROMPT) + 11
    assert worst(read_floats(second.logprobs), rescore(build_model(), prompt, read_ints(second.sampled))) < 1e-4
    info = await upstream.check()
    assert info.details["sampled_tokens"] == 24
    assert (info.models, info.context) == (("small",), 512)


# ------------------------------------------------------------------------------------ cancellation and deadlines


async def test_cancelling_ends_the_sampling_and_frees_the_slot(folder: Path) -> None:
    upstream = TorchUpstream(UpstreamConfig(urls=(f"hf:{folder}",), concurrency=1))
    try:
        started = TokenCount()
        call = asyncio.create_task(upstream.complete(long(), timeout=SECONDS, on_delta=started))
        await started.until(1)
        waiting = asyncio.create_task(upstream.complete(ask(), timeout=SECONDS))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await waiting).sampled_tokens == 12
        stats = (await upstream.open()).stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.sampled_tokens < 412
    finally:
        await upstream.close()


async def test_deadline_that_passes_is_a_timeout(upstream: TorchUpstream) -> None:
    await upstream.complete(ask(), timeout=SECONDS)
    with pytest.raises(UpstreamError) as caught:
        await upstream.complete(long(), timeout=0.0)
    assert caught.value.code == "upstream.timeout"
    assert (await upstream.complete(ask(), timeout=SECONDS)).sampled


async def test_frozen_time_is_not_part_of_the_deadline(
    upstream: TorchUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = await upstream.open()
    await upstream.freeze("keep", timeout=SECONDS)
    call = asyncio.create_task(upstream.complete(ask(), timeout=SECONDS))
    await wait_until(lambda: sampler.sequences)
    advance_clock(monkeypatch, 2 * SECONDS)
    await run_timers()
    assert not call.done(), "a frozen call does not reach its deadline"
    await upstream.thaw(timeout=SECONDS)
    assert (await call).sampled_tokens == 12


async def test_full_queue_refuses_calls(upstream: TorchUpstream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rookery.upstreams.torch.upstream.MAX_QUEUE", 2)
    await upstream.open()
    await upstream.freeze("keep", timeout=SECONDS)
    calls = [asyncio.create_task(upstream.complete(ask(), timeout=SECONDS)) for _ in range(6)]
    while upstream.gate is None or upstream.gate.waiting < 2:
        await asyncio.sleep(0)
    with pytest.raises(UpstreamError) as caught:
        await upstream.complete(ask(), timeout=SECONDS)
    assert caught.value.code == "upstream.overloaded"
    await upstream.thaw(timeout=SECONDS)
    assert all(reply.sampled_tokens == 12 for reply in await asyncio.gather(*calls))


# -------------------------------------------------------------------------------------- pauses and weight updates


async def test_freeze_keep_holds_a_reply_and_thaw_continues_it(upstream: TorchUpstream) -> None:
    expected = await upstream.complete(long(), timeout=SECONDS)
    started = TokenCount()
    call = asyncio.create_task(upstream.complete(long(), timeout=SECONDS, on_delta=started))
    await started.until(3)
    assert await upstream.freeze("keep", timeout=SECONDS)
    steps = (await upstream.open()).stats().steps
    queued = asyncio.create_task(upstream.complete(ask(), timeout=SECONDS))
    assert not (await asyncio.wait({call, queued}, timeout=0.1))[0]
    assert (await upstream.open()).stats().steps == steps
    assert not await upstream.freeze("drain", timeout=SECONDS)
    await upstream.thaw(timeout=SECONDS)
    assert (await call).sampled == expected.sampled
    assert (await queued).sampled_tokens == 12


async def test_freeze_before_the_model_is_loaded_holds_the_first_calls(upstream: TorchUpstream) -> None:
    assert await upstream.freeze("keep", timeout=SECONDS)
    assert upstream.sampler is None
    call = asyncio.create_task(upstream.complete(ask(), timeout=SECONDS))
    await wait_until(lambda: upstream.sampler is not None and upstream.sampler.sequences)
    assert upstream.sampler.stats().steps == 0
    await upstream.thaw(timeout=SECONDS)
    assert (await call).sampled_tokens == 12


async def test_freeze_abort_ends_replies_with_the_tokens_so_far(upstream: TorchUpstream) -> None:
    expected = await upstream.complete(long(), timeout=SECONDS)
    gate = Gate(await upstream.open())
    started = TokenCount()
    call = asyncio.create_task(upstream.complete(long(), timeout=SECONDS, on_delta=started))
    for _ in range(5):
        gate.step()
    await started.until(3)
    frozen = asyncio.create_task(upstream.freeze("abort", timeout=SECONDS))
    gate.open()
    assert await frozen
    reply = await call
    assert reply.finish == "abort"
    assert 3 <= reply.sampled_tokens < 400
    assert expected.sampled.startswith(reply.sampled)
    assert len(reply.logprobs) == len(reply.sampled)
    await upstream.thaw(timeout=SECONDS)
    assert (await upstream.complete(ask(), timeout=SECONDS)).finish == "length"


async def replace_weights(wrapped: PausableUpstream, mode: Any, *, streamed: bool) -> tuple[ModelReply, Any, int]:
    """Replace the weights during a reply. Return the reply, the new model and the count of old tokens."""
    inner = wrapped.inner
    assert isinstance(inner, TorchUpstream)
    sampler = await inner.open()
    wrapped.version = 1
    gate = Gate(sampler)
    count = TokenCount()
    call = asyncio.create_task(wrapped.complete(long(), timeout=SECONDS, on_delta=count if streamed else None))
    before = 6
    for _ in range(before):
        gate.step()
    await wait_until(lambda: sampler.stats().sampled_tokens >= before)
    other = build_model(seed=1)
    opened = asyncio.get_running_loop().call_later(0.05, gate.open)
    async with wrapped.sync(2, lambda: sampler.load_weights(other.state_dict(), 2), mode=mode):
        before = sampler.stats().sampled_tokens
    reply = await call
    opened.cancel()
    return reply, other, before


@pytest.mark.parametrize("streamed", [False, True])
async def test_kept_reply_continues_with_new_weights_and_tells_the_versions(folder: Path, streamed: bool) -> None:
    wrapped = PausableUpstream(TorchUpstream(UpstreamConfig(urls=(f"hf:{folder}?slots=4",))))
    try:
        reply, _, before = await replace_weights(wrapped, "keep", streamed=streamed)
        assert reply.spans == (Span(0, before, 1), Span(before, 400, 2))
        assert reply.version == 1
        assert wrapped.version == 2
        assert wrapped.mixed_replies == 0, "the version of every token is known"
        sampled, logprobs = read_ints(reply.sampled), read_floats(reply.logprobs)
        old = rescore(build_model(), PROMPT, sampled)
        assert worst(logprobs[:before], old[:before]) < 1e-4
        assert all(
            abs(one - two) > 1e-4 for one, two in zip(logprobs[before : before + 20], old[before:], strict=False)
        )
    finally:
        await wrapped.close()


@pytest.mark.parametrize("streamed", [False, True])
async def test_aborted_reply_is_continued_with_new_weights_from_its_tokens(folder: Path, streamed: bool) -> None:
    wrapped = PausableUpstream(TorchUpstream(UpstreamConfig(urls=(f"hf:{folder}?slots=4",))))
    try:
        reply, other, before = await replace_weights(wrapped, "abort", streamed=streamed)
        assert reply.spans == (Span(0, before, 1), Span(before, 400, 2))
        sampled, logprobs = read_ints(reply.sampled), read_floats(reply.logprobs)
        assert worst(logprobs[:before], rescore(build_model(), PROMPT, sampled)[:before]) < 1e-4
        assert worst(logprobs[before:], rescore(other, PROMPT, sampled)[before:]) < 1e-4
    finally:
        await wrapped.close()


async def test_weights_that_replaced_others_before_the_first_token_are_named(upstream: TorchUpstream) -> None:
    wrapped = PausableUpstream(upstream)
    sampler = await upstream.open()
    await sampler.freeze()
    call = asyncio.create_task(wrapped.complete(ask(), timeout=SECONDS))
    await wait_until(lambda: sampler.sequences)
    async with wrapped.sync(5, lambda: sampler.load_weights(build_model(seed=1).state_dict(), 5), mode="keep"):
        pass
    reply = await call
    assert reply.version == 5


def test_reply_that_ended_before_an_update_names_the_version_of_all_its_tokens() -> None:
    sequence = SampledSequence(PROMPT, max_tokens=2, seed=0)
    for token in (1, 2):
        sequence.take(token, -1.0, 7)
    for updated, spans in ((False, ()), (True, (Span(0, 2, 7),))):
        reply = build_reply(sequence, "", started=7, updated=updated, queued=0.0, replica="small")
        assert (reply.version, reply.spans, reply.finish) == (7, spans, "length")
    empty = build_reply(
        SampledSequence(PROMPT, max_tokens=2, seed=0), "", started=7, updated=True, queued=0.0, replica="small"
    )
    assert (empty.version, empty.spans, empty.finish) == (7, (), "abort")


def test_kv_cache_that_does_not_fit_is_refused(folder: Path) -> None:
    handle = SharedSampler(f"hf:{folder}?slots=1000000000")
    with pytest.raises(ModelLoadError) as caught:
        handle.open()
    assert caught.value.reason == "memory"
    asyncio.run(handle.close())


async def test_handles_of_one_address_share_a_sampler(folder: Path) -> None:
    address = f"hf:{folder}"
    first, second = SharedSampler(address), SharedSampler(address)
    one, two = await asyncio.gather(asyncio.to_thread(first.open), asyncio.to_thread(second.open))
    assert one is two
    upstream = TorchUpstream(UpstreamConfig(urls=(address,)))
    assert await upstream.open() is one
    await asyncio.to_thread(one.load_weights, build_model(seed=1).state_dict(), 4)
    reply = await upstream.complete(ask(sampling={"temperature": 0.0}), timeout=SECONDS)
    assert reply.version == upstream.version == 4
    assert read_ints(reply.sampled) == generate(build_model(seed=1), PROMPT, 12)
    await upstream.close()
    await first.close()
    assert second.open() is one
    await second.close()
    await second.close()
    with pytest.raises(UpstreamError) as caught:
        await one.thaw()
    assert caught.value.code == "upstream.unreachable"


# ------------------------------------------------------------------------------------------------------- failures


async def test_error_in_a_step_fails_its_calls_and_no_later_one(
    upstream: TorchUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Batch) -> None:
        raise MemoryError("no more")

    before = await upstream.complete(ask(), timeout=SECONDS)
    with monkeypatch.context() as patch:
        patch.setattr(Batch, "step", broken)
        with pytest.raises(UpstreamError) as caught:
            await upstream.complete(ask(), timeout=SECONDS)
    assert caught.value.code == "upstream.error"
    assert isinstance(caught.value.__cause__, MemoryError)
    assert (await upstream.complete(ask(), timeout=SECONDS)).sampled == before.sampled


async def test_closing_ends_the_thread_and_fails_calls_in_flight(folder: Path) -> None:
    upstream = TorchUpstream(UpstreamConfig(urls=(f"hf:{folder}",)))
    before = {thread for thread in threading.enumerate() if thread.name == "torch sampler"}
    started = TokenCount()
    call = asyncio.create_task(upstream.complete(long(), timeout=SECONDS, on_delta=started))
    await started.until(1)
    await upstream.freeze("keep", timeout=SECONDS)
    await upstream.close()
    with pytest.raises(UpstreamError) as caught:
        await call
    assert caught.value.code == "upstream.unreachable"
    assert {thread for thread in threading.enumerate() if thread.name == "torch sampler"} <= before
    with pytest.raises(UpstreamError):
        await upstream.complete(ask(), timeout=SECONDS)


async def test_prompt_beyond_the_context_is_a_truncation(upstream: TorchUpstream) -> None:
    with pytest.raises(Truncation) as caught:
        await upstream.complete(ask(tokens=ints([1] * 512)), timeout=SECONDS)
    assert caught.value.reason == "context"


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": b""},
        {"messages": (Message("user", "hi"),)},
        {"tokens": ints([WORDS])},
        {"tokens": ints([-1])},
        {"sampling": {"temperature": -1.0}},
        {"sampling": {"temperature": float("nan")}},
        {"sampling": {"top_p": 0.0}},
        {"sampling": {"max_tokens": 0}},
        {"sampling": {"extra": {"min_p": 2}}},
        {"sampling": {"extra": {"stop_token_ids": ["x"]}}},
        {"sampling": {"extra": {"ignore_eos": 1}}},
        {"sampling": {"extra": {"logit_bias": {}}}},
        {"sampling": {"extra": {"response_format": {"type": "json_object"}}}},
    ],
)
async def test_invalid_request_is_rejected(upstream: TorchUpstream, fields: dict[str, Any]) -> None:
    with pytest.raises(UpstreamError) as caught:
        await upstream.complete(ask(**fields), timeout=SECONDS)
    assert caught.value.code == "upstream.rejected"


def test_invalid_configuration_raises_at_construction(folder: Path) -> None:
    for urls in (
        (f"hf:{folder}", f"hf:{folder}"),
        ("hf:",),
        (f"hf:{folder}/nowhere",),
        (f"hf:{folder}?slots=0",),
        (f"hf:{folder}?speed=1",),
    ):
        with pytest.raises(UsageError):
            open_upstream(UpstreamConfig(urls=urls))
    with pytest.raises(UsageError):
        open_upstream(UpstreamConfig(urls=(f"hf:{folder}",), sampling=Sampling(extra={"logit_bias": {}})))


async def test_check_loads_nothing_and_names_the_model(folder: Path) -> None:
    upstream = TorchUpstream(UpstreamConfig(urls=(f"hf:{folder}?context=128",)))
    info = await upstream.check()
    assert (info.models, info.context) == (("small",), 128)
    assert upstream.sampler is None
    other = TorchUpstream(UpstreamConfig(urls=(f"hf:{folder}",), model="gpt"))
    with pytest.raises(UpstreamError) as caught:
        await other.check()
    assert caught.value.code == "upstream.rejected"


def test_address_selects_the_kind_and_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert kind_of(UpstreamConfig(urls=("hf:model",))) == kind_of(UpstreamConfig(urls=("torch:model",))) == "torch"
    assert absolute_address("hf:model?slots=4") == f"hf:{tmp_path}/model?slots=4"
