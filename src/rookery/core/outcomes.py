"""Outcomes of rollouts: `Completed`, `Truncated`, `Failed` or `Cancelled`.

What the policy does is a result (`Completed` or `Truncated`). `Failed` is for failures that are not the policy's.
"""

from typing import Literal, TypeAlias

import msgspec

Fault: TypeAlias = Literal["infra", "task", "bug"]
TruncatedReason: TypeAlias = Literal["turns", "tokens", "context", "time", "lost"]
CancelledReason: TypeAlias = Literal["user", "filtered", "stale", "shutdown"]
Stage: TypeAlias = Literal["queue", "setup", "run", "score", "teardown", "load"]
"""`load` is everything after the environment returned: reading tokens, merging turns, building a batch."""


class Completed(msgspec.Struct, frozen=True, tag="completed", tag_field="kind"):
    """The environment's run stage returned."""


class Truncated(msgspec.Struct, frozen=True, tag="truncated", tag_field="kind"):
    """A budget ended the run stage. The rollout is scored and trains."""

    reason: TruncatedReason


class Failed(msgspec.Struct, frozen=True, tag="failed", tag_field="kind", omit_defaults=True):
    """Something other than the policy failed. The rollout has no segments and no reward, and counts nowhere."""

    fault: Fault
    cause: str
    detail: str
    stage: Stage = "run"
    traceback: str = ""


class Cancelled(msgspec.Struct, frozen=True, tag="cancelled", tag_field="kind"):
    """The rollout was cancelled before it ended."""

    reason: CancelledReason


Outcome: TypeAlias = Completed | Truncated | Failed | Cancelled

SCORED = (Completed, Truncated)
"""Outcomes that are scored and train. A tuple, because `isinstance` with a union is slower."""


def label(outcome: Outcome) -> str:
    """Return a label for tables and counters: `completed`, `truncated.time`, `sandbox.lost`, `cancelled.user`."""
    match outcome:
        case Completed():
            return "completed"
        case Truncated(reason):
            return f"truncated.{reason}"
        case Failed(_, cause):
            return cause
        case Cancelled(reason):
            return f"cancelled.{reason}"
