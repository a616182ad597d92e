"""Tasks: from folders, archives, the hub, files and Python into a taskset.

Promises:
- whatever is wrong with tasks is found while they are loaded, all of it, by task and field;
- a source that cannot be read, or a line of it that is not JSON, raises `UsageError` that names file, line
  and problem: nothing starts;
- a row that is JSON but not a valid task becomes a `Task` with `invalid` set, in its place among the
  others, so that the engine quarantines it and runs the rest;
- every task of a set has an id of its own, and the same source gives the same ids.
"""

from rookery.tasks.load import check_tasks, load_tasks, tasks_from
from rookery.tasks.report import TaskProblem, TaskReport

__all__ = ["TaskProblem", "TaskReport", "check_tasks", "load_tasks", "tasks_from"]
