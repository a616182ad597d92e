"""Locks that processes of one machine share, by files. The kernel lets go of them when a process ends.

Promises:
- a wait for one is bounded and can be stopped;
- a lock file can be removed by whoever holds it alone: who waited for it takes the new one;
- who holds one can be told, by pid.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rookery.core import SandboxError

PAUSE = 0.02
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class Lock:
    """One hold on a lock file."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd

    def shared(self) -> bool:
        """From alone to shared. Somebody may have held it in between: False where the file is another now."""
        fcntl.flock(self.fd, fcntl.LOCK_SH)
        return _same(self.path, self.fd)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def remove(self) -> None:
        """The file too: only for who holds it alone."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        self.close()

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def attempt(path: Path, *, alone: bool) -> Lock | None:
    """At once, or not."""
    how = (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB
    while True:
        fd = os.open(path, _FLAGS, 0o600)
        try:
            fcntl.flock(fd, how)
            if _same(path, fd):
                return Lock(path, fd)
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def wait(path: Path, *, alone: bool, seconds: float, what: str, stopped: Callable[[], bool] | None = None) -> Lock:
    end = time.monotonic() + seconds
    while True:
        lock = attempt(path, alone=alone)
        if lock is not None:
            return lock
        if time.monotonic() > end or (stopped is not None and stopped()):
            raise SandboxError(f"{what} is held by another process for too long", cause="sandbox.image")
        time.sleep(PAUSE)  # a wait in the kernel could not be stopped


@contextlib.contextmanager
def one_of(folder: Path, name: str, count: int, *, seconds: float) -> Iterator[None]:
    """One of so many places on this machine."""
    end = time.monotonic() + seconds
    while True:
        for at in range(count):
            lock = attempt(folder / f"{name}-{at}", alone=True)
            if lock is not None:
                with lock:
                    yield
                return
        if time.monotonic() > end:
            raise SandboxError("other images are being fetched for too long", cause="sandbox.image")
        time.sleep(PAUSE)


def holders() -> dict[tuple[int, int], list[int]]:
    """Who holds what: (device, inode) → pids. One read for all files."""
    found: dict[tuple[int, int], list[int]] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if len(words) > 5 and words[1] == "FLOCK" and words[5].count(":") == 2:
                major, minor, inode = words[5].split(":")
                device = os.makedev(int(major, 16), int(minor, 16))
                found.setdefault((device, int(inode)), []).append(int(words[4]))
    return found


def _same(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False
