"""Run blocking user functions in threads, off the event loop.

A function that never returns blocks only its own thread: neither the event loop, nor other functions, nor the
exit of the process. A thread cannot be killed, so a function that exceeds its deadline is abandoned. Abandoned
threads are counted, so that a runner process that has many of them can be replaced.
"""

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any

_abandoned: set[threading.Thread] = set()


def count_stuck_threads() -> int:
    """Return how many threads of `run_in_thread` still run although their caller was cancelled."""
    _abandoned.intersection_update([thread for thread in _abandoned if thread.is_alive()])
    return len(_abandoned)


async def run_in_thread(name: str, function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Run `function` in a new thread and return its result and the exception that it raised, if any.

    Every exception of the function is returned as a value, including `SystemExit` and `StopIteration`. If this
    call is cancelled, for example at a deadline, the thread continues and `count_stuck_threads` counts it.
    """
    # Not a thread pool: a few functions that hang would occupy all its threads, and it is joined at exit.
    loop = asyncio.get_running_loop()
    finished: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def resolve(value: Any, error: BaseException | None) -> None:
        if not finished.done():
            finished.set_result((value, error))

    def target() -> None:
        value: Any = None
        failure: BaseException | None = None
        try:
            value = context.run(function)
        except BaseException as error:  # noqa: BLE001  (returned to the caller)
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(resolve, value, failure)

    context = contextvars.copy_context()
    thread = threading.Thread(target=target, name=f"rookery-{name}", daemon=True)
    thread.start()
    try:
        return await finished
    except asyncio.CancelledError:
        _abandoned.add(thread)
        raise
