"""What the cells of a task may use: the environment's defaults, and what the task says over them.

Promises:
- an invalid limit is a task's fault that names its field, before anything runs;
- a limit below the least that a program can run with is raised to it, with a warning;
- a limit that the sandbox cannot hold is said so, and is never quietly left out.
"""

import warnings
from typing import Any, Final

import msgspec

from rookery.core import SandboxSpec, TaskError, UsageError
from rookery.core.limits import whole
from rookery.workers import WorkerLimits, sandbox_for
from rookery.workers.limits import LEAST_MEMORY, MOST_SECONDS

OWN: Final = frozenset({"wall", "cpu", "memory", "output", "pids", "disk"})
"""Names in a row's `limits` that are not those of a rollout: they are its programs'."""
UNIT_ERROR: Final = 1 << 20
"""Bytes of memory below which an environment was surely given megabytes instead of bytes."""
_FIELDS: Final = {"timeout_seconds": "wall", "memory_limit_bytes": "memory"}
_NAMES: Final = {"wall": "wall", "cpu": "cpu_seconds", "memory": "memory", "output": "output", "pids": "processes"}
_BYTES: Final = ("memory", "output", "pids", "disk")


def defaults(timeout_seconds: float | None, memory_limit_bytes: float | None) -> WorkerLimits:
    """Return the limits of an environment; `UsageError` names the argument that is wrong.

    None for either means no limit from the environment: a cell then runs until the rollout's time is over, and has
    the memory of its sandbox.
    """
    memory = whole(memory_limit_bytes)
    for name, value in (("default_timeout_seconds", timeout_seconds), ("default_memory_limit_bytes", memory)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise UsageError(f"{name} must be a number or None, not {value!r:.80}")
    if isinstance(memory, int) and 0 < memory < UNIT_ERROR:
        raise UsageError(f"default_memory_limit_bytes is {memory} bytes, less than 1 MiB: write it in bytes")
    if isinstance(memory, int) and UNIT_ERROR <= memory < LEAST_MEMORY:
        warnings.warn(
            f"default_memory_limit_bytes is raised from {memory} to {LEAST_MEMORY}, the least that Python needs",
            stacklevel=3,
        )
        memory = LEAST_MEMORY
    try:
        return WorkerLimits(wall=MOST_SECONDS if timeout_seconds is None else timeout_seconds, memory=memory)
    except UsageError as error:
        said = str(error).replace("limits.wall", "default_timeout_seconds")
        raise UsageError(said.replace("limits.memory", "default_memory_limit_bytes")) from None


def is_unlimited(limits: WorkerLimits) -> bool:
    """Whether neither the environment nor the task limits the time of a cell."""
    return limits.wall >= MOST_SECONDS


def normalized(data: dict[str, Any], least: int = LEAST_MEMORY) -> tuple[dict[str, Any], list[str]]:
    """Return a task's data with whole numbers of bytes, and a sentence for each limit raised to `least`."""
    notes: list[str] = []

    def memory_of(field: str, value: Any) -> Any:
        value = whole(value)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < least:
            notes.append(f"{field} is raised from {value} to {least}, the least that a program runs with")
            return least
        return value

    changed: dict[str, Any] = {}
    if "memory_limit_bytes" in data:
        changed["memory_limit_bytes"] = memory_of("memory_limit_bytes", data["memory_limit_bytes"])
    given = data.get("limits")
    if isinstance(given, dict):
        said = {name: whole(value) if name in _BYTES else value for name, value in given.items()}
        if "memory" in said:
            said["memory"] = memory_of("limits.memory", said["memory"])
        changed["limits"] = said
    return data | changed, notes


def of_task(task: str, data: dict[str, Any], below: WorkerLimits) -> WorkerLimits:
    """Return what the cells of a task may use. `data` is normalized."""
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


def sandbox_of(task: str, limits: WorkerLimits, data: dict[str, Any], spec: SandboxSpec) -> SandboxSpec:
    """Return the sandbox for a task's cells. `data` is normalized."""
    made = sandbox_for(limits, spec)
    disk = (data.get("limits") or {}).get("disk")
    if disk is None:
        return made
    if isinstance(disk, bool) or not isinstance(disk, int) or disk < 1:
        raise TaskError(f"task {task}: limits.disk must be a whole number above 0, got {disk!r:.80}")
    return msgspec.structs.replace(made, disk=disk)
