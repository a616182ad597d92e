"""Measure the resources that the programs of a sandbox used. Runs in the owner's process, when a sandbox closes.

The guard reports CPU time and memory of commands that have ended. Persistent shells and workers usually run until
the sandbox is closed, so their processes are read from /proc, below the guard's process. The cgroup of the sandbox
adds the peaks that the kernel counts for all processes together.

- A cgroup may be reused. A peak that was already reached before the sandbox was created is not counted.
- A value that cannot be read is left out; measuring never fails.
"""

import os
from typing import Final, NamedTuple

from rookery.sandbox_runtime import cgroups

MAX_PROCESSES: Final = 1_000
"""Maximum number of processes that are read, so that a fork bomb does not delay the end of its sandbox."""
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_BLOCK: Final = 1 << 14


class Peaks(NamedTuple):
    """Peaks that the kernel counted in a cgroup: bytes of memory, and processes. 0 if a peak is unknown."""

    memory: int = 0
    processes: int = 0


class ProcessTotals(NamedTuple):
    """CPU seconds of all processes below a process, also of ended ones, and the number of running ones."""

    cpu: float
    running: int


def read_peaks(memory_cgroup: str) -> Peaks:
    """Return the peaks of a cgroup, given its directory for the memory controller, which may be empty."""
    if not memory_cgroup:
        return Peaks()
    memory = _read_number(f"{memory_cgroup}/memory.peak") or _read_number(
        f"{memory_cgroup}/memory.max_usage_in_bytes"
    )
    pids = cgroups.find_pids_directory(memory_cgroup)
    return Peaks(memory, _read_number(f"{pids}/pids.peak") if pids else 0)


def read_process_totals(guard: int) -> ProcessTotals | None:
    """Return what the processes below the guard used. The guard itself does not count. None if it is gone."""
    own = _read_stat(guard)
    if own is None:
        return None
    cpu = own[1]  # of its children that have ended
    waiting, running = [guard], 0
    while waiting and running < MAX_PROCESSES:
        for child in _read_children(waiting.pop()):
            stat = _read_stat(child)
            if stat is not None:
                cpu += sum(stat)
                running += 1
                waiting.append(child)
    return ProcessTotals(cpu / _TICKS, running)


def _read_stat(pid: int) -> tuple[int, int] | None:
    """Return the clock ticks of a process and of its children that have ended; None if it is gone."""
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])) if len(fields) > 14 else None


def _read_children(pid: int) -> list[int]:
    """Return the children of the main thread of a process; none if the kernel does not list them."""
    return [int(child) for child in _read(f"/proc/{pid}/task/{pid}/children").split()]


def _read_number(path: str) -> int:
    text = _read(path).strip()
    return int(text) if text.isdigit() else 0


def _read(path: str) -> bytes:
    """Return the content of a file of the kernel; empty if it cannot be read."""
    # Without a file object and `Path`: this runs eight times for every sandbox.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        text = block = os.read(fd, _BLOCK)
        while len(block) == _BLOCK:
            block = os.read(fd, _BLOCK)
            text += block
    except OSError:
        return b""
    finally:
        os.close(fd)
    return text
