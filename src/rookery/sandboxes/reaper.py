"""Ends what dead owners left: sandboxes, keepers, control groups, folders.

Promises:
- what a live owner holds within its deadline is never touched, whoever asks;
- it works after a SIGKILL of the owner, of the guard or keeper, or of all of them;
- a control group is removed only when it is empty: the kernel empties those of a dead keeper;
- a scratch folder belongs to whoever holds its lock; the kernel lets go of it at their end, however that comes.

An owner that is stopped, or lives in another container and shares the folder, is alive: a lease says its pid and
start time, a scratch folder is locked. A keeper's folder names the pid of its owner only; a process that has that
pid now counts as the owner unless it is younger than the folder.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from rookery.sandboxes import leases, procs
from rookery.sandboxes.local import groups
from rookery.sandboxes.protocol import Home, Lease

SCRATCH = "rookery-box-"
"""How the folders of single commands begin, in the folder for temporary files."""
EMPTY_SECONDS = 5.0
"""How long the groups of a dead keeper may take to become empty."""
GROUPS = "groups.json"
"""Where a keeper notes its control groups, in its folder."""
_LOCAL, _DOCKER = "local", "docker"
_KEEPER, _SOCKET = "keeper-", "keeper.sock"
_PAUSE = 0.01
_OURS = "rookery"
"""The control group below which all others of ours lie."""


class Groups(msgspec.Struct, frozen=True):
    """The control groups of one keeper's boxes."""

    prefix: str
    """How their names begin."""
    above: list[str]
    """The folders that they lie in."""


def reap(folder: Path, *, now: float, force: bool = False) -> list[str]:
    """Ends every sandbox below `folder` whose owner is dead or whose deadline passed; their ids.

    `force` takes the living ones too.
    """
    reap_keepers(folder, force=force)
    taken = []
    for found in leases.read_all(folder):
        # The file says where the sandbox lies, but it lies in a folder programs can write to: not believed.
        if found.id != Path(found.id).name or found.id in ("", ".", "..", "leases"):
            continue
        alive = leases.owner_alive(found.owner_pid, found.owner_started)
        if (force or now >= found.deadline or not alive) and _ended(folder, found, alive=alive):
            taken.append(found.id)
    return taken


def _ended(folder: Path, found: Lease, *, alive: bool) -> bool:
    if found.provider == _DOCKER:
        from rookery.sandboxes.docker import orphans  # most machines have no such lease

        return orphans.end_leased(folder, found)
    if found.provider != _LOCAL:
        return leases.destroy(folder, found.id, leases.marker(found.run, found.id)) == 0
    if not alive:
        # The kernel ended it with its keeper: only the lease is left. Looking at every process on the machine for
        # each of a thousand leases would take minutes.
        leases.path_of(folder, found.id).unlink(missing_ok=True)
        return True
    value = leases.marker(found.run, found.id)
    # An idle box of a live owner has no program by which it could be found; its lease stays, for the next time.
    return bool(leases.marked(value)) and leases.destroy(folder, found.id, value) == 0


# ---- keepers


def reap_keepers(folder: Path, *, force: bool = False) -> list[str]:
    """Ends keepers whose owner is gone and removes what they left; the names of their folders."""
    taken = []
    for place in sorted(folder.glob(f"{_KEEPER}*")):
        owner = place.name.removeprefix(_KEEPER).partition("-")[0]
        if not owner.isdigit() or place.is_symlink() or not place.is_dir():
            continue
        keepers = _keepers_in(place)
        if not force and _owned(place, int(owner), bool(keepers)):
            continue
        for pid, started in keepers.items():
            _kill(pid, started)
        remove_place(place)
        taken.append(place.name)
    if taken:
        _forget_socket(folder / _SOCKET)
    return taken


