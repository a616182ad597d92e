"""Data types and rules that all packages of Rookery share.

- The package does no I/O, needs no event loop, and imports nothing heavier than msgspec.
- Record types are immutable and can be encoded as JSON and msgpack.
- The outcome of a rollout is exactly one of `Completed | Truncated | Failed | Cancelled`.
- Arrays that describe the same tokens must have the same length; the constructors of `Turn` and `Segment` check
  this.
"""

from rookery.core.causes import CAUSES, Cause, get_cause
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
    failed_outcome,
    wrap_errors,
)
from rookery.core.limits import DEFAULT_LIMITS, Limits
from rookery.core.messages import Message, Sampling, ToolCall, ToolSchema
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
from rookery.core.records import Attempt, Extent, Group, Rollout, Timing, Usage, mark_failed, parse_rollout_id
from rookery.core.sandboxes import ExecResult, ExecStatus, ExecUsage, Mount, SandboxSpec, SandboxUsage
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
    "SandboxUsage",
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
    "derive_seed",
    "failed_outcome",
    "floats",
    "get_cause",
    "ints",
    "label",
    "mark_failed",
    "parse_rollout_id",
    "wrap_errors",
]
