"""Images and snapshots from which a keeper creates sandboxes. Runs in the keeper.

- An archive is unpacked once, however many sandboxes request it at the same time.
- A sandbox and all its forks, also forks of forks, form a lineage. They share one range of user IDs on the host,
  which no other lineage uses at the same time.
- A snapshot exists as long as a sandbox of its lineage exists.
"""

from __future__ import annotations

import os
import select
import sys

from rookery.sandbox_runtime import processes
from rookery.sandbox_runtime.lightweight import deque, loads, suppress
from rookery.sandbox_runtime.root_filesystem import SKELETON, SNAPSHOTS
from rookery.sandboxes.images.unpacker import UNPACK_COMMAND
from rookery.sandboxes.local.keeper import overlay_layers
from rookery.sandboxes.local.keeper.background_jobs import BackgroundJob, BackgroundJobs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

IMAGES = "images"
HIDDEN = ("proc", "dev")
"""Top-level directories that a diff ignores, because the keeper mounts them."""
MAX_SNAPSHOTS = 64
"""Largest number of snapshots of one lineage."""
MAX_GENERATIONS = 64
"""Largest depth of forks of forks. Each generation adds a layer to the overlay, whose number is limited."""
_FREEZE_POLLS, _FREEZE_POLL_MS = 100, 20


class SandboxImage:
    """The read-only files below the writable layer of a sandbox."""

    __slots__ = ("directory", "layers")

    def __init__(self, directory: str, layers: tuple[str, ...] = ()) -> None:
        self.directory = directory
        self.layers = layers
        """Names of the layers in `directory`, uppermost first. If empty, `directory` itself is the root file
        system."""

    def list_directories(self) -> list[str]:
        return [f"{self.directory}/{name}" for name in self.layers] or [self.directory]


class Lineage:
    """A sandbox, its forks, and the snapshots that were taken of any of them."""

    __slots__ = ("id_slot", "members", "pending_snapshots", "snapshots")

    def __init__(self, id_slot: int) -> None:
        self.id_slot = id_slot
        """Index of the range of user IDs on the host that the sandboxes of this lineage share."""
        self.members = 0
        """Number of sandboxes in the lineage plus the number of running jobs that use its snapshots."""
        self.pending_snapshots = 0
        self.snapshots: dict[str, Snapshot] = {}


