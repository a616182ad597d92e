"""Tasks: from files and from Python into a taskset.

Promises:
- a source that cannot be read, or a line of it that is not JSON, raises `UsageError` that names file, line
  and problem: nothing starts;
- a row that is JSON but not a valid task becomes a `Task` with `invalid` set, in its place among the
  others, so that the engine quarantines it and runs the rest;
- every task of a set has an id of its own, and the same source gives the same ids.
"""

from rookery.tasks.load import load_tasks, tasks_from

__all__ = ["load_tasks", "tasks_from"]
