"""How a rollout ended: a sum type, so that no reader can forget a case.

What the policy does is a result (`Completed`, `Truncated`); `Failed` is for everyone else's failures.
"""

from typing import Literal, TypeAlias

import msgspec

Fault: TypeAlias = Literal["infra", "task", "bug"]
TruncatedReason: TypeAlias = Literal["turns", "tokens", "context", "time", "lost"]
CancelledReason: TypeAlias = Literal["user", "filtered", "stale", "shutdown"]
Stage: TypeAlias = Literal["queue", "setup", "run", "score", "teardown", "load"]
"""`load` is everything after the environment returned: reading tokens back, merging turns, building a batch."""


class Completed(msgspec.Struct, frozen=True, tag="completed", tag_field="kind"):
    """The environment's run stage came to its own end."""


class Truncated(msgspec.Struct, frozen=True, tag="truncated", tag_field="kind"):
    """A budget ended the run stage; what is there is scored and trains."""

    reason: TruncatedReason


class Failed(msgspec.Struct, frozen=True, tag="failed", tag_field="kind", omit_defaults=True):
    """Somebody other than the policy failed: no segments, no reward, in no denominator."""

    fault: Fault
    cause: str
    detail: str
    stage: Stage = "run"
    traceback: str = ""


class Cancelled(msgspec.Struct, frozen=True, tag="cancelled", tag_field="kind"):
    """Stopped from outside before it could end by itself."""

    reason: CancelledReason


Outcome: TypeAlias = Completed | Truncated | Failed | Cancelled

SCORED = (Completed, Truncated)
"""Outcomes that are scored and train. A tuple: `isinstance` of a union builds it anew at every call."""


def label(outcome: Outcome) -> str:
    """One word for tables and counters: `completed`, `truncated.time`, `sandbox.lost`, `cancelled.user`."""
    match outcome:
        case Completed():
            return "completed"
        case Truncated(reason):
            return f"truncated.{reason}"
        case Failed(_, cause):
            return cause
        case Cancelled(reason):
            return f"cancelled.{reason}"
