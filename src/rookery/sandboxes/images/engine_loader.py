"""Load an image into a Docker or Podman engine that does not have it.

Blocking; runs in the child process that fetches an image.

Guarantees:
- concurrent requests for the same image, also from several processes, load it once;
- a name that the container engine has is never assigned to another image; an image from files gets a name that
  identifies its content;
- a name is looked up in the container engine, then in the image store, then in its registry, from which the
  container engine pulls the image;
- a name that none of them has is an error of the task (cause `task.image`); an unreachable registry is not;
- credentials for a registry are sent to the container engine and to no other server.
"""

import base64
import contextlib
import hashlib
import io
import os
import stat
import tarfile
from pathlib import Path
from typing import Any

import msgspec

from rookery.sandboxes.docker.client import api_path
from rookery.sandboxes.images import credentials, dockerfile, file_locks, records, sources
from rookery.sandboxes.images.engine_images import (
    MAX_RESPONSE_BYTES,
    TRANSFER_SECONDS,
    EngineImages,
    parse_json_lines,
    reporting_image_errors,
)
from rookery.sandboxes.images.progress import OnProgress, ProgressReporter
from rookery.sandboxes.images.records import ImageRecord
from rookery.sandboxes.images.references import HUB, ImageReference, familiar_name
from rookery.sandboxes.images.sources import image_unavailable
from rookery.sandboxes.images.store import ImageStore
from rookery.sandboxes.images.unpacker.layer import OPAQUE_ATTRIBUTE

REPOSITORY = "rookery/image"
"""The repository name, in the container engine, of images that were loaded from files."""
WAIT_SECONDS = 3600.0
_WHITEOUT_PREFIX, _OPAQUE_WHITEOUT = ".wh.", ".wh..wh..opq"
_OPAQUE_ATTRIBUTES = (OPAQUE_ATTRIBUTE, "trusted.overlay.opaque")
_LAYER_DONE = ("Pull complete", "Already exists")
_MISSING_MESSAGES = (
    "not found",
    "denied",
    "unauthorized",
    "manifest unknown",
    "no matching manifest",
    "no basic auth credentials",
    "HTTP 404",
)
"""Parts of the messages with which container engines report that a registry does not have an image, or denies
access to it with these credentials."""


def load_image(
    reference: ImageReference,
    engine: EngineImages,
    store: ImageStore | None = None,
    on_progress: OnProgress | None = None,
) -> str:
    """Load an image into the container engine if it is not there; return its name in the container engine."""
    has_name = reference.registry != ""
    if has_name and engine.find_id(familiar_name(reference.name)):
        return familiar_name(reference.name)
    key = reference.key
    if reference.kind == "dockerfile":
        key = f"dockerfile:{reference.path}:{dockerfile.hash_context(Path(reference.path))}"
    digest = hashlib.sha256(f"engine {key}".encode()).hexdigest()[:32]
    name = familiar_name(reference.name) if has_name else f"{REPOSITORY}:{digest}"
    progress = ProgressReporter(familiar_name(reference.name) if has_name else reference.text, on_progress)
    progress.set_step("waiting")
    store = (store or ImageStore()).open()
    with file_locks.acquire_lock(
        store.lock_path("make", digest), exclusive=True, seconds=WAIT_SECONDS, what=f"the image {reference.text}"
    ):
        if not engine.find_id(name):
            progress.set_step("finding")
            with store.staging_directory() as (staging, _):
                _load(reference, engine, name, staging, store, progress)
    progress.set_step("ready", complete=True)
    return name


