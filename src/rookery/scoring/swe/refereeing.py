"""Decide who is responsible when a grading gives no reward. Pure: takes ends, returns the next step.

Guarantees:
- a script that ran out of time or memory, or crashed, is run once more; if it repeats, the submission did it, and
  the reward is the minimum, unless the task's own solution makes it fail too: then the task is at fault;
- a verdict that is not a reward is the task's fault, with the cause that says why, where the task's own solution
  or, without one, an untouched sandbox gets such a verdict too; else the submission caused it: the minimum;
- nothing that happens with a submission alone is evidence against a task;
- a lost sandbox is replaced, up to a budget, and then it is infra.
"""

from typing import Final, Literal, TypeAlias

End: TypeAlias = Literal["reward", "time", "memory", "crash", "invalid", "lost"]
Step: TypeAlias = Literal["score", "again", "solution", "untouched", "minimum", "task", "invalid", "infra"]
FAILING: Final = frozenset({"time", "memory", "crash"})
LOSSES: Final = 3


class Referee:
    """Decides the next step after each run of one grading."""

    def __init__(self, *, has_solution: bool) -> None:
        self._has_solution = has_solution
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
            return "solution" if self._has_solution else "untouched"
        self._failures += 1
        if self._failures < 2:
            return "again"
        return "solution" if self._has_solution else "minimum"

    def solution(self, end: End) -> Step:
        """After a run with the task's own solution. `lost`: it could not be tried, which says nothing."""
        if end in ("reward", "lost"):
            return "minimum"
        return "invalid" if self._invalid else "task"

    def untouched(self, end: End) -> Step:
        """After a run in a sandbox that no submission changed."""
        return "invalid" if end == "invalid" else "minimum"
