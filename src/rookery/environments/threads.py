"""Run blocking user functions in threads, off the event loop.

A function that never returns blocks only its own thread: neither the event loop, nor other functions, nor the
exit of the process. Threads abandoned at a deadline are counted, so that the engine can replace a runner that
has many.
"""

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any

_abandoned: set[threading.Thread] = set()


def count_stuck_threads() -> int:
    """Return how many threads of this process were abandoned at a deadline and are still running."""
    _abandoned.intersection_update([thread for thread in _abandoned if thread.is_alive()])
    return len(_abandoned)


async def run_in_thread(name: str, function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Run `function` in a new thread and return its result and the exception that it raised, if any.

    Every exception is returned as a value, including `SystemExit` and `StopIteration`. If this call is cancelled,
    the thread is abandoned and counted.
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
