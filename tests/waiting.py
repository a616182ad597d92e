"""Wait for conditions instead of times."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

    from rookery import Engine
    from rookery.sandboxes import Command, ExecResult, Sandbox

SECONDS = 60.0
PAUSE_SECONDS = 0.005


async def wait_until(condition: Callable[[], Awaitable[Any] | Any], seconds: float = SECONDS) -> Any:
    """Wait until the condition, a plain or a coroutine function, returns a true value, and return that value.

    Raises `TimeoutError` if that takes longer than `seconds`.
    """
    async with asyncio.timeout(seconds):
        while True:
            found = condition()
            if inspect.isawaitable(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(PAUSE_SECONDS)


def block_until(condition: Callable[[], Any], seconds: float = SECONDS) -> Any:
    """Like `wait_until`, for tests without an event loop."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"not true after {seconds} s")
        time.sleep(PAUSE_SECONDS)
    return found


def advance_clock(monkeypatch: "pytest.MonkeyPatch", seconds: float) -> None:
    """Let the monotonic clock of this process jump forward, and with it the clock of an asyncio event loop.

    Timers that are due then run at the next passes of the event loop.
    """
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + seconds)


async def run_timers() -> None:
    """Let the event loop run all timers that are due and the tasks that they wake."""
    for _ in range(10):
        await asyncio.sleep(0)


async def wait_for_status(
    engine: "Engine", condition: Callable[[dict[str, Any]], object], seconds: float = SECONDS
) -> dict[str, Any]:
    """Wait until the condition holds for the engine's status; return that status."""

    async def status() -> dict[str, Any] | None:
        found = await engine.status()
        return found if condition(found) else None

    found: dict[str, Any] = await wait_until(status, seconds)
    return found


async def repeat_until(sandbox: "Sandbox", command: "Command", *, ok: bool) -> "ExecResult":
    """Repeat a command in a sandbox until it succeeds (with `ok=False`: fails), and return its result."""

    async def attempt() -> "ExecResult | None":
        result = await sandbox.exec(command)
        return result if result.ok is ok else None

    result: ExecResult = await wait_until(attempt)
    return result


async def wait_for_groups(engine: "Engine", count: int, stream: str = "main") -> None:
    """Wait until this many finished groups of a stream wait for the consumer."""
    await wait_for_status(engine, lambda status: status["streams"][stream]["waiting"] >= count)
