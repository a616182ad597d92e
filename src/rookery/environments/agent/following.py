"""An agent's process, from its start to its end.

Promises:
- it ends by itself, at its deadline, or when a budget at its door is spent; the last two after a grace;
- however this ends, cancelled too, the process and what it started as its own tree are dead;
- a deadline that passes while a model server hangs raises `upstream.hung`;
- a box that was lost under it raises, and is never an exit.
"""

import asyncio
from collections.abc import Callable
from typing import Final, Literal, TypeAlias

import msgspec

from rookery.core import ExecResult, SandboxError
from rookery.gateway.door import Door
from rookery.sandboxes.protocol import Process

Why: TypeAlias = Literal["exited", "deadline", "budget"]
LONG: Final = 86_400.0
KILL_SECONDS: Final = 20.0


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How an agent ended, and why."""

    why: Why
    result: ExecResult
    killed: bool = False
    seconds: float = 0.0


async def follow(process: Process, door: Door, left: Callable[[], float], *, grace: float) -> Ended:
    """Waits for the end. `left`: seconds until its deadline, asked again and again, since that moves in pauses."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    work = asyncio.create_task(process.wait(timeout=LONG), name="agent")
    spent = asyncio.create_task(door.spent(), name="agent's budget")
    try:
        why: Why = "exited"
        while not work.done():
            await asyncio.wait({work, spent}, timeout=min(max(left(), 0.0), LONG), return_when="FIRST_COMPLETED")
            if work.done():
                break
            if spent.done():
                spent.result()
                why = "budget"
                break
            if left() <= 0:
                why = "deadline"
                await door.check_upstream()  # before the kill, which would end the call that shows it
                break
        if why == "budget":
            # It is told so by every call it makes now: one that can end well may.
            await asyncio.wait({work}, timeout=min(grace, max(left(), 0.0)))
        killed = not work.done()
        result = await process.kill() if killed else work.result()
    finally:
        await _stopped(process, work, spent)
    if result.status == "lost":
        raise SandboxError(f"the sandbox was lost under its agent: {result.detail or 'no detail'}")
    return Ended(why=why, result=result, killed=killed, seconds=loop.time() - began)


async def _stopped(process: Process, work: "asyncio.Task[ExecResult]", spent: "asyncio.Task[object]") -> None:
    alive = not work.done()
    for task in (work, spent):
        task.cancel()
    await asyncio.wait({work, spent})
    for task in (work, spent):
        if not task.cancelled():
            task.exception()  # whoever waited has it, or nobody needs it any more
    if alive:
        killing = asyncio.ensure_future(process.kill())
        await asyncio.wait({killing}, timeout=KILL_SECONDS)
        if killing.done() and not killing.cancelled():
            killing.exception()
