"""Sandboxes for SWE tasks: prepare them without a trace of tests and solution, and grade what an agent left in
them.

Guarantees:
- An agent's sandbox contains neither tests nor solutions before it is graded. If it has git, Git history that is
  not reachable from the task's commit is removed from it.
- Only the user of the test script can write the verdict. If the tests run the submission as that same user,
  `SweGrade.weaker` says so.
- A verdict that is not a valid reward never becomes 0. The task is then at fault, with its own cause, or the
  submission gets the minimum reward.
"""

from rookery.scoring.swe.grading import SweGrade, SweGrader
from rookery.scoring.swe.preparation import PreparedSandbox, prepare, prepare_step

__all__ = ["PreparedSandbox", "SweGrade", "SweGrader", "prepare", "prepare_step"]
