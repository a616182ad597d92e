"""Load tasks from directories, archives, the Hugging Face hub, files and Python objects into a taskset.

Guarantees:
- All problems of all tasks are found while they are loaded, and reported by task and field.
- A source that cannot be read, or a line that is not JSON, raises `UsageError` with file, line and problem.
- A row that is JSON but not a valid task becomes a `Task` with `invalid` set, in its place, so that the engine
  quarantines it and runs the others.
- Every task of a taskset has a unique ID, and the same source gives the same IDs.
"""

from rookery.tasks.formats import ReadOptions, TaskFormat
from rookery.tasks.loader import check_tasks, load_tasks, tasks_from
from rookery.tasks.report import ProblemCollector, TaskProblem, TaskReport

__all__ = [
    "ProblemCollector",
    "ReadOptions",
    "TaskFormat",
    "TaskProblem",
    "TaskReport",
    "check_tasks",
    "load_tasks",
    "tasks_from",
]
