"""Who uses what of the task cache: one file for each process, locked for as long as it lives.

    locks/use-PID-…    keys of content, one a line        locks/prune    held while something is removed

Promises:
- what a live process registered is seen by every other one, and no more when it has ended, in whatever way;
- who registers while something is removed waits for that, so that what is there afterwards stays;
- however much a process uses, it holds one file open.
"""

import contextlib
import os
import secrets
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from rookery.core import SandboxError, UsageError

SECONDS: Final = 60.0
_FILES: Final = "use-*"


class _Mine:
    """What this process has registered in one cache."""

    def __init__(self) -> None:
        self.fd = -1
        self.keys: set[str] = set()


_mine: dict[Path, _Mine] = {}
_guard = threading.Lock()


def _renew() -> None:
    """A child's own: who held it at the fork is not in the child."""
    global _guard  # noqa: PLW0603
    _guard = threading.Lock()


os.register_at_fork(after_in_child=_renew)


def hold(cache: Path, keys: Iterable[str]) -> set[str]:
    """Registers content for this process until it ends; those that are new. `OSError` where nothing can be."""
    from rookery.sandboxes.images import locks

    folder = cache / "locks"
    with _guard:
        mine = _mine.setdefault(cache, _Mine())
        if mine.fd >= 0 and os.fstat(mine.fd).st_nlink == 0:  # somebody removed the whole cache
            os.close(mine.fd)
            mine = _mine[cache] = _Mine()
        new = set(keys) - mine.keys
        if not new:
            return new
        try:
            with locks.wait(folder / "prune", alone=False, seconds=SECONDS, what="the task cache"):
                if mine.fd < 0:
                    _forget_dead(folder)
                    path = folder / f"use-{os.getpid()}-{secrets.token_hex(4)}"
                    mine.fd = locks.wait(path, alone=True, seconds=SECONDS, what="the task cache").fd
                os.write(mine.fd, "".join(f"{key}\n" for key in sorted(new)).encode())
        except SandboxError as error:
            raise UsageError(f"the task cache {cache}: {error}") from error
        mine.keys |= new
        return new


def holds(cache: Path, key: str) -> bool:
    """Whether this process has registered it."""
    return cache in _mine and key in _mine[cache].keys


def users(cache: Path) -> dict[str, set[int]]:
    """Key → pids of the live processes that registered it."""
    from rookery.sandboxes.images import locks

    held = locks.holders()
    found: dict[str, set[int]] = {}
    for path in (cache / "locks").glob(_FILES):
        with contextlib.suppress(OSError):
            lock = locks.attempt(path, alone=True)
            if lock is not None:
                lock.remove()
                continue
            info = path.stat()
            pids = set(held.get((info.st_dev, info.st_ino), ()))
            for key in path.read_text().split():
                found.setdefault(key, set()).update(pids)
    return found


def _forget_dead(folder: Path) -> None:
    from rookery.sandboxes.images import locks

    for path in folder.glob(_FILES):
        with contextlib.suppress(OSError):
            lock = locks.attempt(path, alone=True)
            if lock is not None:
                lock.remove()
