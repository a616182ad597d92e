"""Code: a Python that remembers, and a grader that nobody can cheat.

Promises:
- state persists from cell to cell, and what a cell did is an observation: a limit, a crash and an error each in
  its own words;
- a worker that cannot be brought back ends the attempt as infra, and never wastes the policy's turns;
- a task that cannot be scored, or whose limits cannot be, is a task's fault before anything runs;
- a submission is graded in fresh sandboxes, never in the policy's own.
"""

from rookery.environments.code.environment import CodeEnvironment

__all__ = ["CodeEnvironment"]
