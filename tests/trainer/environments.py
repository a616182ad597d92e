"""Environments without a sandbox, for short training runs with the embedded policy."""

from typing import Any
from zlib import crc32

from rookery import Context, Environment, Message, Sampling, Task
from rookery.tasks import UniformSampler


class Parity(Environment):
    """The reward depends on a checksum of a short reply, so that most groups are informative."""

    name = "parity"
    sampling = Sampling(max_tokens=24)

    def tasks(self) -> list[Task]:
        return [Task(id=f"t{at}", prompt=(Message("user", f"What is {at}7{at} * {at}39?"),)) for at in range(40)]

    async def run(self, ctx: Context) -> None:
        reply = await ctx.policy.chat(ctx.task.prompt)
        ctx.state["text"] = reply.text

    async def score(self, ctx: Context) -> float:
        return float(crc32(ctx.state["text"].encode()) % 2)


class OnlyTheFirst(UniformSampler):
    """Task sampler that always chooses the first task."""

    def next(self) -> int:
        return 0


class Constant(Parity):
    """Every reward is equal, so that there is nothing to learn."""

    name = "constant"

    async def score(self, ctx: Context) -> float:
        return 0.5


class Broken(Parity):
    """Every rollout fails."""

    name = "broken"

    async def run(self, ctx: Context) -> None:
        raise RuntimeError("broken on purpose")


def options(**changes: Any) -> dict[str, Any]:
    """Settings of an engine in this process."""
    return {"runners": 0, "concurrency": 16, **changes}
