"""Pauses: callers see only latency, and every token carries the version that sampled it."""

import asyncio
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.core import Message, Sampling, Span, UpstreamError, ints
from rookery.core.turns import spans_cover
from rookery.upstreams import ModelReply, ModelRequest
from rookery.upstreams.pause import PausableUpstream
from rookery.upstreams.protocol import Delta
from tests.upstreams.helpers import DeltaLog
from tests.upstreams.oracle import Oracle
from tests.waiting import wait_until

CHAT = ModelRequest(model="m", messages=(Message("user", "hi"),))


def make_request(first: int = 5, **fields: Any) -> ModelRequest:
    sampling = Sampling(**fields.pop("sampling", {}))
    return ModelRequest(model="m", tokens=ints([first, 2, 3]), sampling=sampling, **fields)


def alone(request: ModelRequest, **options: Any) -> ModelReply:
    """Return the reply of an uninterrupted call."""
    return asyncio.run(Oracle(**options).complete(request, timeout=60))


def truth(oracle: Oracle, request: ModelRequest, reply: ModelReply) -> list[int]:
    prompt = list(memoryview(request.tokens).cast("i"))
    return [oracle.truth[prompt[0], len(prompt) + n] for n in range(len(reply.sampled) // 4)]


def by_token(reply: ModelReply) -> list[int]:
    count = len(reply.sampled) // 4
    assert not reply.spans or spans_cover(reply.spans, count)
    spans = reply.spans or (Span(0, count, reply.version),)
    return [span.version for span in spans for _ in range(span.start, span.end)]


def same(reply: ModelReply, whole: ModelReply) -> None:
    assert (reply.sampled, reply.logprobs, reply.finish) == (whole.sampled, whole.logprobs, whole.finish)
    assert (reply.message.text, reply.tops) == (whole.message.text, whole.tops)
    assert (reply.prompt, reply.prompt_tokens) == (whole.prompt, whole.prompt_tokens)
    assert reply.sampled_tokens == whole.sampled_tokens


# ------------------------------------------------------------------------------------------------- the property

pauses = st.lists(st.tuples(st.sampled_from(["keep", "drain", "abort"]), st.integers(0, 12)), max_size=5)
stops = st.lists(st.text("abcd", min_size=1, max_size=4), max_size=2).map(tuple)


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(
    pauses,
    st.lists(st.booleans(), min_size=1, max_size=3),
    stops,
    st.none() | st.integers(1, 60),
    st.integers(1, 5),
    st.sampled_from([("keep", "abort"), ("abort",), ()]),
    st.sampled_from([0.0, 30.0]),
    st.sampled_from([(), (98,)]),
)
def test_reply_in_parts_equals_the_uninterrupted_reply(plan, streamed, stop, most, piece, can, timeout, stop_ids):
    sampling = {"stop": stop, "max_tokens": most, "seed": 3}
    requests = [make_request(5 + n, sampling=sampling, stop_ids=stop_ids) for n in range(len(streamed))]

    async def play() -> tuple[Oracle, PausableUpstream, list[ModelReply], list[DeltaLog]]:
        oracle = Oracle(can=can, pieces=lambda _: piece)
        upstream = PausableUpstream(oracle)
        on_delta = [DeltaLog() for _ in requests]
        calls = [
            asyncio.create_task(upstream.complete(request, timeout=60, on_delta=one if wanted else None))
            for request, wanted, one in zip(requests, streamed, on_delta, strict=True)
        ]
        for number, (mode, after) in enumerate(plan):
            waits = asyncio.create_task(oracle.reached(oracle.sampled + after).wait())
            await asyncio.wait([waits, *calls], return_when=asyncio.FIRST_COMPLETED)
            waits.cancel()
            await upstream.pause(mode, timeout=timeout)
            if mode != "keep":
                assert oracle.under_way == 0, "nothing is sampled"
            await upstream.resume(number + 2)
        replies = await asyncio.gather(*calls)
        assert (upstream.in_flight, upstream.waiting, upstream.paused) == (0, 0, False)
        return oracle, upstream, list(replies), on_delta

    oracle, upstream, replies, on_delta = asyncio.run(play())
    for request, reply, wanted, one in zip(requests, replies, streamed, on_delta, strict=True):
        same(reply, alone(request))
        if wanted:
            one.begins(reply)
        expected, versions = truth(oracle, request, reply), by_token(reply)
        # Versions of kept calls cannot always be distinguished; a token never carries a newer version than its
        # own.
        assert all(version <= true for version, true in zip(versions, expected, strict=True))
        assert versions == expected or upstream.mixed_replies
        if wanted and piece == 1:
            assert versions == expected
    assert upstream.version == len(plan) + 1
    for later in oracle.requests[len(requests) :]:
        assert later.sampling.seed != 3 or later.tokens in [one.tokens for one in requests]


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("piece", [1, 3])
async def test_stop_string_is_found_across_parts(streamed, piece):
    free = make_request(sampling={"max_tokens": 40})
    text = (await Oracle(ending=10**9).complete(free, timeout=60)).message.text
    for length in (2, 3, 5):
        stop = text[20 : 20 + length]
        request = make_request(sampling={"max_tokens": 40, "stop": (stop,)})
        whole = await Oracle(ending=10**9).complete(request, timeout=60)
        assert whole.finish == "stop"
        for after in range(1, whole.sampled_tokens + 1):
            oracle, on_delta = Oracle(ending=10**9, pieces=lambda _: piece), DeltaLog()
            upstream = PausableUpstream(oracle)
            call = await started(upstream, oracle, request, after, on_delta=on_delta if streamed else None)
            await upstream.pause("abort")
            await upstream.resume(2)
            reply = await call
            same(reply, whole)
            if streamed:
                on_delta.begins(reply)


# ------------------------------------------------------------------------------------------------------- modes


@pytest.fixture
def oracle() -> Oracle:
    return Oracle(ending=10**9)


async def started(
    upstream: PausableUpstream, oracle: Oracle, request: ModelRequest, tokens: int = 5, **more: Any
) -> Any:
    reached = oracle.reached(oracle.sampled + tokens)
    call = asyncio.create_task(upstream.complete(request, timeout=60, **more))
    await reached.wait()
    return call


async def test_kept_calls_stay_in_the_engine_and_carry_both_versions(oracle):
    upstream, on_delta = PausableUpstream(oracle), DeltaLog()
    call = await started(upstream, oracle, make_request(sampling={"max_tokens": 40}), on_delta=on_delta)
    await upstream.pause("keep")
    stands = oracle.sampled
    for _ in range(20):
        await asyncio.sleep(0)
    assert (oracle.sampled, oracle.under_way, upstream.in_flight) == (stands, 1, 1)
    await upstream.resume(2)
    reply = await call
    assert reply.spans == (Span(0, stands, 1), Span(stands, 40, 2))
    assert (reply.version, len(oracle.requests), upstream.mixed_replies) == (1, 1, 0)


async def test_kept_call_that_is_not_streamed_has_the_oldest_version_and_is_counted(oracle):
    upstream = PausableUpstream(oracle)
    call = await started(upstream, oracle, make_request(sampling={"max_tokens": 40}))
    await upstream.pause("keep")
    await upstream.resume(2)
    reply = await call
    assert (reply.version, reply.spans, upstream.mixed_replies) == (1, (), 1)


async def test_tokens_buffered_for_a_slow_reader_count_as_the_old_version(oracle):
    upstream, hold, slow = PausableUpstream(oracle), asyncio.Event(), asyncio.Event()

    async def on_delta(_: Delta) -> None:
        slow.set()
        await hold.wait()

    call = asyncio.create_task(
        upstream.complete(make_request(sampling={"max_tokens": 10}), timeout=60, on_delta=on_delta)
    )
    await slow.wait()
    await upstream.pause("keep")
    await upstream.resume(2)
    hold.set()
    reply = await call
    assert (by_token(reply)[:2], upstream.mixed_replies) == ([1, 1], 1)


async def test_drain_waits_for_calls_in_flight_and_starts_none(oracle):
    upstream = PausableUpstream(oracle)
    call = await started(upstream, oracle, make_request(sampling={"max_tokens": 40}))
    pausing = asyncio.create_task(upstream.pause("drain"))
    await asyncio.sleep(0)
    late = asyncio.create_task(upstream.complete(make_request(6, sampling={"max_tokens": 3}), timeout=60))
    await pausing
    assert call.done()
    assert (len(oracle.requests), upstream.waiting, upstream.mode) == (1, 1, "drain")
    await upstream.resume(2)
    reply = await late
    assert (reply.version, reply.spans, oracle.control_calls) == (2, (), [])


async def test_drain_past_its_timeout_aborts(oracle, caplog):
    upstream = PausableUpstream(oracle)
    request = make_request(sampling={"max_tokens": 100})
    call = await started(upstream, oracle, request)
    await upstream.pause("drain", timeout=0.0)
    assert (upstream.mode, oracle.under_way, oracle.control_calls) == ("abort", 0, ["abort"])
    (record,) = caplog.records
    assert (record.levelname, 1 in record.args) == ("WARNING", True)
    await upstream.resume(2)
    reply = await call
    assert by_token(reply) == truth(oracle, request, reply)
    assert set(by_token(reply)) == {1, 2}


@pytest.mark.parametrize("can", [("abort",), ()])
@pytest.mark.parametrize("streamed", [True, False])
async def test_aborted_calls_continue_from_their_sampled_tokens(can, streamed):
    oracle = Oracle(can=can, ending=10**9)
    upstream = PausableUpstream(oracle)
    request = make_request(sampling={"max_tokens": 40, "seed": 9}, id="call")
    call = await started(upstream, oracle, request, on_delta=DeltaLog() if streamed else None)
    await upstream.pause("abort")
    assert oracle.under_way == upstream.in_flight == 0
    await upstream.resume(2)
    reply = await call
    first, second = oracle.requests
    kept = (len(second.tokens) - len(first.tokens)) // 4
    assert (kept > 0) == (streamed or bool(can)), "an inference engine that cannot abort returns no partial reply"
    assert second.tokens == request.tokens + reply.sampled[: 4 * kept]
    assert second.sampling.max_tokens == 40 - kept
    assert (second.sampling.seed == 9) == (kept == 0)
    assert second.id == f"{1 if kept else 0}+call"
    assert by_token(reply) == [1] * kept + [2] * (40 - kept)


async def test_call_that_reached_the_engine_after_its_abort_does_not_delay_the_pause(oracle, monkeypatch):
    monkeypatch.setattr("rookery.upstreams.pause.upstream.QUIET_SECONDS", 0.02)
    upstream = PausableUpstream(oracle)
    first = await started(upstream, oracle, make_request(5, sampling={"max_tokens": 40}))
    second = await started(upstream, oracle, make_request(6, sampling={"max_tokens": 40}))
    complete = oracle.complete

    async def stuck(request: ModelRequest, **more: Any) -> ModelReply:
        """The call arrives during a pause and waits in the inference engine."""
        await oracle.gate.wait()
        return await complete(request, **more)

    oracle.complete = stuck
    oracle.gate.clear()
    third = asyncio.create_task(upstream.complete(make_request(7, sampling={"max_tokens": 3}), timeout=60))
    while upstream.in_flight < 3:
        await asyncio.sleep(0)
    await upstream.pause("abort")
    assert upstream.in_flight == 0
    await upstream.resume(2)
    replies = await asyncio.gather(first, second, third)
    assert [reply.sampled_tokens for reply in replies] == [40, 40, 3]
    assert by_token(replies[2]) == [2, 2, 2]


async def test_max_tokens_counts_over_all_parts_of_a_reply():
    oracle = Oracle(ending=10**9)
    upstream = PausableUpstream(oracle)
    request = make_request(sampling={"max_tokens": 20, "stop": ("zz",)})
    call = await started(upstream, oracle, request, on_delta=DeltaLog())
    await upstream.pause("abort")
    await upstream.resume(2)
    assert (await call).sampled_tokens == 20


async def test_end_of_the_context_is_the_end_of_the_reply():
    oracle = Oracle(ending=10**9, context=10)
    upstream = PausableUpstream(oracle)
    hold = asyncio.Event()

    async def on_delta(delta: Delta) -> None:
        if oracle.sampled == 7:
            hold.set()
            await asyncio.sleep(0)

    call = asyncio.create_task(upstream.complete(make_request(), timeout=60, on_delta=on_delta))
    await hold.wait()
    oracle.abort()  # at the moment in which the call ended
    reply = await call
    assert (reply.sampled_tokens, reply.finish) == (7, "length")


async def test_call_that_the_engine_drops_when_it_aborts_continues_as_well(oracle):
    upstream, on_delta = PausableUpstream(oracle), DeltaLog()
    request = make_request(sampling={"max_tokens": 40})
    complete = oracle.complete

    async def dropping(request: ModelRequest, **more: Any) -> ModelReply:
        reply = await complete(request, **more)
        if reply.finish == "abort":
            raise UpstreamError("the connection ended", cause="upstream.cut")
        return reply

    oracle.complete = dropping
    call = await started(upstream, oracle, request, on_delta=on_delta)
    await upstream.pause("abort")
    await upstream.resume(2)
    reply = await call
    on_delta.begins(reply)
    same(reply, await Oracle(ending=10**9).complete(request, timeout=60))


async def test_queued_kept_call_is_sampled_by_the_new_weights():
    oracle = Oracle(ending=10**9, slots=1)
    upstream = PausableUpstream(oracle)
    first = await started(upstream, oracle, make_request(5, sampling={"max_tokens": 20}), on_delta=DeltaLog())
    waits: list[bool] = []
    second = asyncio.create_task(
        upstream.complete(make_request(6, sampling={"max_tokens": 3}), timeout=60, on_wait=waits.append)
    )
    while waits != [True]:
        await asyncio.sleep(0)
    await upstream.pause("keep")
    await upstream.resume(2)
    await first
    assert (by_token(await second), upstream.mixed_replies) == ([2, 2, 2], 0)
    assert waits == [True, False]


# ---------------------------------------------------------------------------- what cannot be continued from tokens


@pytest.mark.parametrize("can", [("abort",), ()])
@pytest.mark.parametrize("extra", [None, {"guided_json": {}}])
async def test_call_that_cannot_be_continued_restarts_if_nothing_was_delivered(can, extra):
    oracle = Oracle(can=can, ending=10**9)
    upstream = PausableUpstream(oracle)
    sampling = Sampling(max_tokens=30, extra=extra or {})
    request = (
        make_request(sampling={"max_tokens": 30, "extra": extra})
        if extra
        else msgspec.structs.replace(CHAT, sampling=sampling)
    )
    call = await started(upstream, oracle, request)
    await upstream.pause("abort")
    assert oracle.under_way == 0
    await upstream.resume(2)
    reply = await call
    assert (len(oracle.requests), oracle.requests[1]) == (2, oracle.requests[0])
    assert (reply.version, reply.sampled_tokens) == (2, 30)


async def test_call_that_cannot_be_continued_may_finish_if_something_was_delivered(oracle):
    upstream, on_delta = PausableUpstream(oracle), DeltaLog()
    request = msgspec.structs.replace(CHAT, sampling=Sampling(max_tokens=30))
    call = await started(upstream, oracle, request, on_delta=on_delta)
    other = await started(upstream, oracle, make_request(sampling={"max_tokens": 1_000}), on_delta=DeltaLog())
    await upstream.pause("abort")
    reply = await call
    assert (reply.sampled_tokens, len(oracle.requests), oracle.control_calls) == (30, 2, ["abort"])
    assert not other.done()
    await upstream.resume(2)
    assert (await other).sampled_tokens == 1_000


async def test_call_that_does_not_finish_in_time_fails_with_a_retryable_error(oracle):
    upstream = PausableUpstream(oracle)
    call = await started(upstream, oracle, CHAT, on_delta=DeltaLog())
    await upstream.pause("abort", timeout=0.0)
    with pytest.raises(UpstreamError) as caught:
        await call
    assert (caught.value.code, caught.value.fault) == ("upstream.aborted", "infra")
    assert oracle.under_way == 0


async def test_call_continues_after_an_abort_by_the_engine_itself(oracle):
    upstream, on_delta = PausableUpstream(oracle), DeltaLog()
    request = make_request(sampling={"max_tokens": 40})
    call = await started(upstream, oracle, request, on_delta=on_delta)
    oracle.abort()
    reply = await call
    same(reply, await Oracle(ending=10**9).complete(request, timeout=60))
    assert len(oracle.requests) == 2


async def test_engine_that_aborts_everything_is_abandoned(oracle, monkeypatch):
    monkeypatch.setattr("rookery.upstreams.pause.upstream.MAX_ENGINE_ABORTS", 1)
    upstream = PausableUpstream(oracle)
    complete = oracle.complete

    async def aborted(*args: Any, **more: Any) -> ModelReply:
        return msgspec.structs.replace(await complete(*args, **more), finish="abort", sampled=b"", logprobs=b"")

    oracle.complete = aborted
    with pytest.raises(UpstreamError) as caught:
        await upstream.complete(make_request(sampling={"max_tokens": 2}), timeout=60)
    assert caught.value.code == "upstream.aborted"


# ------------------------------------------------------------------------------------------------------ callers


async def test_new_calls_wait_and_report_it_as_queued(oracle):
    upstream = PausableUpstream(oracle)
    await upstream.pause("abort")
    waits: list[bool] = []
    call = asyncio.create_task(
        upstream.complete(make_request(sampling={"max_tokens": 3}), timeout=60, on_wait=waits.append)
    )
    while not upstream.waiting:
        await asyncio.sleep(0)
    assert (waits, oracle.requests) == ([True], [])
    began = time.monotonic()
    await wait_until(lambda: time.monotonic() > began)
    await upstream.resume(2)
    reply = await call
    assert reply.queued > 0
    assert waits == [True, False]


@pytest.mark.parametrize("mode", ["keep", "abort"])
async def test_on_wait_alternates_for_calls_in_flight(oracle, mode):
    upstream = PausableUpstream(oracle)
    waits: list[bool] = []
    call = await started(upstream, oracle, make_request(sampling={"max_tokens": 30}), on_wait=waits.append)
    await upstream.pause(mode)
    await asyncio.sleep(0)
    assert waits == [True]
    await upstream.resume(2)
    assert (await call).queued > 0
    assert waits == [True, False]


async def test_queued_calls_are_sent_after_the_pause():
    oracle = Oracle(ending=10**9, slots=1)
    upstream = PausableUpstream(oracle)
    waits: list[bool] = []
    first = await started(upstream, oracle, make_request(5, sampling={"max_tokens": 50}))
    second = asyncio.create_task(
        upstream.complete(make_request(6, sampling={"max_tokens": 3}), timeout=60, on_wait=waits.append)
    )
    while waits != [True]:
        await asyncio.sleep(0)
    await upstream.pause("drain")
    assert first.done()
    assert (oracle.under_way, upstream.waiting) == (0, 1)
    await upstream.resume(2)
    reply = await second
    assert (reply.version, by_token(reply)) == (2, [2, 2, 2])
    assert waits[::2] == [True] * (len(waits) // 2)
    assert waits[1::2] == [False] * (len(waits) // 2)


async def test_slow_reader_is_never_interrupted_in_the_middle_of_a_piece(oracle):
    upstream, hold, slow = PausableUpstream(oracle), asyncio.Event(), asyncio.Event()
    cancelled = False

    async def on_delta(_: Delta) -> None:
        nonlocal cancelled
        slow.set()
        try:
            await hold.wait()
        except asyncio.CancelledError:
            cancelled = True
            raise

    request = make_request(sampling={"max_tokens": 10})
    call = asyncio.create_task(upstream.complete(request, timeout=60, on_delta=on_delta))
    await slow.wait()
    await upstream.pause("abort")
    await upstream.resume(2)
    hold.set()
    reply = await call
    assert not cancelled
    same(reply, await Oracle(ending=10**9).complete(request, timeout=60))
    assert by_token(reply) == [1] + [2] * 9


@pytest.mark.parametrize("mode", ["keep", "drain", "abort"])
@pytest.mark.parametrize("when", ["in flight", "waiting", "continued"])
async def test_cancellation_by_the_caller_propagates(oracle, mode, when):
    upstream = PausableUpstream(oracle)
    waits: list[bool] = []
    call = await started(upstream, oracle, make_request(), on_wait=waits.append)
    if when == "waiting":
        pausing = asyncio.create_task(upstream.pause(mode, timeout=0.0))
        await asyncio.sleep(0)
        call.cancel()
        await pausing
    else:
        if when == "continued":
            await upstream.pause("abort")
        call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (upstream.in_flight, upstream.waiting, oracle.under_way) == (0, 0, 0)
    assert waits.count(True) == waits.count(False)
    assert call.cancelled()


async def test_interruption_is_not_a_cancellation_for_the_caller(oracle):
    upstream = PausableUpstream(oracle)

    async def around() -> int:
        async with asyncio.timeout(60):
            await upstream.complete(make_request(sampling={"max_tokens": 30}), timeout=60)
            await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    oracle._can = ()
    reached = oracle.reached(5)
    task = asyncio.create_task(around())
    await reached.wait()
    await upstream.pause("abort")
    await upstream.resume(2)
    assert await task == 0
