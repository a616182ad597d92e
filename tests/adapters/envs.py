"""Environment for the tests of servers: two turns, whose end is set by the task."""

import asyncio
from typing import Any, ClassVar

from rookery import Context, Environment, Limits, Message
from rookery.core import SandboxError


class TwoTurns(Environment):
    """Two turns. `data.action` is `lose` (lose the sandbox), `lose once`, `hang`, `raise` or `fork`.

    `fork` has another conversation in between. `lose once` loses the sandbox in the first rollout of the process.
    """

    lost: ClassVar[set[str]] = set()
    """IDs of the tasks with `lose once` that have lost their sandbox."""

    name = "two turns"
    limits = Limits(turns=4, setup=60.0, run=60.0, score=60.0, call=60.0)

    def tasks(self) -> list[dict[str, Any]]:
        return [
            {"id": "plain", "prompt": "say 1", "data": {"reward": 1.0}},
            {"id": "fork", "prompt": "say 2", "data": {"reward": 0.25, "action": "fork"}},
            {"id": "lose", "prompt": "say 3", "data": {"action": "lose"}},
            {"id": "lose once", "prompt": "say 3", "data": {"reward": 0.5, "action": "lose once"}},
            {"id": "raise", "prompt": "say 4", "data": {"action": "raise"}},
            {"id": "hang", "prompt": "say 5", "data": {"action": "hang"}},
        ]

    async def run(self, ctx: Context) -> None:
        first = await ctx.policy.chat(ctx.task.prompt)
        match ctx.task.data.get("action"):
            case "lose":
                raise SandboxError("the sandbox is gone")
            case "lose once" if ctx.task.id not in self.lost:
                self.lost.add(ctx.task.id)
                raise SandboxError("the sandbox is gone")
            case "raise":
                raise ValueError("a bug of the environment")
            case "hang":
                await asyncio.Event().wait()
            case "fork":
                await ctx.policy.chat("another conversation")
        await ctx.policy.chat([*ctx.task.prompt, first.message, Message("user", "and then")])

    async def score(self, ctx: Context) -> float:
        return float(ctx.task.data.get("reward", 0.0))
