"""Limits of a worker and of its cells.

Invalid limits raise a `UsageError` that names the field. A cell can have less or more time, output and
processes than its worker's limits say, but never more memory.
"""

import math
from typing import Any

import msgspec

from rookery.core import SandboxSpec, UsageError

MB = 1 << 20
OVERHEAD = 64 * MB
"""Memory of the sandbox for everything but the interpreter: the monitor, page tables, files in memory."""
OTHER_PROCESSES = 16
"""Processes of the sandbox that belong to no cell."""
MIN_MEMORY = 32 * MB
MAX_SECONDS = 1e7


class CellLimits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Limits of one cell. None: the worker's limit applies."""

    wall: float | None = None
    cpu_seconds: float | None = None
    memory: int | None = None
    output: int | None = None
    processes: int | None = None
    display: int | None = None

    def __post_init__(self) -> None:
        _check_limits(self)


class WorkerLimits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Limits of a worker, and defaults for its cells."""

    wall: float = 10.0
    """Seconds of one cell, not including calls of host functions."""
    cpu_seconds: float | None = None
    """CPU seconds of one cell and of everything that it starts."""
    memory: int | None = 512 * MB
    """Bytes of the interpreter and all processes of a cell together."""
    output: int = 64 << 10
    """Bytes kept of stdout and of stderr: head and tail. A cell that writes 64 times as much is killed."""
    processes: int | None = 64
    """Processes that a cell may have at a time, besides the interpreter."""
    display: int = 8192
    """Characters shown of the last expression's value."""
    calls: int = 1000
    """Calls of host functions by one cell."""

    def __post_init__(self) -> None:
        _check_limits(self)

    def for_cell(self, cell: CellLimits | None) -> "WorkerLimits":
        """Return these limits, overridden by those of a cell."""
        if cell is None:
            return self
        own = {name: value for name in cell.__struct_fields__ if (value := getattr(cell, name)) is not None}
        if self.memory is not None and own.get("memory", 0) > self.memory:
            raise UsageError(
                f"limits.memory: a cell cannot have {own['memory']} bytes; its worker has {self.memory}"
            )
        return msgspec.structs.replace(self, **own)


def _check_limits(limits: Any) -> None:
    for name in ("wall", "cpu_seconds"):
        value = getattr(limits, name)
        if value is not None and (
            isinstance(value, bool) or not math.isfinite(value) or not 0 < value <= MAX_SECONDS
        ):
            raise UsageError(f"limits.{name}: {value!r} is not a number of seconds above 0")
    minimums = {"memory": MIN_MEMORY, "output": 0, "processes": 0, "display": 16, "calls": 0}
    for name, bound in minimums.items():
        value = getattr(limits, name, None)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or not bound <= value < 1 << 60
        ):
            raise UsageError(f"limits.{name}: {value!r} is not a whole number of at least {bound}")
    for name, most in (("display", MB), ("processes", 1 << 20), ("calls", 1 << 30), ("output", 1 << 30)):
        value = getattr(limits, name, None)
        if value is not None and value > most:
            raise UsageError(f"limits.{name}: {value} is above the maximum of {most}")


def sandbox_for(limits: WorkerLimits, spec: SandboxSpec | None = None) -> SandboxSpec:
    """Return a spec with enough memory and processes for a worker with these limits and for its savepoint."""
    spec = spec or SandboxSpec()
    memory = None if limits.memory is None else max(2 * limits.memory + OVERHEAD, spec.memory or 0)
    pids = (
        None
        if limits.processes is None or spec.pids is None
        else max(limits.processes + OTHER_PROCESSES, spec.pids)
    )
    return msgspec.structs.replace(spec, memory=memory if limits.memory is not None else spec.memory, pids=pids)
