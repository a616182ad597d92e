"""Pure data and rules that every room shares.

Promises:
- no I/O, no clock, no event loop; nothing imported that is heavier than msgspec;
- every type is immutable and encodes to JSON and msgpack as it stands;
- an outcome is exactly one of `Completed | Truncated | Failed | Cancelled`;
- arrays that describe the same tokens have the same length, or the object is not built.
"""

from rookery.core.causes import CAUSES, Cause, cause_of
from rookery.core.clock import StageClock
from rookery.core.errors import (
    JournalError,
    RookeryError,
    SandboxError,
    ScoringError,
    TaskError,
    Truncation,
    UpstreamError,
    UsageError,
    WorkerRecoveryError,
    boundary,
    failed,
)
from rookery.core.limits import DEFAULT_LIMITS, Limits
from rookery.core.messages import Message, ToolCall, ToolSchema
from rookery.core.outcomes import (
    SCORED,
    Cancelled,
    CancelledReason,
    Completed,
    Failed,
    Fault,
    Outcome,
    Stage,
    Truncated,
    TruncatedReason,
    label,
)
from rookery.core.records import Attempt, Extent, Group, Rollout, Timing, Usage, failed_record, rollout_place
from rookery.core.sampling import Sampling
from rookery.core.sandboxes import ExecResult, ExecStatus, ExecUsage, Mount, SandboxSpec
from rookery.core.seeds import derive_seed
from rookery.core.tasks import Task, Taskset
from rookery.core.turns import Extra, Finish, Segment, Span, Turn, floats, ints

__all__ = [
    "CAUSES",
    "DEFAULT_LIMITS",
    "SCORED",
    "Attempt",
    "Cancelled",
    "CancelledReason",
    "Cause",
    "Completed",
    "ExecResult",
    "ExecStatus",
    "ExecUsage",
    "Extent",
    "Extra",
    "Failed",
    "Fault",
    "Finish",
    "Group",
    "JournalError",
    "Limits",
    "Message",
    "Mount",
    "Outcome",
    "Rollout",
    "RookeryError",
    "Sampling",
    "SandboxError",
    "SandboxSpec",
    "ScoringError",
    "Segment",
    "Span",
    "Stage",
    "StageClock",
    "Task",
    "TaskError",
    "Taskset",
    "Timing",
    "ToolCall",
    "ToolSchema",
    "Truncated",
    "TruncatedReason",
    "Truncation",
    "Turn",
    "UpstreamError",
    "Usage",
    "UsageError",
    "WorkerRecoveryError",
    "boundary",
    "cause_of",
    "derive_seed",
    "failed",
    "failed_record",
    "floats",
    "ints",
    "label",
    "rollout_place",
]
