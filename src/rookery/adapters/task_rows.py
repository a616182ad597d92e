"""Tasks as rows of a trainer's dataset, and back.

Some trainers pass a whole row to the rollout code, others only the prompt. So the task ID is in a column and
in an additional field of the prompt's messages. The policy receives the prompt that the environment makes from the
task; the prompt in the row is only displayed.

Guarantees:
- For every row of `make_task_rows`, `find_task` finds its task, even if two tasks have the same prompt.
- A prompt without a task ID becomes a new task. Equal prompts become the same task.
- An unknown task ID raises `UsageError`. Invalid tasks get no row.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from rookery.core import Task, Taskset, UsageError
from rookery.environments import Environment
from rookery.tasks import tasks_from

TASK_KEY = "task"
"""Name of the message field and of the dataset column that contain the task ID."""

log = logging.getLogger("rookery.adapters")


def get_tasks(env: Environment, tasks: Iterable[Task | dict[str, Any] | str] | None) -> Taskset:
    """Return `tasks` as a taskset, or the environment's own tasks if `tasks` is None."""
    return tasks_from(env.tasks() if tasks is None else tasks, env.title)


def make_task_rows(tasks: Iterable[Task]) -> list[dict[str, Any]]:
    """Return a dataset row for each valid task, with the columns `prompt` and `task`.

    `prompt` is a list of messages, each with the task ID in the field `task`; the column `task` is the ID itself.
    """
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


def find_task(prompt: object, known: Mapping[str, Task], name: object = None) -> Task:
    """Return the task with the ID `name`, or else with the ID in the first message of a row's prompt.

    If there is no ID, make a task from the prompt. Raise `UsageError` if the ID is not in `known`.
    """
    if name is None:
        first = prompt[0] if isinstance(prompt, Sequence) and not isinstance(prompt, str) and prompt else None
        name = first.get(TASK_KEY) if isinstance(first, Mapping) else None
    if name is None:
        return _make_task_from_prompt(prompt)
    if str(name) not in known:
        raise UsageError(
            f"a row of the dataset names the task {str(name)[:80]!r}, which the adapter does not have: give it "
            "the same tasks as the dataset, or make the dataset with the adapter"
        )
    return known[str(name)]


def _make_task_from_prompt(prompt: object) -> Task:
    name = f"prompt-{blake2b(repr(prompt).encode(), digest_size=8).hexdigest()}"
    (task,) = tasks_from([{"id": name, "prompt": prompt}], "the dataset")
    if task.invalid:
        raise UsageError(f"a row of the dataset is not a valid task: {task.invalid}")
    found: Task = task
    return found