def _load(
    reference: ImageReference,
    engine: EngineImages,
    name: str,
    staging: Path,
    store: ImageStore,
    progress: ProgressReporter,
) -> None:
    path = Path(reference.path)
    archive = staging / "saved.tar"
    match reference.kind:
        case "docker-archive":
            # Repacked, because loading the original would assign the names in it.
            image = sources.DockerArchiveSource(reference.path, reference.tag, reference.text).resolve()
            _pack_resolved(image, name, archive)
            _send(engine, archive, progress)
        case "oci" | "oci-archive":
            image = sources.OciLayoutSource(
                reference.path, reference.tag, reference.text, sources.host_platform()
            ).resolve()
            _pack_resolved(image, name, archive)
            _send(engine, archive, progress)
        case "tar":
            progress.begin(path.stat().st_size, 1)
            engine.import_rootfs(path, name, progress.add_bytes)
        case "folder":
            rootfs = staging / "rootfs.tar"
            with tarfile.open(rootfs, "w") as tar:
                tar.add(path, arcname=".")
            progress.begin(rootfs.stat().st_size, 1)
            engine.import_rootfs(rootfs, name, progress.add_bytes)
        case "dockerfile":
            engine.tag(dockerfile.DockerfileSource(path, reference.text, staging).build(engine), name)
        case _:
            if reference.kind == "name" and export_image(store, reference, name, archive):
                _send(engine, archive, progress)
                return
            if reference.kind == "engine":
                raise records.unusable_image(
                    name, "the container engine has no image of this name; pull, load or build it there"
                )
            _pull(reference, engine, progress)


def _send(engine: EngineImages, archive: Path, progress: ProgressReporter) -> None:
    progress.begin(archive.stat().st_size, 1)
    engine.load(archive, progress.add_bytes)


# ---- archives in the format of `docker save`


def _pack_resolved(image: sources.ResolvedImage, name: str, target: Path) -> None:
    """Pack an image whose layers are files into an archive in the format of `docker save`.

    Layers are not decompressed, because container engines accept compressed ones.
    """
    with tarfile.open(target, "w") as tar:
        layers = []
        for index, blob in enumerate(image.layers):
            assert blob.location is not None
            info = tarfile.TarInfo(f"{index}.tar")
            info.size = blob.location.length
            layers.append(info.name)
            with open(blob.location.path, "rb") as file:  # noqa: PTH123
                file.seek(blob.location.offset)
                tar.addfile(info, file)
        _add_manifest(tar, image.config, name, layers)


def export_image(store: ImageStore, reference: ImageReference, name: str, target: Path) -> bool:
    """Write an image of the store to `target`, in the format of `docker save`; False if the store lacks the image.

    Whiteouts (marks for removed files) are converted from overlayfs's form to that of archives. Owners (as root),
    modes, times and links are preserved. What was dropped when the image was stored (set-user-ID bits, devices) is
    missing in the archive, too.
    """
    known = store.find_image(reference.key)
    acquired = store.acquire(known.id) if known is not None else None
    if acquired is None:
        return False
    try:
        with tarfile.open(target, "w") as tar:
            layers, diff_ids = [], []
            for index, layer in enumerate(acquired.record.layers):
                part = target.with_suffix(f".{index}")
                diff_ids.append(_pack_layer(acquired.folder / layer, part))
                layers.append(f"{index}.tar")
                tar.add(part, layers[-1])
                part.unlink()
            _add_manifest(tar, _make_config(acquired.record, diff_ids), name, layers)
    finally:
        acquired.release()
    return True


def _add_manifest(tar: tarfile.TarFile, config: bytes, name: str, layers: list[str]) -> None:
    config_name = f"{records.sha256_digest(config)[7:]}.json"
    manifest = msgspec.json.encode([{"Config": config_name, "RepoTags": [name], "Layers": layers}])
    for file_name, data in ((config_name, config), ("manifest.json", manifest)):
        info = tarfile.TarInfo(file_name)
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))


def _make_config(record: ImageRecord, diff_ids: list[str]) -> bytes:
    system, _, rest = record.platform.partition("/")
    config = {
        "Env": [f"{name}={value}" for name, value in record.config.env.items()],
        "WorkingDir": record.config.workdir,
        "User": record.config.user,
    }
    return msgspec.json.encode(
        {
            "os": system or "linux",
            "architecture": rest.partition("/")[0],
            "config": {key: value for key, value in config.items() if value},
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        }
    )


