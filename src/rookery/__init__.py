"""Rookery runs LLM agents through tasks, thousands of times, inside sandboxes, and hands a trainer
token-exact, honestly scored trajectories. Its promise: a failure stays where it happened."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rookery.core import Group, Limits, Message, Rollout, Sampling, SandboxSpec, Segment, Task, Taskset
    from rookery.engine import Engine, SyncEngine
    from rookery.environments import Context, Environment, Score, ToolEnvironment, environment, tool
    from rookery.scoring.programs import Case, Program, ProgramLimits, ProgramResult
    from rookery.scoring.service import run_code, run_code_sync, stream_code
    from rookery.training import Batch, BatchConfig, make_batch

_HOME = {
    "Batch": "training",
    "BatchConfig": "training",
    "Case": "scoring.programs",
    "Context": "environments",
    "Engine": "engine",
    "Environment": "environments",
    "Group": "core",
    "Limits": "core",
    "Message": "core",
    "Program": "scoring.programs",
    "ProgramLimits": "scoring.programs",
    "ProgramResult": "scoring.programs",
    "Rollout": "core",
    "Sampling": "core",
    "SandboxSpec": "core",
    "Score": "environments",
    "Segment": "core",
    "SyncEngine": "engine",
    "Task": "core",
    "Taskset": "core",
    "ToolEnvironment": "environments",
    "environment": "environments",
    "make_batch": "training",
    "run_code": "scoring.service",
    "run_code_sync": "scoring.service",
    "stream_code": "scoring.service",
    "tool": "environments",
}

__all__ = [
    "Batch",
    "BatchConfig",
    "Case",
    "Context",
    "Engine",
    "Environment",
    "Group",
    "Limits",
    "Message",
    "Program",
    "ProgramLimits",
    "ProgramResult",
    "Rollout",
    "Sampling",
    "SandboxSpec",
    "Score",
    "Segment",
    "SyncEngine",
    "Task",
    "Taskset",
    "ToolEnvironment",
    "environment",
    "make_batch",
    "run_code",
    "run_code_sync",
    "stream_code",
    "tool",
]


def __getattr__(name: str) -> Any:
    # Lazy, so that `import rookery` and `rookery --help` stay cheap.
    if name not in _HOME:
        raise AttributeError(f"module 'rookery' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"rookery.{_HOME[name]}"), name)
    globals()[name] = value
    return value
