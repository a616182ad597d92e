"""Snapshots of containers: committed images and digests of changed files. Runs in the sandboxes' owner.

The container engine reports which paths of a container differ from its image. The content of these paths is read
here, which needs root.

Guarantees:
- programs are paused while a snapshot or a diff is taken, and resumed in any case;
- a diff compares content, modes and owners, never times;
- the snapshot images of a sandbox and its forks are removed when the last of these sandboxes is closed, or by the
  reaper.
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
from rookery.sandboxes.docker.client import EngineAPIError, EngineClient, api_path

REPOSITORY = "rookery-snapshot"
MAX_SNAPSHOTS = 64
_IGNORED = ("/.rookery", "/dev", "/proc", "/sys", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/etc/mtab")
"""Paths that the container engine or Rookery mounts or writes; a diff ignores them."""
_MODIFIED, _ADDED, _DELETED = 0, 1, 2
_UNPAUSE_SECONDS = 30.0
_PAUSE_RETRY_DELAYS = (0.1, 0.5, 2.0)


class ChangedPath(NamedTuple):
    """Difference of a path in a container from the container's image."""

    kind: int
    """`_MODIFIED`, `_ADDED` or `_DELETED`, as the container engine reports it."""
    is_directory: bool
    digest: str
    """Digest of mode, owner and content; empty if the path does not exist."""


class ContainerSnapshot(NamedTuple):
    image: str
    sandbox_id: str
    changes: dict[str, ChangedPath]
    """The paths that differed from the container's image when the snapshot was taken."""


class ForkTree:
    """A sandbox and all forks derived from it, which share their snapshots."""

    def __init__(self, image: Mapping[str, Any]) -> None:
        self.image = image
        self.members: set[str] = set()
        self.snapshots: dict[str, ContainerSnapshot] = {}

    def get_snapshot(self, name: str) -> ContainerSnapshot:
        if name not in self.snapshots:
            raise SandboxError(f"this sandbox and its forks have no snapshot {name!r}", cause="sandbox.refused")
        return self.snapshots[name]

    async def take_snapshot(
        self,
        engine: EngineClient,
        container: str,
        sandbox_id: str,
        labels: Mapping[str, str],
        changes: "ChangeReader",
    ) -> str:
        if len(self.snapshots) >= MAX_SNAPSHOTS:
            raise SandboxError(
                f"sandbox {sandbox_id} and its forks already have {MAX_SNAPSHOTS} snapshots, the maximum; "
                "snapshots are removed only when the sandbox and all its forks are closed: take fewer",
                cause="sandbox.refused",
            )
        name = secrets.token_hex(8)
        async with paused(engine, container):
            changed = await changes.read(engine, container)
            path = api_path("commit", container=container, repo=REPOSITORY, tag=name, pause="0")
            # Registered before the request: if it is cancelled, the image is still removed with the others.
            self.snapshots[name] = ContainerSnapshot(f"{REPOSITORY}:{name}", sandbox_id, changed)
            try:
                await engine.call("POST", path, {"Labels": dict(labels)})
            except SandboxError:
                del self.snapshots[name]
                raise
        return name

    async def leave(self, engine: EngineClient, sandbox_id: str) -> None:
        """Remove a closed sandbox from the group. When it was the last one, remove the group's snapshot images."""
        self.members.discard(sandbox_id)
        if self.members:
            return
        for name in reversed(list(self.snapshots)):
            with contextlib.suppress(SandboxError):  # the reaper removes it later
                path = api_path("images", self.snapshots[name].image, force="1")
                await engine.call("DELETE", path, ok=(404, 409))
            del self.snapshots[name]


@asynccontextmanager
async def paused(engine: EngineClient, container: str) -> AsyncIterator[None]:
    """Freeze the processes of a container for the duration of the block."""
    try:
        await _pause(engine, container)
        yield
    finally:
        path = api_path("containers", container, "unpause")
        unpause = engine.call("POST", path, ok=(404, 409, 500), timeout=_UNPAUSE_SECONDS)
        await asyncio.shield(asyncio.ensure_future(unpause))


async def _pause(engine: EngineClient, container: str) -> None:
    """Freeze the processes of a container. Try again if the container engine cannot freeze them."""
    # While the machine is busy, runc can take a few milliseconds too long to see all processes frozen. It then
    # thaws them and fails.
    path = api_path("containers", container, "pause")
    for delay in _PAUSE_RETRY_DELAYS:
        try:
            await engine.call("POST", path)
        except EngineAPIError as error:
            if error.status != 500:
                raise
            await asyncio.sleep(delay)
        else:
            return
    await engine.call("POST", path)


