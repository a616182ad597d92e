"""Places are given in order, never more than the limit, and none is lost."""

import asyncio

from hypothesis import given
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


@given(st.integers(1, 4), steps)
def test_places_are_given_in_order_and_none_is_lost(limit, plan):
    async def play() -> None:
        places = Places(limit)
        order: list[int] = []
        tasks: list[asyncio.Task[None]] = []
        leave: list[asyncio.Event] = []

        async def visit(number: int) -> None:
            await places.take()
            try:
                order.append(number)
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
        assert order == sorted(order)
        assert places.take_now()

    asyncio.run(play())
