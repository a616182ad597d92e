"""Tasks as rows of a dataset, and rows of a batch as tasks again.

TRL hands a rollout function nothing of a row but its prompt, so the task's id travels in the prompt's messages, as
one field more. What the policy is asked is the task's own prompt, as its environment puts it; the row's is for
people and logs.

Promises:
- every row that `dataset` makes leads back to its own task, also where two tasks have the same prompt;
- a prompt without an id is a task of that prompt alone, and the same prompt is the same task;
- an id that is not known is refused in words; tasks that are invalid get no row.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from rookery.core import Task, Taskset, UsageError
from rookery.environments import Environment
from rookery.tasks import tasks_from

KEY = "task"
"""The field of a prompt's messages, and the column, that hold the task's id."""

log = logging.getLogger("rookery.training.trl")


def tasks_of(env: Environment, tasks: Iterable[Task | dict[str, Any] | str] | None) -> Taskset:
    """The tasks given, or the environment's own."""
    return tasks_from(env.tasks() if tasks is None else tasks, env.title)


def rows(tasks: Iterable[Task]) -> list[dict[str, Any]]:
    """A row for each valid task: `prompt`, as messages that carry the id, and the id."""
    found = []
    for task in tasks:
        if task.invalid:
            log.warning("task %s is invalid and gets no row: %s", task.id, task.invalid)
            continue
        messages = [{"role": message.role, "content": message.text, KEY: task.id} for message in task.prompt]
        found.append({"prompt": messages or [{"role": "user", "content": "", KEY: task.id}], KEY: task.id})
    return found


def dataset(tasks: Iterable[Task | dict[str, Any] | str]) -> Any:
    """A `datasets.Dataset` with a row for each valid task, for a trainer's `train_dataset`."""
    from datasets import Dataset

    return Dataset.from_list(rows(tasks_from(tasks, "the dataset")))


def task_of(prompt: object, known: Mapping[str, Task]) -> Task:
    """The task behind the prompt of a row."""
    first = prompt[0] if isinstance(prompt, Sequence) and not isinstance(prompt, str) and prompt else None
    name = first.get(KEY) if isinstance(first, Mapping) else None
    if name is None:
        return _bare(prompt)
    if str(name) not in known:
        raise UsageError(
            f"a row of the dataset names the task {str(name)[:80]!r}, which the rollout function does not have: "
            "give it the same tasks as the dataset, or take its own `.dataset()`"
        )
    return known[str(name)]


def _bare(prompt: object) -> Task:
    name = f"prompt-{blake2b(repr(prompt).encode(), digest_size=8).hexdigest()}"
    (task,) = tasks_from([{"id": name, "prompt": prompt}], "the dataset")
    if task.invalid:
        raise UsageError(f"a row of the dataset is no task: {task.invalid}")
    found: Task = task
    return found
