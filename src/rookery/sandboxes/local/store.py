"""What boxes are made from besides the host's own system: images, and snapshots of other boxes. Stand-alone.

Promises:
- an archive is unpacked once, however many boxes ask for it together;
- a snapshot is there as long as the box it was taken of, or a fork of that box, is there; then it is removed;
- boxes of one family (a box and its forks) are the same users of the host, and no other family is.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

if TYPE_CHECKING or "rookery.sandboxes" in sys.modules:
    from rookery.sandboxes import procs
    from rookery.sandboxes.local import layers, unpack
    from rookery.sandboxes.local.root import KEPT, SKELETON
    from rookery.sandboxes.local.works import Work, Works
    from rookery.sandboxes.small import deque, suppress
else:
    import layers
    import procs
    import unpack
    from root import KEPT, SKELETON
    from small import deque, suppress
    from works import Work, Works

IMAGES = "images"
HIDDEN = ("proc", "dev")
MAX_SNAPSHOTS = 64
"""Of one family."""
MAX_GENERATIONS = 64
"""Forks of forks: each is one more layer to look through."""


class Image:
    """The files under a box's own."""

    __slots__ = ("folder", "layers")

    def __init__(self, folder: str, layers: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self.layers = layers
        """Names in it, uppermost first; none: it is the system itself."""

    def folders(self) -> list[str]:
        return [f"{self.folder}/{name}" for name in self.layers] or [self.folder]


class Family:
    """A box, its forks, and the snapshots that were taken of any of them."""

    __slots__ = ("making", "members", "slot", "snapshots")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.members = 0
        """Boxes, and work on their snapshots."""
        self.making = 0
        self.snapshots: dict[str, Snapshot] = {}


class Snapshot:
    __slots__ = ("below", "family", "image", "name", "path")

    def __init__(self, name: str, path: str, below: tuple[str, ...], image: Image | None, family: Family) -> None:
        self.name = name
        self.path = path
        self.below = below
        """The snapshots that it lies on, uppermost first."""
        self.image = image
        """The image under all of them; None: the host's system."""
        self.family = family

    @property
    def lowers(self) -> tuple[str, ...]:
        return (self.path, *self.below)


class Base:
    """An archive that is being unpacked, or was."""

    __slots__ = ("path", "waiting")

    def __init__(self) -> None:
        self.path = ""
        self.waiting: list[Callable[[str], None]] = []


class Store:
    def __init__(self, works: Works, slots: deque[int], *, mapped: bool) -> None:
        self.works = works
        self.slots = slots
        self.mapped = mapped
        self.snapshots: dict[str, Snapshot] = {}
        self._bases: dict[str, Base] = {}
        self._made = 0

    # ------------------------------------------------------------------------------------------- images

    def base(self, image: str, then: Callable[[str], None]) -> str:
        """The folder of an image. Empty: not there yet; `then` is told when it is, or what is wrong with it."""
        if not os.path.isfile(image):
            if not os.path.isdir(image):
                raise OSError(2, f"there is no folder or archive {image}")
            return image
        info = os.stat(image)
        # An archive that was written anew is another one.
        key = f"{info.st_dev}:{info.st_ino}:{info.st_size}:{info.st_mtime_ns}"
        base = self._bases.get(key)
        if base is None:
            base = self._bases[key] = Base()
            self._unpack(image, key, base)
        if not base.path:
            base.waiting.append(then)
        return base.path

    def _unpack(self, image: str, key: str, base: Base) -> None:
        self._made += 1
        with suppress(FileExistsError):
            os.mkdir(IMAGES, 0o700)  # its programs are the image's, not this machine's
        target = f"{IMAGES}/{self._made}"

        def ended(_: int, why: str) -> None:
            if why:
                del self._bases[key]  # who asks later may have mended it
                self.works.start(lambda _: _remove([f"{target}.part"]), lambda _, __: None)
            else:
                base.path = target
            waiting, base.waiting = base.waiting, []
            for then in waiting:
                then(why and f"the image {image} cannot be used: {why}")

        self.works.start(lambda _: unpack.unpack(image, target, owners=self.mapped), ended)

    # --------------------------------------------------------------------------------------- families

    def family(self) -> Family:
        if not self.slots:
            raise OSError(11, "no user ids are left")
        return Family(self.slots.popleft())

    def leave(self, family: Family) -> None:
        """One member fewer. The last one takes the snapshots along."""
        family.members -= 1
        if family.members > 0:
            return
        paths = [snapshot.path for snapshot in family.snapshots.values()]
        for name in family.snapshots:
            del self.snapshots[name]
        family.snapshots.clear()
        if not paths:
            self.slots.append(family.slot)
            return
        # Files of these users may be left while it goes on: nobody else gets them before.
        self.works.start(lambda _: _remove(paths), lambda _, __: self.slots.append(family.slot))

    def snapshot(
        self,
        family: Family,
        below: tuple[str, ...],
        image: Image | None,
        layer: int,
        still: str,
        ended: Callable[[str, str], None],
    ) -> Work:
        """Copies a layer. `still`: the folder of a control group that is frozen meanwhile. Tells name or error."""
        if len(family.snapshots) + family.making >= MAX_SNAPSHOTS:
            raise OSError(28, f"there are {MAX_SNAPSHOTS} snapshots of this box and its forks already")
        if len(below) >= MAX_GENERATIONS:
            raise OSError(40, f"it is the fork of a fork, {MAX_GENERATIONS} times over")
        self._made += 1
        name, path = f"snapshot-{self._made}", f"{KEPT}/{self._made}"

        def do(_: int) -> None:
            freeze(still)
            os.mkdir(path, 0o755)
            target = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                layers.copy(layer, target)
            except BaseException:
                procs.remove_tree(path)
                raise

        def done(_: int, why: str) -> None:
            family.making -= 1
            if not why:
                made = Snapshot(name, path, below, image, family)
                family.snapshots[name] = self.snapshots[name] = made
            else:
                self.works.start(lambda _: _remove([path]), lambda _, __: None)
            self.leave(family)
            ended("" if why else name, why)

        work = self.works.start(do, done, (layer,))
        family.members += 1
        family.making += 1
        return work

    def diff(
        self,
        snapshot: Snapshot,
        layer: int,
        still: str,
        shift: int,
        ended: Callable[[int, str], None],
        *,
        taken: bool,
    ) -> Work:
        """Compares a layer with a snapshot of it, or (not `taken`) with the one that it lies on.

        Tells letters and paths, each ended by a NUL."""
        lowest = snapshot.image.folders() if snapshot.image else [SKELETON]
        below = [*(snapshot.below if taken else snapshot.lowers), *lowest]

        def do(result: int) -> None:
            freeze(still)
            then = os.open(snapshot.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) if taken else -1
            with open(result, "wb", closefd=False) as file:
                found = layers.diff(layer, then, below, HIDDEN, shift if snapshot.image else 0)
                file.writelines(how[0].encode() + os.fsencode(path) + b"\0" for path, how in found)

        def done(result: int, why: str) -> None:
            self.leave(snapshot.family)
            ended(result, why)

        work = self.works.start(do, done, (layer,))
        snapshot.family.members += 1
        return work


def _remove(paths: list[str]) -> None:
    for path in paths:
        procs.remove_tree(path)


def freeze(group: str) -> None:
    """Everything in a v2 group stands still; whoever asked for it lets it go."""
    import select

    if not group:
        return
    with open(f"{group}/cgroup.freeze", "w") as file:
        file.write("1")
    events = os.open(f"{group}/cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
    try:
        poll = select.poll()
        poll.register(events, select.POLLPRI)
        for _ in range(100):
            if b"frozen 1" in os.pread(events, 4096, 0):
                return
            poll.poll(20)
    finally:
        os.close(events)
    # Something in it is stuck in the kernel. What it holds open may still be written to.


def thaw(group: str) -> None:
    if group:
        with suppress(OSError), open(f"{group}/cgroup.freeze", "w") as file:
            file.write("0")
