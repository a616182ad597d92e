"""Places are given in order, never more than the limit, and none is lost."""

import asyncio
from collections import deque

from hypothesis import example, given
from hypothesis import strategies as st

from rookery.upstreams.places import Places

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


class Line(deque[asyncio.Future[None]]):
    """Those who wait, with their numbers. Who is given a place goes on a tick later: the next may be quicker."""

    def __init__(self) -> None:
        super().__init__()
        self.asking = -1
        self.numbers: dict[asyncio.Future[None], int] = {}
        self.given: list[int] = []

    def append(self, turn: asyncio.Future[None]) -> None:
        self.numbers[turn] = self.asking
        super().append(turn)

    def popleft(self) -> asyncio.Future[None]:
        turn = super().popleft()
        if not turn.done():
            self.given.append(self.numbers[turn])
        return turn


@given(st.integers(1, 4), steps)
@example(1, [("take",), ("take",), ("take",), ("take",), ("tick",), ("resize", 3), ("take",)])
def test_places_are_given_in_order_and_none_is_lost(limit, plan):
    async def play() -> None:
        places = Places(limit)
        line = places._waiting = Line()
        tasks: list[asyncio.Task[None]] = []
        leave: list[asyncio.Event] = []

        async def visit(number: int) -> None:
            line.asking = number
            await places.take()
            try:
                if number not in line.numbers.values():
                    line.given.append(number)
                await leave[number].wait()
            finally:
                places.give()

        for step in plan:
            if step[0] == "take":
                leave.append(asyncio.Event())
                tasks.append(asyncio.create_task(visit(len(tasks))))
            elif step[0] == "resize":
                places.resize(step[1])
            elif step[0] == "tick":
                before = places.taken
                await asyncio.sleep(0)
                assert places.taken <= max(places.limit, before)
            elif tasks:
                at = step[1] % len(tasks)
                if step[0] == "give":
                    leave[at].set()
                else:
                    tasks[at].cancel()
        for event in leave:
            event.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (places.taken, places.waiting) == (0, 0)
        assert line.given == sorted(line.given)
        assert len(line.given) == len(set(line.given))
        assert {at for at, task in enumerate(tasks) if not task.cancelled()} <= set(line.given)
        assert places.take_now()

    asyncio.run(play())
