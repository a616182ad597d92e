"""A self-play game: two players name higher and higher numbers, up to 99. Who cannot go higher loses.

    rookery run examples/higher.py --policy embedded -k 4
    rookery train examples/higher.py --steps 15 --groups 8 --learning-rate 6e-4 --eval-tasks 0

Each task has a learner, the first or the second player. The policy plays both, and learns from the moves of the
learner. The mean reward stays near 0.5; the metric `last_number` shows what is learned.
"""

import re
from collections.abc import Mapping
from typing import Any

from rookery import Context, Message, Sampling
from rookery.environments import MultiAgentEnvironment, Participant

HIGHEST = 99
RULES = f"Name a number above the last one, at most {HIGHEST}. End with the number."
SHORT = Sampling(max_tokens=60)


class Higher(MultiAgentEnvironment):
    """Two players name higher and higher numbers, up to 99. Who cannot go higher loses."""

    name = "higher"
    participants = (
        Participant(name="first", system_prompt=RULES, sampling=SHORT),
        Participant(name="second", system_prompt=RULES, sampling=SHORT),
    )
    max_replies = HIGHEST

    def tasks(self) -> list[dict[str, Any]]:
        """Return one task per start and player, so that the policy learns both sides."""
        return [
            {"id": f"{start}-{learner}", "prompt": f"The number is {start}.", "start": start, "learner": learner}
            for start in range(8)
            for learner in ("first", "second")
        ]

    async def setup(self, ctx: Context) -> None:
        await super().setup(ctx)
        ctx.state["last"], ctx.state["loser"] = int(ctx.task.data["start"]), ""

    def opening_messages(self, ctx: Context, participant: Participant) -> list[Message]:
        messages = super().opening_messages(ctx, participant)
        return messages if participant.name == "first" else messages[:1]  # the second one observes the first move

    async def observe(self, ctx: Context, speaker: str, text: str) -> Mapping[str, str]:
        numbers = re.findall(r"\b[0-9]{1,6}\b", text)
        if numbers and ctx.state["last"] < int(numbers[-1]) <= HIGHEST:
            ctx.state["last"] = int(numbers[-1])
        else:
            ctx.state["loser"] = speaker
        ctx.metrics["last_number"] = float(ctx.state["last"])
        other = "second" if speaker == "first" else "first"
        return {other: f"The number is {ctx.state['last']}."}

    def done(self, ctx: Context) -> bool:
        return bool(ctx.state["loser"])

    async def rewards(self, ctx: Context) -> Mapping[str, float]:
        # Without a loser the attempt was truncated: nobody wins.
        return {one.name: float(ctx.state["loser"] not in ("", one.name)) for one in self.participants}
