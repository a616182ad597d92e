"""Deadlines by the attempt's own clock, which stands still in a pause and in the upstream's queue."""

import asyncio
import math
from collections.abc import Coroutine
from typing import Any, TypeVar

from rookery.core import RookeryError
from rookery.environments.context import Context
from rookery.environments.rlm.budgets import CallFailed

T = TypeVar("T")
UNWIND = 5.0


async def within(ctx: Context, seconds: float, work: Coroutine[Any, Any, T], what: str) -> T:
    """What `work` returns; `CallFailed` when it takes longer, and then nothing of it is left."""
    loop = asyncio.get_running_loop()
    began, at = ctx.remaining, loop.time()

    def left() -> float:
        return seconds - (began - ctx.remaining if math.isfinite(began) else loop.time() - at)

    task = asyncio.ensure_future(work)
    try:
        while not task.done() and left() > 0:
            await asyncio.wait({task}, timeout=min(max(left(), 0.01), 3600.0))
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=UNWIND)
    if not task.done():
        raise RookeryError(f"{what} went on after it was cancelled", cause="bug.uncancellable")
    if task.cancelled():
        raise CallFailed(f"{what} took longer than its {seconds:.3g} s")
    return task.result()
