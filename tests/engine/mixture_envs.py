"""Environments for tests of mixtures."""

from typing import Any

from rookery import Context, Environment, Limits, Sampling, Score


class Short(Environment):
    """Calls the policy once. Its tasks have four levels of difficulty, and the reward is 1 below level 2."""

    name = "short"
    limits = Limits(turns=9)

    def __init__(self, size: int = 6) -> None:
        self.size = size

    def tasks(self) -> list[dict[str, Any]]:
        return [{"id": f"t{n}", "prompt": f"short {n}", "data": {"level": n % 4}} for n in range(self.size)]

    async def run(self, ctx: Context) -> None:
        ctx.info["limits"] = ctx.limits.turns
        await ctx.policy.chat(ctx.task.prompt)

    async def score(self, ctx: Context) -> Score:
        return Score(float(ctx.task.data["level"] < 2), {"level": float(ctx.task.data["level"])})


class Long(Environment):
    """Calls the policy three times and scores between 0 and 10."""

    name = "long"
    reward_range = (0.0, 10.0)
    sampling = Sampling(max_tokens=77)

    def tasks(self) -> list[dict[str, Any]]:
        return [{"id": f"t{n}", "prompt": f"long {n}"} for n in range(4)]

    async def run(self, ctx: Context) -> None:
        for _ in range(3):
            await ctx.policy.chat(ctx.task.prompt)

    async def score(self, ctx: Context) -> float:
        return float(ctx.seed % 10)


class Broken(Environment):
    """Raises in every rollout."""

    name = "broken"

    def tasks(self) -> list[dict[str, Any]]:
        return [{"id": f"t{n}", "prompt": f"broken {n}"} for n in range(40)]

    async def run(self, ctx: Context) -> None:
        raise RuntimeError("broken on purpose")

    async def score(self, ctx: Context) -> float:
        return 1.0


class Fixed(Broken):
    """`Broken` after its repair, with the same name and tasks."""

    async def run(self, ctx: Context) -> None:
        await ctx.policy.chat(ctx.task.prompt)
