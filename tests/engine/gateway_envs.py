"""Environments whose attempts open doors, as runners load them."""

import asyncio

import aiohttp

from rookery.core import Limits, SandboxSpec
from rookery.environments import Context, Environment
from rookery.sandboxes.protocol import Command


class Agents(Environment):
    """Starts the task's program in a box that reaches nothing but the gateway, and follows it to its end."""

    name = "agents"
    sandbox = SandboxSpec(network="model", memory=256 << 20, wall=60.0)
    limits = Limits(turns=8, run=60.0)

    @property
    def needs_gateway(self) -> bool:
        return True

    async def run(self, ctx: Context) -> None:
        box = await ctx.sandbox()
        program = str(ctx.task.data["program"])
        async with ctx.gateway_session(box) as door:
            env = {**door.environment(), "QUESTION": ctx.task.text}
            work = asyncio.create_task(box.exec(Command(argv=("python3", "-I", "-c", program), env=env)))
            spent = asyncio.create_task(door.wait_truncated(0.01))
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
            record = await door.end()
            ctx.info["turns"] = len(record.turns)
        ctx.info["own"] = (await ctx.policy.chat("and now?")).text if ctx.task.data.get("after") else ""

    async def score(self, ctx: Context) -> float:
        return 1.0 if ctx.info.get("said") else 0.0


class Doorless(Agents):
    """Opens a door and does not say so."""

    @property
    def needs_gateway(self) -> bool:
        return False


class Far(Environment):
    """Its programs are elsewhere: they get the public address and a secret."""

    name = "far"

    @property
    def needs_gateway(self) -> bool:
        return True

    async def run(self, ctx: Context) -> None:
        async with ctx.gateway_session() as door, aiohttp.ClientSession() as http:
            ctx.info["url"] = door.url
            body = {"messages": [{"role": "user", "content": ctx.task.text}]}
            headers = {"Authorization": f"Bearer {door.key}"}
            async with http.post(f"{door.url}/chat/completions", json=body, headers=headers) as answer:
                ctx.info["status"] = answer.status
            await door.end()

    async def score(self, ctx: Context) -> float:
        return 1.0 if ctx.info["status"] == 200 else 0.0
