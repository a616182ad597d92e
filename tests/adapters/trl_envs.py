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
"""Bytes that are rewarded: 32 of 272 token IDs."""


class ByteEnvironment(Environment):
    """Two turns, for even members with a program in a sandbox between them.

    The reward is the share of sampled IDs in `LOW`. `data.fail` lists members that lose their sandbox in every
    attempt.
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
        # Every other member is enough, because starting an interpreter costs more than the rest of a rollout.
        sandboxed = member % 2 == 0
        saw = await python(program, ctx, CallLimit(10.0)) if sandboxed else f"{len(first.turn.sampled) // 4}\n"
        second = await ctx.policy.chat([*ctx.task.prompt, first.message, Message("user", saw)])
        ctx.state["sampled"] = [
            *memoryview(first.turn.sampled).cast("i"),
            *memoryview(second.turn.sampled).cast("i"),
        ]
        ctx.info["saw"] = saw

    async def score(self, ctx: Context) -> float:
        sampled = ctx.state["sampled"]
        return sum(token in LOW for token in sampled) / len(sampled)


class MultiSegmentEnvironment(Environment):
    """Holds `data.conversations` conversations; each becomes a segment."""

    name = "forks"

    async def run(self, ctx: Context) -> None:
        for number in range(int(ctx.task.data["conversations"])):
            await ctx.policy.chat(f"{ctx.task.text} {number}")

    async def score(self, ctx: Context) -> float:
        return float(int(ctx.attempt.split(".")[1]) % 2)


class FaultyEnvironment(Environment):
    """Follows `data.action` (`interrupt`, `hang` or `lose`); otherwise it makes one model call."""

    name = "stubborn"

    async def run(self, ctx: Context) -> None:
        match ctx.task.data.get("action"):
            case "interrupt":  # Ctrl-C while the trainer's thread waits for the rollout
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                await asyncio.sleep(3600)
            case "hang":
                await asyncio.sleep(3600)
            case "lose":
                raise SandboxError("the sandbox is gone")
        await ctx.policy.chat(ctx.task.prompt)

    async def score(self, ctx: Context) -> float:
        return ctx.rng.random()


class LongSubCallEnvironment(Environment):
    """Makes one model call and one trained sub-call with a prompt of 55 bytes."""

    name = "long sub-calls"

    async def run(self, ctx: Context) -> None:
        await ctx.policy.chat(ctx.task.prompt)
        await ctx.sub_model(trained=True).chat("x" * 55)

    async def score(self, ctx: Context) -> float:
        return ctx.rng.random()
