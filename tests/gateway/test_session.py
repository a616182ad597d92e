"""A session at the door: budgets, the pause, closing, and a clock that is held while it waits for others."""

import asyncio
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
from rookery.upstreams.protocol import ModelRequest, OnDelta, OnWait, PauseMode, UpstreamInfo

ANSWER = ModelReply(
    message=Message("assistant", "ok"),
    finish="stop",
    prompt=ints([1, 2, 3]),
    sampled=ints([4, 5]),
    prompt_tokens=3,
    sampled_tokens=2,
)


class Upstream:
    """Answers when the test says so."""

    name = "scripted"
    accepts_tokens = True
    accepts_raw_json = True
    version = 0

    def __init__(self, concurrency: int = 100) -> None:
        self.gate = ConcurrencyGate(concurrency)
        self.requests: list[ModelRequest] = []
        self.pending: list[asyncio.Future[ModelReply]] = []
        self.at_once: ModelReply | BaseException | None = ANSWER
        self.cancelled = 0
        self.came = asyncio.Event()

    async def check(self, *, timeout: float = 10.0) -> UpstreamInfo:
        return UpstreamInfo(url="")

    async def freeze(self, mode: PauseMode, *, timeout: float) -> bool:
        return False

    async def thaw(self, *, timeout: float) -> None: ...

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
        self.came.set()
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

    async def close(self) -> None: ...


class Watch:
    """Counts holds and waits, and refuses to go below zero."""

    def __init__(self) -> None:
        self.holds = 0
        self.held = 0
        self.waits: dict[str, int] = {}

    def hold(self) -> None:
        self.holds += 1
        self.held += 1

    def release(self) -> None:
        self.holds -= 1
        assert self.holds >= 0

    def waiting(self, on: str, step: int) -> None:
        self.waits[on] = self.waits.get(on, 0) + step
        assert self.waits[on] >= 0


class Room:
    """A session with everything it needs."""

    def __init__(self, limits: Limits | None = None, concurrency: int = 100, **sampling: Any) -> None:
        self.upstream = Upstream(concurrency)
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
        assert (self.watch.holds, self.watch.waits.get("model", 0), self.pausable.in_flight) == (0, 0, 0)
        assert self.upstream.pending == []
        assert (self.upstream.gate.taken, self.upstream.gate.waiting) == (0, 0)


@pytest.fixture
async def room() -> Room:
    return Room()


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


# ---- recording


async def test_a_call_that_was_answered_is_recorded_once_before_its_answer_reaches_the_caller(room: Room) -> None:
    reply = await room.policy.chat("hello")
    assert isinstance(reply, ModelReply)
    assert room.turns == [reply.turn]
    assert (reply.text, reply.finish, reply.tool_calls) == ("ok", "stop", ())
    assert (reply.turn.prompt, reply.turn.sampled) == (ANSWER.prompt, ANSWER.sampled)
    assert (room.session.turns, room.session.prompt_tokens, room.session.sampled_tokens) == (1, 3, 2)
    assert room.upstream.requests[0].affinity == "0.0.1"
    room.idle()


async def test_tokens_in_are_recorded_as_the_prompt(room: Room) -> None:
    room.upstream.at_once = ModelReply(message=Message("assistant", "x"), finish="stop", sampled=ints([9]))
    reply = await room.policy.complete(ints([7, 8]))
    assert (reply.turn.prompt, reply.turn.sampled) == (ints([7, 8]), ints([9]))


async def test_a_call_that_failed_is_not_recorded_and_holds_nothing(room: Room) -> None:
    room.upstream.at_once = UpstreamError("down")
    with pytest.raises(UpstreamError, match="down"):
        await room.policy.chat("hello")
    assert room.turns == []
    assert room.session.turns == 0
    room.idle()


async def test_a_role_nobody_configured_is_an_error_in_words(room: Room) -> None:
    with pytest.raises(UsageError, match=r"no model serves the role 'critic' \(configured: judge, policy\)"):
        room.session.model("critic")


# ---- budgets


async def test_spent_turns_truncate_and_say_so_whatever_the_environment_does_with_it() -> None:
    room = Room(Limits(turns=2))
    for _ in range(2):
        await room.policy.chat("more")
    for _ in range(3):
        with pytest.raises(Truncation) as stop:
            await room.policy.chat("more")
        assert stop.value.reason == "turns"
    assert room.session.truncated == "turns"
    assert len(room.upstream.requests) == len(room.turns) == 2
    room.idle()


async def test_calls_made_side_by_side_do_not_pass_the_turns() -> None:
    room = Room(Limits(turns=3))
    room.upstream.at_once = None
    calls = [asyncio.create_task(room.policy.chat("x")) for _ in range(5)]
    await settle()
    assert len(room.upstream.pending) == 3
    for answer in list(room.upstream.pending):
        answer.set_result(ANSWER)
    done = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(each, ModelReply) for each in done].count(True) == 3
    assert [isinstance(each, Truncation) for each in done].count(True) == 2
    assert (room.session.turns, room.session.truncated) == (3, "turns")
    room.idle()


async def test_a_call_that_failed_gives_its_turn_back() -> None:
    room = Room(Limits(turns=1))
    room.upstream.at_once = UpstreamError("down")
    with pytest.raises(UpstreamError):
        await room.policy.chat("x")
    room.upstream.at_once = ANSWER
    await room.policy.chat("x")
    assert room.session.truncated is None


