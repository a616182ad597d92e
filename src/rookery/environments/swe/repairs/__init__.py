"""The built-in taskset `repairs`: small programs with a real bug each, to be fixed in a sandbox.

    data/tasks/NAME/    meta.toml, instruction.md, seeds/, setup.sh, tests/check.py, solution/
    data/shared/        files shared by the tests of all tasks

Every task is available in the formats of open-instruct and Harbor. Both are written from the same source into the
task cache of this machine. If a sandbox lacks a program that a task requires, the task's setup fails with a
message that names the program.
"""

from rookery.environments.swe.repairs.taskset import (
    FORMATS,
    RepairsFormat,
    folder,
    get_info,
    names,
    repairs,
    write,
)

tasks = repairs

__all__ = ["FORMATS", "RepairsFormat", "folder", "get_info", "names", "repairs", "tasks", "write"]
