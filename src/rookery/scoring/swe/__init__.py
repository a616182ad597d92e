"""Sandboxes for SWE tasks: prepare them without a trace of tests and solution, and grade what an agent left in
them.

Guarantees:
- Neither tests nor solutions are in a sandbox before it is graded. Git history beyond the task's commit never
  is.
- Only the grader's user can write the verdict. If the tests run the submission as their own user, the grade is
  labelled as weaker.
- A verdict that is not a valid reward raises a fault with its own cause. It never becomes 0.
"""

from rookery.scoring.swe.grading import SweGrade, SweGrader
from rookery.scoring.swe.preparation import PreparedSandbox, prepare, prepare_step

__all__ = ["PreparedSandbox", "SweGrade", "SweGrader", "prepare", "prepare_step"]
