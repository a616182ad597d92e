"""What the end of a stage means: a pure controller.

Promises:
- a run deadline that passes while the policy or its sandbox works is Truncated(time); while a model server
  hangs, it is infra; inside the environment's own code it is a bug; in setup or scoring, waiting on a sandbox or a
  model, it is infra;
- an exception that carries its own fault keeps it, also out of a task group;
- a CancelledError that nobody asked for is the environment's bug, not a cancellation.
"""

from asyncio import CancelledError

import msgspec

from rookery.core import (
    Cancelled,
    CancelledReason,
    Completed,
    Outcome,
    Stage,
    Truncated,
    TruncatedReason,
    Truncation,
    UpstreamError,
    failed,
)
from rookery.core.errors import behind, describe


class StageEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a stage ended, as the attempt saw it."""

    stage: Stage
    error: BaseException | None = None
    cancelled: CancelledReason | None = None
    """Somebody asked for it from outside."""
    expired: float | None = None
    """The budget, in seconds, that ran out."""
    waited_on_others: bool = False
    """At that moment it waited on a model, a sandbox or a tool."""
    hung: str = ""
    """Why the server of a model call under way was found hung; empty where none was."""
    hung_cause: str = "upstream.hung"
    truncated: TruncatedReason | None = None
    """A budget that its model calls spent, whatever the environment made of the exception."""


def verdict(end: StageEnd) -> Outcome:
    """The outcome of an attempt whose last stage ended so."""
    if end.cancelled:
        return Cancelled(end.cancelled)
    if end.expired is not None:
        return _deadline(end, end.expired)
    if end.error is None:
        return Truncated(end.truncated) if end.truncated else Completed()
    single = behind(end.error)
    if isinstance(single, Truncation) and end.stage == "run":
        return Truncated(single.reason)
    cause, detail = "bug.scoring" if end.stage == "score" else "bug.environment", ""
    if isinstance(single, SystemExit | KeyboardInterrupt):
        cause, detail = "bug.exit", f"the environment called exit: {describe(single)}"
    elif isinstance(single, CancelledError):
        detail = "the environment raised CancelledError by itself; nobody had cancelled it"
    return failed(end.error, end.stage, cause=cause, detail=detail)


def _deadline(end: StageEnd, budget: float) -> Outcome:
    if (
        end.error is not None
        and isinstance(single := behind(end.error), UpstreamError)
        and single.fault == "infra"
    ):
        return failed(end.error, end.stage, cause=single.code)  # the call failed before the deadline could end it
    if end.hung and end.stage == "run":
        detail = f"{end.stage} ran out of its {budget:g} seconds while the model server gave no answer: {end.hung}"
        return failed(end.error or TimeoutError(detail), end.stage, cause=end.hung_cause, detail=detail)
    if end.waited_on_others and end.stage == "run":
        return Truncated("time")
    cause, what = "bug.hung", "its own code"
    if end.waited_on_others:
        cause, what = ("scoring.timeout" if end.stage == "score" else "engine.setup"), "a sandbox or a model"
    detail = f"{end.stage} ran out of its {budget:g} seconds inside {what}"
    return failed(end.error or TimeoutError(detail), end.stage, cause=cause, detail=detail)
