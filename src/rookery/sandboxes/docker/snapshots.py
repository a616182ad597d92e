"""Snapshots of containers: images that the engine commits, and what was different in them.

Promises:
- programs stand still while a snapshot or a diff is taken, and go on whatever becomes of it;
- a diff looks at content, modes and owners, never at times;
- the images of a container and its forks go with the last of these, or with the reaper.

The engine tells which paths of a container differ from its image. What those hold is read here, which takes root.
"""

import asyncio
import contextlib
import hashlib
import os
import secrets
import stat
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from rookery.core import SandboxError
from rookery.sandboxes import transfers
from rookery.sandboxes.docker import api

REPOSITORY = "rookery-snapshot"
MOST = 64
_OURS = ("/.rookery", "/dev", "/proc", "/sys", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/etc/mtab")
"""What the engine and we put there."""
_MODIFIED, _ADDED, _DELETED = 0, 1, 2
_CALM_SECONDS = 30.0


class Seen(NamedTuple):
    """A path that differs from the image, and what was there."""

    kind: int
    folder: bool
    digest: str
    """Empty where nothing was."""


class Snapshot(NamedTuple):
    """One of a family's."""

    image: str
    taken_of: str
    seen: dict[str, Seen]


class Family:
    """A sandbox and its forks, and forks of those."""

    def __init__(self, image: Mapping[str, Any]) -> None:
        self.image = image
        self.members: set[str] = set()
        self.snapshots: dict[str, Snapshot] = {}

    def named(self, name: str) -> Snapshot:
        if name not in self.snapshots:
            raise SandboxError(f"there is no snapshot {name!r} of this sandbox", cause="sandbox.refused")
        return self.snapshots[name]

    async def take(
        self, engine: api.Engine, container: str, identity: str, labels: Mapping[str, str], look: "Looking"
    ) -> str:
        if len(self.snapshots) >= MOST:
            raise SandboxError(f"a sandbox and its forks have at most {MOST} snapshots", cause="sandbox.refused")
        name = secrets.token_hex(8)
        async with still(engine, container):
            seen = await look.at(engine, container)
            where = api.path("commit", container=container, repo=REPOSITORY, tag=name, pause="0")
            # Entered before it is there: an image that comes while nobody listens is removed with the others.
            self.snapshots[name] = Snapshot(f"{REPOSITORY}:{name}", identity, seen)
            try:
                await engine.call("POST", where, {"Labels": dict(labels)})
            except SandboxError:
                del self.snapshots[name]
                raise
        return name

    async def leave(self, engine: api.Engine, identity: str) -> None:
        self.members.discard(identity)
        if self.members:
            return
        for name in reversed(list(self.snapshots)):
            with contextlib.suppress(SandboxError):  # the reaper finds it
                await engine.call(
                    "DELETE", api.path("images", self.snapshots[name].image, force="1"), ok=(404, 409)
                )
            del self.snapshots[name]


@asynccontextmanager
async def still(engine: api.Engine, container: str) -> AsyncIterator[None]:
    """While nothing in it runs."""
    try:
        await engine.call("POST", api.path("containers", container, "pause"))
        yield
    finally:
        goes_on = engine.call(
            "POST", api.path("containers", container, "unpause"), ok=(404, 409, 500), timeout=_CALM_SECONDS
        )
        await asyncio.shield(asyncio.ensure_future(goes_on))


class Looking:
    """At the files of one container, from here."""

    def __init__(self, place: transfers.Place, timeout: float) -> None:
        self._place = place
        self._clock = transfers.Clock(timeout)

    async def at(self, engine: api.Engine, container: str) -> dict[str, Seen]:
        told = await engine.call("GET", api.path("containers", container, "changes")) or ()
        return await self._of({one["Path"]: int(one["Kind"]) for one in told if not _is_ours(one["Path"])})

    async def since(self, taken: Snapshot, engine: api.Engine, container: str) -> dict[str, Seen]:
        """What differs from the snapshot that a container was made of.

        Engines may compare by size and by whole seconds: what the snapshot held is looked at here, also where the
        engine does not name it, so that no change of the same length is missed that came right after the fork.
        """
        now = await self.at(engine, container)
        unnamed = {path: _MODIFIED for path, seen in taken.seen.items() if seen.digest and path not in now}
        for path, seen in (await self._of(unnamed)).items():
            if seen.digest != taken.seen[path].digest:
                now[path] = seen if seen.digest else Seen(_DELETED, False, "")
        return now

    async def _of(self, paths: Mapping[str, int]) -> dict[str, Seen]:
        try:
            return await asyncio.to_thread(self._all, paths)
        except asyncio.CancelledError:
            self._clock.stop.set()
            raise

    def _all(self, paths: Mapping[str, int]) -> dict[str, Seen]:
        found = {}
        for path, kind in paths.items():
            said, folder = ("", False) if kind == _DELETED else digest(self._place, path, self._clock)
            found[path] = Seen(kind, folder, said)
        return found


def _is_ours(path: str) -> bool:
    return any(path == one or path.startswith(f"{one}/") for one in _OURS)


def digest(place: transfers.Place, path: str, clock: transfers.Clock) -> tuple[str, bool]:
    """Of what lies at a path, empty where nothing does; and whether it is a folder."""
    clock.entry()
    names = tuple(part for part in path.split("/") if part)
    made = hashlib.blake2b(digest_size=16)
    try:
        with transfers.parent_of(place, names) as folder:
            info = os.stat(names[-1], dir_fd=folder, follow_symlinks=False)
            made.update(f"{info.st_mode} {info.st_uid} {info.st_gid} ".encode())
            if stat.S_ISLNK(info.st_mode):
                made.update(os.fsencode(os.readlink(names[-1], dir_fd=folder)))
            elif stat.S_ISREG(info.st_mode):
                with os.fdopen(os.open(names[-1], transfers.FILE, dir_fd=folder), "rb", buffering=0) as file:
                    while block := file.read(transfers.BLOCK):
                        clock.check()
                        made.update(block)
    except (FileNotFoundError, NotADirectoryError):
        return "", False
    return made.hexdigest(), stat.S_ISDIR(info.st_mode)


def compared(before: Mapping[str, Seen], now: Mapping[str, Seen]) -> dict[str, str]:
    """Path → added | changed | removed. Both are told against the same image, or `before` is that image itself.

    What is told only now, as changed, is the image's: of a folder it means that something in it did, so folders
    are left out; a file counts as changed, though it may have been touched only."""
    found: dict[str, str] = {}
    for path in sorted({*before, *now}):
        old, new = before.get(path), now.get(path)
        if old is not None and new is not None:
            if old.digest != new.digest:
                found[path] = "removed" if not new.digest else "changed" if old.digest else "added"
        elif new is not None:
            how = {_ADDED: "added", _DELETED: "removed"}.get(new.kind, "changed")
            if how == "removed" or (new.digest and not (how == "changed" and new.folder)):
                found[path] = how
        elif old is not None and old.kind == _ADDED and old.digest:
            found[path] = "removed"
    return found
