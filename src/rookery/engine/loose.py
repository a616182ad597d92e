"""Tasks that an environment starts and may forget.

Promise: in a runner, a task started by an attempt ends with that attempt at the latest, unless it began
`apart`.
"""

import asyncio
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import Any, TypeVar

from rookery.core.apart import apart

T = TypeVar("T")


class LooseTasks:
    """Those of one attempt. Contexts are inherited, so what a task of the attempt starts is found too."""

    __slots__ = ("_tasks",)

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def begin(self) -> None:
        """From here on, tasks started in this context are the attempt's."""
        _current.set(self)

    def forget(self) -> None:
        """The context lives as long as its task, which the attempt holds: apart, all of it is freed at once."""
        _current.set(None)

    def add(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end(self, timeout: float) -> set["asyncio.Task[Any]"]:
        """Cancels what is left; returns those that went on all the same."""
        left = self._tasks - {asyncio.current_task()}
        if not left:
            return set()
        for task in left:
            task.cancel()
        _, stuck = await asyncio.wait(left, timeout=timeout)
        return stuck


def begin_apart(work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    """Work for an attempt that must come to its own end, whatever becomes of the attempt."""
    return asyncio.get_running_loop().create_task(work, context=apart())


_current: ContextVar[LooseTasks | None] = ContextVar("rookery_attempt", default=None)


def task_factory(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> "asyncio.Task[Any]":
    """For a loop that is ours."""
    task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, **options)
    context = options.get("context")
    loose = _current.get() if context is None else context.get(_current)
    if loose is not None:
        loose.add(task)
    return task
