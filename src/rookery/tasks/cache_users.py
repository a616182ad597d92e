"""Record which processes use which content of the task cache: one file per process.

    locks/use-PID-…    keys of content, one per line; locked while the process runs
    locks/prune        locked while content is removed

Guarantees:
- What a process registers is visible to all other processes until the process ends, even if it is killed.
- A process that registers while content is being removed waits until the removal is over. Content that the process
  finds after that is not removed while the process runs.
- A process holds one open file, however much content it uses.
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
    """What this process has registered in one cache."""

    def __init__(self) -> None:
        self.fd = -1
        self.keys: set[str] = set()


_registrations: dict[Path, _Registration] = {}
_lock = threading.Lock()


def _reset_lock() -> None:
    """Replace the lock in a forked child: the thread that held it does not exist there."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_reset_lock)


def register(cache: Path, keys: Iterable[str]) -> set[str]:
    """Register content for this process until it ends; return the keys that are new."""
    from rookery.sandboxes.images import file_locks

    folder = cache / "locks"
    with _lock:
        mine = _registrations.setdefault(cache, _Registration())
        if mine.fd >= 0 and os.fstat(mine.fd).st_nlink == 0:  # somebody deleted the cache
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
    """Return whether this process has registered a key."""
    return cache in _registrations and key in _registrations[cache].keys


def find_users(cache: Path) -> dict[str, set[int]]:
    """Return the process IDs of running processes by key."""
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
