"""Whose doing it is when a grading gives no reward. Pure: ends in, the next step out.

Promises:
- a script that ran out of time or memory, or crashed, is run once more; if it repeats, the submission did it, and
  the reward is the minimum, unless the task's own solution makes it fail too: then the task is at fault;
- a verdict that is no reward is the task's fault, with the cause that says why; only where the submission could
  have written it itself, and the task's own solution gets a valid one, the submission did it;
- a lost box is replaced, up to a budget, and then it is infra.
"""

from typing import Final, Literal, TypeAlias

End: TypeAlias = Literal["reward", "time", "memory", "crash", "invalid", "lost"]
Step: TypeAlias = Literal["score", "again", "solution", "minimum", "task", "invalid", "infra"]
FAILING: Final = frozenset({"time", "memory", "crash"})
LOSSES: Final = 3


class Referee:
    """Decides over the runs of one grading."""

    def __init__(self, *, has_solution: bool, weaker: bool) -> None:
        self._has_solution = has_solution
        self._weaker = weaker
        self._failures = 0
        self._losses = 0
        self._invalid = False

    def submission(self, end: End) -> Step:
        """After a run with the submission."""
        if end == "reward":
            return "score"
        if end == "lost":
            self._losses += 1
            return "again" if self._losses < LOSSES else "infra"
        if end == "invalid":
            self._invalid = True
            return "solution" if self._weaker and self._has_solution else "invalid"
        self._failures += 1
        if self._failures < 2:
            return "again"
        return "solution" if self._has_solution else "minimum"

    def solution(self, end: End) -> Step:
        """After a run with the task's own solution. One whose box was lost says nothing against the task."""
        if end in ("reward", "lost"):
            return "minimum"
        return "invalid" if self._invalid else "task"
