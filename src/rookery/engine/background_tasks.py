"""Track the asyncio tasks of an object of Rookery or of an attempt, so that they can be cancelled with it.

This module runs in the supervisor, in runners and in the agents of a cluster's nodes. A task that an attempt
starts is cancelled when the attempt ends, unless it was started with `start_detached`.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any, TypeVar

from rookery.core.lifetimes import detached_context

T = TypeVar("T")


class BackgroundTasks:
    """The background tasks of one object. `on_error` is called with the exception of a task that fails."""

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """The number of tasks that have not ended."""
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)

    async def wait(self, timeout: float) -> None:
        """Wait until all tasks have ended, for up to `timeout` seconds."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout)

    async def cancel(self) -> None:
        """Cancel all tasks and wait until they have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class AttemptTasks:
    """The asyncio tasks that one attempt started.

    The attempt is found through a context variable. A task inherits the variable from the task that starts it, so
    indirectly started tasks are included.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def track(self) -> None:
        """Record, from now on, every task that is started from the current task, directly or indirectly."""
        _current.set(self)

    def untrack(self) -> None:
        """Stop adding tasks that are started from the current task.

        This removes the reference from the context, so that no reference cycle delays the freeing of memory.
        """
        _current.set(None)

    def add(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def cancel_all(self, timeout: float) -> set["asyncio.Task[Any]"]:
        """Cancel the tasks that are still running; return those that have not ended after `timeout` seconds."""
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
    """Create an asyncio task and add it to the tasks of the attempt that starts it, if there is one.

    This is the task factory of a runner's event loop.
    """
    task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, **options)
    context = options.get("context")
    tasks = _current.get() if context is None else context.get(_current)
    if tasks is not None:
        tasks.add(task)
    return task
