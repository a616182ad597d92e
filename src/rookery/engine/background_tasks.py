"""Cancel the tasks that an environment started and forgot. Runs in runner processes.

A task that an attempt starts ends with the attempt at the latest, unless it was started with `start_detached`.
"""

import asyncio
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import Any, TypeVar

from rookery.core.lifetimes import detached_context

T = TypeVar("T")


class AttemptTasks:
    """The tasks of one attempt. Tasks inherit their context, so tasks that they start are found as well."""

    __slots__ = ("_tasks",)

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def track(self) -> None:
        """Count the tasks that are started in this context from now on."""
        _current.set(self)

    def untrack(self) -> None:
        """Remove the reference in the context: without a cycle, everything is freed at once."""
        _current.set(None)

    def add(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def cancel_all(self, timeout: float) -> set["asyncio.Task[Any]"]:
        """Cancel the remaining tasks; return those that have not ended after `timeout` seconds."""
        left = self._tasks - {asyncio.current_task()}
        if not left:
            return set()
        for task in left:
            task.cancel()
        _, stuck = await asyncio.wait(left, timeout=timeout)
        return stuck


def start_detached(work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    """Start a task that is not cancelled when the attempt ends."""
    return asyncio.get_running_loop().create_task(work, context=detached_context())


_current: ContextVar[AttemptTasks | None] = ContextVar("rookery_attempt", default=None)


def task_factory(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> "asyncio.Task[Any]":
    """Create a task and add it to the attempt of its context.

    Used as the task factory of a runner's event loop.
    """
    task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, **options)
    context = options.get("context")
    tasks = _current.get() if context is None else context.get(_current)
    if tasks is not None:
        tasks.add(task)
    return task
