"""What it costs to unpack an image for `local`, beside `tar -x` of the same layers. Rows for the bench `docker`.

An image of several layers and many small files is made out of this machine's own system and Python. Ours: from
its files to an image of the store, found, verified by two digests, unpacked as layers of an overlay, published.
Theirs: `tar` with the options that keep what a system needs, layer by layer, into one folder of the same disk.

Promises:
- both unpack the same bytes, on the same disk, in turn; what they made is removed before the next turn;
- layers are measured as registries have them, compressed, and as `docker save` writes them, plain;
- nothing is left.
"""

import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks import Progress, Result
from rookery.sandbox_runtime import processes

TARGET = ">= 0.667x"
"""Of a ratio that says how many times better we are: at most one and a half times as long."""
PEER = "tar -x"
LAYERS = (40 << 20, 30 << 20, 50 << 20, 30 << 20)
QUICK_LAYERS = (15 << 20, 15 << 20, 15 << 20)
ROUNDS, QUICK_ROUNDS = 7, 5
LARGEST = 16 << 20
_SKIPPED = {"__pycache__", "site-packages", "dist-packages", ".git"}


def unpack_rows(quick: bool, progress: Progress) -> list[Result]:
    """The rows `unpack` and `unpack_plain`."""
    name = shutil.which("tar")
    with tempfile.TemporaryDirectory(prefix="rookery-unpack-", dir=_disk()) as spot:
        where = Path(spot)
        progress("making an image out of this machine's files")
        plain = _layers(where, QUICK_LAYERS if quick else LAYERS)
        rows = []
        for row, squeezed in (("unpack", True), ("unpack_plain", False)):
            layers = _squeezed(plain) if squeezed else plain
            image = _layout(where / row, layers, plain)
            size = sum(path.stat().st_size for path in layers) >> 20
            ours, theirs = [], []
            for at in range(QUICK_ROUNDS if quick else ROUNDS):
                progress(f"{row}: round {at + 1}")
                ours.append(_ours(image, where / "store"))
                if name is not None:
                    theirs.append(_theirs(name, layers, where / "tar"))
            form = "compressed" if squeezed else "plain"
            note = f"{len(layers)} layers, {size} MB {form}, {sum(map(_count, plain)):,} entries"
            rows.append(
                Result(
                    name=row,
                    unit="s",
                    ours=median(ours),
                    peer=PEER,
                    theirs=median(theirs) if theirs else None,
                    target=TARGET,
                    note=note if name else f"{note}; no program `tar` is installed here",
                )
            )
        return rows


def _disk() -> str | None:
    """Where a store would lie: a folder for temporary files may be memory."""
    from rookery.sandboxes.images.store import default_directory

    place = default_directory()
    while not place.exists():
        place = place.parent
    return str(place) if os.access(place, os.W_OK) else None


def _ours(image: Path, store: Path) -> float:
    from rookery.sandboxes.images.installer import ImageInstaller
    from rookery.sandboxes.images.references import parse_reference
    from rookery.sandboxes.images.store import ImageStore

    began = time.perf_counter()
    ImageInstaller(ImageStore(store), parse_reference(f"oci:{image}"), budget=1 << 40).install()
    took = time.perf_counter() - began
    processes.remove_tree(str(store))
    return took


def _theirs(tar: str, layers: list[Path], target: Path) -> float:
    target.mkdir()
    began = time.perf_counter()
    for layer in layers:
        subprocess.run([tar, "-xpf", str(layer), "-C", str(target)], check=True, stderr=subprocess.DEVNULL)
    took = time.perf_counter() - began
    processes.remove_tree(str(target))
    return took


def _layers(where: Path, sizes: tuple[int, ...]) -> list[Path]:
    files = _files()
    made = []
    for at, size in enumerate(sizes):
        path = where / f"{at}.tar"
        with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
            folders: set[Path] = set()
            left = size
            for file in files:
                for above in reversed(file.parents[:-1]):
                    if above not in folders:
                        folders.add(above)
                        tar.add(above, arcname=str(above)[1:], recursive=False, filter=_whole)
                tar.add(file, arcname=str(file)[1:], recursive=False, filter=_whole)
                left -= file.lstat().st_size + 512
                if left < 0:
                    break
        made.append(path)
    return made


def _whole(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Times as builders write them: to the second."""
    info.mtime = int(info.mtime)
    return info


def _files() -> Iterator[Path]:
    """Of Python's library, programs, and what is shared: small and large ones."""
    for top in (sysconfig.get_path("stdlib"), "/usr/share", "/usr/bin", "/usr/lib", "/usr/include"):
        for here, folders, names in os.walk(os.path.realpath(top)):
            folders[:] = sorted(set(folders) - _SKIPPED)
            for name in sorted(names):
                path = Path(here, name)
                if path.is_symlink() or (
                    path.is_file() and path.stat().st_size < LARGEST and os.access(path, os.R_OK)
                ):
                    yield path


def _squeezed(layers: list[Path]) -> list[Path]:
    made = []
    for layer in layers:
        target = layer.with_suffix(".tar.gz")
        with layer.open("rb") as old, gzip.open(target, "wb", compresslevel=6) as new:
            shutil.copyfileobj(old, new, 1 << 20)
        made.append(target)
    return made


def _layout(where: Path, layers: list[Path], plain: list[Path]) -> Path:
    from rookery.sandboxes.images.sources import MANIFESTS, host_platform

    blobs = where / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    (where / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def keep(data: bytes) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"digest": f"sha256:{digest}", "size": len(data)}

    diffs = [_digest(path) for path in plain]
    config = {
        "os": "linux",
        "architecture": host_platform().split("/")[1],
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": diffs},
    }
    described = []
    for layer in layers:
        digest = _digest(layer)
        os.link(layer, blobs / digest[7:])
        kind = "application/vnd.oci.image.layer.v1.tar"
        described.append({"mediaType": kind, "digest": digest, "size": layer.stat().st_size})
    manifest = {"schemaVersion": 2, "config": keep(json.dumps(config).encode()), "layers": described}
    entry = {"mediaType": MANIFESTS[0], **keep(json.dumps(manifest).encode())}
    (where / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    return where


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def _count(path: Path) -> int:
    with tarfile.open(path) as tar:
        return sum(1 for _ in tar)
