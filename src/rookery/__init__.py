"""Rookery runs LLM agents through tasks in sandboxes and gives a trainer token-exact, scored trajectories.

The names below are the public API, together with the `__all__` of each documented package (`rookery.training`,
`rookery.sandboxes`, …). They are imported on first use, so `import rookery` and `rookery --help` stay fast.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rookery.core import Attempt as Attempt
    from rookery.core import Cancelled as Cancelled
    from rookery.core import Completed as Completed
    from rookery.core import ExecResult as ExecResult
    from rookery.core import Failed as Failed
    from rookery.core import Group as Group
    from rookery.core import JournalError as JournalError
    from rookery.core import Limits as Limits
    from rookery.core import Message as Message
    from rookery.core import Outcome as Outcome
    from rookery.core import Rollout as Rollout
    from rookery.core import RookeryError as RookeryError
    from rookery.core import Sampling as Sampling
    from rookery.core import SandboxError as SandboxError
    from rookery.core import SandboxSpec as SandboxSpec
    from rookery.core import ScoringError as ScoringError
    from rookery.core import Segment as Segment
    from rookery.core import StageClock as StageClock
    from rookery.core import Task as Task
    from rookery.core import TaskError as TaskError
    from rookery.core import Taskset as Taskset
    from rookery.core import ToolCall as ToolCall
    from rookery.core import ToolSchema as ToolSchema
    from rookery.core import Truncated as Truncated
    from rookery.core import Truncation as Truncation
    from rookery.core import Turn as Turn
    from rookery.core import UpstreamError as UpstreamError
    from rookery.core import Usage as Usage
    from rookery.core import UsageError as UsageError
    from rookery.core import WorkerRecoveryError as WorkerRecoveryError
    from rookery.engine import Engine as Engine
    from rookery.engine import EngineConfig as EngineConfig
    from rookery.engine import GroupStream as GroupStream
    from rookery.engine import RemoteEngine as RemoteEngine
    from rookery.engine import RetryPolicy as RetryPolicy
    from rookery.engine import Stopped as Stopped
    from rookery.engine import SyncEngine as SyncEngine
    from rookery.environments import CallLimit as CallLimit
    from rookery.environments import Context as Context
    from rookery.environments import Environment as Environment
    from rookery.environments import Mixture as Mixture
    from rookery.environments import MixtureEntry as MixtureEntry
    from rookery.environments import Score as Score
    from rookery.environments import Tool as Tool
    from rookery.environments import ToolEnvironment as ToolEnvironment
    from rookery.environments import Ungraded as Ungraded
    from rookery.environments import environment as environment
    from rookery.environments import load_environment as load_environment
    from rookery.environments import tool as tool
    from rookery.journal import RunReader as RunReader
    from rookery.journal import find_run as find_run
    from rookery.journal import list_runs as list_runs
    from rookery.sandboxes import Command as Command
    from rookery.sandboxes import Provider as Provider
    from rookery.sandboxes import Sandbox as Sandbox
    from rookery.sandboxes import Shell as Shell
    from rookery.sandboxes import open_provider as open_provider
    from rookery.scoring.code_execution import run_code as run_code
    from rookery.scoring.code_execution import run_code_sync as run_code_sync
    from rookery.scoring.code_execution import stream_code as stream_code
    from rookery.scoring.programs import Case as Case
    from rookery.scoring.programs import Program as Program
    from rookery.scoring.programs import ProgramLimits as ProgramLimits
    from rookery.scoring.programs import ProgramResult as ProgramResult
    from rookery.tasks import check_tasks as check_tasks
    from rookery.tasks import load_tasks as load_tasks
    from rookery.training import Batch as Batch
    from rookery.training import BatchConfig as BatchConfig
    from rookery.training import make_batch as make_batch
    from rookery.training import pack as pack
    from rookery.upstreams import ModelReply as ModelReply
    from rookery.upstreams import ModelRequest as ModelRequest
    from rookery.upstreams import UpstreamConfig as UpstreamConfig
    from rookery.upstreams.embedded import Weights as Weights
    from rookery.workers import CellLimits as CellLimits
    from rookery.workers import Worker as Worker
    from rookery.workers import WorkerLimits as WorkerLimits

_PACKAGES = {
    "core": (
        "Attempt Cancelled Completed ExecResult Failed Group JournalError Limits Message Outcome Rollout "
        "RookeryError Sampling SandboxError SandboxSpec ScoringError Segment StageClock Task TaskError "
        "Taskset ToolCall ToolSchema Truncated Truncation Turn UpstreamError Usage UsageError "
        "WorkerRecoveryError"
    ),
    "engine": "Engine EngineConfig GroupStream RemoteEngine RetryPolicy Stopped SyncEngine",
    "environments": (
        "CallLimit Context Environment Mixture MixtureEntry Score Tool ToolEnvironment Ungraded environment "
        "load_environment tool"
    ),
    "journal": "RunReader find_run list_runs",
    "sandboxes": "Command Provider Sandbox Shell open_provider",
    "scoring.programs": "Case Program ProgramLimits ProgramResult",
    "scoring.code_execution": "run_code run_code_sync stream_code",
    "tasks": "check_tasks load_tasks",
    "training": "Batch BatchConfig make_batch pack",
    "upstreams": "ModelReply ModelRequest UpstreamConfig",
    "upstreams.embedded": "Weights",
    "workers": "CellLimits Worker WorkerLimits",
}
"""The public names of each package below `rookery`, separated by spaces."""

_HOME = {name: package for package, names in _PACKAGES.items() for name in names.split()}

__all__ = sorted(_HOME)  # noqa: PLE0605  (a list of strings)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rookery' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"rookery.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
