"""Folders in which things are made before they are in their place, and lie when they are out of it, to be removed.

    work/NAME    what is being made, or removed        locks/work-NAME    who does it

The store of images and the cache of tasks have one each.

Promises:
- a work folder is gone with its block; what a killed process left is removed by the next one;
- what is set aside is out of its place in one step, and is removed only when that is asked for.
"""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from rookery.sandboxes import procs
from rookery.sandboxes.images import locks


class Aside:
    """Something that was in its place and is about to be gone."""

    def __init__(self, place: Path, lock: locks.Lock) -> None:
        self._place = place
        self._lock = lock

    def remove(self) -> None:
        procs.remove_tree(str(self._place))
        self._lock.remove()


@contextlib.contextmanager
def removing(aside: list[Aside]) -> Iterator[None]:
    """What was put into the list is removed at the end of the block, however it ends."""
    try:
        yield
    finally:
        for one in aside:
            one.remove()


class Works:
    """The work folders below one folder, which has `work` and `locks` in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _lock(self, name: str) -> Path:
        return self.folder / "locks" / f"work-{name}"

    def _new(self) -> tuple[Path, locks.Lock]:
        name = f"{os.getpid()}-{secrets.token_hex(4)}"
        lock = locks.wait(self._lock(name), alone=True, seconds=1.0, what="a work folder")
        return self.folder / "work" / name, lock

    @contextlib.contextmanager
    def working(self) -> Iterator[tuple[Path, locks.Lock]]:
        """A new folder on the same disk; gone with the block or with the next one."""
        self.clean()
        place, lock = self._new()
        try:
            place.mkdir(mode=0o700)
            yield place, lock
        finally:
            procs.remove_tree(str(place))
            lock.remove()

    def clean(self) -> int:
        """Removes what killed processes left; how much of it there was."""
        count = 0
        for place in sorted((self.folder / "work").iterdir()):
            lock = locks.attempt(self._lock(place.name), alone=True)
            if lock is not None:
                procs.remove_tree(str(place))
                lock.remove()
                count += 1
        return count

    def set_aside(self, there: Path) -> Aside:
        place, lock = self._new()
        try:
            there.rename(place)
        except BaseException:
            lock.remove()
            raise
        return Aside(place, lock)
