"""What only the system itself can do, by ctypes. Stand-alone.

Promises:
- a twin is our sibling, and a copy as of the moment it was made: no hook of a fork was run in it;
- nobody who was `shielded` can signal the given process, or everyone, or change its limits;
- what an architecture or a kernel does not have is said (`can_clone`, False), never tried.
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
        """Of a process: times in seconds, memory in bytes."""

        state: str
        parent: int
        cpu: float
        children_cpu: float
        threads: int
        started: int
        rss: int
else:
    from collections import namedtuple

    Stat = namedtuple("Stat", "state parent cpu children_cpu threads started rss")

_libc = ctypes.CDLL(None, use_errno=True)
_held = ctypes.PyDLL(None, use_errno=True)
"""Calls that keep the interpreter's lock: a fork must not happen while it is somebody else's."""
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
_AIMED = {"x86_64": (62, 200, 234, 129, 297, 302), "aarch64": (129, 130, 131, 138, 240, 261)}
_PIDFD_SEND_SIGNAL = 424
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
TAG = 15
"""RLIMIT_RTTIME: it means nothing to a process that is not scheduled in real time, and can only be lowered."""


def _prctl(option: int, value: object = 0, other: object = 0) -> int:
    return int(_libc.prctl(option, value, other, 0, 0))


def adopt_orphans() -> bool:
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
    """Where the C library keeps our thread's number, and writes a fork's; 0 where that is not sure."""
    where = ctypes.c_void_p(0)
    if _prctl(_PR_GET_TID_ADDRESS, ctypes.byref(where)) or not where.value:
        return 0
    # Another C library registers a lock here, which a number must not be written to.
    return where.value if ctypes.c_int.from_address(where.value).value == os.getpid() else 0


def twin() -> int:
    """Forks a sibling; 0 in it. For a process of one thread, whose pid its number then is."""
    at = _tid_address()
    flags = _CLONE_PARENT | _SIGCHLD | (_SETTID | _CLEARTID if at else 0)
    words = [ctypes.c_long(0)] * 4
    words[2 if MACHINE == "x86_64" else 3] = ctypes.c_long(at)
    pid: int = _held.syscall(ctypes.c_long(_CLONE[MACHINE]), ctypes.c_long(flags), *words)
    if pid < 0:
        problem = ctypes.get_errno()
        raise OSError(problem, os.strerror(problem))
    return pid


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_void_p)]


def shield(pid: int) -> bool:
    """From here on, we and all that descend from us cannot signal `pid`, its group, or everyone at once."""
    if MACHINE not in _ARCH:
        return False
    aimed = _AIMED[MACHINE]
    # Loads the number of the call, then of those that name a process in their first argument looks at that.
    steps = [(0x20, 0, 0, 4), (0x15, 1, 0, _ARCH[MACHINE]), (0x06, 0, 0, 0x7FFF0000), (0x20, 0, 0, 0)]
    steps += [(0x15, len(aimed) - at + 1, 0, number) for at, number in enumerate(aimed)]
    steps += [(0x15, 7, 0, _PIDFD_SEND_SIGNAL), (0x06, 0, 0, 0x7FFF0000)]
    steps += [(0x20, 0, 0, 16)]
    steps += [(0x15, 3 - at, 0, who & 0xFFFFFFFF) for at, who in enumerate((pid, -pid, -1))]
    steps += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050000 | errno.EPERM)]
    steps += [(0x06, 0, 0, 0x00050000 | errno.ENOSYS)]
    raw = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in steps))
    program = _Program(len(steps), ctypes.cast(raw, ctypes.c_void_p))
    if _prctl(_PR_SET_NO_NEW_PRIVS, 1):
        return False
    return _prctl(_PR_SET_SECCOMP, 2, ctypes.byref(program)) == 0


def hurry() -> None:
    """Asks for short turns at the processor, so that they come soon; for us alone, not for our children."""
    if MACHINE in _SCHED_SETATTR:
        # Size, policy, flags (reset on fork), nice, priority, runtime (of a turn), deadline, period.
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        wanted = struct.pack("<IIQiIQQQ", 48, 0, 1, nice, 0, 100_000, 0, 0)
        _libc.syscall(ctypes.c_long(_SCHED_SETATTR[MACHINE]), 0, ctypes.c_char_p(wanted), 0)


# ---- looking at processes


def stat_of(pid: int) -> Stat | None:
    """None when there is no such process."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            words = os.read(fd, 4096).rpartition(b")")[2].split()
        finally:
            os.close(fd)
        return Stat(
            words[0].decode(),
            int(words[1]),
            (int(words[11]) + int(words[12])) / _HZ,
            (int(words[13]) + int(words[14])) / _HZ,
            int(words[17]),
            int(words[19]),
            int(words[21]) * _PAGE,
        )
    except (OSError, IndexError, ValueError):
        return None


_LISTS_CHILDREN = os.path.exists(f"/proc/self/task/{os.getpid()}/children")


def children_of(pid: int) -> list[int]:
    """Direct children, of all its threads."""
    found: list[int] = []
    if not _LISTS_CHILDREN:
        for other in every():
            stat = stat_of(other)
            if stat is not None and stat.parent == pid:
                found.append(other)
        return found
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found  # it ended while we looked
    for task in tasks:
        try:
            with open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                found += map(int, file.read().split())
        except OSError:
            continue  # a thread that ended hides nothing of the others
    return found


def every() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def tag_of(pid: int) -> int | None:
    """The mark that a process was born with; None where it has none, or is none of ours to ask."""
    try:
        hard = resource.prlimit(pid, TAG)[1]
    except (OSError, ValueError):
        return None
    return None if hard == resource.RLIM_INFINITY else hard


def lower(which: int, hard: int, soft: int | None = None, pid: int = 0) -> bool:
    """Sets a limit, never above the present hard one; whether it holds now."""
    try:
        present = resource.prlimit(pid, which)[1]
        if present != resource.RLIM_INFINITY:
            hard = min(hard, present)
        resource.prlimit(pid, which, (hard if soft is None else min(soft, hard), hard))
    except (OSError, ValueError):
        return False
    return True


def shared_out(pid: int) -> int:
    """Bytes of a process, with what it shares divided among those who share it; 0 where that is not told."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            found = file.read().partition(b"\nPss:")[2].split(None, 1)
        return int(found[0]) << 10 if found else 0
    except (OSError, ValueError):
        return 0


def cpu_of(pid: int) -> float:
    """Processor seconds of a process, finer than /proc tells; 0 when it is gone."""
    try:
        return time.clock_gettime(((~pid) << 3) | 2)
    except OSError:
        return 0.0


def worth(value: bytes) -> None:
    """How soon we are to go when memory runs out: 1000 is first, 0 as any other. Left as it is where refused."""
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, value)
        finally:
            os.close(fd)
    except OSError:
        pass
