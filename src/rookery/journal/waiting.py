"""Telling those who wait for a commit, on whichever loop they wait.

Promises:
- one wake-up of a loop per batch, however many wait there;
- a closed loop, a cancelled waiter or a listener that raises disturbs nobody else.
"""

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from rookery.core import JournalError

Listener: TypeAlias = Callable[[JournalError | None], None]


def again(error: JournalError) -> JournalError:
    """A fresh exception: one object raised at several waiters would mix their tracebacks."""
    fresh = JournalError(str(error))
    fresh.__cause__ = error.__cause__
    return fresh


def settle(future: "asyncio.Future[None]", error: JournalError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(again(error))


def tell(calls: list[tuple[asyncio.AbstractEventLoop | None, Listener]], error: JournalError | None) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[Listener]] = {}
    for loop, fn in calls:
        if loop is None:
            fn(error)
        else:
            by_loop.setdefault(loop, []).append(fn)
    for loop, fns in by_loop.items():
        try:
            loop.call_soon_threadsafe(_call_all, loop, fns, error)
        except RuntimeError:
            continue  # the loop is closed: nobody is waiting there any more


def _call_all(loop: asyncio.AbstractEventLoop, fns: list[Listener], error: JournalError | None) -> None:
    for fn in fns:
        loop.call_soon(fn, error)  # each its own call: one that raises does not silence the others
