"""Environments in which a random model can improve, and fail as its tasks say."""

import asyncio
import signal
import threading
from typing import Any

from rookery import Context, Environment, Limits, Message
from rookery.core import SandboxError
from rookery.environments.tool_environment import python
from rookery.environments.tools import CallLimit

LOW = frozenset(range(0x20, 0x40))
"""Bytes that are worth something: 32 of 272 ids."""


class Bytes(Environment):
    """Two turns, for even members with a program in a sandbox between them.

    The reward is the share of sampled ids in `LOW`. `data.fail` names members that lose their sandbox, whenever
    they are tried.
    """

    name = "bytes"
    limits = Limits(turns=4, setup=20.0, run=30.0, score=20.0, call=20.0)

    def tasks(self) -> list[dict[str, Any]]:
        return [{"id": f"plain-{n}", "prompt": f"say {n}"} for n in range(8)]

    async def run(self, ctx: Context) -> None:
        first = await ctx.policy.chat(ctx.task.prompt)
        member = int(ctx.attempt.split(".")[1])
        if member in ctx.task.data.get("fail", ()):
            raise SandboxError("the sandbox is gone")
        program = f"print({len(first.turn.sampled)} // 4)"
        # Every other one is enough: starting an interpreter costs more than the rest of a rollout.
        boxed = member % 2 == 0
        saw = await python(program, ctx, CallLimit(10.0)) if boxed else f"{len(first.turn.sampled) // 4}\n"
        second = await ctx.policy.chat([*ctx.task.prompt, first.message, Message("user", saw)])
        ctx.state["said"] = [*memoryview(first.turn.sampled).cast("i"), *memoryview(second.turn.sampled).cast("i")]
        ctx.info["saw"] = saw

    async def score(self, ctx: Context) -> float:
        said = ctx.state["said"]
        return sum(token in LOW for token in said) / len(said)


class Forks(Environment):
    """As many conversations as `data.conversations` says, each a segment of its own."""

    name = "forks"

    async def run(self, ctx: Context) -> None:
        for number in range(int(ctx.task.data["conversations"])):
            await ctx.policy.chat(f"{ctx.task.text} {number}")

    async def score(self, ctx: Context) -> float:
        return float(int(ctx.attempt.split(".")[1]) % 2)


class Stubborn(Environment):
    """Does what its task says: `data.deed` is `interrupt`, `hang` or `lose`; else it asks once."""

    name = "stubborn"

    async def run(self, ctx: Context) -> None:
        match ctx.task.data.get("deed"):
            case "interrupt":  # Ctrl-C, while the trainer's thread waits for us
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                await asyncio.sleep(3600)
            case "hang":
                await asyncio.sleep(3600)
            case "lose":
                raise SandboxError("the sandbox is gone")
        await ctx.policy.chat(ctx.task.prompt)

    async def score(self, ctx: Context) -> float:
        return ctx.rng.random()
