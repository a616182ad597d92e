"""Decide whose fault it is when a grader does not come to its end. Pure: takes ends, returns the next step.

Guarantees:
- a grader that ran out of time, memory or output, crashed, or ended without a test, is run once more; if it
  repeats, the submission did it;
- unless the task's own solution makes the grader fail too: then the task is at fault. Nothing that a submission
  does is evidence against a task;
- a lost sandbox is never held against a submission: it is replaced, up to a budget, and then it is infra.
"""

from typing import Final, Literal, TypeAlias

from rookery.scoring.testing import GraderEnd

Step: TypeAlias = Literal["score", "again", "solution", "minimum", "task", "infra"]
FAILING: Final = frozenset({"time", "memory", "output", "crash", "no_tests"})
LOSSES: Final = 3


class Judge:
    """Decides over the runs of one grading."""

    def __init__(self, *, has_solution: bool) -> None:
        self._has_solution = has_solution
        self._failures = 0
        self._losses = 0

    def submission(self, end: GraderEnd) -> Step:
        """After a run with the submission."""
        if end == "lost":
            return self._lost()
        if end not in FAILING:
            return "score"
        self._failures += 1
        if self._failures < 2:
            return "again"
        return "solution" if self._has_solution else "minimum"

    def solution(self, end: GraderEnd) -> Step:
        """After a run with the task's own solution, which follows two failures."""
        if end == "lost":
            step = self._lost()
            return "solution" if step == "again" else step
        return "task" if end in FAILING else "minimum"

    def _lost(self) -> Step:
        self._losses += 1
        return "again" if self._losses < LOSSES else "infra"
