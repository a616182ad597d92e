"""Environments whose attempts open gateway sessions. Runner processes import this module."""

import asyncio

import aiohttp

from rookery.core import Limits, SandboxSpec
from rookery.environments import Context, Environment
from rookery.sandboxes.protocol import Command


class Agents(Environment):
    """Runs the task's program in a sandbox that can reach only the gateway."""

    name = "agents"
    sandbox = SandboxSpec(network="model", memory=256 << 20, wall=60.0)
    limits = Limits(turns=8, run=60.0)

    @property
    def needs_gateway(self) -> bool:
        return True

    async def run(self, ctx: Context) -> None:
        sandbox = await ctx.sandbox()
        program = str(ctx.task.data["program"])
        async with ctx.gateway_session(sandbox) as session:
            env = {**session.environment(), "QUESTION": ctx.task.text}
            work = asyncio.create_task(sandbox.exec(Command(argv=("python3", "-I", "-c", program), env=env)))
            spent = asyncio.create_task(session.wait_truncated(0.01))
            try:
                await asyncio.wait({work, spent}, return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    ctx.info["cut"] = spent.result()
                else:
                    ctx.info["said"] = work.result().stdout.decode()
                    ctx.info["wrong"] = work.result().stderr.decode()[-2000:]
            finally:
                for task in (work, spent):
                    task.cancel()
                await asyncio.wait({work, spent})
            record = await session.end()
            ctx.info["turns"] = len(record.turns)
        ctx.info["own"] = (await ctx.policy.chat("and now?")).text if ctx.task.data.get("after") else ""

    async def score(self, ctx: Context) -> float:
        return 1.0 if ctx.info.get("said") else 0.0


class UndeclaredGateway(Agents):
    """Opens a gateway session without declaring `needs_gateway`."""

    @property
    def needs_gateway(self) -> bool:
        return False


class RemoteProgram(Environment):
    """Its program runs elsewhere and gets the public URL and the key of the session."""

    name = "remote-program"

    @property
    def needs_gateway(self) -> bool:
        return True

    async def run(self, ctx: Context) -> None:
        async with ctx.gateway_session() as session, aiohttp.ClientSession() as http:
            ctx.info["url"] = session.url
            body = {"messages": [{"role": "user", "content": ctx.task.text}]}
            headers = {"Authorization": f"Bearer {session.key}"}
            async with http.post(f"{session.url}/chat/completions", json=body, headers=headers) as answer:
                ctx.info["status"] = answer.status
            await session.end()

    async def score(self, ctx: Context) -> float:
        return 1.0 if ctx.info["status"] == 200 else 0.0
