"""Measure CPU time and memory of process trees through `/proc` and the per-process CPU clocks.

Guarantees:
- CPU time is user and system time of all threads, including ended ones, in nanoseconds;
- a process that starts during a measurement counts from its start; a process that ends makes the measurement fail,
  because its CPU time is no longer known;
- memory is PSS, so that pages shared after a fork count once; RSS for all processes if PSS cannot be read.
"""

import contextlib
import errno
import os
import time
from collections.abc import Iterable
from pathlib import Path

from rookery.sandbox_runtime.processes import list_children

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")
_SCHED = 2  # CPUCLOCK_SCHED: the precise clock, where utime and stime of /proc are sampled by ticks


class ProcessLostError(RuntimeError):
    """A measured process ended, so its CPU time and memory are unknown."""


def cpu_ns(pid: int) -> int:
    """Return the CPU nanoseconds that a process has used, from its own clock (see clock_getcpuclockid)."""
    try:
        return time.clock_gettime_ns((~pid << 3) | _SCHED)
    except OSError as error:
        if error.errno in {errno.EINVAL, errno.ESRCH}:
            raise ProcessLostError(f"process {pid} ended while it was measured") from error
        raise


def process_tree(pids: Iterable[int], *, exclude: Iterable[int] = ()) -> set[int]:
    """Return these processes and their descendants, except the subtrees of `exclude`."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdecimal() and (parent := _parent(entry)) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    excluded, tree, queue = set(exclude), set[int](), list(pids)
    while queue:
        pid = queue.pop()
        if pid not in tree and pid not in excluded:
            tree.add(pid)
            queue.extend(children.get(pid, ()))
    return tree


def _parent(entry: Path) -> int | None:
    """Return the parent's PID, or None if the process has ended or is a zombie."""
    try:
        stat = (entry / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name, in parentheses, may itself contain spaces and parentheses.
    state, parent = stat[stat.rindex(b")") + 1 :].split()[:2]
    return None if state in {b"Z", b"X"} else int(parent)


def cpu_with_ended_children(pid: int) -> float:
    """Return the CPU seconds of a process, its running children, and all descendants that have ended."""
    fields = 0
    for each in (pid, *list_children(pid)):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # its parent has its time now
            stat = (_PROC / str(each) / "stat").read_bytes()
            fields += sum(int(field) for field in stat[stat.rindex(b")") + 1 :].split()[11:15])
    return fields / _TICKS


class CpuMeter:
    """Measures the CPU time of processes and their descendants since `start`."""

    def __init__(self, pids: Iterable[int], *, exclude: Iterable[int] = ()) -> None:
        self.roots = tuple(pids)
        self.exclude = tuple(exclude)
        self._started: dict[int, int] = {}
        self.start()

    def start(self) -> None:
        self._started = {pid: cpu_ns(pid) for pid in process_tree(self.roots, exclude=self.exclude)}

    def used(self) -> float:
        """Return the CPU seconds that all of them used since `start`."""
        now = process_tree(self.roots, exclude=self.exclude)
        if lost := self._started.keys() - now:
            raise ProcessLostError(f"processes {sorted(lost)} ended while they were measured")
        return sum(cpu_ns(pid) - self._started.get(pid, 0) for pid in now) / 1e9


def memory_mb(pids: Iterable[int]) -> float:
    """Return the total memory of these processes in MiB."""
    pids = tuple(pids)
    try:
        return sum(_pss_kb(pid) for pid in pids) / 1024
    except (FileNotFoundError, PermissionError):
        return sum(_field_kb(_PROC / str(pid) / "status", b"VmRSS:") for pid in pids) / 1024


def _pss_kb(pid: int) -> int:
    return _field_kb(_PROC / str(pid) / "smaps_rollup", b"Pss:")


def _field_kb(path: Path, field: bytes) -> int:
    try:
        lines = path.read_bytes().splitlines()
    except (FileNotFoundError, ProcessLookupError) as error:
        if isinstance(error, FileNotFoundError) and path.parent.exists():
            raise  # the process is alive, so this kernel has no such file
        raise ProcessLostError(f"process {path.parent.name} ended while it was measured") from error
    for line in lines:
        if line.startswith(field):
            return int(line.split()[1])
    raise ProcessLostError(f"process {path.parent.name} ended while it was measured")
