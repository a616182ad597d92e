"""Inputs of a TRL trainer: tasks as rows of a dataset, and a tokenizer for the embedded policy.

TRL passes only the prompt of a row to a rollout function. Therefore the messages of the prompt carry the task
ID in an additional field. The policy receives the prompt that the environment makes from the task; the prompt
in the row is only displayed.

Guarantees:
- For every row of `dataset`, `find_task` finds its task, even if two tasks have the same prompt.
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
from rookery.upstreams.embedded import chat

TASK_KEY = "task"
"""Name of the message field and of the dataset column that contain the task ID."""

log = logging.getLogger("rookery.training.trl")


def get_tasks(env: Environment, tasks: Iterable[Task | dict[str, Any] | str] | None) -> Taskset:
    """Return `tasks` as a taskset, or the environment's own tasks if `tasks` is None."""
    return tasks_from(env.tasks() if tasks is None else tasks, env.title)


def make_rows(tasks: Iterable[Task]) -> list[dict[str, Any]]:
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


def dataset(tasks: Iterable[Task | dict[str, Any] | str]) -> Any:
    """Return a `datasets.Dataset` with a row for each valid task, for the trainer's `train_dataset`."""
    from datasets import Dataset

    return Dataset.from_list(make_rows(tasks_from(tasks, "the dataset")))


def find_task(prompt: object, known: Mapping[str, Task]) -> Task:
    """Return the task whose ID is in the first message of a row's prompt.

    If the prompt contains no ID, make a task from the prompt. Raise `UsageError` if the ID is not in `known`.
    """
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


def embedded_tokenizer() -> Any:
    """Return a transformers tokenizer with the token IDs of the embedded policy.

    IDs 0 to 255 are bytes; the special tokens of the chat format follow.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = _byte_alphabet()
    made = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    names = [chat.NAMES.get(number, f"<spare-{number}>") for number in range(256, chat.VOCAB)]
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=chat.NAMES[chat.BEGIN],
        eos_token=chat.NAMES[chat.END],
        pad_token=chat.NAMES[chat.PAD],
        padding_side="left",
    )


def _byte_alphabet() -> list[str]:
    """Return the character that byte-level tokenizers use for each of the 256 bytes.

    Printable Latin-1 characters stand for themselves; other bytes are mapped to characters from U+0100 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (chr(256 + place) for place in range(256))
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]
