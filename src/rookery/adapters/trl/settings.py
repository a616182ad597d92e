"""Read TRL's settings for rollouts and make rows for its dataset, for `RolloutFunc` and `RolloutWorker`."""

from collections.abc import Iterable
from typing import Any, Final

from rookery.adapters.compatibility import TrainerSettings, get_model_context
from rookery.adapters.task_rows import make_task_rows
from rookery.core import Task
from rookery.tasks import tasks_from

TESTED: Final = ("trl", "1.16.0", "1.17")


def dataset(tasks: Iterable[Task | dict[str, Any] | str]) -> Any:
    """Return a `datasets.Dataset` with a row for each valid task, for the trainer's `train_dataset`."""
    from datasets import Dataset

    return Dataset.from_list(make_task_rows(tasks_from(tasks, "the dataset")))


def get_settings(trainer: Any) -> TrainerSettings:
    """Return what TRL assumes about rollouts, from a `GRPOTrainer` or an `AsyncGRPOConfig`."""
    extra = {"min_p": trainer.min_p, "repetition_penalty": trainer.repetition_penalty}
    return TrainerSettings(
        temperature=trainer.temperature,
        top_p=trainer.top_p,
        top_k=trainer.top_k or -1,
        max_tokens=trainer.max_completion_length,
        context=_get_context(trainer),
        clips=True,  # no budget limits the sequences of trained sub-calls
        extra={name: value for name, value in extra.items() if value not in (None, 1.0)},
    )


def _get_context(trainer: Any) -> int | None:
    """Return the length of the longest sequence that TRL trains on, or None if it is not known.

    That is the `token_budget` of an `AsyncGRPOConfig`, and what the model of a `GRPOTrainer` takes.
    """
    budget = getattr(trainer, "token_budget", None)
    if budget is not None:
        return budget if budget > 0 else None
    return get_model_context(getattr(getattr(trainer, "model", None), "config", None))
