"""Rows of the benchmark `docker`: unpacking an image for the provider `local`, beside `tar -x` and umoci.

The image has several layers of many small files, taken from this machine's system and Python. Ours reads the
image, verifies two digests per layer, unpacks the layers for an overlay and publishes them in the store. The peer
`tar` runs once for each layer, with options that keep permissions, into one directory on the same disk. The peer
umoci reads and verifies the whole image, as ours does.

Method:
- both unpack the same bytes on the same disk, alternately; the result is removed before the next round;
- layers are measured compressed, as in registries, and uncompressed, as `docker save` writes them;
- no files are left.
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
from benchmarks.peers import peers_folder
from rookery.sandbox_runtime import processes

TARGET = ">= 0.667x"
"""At most one and a half times as long as the peer."""
PEER = "tar -x"
UMOCI = "umoci unpack"
TAG = "bench"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
LAYERS = (40 << 20, 30 << 20, 50 << 20, 30 << 20)
QUICK_LAYERS = (15 << 20, 15 << 20, 15 << 20)
ROUNDS, QUICK_ROUNDS = 7, 5
LARGEST = 16 << 20
_SKIPPED = {"__pycache__", "site-packages", "dist-packages", ".git"}


def unpack_rows(quick: bool, progress: Progress) -> list[Result]:
    """Return the rows `unpack` and `unpack_plain`, one for each peer."""
    tar = shutil.which("tar")
    umoci = shutil.which("umoci", path=f"{peers_folder() / 'umoci/root/usr/bin'}:{os.environ.get('PATH', '')}")
    with tempfile.TemporaryDirectory(prefix="rookery-unpack-", dir=_store_disk()) as folder_name:
        folder = Path(folder_name)
        progress("creating an image from this machine's files")
        plain = _make_layers(folder, QUICK_LAYERS if quick else LAYERS)
        rows = []
        for row_name, compressed in (("unpack", True), ("unpack_plain", False)):
            layers = _compress(plain) if compressed else plain
            image = _write_layout(folder / row_name, layers, plain)
            size = sum(path.stat().st_size for path in layers) >> 20
            ours: list[float] = []
            theirs: dict[str, list[float]] = {PEER: [], UMOCI: []}
            for at in range(QUICK_ROUNDS if quick else ROUNDS):
                progress(f"{row_name}: round {at + 1}")
                ours.append(_install_seconds(image, folder / "store"))
                if tar is not None:
                    theirs[PEER].append(_tar_seconds(tar, layers, folder / "tar"))
                if umoci is not None:
                    theirs[UMOCI].append(_umoci_seconds(umoci, image, folder / "umoci"))
            kind = "compressed" if compressed else "plain"
            note = f"{len(layers)} layers, {size} MB {kind}, {sum(map(_count, plain)):,} entries"
            for peer, seconds in theirs.items():
                rows.append(
                    Result(
                        name=row_name,
                        unit="s",
                        ours=median(ours),
                        peer=peer,
                        theirs=median(seconds) if seconds else None,
                        target=TARGET,
                        note=note if seconds else f"{note}; the peer is not installed",
                    )
                )
        return rows


def _store_disk() -> str | None:
    """Return the disk of the image store: the directory for temporary files may be in memory."""
    from rookery.sandboxes.images.store import default_directory

    path = default_directory()
    while not path.exists():
        path = path.parent
    return str(path) if os.access(path, os.W_OK) else None


def _install_seconds(image: Path, store: Path) -> float:
    from rookery.sandboxes.images.installer import ImageInstaller
    from rookery.sandboxes.images.references import parse_reference
    from rookery.sandboxes.images.store import ImageStore

    began = time.perf_counter()
    ImageInstaller(ImageStore(store), parse_reference(f"oci:{image}"), budget=1 << 40).install()
    took = time.perf_counter() - began
    processes.remove_tree(str(store))
    return took


def _tar_seconds(tar: str, layers: list[Path], target: Path) -> float:
    target.mkdir()
    began = time.perf_counter()
    for layer in layers:
        subprocess.run([tar, "-xpf", str(layer), "-C", str(target)], check=True, stderr=subprocess.DEVNULL)
    took = time.perf_counter() - began
    processes.remove_tree(str(target))
    return took


def _umoci_seconds(umoci: str, image: Path, target: Path) -> float:
    began = time.perf_counter()
    argv = [umoci, "unpack", "--image", f"{image}:{TAG}", str(target)]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    took = time.perf_counter() - began
    processes.remove_tree(str(target))
    return took


def _make_layers(folder: Path, sizes: tuple[int, ...]) -> list[Path]:
    files = _files()
    made = []
    for at, size in enumerate(sizes):
        path = folder / f"{at}.tar"
        with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
            folders: set[Path] = set()
            left = size
            for file in files:
                for above in reversed(file.parents[:-1]):
                    if above not in folders:
                        folders.add(above)
                        tar.add(above, arcname=str(above)[1:], recursive=False, filter=_whole_seconds)
                tar.add(file, arcname=str(file)[1:], recursive=False, filter=_whole_seconds)
                left -= file.lstat().st_size + 512
                if left < 0:
                    break
        made.append(path)
    return made


def _whole_seconds(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Round the modification time to seconds, as image builders do."""
    info.mtime = int(info.mtime)
    return info


def _files() -> Iterator[Path]:
    """Yield small and large files of the standard library and of the system."""
    for top in (sysconfig.get_path("stdlib"), "/usr/share", "/usr/bin", "/usr/lib", "/usr/include"):
        for here, folders, names in os.walk(os.path.realpath(top)):
            folders[:] = sorted(set(folders) - _SKIPPED)
            for name in sorted(names):
                path = Path(here, name)
                if path.is_symlink() or (
                    path.is_file() and path.stat().st_size < LARGEST and os.access(path, os.R_OK)
                ):
                    yield path


def _compress(layers: list[Path]) -> list[Path]:
    made = []
    for layer in layers:
        target = layer.with_suffix(".tar.gz")
        with layer.open("rb") as old, gzip.open(target, "wb", compresslevel=6) as new:
            shutil.copyfileobj(old, new, 1 << 20)
        made.append(target)
    return made


def _write_layout(folder: Path, layers: list[Path], plain: list[Path]) -> Path:
    from rookery.sandboxes.images.sources import MANIFESTS, host_platform

    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def write_blob(data: bytes) -> dict[str, object]:
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
        kind = LAYER_TYPE + ("+gzip" if layer.suffix == ".gz" else "")
        described.append({"mediaType": kind, "digest": digest, "size": layer.stat().st_size})
    described_config = {"mediaType": CONFIG_TYPE, **write_blob(json.dumps(config).encode())}
    manifest = {"schemaVersion": 2, "config": described_config, "layers": described}
    name = {"annotations": {"org.opencontainers.image.ref.name": TAG}}
    entry = {"mediaType": MANIFESTS[0], **name, **write_blob(json.dumps(manifest).encode())}
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    return folder


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def _count(path: Path) -> int:
    with tarfile.open(path) as tar:
        return sum(1 for _ in tar)
