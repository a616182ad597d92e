"""ctypes wrappers for Linux system calls, and readers of /proc. Runs in the monitor and interpreter of a worker.

Standard library only, Python 3.8 and newer. If an architecture or kernel lacks a feature, the function returns
False or does nothing. `clone_sibling` may be called only if `can_clone` returns True.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NamedTuple

    class Stat(NamedTuple):
        """State of a process: times in seconds, memory in bytes."""

        state: str
        parent: int
        cpu: float
        children_cpu: float
        threads: int
        start_ticks: int
        rss: int
else:
    from collections import namedtuple

    Stat = namedtuple("Stat", "state parent cpu children_cpu threads start_ticks rss")

_libc = ctypes.CDLL(None, use_errno=True)
_libc_with_gil = ctypes.PyDLL(None, use_errno=True)
"""Calls C functions without releasing the GIL, because a process must not be forked while another thread holds
it."""
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 4, 15, 36
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _PR_GET_TID_ADDRESS = 22, 38, 40
_CLONE_PARENT, _CLEARTID, _SETTID = 0x8000, 0x200000, 0x1000000
_SIGCHLD, _SIGKILL = 17, 9
_HZ = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
MACHINE = os.uname().machine
_CLONE = {"x86_64": 56, "aarch64": 220}
_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, prlimit64
_PID_CALLS = {"x86_64": (62, 200, 234, 129, 297, 302), "aarch64": (129, 130, 131, 138, 240, 261)}
_PIDFD_SEND_SIGNAL = 424
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
TAG_LIMIT = 15
"""The resource whose hard limit tags processes: RLIMIT_RTTIME, which has no effect without real-time scheduling.
The limit is inherited and can only be lowered."""


def _prctl(option: int, value: object = 0, other: object = 0) -> int:
    return int(_libc.prctl(option, value, other, 0, 0))


def become_subreaper() -> bool:
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1) == 0


def die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL)


def set_dumpable(on: bool) -> None:
    _prctl(_PR_SET_DUMPABLE, int(on))


def set_name(name: bytes) -> None:
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name))


def can_clone() -> bool:
    return MACHINE in _CLONE


def _tid_address() -> int:
    """Return the address where the C library stores the thread ID, which a fork must update; 0 if unknown."""
    address = ctypes.c_void_p(0)
    if _prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address)) or not address.value:
        return 0
    # musl registers a lock here, which must not be overwritten.
    return address.value if ctypes.c_int.from_address(address.value).value == os.getpid() else 0


def clone_sibling() -> int:
    """Fork a process whose parent is the parent of this process. Return its pid, or 0 in the new process.

    No fork hooks run. Only single-threaded processes may call this.
    """
    address = _tid_address()
    flags = _CLONE_PARENT | _SIGCHLD | (_SETTID | _CLEARTID if address else 0)
    arguments = [ctypes.c_long(0)] * 4
    arguments[2 if MACHINE == "x86_64" else 3] = ctypes.c_long(address)
    pid: int = _libc_with_gil.syscall(ctypes.c_long(_CLONE[MACHINE]), ctypes.c_long(flags), *arguments)
    if pid < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return pid


class _Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def protect_from_signals(pid: int) -> bool:
    """Install a seccomp filter: this process and its descendants cannot signal `pid`, its group, or all processes,
    nor change the limits of `pid`. Return whether that worked."""
    if MACHINE not in _ARCH:
        return False
    pid_calls = _PID_CALLS[MACHINE]
    # Load the number of the call. For calls that name a process in their first argument, check that argument.
    instructions = [(0x20, 0, 0, 4), (0x15, 1, 0, _ARCH[MACHINE]), (0x06, 0, 0, 0x7FFF0000), (0x20, 0, 0, 0)]
    instructions += [(0x15, len(pid_calls) - at + 1, 0, number) for at, number in enumerate(pid_calls)]
    instructions += [(0x15, 7, 0, _PIDFD_SEND_SIGNAL), (0x06, 0, 0, 0x7FFF0000)]
    instructions += [(0x20, 0, 0, 16)]
    instructions += [(0x15, 3 - at, 0, who & 0xFFFFFFFF) for at, who in enumerate((pid, -pid, -1))]
    instructions += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050000 | errno.EPERM)]
    instructions += [(0x06, 0, 0, 0x00050000 | errno.ENOSYS)]
    raw = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *instruction) for instruction in instructions))
    program = _Program(len(instructions), ctypes.cast(raw, ctypes.c_void_p))
    if _prctl(_PR_SET_NO_NEW_PRIVS, 1):
        return False
    return _prctl(_PR_SET_SECCOMP, 2, ctypes.byref(program)) == 0


def request_short_time_slices() -> None:
    """Ask the scheduler for short time slices, so that this process, but not its children, runs soon."""
    if MACHINE in _SCHED_SETATTR:
        # struct sched_attr: size, policy, flags (reset on fork), nice, priority, runtime (slice), deadline,
        # period.
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        attributes = struct.pack("<IIQiIQQQ", 48, 0, 1, nice, 0, 100_000, 0, 0)
        _libc.syscall(ctypes.c_long(_SCHED_SETATTR[MACHINE]), 0, ctypes.c_char_p(attributes), 0)


# ---- /proc


def read_stat(pid: int) -> Stat | None:
    """Return the state of a process; None if there is no such process."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fields = os.read(fd, 4096).rpartition(b")")[2].split()
        finally:
            os.close(fd)
        return Stat(
            fields[0].decode(),
            int(fields[1]),
            (int(fields[11]) + int(fields[12])) / _HZ,
            (int(fields[13]) + int(fields[14])) / _HZ,
            int(fields[17]),
            int(fields[19]),
            int(fields[21]) * _PAGE,
        )
    except (OSError, IndexError, ValueError):
        return None


