"""Record which processes use which entries of the task cache, so that entries in use are not removed.

    locks/use-PID-…    one file per process: keys of entries, one per line; locked while the process runs
    locks/prune        locked while entries are removed

An entry is a directory of files, found by its key; its files are called content.

Guarantees:
- What a process registers is visible to all other processes until the process ends, even if it is killed.
- A process that registers while content is being removed waits until the removal is over. Content that the process
  finds after that is not removed while the process runs.

A process holds one open file, however much content it uses.
"""

import contextlib
import os
import secrets
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from rookery.core import SandboxError, UsageError

LOCK_SECONDS: Final = 60.0
_USER_FILES: Final = "use-*"


class _Registration:
    """The keys that this process has registered in one cache directory, and its open file."""

    def __init__(self) -> None:
        self.fd = -1
        self.keys: set[str] = set()


_registrations: dict[Path, _Registration] = {}
_lock = threading.Lock()


def _reset_lock() -> None:
    """Replace the lock in a forked child process, where the thread that held the lock does not exist."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_reset_lock)


def register(cache: Path, keys: Iterable[str]) -> set[str]:
    """Register the use of cache entries by this process until it ends.

    Return the keys that this process had not registered before. Wait up to `LOCK_SECONDS` while another process
    removes entries; raise `UsageError` after that.
    """
    from rookery.sandboxes.images import file_locks

    folder = cache / "locks"
    with _lock:
        mine = _registrations.setdefault(cache, _Registration())
        if mine.fd >= 0 and os.fstat(mine.fd).st_nlink == 0:  # the cache was deleted
            os.close(mine.fd)
            mine = _registrations[cache] = _Registration()
        new = set(keys) - mine.keys
        if not new:
            return new
        try:
            with file_locks.acquire_lock(
                folder / "prune", exclusive=False, seconds=LOCK_SECONDS, what="the task cache"
            ):
                if mine.fd < 0:
                    _remove_stale(folder)
                    path = folder / f"use-{os.getpid()}-{secrets.token_hex(4)}"
                    mine.fd = file_locks.acquire_lock(
                        path, exclusive=True, seconds=LOCK_SECONDS, what="the task cache"
                    ).fd
                os.write(mine.fd, "".join(f"{key}\n" for key in sorted(new)).encode())
        except SandboxError as error:
            raise UsageError(f"the task cache {cache}: {error}") from error
        mine.keys |= new
        return new


def is_registered(cache: Path, key: str) -> bool:
    """Return whether this process has registered the use of the cache entry `key`."""
    return cache in _registrations and key in _registrations[cache].keys


def find_users(cache: Path) -> dict[str, set[int]]:
    """Return, for each key in use, the IDs of the running processes that registered it.

    Files of processes that have ended are removed.
    """
    from rookery.sandboxes.images import file_locks

    holders = file_locks.list_holders()
    found: dict[str, set[int]] = {}
    for path in (cache / "locks").glob(_USER_FILES):
        with contextlib.suppress(OSError):
            lock = file_locks.try_lock(path, exclusive=True)
            if lock is not None:
                lock.remove()
                continue
            info = path.stat()
            pids = set(holders.get((info.st_dev, info.st_ino), ()))
            for key in path.read_text().split():
                found.setdefault(key, set()).update(pids)
    return found


def _remove_stale(folder: Path) -> None:
    from rookery.sandboxes.images import file_locks

    for path in folder.glob(_USER_FILES):
        with contextlib.suppress(OSError):
            lock = file_locks.try_lock(path, exclusive=True)
            if lock is not None:
                lock.remove()
