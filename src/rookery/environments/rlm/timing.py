"""Deadlines by the attempt's clock, which stops during pauses and in the upstream's queue."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from rookery.core import RookeryError
from rookery.environments.context import Context
from rookery.environments.rlm.budget import CallFailed

T = TypeVar("T")
UNWIND = 5.0


async def within(ctx: Context, seconds: float, work: Coroutine[Any, Any, T], what: str) -> T:
    """Await `work`; cancel it and raise `CallFailed` if it takes longer than `seconds`."""
    task = asyncio.ensure_future(work)
    try:
        async with ctx.within(seconds):
            await asyncio.wait({task})
    except TimeoutError:
        pass  # the deadline passed; an exception of `work` stays in the task
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=UNWIND)
    if not task.done():
        raise RookeryError(f"{what} kept running after it was cancelled", cause="bug.uncancellable")
    if task.cancelled():
        raise CallFailed(f"{what} took longer than its {seconds:.3g} s")
    return task.result()
