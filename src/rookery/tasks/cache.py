"""What is unpacked, fetched or written out for tasks, once for all processes of this machine.

    content/KEY/    whole, or not there        work/…    what is being made
    names/KEY       what a name meant last     locks/…   who makes or uses what
    about/KEY       what content is, in words

It lies in ROOKERY_TASK_CACHE (~/.cache/rookery/tasks).

Promises:
- of any number of processes that want the same, one makes it and the others wait for it;
- content is there whole or not at all: it is made aside, reaches the disk, and is moved into place in one step;
- what a killed process left half-made is removed by the next one that makes something;
- what a live process loaded or attempts is never removed, nor what is asked to be kept; of the rest, the longest
  unused goes first;
- a wait is bounded; nothing of it is readable to other users of the machine.
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
from rookery.tasks import uses

VARIABLE: Final = "ROOKERY_TASK_CACHE"
WAIT_SECONDS: Final = 3600.0
"""A large archive over a slow line; who makes it and dies lets go at once."""
LONGEST_PAUSE: Final = 0.5
ROWS: Final = "row-"
"""How keys of the files of rows begin: there may be very many."""
_PLACES: Final = ("content", "names", "about", "work", "locks")


class Cached(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is kept."""

    key: str
    what: str
    """In words; empty for the files of a row."""
    bytes: int
    files: int
    used: float
    """When it was loaded or attempted last."""
    used_by: tuple[int, ...] = ()
    """Pids."""


class Pruned(msgspec.Struct, frozen=True, kw_only=True):
    """What was removed."""

    removed: tuple[Cached, ...] = ()
    leftovers: int = 0
    """Of processes that were killed."""
    bytes: int = 0
    held: int = 0
    """Bytes that are still there."""
    kept_in_use: int = 0
    """Entries that would have gone."""
    kept_asked: int = 0


def usual_folder() -> Path:
    if said := os.environ.get(VARIABLE):
        return Path(said).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "rookery" / "tasks"


def key_of(*parts: object) -> str:
    """A name for content, of what it was made from."""
    text = "\0".join(str(part) for part in parts)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:40]


