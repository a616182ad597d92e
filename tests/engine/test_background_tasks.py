"""Tasks that attempts start end with the attempt, unless they are detached."""

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from rookery.core.lifetimes import detached_context
from rookery.engine.background_tasks import AttemptTasks, task_factory


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_tasks_of_an_attempt_are_cancelled_with_it_and_detached_tasks_are_not(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    loop = new_loop()
    loop.set_task_factory(task_factory)
    never = loop.create_future()
    started: dict[str, asyncio.Task[None]] = {}

    async def hang() -> None:
        await asyncio.shield(never)

    async def begin() -> None:
        """Start tasks as code of an attempt does, some frames down."""
        started["own"] = asyncio.get_running_loop().create_task(hang())
        started["shared"] = asyncio.get_running_loop().create_task(more(), context=detached_context())

    async def more() -> None:
        started["of the shared"] = asyncio.get_running_loop().create_task(hang())
        await hang()

    async def attempt() -> None:
        tasks = AttemptTasks()
        tasks.track()
        await begin()
        while "of the shared" not in started:
            await asyncio.sleep(0)
        assert await tasks.cancel_all(5.0) == set()

    try:
        loop.run_until_complete(attempt())
        assert started["own"].cancelled()
        assert not started["shared"].done()
        assert not started["of the shared"].done()
    finally:
        never.cancel()
        for task in started.values():
            task.cancel()
        loop.run_until_complete(asyncio.wait(started.values()))
        loop.close()