def _owned(place: Path, owner: int, kept: bool) -> bool:
    """Whether the process that started this keeper may still live."""
    started = leases.start_ticks(owner)
    if started is None:
        return False
    try:
        made = place.stat().st_mtime
    except FileNotFoundError:
        return True  # its owner removes it at this moment
    begun = time.time() - (procs.now_ticks() - started) / procs.HZ
    # The clock may have been set since: a keeper that lives has an owner that lives.
    return kept or begun <= made + 2.0


def _keepers_in(place: Path) -> dict[int, int]:
    """Keepers that sit in a folder, by pid, with their start. Others who happen to be there are none."""
    found: dict[int, int] = {}
    real = str(place.resolve())
    for name in (path.name for path in Path("/proc").iterdir() if path.name.isdigit()):
        with contextlib.suppress(OSError):
            if str(Path(f"/proc/{name}/cwd").readlink()) != real:
                continue
            command = Path(f"/proc/{name}/cmdline").read_bytes()
            started = leases.start_ticks(int(name))
            if started is not None and (command.startswith(b"sandbox") or b"keeper.py" in command):
                found[int(name)] = started
    return found


def _kill(pid: int, started: int) -> None:
    import select

    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if leases.start_ticks(pid) == started:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            select.select([handle], [], [], EMPTY_SECONDS)
    except ProcessLookupError:
        pass
    finally:
        os.close(handle)


def remove_place(place: Path) -> None:
    """What a keeper that is dead leaves: the control groups of its boxes, and its folder."""
    owner = place.name.removeprefix(_KEEPER).partition("-")[0]
    _remove_groups(place, f"{owner}-")
    procs.remove_tree(str(place))


def _remove_groups(place: Path, prefix: str) -> None:
    """Those of the keeper's boxes. It notes where they are: we may be in another group than it was."""
    try:
        noted = msgspec.json.decode((place / GROUPS).read_bytes(), type=Groups)
    except (OSError, msgspec.MsgspecError):
        held = groups.find()
        noted = Groups(prefix, [held.unified, *held.v1.values()])
    remove_groups(noted.prefix, [above for above in noted.above if Path(above).name == _OURS])


def remove_groups(prefix: str, places: Sequence[str], *, seconds: float = EMPTY_SECONDS) -> int:
    """Removes the control groups whose names begin so, as they become empty; how many would not go."""
    end = time.monotonic() + seconds
    while True:
        left = 0
        for above in places if prefix else ():
            with contextlib.suppress(OSError):
                for group in Path(above).iterdir():
                    if group.name.startswith(prefix):
                        left += not _removed(group)
        if not left or time.monotonic() > end:
            return left
        time.sleep(_PAUSE)  # v1 groups have nothing one could wait for


def _removed(group: Path) -> bool:
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _forget_socket(path: Path) -> None:
    """A listening socket outlives its keeper as a file; nobody answers there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        try:
            sock.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError:
            return


# ---- scratch folders


@contextlib.contextmanager
def scratch(run: str) -> Iterator[Home]:
    """A home for sandboxes of this process that belong to no run; gone with the block, or at the next reap."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=SCRATCH))
        lock = _locked(folder)
        if lock is not None:
            break
    try:
        yield Home(folder=folder, run=run)
    finally:
        procs.remove_tree(str(folder))
        os.close(lock)


def _locked(folder: Path) -> int | None:
    """Our hold on a scratch folder; None where another has it, or it is gone or not ours."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(lock).st_uid == os.geteuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if folder.exists():
                return lock
    except BlockingIOError:
        pass
    except BaseException:
        os.close(lock)
        raise
    os.close(lock)
    return None


def reap_scratch(*, now: float) -> list[str]:
    """Ends what single commands left that were killed; the ids of their sandboxes."""
    taken: list[str] = []
    for folder in sorted(Path(tempfile.gettempdir()).glob(f"{SCRATCH}*")):
        lock = _locked(folder)
        if lock is None:
            continue
        try:
            taken += reap(folder, now=now, force=True)
            if not leases.read_all(folder):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
    return taken