def _pack_layer(layer: Path, target: Path) -> str:
    """Pack a layer directory of the store; return the digest of the archive."""
    set_owner = None if os.geteuid() == 0 else _owned_by_root
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as tar:
        for parent, directories, files in os.walk(layer):
            directories.sort()
            relative = Path(parent).relative_to(layer)
            if relative.parts:
                tar.add(parent, relative.as_posix(), recursive=False, filter=set_owner)
                if _is_opaque(parent):
                    tar.addfile(tarfile.TarInfo((relative / _OPAQUE_WHITEOUT).as_posix()))
            for entry in sorted([*files, *(name for name in directories if Path(parent, name).is_symlink())]):
                path = Path(parent, entry)
                if stat.S_ISCHR(path.lstat().st_mode):  # a whiteout of overlayfs
                    tar.addfile(tarfile.TarInfo((relative / f"{_WHITEOUT_PREFIX}{entry}").as_posix()))
                else:
                    tar.add(path, (relative / entry).as_posix(), recursive=False, filter=set_owner)
    with target.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def _owned_by_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Set the owner of an archive member to root.

    A store that was written without root cannot preserve owners, and in images most files belong to root.
    """
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


def _is_opaque(path: str) -> bool:
    for name in _OPAQUE_ATTRIBUTES:
        with contextlib.suppress(OSError):
            if os.getxattr(path, name, follow_symlinks=False) == b"y":
                return True
    return False


# ---- pulling


def _pull(reference: ImageReference, engine: EngineImages, progress: ProgressReporter) -> None:
    """Let the container engine pull an image from its registry, with the stored credentials for that registry."""
    name = familiar_name(reference.name)
    path = api_path(
        "images",
        "create",
        fromImage=f"{reference.registry}/{reference.repository}",
        tag=reference.digest or reference.tag,
    )
    headers = {}
    login = credentials.find_login(reference.registry)
    if login is not None:
        fields = {
            "username": login.user,
            "password": login.secret,
            "identitytoken": login.identity_token,
            "serveraddress": credentials.HUB_KEY if reference.registry == HUB else reference.registry,
        }
        headers["X-Registry-Auth"] = base64.urlsafe_b64encode(msgspec.json.encode(fields)).decode()
    error = ""
    layers: dict[str, tuple[int, int]] = {}
    with (
        reporting_image_errors(f"the container engine cannot pull the image {name}"),
        engine.client.open("POST", path, b"", headers=headers, timeout=TRANSFER_SECONDS) as response,
    ):
        status = response.status
        while line := response.readline(MAX_RESPONSE_BYTES):
            for message in parse_json_lines(line):
                error = str(message.get("error") or (status != 200 and message.get("message")) or "") or error
                _report_pull_progress(message, layers, progress)
    if not error and status == 200:
        return
    text = error[:500] or str(status)
    if status in (401, 403, 404) or any(message in text for message in _MISSING_MESSAGES):
        advice = f"check the name, or log in with `docker login {reference.registry}`"
        raise records.unusable_image(name, f"the container engine cannot pull it: {text}; {advice}")
    raise image_unavailable(f"the container engine cannot pull the image {name}", text)


def _report_pull_progress(
    message: dict[str, Any], layers: dict[str, tuple[int, int]], progress: ProgressReporter
) -> None:
    """Report the progress of a pull from one message of the container engine.

    `layers` holds the fetched bytes and the size of each layer. The size is known once its download has begun.
    """
    layer, status = str(message.get("id") or ""), str(message.get("status") or "")
    detail = message.get("progressDetail") or {}
    if status in ("Pulling fs layer", "Already exists"):
        layers.setdefault(layer, (0, 0))
    if status == "Downloading" and isinstance(detail.get("total"), int):
        layers[layer] = (int(detail.get("current") or 0), max(0, detail["total"]))
    elif status in ("Download complete", *_LAYER_DONE) and layer in layers:
        layers[layer] = (layers[layer][1], layers[layer][1])
    elif status != "Pulling fs layer":
        return
    done, total = (sum(sizes) for sizes in zip(*layers.values(), strict=True))
    progress.set_bytes(done, total, layers=len(layers))
    if status in _LAYER_DONE:
        progress.add_layer()
