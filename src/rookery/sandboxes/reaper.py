"""Remove sandboxes whose owner (the process that created them) is dead: their processes and directories.

A provider that implements `ReapableProvider` removes its own sandboxes. For other providers, the processes whose
environment names the sandbox are killed, and the sandbox's directory is removed.

Guarantees:
- a sandbox of a live owner is not removed before its deadline, unless `force` is set. The lease of a sandbox names
  the PID and start time of its owner; an owner that is stopped by a signal is alive;
- reaping works after a SIGKILL of the owner, of the guard or keeper that supervised the sandbox, or of all three;
- a scratch directory belongs to the process that holds its lock. The kernel releases the lock when that process
  ends.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from rookery.sandbox_runtime import processes
from rookery.sandboxes import leases
from rookery.sandboxes.protocol import Lease, ProviderHome, ReapableProvider

SCRATCH_PREFIX = "rookery-sandbox-"
"""Name prefix of scratch directories, which are created in the directory for temporary files."""


def reap(home: Path, *, now: float, force: bool = False) -> list[str]:
    """Remove the sandboxes below `home` whose owner is dead or whose deadline is before `now` (Unix time).

    Return the IDs of the removed sandboxes. With `force`, sandboxes of live owners are removed, too. A sandbox
    that cannot be removed now keeps its lease, and the next call tries again.
    """
    reap_homes(home, force=force)
    reaped = []
    providers: dict[str, ReapableProvider | None] = {}
    for lease in leases.read_leases(home):
        # Programs can write to this directory, so the ID could be a path to somewhere else.
        if lease.id != Path(lease.id).name or lease.id in ("", ".", "..", "leases"):
            continue
        alive = leases.is_owner_alive(lease.owner_pid, lease.owner_started)
        if force or now >= lease.deadline or not alive:
            if lease.provider not in providers:
                providers[lease.provider] = _open_reapable(lease.provider, home)
            if _destroy(home, lease, providers[lease.provider], owner_alive=alive):
                reaped.append(lease.id)
    return reaped


def _destroy(home: Path, lease: Lease, provider: ReapableProvider | None, *, owner_alive: bool) -> bool:
    if provider is not None:
        return provider.destroy_leased(lease, owner_alive=owner_alive)
    return leases.destroy_sandbox(home, lease.id, leases.make_marker(lease.run, lease.id)) == 0


def reap_homes(home: Path, *, force: bool = False) -> list[str]:
    """Remove what dead owners left in a home, except leased sandboxes: for example keepers. Return their names."""
    return [name for provider in _list_reapable(home) for name in provider.reap_home(force=force)]


def reap_machine(providers: Collection[str] | None = None) -> list[str]:
    """Remove sandboxes of dead owners that are found without their home, such as containers; return their IDs.

    `providers` are the names of the providers that are asked; None means all.
    """
    return [name for provider in _list_reapable(Path(), providers) for name in provider.reap_machine()]


def _list_reapable(home: Path, names: Collection[str] | None = None) -> list[ReapableProvider]:
    from rookery.sandboxes import provider_names  # it imports this module

    found = provider_names() if names is None else names
    return [provider for name in found if (provider := _open_reapable(name, home)) is not None]


def _open_reapable(name: str, home: Path) -> ReapableProvider | None:
    """Open a provider. None if it does not implement `ReapableProvider` or cannot be loaded."""
    from rookery.sandboxes import open_provider

    try:
        provider = open_provider(name, ProviderHome(folder=home, run="reap"))
    except Exception:  # noqa: BLE001  (a broken plug-in must not keep others from being reaped)
        return None
    return provider if isinstance(provider, ReapableProvider) else None


# ---- scratch directories


@contextlib.contextmanager
def scratch_home(run: str) -> Iterator[ProviderHome]:
    """Create a temporary home for sandboxes that belong to no run, and remove it at the end of the block.

    If this process is killed, `reap_scratch` removes it later.
    """
    while True:
        directory = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX))
        lock = lock_directory(directory)
        if lock is not None:
            break
    try:
        yield ProviderHome(folder=directory, run=run)
    finally:
        processes.remove_tree(str(directory))
        os.close(lock)


def lock_directory(directory: Path) -> int | None:
    """Lock a temporary directory and return a descriptor that holds the lock, at most until this process ends.

    None if another process holds the lock, or if the directory is gone or belongs to another user.
    """
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(fd).st_uid == os.geteuid():
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if directory.exists():
                return fd
    except BlockingIOError:
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def reap_scratch(*, now: float) -> list[str]:
    """Remove scratch homes of dead processes, with their sandboxes; return the IDs of these sandboxes."""
    reaped: list[str] = []
    for directory in sorted(Path(tempfile.gettempdir()).glob(f"{SCRATCH_PREFIX}*")):
        lock = lock_directory(directory)
        if lock is None:
            continue
        try:
            reaped += reap(directory, now=now, force=True)
            if not leases.read_leases(directory):
                shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(lock)
    return reaped
