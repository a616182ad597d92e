"""Sequences that are drawn at once, for one request."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def together(
    work: Iterable[Coroutine[Any, Any, None]], moved: Callable[[object], None] | None = None
) -> AsyncIterator[list[asyncio.Task[None]]]:
    """A task for each; none outlives the block. `moved` hears of their endings."""
    tasks = [asyncio.create_task(one) for one in work]
    if moved is not None:
        for task in tasks:
            task.add_done_callback(moved)
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
