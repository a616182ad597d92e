"""Turn the end of a stage into the outcome of the attempt. Runs in the runner process; does no I/O.

- If the deadline of the run stage passes while the attempt waits for a model call, a sandbox or a tool, the
  outcome is `Truncated("time")`. If the inference engine hangs meanwhile, it is `Failed` with fault infra.
- If a deadline passes inside the environment's own code, the outcome is `Failed` with fault bug.
- If the deadline of setup or scoring passes while waiting for a sandbox or a model, it is `Failed` with fault
  infra.
- An exception that carries a fault keeps it, also inside an exception group.
- A `CancelledError` that nobody requested is a bug of the environment, not a cancellation.
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
    failed_outcome,
)
from rookery.core.errors import describe, unwrap_group


class StageEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a stage, as observed by the attempt."""

    stage: Stage
    error: BaseException | None = None
    cancelled: CancelledReason | None = None
    """The reason why the attempt was cancelled from outside, or None if it was not."""
    expired: float | None = None
    """The time limit of the stage in seconds if its deadline passed, otherwise None."""
    waited_on_others: bool = False
    """True if the attempt waited for a model, a sandbox or a tool when the deadline passed."""
    hung: str = ""
    """Name of the inference engine that hangs, with the evidence; empty if none was found to hang."""
    hung_cause: str = "upstream.hung"
    """The cause code of the failure if `hung` is not empty."""
    truncated: TruncatedReason | None = None
    """The budget that model calls exhausted, or None. It is set even if the environment caught the
    `Truncation`."""


def decide_outcome(end: StageEnd) -> Outcome:
    """Return the outcome of an attempt whose latest stage ended as `end` describes."""
    if end.cancelled:
        return Cancelled(end.cancelled)
    if end.expired is not None:
        return _decide_expired(end, end.expired)
    if end.error is None:
        return Truncated(end.truncated) if end.truncated else Completed()
    single = unwrap_group(end.error)
    if isinstance(single, Truncation) and end.stage == "run":
        return Truncated(single.reason)
    cause, detail = "bug.scoring" if end.stage == "score" else "bug.environment", ""
    if isinstance(single, SystemExit | KeyboardInterrupt):
        cause, detail = "bug.exit", f"the environment called exit: {describe(single)}"
    elif isinstance(single, CancelledError):
        detail = "the environment raised CancelledError although nobody cancelled the attempt"
    return failed_outcome(end.error, end.stage, cause=cause, detail=detail)


def _decide_expired(end: StageEnd, budget: float) -> Outcome:
    if end.error is not None:
        single = unwrap_group(end.error)
        if isinstance(single, UpstreamError) and single.fault == "infra":
            return failed_outcome(
                end.error, end.stage, cause=single.code
            )  # the call failed before the deadline ended it
    if end.hung and end.stage == "run":
        detail = (
            f"the {end.stage} stage exceeded its {budget:g} seconds while the inference engine hung: {end.hung}"
        )
        return failed_outcome(end.error or TimeoutError(detail), end.stage, cause=end.hung_cause, detail=detail)
    if end.waited_on_others and end.stage == "run":
        return Truncated("time")
    cause, where = "bug.hung", "inside the environment's own code"
    if end.waited_on_others:
        cause = "scoring.timeout" if end.stage == "score" else "engine.setup"
        where = "while waiting for a sandbox or a model"
    detail = f"the {end.stage} stage exceeded its {budget:g} seconds {where}"
    return failed_outcome(end.error or TimeoutError(detail), end.stage, cause=cause, detail=detail)
