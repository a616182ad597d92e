"""What is unpacked, fetched or written out for tasks, once for all processes of this machine.

    content/KEY/    whole, or not there        work/…    what is being made
    names/KEY       what a name meant last     locks/…   who makes what

It lies in ROOKERY_TASK_CACHE (~/.cache/rookery/tasks).

Promises:
- of any number of processes that want the same, one makes it and the others wait for it;
- content is there whole or not at all: it is made aside, reaches the disk, and is moved into place in one step;
- what a killed process left half-made is removed by the next one that makes something;
- a wait is bounded; nothing of it is readable to other users of the machine.
"""

import contextlib
import ctypes
import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from rookery.core import UsageError

VARIABLE: Final = "ROOKERY_TASK_CACHE"
WAIT_SECONDS: Final = 3600.0
"""A large archive over a slow line; who makes it and dies lets go at once."""
LONGEST_PAUSE: Final = 0.5
_PLACES: Final = ("content", "names", "work", "locks")


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
        if all(place.is_dir() for place in places.values()):
            return places
        self.open()
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
        from rookery.sandboxes import procs
        from rookery.sandboxes.images import locks

        self._clean()
        name = f"{os.getpid()}-{secrets.token_hex(4)}"
        lock = locks.attempt(self.folder / "locks" / f"work-{name}", alone=True)
        assert lock is not None  # the name is new
        place = self.folder / "work" / name
        try:
            place.mkdir(mode=0o700)
            yield place
        finally:
            procs.remove_tree(str(place))
            lock.remove()

    def _clean(self) -> None:
        from rookery.sandboxes import procs
        from rookery.sandboxes.images import locks

        for place in sorted((self.folder / "work").iterdir()):
            lock = locks.attempt(self.folder / "locks" / f"work-{place.name}", alone=True)
            if lock is not None:
                procs.remove_tree(str(place))
                lock.remove()

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


def _reach_disk(folder: Path) -> None:
    """A name that is moved before its content is on the disk is a half-valid cache after a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        ctypes.CDLL(None, use_errno=True).syncfs(fd)
    finally:
        os.close(fd)
