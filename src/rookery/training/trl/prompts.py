"""Convert tasks to rows of a dataset, and rows of a batch back to tasks.

TRL passes only the prompt of a row to a rollout function. Therefore the messages of the prompt carry the task
ID in an additional field. The policy receives the prompt that the environment makes from the task; the prompt
of the row is only shown to people.

Guarantees:
- Every row of `dataset` leads back to its task, even if two tasks have the same prompt.
- A prompt without an ID is a task of its own. Equal prompts are the same task.
- An unknown ID raises `UsageError`. Invalid tasks get no row.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from rookery.core import Task, Taskset, UsageError
from rookery.environments import Environment
from rookery.tasks import tasks_from

TASK_KEY = "task"
"""Name of the field in messages, and of the column, that contains the task ID."""

log = logging.getLogger("rookery.training.trl")


def get_tasks(env: Environment, tasks: Iterable[Task | dict[str, Any] | str] | None) -> Taskset:
    """Return the tasks passed by the user, or those of the environment."""
    return tasks_from(env.tasks() if tasks is None else tasks, env.title)


def make_rows(tasks: Iterable[Task]) -> list[dict[str, Any]]:
    """Return a row for each valid task: `prompt`, as messages that carry the ID, and the ID."""
    rows = []
    for task in tasks:
        if task.invalid:
            log.warning("task %s is invalid and is not in the dataset: %s", task.id, task.invalid)
            continue
        messages = [{"role": message.role, "content": message.text, TASK_KEY: task.id} for message in task.prompt]
        rows.append(
            {"prompt": messages or [{"role": "user", "content": "", TASK_KEY: task.id}], TASK_KEY: task.id}
        )
    return rows


def dataset(tasks: Iterable[Task | dict[str, Any] | str]) -> Any:
    """Return a `datasets.Dataset` with a row for each valid task, for the trainer's `train_dataset`."""
    from datasets import Dataset

    return Dataset.from_list(make_rows(tasks_from(tasks, "the dataset")))


def find_task(prompt: object, known: Mapping[str, Task]) -> Task:
    """Return the task that the prompt of a row refers to."""
    first = prompt[0] if isinstance(prompt, Sequence) and not isinstance(prompt, str) and prompt else None
    name = first.get(TASK_KEY) if isinstance(first, Mapping) else None
    if name is None:
        return _make_task_from_prompt(prompt)
    if str(name) not in known:
        raise UsageError(
            f"a row of the dataset names the task {str(name)[:80]!r}, which the rollout function does "
            "not have: pass it the same tasks as the dataset, or use its own `.dataset()`"
        )
    return known[str(name)]


def _make_task_from_prompt(prompt: object) -> Task:
    name = f"prompt-{blake2b(repr(prompt).encode(), digest_size=8).hexdigest()}"
    (task,) = tasks_from([{"id": name, "prompt": prompt}], "the dataset")
    if task.invalid:
        raise UsageError(f"a row of the dataset is not a valid task: {task.invalid}")
    found: Task = task
    return found
