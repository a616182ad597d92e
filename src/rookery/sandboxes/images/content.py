"""The store: images on disk, for all runs of a user on this machine.

    images/ID.json     an image, whole        layers/NAME/      a layer, whole
    names/HASH.json    a name of it           infos/NAME.json   what is known of it
    locks/…            who makes or uses it   work/…            what is being made

Promises:
- a layer or an image is there whole or not at all: it is made aside and moved into place in one step;
- a layer that had not reached the disk when the machine went down is made again;
- what a live process uses, or is about to, is never removed: it holds a lock that goes with it;
- what a killed process left half-made is removed by the next one that makes something, or by `prune`;
- nothing of it is readable to other users of the machine.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rookery.core import UsageError
from rookery.sandboxes.images import locks, records
from rookery.sandboxes.images.records import LayerInfo, Name, Record
from rookery.sandboxes.images.works import Aside, Works, removing

VARIABLE, BUDGET_VARIABLE = "ROOKERY_IMAGES", "ROOKERY_IMAGES_BUDGET"
BUDGET = 64 << 30
LOCK_SECONDS = 60.0
_PLACES = ("images", "names", "infos", "layers", "locks", "work")


class Use:
    """An image that is held: it stays until this is closed, or this process ends."""

    def __init__(self, record: Record, folder: Path, lock: locks.Lock) -> None:
        self.record = record
        self.folder = folder
        """That holds its layers, each by its name."""
        self._lock = lock

    def close(self) -> None:
        self._lock.close()


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """An image, for people."""

    id: str
    names: tuple[str, ...]
    origins: tuple[str, ...]
    platform: str
    layers: int
    bytes: int
    own_bytes: int
    """Of layers that no other image has."""
    made: float
    used: float
    used_by: tuple[int, ...]
    """Pids."""


class Pruned(msgspec.Struct, frozen=True, kw_only=True):
    images: tuple[str, ...]
    """A name or the id of each."""
    layers: int
    leftovers: int
    bytes: int
    kept_in_use: int = 0


def usual_folder() -> Path:
    if said := os.environ.get(VARIABLE):
        return Path(said).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "rookery" / "images"


def usual_budget() -> int:
    """Bytes that the store may hold."""
    said = os.environ.get(BUDGET_VARIABLE, "").strip()
    if not said:
        return BUDGET
    units = {"K": 10, "M": 20, "G": 30, "T": 40}
    shift = units.get(said[-1].upper(), 0)
    try:
        wanted = int(float(said[:-1] if shift else said) * (1 << shift))
    except (ValueError, OverflowError):
        wanted = 0
    if wanted <= 0:
        raise UsageError(f"${BUDGET_VARIABLE}: {said!r} is no size like 500M or 64G")
    return wanted


@functools.cache
def boot() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "unknown"


class Store:
    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or usual_folder()
        self.layers = self.folder / "layers"
        self._works = Works(self.folder)

    def open(self) -> "Store":
        """Makes its folders, where they are missing."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self.folder.stat().st_uid != os.geteuid():
                raise UsageError(
                    f"the image store {self.folder} belongs to another user: name one of your own with ${VARIABLE}"
                )
            self.folder.chmod(0o700)
            for name in _PLACES:
                (self.folder / name).mkdir(exist_ok=True)
            # A box looks at it as another user, who gets there by a mount of it alone.
            self.layers.chmod(0o755)
        except OSError as error:
            raise UsageError(
                f"the image store {self.folder} cannot be written to ({error.strerror or error}): "
                f"name another folder with ${VARIABLE}"
            ) from error
        return self

    # ---- looking

    def _name_path(self, name: str) -> Path:
        return self.folder / "names" / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"

    def named(self, name: str) -> Name | None:
        found: Name | None = records.read(self._name_path(name), Name)
        return found if found is not None and found.name == name else None

    def record(self, image: str) -> Record | None:
        """An image that is whole."""
        if not image.isalnum():
            return None
        found: Record | None = records.read(self.folder / "images" / f"{image}.json", Record)
        return found if found is not None and all(self.info(layer) for layer in found.layers) else None

    def find(self, name: str) -> Record | None:
        found = self.named(name)
        return self.record(found.image) if found is not None else None

    def info(self, layer: str) -> LayerInfo | None:
        """Of a layer that is whole."""
        found: LayerInfo | None = records.read(self.folder / "infos" / f"{layer}.json", LayerInfo)
        if found is None or not (found.synced or found.boot == boot()) or not (self.layers / layer).is_dir():
            return None
        return found

    # ---- holding

    def lock_path(self, kind: str, what: str) -> Path:
        return self.folder / "locks" / f"{kind}-{what}"

    def use(self, image: str) -> Use | None:
        """Holds an image; None where it is not there (any more)."""
        lock = locks.wait(
            self.lock_path("image", image), alone=False, seconds=LOCK_SECONDS, what=f"the image {image}"
        )
        record = self.record(image)
        if record is None:
            lock.close()
            return None
        os.utime(lock.fd)
        return Use(record, self.layers, lock)

    def hold_layer(self, layer: str, *, seconds: float) -> tuple[locks.Lock, bool]:
        """A hold on a layer that is there, shared (True), or the right to make it, alone (False)."""
        path = self.lock_path("layer", layer)
        while True:
            lock = locks.wait(path, alone=False, seconds=seconds, what=f"the layer {layer}")
            if self.info(layer):
                return lock, True
            lock.close()
            lock = locks.wait(path, alone=True, seconds=seconds, what=f"the layer {layer}")
            if not self.info(layer):
                return lock, False
            lock.close()  # another made it meanwhile

    def mutex(self) -> locks.Lock:
        return locks.wait(
            self.folder / "locks" / "store", alone=True, seconds=LOCK_SECONDS, what="the image store"
        )

    # ---- making

    @contextlib.contextmanager
    def working(self) -> Iterator[tuple[Path, locks.Lock]]:
        """A folder to make something in, on the disk of the store; gone with the block or with the next one."""
        self.clean()
        with self._works.working() as made:
            yield made

    def put_layer(self, layer: str, made: Path, info: LayerInfo) -> None:
        """Moves a layer into place. For who holds its lock alone."""
        there = self.layers / layer
        if there.exists():  # from before the machine went down, or its making was killed after this move
            self._works.set_aside(there).remove()
        made.rename(there)
        records.write(self.folder / "infos" / f"{layer}.json", info)

    def put_image(self, record: Record, names: list[Name]) -> None:
        """For who holds all of its layers."""
        records.write(self.folder / "images" / f"{record.id}.json", record)
        for name in names:
            records.write(self._name_path(name.name), name)

    def forget(self, record: Record, names: list[Name]) -> None:
        """Takes an image back. For who holds the mutex; its layers go when nobody holds them."""
        for name in names:
            self._name_path(name.name).unlink(missing_ok=True)
        (self.folder / "images" / f"{record.id}.json").unlink(missing_ok=True)

    def sync(self, layers: tuple[str, ...]) -> None:
        """Lets layers reach the disk, and says so."""
        todo = [(layer, info) for layer in layers if (info := self.info(layer)) and not info.synced]
        if not todo:
            return
        fd = os.open(self.layers, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if ctypes.CDLL(None, use_errno=True).syncfs(fd) != 0:
                return
        finally:
            os.close(fd)
        for layer, info in todo:
            records.write(self.folder / "infos" / f"{layer}.json", msgspec.structs.replace(info, synced=True))

    # ---- removing

    def clean(self) -> int:
        """Removes what killed processes left half-made; how much of it there was."""
        count = self._works.clean()
        for kind in ("images", "names", "infos"):
            for half in (self.folder / kind).glob(".*.half"):
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - half.stat().st_mtime > LOCK_SECONDS:
                        half.unlink()
                        count += 1
        return count

    def _records(self) -> list[Record]:
        found = (records.read(path, Record) for path in sorted((self.folder / "images").glob("*.json")))
        return [record for record in found if record is not None]

    def _names(self) -> list[Name]:
        found = (records.read(path, Name) for path in sorted((self.folder / "names").glob("*.json")))
        return [name for name in found if name is not None]

    def held(self) -> int:
        """Bytes of all layers."""
        infos = (records.read(path, LayerInfo) for path in (self.folder / "infos").glob("*.json"))
        return sum(info.bytes for info in infos if info is not None)

    def listed(self) -> list[Listed]:
        """Last used first."""
        everything, names, held = self._records(), self._names(), locks.holders()
        owners: dict[str, int] = {}
        for record in everything:
            for layer in record.layers:
                owners[layer] = owners.get(layer, 0) + 1
        found = []
        for record in everything:
            infos = {layer: self.info(layer) for layer in record.layers}
            if None in infos.values():
                continue
            mine = [name for name in names if name.image == record.id]
            used, pids = self._used(record, held)
            found.append(
                Listed(
                    id=record.id,
                    names=tuple(name.name for name in mine),
                    origins=tuple(sorted({name.origin for name in mine})),
                    platform=record.platform,
                    layers=len(record.layers),
                    bytes=sum(info.bytes for info in infos.values() if info),
                    own_bytes=sum(info.bytes for layer, info in infos.items() if info and owners[layer] == 1),
                    made=record.made,
                    used=used,
                    used_by=pids,
                )
            )
        return sorted(found, key=lambda one: -one.used)

    def _used(self, record: Record, held: dict[tuple[int, int], list[int]]) -> tuple[float, tuple[int, ...]]:
        try:
            info = self.lock_path("image", record.id).stat()
        except OSError:
            return record.made, ()
        return max(info.st_mtime, record.made), tuple(sorted(set(held.get((info.st_dev, info.st_ino), []))))

    def shrink(self, budget: int, *, keep: str = "", unnamed: bool = False, older: float = 0.0) -> Pruned:
        """Removes images, the longest unused first, until the rest fits; of those in use, none.

        `unnamed`: also those that have no name any more; `older`: also those unused since that time.
        """
        gone: list[str] = []
        aside: list[Aside] = []
        busy = layers = freed = 0
        with removing(aside), self.mutex():  # others wait for the mutex, not for what is removed after it
            names = self._names()
            everything = sorted(self._records(), key=lambda record: self._used(record, {})[0])
            for record in everything:
                mine = [name for name in names if name.image == record.id]
                unwanted = (unnamed and not mine) or self._used(record, {})[0] < older
                if record.id == keep or not (unwanted or self.held() > budget):
                    continue
                lock = locks.attempt(self.lock_path("image", record.id), alone=True)
                if lock is None:
                    busy += 1
                    continue
                with lock:
                    for name in mine:
                        self._name_path(name.name).unlink(missing_ok=True)
                    (self.folder / "images" / f"{record.id}.json").unlink(missing_ok=True)
                    # What a file is called by is the last that says something to people.
                    told = sorted((":/" in name.name, name.name) for name in mine)
                    gone.append(told[0][1] if told else record.id[:12])
                    lock.remove()
                swept = self._sweep(aside)
                layers, freed = layers + swept[0], freed + swept[1]
            swept = self._sweep(aside)
            layers, freed = layers + swept[0], freed + swept[1]
        return Pruned(images=tuple(gone), layers=layers, leftovers=0, bytes=freed, kept_in_use=busy)

    def _sweep(self, aside: list[Aside]) -> tuple[int, int]:
        """Sets layers aside that are of no image and that nobody makes or holds. For who holds the mutex."""
        wanted = {layer for record in self._records() for layer in record.layers}
        count = total = 0
        found = {path.stem for path in (self.folder / "infos").glob("*.json")}
        for layer in sorted((found | {path.name for path in self.layers.iterdir()}) - wanted):
            lock = locks.attempt(self.lock_path("layer", layer), alone=True)
            if lock is None:
                continue  # an image that is being made has it
            with lock:
                info: LayerInfo | None = records.read(self.folder / "infos" / f"{layer}.json", LayerInfo)
                (self.folder / "infos" / f"{layer}.json").unlink(missing_ok=True)
                if (self.layers / layer).exists():
                    aside.append(self._works.set_aside(self.layers / layer))
                lock.remove()
            count += 1
            total += info.bytes if info is not None else 0
        return count, total

    def prune(self, *, budget: int, unnamed: bool = True, older: float = 0.0) -> Pruned:
        """Leftovers, layers of no image, and images as `shrink` does."""
        before = self.held()
        leftovers = self.clean()
        done = self.shrink(budget, unnamed=unnamed, older=older)
        self._forget_locks()
        return msgspec.structs.replace(done, leftovers=leftovers, bytes=max(0, before - self.held()))

    def _forget_locks(self) -> None:
        """Files of locks that nobody holds, of things that are not there."""
        with self.mutex():
            for path in (self.folder / "locks").iterdir():
                kind, _, what = path.name.partition("-")
                place = {"image": f"images/{what}.json", "layer": f"layers/{what}", "work": f"work/{what}"}.get(
                    kind
                )
                if kind == "make" or (place is not None and not (self.folder / place).exists()):
                    lock = locks.attempt(path, alone=True)
                    if lock is not None:
                        lock.remove()
