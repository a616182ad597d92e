"""Wait for conditions instead of times."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rookery import Engine


async def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until the condition holds. Raises `TimeoutError` if that takes longer than `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def wait_for_status(
    engine: "Engine", condition: Callable[[dict[str, Any]], object], seconds: float = 60.0
) -> dict[str, Any]:
    """Wait until the condition holds for the engine's status; return that status."""
    async with asyncio.timeout(seconds):
        while not condition(status := await engine.status()):
            await asyncio.sleep(0.005)
    return status


async def wait_for_groups(engine: "Engine", count: int, stream: str = "main") -> None:
    """Wait until this many finished groups of a stream wait for the consumer."""
    await wait_for_status(engine, lambda status: status["streams"][stream]["waiting"] >= count)
