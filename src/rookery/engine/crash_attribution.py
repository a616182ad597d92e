"""Decide which rollout crashed or blocked a runner process. Used by the supervisor; does no I/O.

- When a runner dies, the attempts of rollouts that only happened to be in it do not count against their retry
  budget.
- A rollout is found guilty only if it crashes or blocks a runner again while it runs alone in it.
- If a runner was killed from outside (SIGKILL: by the OOM killer or a person), a lone rollout is found guilty only
  after this happened to it several times.
- If the node of a runner was lost, no rollout is suspected.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias

DeathKind: TypeAlias = Literal["crashed", "blocked", "killed", "lost"]
"""The way a runner died: it crashed, its event loop was blocked for too long, it got a SIGKILL from outside, or
its node in the cluster was lost."""
Attribution: TypeAlias = Literal["innocent", "suspect", "guilty"]
"""Verdict on a rollout whose runner died. A `suspect` runs again, alone in a runner."""

KILLS_ALONE = 3
"""A rollout is guilty after its runner was killed from outside this many times while it ran alone."""


class CrashAttribution:
    """Counts, for each suspect, how often its runner was killed from outside while it ran alone."""

    def __init__(self) -> None:
        self._kills: dict[str, int] = {}

    def attribute(
        self, rollouts: Sequence[str], death: DeathKind, *, alone: bool, blamed: str | None = None
    ) -> dict[str, Attribution]:
        """Return a decision for each rollout that was in a runner when the runner died.

        `alone` is True if the runner ran a single suspect. `blamed` is the rollout that was seen blocking the
        event loop, if it is known; then the others are innocent. Otherwise all are suspects.
        """
        if death == "lost":
            return dict.fromkeys(rollouts, "innocent")
        if alone and len(rollouts) == 1:
            (rollout,) = rollouts
            if death != "killed":
                return {rollout: "guilty"}
            kills = self._kills[rollout] = self._kills.get(rollout, 0) + 1
            return {rollout: "guilty" if kills >= KILLS_ALONE else "suspect"}
        if blamed in rollouts:
            return {rollout: "suspect" if rollout == blamed else "innocent" for rollout in rollouts}
        return dict.fromkeys(rollouts, "suspect")

    def forget(self, rollout: str) -> None:
        """Drop the count of a rollout that has its final record."""
        self._kills.pop(rollout, None)
