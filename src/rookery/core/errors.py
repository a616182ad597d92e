"""Exceptions of Rookery. Each carries a stable cause code and the fault: infra, task or bug.

- `wrap_errors` turns a foreign exception into a typed one where the information still exists, and keeps
  the original as `__cause__`; cancellation, exits and typed errors pass through untouched;
- `failed_outcome` never loses a traceback, whatever the exception is made of, and what it returns can be encoded.
"""

import traceback as tb
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from rookery.core.causes import CAUSES
from rookery.core.outcomes import Failed, Fault, Stage, TruncatedReason

MAX_DETAIL = 2_000
MAX_TRACEBACK = 20_000


class RookeryError(Exception):
    """Base class. The message says what failed, on which object, why, and what to do next."""

    cause: ClassVar[str] = "bug.rookery"

    def __init__(self, message: str, *, cause: str | None = None, fault: Fault | None = None) -> None:
        super().__init__(message)
        self.code = cause or self.cause
        self.fault: Fault = fault or (CAUSES[self.code].fault if self.code in CAUSES else "bug")

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), str(self), self.code, self.fault))


def _rebuild(kind: type[RookeryError], message: str, code: str, fault: Fault) -> RookeryError:
    return kind(message, cause=code, fault=fault)


class UsageError(RookeryError):
    """The configuration or a call is not valid. Raised before any rollout starts."""


class JournalError(RookeryError):
    """The run's journal cannot be written or read. A running run stops."""


class SandboxError(RookeryError):
    """A sandbox could not be created or was lost."""

    cause = "sandbox.lost"


class WorkerRecoveryError(SandboxError):
    """A worker could not be restarted; the attempt ends."""

    cause = "worker.unrecoverable"
    after_cell: bool = True
    """True if the policy had run code in the worker. Only then can the policy have caused the loss."""


class UpstreamError(RookeryError):
    """A model call failed."""

    cause = "upstream.error"
    evidence: object = None
    """Evidence about the state of the model server, or None. It is stored in the attempt's record."""


class TaskError(RookeryError):
    """The task itself is broken."""

    cause = "task.invalid"


class ScoringError(RookeryError):
    """A grader returned no reward, or something that is not a valid reward."""

    cause = "scoring.unparsable"


class Truncation(Exception):  # noqa: N818  (a way to end, not an error)
    """Raised by a model call when a budget is exhausted. It ends the run stage as `Truncated(reason)`."""

    def __init__(self, reason: TruncatedReason, message: str = "") -> None:
        super().__init__(message or f"the rollout's budget is exhausted: {reason}")
        self.reason: TruncatedReason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.reason, str(self)))


@contextmanager
def wrap_errors(
    kind: type[RookeryError], what: str, *foreign: type[BaseException], cause: str | None = None
) -> Iterator[None]:
    """Convert exceptions of the types `foreign` inside the block to `kind`; all others pass."""
    try:
        yield
    except (RookeryError, Truncation):
        raise
    except foreign as error:
        if not isinstance(error, Exception):  # cancellations and exits are never converted
            raise
        raise kind(f"{what}: {describe(error)}", cause=cause) from error


def unwrap_group(error: BaseException) -> BaseException:
    """Return the decisive exception of an exception group: one of Rookery's types if there is one."""
    while isinstance(error, BaseExceptionGroup):
        leaves = error.exceptions
        typed = [leaf for leaf in leaves if isinstance(leaf, RookeryError | Truncation | BaseExceptionGroup)]
        error = (typed or leaves)[0]
    return error


def describe(error: BaseException) -> str:
    """Return the class name and message of an exception. Never raises."""
    text = _text(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _text(error: BaseException) -> str:
    try:
        return escape_surrogates(str(error))
    except Exception as worse:  # noqa: BLE001  (a user's `__str__` may raise anything)
        return f"(its __str__ raised {type(worse).__name__})"


def escape_surrogates(text: str) -> str:
    """Return the text with lone surrogates escaped, so that it can be encoded as UTF-8."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def failed_outcome(error: BaseException, stage: Stage, *, cause: str, detail: str = "") -> Failed:
    """Return the outcome for an exception that ended a stage. `cause` is used for exceptions that carry none."""
    code, fault = cause, CAUSES[cause].fault if cause in CAUSES else "bug"
    single = unwrap_group(error)
    if isinstance(single, RookeryError):
        code, fault = single.code, single.fault
        text = _text(single)
    else:
        text = describe(single)
    trace = escape_surrogates("".join(tb.format_exception(error)))
    if len(trace) > MAX_TRACEBACK:  # a recursion error has a thousand equal frames
        half = MAX_TRACEBACK // 2
        trace = f"{trace[:half]}\n… {len(trace) - 2 * half} characters omitted …\n{trace[-half:]}"
    return Failed(fault, code, escape_surrogates(detail or text)[:MAX_DETAIL], stage, trace)
