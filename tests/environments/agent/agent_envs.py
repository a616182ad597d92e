"""Environments for tests that inspect their sandboxes."""

import asyncio
from typing import Any

from rookery.environments import Context
from rookery.environments.agent import AgentEnvironment
from rookery.environments.sandbox_proxy import SandboxProxy
from rookery.gateway.gateway_session import GatewaySession
from rookery.sandboxes.protocol import Command, Sandbox

SANDBOX_PIDS: list[int] = []
"""PID of process 1 of each sandbox in which an agent was started."""


class Known(AgentEnvironment):
    """Records the PID whose death ends the sandbox."""

    async def _make_command(self, ctx: Context, sandbox: Sandbox, session: GatewaySession) -> Command:
        inner: Any = sandbox._inner if isinstance(sandbox, SandboxProxy) else sandbox
        SANDBOX_PIDS.append(inner._handle.pid)
        return await super()._make_command(ctx, sandbox, session)


class Watching(AgentEnvironment):
    """Waits until the model calls of a program that outlived its agent are refused."""

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