class ChangeReader:
    """Determines which files of a container changed. The reading of files has a deadline."""

    def __init__(self, root: transfers.SandboxRoot, timeout: float) -> None:
        self._root = root
        self._clock = transfers.TransferClock(timeout)

    async def read(self, engine: EngineClient, container: str) -> dict[str, ChangedPath]:
        """Return the paths that differ from the container's image."""
        reported = await engine.call("GET", api_path("containers", container, "changes")) or ()
        kinds = {one["Path"]: int(one["Kind"]) for one in reported if not _is_ignored(one["Path"])}
        return await self._digest_paths(kinds)

    async def read_since(
        self, snapshot: ContainerSnapshot, engine: EngineClient, container: str
    ) -> dict[str, ChangedPath]:
        """Return the paths that differ from the snapshot that the container was created from.

        A container engine may compare files by size and by time in whole seconds. Therefore every path of the
        snapshot is read, even if the container engine does not report it: a change of equal length right after the
        fork is not missed.
        """
        changes = await self.read(engine, container)
        unreported = {
            path: _MODIFIED for path, old in snapshot.changes.items() if old.digest and path not in changes
        }
        for path, new in (await self._digest_paths(unreported)).items():
            if new.digest != snapshot.changes[path].digest:
                changes[path] = new if new.digest else ChangedPath(_DELETED, False, "")
        return changes

    async def _digest_paths(self, kinds: Mapping[str, int]) -> dict[str, ChangedPath]:
        try:
            return await asyncio.to_thread(self._digest_all, kinds)
        except asyncio.CancelledError:
            self._clock.stop.set()
            raise

    def _digest_all(self, kinds: Mapping[str, int]) -> dict[str, ChangedPath]:
        found = {}
        for path, kind in kinds.items():
            digest, is_directory = ("", False) if kind == _DELETED else digest_path(self._root, path, self._clock)
            found[path] = ChangedPath(kind, is_directory, digest)
        return found


def _is_ignored(path: str) -> bool:
    return any(path == ignored or path.startswith(f"{ignored}/") for ignored in _IGNORED)


def digest_path(root: transfers.SandboxRoot, path: str, clock: transfers.TransferClock) -> tuple[str, bool]:
    """Return a digest of a path's mode, owner and content, and whether it is a directory.

    The digest is "" if the path does not exist.
    """
    clock.count_entry()
    names = tuple(part for part in path.split("/") if part)
    digest = hashlib.blake2b(digest_size=16)
    try:
        with transfers.open_parent_inside(root, names) as parent:
            info = os.stat(names[-1], dir_fd=parent, follow_symlinks=False)
            digest.update(f"{info.st_mode} {info.st_uid} {info.st_gid} ".encode())
            if stat.S_ISLNK(info.st_mode):
                digest.update(os.fsencode(os.readlink(names[-1], dir_fd=parent)))
            elif stat.S_ISREG(info.st_mode):
                fd = os.open(names[-1], transfers.OPEN_FILE, dir_fd=parent)
                with os.fdopen(fd, "rb", buffering=0) as file:
                    while block := file.read(transfers.BLOCK_BYTES):
                        clock.check()
                        digest.update(block)
    except (FileNotFoundError, NotADirectoryError):
        return "", False
    return digest.hexdigest(), stat.S_ISDIR(info.st_mode)


def compare_changes(before: Mapping[str, ChangedPath], now: Mapping[str, ChangedPath]) -> dict[str, str]:
    """Compare two lists of differences from the same image; return path → "added", "changed" or "removed".

    A directory that is modified only in `now` is left out, because that means that an entry of it changed. A file
    that is modified only in `now` counts as changed, although perhaps only its time changed.
    """
    found: dict[str, str] = {}
    for path in sorted({*before, *now}):
        old, new = before.get(path), now.get(path)
        if old is not None and new is not None:
            if old.digest != new.digest:
                found[path] = "removed" if not new.digest else "changed" if old.digest else "added"
        elif new is not None:
            change = {_ADDED: "added", _DELETED: "removed"}.get(new.kind, "changed")
            if change == "removed" or (new.digest and not (change == "changed" and new.is_directory)):
                found[path] = change
        elif old is not None and old.kind == _ADDED and old.digest:
            found[path] = "removed"
    return found