class Cache:
    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or usual_folder()
        self.content = self.folder / "content"

    def open(self) -> "Cache":
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self.folder.stat().st_uid != os.geteuid():
                raise UsageError(
                    f"the task cache {self.folder} belongs to another user: name one of your own with ${VARIABLE}"
                )
            self.folder.chmod(0o700)
            for name in _PLACES:
                (self.folder / name).mkdir(exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"the task cache {self.folder} cannot be written to ({error.strerror or error}): "
                f"name another folder with ${VARIABLE}"
            ) from error
        return self

    def once(self, key: str, make: Callable[[Path], None], what: str) -> Path:
        """The content of that key; where it is missing, `make` fills an empty folder with it."""
        return self.all_once({key: make}, what)[key]

    def all_once(self, makers: Mapping[str, Callable[[Path], None]], what: str) -> dict[str, Path]:
        """Many at a time: they reach the disk together."""
        places = {key: self.content / key for key in makers}
        with contextlib.suppress(OSError):  # there is none yet, or one that can only be read
            self.hold(makers)
        if all(place.is_dir() for place in places.values()):
            return places
        self.open()
        try:
            self.hold(makers)
        except OSError as error:
            raise UsageError(
                f"the task cache {self.folder} cannot be written to: {error.strerror or error}"
            ) from error
        with self.alone(next(iter(makers)) if len(makers) == 1 else "many", what):
            missing = {key: make for key, make in makers.items() if not places[key].is_dir()}
            if missing:
                self._make(missing, what)
        return places

    def _make(self, makers: Mapping[str, Callable[[Path], None]], what: str) -> None:
        with self.working() as work:
            try:
                for key, make in makers.items():
                    (work / key).mkdir()
                    make(work / key)
                    if not key.startswith(ROWS):
                        (self.folder / "about" / key).write_text(what, errors="replace")
                _reach_disk(work)
                for key in makers:
                    with contextlib.suppress(OSError):  # another made this one among others
                        (work / key).rename(self.content / key)
                    if not (self.content / key).is_dir():
                        raise UsageError(f"{what} cannot be put into the task cache {self.folder}")
            except OSError as error:
                raise UsageError(
                    f"{what} cannot be put into the task cache {self.folder}: {error.strerror or error}"
                ) from error

    @contextlib.contextmanager
    def alone(self, key: str, what: str) -> Iterator[None]:
        """One process at a time for one key."""
        from rookery.sandboxes.images import locks

        path = self.folder / "locks" / key
        end = time.monotonic() + WAIT_SECONDS
        pause = locks.PAUSE
        while (lock := locks.attempt(path, alone=True)) is None:
            if time.monotonic() > end:
                raise UsageError(
                    f"{what} is being made by another process for more than {WAIT_SECONDS:.0f} seconds"
                )
            time.sleep(pause)  # a wait in the kernel could not be bounded
            pause = min(pause * 1.5, LONGEST_PAUSE)  # a hundred that wait must not slow the one that works
        try:
            yield
        finally:
            lock.remove()

    @contextlib.contextmanager
    def working(self) -> Iterator[Path]:
        """A folder to make something in; gone with the block, or with the next one."""
        from rookery.sandboxes.images.works import Works

        with Works(self.folder).working() as (place, _):
            yield place

    # ---- who uses what

    def hold(self, keys: Iterable[str]) -> None:
        """Keeps content for this process until it ends. Before one looks whether it is there: then it stays."""
        for key in uses.hold(self.folder, keys):
            with contextlib.suppress(OSError):
                os.utime(self.content / key)

    def key_at(self, path: str) -> str:
        """Of the content that a path leads into; empty where it leads elsewhere."""
        place = f"{self.content}{os.sep}"
        return path[len(place) :].partition(os.sep)[0] if path.startswith(place) else ""

    def listed(self) -> list[Cached]:
        """Last used first."""
        if not self.content.is_dir():
            return []
        users = uses.users(self.folder)
        found = [self._cached(place, users) for place in self.content.iterdir()]
        return sorted((one for one in found if one is not None), key=lambda one: -one.used)

    def _cached(self, place: Path, users: Mapping[str, set[int]]) -> Cached | None:
        what = ""
        if not place.name.startswith(ROWS):
            try:
                what = (self.folder / "about" / place.name).read_text(errors="replace")
            except OSError:
                what = "of an earlier version"
        try:
            count, total = _measured(place)
            used = place.stat().st_mtime
        except OSError:  # it was just removed
            return None
        pids = tuple(sorted(users.get(place.name, ())))
        return Cached(key=place.name, what=what, bytes=total, files=count, used=used, used_by=pids)

    def prune(
        self, *, budget: int | None = None, older: float = 0.0, keep: Collection[str] = frozenset()
    ) -> Pruned:
        """What interrupted work left; content unused since `older`; and the longest unused until the rest fits.

        `keep`: keys that stay, besides those in use.
        """
        from rookery.sandboxes.images import locks
        from rookery.sandboxes.images.works import Aside, Works, removing

        self.open()
        works = Works(self.folder)
        leftovers = works.clean()
        everything = self.listed()[::-1]
        held = sum(one.bytes for one in everything)
        gone: list[Cached] = []
        aside: list[Aside] = []
        busy = asked = 0
        # Who wants something waits for the lock, not for what is removed after it.
        with (
            removing(aside),
            locks.wait(self.folder / "locks" / "prune", alone=True, seconds=uses.SECONDS, what="the task cache"),
        ):
            users = uses.users(self.folder)
            for one in everything:
                if not (one.used < older or (budget is not None and held > budget)):
                    continue
                if one.key in users or one.key in keep:
                    busy += one.key in users
                    asked += one.key not in users
                    continue
                with contextlib.suppress(FileNotFoundError):  # another prunes too
                    aside.append(works.set_aside(self.content / one.key))
                    (self.folder / "about" / one.key).unlink(missing_ok=True)
                    gone.append(one)
                    held -= one.bytes
        freed = sum(one.bytes for one in gone)
        return Pruned(
            removed=tuple(gone), leftovers=leftovers, bytes=freed, held=held, kept_in_use=busy, kept_asked=asked
        )

    def recall(self, name: str) -> tuple[str, float]:
        """What a name meant, and when that was found out; empty where it never was."""
        path = self.folder / "names" / key_of(name)
        try:
            return path.read_text(), path.stat().st_mtime
        except (OSError, UnicodeDecodeError):
            return "", 0.0

    def remember(self, name: str, value: str) -> None:
        path = self.folder / "names" / key_of(name)
        half = path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
        half.write_text(value)
        half.rename(path)


def _measured(place: Path) -> tuple[int, int]:
    """Files, and bytes of the disk that they take."""
    count = total = 0
    for here, folders, names in os.walk(place):
        for name in (*folders, *names):
            with contextlib.suppress(FileNotFoundError):
                total += Path(here, name).lstat().st_blocks * 512
        count += len(names)
    return count, total


def is_kept(folder: str) -> bool:
    """Whether nothing has to be done for the folder of a task to stay: it is kept already, or not of the cache."""
    cache = Cache()
    key = cache.key_at(folder)
    return not key or uses.holds(cache.folder, key)


def keep(folder: str) -> bool:
    """Keeps the folder of a task until this process ends; False where it is gone already."""
    cache = Cache()
    with contextlib.suppress(OSError):
        cache.hold([cache.key_at(folder)])
    return Path(folder).is_dir()


def _reach_disk(folder: Path) -> None:
    """A name that is moved before its content is on the disk is a half-valid cache after a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        ctypes.CDLL(None, use_errno=True).syncfs(fd)
    finally:
        os.close(fd)
