"""Leases on disk, and the end of everything that belongs to one.

Promises:
- a lease is written before anything it covers exists, and removed after everything it covers is gone;
- `destroy` works after a SIGKILL of the owner, of the guard, or of both: processes are found by the marker
  `ROOKERY_SANDBOX=<run>/<id>` in the environment they were started with, by descent from those, and by the
  process namespace that they live in.

What it cannot find: a process that wiped its environment and lost its guard and every marked ancestor.
"""

import contextlib
import os
import select
import signal
import time
from pathlib import Path

import msgspec

from rookery.sandboxes import procs
from rookery.sandboxes.protocol import Lease

KILL_SECONDS = 10.0
SECONDS = 24 * 3600.0
"""How long a sandbox may live."""


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks; None when there is none."""
    stat = procs.stat_of(pid)
    return None if stat is None or stat[0] in "ZX" else stat[2]


def owner_alive(pid: int, started: int) -> bool:
    """Whether this very process lives, and not another that got its number."""
    return start_ticks(pid) == started


def marker(run: str, identity: str) -> str:
    """The value by which every process of a sandbox can be known."""
    return f"{run}/{identity}"


def lease(identity: str, run: str, attempt: str, provider: str, folder: Path) -> Lease:
    """A lease of this process, from now on."""
    owner = os.getpid()
    return Lease(
        id=identity,
        run=run,
        attempt=attempt,
        owner_pid=owner,
        owner_started=start_ticks(owner) or 0,
        deadline=time.time() + SECONDS,
        provider=provider,
        folder=str(folder),
    )


def path_of(folder: Path, identity: str) -> Path:
    return folder / "leases" / f"{identity}.json"


def write(folder: Path, granted: Lease) -> Path:
    """Atomically: a reader sees the whole lease or none."""
    path = path_of(folder, granted.id)
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".half")
    half.write_bytes(msgspec.json.encode(granted))
    half.rename(path)
    return path


def adopt(folder: Path, identity: str, attempt: str) -> None:
    """Writes into a sandbox's lease whose it is from now on."""
    found = msgspec.json.decode(path_of(folder, identity).read_bytes(), type=Lease)
    write(folder, msgspec.structs.replace(found, attempt=attempt))


def read_all(folder: Path) -> list[Lease]:
    """Every lease that can be read; one that was removed meanwhile is simply not there."""
    found = []
    for path in sorted((folder / "leases").glob("*.json")):
        with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
            found.append(msgspec.json.decode(path.read_bytes(), type=Lease))
    return found


def kill_marked(value: str, *, seconds: float = KILL_SECONDS) -> int:
    """Kills every process with this marker, and what descends from them; how many were left in the end."""
    end = time.monotonic() + seconds
    clean = 0
    while True:
        victims = marked(value)
        guards = {pid for pid in victims if procs.variable_of(pid, procs.COMMAND) is None and _says(pid, value)}
        # The guard goes last: until then no orphan can leave its tree. It is stopped first, so that it does
        # not report deaths of our making as the programs' own.
        last = guards == victims.keys()
        handles: list[int] = []
        try:
            for pid in sorted(victims, key=lambda pid: pid not in guards):
                # Through a handle, checked after it was opened: the number may have been given to another.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    handles.append(os.pidfd_open(pid))
                    if start_ticks(pid) == victims[pid]:
                        number = signal.SIGSTOP if pid in guards and not last else signal.SIGKILL
                        signal.pidfd_send_signal(handles[-1], number)
            clean = 0 if victims else clean + 1
            if clean > 1 or time.monotonic() > end:
                return len(victims)
            if handles:
                select.select(handles[:500], [], [], 0.02)
        finally:
            for handle in handles:
                os.close(handle)


def _says(pid: int, value: str) -> bool:
    return procs.variable_of(pid, procs.MARKER) == value


def marked(value: str) -> dict[int, int]:
    """Processes with this marker, what descends from them, and the boxes that they live in; pid → start."""
    found: dict[int, int] = {}
    own = os.getpid()
    everyone = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    todo = [pid for pid in everyone if _says(pid, value)]
    todo += [first for first in {_first_of(pid) for pid in todo} if first]
    while todo:
        pid = todo.pop()
        started = start_ticks(pid)
        if pid not in found and pid != own and started is not None:
            found[pid] = started
            todo += procs.children_of(pid)
    return found


def _first_of(pid: int) -> int:
    """Pid 1 of the box that a process lives in; 0 where it lives in none, but among our own processes."""
    depth = len(_numbers(os.getpid()))
    while pid > 1:
        numbers = _numbers(pid)
        if len(numbers) <= depth:
            return 0
        if numbers[-1] == 1 and len(numbers) == depth + 1:
            return pid
        pid = (procs.stat_of(pid) or ("", 0))[1]
    return 0


def _numbers(pid: int) -> list[int]:
    """A process's pid in every namespace that it has one in, ours first."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:  # noqa: PTH123
        for line in file.read(8192).splitlines():
            if line.startswith(b"NSpid:"):
                return [int(number) for number in line.split()[1:]]
    return []


def destroy(folder: Path, identity: str, value: str) -> int:
    """Ends everything of a sandbox; how many processes would not die (then its folder and lease stay)."""
    left = kill_marked(value)
    if not left:
        procs.remove_tree(str(folder / identity))
        path_of(folder, identity).unlink(missing_ok=True)
    return left
