"""Remove what dead keepers of local sandboxes left behind: processes, cgroups and directories.

Runs in the process that reaps, for example `rookery reap`. The name of a keeper's directory contains the PID of
the process that started the keeper, its owner, but not the owner's start time. A process that has that PID now
counts as the owner, unless it started after the directory was created.
"""

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rookery.sandbox_runtime import cgroups, processes
from rookery.sandboxes import leases

EMPTY_SECONDS = 5.0
"""Seconds to wait until the cgroups of a dead keeper's sandboxes are empty."""
CGROUPS_FILE = "cgroups.json"
"""Name of the file in a keeper's directory that says where the cgroups of its sandboxes are."""
_PREFIX, _SOCKETS = "keeper-", "keeper*.sock"
_POLL_SECONDS = 0.01
_PARENT_CGROUP = "rookery"


class KeeperCgroups(msgspec.Struct, frozen=True):
    """The locations of the cgroups of one keeper's sandboxes."""

    prefix: str
    """Prefix of the names of these cgroups."""
    above: list[str]
    """Directories of the parent cgroups that contain them."""


def reap_keepers(home: Path, *, force: bool = False) -> list[str]:
    """Kill the keepers below `home` whose owner is dead, and remove their cgroups and directories.

    Return the names of the removed directories. With `force`, keepers of live owners are killed, too.
    """
    removed = []
    for directory in sorted(home.glob(f"{_PREFIX}*")):
        owner = _parse_owner(directory)
        if not owner.isdigit() or directory.is_symlink() or not directory.is_dir():
            continue
        keepers = _find_keepers(directory)
        if not force and _may_have_owner(directory, int(owner), keeper_alive=bool(keepers)):
            continue
        for pid, started in keepers.items():
            _kill(pid, started)
        remove_keeper_directory(directory)
        removed.append(directory.name)
    if removed:
        for path in home.glob(_SOCKETS):
            _remove_stale_socket(path)
    return removed


def _parse_owner(directory: Path) -> str:
    return directory.name.removeprefix(_PREFIX).partition("-")[0]


def _may_have_owner(directory: Path, owner: int, *, keeper_alive: bool) -> bool:
    """Return whether the process that started this keeper may still be alive."""
    started = leases.read_start_ticks(owner)
    if started is None:
        return False
    try:
        created = directory.stat().st_mtime
    except FileNotFoundError:
        return True  # the owner is removing it
    owner_started = time.time() - (processes.now_ticks() - started) / processes.TICKS_PER_SECOND
    # The wall clock may have been changed since, but a live keeper implies a live owner.
    return keeper_alive or owner_started <= created + 2.0


def _find_keepers(directory: Path) -> dict[int, int]:
    """Return PID → start time of the keeper processes, including forks, whose working directory this is."""
    found: dict[int, int] = {}
    resolved = str(directory.resolve())
    for name in (path.name for path in Path("/proc").iterdir() if path.name.isdigit()):
        with contextlib.suppress(OSError):
            if str(Path(f"/proc/{name}/cwd").readlink()) != resolved:
                continue
            command = Path(f"/proc/{name}/cmdline").read_bytes()
            started = leases.read_start_ticks(int(name))
            if started is not None and (
                command.startswith(b"sandbox") or b"rookery.sandboxes.local.keeper" in command
            ):
                found[int(name)] = started
    return found


def _kill(pid: int, started: int) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if leases.read_start_ticks(pid) == started:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            select.select([pidfd], [], [], EMPTY_SECONDS)
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)


def remove_keeper_directory(directory: Path) -> None:
    """Remove the cgroups of a dead keeper's sandboxes, then its directory."""
    try:
        recorded = msgspec.json.decode((directory / CGROUPS_FILE).read_bytes(), type=KeeperCgroups)
    except (OSError, msgspec.MsgspecError):
        available = cgroups.find_cgroups()
        recorded = KeeperCgroups(f"{_parse_owner(directory)}-", [available.unified, *available.v1.values()])
    remove_cgroups(recorded.prefix, [above for above in recorded.above if Path(above).name == _PARENT_CGROUP])
    processes.remove_tree(str(directory))


def remove_cgroups(prefix: str, parents: Sequence[str], *, seconds: float = EMPTY_SECONDS) -> int:
    """Remove the cgroups with this name prefix below `parents`; return how many could not be removed in `seconds`.

    Only a cgroup without processes can be removed. After the death of a keeper, the kernel kills the processes of
    its sandboxes, which takes a moment.
    """
    end = time.monotonic() + seconds
    while True:
        left = 0
        for parent in parents if prefix else ():
            with contextlib.suppress(OSError):
                for cgroup in Path(parent).iterdir():
                    if cgroup.name.startswith(prefix):
                        left += not _try_rmdir(cgroup)
        if not left or time.monotonic() > end:
            return left
        time.sleep(_POLL_SECONDS)  # cgroups v1 have no notification


def _try_rmdir(directory: Path) -> bool:
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _remove_stale_socket(path: Path) -> None:
    """Remove the socket file of a keeper if no process listens on it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        try:
            sock.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError:
            return
