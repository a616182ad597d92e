"""The reference trainer: train a policy on an environment with one command. Its code is meant to be read.

`loop.py` has the loss, the optimizer step and the training loop. Needs the extra `train` (torch, transformers).
"""

from typing import TYPE_CHECKING, Any

from rookery.trainer.config import Correction, TrainConfig
from rookery.trainer.errors import TrainingError
from rookery.trainer.folder import Progress, TrainResult, find_training_run, read_metrics, read_settings

if TYPE_CHECKING:
    from rookery.trainer.loop import Optimizer as Optimizer
    from rookery.trainer.loop import Trainer as Trainer
    from rookery.trainer.loop import policy_loss as policy_loss
    from rookery.trainer.loop import token_logprobs as token_logprobs
    from rookery.trainer.resume import resume_training as resume_training

_WITH_TORCH = ("Optimizer", "Trainer", "policy_loss", "resume_training", "token_logprobs")

__all__ = [
    "Correction",
    "Optimizer",
    "Progress",
    "TrainConfig",
    "TrainResult",
    "Trainer",
    "TrainingError",
    "find_training_run",
    "policy_loss",
    "read_metrics",
    "read_settings",
    "resume_training",
    "token_logprobs",
]


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module 'rookery.trainer' has no attribute {name!r}")
    try:
        from rookery.trainer import loop, resume
    except ImportError as error:
        if error.name not in ("torch", "transformers"):
            raise
        from rookery.core import UsageError

        raise UsageError("training needs torch and transformers: pip install 'rookery-rl[train]'") from None
    return getattr(resume if name == "resume_training" else loop, name)
