"""Task cache: files that are unpacked, downloaded or written for tasks once, for all processes of this machine.

    content/KEY/    complete content           work/…    content being created
    names/KEY       last known value of a name  locks/…   lock files
    about/KEY       description of the content

The cache directory is `ROOKERY_TASK_CACHE` (default: `~/.cache/rookery/tasks`).

Guarantees:
- If several processes need the same content, one creates it and the others wait, for a bounded time.
- Content is complete or absent: it is created in a staging directory, synced to disk and renamed.
- What a killed process left is removed by the next process that creates something.
- Content that a running process has loaded or uses is never removed, nor are entries listed in `keep`. Of the
  rest, the least recently used is removed first.
- Other users of the machine cannot read the cache.
"""

import contextlib
import ctypes
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
"""Enough for a large archive over a slow connection. A process that dies releases its lock at once."""
MAX_PAUSE: Final = 0.5
ROW_PREFIX: Final = "row-"
"""Prefix of keys for the files of rows, of which there may be very many."""
_SUBDIRECTORIES: Final = ("content", "names", "about", "work", "locks")


class CacheEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the cache."""

    key: str
    what: str
    """Description; empty for the files of a row."""
    bytes: int
    files: int
    used: float
    """Time of the last use."""
    used_by: tuple[int, ...] = ()
    """Process IDs."""


class CachePruneResult(msgspec.Struct, frozen=True, kw_only=True):
    """What `TaskCache.prune` removed."""

    removed: tuple[CacheEntry, ...] = ()
    leftovers: int = 0
    """Staging directories of killed processes."""
    bytes: int = 0
    remaining: int = 0
    """Bytes that remain."""
    kept_in_use: int = 0
    """Entries that were due for removal but are in use."""
    kept_on_request: int = 0


def default_directory() -> Path:
    """Return the directory of the task cache: `$ROOKERY_TASK_CACHE`, or the default."""
    if configured := os.environ.get(VARIABLE):
        return Path(configured).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "rookery" / "tasks"


def make_key(*parts: object) -> str:
    """Return a cache key that identifies content by the values it depends on."""
    text = "\0".join(str(part) for part in parts)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:40]


class TaskCache:
    """The task cache in one directory, shared by all processes of this machine."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or default_directory()
        self.content = self.folder / "content"

    def open(self) -> "TaskCache":
        """Create the directories of the cache. Raise `UsageError` if that fails."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self.folder.stat().st_uid != os.geteuid():
                raise UsageError(
                    f"the task cache {self.folder} belongs to another user: set ${VARIABLE} to a "
                    "directory of your own"
                )
            self.folder.chmod(0o700)
            for name in _SUBDIRECTORIES:
                (self.folder / name).mkdir(exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"cannot write to the task cache {self.folder} ({error.strerror or error}): set "
                f"${VARIABLE} to another directory"
            ) from error
        return self

    def get_or_create(self, key: str, make: Callable[[Path], None], what: str) -> Path:
        """Return the directory of a key. If it is missing, `make` fills an empty directory with the content."""
        return self.get_or_create_all({key: make}, what)[key]

    def get_or_create_all(self, makers: Mapping[str, Callable[[Path], None]], what: str) -> dict[str, Path]:
        """Return the directories of several keys, creating those that are missing. They are synced to disk
        together."""
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
        with self.staging() as work:
            try:
                for key, make in makers.items():
                    (work / key).mkdir()
                    make(work / key)
                    if not key.startswith(ROW_PREFIX):
                        (self.folder / "about" / key).write_text(what, errors="replace")
                _sync_to_disk(work)
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
        """Hold the lock of one key, which excludes other processes."""
        from rookery.sandboxes.images import file_locks

        path = self.folder / "locks" / key
        end = time.monotonic() + WAIT_SECONDS
        pause = file_locks.POLL_SECONDS
        while (lock := file_locks.try_lock(path, exclusive=True)) is None:
            if time.monotonic() > end:
                raise UsageError(
                    f"another process has been creating {what} for more than {WAIT_SECONDS:.0f} seconds"
                )
            time.sleep(pause)  # polling, because a blocking lock has no timeout
            pause = min(pause * 1.5, MAX_PAUSE)  # many waiting processes must not slow down the one that works
        try:
            yield
        finally:
            lock.remove()

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """Create a staging directory. It is removed at the end of the block or, after a crash, by a later call."""
        from rookery.sandboxes.images.staging import StagingArea

        with StagingArea(self.folder).create() as (path, _):
            yield path

    # ---- who uses what

    def register(self, keys: Iterable[str]) -> None:
        """Register the use of content by this process until it ends. Call this before checking that the content
        exists."""
        for key in cache_users.register(self.folder, keys):
            with contextlib.suppress(OSError):
                os.utime(self.content / key)

    def find_key(self, path: str) -> str:
        """Return the key of the content that contains a path, or an empty string."""
        prefix = f"{self.content}{os.sep}"
        return path.removeprefix(prefix).partition(os.sep)[0] if path.startswith(prefix) else ""

    def list_entries(self) -> list[CacheEntry]:
        """Return all entries, most recently used first."""
        if not self.content.is_dir():
            return []
        users = cache_users.find_users(self.folder)
        found = [self._read_entry(path, users) for path in self.content.iterdir()]
        return sorted((one for one in found if one is not None), key=lambda one: -one.used)

    def _read_entry(self, path: Path, users: Mapping[str, set[int]]) -> CacheEntry | None:
        what = ""
        if not path.name.startswith(ROW_PREFIX):
            try:
                what = (self.folder / "about" / path.name).read_text(errors="replace")
            except OSError:
                what = "created by an earlier version"
        try:
            count, total = _measure(path)
            used = path.stat().st_mtime
        except OSError:  # removed meanwhile
            return None
        pids = tuple(sorted(users.get(path.name, ())))
        return CacheEntry(key=path.name, what=what, bytes=total, files=count, used=used, used_by=pids)

    def prune(
        self, *, budget: int | None = None, older: float = 0.0, keep: Collection[str] = frozenset()
    ) -> CachePruneResult:
        """Remove leftovers, content unused since `older`, and then the least recently used until the rest fits
        `budget`.

        `keep` are keys that are retained in addition to those in use.
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
        """Return the last known value of a name and when it was stored; `("", 0.0)` if it is unknown."""
        path = self.folder / "names" / make_key(name)
        try:
            return path.read_text(), path.stat().st_mtime
        except (OSError, UnicodeDecodeError):
            return "", 0.0

    def remember(self, name: str, value: str) -> None:
        """Store the value of a name; `recall` returns it."""
        path = self.folder / "names" / make_key(name)
        half = path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
        half.write_text(value)
        half.rename(path)


def _measure(path: Path) -> tuple[int, int]:
    """Return the number of files and the disk space that they use."""
    count = total = 0
    for here, folders, names in os.walk(path):
        for name in (*folders, *names):
            with contextlib.suppress(FileNotFoundError):
                total += Path(here, name).lstat().st_blocks * 512
        count += len(names)
    return count, total


def is_registered(folder: str) -> bool:
    """Return whether a task's directory needs no registration: it is registered already, or is not in the
    cache."""
    cache = TaskCache()
    key = cache.find_key(folder)
    return not key or cache_users.is_registered(cache.folder, key)


def register_use(folder: str) -> bool:
    """Register the use of a task's directory until this process ends. Return False if the directory is gone."""
    cache = TaskCache()
    with contextlib.suppress(OSError):
        cache.register([cache.find_key(folder)])
    return Path(folder).is_dir()


def _sync_to_disk(folder: Path) -> None:
    """Sync the file system. Without it, a power failure after the rename could leave incomplete content in the
    cache."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        ctypes.CDLL(None, use_errno=True).syncfs(fd)
    finally:
        os.close(fd)
