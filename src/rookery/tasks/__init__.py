"""Load tasks from directories, archives, the Hugging Face Hub, files and Python objects into a taskset.

Guarantees:
- All problems of all tasks are found while the tasks are loaded, and reported by task and field.
- A source that cannot be read, or a line that is not JSON, raises `UsageError` with file, line and problem.
- A row (one JSON object that describes a task) that is not a valid task becomes a `Task` with `invalid` set, at
  the position of the row, so that the engine quarantines it and runs the other tasks.
- Every task of a taskset has a unique ID, and the same source gives the same IDs.
"""

from rookery.tasks.formats import ReadOptions, TaskFormat
from rookery.tasks.loader import check_tasks, load_tasks, tasks_from
from rookery.tasks.report import ProblemCollector, TaskProblem, TaskReport
from rookery.tasks.samplers import DifficultySampler, SkipSettledSampler, TaskSampler, UniformSampler

__all__ = [
    "DifficultySampler",
    "ProblemCollector",
    "ReadOptions",
    "SkipSettledSampler",
    "TaskFormat",
    "TaskProblem",
    "TaskReport",
    "TaskSampler",
    "UniformSampler",
    "check_tasks",
    "load_tasks",
    "tasks_from",
]
