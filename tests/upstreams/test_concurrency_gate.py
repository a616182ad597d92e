"""Slots of a concurrency gate are granted in order, never more than the limit, and none is lost."""

import asyncio
from collections import deque
from typing import TypeAlias

from hypothesis import example, given, settings
from hypothesis import strategies as st

from rookery.upstreams.concurrency_gate import ConcurrencyGate

steps = st.lists(
    st.one_of(
        st.just(("take",)),
        st.tuples(st.just("give"), st.integers(0, 20)),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
        st.tuples(st.just("resize"), st.integers(1, 5)),
        st.just(("tick",)),
    ),
    max_size=40,
)


class RecordedWaiters(deque[asyncio.Future[None]]):
    """Queue of waiters that records the order of grants. A granted task resumes later, maybe after a newer one."""

    def __init__(self) -> None:
        super().__init__()
        self.asking = -1
        self.numbers: dict[asyncio.Future[None], int] = {}
        self.granted: list[int] = []

    def append(self, waiter: asyncio.Future[None]) -> None:
        self.numbers[waiter] = self.asking
        super().append(waiter)

    def popleft(self) -> asyncio.Future[None]:
        waiter = super().popleft()
        if not waiter.done():
            self.granted.append(self.numbers[waiter])
        return waiter


@given(st.integers(1, 4), steps)
@example(1, [("take",), ("take",), ("take",), ("take",), ("tick",), ("resize", 3), ("take",)])
def test_slots_are_granted_in_order_and_none_is_lost(limit, plan):
    async def play() -> None:
        gate = ConcurrencyGate(limit)
        waiters = gate._waiters = RecordedWaiters()
        tasks: list[asyncio.Task[None]] = []
        leave: list[asyncio.Event] = []

        async def visit(number: int) -> None:
            waiters.asking = number
            await gate.acquire()
            try:
                if number not in waiters.numbers.values():
                    waiters.granted.append(number)
                await leave[number].wait()
            finally:
                gate.release()

        for step in plan:
            if step[0] == "take":
                leave.append(asyncio.Event())
                tasks.append(asyncio.create_task(visit(len(tasks))))
            elif step[0] == "resize":
                gate.resize(step[1])
            elif step[0] == "tick":
                before = gate.in_use
                await asyncio.sleep(0)
                assert gate.in_use <= max(gate.limit, before)
            elif tasks:
                at = step[1] % len(tasks)
                if step[0] == "give":
                    leave[at].set()
                else:
                    tasks[at].cancel()
        for event in leave:
            event.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (gate.in_use, gate.waiting) == (0, 0)
        assert waiters.granted == sorted(waiters.granted)
        assert len(waiters.granted) == len(set(waiters.granted))
        assert {at for at, task in enumerate(tasks) if not task.cancelled()} <= set(waiters.granted)
        assert gate.acquire_nowait()

    asyncio.run(play())


# ---- random interleavings, with slots that are taken without waiting

Step: TypeAlias = tuple[str, int]
random_steps: st.SearchStrategy[list[Step]] = st.lists(
    st.tuples(st.sampled_from(["take", "take", "take", "take now", "give", "cancel", "tick"]), st.integers(0, 9))
    | st.tuples(st.just("resize"), st.integers(0, 4)),
    max_size=40,
)


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


class Play:
    """Tasks that acquire slots, with records of who requested, got and holds one."""

    def __init__(self, limit: int) -> None:
        self.gate = ConcurrencyGate(limit)
        self.limit = limit
        self.tasks: list[asyncio.Task[None]] = []
        self.requested: list[int] = []
        self.got: list[int] = []
        self.holders: list[int] = []

    async def _taker(self, number: int) -> None:
        self.requested.append(number)
        await self.gate.acquire()
        self.got.append(number)
        self.holders.append(number)

    def do(self, kind: str, which: int) -> None:
        match kind:
            case "take":
                self.tasks.append(asyncio.create_task(self._taker(len(self.tasks))))
            case "take now":
                if self.gate.acquire_nowait():
                    assert len(self.holders) < self.limit
                    self.holders.append(-1)
            case "give" if self.holders:
                self.holders.pop(which % len(self.holders))
                self.gate.release()
            case "cancel" if self.tasks:
                self.tasks[which % len(self.tasks)].cancel()
            case "resize":
                self.limit = which
                self.gate.resize(which)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 3), random_steps)
@example(1, [("take", 0), ("tick", 0), ("take", 0), ("tick", 0), ("cancel", 1), ("give", 0), ("tick", 0)])
@example(1, [("take", 0), ("tick", 0), ("take", 0), ("tick", 0), ("give", 0), ("cancel", 1), ("tick", 0)])
@example(2, [("take", 0)] * 4 + [("tick", 0), ("resize", 0), ("give", 0), ("cancel", 3), ("resize", 2)])
def test_slots_are_fair_bounded_and_none_is_lost_by_a_cancellation(limit: int, sequence: list[Step]) -> None:
    async def play() -> None:
        game = Play(limit)
        bound = limit
        for kind, which in sequence:
            game.do(kind, which)
            bound = max(bound, game.limit)  # slots that were granted before a resize stay granted
            if kind == "tick":
                await settle()
                waiting = [number for number in game.requested if not game.tasks[number].done()]
                assert not waiting or len(game.holders) >= game.limit, "a slot is free although a task waits"
                assert not waiting or not game.got or min(waiting) > max(game.got), "a task overtook another"
            assert len(game.holders) <= bound, "more slots than the limit"
            if kind == "tick":
                bound = max(game.limit, len(game.holders))
        await settle()
        for task in game.tasks:
            assert not task.done() or task.cancelled() or task.exception() is None
        # Nothing was lost: with enough slots every waiter gets one, and after the releases all are free.
        game.gate.resize(100)
        await settle()
        assert all(task.done() for task in game.tasks)
        for _ in game.holders:
            game.gate.release()
        game.gate.resize(3)
        assert [game.gate.acquire_nowait() for _ in range(4)] == [True, True, True, False]

    asyncio.run(play())


async def test_new_call_does_not_overtake_waiting_calls() -> None:
    pool = ConcurrencyGate(1)
    assert pool.acquire_nowait()
    first = asyncio.create_task(pool.acquire())
    await settle()
    assert not pool.acquire_nowait()
    pool.release()
    assert not pool.acquire_nowait(), "the slot belongs to the first waiter, although it has not run yet"
    await first


async def test_cancelled_waiter_passes_its_slot_on_in_the_same_iteration() -> None:
    pool = ConcurrencyGate(1)
    assert pool.acquire_nowait()
    first, second = (asyncio.create_task(pool.acquire()) for _ in range(2))
    await settle()
    pool.release()
    first.cancel()
    await settle()
    assert first.cancelled()
    assert second.done()
