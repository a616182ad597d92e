"""Exceptions of Rookery. A `RookeryError` carries a stable cause code and the fault: infra, task or bug.

- `wrap_errors` converts an exception of another library to a `RookeryError` and keeps the original as `__cause__`.
  Cancellations, exits, `RookeryError` and `Truncation` pass through unchanged.
- `failed_outcome` works for every exception, also if its `__str__` raises. Its result contains the traceback and
  can be encoded as UTF-8. The middle of a very long traceback is omitted.
"""

import traceback as tb
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import ClassVar

from rookery.core.causes import CAUSES
from rookery.core.outcomes import Failed, Fault, Stage, TruncatedReason

MAX_DETAIL = 2_000
MAX_TRACEBACK = 20_000


class RookeryError(Exception):
    """Base class of Rookery's exceptions. The message says what failed, on which object, why, and what to do next.

    `code` is a cause code such as `sandbox.lost`; by default it is the class attribute `cause`. `fault` is who is
    responsible; by default it is the fault of the code in the table of causes.
    """

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
    """The configuration or the arguments of a call are not valid.

    Errors in the configuration of a run are raised before its first rollout starts.
    """


class JournalError(RookeryError):
    """The journal (the crash-safe record of a run) cannot be written or read. A run that cannot write it stops."""


class SandboxError(RookeryError):
    """A sandbox could not be created, was lost, or could not do what was requested."""

    cause = "sandbox.lost"


class WorkerRecoveryError(SandboxError):
    """A worker (a persistent Python interpreter in a sandbox) could not be restarted. The attempt ends."""

    cause = "worker.unrecoverable"
    after_cell: bool = True
    """True if the policy had run code in the worker. Only then can the policy have caused the loss."""


class UpstreamError(RookeryError):
    """A model call failed."""

    cause = "upstream.error"
    evidence: object = None
    """The observed state of the inference engine, or None. It is stored in the attempt's record."""


class BatchError(RookeryError):
    """A rollout or batch cannot be trained on."""

    cause = "bug.batch"


class TaskError(RookeryError):
    """The task itself is broken, for example its row, image or tests. The rollout fails with fault `task`."""

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
    """Convert exceptions of the types `foreign` that are raised in the block to `kind`.

    The new message is `what`, a colon, and the class and message of the original. Exceptions of other types pass
    through, and so do cancellations, exits, `RookeryError` and `Truncation`, even if `foreign` includes them.
    """
    try:
        yield
    except (RookeryError, Truncation):
        raise
    except foreign as error:
        if not isinstance(error, Exception):  # cancellations and exits are never converted
            raise
        raise kind(f"{what}: {describe(error)}", cause=cause) from error


def unwrap_group(error: BaseException) -> BaseException:
    """Return one exception of a (nested) exception group, or `error` itself if it is not a group.

    At each level, the first `RookeryError`, `Truncation` or nested group is chosen; without any, the first
    exception.
    """
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
    """Return the `Failed` outcome for an exception that ended a stage.

    A `RookeryError` determines cause and fault. For other exceptions, `cause` is used with its fault in the table
    of causes. `detail` replaces the message of the exception. Long details and tracebacks are shortened.
    """
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


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the known word that is most similar to `word`.

    Return an empty string if no known word is similar.
    """
    from difflib import get_close_matches  # a few milliseconds, which only an error should pay

    by_lower = {name.lower(): name for name in known}
    near = get_close_matches(word.lower(), list(by_lower), 1, 0.6)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else ""
