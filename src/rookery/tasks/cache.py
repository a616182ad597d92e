"""Task cache: unpacked archives, downloads and files of rows, created once for all processes of this machine.

An entry of the cache is a directory of files, called its content, under a key.

    content/KEY/    complete content           work/…    content being created
    names/KEY       last known value of a name  locks/…   lock files
    about/KEY       description of the content

The cache directory is `ROOKERY_TASK_CACHE` (default: `~/.cache/rookery/tasks`).

Guarantees:
- If several processes need the same content, one creates it and the others wait, up to `WAIT_SECONDS`.
- Content is complete or absent: it is created in a staging directory, synced to disk and renamed.
- Staging directories of killed processes are removed by the next process that creates or prunes something.
- Pruning never removes an entry that a running process has registered, or whose key is in `keep`. Of the other
  entries, it removes the least recently used first.
- Other users of the machine cannot read the cache.
"""

import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from rookery.core import UsageError
from rookery.tasks import cache_users

VARIABLE: Final = "ROOKERY_TASK_CACHE"
WAIT_SECONDS: Final = 3600.0
"""Maximum time in seconds to wait for another process that creates the same content. It is enough for a large
archive over a slow connection; a process that dies releases its lock at once."""
MAX_PAUSE: Final = 0.5
ROW_PREFIX: Final = "row-"
"""Prefix of the keys of entries that hold the files of a row. They have no description, as there may be very
many."""
_SUBDIRECTORIES: Final = ("content", "names", "about", "work", "locks")


class CacheEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the task cache: a directory of files under a key."""

    key: str
    what: str
    """Description of the content; empty for the files of a row."""
    bytes: int
    """Disk space that the files use."""
    files: int
    """Number of files."""
    used: float
    """Unix time of the last use."""
    used_by: tuple[int, ...] = ()
    """IDs of the running processes that use the entry."""


class CachePruneResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `TaskCache.prune`."""

    removed: tuple[CacheEntry, ...] = ()
    """The entries that were removed."""
    leftovers: int = 0
    """Number of removed staging directories of killed processes."""
    bytes: int = 0
    """Size of the removed entries in bytes."""
    remaining: int = 0
    """Size of the remaining entries in bytes."""
    kept_in_use: int = 0
    """Number of entries that were due for removal, but are in use by a running process."""
    kept_on_request: int = 0
    """Number of entries that were due for removal, but are listed in `keep`."""


def default_directory() -> Path:
    """Return the directory of the task cache: `$ROOKERY_TASK_CACHE`, else `rookery/tasks` in the user's cache
    directory.

    The user's cache directory is `$XDG_CACHE_HOME`, or `~/.cache` if that is not set.
    """
    if configured := os.environ.get(VARIABLE):
        return Path(configured).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "rookery" / "tasks"


def make_key(*parts: object) -> str:
    """Return the cache key of content that is determined by these values: a hash of them."""
    text = "\0".join(str(part) for part in parts)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:40]


