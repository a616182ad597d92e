"""Outcomes of rollouts: `Completed`, `Truncated`, `Failed` or `Cancelled`.

Whatever the policy (the model) does is a result: `Completed` or `Truncated`. `Failed` is for failures for which
the policy is not responsible.
"""

from typing import Literal, TypeAlias

import msgspec

Fault: TypeAlias = Literal["infra", "task", "bug"]
TruncatedReason: TypeAlias = Literal["turns", "tokens", "context", "time", "lost"]
CancelledReason: TypeAlias = Literal["user", "filtered", "stale", "shutdown"]
Stage: TypeAlias = Literal["queue", "setup", "run", "score", "teardown", "load"]
"""The part of a rollout in which it ended. `load` is everything after the environment returned: reading the
recorded tokens, merging turns into segments, building a batch."""


class Completed(msgspec.Struct, frozen=True, tag="completed", tag_field="kind"):
    """The environment's run stage returned normally. The rollout is scored and trains."""


class Truncated(msgspec.Struct, frozen=True, tag="truncated", tag_field="kind"):
    """The run stage ended early through the policy's doing. The rollout counts and trains.

    The reason is the exhausted budget (`turns`, `tokens`, `context`, `time`), or `lost` if the policy destroyed
    its own sandbox, which gives the minimum reward.
    """

    reason: TruncatedReason


class Failed(msgspec.Struct, frozen=True, tag="failed", tag_field="kind", omit_defaults=True):
    """Something other than the policy failed, so the rollout is missing data.

    It has no segments and no reward, and counts in no mean, baseline or loss. `cause` is a stable code such as
    `sandbox.lost`.
    """

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
"""The outcomes whose rollouts are scored and train. A tuple, because `isinstance` with a union is slower."""


def label(outcome: Outcome) -> str:
    """Return a label for tables and counters, such as `completed`, `truncated.time` or `cancelled.user`.

    The label of a failed rollout is its cause code, such as `sandbox.lost`.
    """
    match outcome:
        case Completed():
            return "completed"
        case Truncated(reason):
            return f"truncated.{reason}"
        case Failed(_, cause):
            return cause
        case Cancelled(reason):
            return f"cancelled.{reason}"
