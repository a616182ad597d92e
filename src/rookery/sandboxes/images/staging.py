"""Staging directories: directories in which files are prepared before they are renamed to their final path.

    work/NAME    a staging directory, or a directory that is being removed
    locks/work-NAME    lock file of the process that uses work/NAME

The image store and the task cache have one staging area each.

Guarantees:
- a staging directory is removed at the end of its `with` block; those of killed processes are removed when the
  next one is created;
- `detach` moves a directory away from its path in one step, so that its slow removal can happen afterwards.
"""

import contextlib
import ctypes
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

from rookery.core import UsageError
from rookery.sandbox_runtime import processes
from rookery.sandboxes.images import file_locks


def create_private_directory(folder: Path, subdirectories: Iterable[str], what: str, variable: str) -> None:
    """Create a directory that only the current user can access, and its subdirectories, unless they exist.

    Raise `UsageError` if the directory belongs to another user or cannot be written to. `what` names it in
    messages, and `variable` is the environment variable that selects another directory.
    """
    advice = f"choose another directory with ${variable}"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder.stat().st_uid != os.geteuid():
            raise UsageError(f"{what} {folder} belongs to another user: {advice}")
        folder.chmod(0o700)
        for name in subdirectories:
            (folder / name).mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(f"{what} {folder} cannot be written to ({error.strerror or error}): {advice}") from error


def measure_tree(top: Path) -> tuple[int, int]:
    """Return the number of files below a directory, and the disk space in bytes that they use."""
    count = total = 0
    for here, folders, files in os.walk(top):
        for name in (*folders, *files):
            with contextlib.suppress(OSError):
                total += os.lstat(f"{here}/{name}").st_blocks * 512
        count += len(files)
    return count, total


def sync_file_system(folder: Path) -> bool:
    """Flush the file system that contains a directory to disk. Return False if that fails.

    Otherwise a power failure after files were renamed into place could leave them incomplete.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return bool(ctypes.CDLL(None, use_errno=True).syncfs(fd) == 0)
    finally:
        os.close(fd)


class DetachedDirectory:
    """A directory that was moved into the staging area to be removed."""

    def __init__(self, path: Path, lock: file_locks.FileLock) -> None:
        self._path = path
        self._lock = lock

    def remove(self) -> None:
        processes.remove_tree(str(self._path))
        self._lock.remove()


@contextlib.contextmanager
def removing_on_exit(detached: list[DetachedDirectory]) -> Iterator[None]:
    """Remove the directories in the list at the end of the block."""
    try:
        yield
    finally:
        for directory in detached:
            directory.remove()


class StagingArea:
    """Creates and removes staging directories below one directory, which contains `work` and `locks`."""

    def __init__(self, directory: Path) -> None:
        self.folder = directory

    def _lock_path(self, name: str) -> Path:
        return self.folder / "locks" / f"work-{name}"

    def _reserve(self) -> tuple[Path, file_locks.FileLock]:
        name = f"{os.getpid()}-{secrets.token_hex(4)}"
        lock = file_locks.acquire_lock(
            self._lock_path(name), exclusive=True, seconds=1.0, what="a staging directory"
        )
        return self.folder / "work" / name, lock

    @contextlib.contextmanager
    def create(self) -> Iterator[tuple[Path, file_locks.FileLock]]:
        """Yield a new staging directory and its lock; remove both at the end of the block."""
        self.remove_leftovers()
        path, lock = self._reserve()
        try:
            path.mkdir(mode=0o700)
            yield path, lock
        finally:
            processes.remove_tree(str(path))
            lock.remove()

    def remove_leftovers(self) -> int:
        """Remove the staging directories of processes that no longer exist; return how many there were."""
        count = 0
        for path in sorted((self.folder / "work").iterdir()):
            lock = file_locks.try_lock(self._lock_path(path.name), exclusive=True)
            if lock is not None:
                processes.remove_tree(str(path))
                lock.remove()
                count += 1
        return count

    def detach(self, path: Path) -> DetachedDirectory:
        """Move the directory `path` into the staging area. The caller removes it later."""
        target, lock = self._reserve()
        try:
            path.rename(target)
        except BaseException:
            lock.remove()
            raise
        return DetachedDirectory(target, lock)
