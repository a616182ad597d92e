"""Decide who is at fault when a grader produces no verdict: the submission, the task or the infrastructure.

`FaultAttribution` does no I/O: it receives how each execution of the grader ended and returns what to do next. The
graders of code tasks and of SWE tasks both use it.

Guarantees:
- A grader that times out, runs out of memory or output, crashes, or finds no test is run once more. If it fails
  again, the submission gets the minimum reward, unless the grader also fails with the reference solution. In that
  case the task is at fault.
- If a grader's verdict is not a valid reward, the grader runs with the reference solution or, without one, in a
  sandbox without a submission. If that gives no valid reward either, the task is at fault. Otherwise the
  submission gets the minimum reward.
- An execution with a submission is never evidence against the task.
- A lost sandbox is replaced. When `MAX_LOSSES` sandboxes were lost in one grading, the infrastructure is at fault.
"""

from typing import Final, Literal, TypeAlias

GraderExit: TypeAlias = Literal[
    "scored", "time", "memory", "output", "crash", "no_tests", "invalid", "lost", "not_run"
]
"""End of one execution of a grader.

`scored`: it gave a valid reward. `time`, `memory`, `output`: it exceeded that limit. `no_tests`: it found no test.
`invalid`: its verdict is not a valid reward. `lost`: its sandbox was lost. `not_run`: too little time was left."""
GradingStep: TypeAlias = Literal[
    "score", "rerun", "run_solution", "run_untouched", "minimum", "task_fault", "invalid_verdict", "infra_fault"
]
"""The next step of a grading.

`rerun`, `run_solution` and `run_untouched` execute the grader again: with the submission, with the reference
solution, or without either. The others end the grading. `minimum` gives the minimum reward. `task_fault` and
`invalid_verdict` blame the task."""
FAILURES: Final[frozenset[GraderExit]] = frozenset({"time", "memory", "output", "crash", "no_tests"})
MAX_LOSSES: Final = 3


class FaultAttribution:
    """Decides during one grading what to do after each execution of the grader.

    Call the method that matches the execution and take the step that it returns.
    """

    def __init__(self, *, has_solution: bool) -> None:
        self._has_solution = has_solution
        self._failures = 0
        self._losses = 0
        self._invalid = False

    def after_submission(self, end: GraderExit) -> GradingStep:
        """Return the next step after the grader was executed with the submission."""
        if end == "lost":
            return self._after_loss("rerun")
        if end == "invalid":
            self._invalid = True
            return "run_solution" if self._has_solution else "run_untouched"
        if end not in FAILURES:
            return "score"
        self._failures += 1
        if self._failures < 2:
            return "rerun"
        return "run_solution" if self._has_solution else "minimum"

    def after_solution(self, end: GraderExit) -> GradingStep:
        """Return the next step after the grader was executed with the task's reference solution."""
        if end == "lost":
            return self._after_loss("run_solution")
        if end in ("scored", "not_run"):
            return "minimum"
        return "invalid_verdict" if self._invalid else "task_fault"

    def after_untouched(self, end: GraderExit) -> GradingStep:
        """Return the next step after the grader was executed without a submission or solution."""
        return "invalid_verdict" if end == "invalid" else "minimum"

    def _after_loss(self, retry: GradingStep) -> GradingStep:
        self._losses += 1
        return retry if self._losses < MAX_LOSSES else "infra_fault"
