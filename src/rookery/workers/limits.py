"""What a worker and each of its cells may use.

Promises:
- a limit that makes no sense is a `UsageError` that names it, when the value is made or merged;
- a cell can be given less or more time, output and processes than its worker says, but never more memory;
- `sandbox_for` asks for a sandbox in which the limits hold and a savepoint has room.
"""

import math
from typing import Any

import msgspec

from rookery.core import SandboxSpec, UsageError

MB = 1 << 20
OVERHEAD = 64 * MB
"""Of the sandbox, for all that is not the worker's own state: the monitor, page tables, files in memory."""
OTHERS = 16
"""Processes of the sandbox that are none of a cell's."""
LEAST_MEMORY = 32 * MB
MOST_SECONDS = 1e7


class CellLimits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """For one cell; what is None is as the worker says."""

    wall: float | None = None
    cpu_seconds: float | None = None
    memory: int | None = None
    output: int | None = None
    processes: int | None = None
    display: int | None = None

    def __post_init__(self) -> None:
        _checked(self)


class WorkerLimits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """For a worker: its memory, and what each of its cells may use unless the cell says otherwise."""

    wall: float = 10.0
    """Seconds of one cell, without the time that host functions take."""
    cpu_seconds: float | None = None
    """Processor seconds of one cell and of all that it starts."""
    memory: int | None = 512 * MB
    """Bytes of the Python itself, and of all processes that a cell has at a time together."""
    output: int = 64 << 10
    """Bytes kept of each of stdout and stderr: the head and the tail. 64 times that ends the cell."""
    processes: int | None = 64
    """That a cell may have at a time besides the Python itself."""
    display: int = 8192
    """Characters of the last expression's value."""
    calls: int = 1000
    """Of host functions, by one cell."""

    def __post_init__(self) -> None:
        _checked(self)

    def for_cell(self, cell: CellLimits | None) -> "WorkerLimits":
        """These, with what the cell says."""
        if cell is None:
            return self
        said = {name: value for name in cell.__struct_fields__ if (value := getattr(cell, name)) is not None}
        if self.memory is not None and said.get("memory", 0) > self.memory:
            raise UsageError(
                f"limits.memory: a cell cannot have {said['memory']} bytes where its worker has {self.memory}"
            )
        return msgspec.structs.replace(self, **said)


def _checked(limits: Any) -> None:
    for name in ("wall", "cpu_seconds"):
        value = getattr(limits, name)
        if value is not None and (
            isinstance(value, bool) or not math.isfinite(value) or not 0 < value <= MOST_SECONDS
        ):
            raise UsageError(f"limits.{name}: {value!r} is not a number of seconds above 0")
    least = {"memory": LEAST_MEMORY, "output": 0, "processes": 0, "display": 16, "calls": 0}
    for name, bound in least.items():
        value = getattr(limits, name, None)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or not bound <= value < 1 << 60
        ):
            raise UsageError(f"limits.{name}: {value!r} is not a whole number of at least {bound}")
    for name, most in (("display", MB), ("processes", 1 << 20), ("calls", 1 << 30), ("output", 1 << 30)):
        value = getattr(limits, name, None)
        if value is not None and value > most:
            raise UsageError(f"limits.{name}: {value} is more than {most}, the most there can be")


def sandbox_for(limits: WorkerLimits, spec: SandboxSpec | None = None) -> SandboxSpec:
    """The spec, with room for a worker of these limits and for a savepoint of all of its memory."""
    spec = spec or SandboxSpec()
    memory = None if limits.memory is None else max(2 * limits.memory + OVERHEAD, spec.memory or 0)
    pids = None if limits.processes is None or spec.pids is None else max(limits.processes + OTHERS, spec.pids)
    return msgspec.structs.replace(spec, memory=memory if limits.memory is not None else spec.memory, pids=pids)
