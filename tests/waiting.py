"""Wait for conditions instead of times."""

import asyncio
from collections.abc import Callable


async def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until the condition holds. Raises `TimeoutError` if that takes longer than `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