@given(st.integers(1, 12), st.none() | st.integers(1, 8), st.integers(1, 5))
def test_the_token_budget_shortens_the_last_answer_and_then_truncates(
    budget: int, wanted: int | None, each: int
) -> None:
    async def play() -> None:
        room = Room(Limits(tokens=budget), max_tokens=wanted)
        spent = 0
        while spent < budget:
            allowed = min(budget - spent, wanted or budget)
            n = min(each, allowed)
            room.upstream.at_once = ModelReply(message=Message("assistant", "x"), finish="stop", sampled_tokens=n)
            await room.policy.chat("more")
            assert room.upstream.requests[-1].sampling.max_tokens == allowed
            spent += n
        with pytest.raises(Truncation) as stop:
            await room.policy.chat("more")
        assert (stop.value.reason, room.session.truncated) == ("tokens", "tokens")
        assert room.session.sampled_tokens == budget

    asyncio.run(play())


async def test_a_sequence_over_the_context_is_recorded_and_truncates() -> None:
    room = Room(Limits(context=4))
    with pytest.raises(Truncation) as stop:
        await room.policy.chat("long")
    assert (stop.value.reason, room.session.truncated, len(room.turns)) == ("context", "context", 1)
    room.idle()


async def test_a_context_the_server_refuses_truncates_the_policy(room: Room) -> None:
    room.upstream.at_once = Truncation("context")
    with pytest.raises(Truncation):
        await room.policy.chat("long")
    assert room.session.truncated == "context"
    room.idle()


async def test_another_roles_calls_spend_none_of_the_policys_budget_and_truncate_nothing() -> None:
    room = Room(Limits(turns=1, tokens=2, context=4))
    judge = room.session.model("judge")
    for _ in range(3):
        await judge.chat("how was it")
    assert room.session.others == {"judge": 6}
    room.upstream.at_once = Truncation("context")
    with pytest.raises(UpstreamError, match="judge") as caught:
        await judge.chat("far too long")
    assert caught.value.code == "upstream.rejected"
    assert (room.session.turns, room.session.truncated) == (0, None)
    room.upstream.at_once = ModelReply(message=Message("assistant", "x"), finish="stop", sampled_tokens=2)
    await room.policy.chat("hello")
    assert [turn.role for turn in room.turns] == ["judge"] * 3 + ["policy"]


async def test_sampling_of_the_call_goes_over_the_roles() -> None:
    room = Room(temperature=1.0, top_p=0.5)
    await room.policy.chat("x", sampling=Sampling(temperature=0.0))
    assert room.upstream.requests[0].sampling == Sampling(temperature=0.0, top_p=0.5)


# ---- pause and close


async def test_a_paused_upstream_starts_no_call_and_holds_the_clock(room: Room) -> None:
    await room.pausable.pause("drain")
    call = asyncio.create_task(room.policy.chat("x"))
    await settle()
    assert (room.upstream.requests, room.watch.holds, room.watch.waits) == ([], 1, {"model": 1})
    await room.pausable.resume()
    await call
    assert call.result().turn.queued > 0
    room.idle()


async def test_waiting_for_the_concurrency_gate_is_not_the_attempts_time() -> None:
    room = Room(concurrency=1)
    room.upstream.at_once = None
    first, second = (asyncio.create_task(room.policy.chat(text)) for text in "ab")
    await settle()
    assert (room.watch.holds, room.watch.waits) == (1, {"model": 2})
    room.upstream.pending[0].set_result(ANSWER)
    await first
    await settle()
    assert (room.watch.holds, len(room.upstream.pending)) == (0, 1)
    room.upstream.pending[0].set_result(ANSWER)
    await second
    room.idle()


async def test_a_closed_session_starts_no_call_and_leaves_none_running() -> None:
    room = Room(concurrency=2)
    room.upstream.at_once = None
    calls = [asyncio.create_task(room.policy.chat("x")) for _ in range(4)]
    await settle()
    room.session.close()
    done = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in done)
    assert room.upstream.cancelled == 2
    with pytest.raises(RookeryError, match=r"attempt 0\.0\.1 has ended"):
        await room.policy.chat("late")
    assert room.turns == []
    room.idle()


async def test_closing_from_inside_a_stage_does_not_cancel_the_stage(room: Room) -> None:
    await room.policy.chat("x")
    room.session.close()
    await asyncio.sleep(0)


# ---- every path, by random interleavings

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
    async def play() -> None:
        room = Room(Limits(turns=turns), concurrency=concurrency)
        up = room.upstream
        up.at_once = None
        calls: list[asyncio.Task[ModelReply]] = []
        answered = 0
        for kind, which in sequence:
            match kind:
                case "call" | "judge":
                    model = room.session.model("policy" if kind == "call" else "judge")
                    calls.append(asyncio.create_task(model.chat("x")))
                case "answer" | "fail":
                    waiting = [answer for answer in up.pending if not answer.done()]
                    if waiting and kind == "answer":
                        waiting[which % len(waiting)].set_result(ANSWER)
                    elif waiting:
                        waiting[which % len(waiting)].set_exception(UpstreamError("down"))
                case "cancel" if calls:
                    calls[which % len(calls)].cancel()
            await settle() if kind == "tick" else await asyncio.sleep(0)
            assert len(up.pending) <= concurrency
        if close:
            room.session.close()
        while not all(call.done() for call in calls):
            for answer in up.pending:
                if not answer.done():
                    answer.set_result(ANSWER)
            await asyncio.sleep(0)
        for call in calls:
            if not call.cancelled():
                error = call.exception()
                assert error is None or isinstance(error, UpstreamError | Truncation | RookeryError)
                answered += error is None
        assert len(room.turns) == answered
        assert len({turn.index for turn in room.turns}) == answered
        policy = sum(turn.role == "policy" for turn in room.turns)
        assert room.session.turns == policy <= (turns or policy)
        room.idle()

    asyncio.run(play())