class Snapshot:
    """A copy of a sandbox's writable layer."""

    __slots__ = ("below", "image", "lineage", "name", "path")

    def __init__(
        self, name: str, path: str, below: tuple[str, ...], image: SandboxImage | None, lineage: Lineage
    ) -> None:
        self.name = name
        self.path = path
        self.below = below
        """Paths of the snapshots below this one in the overlay, uppermost first."""
        self.image = image
        """The image below all snapshots; None for the host's system directories."""
        self.lineage = lineage

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of this snapshot and of those below it in the overlay, uppermost first."""
        return (self.path, *self.below)


class _Archive:
    """The state of an image archive: it is being unpacked, or it has been unpacked."""

    __slots__ = ("path", "waiting")

    def __init__(self) -> None:
        self.path = ""
        self.waiting: list[Callable[[str], None]] = []


class LayerStore:
    """Unpacks image archives; takes, compares and removes snapshots."""

    def __init__(self, jobs: BackgroundJobs, id_slots: deque[int], *, mapped: bool) -> None:
        self.jobs = jobs
        self.id_slots = id_slots
        self.mapped = mapped
        self.snapshots: dict[str, Snapshot] = {}
        self._archives: dict[str, _Archive] = {}
        self._serial = 0

    # ---- images

    def find_image(self, image: str, on_unpacked: Callable[[str], None]) -> str:
        """Return the directory with the files of an image. `image` is the path of a directory or an archive.

        While an archive is being unpacked, return "". `on_unpacked` is then called at the end, with an error
        message or, on success, with "".
        """
        if not os.path.isfile(image):
            if not os.path.isdir(image):
                raise OSError(2, f"image {image} is neither a directory nor an archive")
            return image
        info = os.stat(image)
        # An archive that was overwritten is another archive.
        key = f"{info.st_dev}:{info.st_ino}:{info.st_size}:{info.st_mtime_ns}"
        archive = self._archives.get(key)
        if archive is None:
            archive = self._archives[key] = _Archive()
            self._unpack(image, key, archive)
        if not archive.path:
            archive.waiting.append(on_unpacked)
        return archive.path

    def _unpack(self, image: str, key: str, archive: _Archive) -> None:
        self._serial += 1
        with suppress(FileExistsError):
            os.mkdir(IMAGES, 0o700)  # other users of the host must not run programs of the image
        target = f"{IMAGES}/{self._serial}"

        def on_done(_: int, error: str) -> None:
            if error:
                del self._archives[key]  # a later request tries again
                self.jobs.start(lambda _: _remove([f"{target}.part"]), lambda _, __: None)
            else:
                archive.path = target
            waiting, archive.waiting = archive.waiting, []
            for on_unpacked in waiting:
                on_unpacked(error and f"image {image} cannot be unpacked: {error}")

        self.jobs.start(lambda _: unpack_archive(image, target, owners=self.mapped), on_done)

    # ---- snapshots

    def new_lineage(self) -> Lineage:
        if not self.id_slots:
            raise OSError(11, "all ranges of user IDs for sandboxes are in use: close some sandboxes first")
        return Lineage(self.id_slots.popleft())

    def leave(self, lineage: Lineage) -> None:
        """Record that a sandbox or a job has left its lineage. When it was the last, delete the snapshots."""
        lineage.members -= 1
        if lineage.members > 0:
            return
        paths = [snapshot.path for snapshot in lineage.snapshots.values()]
        for name in lineage.snapshots:
            del self.snapshots[name]
        lineage.snapshots.clear()
        if not paths:
            self.id_slots.append(lineage.id_slot)
            return
        # The user IDs are reused only after the last file that they own is deleted.
        self.jobs.start(lambda _: _remove(paths), lambda _, __: self.id_slots.append(lineage.id_slot))

    def take_snapshot(
        self,
        lineage: Lineage,
        below: tuple[str, ...],
        image: SandboxImage | None,
        layer: int,
        cgroup: str,
        on_done: Callable[[str, str], None],
    ) -> BackgroundJob:
        """Start to copy a sandbox's writable layer, while its processes are frozen (if `cgroup` is a v2 cgroup).

        `layer` is the descriptor of the writable layer. `on_done` is called with the snapshot's name and an error
        message, one of which is empty.
        """
        if len(lineage.snapshots) + lineage.pending_snapshots >= MAX_SNAPSHOTS:
            raise OSError(28, f"this sandbox and its forks already have {MAX_SNAPSHOTS} snapshots")
        if len(below) >= MAX_GENERATIONS:
            raise OSError(
                40, f"this sandbox is a fork of the {MAX_GENERATIONS}th generation, the last one possible"
            )
        self._serial += 1
        name, path = f"snapshot-{self._serial}", f"{SNAPSHOTS}/{self._serial}"

        def work(_: int) -> None:
            freeze(cgroup)
            os.mkdir(path, 0o755)
            target = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                overlay_layers.copy(layer, target)
            except BaseException:
                processes.remove_tree(path)
                raise

        def finish(_: int, error: str) -> None:
            lineage.pending_snapshots -= 1
            if not error:
                snapshot = Snapshot(name, path, below, image, lineage)
                lineage.snapshots[name] = self.snapshots[name] = snapshot
            else:
                self.jobs.start(lambda _: _remove([path]), lambda _, __: None)
            self.leave(lineage)
            on_done("" if error else name, error)

        job = self.jobs.start(work, finish, (layer,))
        lineage.members += 1
        lineage.pending_snapshots += 1
        return job

    def diff(
        self,
        snapshot: Snapshot,
        layer: int,
        cgroup: str,
        uid_shift: int,
        on_done: Callable[[int, str], None],
        *,
        same_sandbox: bool,
    ) -> BackgroundJob:
        """Start to compare a sandbox's writable layer with a snapshot.

        `same_sandbox`: the snapshot was taken of this sandbox; otherwise the sandbox was forked from it. `on_done`
        is called with a descriptor of a file with NUL-terminated items, each a letter (`a`dded, `c`hanged,
        `r`emoved) and a path, and with an error message.
        """
        lowest = snapshot.image.list_directories() if snapshot.image else [SKELETON]
        below = [*(snapshot.below if same_sandbox else snapshot.paths), *lowest]

        def work(result: int) -> None:
            freeze(cgroup)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            before = os.open(snapshot.path, flags) if same_sandbox else -1
            with open(result, "wb", closefd=False) as file:
                changes = overlay_layers.diff(layer, before, below, HIDDEN, uid_shift if snapshot.image else 0)
                file.writelines(change[0].encode() + os.fsencode(path) + b"\0" for path, change in changes)

        def finish(result: int, error: str) -> None:
            self.leave(snapshot.lineage)
            on_done(result, error)

        job = self.jobs.start(work, finish, (layer,))
        snapshot.lineage.members += 1
        return job


def _remove(paths: list[str]) -> None:
    for path in paths:
        processes.remove_tree(path)


def unpack_archive(archive: str, target: str, *, owners: bool) -> None:
    """Unpack an archive of a root file system into the directory `target`, which appears when it is complete.

    Runs in a background job. With `owners`, set the owners of files, which only root can do. Raise `OSError` if
    the archive is invalid.
    """
    os.mkdir(f"{target}.part", 0o755)
    source = os.open(archive, os.O_RDONLY | os.O_CLOEXEC)
    reader, writer = os.pipe2(os.O_CLOEXEC)
    arguments = (f"{target}.part", str(os.fstat(source).st_size), "", str(int(owners)), "0", str(sys.maxsize))
    pid = os.posix_spawn(
        "/proc/self/exe",  # the keeper was started without a path in its arguments: `sys.executable` is empty
        ("python", *UNPACK_COMMAND[1:], *arguments),
        {"LC_ALL": "C.UTF-8"},
        file_actions=[(os.POSIX_SPAWN_DUP2, source, 0), (os.POSIX_SPAWN_DUP2, writer, 1)],
    )
    os.close(writer)
    os.close(source)
    with open(reader, "rb") as lines:
        last = b"{}"
        for line in lines:
            last = line
    os.waitpid(pid, 0)
    result = loads(last)
    if "diff_id" not in result:
        raise OSError(result.get("error", "the unpacking process was killed"))
    os.rename(f"{target}.part", target)


def freeze(cgroup: str) -> None:
    """Freeze all processes of a v2 cgroup, and wait at most two seconds until they are frozen.

    The caller must thaw the cgroup later.
    """
    if not cgroup:
        return
    with open(f"{cgroup}/cgroup.freeze", "w") as file:
        file.write("1")
    events = os.open(f"{cgroup}/cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
    try:
        poller = select.poll()
        poller.register(events, select.POLLPRI)
        for _ in range(_FREEZE_POLLS):
            if b"frozen 1" in os.pread(events, 4096, 0):
                return
            poller.poll(_FREEZE_POLL_MS)
    finally:
        os.close(events)
    # A process is blocked in the kernel. It may still write to its open files.


def thaw(cgroup: str) -> None:
    if cgroup:
        with suppress(OSError), open(f"{cgroup}/cgroup.freeze", "w") as file:
            file.write("0")
