"""Who killed a runner: a pure controller.

Promises:
- neighbours of a crash are never charged: they run again;
- a rollout is convicted only of a crash or a block that it repeats alone in a runner;
- a runner killed from outside (SIGKILL: the OOM killer, a person) convicts a lone rollout only when it
  happens to it again and again.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias

Death: TypeAlias = Literal["crashed", "blocked", "killed"]
Verdict: TypeAlias = Literal["innocent", "suspect", "convicted"]

KILLS_ALONE = 3


class Court:
    """Remembers how often each suspect was alone when its runner was killed from outside."""

    def __init__(self) -> None:
        self._kills: dict[str, int] = {}

    def judge(
        self, rollouts: Sequence[str], death: Death, *, alone: bool, named: str | None = None
    ) -> dict[str, Verdict]:
        """`rollouts` were in the runner that died; `alone` when it was there as a lone suspect; `named` when
        the watchdog saw which one blocked the loop."""
        if alone and len(rollouts) == 1:
            (rollout,) = rollouts
            if death != "killed":
                return {rollout: "convicted"}
            kills = self._kills[rollout] = self._kills.get(rollout, 0) + 1
            return {rollout: "convicted" if kills >= KILLS_ALONE else "suspect"}
        if named in rollouts:
            return {rollout: "suspect" if rollout == named else "innocent" for rollout in rollouts}
        return dict.fromkeys(rollouts, "suspect")

    def forget(self, rollout: str) -> None:
        """The rollout has its terminal record."""
        self._kills.pop(rollout, None)
