"""Limits of a worker (a persistent Python interpreter in a sandbox) and of the cells that it runs.

Invalid limits raise a `UsageError` that names the field. The limits of a single cell may be lower or higher than
those of its worker, except for memory, which can only be lower.
"""

import math
from typing import Any

import msgspec

from rookery.core import SandboxSpec, UsageError

MB = 1 << 20
OVERHEAD = 64 * MB
"""Bytes of sandbox memory for everything besides the interpreter: its supervisor, page tables, files in memory."""
OTHER_PROCESSES = 16
"""Number of processes that a sandbox gets in addition to those of a cell."""
MIN_MEMORY = 32 * MB
MAX_SECONDS = 1e7


class CellLimits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Limits of one cell, with the meaning of the same fields of `WorkerLimits`. None means the worker's limit."""

    wall: float | None = None
    cpu_seconds: float | None = None
    memory: int | None = None
    output: int | None = None
    processes: int | None = None
    display: int | None = None

    def __post_init__(self) -> None:
        _check_limits(self)


class WorkerLimits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Limits that a worker applies to each of its cells, unless the cell has its own. None means no limit."""

    wall: float = 10.0
    """Maximum seconds of one cell, not counting the time in host functions (functions outside of the sandbox)."""
    cpu_seconds: float | None = None
    """Maximum CPU seconds of one cell and all processes that it starts."""
    memory: int | None = 512 * MB
    """Maximum bytes of memory of the interpreter and all processes of a cell together."""
    output: int = 64 << 10
    """Bytes kept of stdout and of stderr each; the middle is dropped. A cell that writes more than 64 times as
    much to one of them, and more than 4 MiB, is killed."""
    processes: int | None = 64
    """Maximum number of processes that a cell may have at a time, besides the interpreter."""
    display: int = 8192
    """Maximum characters of the `repr` of the last expression's value."""
    calls: int = 1000
    """Maximum number of calls of host functions by one cell."""

    def __post_init__(self) -> None:
        _check_limits(self)

    def for_cell(self, cell: CellLimits | None) -> "WorkerLimits":
        """Return these limits, overridden by those fields of `cell` that are not None.

        Raise `UsageError` if the cell's memory limit is higher than the worker's.
        """
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
            raise UsageError(
                f"limits.{name}: {value!r} is not a number of seconds above 0 and up to {MAX_SECONDS:g}"
            )
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
    """Return `spec` with enough memory and processes for a worker with these limits and for its savepoint.

    Higher values in `spec` stay. If `limits.memory` is None, the memory stays as in `spec`; if `limits.processes`
    is None, the sandbox has no process limit.
    """
    spec = spec or SandboxSpec()
    memory = None if limits.memory is None else max(2 * limits.memory + OVERHEAD, spec.memory or 0)
    pids = (
        None
        if limits.processes is None or spec.pids is None
        else max(limits.processes + OTHER_PROCESSES, spec.pids)
    )
    return msgspec.structs.replace(spec, memory=memory if limits.memory is not None else spec.memory, pids=pids)
