"""An image of the store, as an engine takes it: for names that were imported here and that no registry has.

Promises:
- what a layer shows over those below is the same for the engine: marks of what is gone become what tools write;
- the image is held while it is read, so nobody removes it meanwhile;
- owners, modes, times and links are the store's; what the store left out (set-user-id bits, devices)
  is not there for the engine either.
"""

import contextlib
import hashlib
import io
import os
import stat
import tarfile
from pathlib import Path

import msgspec

from rookery.sandboxes.images import records
from rookery.sandboxes.images.content import Store
from rookery.sandboxes.images.layer import OPAQUE
from rookery.sandboxes.images.records import Record
from rookery.sandboxes.images.references import Reference

_GONE, _ALL_GONE = ".wh.", ".wh..wh..opq"
_OPAQUE = (OPAQUE, "trusted.overlay.opaque")


def export(store: Store, reference: Reference, name: str, target: Path) -> bool:
    """Writes what `docker save` would have written; False where the store has no such image."""
    known = store.find(reference.key)
    use = store.use(known.id) if known is not None else None
    if use is None:
        return False
    try:
        with tarfile.open(target, "w") as tar:
            layers, diffs = [], []
            for at, layer in enumerate(use.record.layers):
                part = target.with_suffix(f".{at}")
                diffs.append(_packed(use.folder / layer, part))
                layers.append(f"{at}.tar")
                tar.add(part, layers[-1])
                part.unlink()
            describe(tar, _config(use.record, diffs), name, layers)
    finally:
        use.close()
    return True


def describe(tar: tarfile.TarFile, config: bytes, name: str, layers: list[str]) -> None:
    """The rest of an archive that an engine loads."""
    of_config = f"{records.digest_of(config)[7:]}.json"
    manifest = msgspec.json.encode([{"Config": of_config, "RepoTags": [name], "Layers": layers}])
    for file_name, data in ((of_config, config), ("manifest.json", manifest)):
        info = tarfile.TarInfo(file_name)
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))


def _config(record: Record, diffs: list[str]) -> bytes:
    system, _, rest = record.platform.partition("/")
    said = {
        "Env": [f"{name}={value}" for name, value in record.config.env.items()],
        "WorkingDir": record.config.workdir,
        "User": record.config.user,
    }
    architecture = rest.partition("/")[0]
    return msgspec.json.encode(
        {
            "os": system or "linux",
            "architecture": architecture,
            "config": {key: value for key, value in said.items() if value},
            "rootfs": {"type": "layers", "diff_ids": diffs},
        }
    )


def _packed(layer: Path, target: Path) -> str:
    """One layer; its digest."""
    whose = None if os.geteuid() == 0 else _roots
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as tar:
        for here, folders, files in os.walk(layer):
            folders.sort()
            below = Path(here).relative_to(layer)
            if below.parts:
                tar.add(here, below.as_posix(), recursive=False, filter=whose)
                if _is_opaque(here):
                    tar.addfile(tarfile.TarInfo((below / _ALL_GONE).as_posix()))
            for entry in sorted([*files, *(name for name in folders if Path(here, name).is_symlink())]):
                path = Path(here, entry)
                info = path.lstat()
                if stat.S_ISCHR(info.st_mode):  # how an overlay marks what is gone
                    tar.addfile(tarfile.TarInfo((below / f"{_GONE}{entry}").as_posix()))
                else:
                    tar.add(path, (below / entry).as_posix(), recursive=False, filter=whose)
    with target.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def _roots(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Whose store is not root's, all of its files are its own: in the image they were root's, but for a few."""
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


def _is_opaque(path: str) -> bool:
    for name in _OPAQUE:
        with contextlib.suppress(OSError):
            if os.getxattr(path, name, follow_symlinks=False) == b"y":
                return True
    return False
