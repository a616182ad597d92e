"""CPU time and memory of processes, ours and those they started.

Promises:
- CPU time is user and system time of all threads, living and ended, to the nanosecond;
- a process that appears while we measure counts from its birth, one that is lost fails the measurement:
  a figure never leaves out what a process of ours has used;
- memory is PSS, so that pages shared by a fork count once; RSS, for all alike, where PSS cannot be read.
"""

import errno
import time
from collections.abc import Iterable
from pathlib import Path

_PROC = Path("/proc")
_SCHED = 2  # CPUCLOCK_SCHED: the precise clock, where utime and stime of /proc are sampled by ticks


class ProcessLost(RuntimeError):  # noqa: N818  (says what happened)
    """A process ended while it was measured; what it used is not known any more."""


def cpu_ns(pid: int) -> int:
    """CPU nanoseconds a process has used, through its own clock id (see clock_getcpuclockid)."""
    try:
        return time.clock_gettime_ns((~pid << 3) | _SCHED)
    except OSError as error:
        if error.errno in {errno.EINVAL, errno.ESRCH}:
            raise ProcessLost(f"process {pid} ended while it was measured") from error
        raise


def family(pids: Iterable[int], *, without: Iterable[int] = ()) -> set[int]:
    """These processes and everything under them, except what is under `without`."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdecimal() and (parent := _parent(entry)) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    left_out, found, queue = set(without), set[int](), list(pids)
    while queue:
        pid = queue.pop()
        if pid not in found and pid not in left_out:
            found.add(pid)
            queue.extend(children.get(pid, ()))
    return found


def _parent(entry: Path) -> int | None:
    """The parent's pid; None when the process ended meanwhile or is a zombie, which uses nothing more."""
    try:
        stat = (entry / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name, in parentheses, may hold spaces and parentheses of its own.
    state, parent = stat[stat.rindex(b")") + 1 :].split()[:2]
    return None if state in {b"Z", b"X"} else int(parent)


class CpuMeter:
    """CPU time of a set of processes and their descendants since `start`."""

    def __init__(self, pids: Iterable[int], *, without: Iterable[int] = ()) -> None:
        self.roots = tuple(pids)
        self.without = tuple(without)
        self._started: dict[int, int] = {}
        self.start()

    def start(self) -> None:
        self._started = {pid: cpu_ns(pid) for pid in family(self.roots, without=self.without)}

    def used(self) -> float:
        """CPU seconds of all of them together since `start`."""
        now = family(self.roots, without=self.without)
        if lost := self._started.keys() - now:
            raise ProcessLost(f"processes {sorted(lost)} ended while they were measured")
        return sum(cpu_ns(pid) - self._started.get(pid, 0) for pid in now) / 1e9


def memory_mb(pids: Iterable[int]) -> float:
    """Memory of these processes together, in MiB."""
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
            raise  # the process lives, the kernel does not have this file
        raise ProcessLost(f"process {path.parent.name} ended while it was measured") from error
    for line in lines:
        if line.startswith(field):
            return int(line.split()[1])
    raise ProcessLost(f"process {path.parent.name} ended while it was measured")
