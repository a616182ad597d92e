"""File locks between processes of one machine, on `flock`. The kernel releases them when a process ends.

The library filelock is not used: an image in use needs a shared lock that starts as an exclusive one, which
filelock refuses. Its shared locks also take 25 times as long (`python -m benchmarks libraries`, 2026-11-19).

Guarantees:
- a wait for a lock has a time limit and can be cancelled;
- the holder of an exclusive lock can remove the lock file: a process that waited for the lock then creates and
  locks a new file;
- the PIDs of the holders can be listed.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rookery.core import SandboxError

POLL_SECONDS = 0.02
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class FileLock:
    """An acquired lock on a file. Child processes can inherit it: it lasts until every copy of `fd` is closed."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd

    def downgrade(self) -> bool:
        """Turn an exclusive lock into a shared one.

        This is not atomic: another process may get the lock in between. Return False if it removed the lock file,
        so that this lock is useless.
        """
        fcntl.flock(self.fd, fcntl.LOCK_SH)
        return _is_current(self.path, self.fd)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def remove(self) -> None:
        """Remove the lock file and release the lock, which must be exclusive."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        self.close()

    def __enter__(self) -> "FileLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def try_lock(path: Path, *, exclusive: bool) -> FileLock | None:
    """Acquire the lock on the file `path` without waiting; None if another process holds it."""
    operation = (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB
    while True:
        fd = os.open(path, _FLAGS, 0o600)
        try:
            fcntl.flock(fd, operation)
            if _is_current(path, fd):
                return FileLock(path, fd)
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def acquire_lock(
    path: Path, *, exclusive: bool, seconds: float, what: str, is_cancelled: Callable[[], bool] | None = None
) -> FileLock:
    """Acquire the lock on the file `path`, and wait while another process holds it.

    Raise `SandboxError` after `seconds`, or when `is_cancelled` returns True.

    `what` names the locked object in the error message.
    """
    end = time.monotonic() + seconds
    while True:
        lock = try_lock(path, exclusive=exclusive)
        if lock is not None:
            return lock
        if time.monotonic() > end or (is_cancelled is not None and is_cancelled()):
            raise SandboxError(
                f"{what} is still locked by another process, through the lock file {path}", cause="sandbox.image"
            )
        time.sleep(POLL_SECONDS)  # a blocking flock could not be cancelled


@contextlib.contextmanager
def acquire_slot(directory: Path, name: str, count: int, *, seconds: float) -> Iterator[None]:
    """Hold one of `count` slots, which all processes that use `directory` share, for the duration of the block.

    Raise `SandboxError` if no slot is free within `seconds`.
    """
    end = time.monotonic() + seconds
    while True:
        for index in range(count):
            lock = try_lock(directory / f"{name}-{index}", exclusive=True)
            if lock is not None:
                with lock:
                    yield
                return
        if time.monotonic() > end:
            raise SandboxError(
                f"other processes have used all {count} slots {name!r} in {directory} for {seconds:g} s",
                cause="sandbox.image",
            )
        time.sleep(POLL_SECONDS)


def list_holders() -> dict[tuple[int, int], list[int]]:
    """Return (device, inode) → PIDs of the holders of all file locks on this machine."""
    found: dict[tuple[int, int], list[int]] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if len(fields) > 5 and fields[1] == "FLOCK" and fields[5].count(":") == 2:
                major, minor, inode = fields[5].split(":")
                device = os.makedev(int(major, 16), int(minor, 16))
                found.setdefault((device, int(inode)), []).append(int(fields[4]))
    return found


def _is_current(path: Path, fd: int) -> bool:
    """Return whether `path` still names the open file `fd`, and the file was not removed or replaced."""
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False
