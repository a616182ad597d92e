"""Errors of the trainer."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rookery.core import RookeryError


class TrainingError(RookeryError):
    """Training cannot continue. The last checkpoint is intact, and `rookery train --resume RUN` continues from it.

    `reason` is a stable code: `nan`, `memory`, `disk`, `no_signal`, `push` or `checkpoint`.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (str(self), self.reason))


def write_error(path: Path, error: Exception) -> TrainingError:
    """Return the error for a file or directory of a training run that could not be written.

    The message has the free space, because libraries report a full disk in many ways.
    """
    why = (error.strerror if isinstance(error, OSError) else None) or "the write ended early"
    existing = next(parent for parent in path.absolute().parents if parent.exists())
    free = shutil.disk_usage(existing).free / 1e6
    return TrainingError(
        f"{path} could not be written: {why}; the disk has {free:,.1f} MB left. Checkpoints are intact: free some "
        "space and continue with --resume, or start again if there is no checkpoint yet",
        reason="disk",
    )


def not_finite_error(loss: float, norm: float) -> TrainingError:
    """Return the error for an update that was not applied because its loss or gradient is not finite."""
    return TrainingError(
        f"the loss is {loss} and the norm of its gradient {norm}: the update was not applied. Lower the "
        "learning rate or clip_high, then continue with --resume",
        reason="nan",
    )


@contextmanager
def memory_errors(step: int, row_tokens: int) -> Iterator[None]:
    """Context manager that raises `TrainingError` if the training step in it runs out of memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # torch raises `OutOfMemoryError` for a GPU, and a plain `RuntimeError` for a CPU.
        known = any(text in str(error) for text in ("out of memory", "can't allocate memory"))
        if not known and not isinstance(error, MemoryError):
            raise
        raise TrainingError(
            f"out of memory in step {step} with rows of {row_tokens} tokens: "
            "continue with --resume and a smaller --row-tokens, or use --lora-rank",
            reason="memory",
        ) from error


def _rebuild(message: str, reason: str) -> TrainingError:
    return TrainingError(message, reason=reason)