class TaskCache:
    """The task cache in one directory, shared by all processes of this machine."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or default_directory()
        self.content = self.folder / "content"

    def open(self) -> "TaskCache":
        """Create the directories of the cache if they are missing, and return self.

        Raise `UsageError` if that fails or if the cache belongs to another user.
        """
        from rookery.sandboxes.images.staging import create_private_directory

        create_private_directory(self.folder, _SUBDIRECTORIES, "the task cache", VARIABLE)
        return self

    def get_or_create(self, key: str, make: Callable[[Path], None], what: str) -> Path:
        """Return the content directory of a key. If it is missing, call `make` with an empty directory to fill.

        The entry is registered as in use by this process. `what` describes the content in messages and listings.
        Raise `UsageError` if the content cannot be stored, or if another process takes too long to create it.
        """
        return self.get_or_create_all({key: make}, what)[key]

    def get_or_create_all(self, makers: Mapping[str, Callable[[Path], None]], what: str) -> dict[str, Path]:
        """Return the content directories of several keys, as `get_or_create` does for one.

        Missing ones are created together, with one sync to disk. `makers` maps each key to its function `make`.
        """
        paths = {key: self.content / key for key in makers}
        with contextlib.suppress(OSError):  # the cache does not exist yet, or is read-only
            self.register(makers)
        if all(path.is_dir() for path in paths.values()):
            return paths
        self.open()
        try:
            self.register(makers)
        except OSError as error:
            raise UsageError(f"cannot write to the task cache {self.folder}: {error.strerror or error}") from error
        with self.lock_key(next(iter(makers)) if len(makers) == 1 else "many", what):
            missing = {key: make for key, make in makers.items() if not paths[key].is_dir()}
            if missing:
                self._make(missing, what)
        return paths

    def _make(self, makers: Mapping[str, Callable[[Path], None]], what: str) -> None:
        from rookery.sandboxes.images.staging import sync_file_system

        with self.staging() as work:
            try:
                for key, make in makers.items():
                    (work / key).mkdir()
                    make(work / key)
                    if not key.startswith(ROW_PREFIX):
                        (self.folder / "about" / key).write_text(what, errors="replace")
                sync_file_system(work)
                for key in makers:
                    with contextlib.suppress(OSError):  # another process created it meanwhile
                        (work / key).rename(self.content / key)
                    if not (self.content / key).is_dir():
                        raise UsageError(f"cannot store {what} in the task cache {self.folder}")
            except OSError as error:
                raise UsageError(
                    f"cannot store {what} in the task cache {self.folder}: {error.strerror or error}"
                ) from error

    @contextlib.contextmanager
    def lock_key(self, key: str, what: str) -> Iterator[None]:
        """Hold the lock of one key during the block, so that no other process creates the same content.

        `what` names the content in the `UsageError` that is raised after waiting for `WAIT_SECONDS`.
        """
        from rookery.sandboxes.images import file_locks

        path = self.folder / "locks" / key
        end = time.monotonic() + WAIT_SECONDS
        pause = file_locks.POLL_SECONDS
        while (lock := file_locks.try_lock(path, exclusive=True)) is None:
            if time.monotonic() > end:
                raise UsageError(
                    f"another process has been creating {what} in the task cache for more than "
                    f"{WAIT_SECONDS:.0f} seconds: wait for that process or end it, then try again"
                )
            time.sleep(pause)  # polling, because a blocking lock has no timeout
            pause = min(pause * 1.5, MAX_PAUSE)  # many waiting processes must not slow down the one that works
        try:
            yield
        finally:
            lock.remove()

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """Yield a new staging directory in the cache.

        It is removed at the end of the block. After a crash, a later call removes it.
        """
        from rookery.sandboxes.images.staging import StagingArea

        with StagingArea(self.folder).create() as (path, _):
            yield path

    # ---- who uses what

    def register(self, keys: Iterable[str]) -> None:
        """Register the use of entries by this process until it ends, so that they are not pruned.

        Call this before checking that an entry exists; otherwise it could be removed in between.
        """
        for key in cache_users.register(self.folder, keys):
            with contextlib.suppress(OSError):
                os.utime(self.content / key)

    def find_key(self, path: str) -> str:
        """Return the key of the entry that contains a path, or an empty string if the path is not in the cache."""
        prefix = f"{self.content}{os.sep}"
        return path.removeprefix(prefix).partition(os.sep)[0] if path.startswith(prefix) else ""

    def list_entries(self) -> list[CacheEntry]:
        """Return all entries of the cache, most recently used first."""
        if not self.content.is_dir():
            return []
        users = cache_users.find_users(self.folder)
        found = [self._read_entry(path, users) for path in self.content.iterdir()]
        return sorted((one for one in found if one is not None), key=lambda one: -one.used)

    def _read_entry(self, path: Path, users: Mapping[str, set[int]]) -> CacheEntry | None:
        from rookery.sandboxes.images.staging import measure_tree

        what = ""
        if not path.name.startswith(ROW_PREFIX):
            try:
                what = (self.folder / "about" / path.name).read_text(errors="replace")
            except OSError:
                what = "created by an earlier version"
        try:
            count, total = measure_tree(path)
            used = path.stat().st_mtime
        except OSError:  # removed meanwhile
            return None
        pids = tuple(sorted(users.get(path.name, ())))
        return CacheEntry(key=path.name, what=what, bytes=total, files=count, used=used, used_by=pids)

    def prune(
        self, *, budget: int | None = None, older: float = 0.0, keep: Collection[str] = frozenset()
    ) -> CachePruneResult:
        """Remove staging directories of killed processes, and entries that are old or exceed the budget.

        Entries last used before the Unix time `older` are removed. With `budget`, the least recently used entries
        are removed until the rest takes at most that many bytes. Entries in use by a running process, and those
        whose keys are in `keep`, stay.
        """
        from rookery.sandboxes.images import file_locks
        from rookery.sandboxes.images.staging import DetachedDirectory, StagingArea, removing_on_exit

        self.open()
        staging_area = StagingArea(self.folder)
        leftovers = staging_area.remove_leftovers()
        everything = self.list_entries()[::-1]
        remaining = sum(one.bytes for one in everything)
        removed: list[CacheEntry] = []
        detached: list[DetachedDirectory] = []
        in_use = on_request = 0
        # Directories are only detached under the lock and deleted after it, so that other processes do not wait
        # for that.
        with (
            removing_on_exit(detached),
            file_locks.acquire_lock(
                self.folder / "locks" / "prune",
                exclusive=True,
                seconds=cache_users.LOCK_SECONDS,
                what="the task cache",
            ),
        ):
            users = cache_users.find_users(self.folder)
            for one in everything:
                if not (one.used < older or (budget is not None and remaining > budget)):
                    continue
                if one.key in users or one.key in keep:
                    in_use += one.key in users
                    on_request += one.key not in users
                    continue
                with contextlib.suppress(FileNotFoundError):  # another process prunes too
                    detached.append(staging_area.detach(self.content / one.key))
                    (self.folder / "about" / one.key).unlink(missing_ok=True)
                    removed.append(one)
                    remaining -= one.bytes
        freed = sum(one.bytes for one in removed)
        return CachePruneResult(
            removed=tuple(removed),
            leftovers=leftovers,
            bytes=freed,
            remaining=remaining,
            kept_in_use=in_use,
            kept_on_request=on_request,
        )

    def recall(self, name: str) -> tuple[str, float]:
        """Return the value that `remember` stored for a name, and the Unix time at which it was stored.

        Return `("", 0.0)` if no value is stored.
        """
        path = self.folder / "names" / make_key(name)
        try:
            return path.read_text(), path.stat().st_mtime
        except (OSError, UnicodeDecodeError):
            return "", 0.0

    def remember(self, name: str, value: str) -> None:
        """Store a value under a name, for example the commit of a revision. `recall` returns it."""
        path = self.folder / "names" / make_key(name)
        half = path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
        half.write_text(value)
        half.rename(path)


def is_registered(folder: str) -> bool:
    """Return whether `register_use` is unnecessary for a task's directory.

    That is the case if this process has already registered it, or if it is not in the task cache.
    """
    cache = TaskCache()
    key = cache.find_key(folder)
    return not key or cache_users.is_registered(cache.folder, key)


def register_use(folder: str) -> bool:
    """Register that this process uses a task's directory in the task cache, so that it is not pruned.

    Return False if the directory does not exist any more.
    """
    cache = TaskCache()
    with contextlib.suppress(OSError):
        cache.register([cache.find_key(folder)])
    return Path(folder).is_dir()
