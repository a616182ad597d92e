"""Blocking user functions, off the event loop.

Promises:
- a function that never returns holds its own thread and nothing else: no pool's place, no loop, no exit;
- whatever the function raises comes back as a value, `SystemExit` and `StopIteration` included;
- threads that were given up and still run are counted, so that their process can be replaced.
"""

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any

_abandoned: set[threading.Thread] = set()


def stuck_threads() -> int:
    """How many threads of this process were given up at a deadline and are still running."""
    _abandoned.intersection_update([thread for thread in _abandoned if thread.is_alive()])
    return len(_abandoned)


async def in_thread(name: str, function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """What `function` returned, or what it raised. Cancelled, it leaves the thread behind and counts it."""
    # A thread of its own: in a pool, a few functions that hang would take every place, and the pool is
    # joined at exit.
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not ended.done():
            ended.set_result((value, error))

    def work() -> None:
        value: Any = None
        failure: BaseException | None = None
        try:
            value = context.run(function)
        except BaseException as error:  # noqa: BLE001  (handed to the caller; here it would kill the thread)
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop closed meanwhile: nobody waits any more
            loop.call_soon_threadsafe(settle, value, failure)

    context = contextvars.copy_context()
    thread = threading.Thread(target=work, name=f"rookery-{name}", daemon=True)
    thread.start()
    try:
        return await ended
    except asyncio.CancelledError:
        _abandoned.add(thread)
        raise
