"""Leases: files that record which sandboxes exist and who owns them; and the removal of a leased sandbox.

Guarantees:
- a lease is written before the sandbox exists and removed after everything of the sandbox is gone;
- `destroy_sandbox` works after a SIGKILL of the owner, of the guard, or of both: processes are found by the
  variable `ROOKERY_SANDBOX=<run>/<id>` in their initial environment, by descent from those, and by their PID
  namespace.

It cannot find a process that has cleared its environment and whose guard and marked ancestors are all dead.
"""

import contextlib
import functools
import os
import select
import signal
import time
from pathlib import Path

import msgspec

from rookery.sandbox_runtime import processes
from rookery.sandboxes.protocol import Lease

KILL_SECONDS = 10.0
LEASE_SECONDS = 24 * 3600.0
"""Lifetime of a sandbox: after it, a reaper may remove the sandbox even if its owner is alive."""


def read_start_ticks(pid: int) -> int | None:
    """Return the start time of a process in clock ticks; None if it does not exist or is a zombie."""
    stat = processes.read_stat(pid)
    return None if stat is None or stat[0] in "ZX" else stat[2]


@functools.lru_cache(maxsize=1)
def _read_own_start(pid: int) -> int:
    """Return the start time of this process. `pid` is its PID, which differs in a fork."""
    return read_start_ticks(pid) or 0


def is_owner_alive(pid: int, started: int) -> bool:
    """Return whether the process with this PID and start time exists. A reused PID has another start time."""
    return read_start_ticks(pid) == started


@functools.cache
def read_boot_id() -> str:
    """Return an ID of this machine's boot; empty if it is unknown."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def make_marker(run: str, sandbox_id: str) -> str:
    """Return the value of the environment variable `ROOKERY_SANDBOX` that marks every process of a sandbox."""
    return f"{run}/{sandbox_id}"


def create_lease(sandbox_id: str, run: str, attempt: str, provider: str, directory: Path) -> Lease:
    """Return a lease that this process owns and that ends `LEASE_SECONDS` from now. Writes nothing to disk."""
    owner = os.getpid()
    return Lease(
        id=sandbox_id,
        run=run,
        attempt=attempt,
        owner_pid=owner,
        owner_started=_read_own_start(owner),
        deadline=time.time() + LEASE_SECONDS,
        provider=provider,
        folder=str(directory),
    )


def lease_path(home: Path, sandbox_id: str) -> Path:
    return home / "leases" / f"{sandbox_id}.json"


def write_lease(home: Path, lease: Lease) -> str:
    """Write a lease atomically; return its path."""
    # With plain strings instead of `Path`: this runs for every sandbox.
    directory = f"{home}/leases"
    temporary, path = f"{directory}/{lease.id}.half", f"{directory}/{lease.id}.json"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        fd = os.open(temporary, flags, 0o666)
    except FileNotFoundError:
        Path(directory).mkdir(parents=True, exist_ok=True)
        fd = os.open(temporary, flags, 0o666)
    try:
        os.write(fd, msgspec.json.encode(lease))
    finally:
        os.close(fd)
    os.rename(temporary, path)  # noqa: PTH104
    return path


def reassign(home: Path, sandbox_id: str, attempt: str) -> None:
    """Change the attempt that the lease of a sandbox names, when a prewarmed sandbox is put to use."""
    lease = msgspec.json.decode(lease_path(home, sandbox_id).read_bytes(), type=Lease)
    write_lease(home, msgspec.structs.replace(lease, attempt=attempt))


def read_leases(home: Path) -> list[Lease]:
    """Return all leases below `home` that can be read. Leases that are removed meanwhile are left out."""
    found = []
    for path in sorted((home / "leases").glob("*.json")):
        with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
            found.append(msgspec.json.decode(path.read_bytes(), type=Lease))
    return found


def remove_sandbox(home: Path, sandbox_id: str) -> None:
    """Remove the directory of a sandbox, then its lease. The sandbox's processes must be dead."""
    processes.remove_tree(str(home / sandbox_id))
    lease_path(home, sandbox_id).unlink(missing_ok=True)


def destroy_sandbox(home: Path, sandbox_id: str, marker: str) -> int:
    """Kill all processes of a sandbox and remove its files and lease.

    Return how many processes are still alive. If it is not 0, the files and the lease are kept.
    """
    left = kill_marked(marker)
    if not left:
        remove_sandbox(home, sandbox_id)
    return left


def kill_marked(marker: str) -> int:
    """Kill all processes with this marker and their descendants; return how many are left after `KILL_SECONDS`."""
    end = time.monotonic() + KILL_SECONDS
    empty_scans = 0
    while True:
        victims = find_marked(marker)
        guards = {
            pid
            for pid in victims
            if processes.read_variable(pid, processes.COMMAND_VARIABLE) is None and _has_marker(pid, marker)
        }
        # The guard is killed last, because orphans cannot leave its tree while it exists. Until then it is
        # stopped, so that it does not report these deaths as the programs' own.
        only_guards = guards == victims.keys()
        pidfds: list[int] = []
        try:
            for pid in sorted(victims, key=lambda pid: pid not in guards):
                # The start time is checked after the pidfd was opened: the PID may have been reused.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    pidfds.append(os.pidfd_open(pid))
                    if read_start_ticks(pid) == victims[pid]:
                        number = signal.SIGSTOP if pid in guards and not only_guards else signal.SIGKILL
                        signal.pidfd_send_signal(pidfds[-1], number)
            empty_scans = 0 if victims else empty_scans + 1
            if empty_scans > 1 or time.monotonic() > end:
                return len(victims)
            if pidfds:
                select.select(pidfds[:500], [], [], 0.02)
        finally:
            for pidfd in pidfds:
                os.close(pidfd)


def _has_marker(pid: int, marker: str) -> bool:
    return processes.read_variable(pid, processes.SANDBOX_VARIABLE) == marker


def find_marked(marker: str) -> dict[int, int]:
    """Return PID → start time of all marked processes, their descendants, and PID 1 of their PID namespaces."""
    found: dict[int, int] = {}
    own = os.getpid()
    every_pid = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    pending = [pid for pid in every_pid if _has_marker(pid, marker)]
    pending += [init for init in {_find_namespace_init(pid) for pid in pending} if init]
    while pending:
        pid = pending.pop()
        started = read_start_ticks(pid)
        if pid not in found and pid != own and started is not None:
            found[pid] = started
            pending += processes.list_children(pid)
    return found


def _find_namespace_init(pid: int) -> int:
    """Return the PID (in our namespace) of the process that is PID 1 of the PID namespace that `pid` is in.

    0 if `pid` is in our own PID namespace.
    """
    depth = len(_read_namespace_pids(os.getpid()))
    while pid > 1:
        pids = _read_namespace_pids(pid)
        if len(pids) <= depth:
            return 0
        if pids[-1] == 1 and len(pids) == depth + 1:
            return pid
        pid = (processes.read_stat(pid) or ("", 0))[1]
    return 0


def _read_namespace_pids(pid: int) -> list[int]:
    """Return the PIDs of a process in all its PID namespaces, ours first."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:  # noqa: PTH123
        for line in file.read(8192).splitlines():
            if line.startswith(b"NSpid:"):
                return [int(number) for number in line.split()[1:]]
    return []
