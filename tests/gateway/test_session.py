"""`Session` enforces budgets, pauses and closing, and holds the clock while a call waits for others."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from rookery.core import Limits, Message, RookeryError, Sampling, Truncation, Turn, UpstreamError, UsageError, ints
from rookery.gateway import Model, ModelReply, ModelRole, Session
from rookery.trajectories import Recorder
from rookery.upstreams.concurrency_gate import ConcurrencyGate
from rookery.upstreams.pause import PausableUpstream
from rookery.upstreams.protocol import ModelRequest, OnDelta, OnWait
from tests.gateway.scripted_upstream import StubUpstream

ANSWER = ModelReply(
    message=Message("assistant", "ok"),
    finish="stop",
    prompt=ints([1, 2, 3]),
    sampled=ints([4, 5]),
    prompt_tokens=3,
    sampled_tokens=2,
)


class FutureUpstream(StubUpstream):
    """Upstream that replies at once or when the test resolves the pending future."""

    def __init__(self, concurrency: int = 100) -> None:
        self.gate = ConcurrencyGate(concurrency)
        self.requests: list[ModelRequest] = []
        self.pending: list[asyncio.Future[ModelReply]] = []
        self.at_once: ModelReply | BaseException | None = ANSWER
        self.cancelled = 0
        self.received = asyncio.Event()

    async def complete(
        self,
        request: ModelRequest,
        *,
        timeout: float,
        on_delta: OnDelta | None = None,
        on_wait: OnWait | None = None,
    ) -> ModelReply:
        queued = await self.gate.acquire(on_wait)
        try:
            return structs.replace(await self._answer(request), queued=queued)
        finally:
            self.gate.release()

    async def _answer(self, request: ModelRequest) -> ModelReply:
        self.requests.append(request)
        self.received.set()
        if isinstance(self.at_once, BaseException):
            raise self.at_once
        if self.at_once is not None:
            return self.at_once
        answer: asyncio.Future[ModelReply] = asyncio.get_running_loop().create_future()
        self.pending.append(answer)
        try:
            return await answer
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.pending.remove(answer)


class Watch:
    """Watch that counts holds and waits, and asserts that they never go below zero."""

    def __init__(self) -> None:
        self.holds = 0
        self.total_holds = 0
        self.idle_times = 0
        self.waits: dict[str, int] = {}

    def stop_clock(self) -> None:
        self.holds += 1
        self.total_holds += 1

    def restart_clock(self) -> None:
        self.holds -= 1
        assert self.holds >= 0

    def count_wait(self, resource: str, change: int) -> None:
        self.waits[resource] = self.waits.get(resource, 0) + change
        assert self.waits[resource] >= 0

    def on_calls_ended(self) -> None:
        self.idle_times += 1


class SessionFixture:
    """A session with its upstream, watch and recorded turns."""

    def __init__(self, limits: Limits | None = None, concurrency: int = 100, **sampling: Any) -> None:
        self.upstream = FutureUpstream(concurrency)
        self.pausable = PausableUpstream(self.upstream)
        self.watch = Watch()
        self.turns: list[Turn] = []
        self.session = Session(
            "0.0.1",
            {
                name: ModelRole(
                    name=name,
                    upstream=self.pausable,
                    model="m",
                    sampling=Sampling(**sampling),
                )
                for name in ("policy", "judge")
            },
            limits or Limits(),
            Recorder("0.0.1", self.turns.append),
            self.watch,
        )

    @property
    def policy(self) -> Model:
        return self.session.model("policy")

    def idle(self) -> None:
        """Check that no call is in flight, no clock is stopped and no slot of the gate is taken."""
        assert (self.watch.holds, self.session.in_flight, self.pausable.in_flight) == (0, 0, 0)
        assert self.upstream.pending == []
        assert (self.upstream.gate.in_use, self.upstream.gate.waiting) == (0, 0)


@pytest.fixture
async def setup() -> SessionFixture:
    return SessionFixture()


async def run_pending_tasks() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


# ---- recording


async def test_reply_is_recorded_once_before_it_reaches_the_caller(
    setup: SessionFixture,
) -> None:
    reply = await setup.policy.chat("hello")
    assert isinstance(reply, ModelReply)
    assert setup.turns == [reply.turn]
    assert (reply.text, reply.finish, reply.tool_calls) == ("ok", "stop", ())
    assert (reply.turn.prompt, reply.turn.sampled) == (ANSWER.prompt, ANSWER.sampled)
    assert (setup.session.turns, setup.session.prompt_tokens, setup.session.sampled_tokens) == (1, 3, 2)
    assert setup.upstream.requests[0].affinity == "0.0.1"
    setup.idle()


async def test_token_prompt_is_recorded_as_the_prompt(setup: SessionFixture) -> None:
    setup.upstream.at_once = ModelReply(message=Message("assistant", "x"), finish="stop", sampled=ints([9]))
    reply = await setup.policy.complete(ints([7, 8]))
    assert (reply.turn.prompt, reply.turn.sampled) == (ints([7, 8]), ints([9]))


async def test_failed_call_is_not_recorded_and_releases_everything(setup: SessionFixture) -> None:
    setup.upstream.at_once = UpstreamError("down")
    with pytest.raises(UpstreamError) as caught:
        await setup.policy.chat("hello")
    assert caught.value is setup.upstream.at_once
    assert setup.turns == []
    assert setup.session.turns == 0
    setup.idle()


async def test_unconfigured_role_raises_usage_error(setup: SessionFixture) -> None:
    with pytest.raises(UsageError, match=r"critic.*judge, policy"):
        setup.session.model("critic")


# ---- budgets


async def test_exhausted_turns_truncate_every_later_call() -> None:
    setup = SessionFixture(Limits(turns=2))
    for _ in range(2):
        await setup.policy.chat("more")
    for _ in range(3):
        with pytest.raises(Truncation) as stop:
            await setup.policy.chat("more")
        assert stop.value.reason == "turns"
    assert setup.session.truncated == "turns"
    assert len(setup.upstream.requests) == len(setup.turns) == 2
    setup.idle()


async def test_concurrent_calls_do_not_exceed_the_turn_limit() -> None:
    setup = SessionFixture(Limits(turns=3))
    setup.upstream.at_once = None
    calls = [asyncio.create_task(setup.policy.chat("x")) for _ in range(5)]
    await run_pending_tasks()
    assert len(setup.upstream.pending) == 3
    for answer in list(setup.upstream.pending):
        answer.set_result(ANSWER)
    done = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(each, ModelReply) for each in done].count(True) == 3
    assert [isinstance(each, Truncation) for each in done].count(True) == 2
    assert (setup.session.turns, setup.session.truncated) == (3, "turns")
    setup.idle()


async def test_failed_call_does_not_use_up_a_turn() -> None:
    setup = SessionFixture(Limits(turns=1))
    setup.upstream.at_once = UpstreamError("down")
    with pytest.raises(UpstreamError):
        await setup.policy.chat("x")
    setup.upstream.at_once = ANSWER
    await setup.policy.chat("x")
    assert setup.session.truncated is None


@given(st.integers(1, 12), st.none() | st.integers(1, 8), st.integers(1, 5))
def test_token_budget_shortens_the_last_reply_and_then_truncates(
    budget: int, wanted: int | None, each: int
) -> None:
    async def run() -> None:
        setup = SessionFixture(Limits(tokens=budget), max_tokens=wanted)
        spent = 0
        while spent < budget:
            allowed = min(budget - spent, wanted or budget)
            n = min(each, allowed)
            setup.upstream.at_once = ModelReply(message=Message("assistant", "x"), finish="stop", sampled_tokens=n)
            await setup.policy.chat("more")
            assert setup.upstream.requests[-1].sampling.max_tokens == allowed
            spent += n
        with pytest.raises(Truncation) as stop:
            await setup.policy.chat("more")
        assert (stop.value.reason, setup.session.truncated) == ("tokens", "tokens")
        assert setup.session.sampled_tokens == budget

    asyncio.run(run())


async def test_sequence_over_the_context_is_recorded_and_truncates() -> None:
    setup = SessionFixture(Limits(context=4))
    with pytest.raises(Truncation) as stop:
        await setup.policy.chat("long")
    assert (stop.value.reason, setup.session.truncated, len(setup.turns)) == ("context", "context", 1)
    setup.idle()


async def test_context_error_of_the_upstream_truncates_the_policy(setup: SessionFixture) -> None:
    setup.upstream.at_once = Truncation("context")
    with pytest.raises(Truncation):
        await setup.policy.chat("long")
    assert setup.session.truncated == "context"
    setup.idle()


async def test_other_roles_use_no_policy_budget_and_do_not_truncate() -> None:
    setup = SessionFixture(Limits(turns=1, tokens=2, context=4))
    judge = setup.session.model("judge")
    for _ in range(3):
        await judge.chat("how was it")
    assert setup.session.sampled_tokens_by_role == {"judge": 6}
    setup.upstream.at_once = Truncation("context")
    with pytest.raises(UpstreamError, match="judge") as caught:
        await judge.chat("far too long")
    assert caught.value.code == "upstream.rejected"
    assert (setup.session.turns, setup.session.truncated) == (0, None)
    setup.upstream.at_once = ModelReply(message=Message("assistant", "x"), finish="stop", sampled_tokens=2)
    await setup.policy.chat("hello")
    assert [turn.role for turn in setup.turns] == ["judge"] * 3 + ["policy"]


async def test_sampling_of_the_call_overrides_the_role() -> None:
    setup = SessionFixture(temperature=1.0, top_p=0.5)
    await setup.policy.chat("x", sampling=Sampling(temperature=0.0))
    assert setup.upstream.requests[0].sampling == Sampling(temperature=0.0, top_p=0.5)


# ---- pause and close


async def test_paused_upstream_starts_no_call_and_holds_the_clock(setup: SessionFixture) -> None:
    await setup.pausable.pause("drain")
    call = asyncio.create_task(setup.policy.chat("x"))
    await run_pending_tasks()
    assert (setup.upstream.requests, setup.watch.holds, setup.session.in_flight) == ([], 1, 1)
    await setup.pausable.resume()
    await call
    assert call.result().turn.queued > 0
    setup.idle()


async def test_waiting_for_the_concurrency_gate_holds_the_clock() -> None:
    setup = SessionFixture(concurrency=1)
    setup.upstream.at_once = None
    first, second = (asyncio.create_task(setup.policy.chat(text)) for text in "ab")
    await run_pending_tasks()
    assert (setup.watch.holds, setup.session.in_flight) == (1, 2)
    setup.upstream.pending[0].set_result(ANSWER)
    await first
    await run_pending_tasks()
    assert (setup.watch.holds, len(setup.upstream.pending)) == (0, 1)
    setup.upstream.pending[0].set_result(ANSWER)
    await second
    setup.idle()


async def test_time_of_overlapping_calls_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    setup, clock = SessionFixture(), SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr("rookery.gateway.session.time", clock)
    setup.upstream.at_once = None
    first = asyncio.create_task(setup.policy.chat("a"))
    await run_pending_tasks()
    clock.monotonic = lambda: 2.0
    second = asyncio.create_task(setup.policy.chat("b"))
    await run_pending_tasks()
    clock.monotonic = lambda: 5.0
    assert setup.session.busy_seconds == 5.0
    setup.upstream.pending[0].set_result(ANSWER)
    await first
    assert setup.watch.idle_times == 0
    clock.monotonic = lambda: 6.0
    setup.upstream.pending[0].set_result(ANSWER)
    await second
    clock.monotonic = lambda: 9.0
    assert (setup.session.busy_seconds, setup.watch.idle_times) == (6.0, 1)
    setup.upstream.at_once = ANSWER
    await setup.session.model("judge").chat("c")
    assert (setup.session.busy_seconds, setup.watch.idle_times) == (6.0, 2)
    setup.idle()


async def test_close_cancels_calls_and_rejects_new_ones() -> None:
    setup = SessionFixture(concurrency=2)
    setup.upstream.at_once = None
    calls = [asyncio.create_task(setup.policy.chat("x")) for _ in range(4)]
    await run_pending_tasks()
    setup.session.close()
    done = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in done)
    assert setup.upstream.cancelled == 2
    with pytest.raises(RookeryError, match=r"0\.0\.1"):
        await setup.policy.chat("late")
    assert setup.turns == []
    setup.idle()


async def test_close_from_inside_a_stage_does_not_cancel_the_stage(setup: SessionFixture) -> None:
    await setup.policy.chat("x")
    setup.session.close()
    await asyncio.sleep(0)


# ---- random interleavings

steps = st.lists(
    st.tuples(
        st.sampled_from(["call", "call", "judge", "answer", "answer", "fail", "cancel", "tick"]),
        st.integers(0, 5),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 3), st.none() | st.integers(1, 4), steps, st.booleans())
@example(1, None, [("call", 0), ("tick", 0), ("call", 0), ("tick", 0), ("cancel", 1), ("answer", 0)], False)
def test_holds_waits_slots_and_records_balance_on_every_path(
    concurrency: int, turns: int | None, sequence: list[tuple[str, int]], close: bool
) -> None:
    async def run() -> None:
        setup = SessionFixture(Limits(turns=turns), concurrency=concurrency)
        upstream = setup.upstream
        upstream.at_once = None
        calls: list[asyncio.Task[ModelReply]] = []
        answered = 0
        for kind, which in sequence:
            match kind:
                case "call" | "judge":
                    model = setup.session.model("policy" if kind == "call" else "judge")
                    calls.append(asyncio.create_task(model.chat("x")))
                case "answer" | "fail":
                    waiting = [answer for answer in upstream.pending if not answer.done()]
                    if waiting and kind == "answer":
                        waiting[which % len(waiting)].set_result(ANSWER)
                    elif waiting:
                        waiting[which % len(waiting)].set_exception(UpstreamError("down"))
                case "cancel" if calls:
                    calls[which % len(calls)].cancel()
            await run_pending_tasks() if kind == "tick" else await asyncio.sleep(0)
            assert len(upstream.pending) <= concurrency
        if close:
            setup.session.close()
        while not all(call.done() for call in calls):
            for answer in upstream.pending:
                if not answer.done():
                    answer.set_result(ANSWER)
            await asyncio.sleep(0)
        for call in calls:
            if not call.cancelled():
                error = call.exception()
                assert error is None or isinstance(error, UpstreamError | Truncation | RookeryError)
                answered += error is None
        assert len(setup.turns) == answered
        assert len({turn.index for turn in setup.turns}) == answered
        policy = sum(turn.role == "policy" for turn in setup.turns)
        assert setup.session.turns == policy <= (turns or policy)
        setup.idle()

    asyncio.run(run())
