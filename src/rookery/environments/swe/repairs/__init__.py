"""The built-in taskset `repairs`: small programs with a real fault each, to be repaired in a box.

    data/tasks/NAME/    meta.toml, instruction.md, seeds/, setup.sh, tests/check.py, solution/
    data/shared/        what the tests of all of them share

Promises:
- every task is there in both folder formats, as real folders, made from one source;
- the folders are made once for all processes of a machine, and hold nothing but what the package holds;
- a box that lacks a program that a task needs is told by the task's setup, which names it.
"""

from rookery.environments.swe.repairs.writing import FORMATS, RepairsFormat, about, folder, names, repairs, write

tasks = repairs

__all__ = ["FORMATS", "RepairsFormat", "about", "folder", "names", "repairs", "tasks", "write"]
