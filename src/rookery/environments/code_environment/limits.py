"""Limits of the Python cells of a task: the environment's defaults, overridden by the task.

An invalid limit in a task raises `TaskError` with a message that names the field. A memory limit below the minimum
that Python needs is raised to that minimum, with a warning.
"""

import warnings
from typing import Any, Final

import msgspec

from rookery.core import SandboxSpec, TaskError, UsageError
from rookery.core.limits import whole
from rookery.workers import WorkerLimits, sandbox_for
from rookery.workers.limits import MAX_SECONDS, MIN_MEMORY

PROGRAM_LIMITS: Final = frozenset({"wall", "cpu", "memory", "output", "pids", "disk"})
"""Names in a task's `limits` that apply to the programs in its sandbox and not to the rollout."""
UNIT_ERROR: Final = 1 << 20
"""A memory limit below this many bytes is rejected, because the user certainly meant megabytes."""
_TASK_FIELDS: Final = {"timeout_seconds": "wall", "memory_limit_bytes": "memory"}
_WORKER_FIELDS: Final = {
    "wall": "wall",
    "cpu": "cpu_seconds",
    "memory": "memory",
    "output": "output",
    "pids": "processes",
}
_INTEGER_LIMITS: Final = ("memory", "output", "pids", "disk")


def default_limits(timeout_seconds: float | None, memory_limit_bytes: float | None) -> WorkerLimits:
    """Return an environment's default limits of a cell; raise `UsageError` that names an invalid argument.

    None means no limit of its own: a cell may then run until the rollout's time is over, and use all memory of the
    sandbox. A memory limit below the minimum for Python is raised to it, with a warning.
    """
    memory = whole(memory_limit_bytes)
    for name, value in (("default_timeout_seconds", timeout_seconds), ("default_memory_limit_bytes", memory)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise UsageError(f"{name} must be a number or None, not {value!r:.80}")
    if isinstance(memory, int) and 0 < memory < UNIT_ERROR:
        raise UsageError(
            f"default_memory_limit_bytes is {memory} bytes, less than 1 MiB: its unit is bytes, not megabytes"
        )
    if isinstance(memory, int) and UNIT_ERROR <= memory < MIN_MEMORY:
        warnings.warn(
            f"default_memory_limit_bytes is raised from {memory} to {MIN_MEMORY}, the minimum for Python",
            stacklevel=3,
        )
        memory = MIN_MEMORY
    try:
        return WorkerLimits(wall=MAX_SECONDS if timeout_seconds is None else timeout_seconds, memory=memory)
    except UsageError as error:
        values = str(error).replace("limits.wall", "default_timeout_seconds")
        raise UsageError(values.replace("limits.memory", "default_memory_limit_bytes")) from None


def is_unlimited(limits: WorkerLimits) -> bool:
    """Return whether neither the environment nor the task limits the time of a cell."""
    return limits.wall >= MAX_SECONDS


def normalize_limits(data: dict[str, Any], minimum: int = MIN_MEMORY) -> tuple[dict[str, Any], list[str]]:
    """Return a task's data with normalised limits, and a note for each memory limit that was raised to `minimum`.

    Byte counts and process counts such as 256e6 become integers. Invalid values are left for `limits_for_task` to
    reject.
    """
    notes: list[str] = []

    def parse_memory(field: str, value: Any) -> Any:
        value = whole(value)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < minimum:
            notes.append(f"{field} is raised from {value} to {minimum}, the minimum for a program")
            return minimum
        return value

    normalized: dict[str, Any] = {}
    if "memory_limit_bytes" in data:
        normalized["memory_limit_bytes"] = parse_memory("memory_limit_bytes", data["memory_limit_bytes"])
    limits_data = data.get("limits")
    if isinstance(limits_data, dict):
        values = {name: whole(value) if name in _INTEGER_LIMITS else value for name, value in limits_data.items()}
        if "memory" in values:
            values["memory"] = parse_memory("limits.memory", values["memory"])
        normalized["limits"] = values
    return data | normalized, notes


def limits_for_task(task: str, data: dict[str, Any], defaults: WorkerLimits) -> WorkerLimits:
    """Return the limits of a task's cells: `defaults`, overridden by the limits in `data`.

    `task` is the task's ID and `data` the result of `normalize_limits`. Raise `TaskError` if a limit is invalid.
    """
    values: dict[str, Any] = {}
    limits_data = data.get("limits") or {}
    if not isinstance(limits_data, dict):
        raise TaskError(f"task {task}: limits must be an object, got {limits_data!r:.80}")
    for name, value in limits_data.items():
        if name not in PROGRAM_LIMITS:
            raise TaskError(
                f"task {task}: limits.{name} is unknown; known are {', '.join(sorted(PROGRAM_LIMITS))}"
            )
        if name in _WORKER_FIELDS and value is not None:
            values[_WORKER_FIELDS[name]] = value
    for field, name in _TASK_FIELDS.items():
        if (value := data.get(field)) is not None:
            values[name] = value
    try:
        return _override(defaults, values)
    except UsageError as error:
        message = str(error)
        for field, name in _TASK_FIELDS.items():
            if data.get(field) is not None:
                message = message.replace(f"limits.{name}", field)
        raise TaskError(f"task {task}: {message}") from None


def _override(defaults: WorkerLimits, values: dict[str, Any]) -> WorkerLimits:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UsageError(f"limits.{name}: {value!r:.80} is not a number")
    return msgspec.structs.replace(defaults, **values)


def sandbox_for_task(task: str, limits: WorkerLimits, data: dict[str, Any], spec: SandboxSpec) -> SandboxSpec:
    """Return `spec` with enough memory and processes for cells with these limits, and with the task's disk limit.

    `task` is the task's ID and `data` the result of `normalize_limits`. Raise `TaskError` if the limit is invalid.
    """
    sandbox = sandbox_for(limits, spec)
    disk = (data.get("limits") or {}).get("disk")
    if disk is None:
        return sandbox
    if isinstance(disk, bool) or not isinstance(disk, int) or disk < 1:
        raise TaskError(f"task {task}: limits.disk must be an integer above 0, got {disk!r:.80}")
    return msgspec.structs.replace(sandbox, disk=disk)
