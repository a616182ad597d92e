"""Boxes for tasks in a box, and their grading: prepared without a trace of the answer, graded where no agent was.

Promises:
- neither tests nor solutions are in a box before it is graded, and history beyond the task's commit is in none;
- the verdict comes from a place that only the grader's user can write; where the tests run the submission as
  themselves, the grade says that it is weaker;
- what is not a valid reward is a fault with its own words, never a zero.
"""

from rookery.scoring.swe.grading import SweGrade, SweGrader
from rookery.scoring.swe.prepare import Prepared, prepare, prepare_step

__all__ = ["Prepared", "SweGrade", "SweGrader", "prepare", "prepare_step"]
