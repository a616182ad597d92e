"""Environments of these tests that look into their boxes."""

import asyncio
from typing import Any

from rookery.environments import Context
from rookery.environments.agent import AgentEnvironment
from rookery.environments.watched import WatchedSandbox
from rookery.gateway.door import Door
from rookery.sandboxes.protocol import Command, Sandbox

BOXES: list[int] = []
"""Pids of the first processes of boxes whose agents were started."""


class Known(AgentEnvironment):
    """Tells the pid that a box dies with."""

    async def _command(self, ctx: Context, box: Sandbox, door: Door) -> Command:
        inner: Any = box._inner if isinstance(box, WatchedSandbox) else box
        BOXES.append(inner._given.pid)
        return await super()._command(ctx, box, door)


class Watching(AgentEnvironment):
    """Scores what a program that outlived its agent was answered, once it was refused."""

    async def score(self, ctx: Context) -> float:
        box = await ctx.sandbox()
        async with asyncio.timeout(20):
            while True:
                said = (await box.exec(Command(argv=("cat", "/work/answers")))).stdout.decode().split()
                if said and said[-1] != "200":
                    break
                await asyncio.sleep(0.02)
        ctx.info["answers"] = said
        return 1.0
