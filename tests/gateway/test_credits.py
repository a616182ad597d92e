"""Credits, by random interleavings on a real loop; nothing sleeps, every step is one turn of it."""

import asyncio
from typing import TypeAlias

from hypothesis import example, given, settings
from hypothesis import strategies as st

from rookery.gateway import Credits

Step: TypeAlias = tuple[str, int]
steps: st.SearchStrategy[list[Step]] = st.lists(
    st.tuples(st.sampled_from(["take", "take", "take", "take now", "give", "cancel", "tick"]), st.integers(0, 9))
    | st.tuples(st.just("resize"), st.integers(0, 4)),
    max_size=40,
)


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


class Play:
    """Takers as tasks, with a note of who asked, who holds, who gave up."""

    def __init__(self, limit: int) -> None:
        self.credits = Credits(limit)
        self.limit = limit
        self.tasks: list[asyncio.Task[None]] = []
        self.asked: list[int] = []
        self.got: list[int] = []
        self.held: list[int] = []

    async def _taker(self, number: int) -> None:
        self.asked.append(number)
        await self.credits.take()
        self.got.append(number)
        self.held.append(number)

    def do(self, kind: str, which: int) -> None:
        match kind:
            case "take":
                self.tasks.append(asyncio.create_task(self._taker(len(self.tasks))))
            case "take now":
                if self.credits.take_now():
                    assert len(self.held) < self.limit
                    self.held.append(-1)
            case "give" if self.held:
                self.held.pop(which % len(self.held))
                self.credits.give()
            case "cancel" if self.tasks:
                self.tasks[which % len(self.tasks)].cancel()
            case "resize":
                self.limit = which
                self.credits.resize(which)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 3), steps)
@example(1, [("take", 0), ("tick", 0), ("take", 0), ("tick", 0), ("cancel", 1), ("give", 0), ("tick", 0)])
@example(1, [("take", 0), ("tick", 0), ("take", 0), ("tick", 0), ("give", 0), ("cancel", 1), ("tick", 0)])
@example(2, [("take", 0)] * 4 + [("tick", 0), ("resize", 0), ("give", 0), ("cancel", 3), ("resize", 2)])
def test_credits_are_fair_bounded_and_none_is_lost_by_a_cancellation(limit: int, sequence: list[Step]) -> None:
    async def play() -> None:
        game = Play(limit)
        bound = limit
        for kind, which in sequence:
            game.do(kind, which)
            bound = max(bound, game.limit)  # what was granted before a resize is not taken back
            if kind == "tick":
                await settle()
                waiting = [number for number in game.asked if not game.tasks[number].done()]
                assert not waiting or len(game.held) >= game.limit, "a credit is free and somebody waits"
                assert not waiting or not game.got or min(waiting) > max(game.got), "somebody was overtaken"
            assert len(game.held) <= bound, "more credits than the limit"
            if kind == "tick":
                bound = max(game.limit, len(game.held))
        await settle()
        for task in game.tasks:
            assert not task.done() or task.cancelled() or task.exception() is None
        # Nothing was lost: with room for all, all who still wait get theirs; given back, all is free again.
        game.credits.resize(100)
        await settle()
        assert all(task.done() for task in game.tasks)
        for _ in game.held:
            game.credits.give()
        game.credits.resize(3)
        assert [game.credits.take_now() for _ in range(4)] == [True, True, True, False]

    asyncio.run(play())


async def test_nobody_overtakes_who_waits() -> None:
    pool = Credits(1)
    assert pool.take_now()
    first = asyncio.create_task(pool.take())
    await settle()
    assert not pool.take_now()
    pool.give()
    assert not pool.take_now(), "the credit is the first one's, though it has not woken yet"
    await first


async def test_a_cancelled_waiter_gives_its_place_to_the_next_in_the_same_tick() -> None:
    pool = Credits(1)
    assert pool.take_now()
    first, second = (asyncio.create_task(pool.take()) for _ in range(2))
    await settle()
    pool.give()
    first.cancel()
    await settle()
    assert first.cancelled()
    assert second.done()