_LISTS_CHILDREN = os.path.exists(f"/proc/self/task/{os.getpid()}/children")


def list_children(pid: int) -> list[int]:
    """Return the direct children of all threads of a process."""
    found: list[int] = []
    if not _LISTS_CHILDREN:
        for other in list_pids():
            stat = read_stat(other)
            if stat is not None and stat.parent == pid:
                found.append(other)
        return found
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found  # the process ended
    for task in tasks:
        try:
            with open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                found += map(int, file.read().split())
        except OSError:
            continue  # one thread ended; the others are still listed
    return found


def list_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def read_tag(pid: int) -> int | None:
    """Return the tag (hard limit `TAG_LIMIT`) that a process inherited; None if it has none."""
    try:
        hard = resource.prlimit(pid, TAG_LIMIT)[1]
    except (OSError, ValueError):
        return None
    return None if hard == resource.RLIM_INFINITY else hard


def lower_limit(which: int, hard: int, soft: int | None = None, pid: int = 0) -> bool:
    """Set a resource limit of a process, never above its current hard limit; pid 0 is this process.

    Return whether that worked.
    """
    try:
        present = resource.prlimit(pid, which)[1]
        if present != resource.RLIM_INFINITY:
            hard = min(hard, present)
        resource.prlimit(pid, which, (hard if soft is None else min(soft, hard), hard))
    except (OSError, ValueError):
        return False
    return True


def read_proportional_memory(pid: int) -> int:
    """Return the proportional set size of a process, which divides shared pages among processes; 0 if unknown."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            found = file.read().partition(b"\nPss:")[2].split(None, 1)
        return int(found[0]) << 10 if found else 0
    except (OSError, ValueError):
        return 0


def read_cpu_clock(pid: int) -> float:
    """Return the CPU seconds of a process, with a finer resolution than /proc; 0 if it is gone."""
    try:
        return time.clock_gettime(((~pid) << 3) | 2)
    except OSError:
        return 0.0


def set_oom_score(value: bytes) -> None:
    """Set the OOM score adjustment of this process; 1000 is killed first. Do nothing if the kernel refuses."""
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, value)
        finally:
            os.close(fd)
    except OSError:
        pass
