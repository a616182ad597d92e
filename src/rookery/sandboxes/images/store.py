"""The image store: unpacked images on disk, shared by all runs of a user on this machine.

    images/ID.json     record of a complete image    layers/NAME/      a complete layer
    names/HASH.json    record of a name              infos/NAME.json   record of a layer
    locks/…            lock files of images, layers  work/…            staging directories

Guarantees:
- a layer or an image is complete or absent: it is created in a staging directory and renamed;
- a layer that was not flushed to disk before a reboot or a crash of the machine is invalid and created again;
- an image that a live process uses is not removed: the process holds a lock, which the kernel releases when the
  process ends;
- what a killed process left in a staging directory is removed by the next fetch or by `prune`;
- other users of the machine cannot read the store.
"""

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rookery.core import UsageError
from rookery.sandboxes.images import file_locks, records
from rookery.sandboxes.images.records import ImageName, ImageRecord, LayerInfo
from rookery.sandboxes.images.staging import (
    DetachedDirectory,
    StagingArea,
    create_private_directory,
    removing_on_exit,
    sync_file_system,
)
from rookery.sandboxes.leases import read_boot_id

VARIABLE, BUDGET_VARIABLE = "ROOKERY_IMAGES", "ROOKERY_IMAGES_BUDGET"
BUDGET = 64 << 30
LOCK_SECONDS = 60.0
_DIRECTORIES = ("images", "names", "infos", "layers", "locks", "work")


class AcquiredImage:
    """An image that this process uses. It is not removed before `release` is called or this process ends."""

    def __init__(self, record: ImageRecord, folder: Path, lock: file_locks.FileLock) -> None:
        self.record = record
        self.folder = folder
        """The directory that contains the image's layers."""
        self._lock = lock

    def release(self) -> None:
        self._lock.close()


class ImageSummary(msgspec.Struct, frozen=True, kw_only=True):
    """An image as `rookery images` lists it."""

    id: str
    names: tuple[str, ...]
    origins: tuple[str, ...]
    platform: str
    layers: int
    bytes: int
    own_bytes: int
    """Size in bytes of those layers of the image that no other image uses."""
    made: float
    """Unix time at which the image was installed."""
    used: float
    """Unix time at which the image was last used."""
    used_by: tuple[int, ...]
    """PIDs of the processes that use the image now."""


class PruneResult(msgspec.Struct, frozen=True, kw_only=True):
    images: tuple[str, ...]
    """A name or the ID of each removed image."""
    layers: int
    """Number of removed layers."""
    leftovers: int
    """Number of removed staging directories and files that killed processes left."""
    bytes: int
    """Number of bytes that were freed."""
    kept_in_use: int = 0
    """Number of images that should have been removed, but are in use."""


def default_directory() -> Path:
    if value := os.environ.get(VARIABLE):
        return Path(value).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "rookery" / "images"


def default_budget() -> int:
    """Return the size limit of the store in bytes, from `$ROOKERY_IMAGES_BUDGET` or the default."""
    value = os.environ.get(BUDGET_VARIABLE, "").strip()
    if not value:
        return BUDGET
    units = {"K": 10, "M": 20, "G": 30, "T": 40}
    shift = units.get(value[-1].upper(), 0)
    try:
        wanted = int(float(value[:-1] if shift else value) * (1 << shift))
    except (ValueError, OverflowError):
        wanted = 0
    if wanted <= 0:
        raise UsageError(f"${BUDGET_VARIABLE}: {value!r} is not a size like 500M or 64G")
    return wanted


