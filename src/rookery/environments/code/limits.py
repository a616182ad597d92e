"""What the cells of a task may use: the environment's defaults, and what the task says over them.

Promises:
- an invalid limit is a task's fault that names its field, before anything runs;
- a limit that the sandbox cannot hold is said so, and is never quietly left out.
"""

from typing import Any, Final

import msgspec

from rookery.core import SandboxSpec, TaskError, UsageError
from rookery.workers import WorkerLimits, sandbox_for

OWN: Final = frozenset({"wall", "cpu", "memory", "output", "pids", "disk"})
"""Names in a row's `limits` that are not those of a rollout: they are its programs'."""
_FIELDS: Final = {"timeout_seconds": "wall", "memory_limit_bytes": "memory"}
_NAMES: Final = {"wall": "wall", "cpu": "cpu_seconds", "memory": "memory", "output": "output", "pids": "processes"}


def defaults(timeout_seconds: float, memory_limit_bytes: int | None) -> WorkerLimits:
    """Of an environment; `UsageError` names the argument."""
    try:
        return WorkerLimits(wall=timeout_seconds, memory=memory_limit_bytes)
    except UsageError as error:
        said = str(error).replace("limits.wall", "default_timeout_seconds")
        raise UsageError(said.replace("limits.memory", "default_memory_limit_bytes")) from None


def of_task(task: str, data: dict[str, Any], below: WorkerLimits) -> WorkerLimits:
    """What the cells of a task may use."""
    said: dict[str, Any] = {}
    given = data.get("limits") or {}
    if not isinstance(given, dict):
        raise TaskError(f"task {task}: limits must be an object, got {given!r:.80}")
    for name, value in given.items():
        if name not in OWN:
            raise TaskError(f"task {task}: limits.{name} is not known; there are {', '.join(sorted(OWN))}")
        if name in _NAMES and value is not None:
            said[_NAMES[name]] = value
    for field, name in _FIELDS.items():
        if (value := data.get(field)) is not None:
            said[name] = value
    try:
        return _replaced(below, said)
    except UsageError as error:
        words = str(error)
        for field, name in _FIELDS.items():
            if data.get(field) is not None:
                words = words.replace(f"limits.{name}", field)
        raise TaskError(f"task {task}: {words}") from None


def _replaced(below: WorkerLimits, said: dict[str, Any]) -> WorkerLimits:
    for name, value in said.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UsageError(f"limits.{name}: {value!r:.80} is no number")
    return msgspec.structs.replace(below, **said)


def sandbox_of(limits: WorkerLimits, data: dict[str, Any], spec: SandboxSpec) -> SandboxSpec:
    """The sandbox for a task's cells."""
    made = sandbox_for(limits, spec)
    disk = (data.get("limits") or {}).get("disk")
    return msgspec.structs.replace(made, disk=disk) if disk is not None else made
