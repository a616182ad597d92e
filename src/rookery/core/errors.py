"""Typed errors: each knows whose fault it is and the stable cause of it.

Promises:
- `boundary` turns a foreign exception into a typed one where the information still exists, and keeps
  the original as `__cause__`; cancellation, exits and typed errors pass through untouched;
- `failed` never loses a traceback, whatever the exception is made of, and what it returns can be encoded.
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
    """Base of our errors. The message says what happened, to what, and what to do."""

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
    """Something the user asked for cannot be: found before anything was admitted."""


class JournalError(RookeryError):
    """The run's record cannot be written or read; the run stops and says so."""


class SandboxError(RookeryError):
    """A sandbox could not be made or was lost."""

    cause = "sandbox.lost"


class WorkerRecoveryError(SandboxError):
    """A worker could not be brought back; the attempt ends."""

    cause = "worker.unrecoverable"
    after_cell: bool = True
    """True if the policy had run code in the worker. Only then can the policy have caused the loss."""


class UpstreamError(RookeryError):
    """A model call did not come back with an answer."""

    cause = "upstream.error"
    evidence: object = None
    """Evidence for a verdict about the model server, or None. It is kept in the attempt's record."""


class TaskError(RookeryError):
    """The task itself is broken."""

    cause = "task.invalid"


class ScoringError(RookeryError):
    """A verdict is missing or is not a reward."""

    cause = "scoring.unparsable"


class Truncation(Exception):  # noqa: N818  (a way to end, not an error)
    """Raised out of a model call when a budget is spent; ends the run stage as `Truncated(reason)`."""

    def __init__(self, reason: TruncatedReason, message: str = "") -> None:
        super().__init__(message or f"the rollout's budget is spent: {reason}")
        self.reason: TruncatedReason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.reason, str(self)))


@contextmanager
def boundary(
    kind: type[RookeryError], what: str, *foreign: type[BaseException], cause: str | None = None
) -> Iterator[None]:
    """Inside, each of `foreign` becomes `kind`; everything else passes."""
    try:
        yield
    except (RookeryError, Truncation):
        raise
    except foreign as error:
        if not isinstance(error, Exception):  # a cancellation, an exit: never a failure of `kind`
            raise
        raise kind(f"{what}: {describe(error)}", cause=cause) from error


def behind(error: BaseException) -> BaseException:
    """The one exception behind a task group's: a typed one before others, so that its fault is not lost."""
    while isinstance(error, BaseExceptionGroup):
        leaves = error.exceptions
        typed = [leaf for leaf in leaves if isinstance(leaf, RookeryError | Truncation | BaseExceptionGroup)]
        error = (typed or leaves)[0]
    return error


def describe(error: BaseException) -> str:
    """One line about an exception; never empty, never raises."""
    text = _text(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _text(error: BaseException) -> str:
    try:
        return encodable(str(error))
    except Exception as worse:  # noqa: BLE001  (a `__str__` of the user's may raise anything)
        return f"(its __str__ raised {type(worse).__name__})"


def encodable(text: str) -> str:
    """The text with what no encoding takes made visible: undecodable file names put lone surrogates into it."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def failed(error: BaseException, stage: Stage, *, cause: str, detail: str = "") -> Failed:
    """The outcome for an exception that ended a stage; `cause` applies to exceptions that carry none."""
    code, fault = cause, CAUSES[cause].fault if cause in CAUSES else "bug"
    single = behind(error)
    if isinstance(single, RookeryError):
        code, fault = single.code, single.fault
        text = _text(single)
    else:
        text = describe(single)
    trace = encodable("".join(tb.format_exception(error)))
    if len(trace) > MAX_TRACEBACK:  # a recursion error has a thousand equal frames
        half = MAX_TRACEBACK // 2
        trace = f"{trace[:half]}\n… {len(trace) - 2 * half} characters left out …\n{trace[-half:]}"
    return Failed(fault, code, encodable(detail or text)[:MAX_DETAIL], stage, trace)
