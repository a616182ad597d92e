"""Errors of the trainer."""

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


def _rebuild(message: str, reason: str) -> TrainingError:
    return TrainingError(message, reason=reason)