class ImageStore:
    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or default_directory()
        self.layers = self.folder / "layers"
        self._staging = StagingArea(self.folder)

    def open(self) -> "ImageStore":
        """Create the directories of the store if necessary; return the store.

        Raise `UsageError` if the store belongs to another user or cannot be written to.
        """
        create_private_directory(self.folder, _DIRECTORIES, "the image store", VARIABLE)
        # A sandbox sees this directory through a mount, as another user.
        self.layers.chmod(0o755)
        return self

    # ---- lookup

    def _name_path(self, name: str) -> Path:
        return self.folder / "names" / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"

    def find_name(self, name: str) -> ImageName | None:
        found: ImageName | None = records.read_record(self._name_path(name), ImageName)
        return found if found is not None and found.name == name else None

    def get_record(self, image: str) -> ImageRecord | None:
        """Return the record of the image with the ID `image`; None if it or one of its layers is missing."""
        if not image.isalnum():
            return None
        found: ImageRecord | None = records.read_record(self.folder / "images" / f"{image}.json", ImageRecord)
        return found if found is not None and all(self.get_layer(layer) for layer in found.layers) else None

    def find_image(self, name: str) -> ImageRecord | None:
        found = self.find_name(name)
        return self.get_record(found.image) if found is not None else None

    def get_layer(self, layer: str) -> LayerInfo | None:
        """Return the record of a layer; None if the layer is missing or not valid any more."""
        found: LayerInfo | None = records.read_record(self.folder / "infos" / f"{layer}.json", LayerInfo)
        if (
            found is None
            or not (found.synced or (found.boot and found.boot == read_boot_id()))
            or not (self.layers / layer).is_dir()
        ):
            return None
        return found

    # ---- locks

    def lock_path(self, kind: str, what: str) -> Path:
        return self.folder / "locks" / f"{kind}-{what}"

    def acquire(self, image: str) -> AcquiredImage | None:
        """Lock the image with the ID `image` against removal; None if it is not in the store."""
        lock = file_locks.acquire_lock(
            self.lock_path("image", image), exclusive=False, seconds=LOCK_SECONDS, what=f"the image {image}"
        )
        record = self.get_record(image)
        if record is None:
            lock.close()
            return None
        os.utime(lock.fd)
        return AcquiredImage(record, self.layers, lock)

    def lock_layer(self, layer: str, *, seconds: float) -> tuple[file_locks.FileLock, bool]:
        """Lock a layer. Return the lock, and whether the layer exists.

        If it exists, the lock is shared. If not, the lock is exclusive, and the caller must create the layer.
        """
        path = self.lock_path("layer", layer)
        while True:
            lock = file_locks.acquire_lock(path, exclusive=False, seconds=seconds, what=f"the layer {layer}")
            if self.get_layer(layer):
                return lock, True
            lock.close()
            lock = file_locks.acquire_lock(path, exclusive=True, seconds=seconds, what=f"the layer {layer}")
            if not self.get_layer(layer):
                return lock, False
            lock.close()  # another process created it meanwhile

    def lock_store(self) -> file_locks.FileLock:
        return file_locks.acquire_lock(
            self.folder / "locks" / "store", exclusive=True, seconds=LOCK_SECONDS, what="the image store"
        )

    # ---- changes

    @contextlib.contextmanager
    def staging_directory(self) -> Iterator[tuple[Path, file_locks.FileLock]]:
        """Yield a staging directory on the file system of the store, and its lock."""
        self.remove_leftovers()
        with self._staging.create() as staging:
            yield staging

    def put_layer(self, layer: str, staged: Path, info: LayerInfo) -> None:
        """Move the staged directory of a layer to its final path. The caller must hold its exclusive lock."""
        target = self.layers / layer
        if target.exists():  # left by a crash of the machine or of the process that created it
            self._staging.detach(target).remove()
        staged.rename(target)
        if not info.boot:  # a reboot could not be noticed
            info = msgspec.structs.replace(info, synced=sync_file_system(self.layers))
        records.write_record(self.folder / "infos" / f"{layer}.json", info)

    def put_image(self, record: ImageRecord, names: list[ImageName]) -> None:
        """Write the records of an image and its names. The caller must hold locks on all its layers."""
        records.write_record(self.folder / "images" / f"{record.id}.json", record)
        for name in names:
            records.write_record(self._name_path(name.name), name)

    def unpublish(self, record: ImageRecord, names: list[ImageName]) -> None:
        """Remove the records of an image and its names. The caller must hold the lock of the store.

        Layers that no other image uses are removed later.
        """
        for name in names:
            self._name_path(name.name).unlink(missing_ok=True)
        (self.folder / "images" / f"{record.id}.json").unlink(missing_ok=True)

    def sync(self, layers: tuple[str, ...]) -> None:
        """Flush layers to disk, and note in their records that they survive a reboot."""
        todo = [(layer, info) for layer in layers if (info := self.get_layer(layer)) and not info.synced]
        if not todo:
            return
        if not sync_file_system(self.layers):
            return
        for layer, info in todo:
            records.write_record(
                self.folder / "infos" / f"{layer}.json", msgspec.structs.replace(info, synced=True)
            )

    # ---- removal

    def remove_leftovers(self) -> int:
        """Remove what killed processes left; return the number of leftovers."""
        count = self._staging.remove_leftovers()
        for kind in ("images", "names", "infos"):
            for half in (self.folder / kind).glob(".*.half"):
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - half.stat().st_mtime > LOCK_SECONDS:
                        half.unlink()
                        count += 1
        return count

    def list_records(self) -> list[ImageRecord]:
        found = (
            records.read_record(path, ImageRecord) for path in sorted((self.folder / "images").glob("*.json"))
        )
        return [record for record in found if record is not None]

    def _names(self) -> list[ImageName]:
        found = (records.read_record(path, ImageName) for path in sorted((self.folder / "names").glob("*.json")))
        return [name for name in found if name is not None]

    def total_bytes(self) -> int:
        """Return the total size of all layers in bytes."""
        infos = (records.read_record(path, LayerInfo) for path in (self.folder / "infos").glob("*.json"))
        return sum(info.bytes for info in infos if info is not None)

    def list_images(self) -> list[ImageSummary]:
        """Return all images of the store, the most recently used first."""
        everything, names, held = self.list_records(), self._names(), file_locks.list_holders()
        owners: dict[str, int] = {}
        for record in everything:
            for layer in record.layers:
                owners[layer] = owners.get(layer, 0) + 1
        found = []
        for record in everything:
            infos = {layer: self.get_layer(layer) for layer in record.layers}
            if None in infos.values():
                continue
            own_names = [name for name in names if name.image == record.id]
            used, pids = self._used(record, held)
            found.append(
                ImageSummary(
                    id=record.id,
                    names=tuple(name.name for name in own_names),
                    origins=tuple(sorted({name.origin for name in own_names})),
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

    def _used(self, record: ImageRecord, held: dict[tuple[int, int], list[int]]) -> tuple[float, tuple[int, ...]]:
        try:
            info = self.lock_path("image", record.id).stat()
        except OSError:
            return record.made, ()
        return max(info.st_mtime, record.made), tuple(sorted(set(held.get((info.st_dev, info.st_ino), []))))

    def shrink(self, budget: int, *, keep: str = "", unnamed: bool = False, older: float = 0.0) -> PruneResult:
        """Remove the least recently used images until the rest fits into `budget` bytes. Images in use stay.

        `keep` is the ID of an image that stays. With `unnamed`, images without a name are removed, too. Images
        that were last used before `older` (Unix time) are removed, too.
        """
        removed: list[str] = []
        detached: list[DetachedDirectory] = []
        busy = layers = freed = 0
        with removing_on_exit(detached), self.lock_store():  # the slow removal happens after the lock is released
            names = self._names()
            everything = sorted(self.list_records(), key=lambda record: self._used(record, {})[0])
            for record in everything:
                own_names = [name for name in names if name.image == record.id]
                unwanted = (unnamed and not own_names) or self._used(record, {})[0] < older
                if record.id == keep or not (unwanted or self.total_bytes() > budget):
                    continue
                lock = file_locks.try_lock(self.lock_path("image", record.id), exclusive=True)
                if lock is None:
                    busy += 1
                    continue
                with lock:
                    self.unpublish(record, own_names)
                    # A name is more useful to people than the key of a file.
                    display_names = sorted((":/" in name.name, name.name) for name in own_names)
                    removed.append(display_names[0][1] if display_names else record.id[:12])
                    lock.remove()
                swept = self._sweep(detached)
                layers, freed = layers + swept[0], freed + swept[1]
            swept = self._sweep(detached)
            layers, freed = layers + swept[0], freed + swept[1]
        return PruneResult(images=tuple(removed), layers=layers, leftovers=0, bytes=freed, kept_in_use=busy)

    def _sweep(self, detached: list[DetachedDirectory]) -> tuple[int, int]:
        """Move layers that belong to no image and are not locked to the staging area, and add them to `detached`.

        Return the number of these layers and their bytes. The caller must hold the lock of the store.
        """
        wanted = {layer for record in self.list_records() for layer in record.layers}
        count = total = 0
        found = {path.stem for path in (self.folder / "infos").glob("*.json")}
        for layer in sorted((found | {path.name for path in self.layers.iterdir()}) - wanted):
            lock = file_locks.try_lock(self.lock_path("layer", layer), exclusive=True)
            if lock is None:
                continue  # an image that is being created uses it
            with lock:
                info: LayerInfo | None = records.read_record(self.folder / "infos" / f"{layer}.json", LayerInfo)
                (self.folder / "infos" / f"{layer}.json").unlink(missing_ok=True)
                if (self.layers / layer).exists():
                    detached.append(self._staging.detach(self.layers / layer))
                lock.remove()
            count += 1
            total += info.bytes if info is not None else 0
        return count, total

    def prune(self, *, budget: int, unnamed: bool = True, older: float = 0.0) -> PruneResult:
        """Remove what killed processes left and layers of no image, and shrink the store to `budget` bytes.

        `unnamed` and `older` select further images to remove, as in `shrink`.
        """
        before = self.total_bytes()
        leftovers = self.remove_leftovers()
        done = self.shrink(budget, unnamed=unnamed, older=older)
        self._remove_stale_locks()
        return msgspec.structs.replace(done, leftovers=leftovers, bytes=max(0, before - self.total_bytes()))

    def _remove_stale_locks(self) -> None:
        """Remove lock files that no process holds and whose image, layer or staging directory no longer exists."""
        with self.lock_store():
            for path in (self.folder / "locks").iterdir():
                kind, _, what = path.name.partition("-")
                locked = {"image": f"images/{what}.json", "layer": f"layers/{what}", "work": f"work/{what}"}.get(
                    kind
                )
                if kind == "make" or (locked is not None and not (self.folder / locked).exists()):
                    lock = file_locks.try_lock(path, exclusive=True)
                    if lock is not None:
                        lock.remove()
