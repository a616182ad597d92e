"""Images for tests, made here: layers out of members, layouts, what an engine saves."""

import gzip
import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

from rookery.sandboxes.images import sources

Member = tuple[tarfile.TarInfo, bytes]


def member(
    name: str,
    data: bytes = b"",
    kind: bytes = tarfile.REGTYPE,
    link: str = "",
    mode: int = 0o644,
    owner: tuple[int, int] = (0, 0),
    mtime: int = 1_000_000,
) -> Member:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size, info.mode, info.mtime = kind, link, len(data), mode, mtime
    info.uid, info.gid = owner
    return info, data


def folder(name: str, mode: int = 0o755, owner: tuple[int, int] = (0, 0), mtime: int = 2_000_000) -> Member:
    return member(name, b"", tarfile.DIRTYPE, "", mode, owner, mtime)


def link(name: str, target: str) -> Member:
    return member(name, b"", tarfile.SYMTYPE, target)


def tar_of(*members: Member, form: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as file:
        for info, data in members:
            file.addfile(info, io.BytesIO(data))
    return out.getvalue()


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class Made:
    """An image: its plain layers, lowest first, and what it says about itself."""

    def __init__(self, *layers: bytes, squeeze: bool = True, **config: Any) -> None:
        self.plain = layers
        self.layers = [gzip.compress(layer, 1, mtime=0) if squeeze else layer for layer in layers]
        self.config = json.dumps(
            {
                "architecture": sources.host_platform().split("/")[1],
                "os": "linux",
                "config": config,
                "rootfs": {"type": "layers", "diff_ids": [digest_of(layer) for layer in layers]},
                "history": [{"created_by": "a test"} for _ in layers],  # podman builds on no image without
            }
        ).encode()
        kind = "application/vnd.oci.image.layer.v1.tar" + ("+gzip" if squeeze else "")
        self.manifest = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": sources.MANIFESTS[0],
                "config": {**_described(self.config), "mediaType": "application/vnd.oci.image.config.v1+json"},
                "layers": [{**_described(layer), "mediaType": kind} for layer in self.layers],
            }
        ).encode()

    @property
    def id(self) -> str:
        return digest_of(self.config)[7:]

    def blobs(self) -> dict[str, bytes]:
        return {digest_of(data): data for data in (self.config, self.manifest, *self.layers)}

    def index(self, tag: str = "latest") -> bytes:
        one = {
            **_described(self.manifest),
            "mediaType": sources.MANIFESTS[0],
            "annotations": {"org.opencontainers.image.ref.name": tag},
        }
        return json.dumps({"schemaVersion": 2, "manifests": [one]}).encode()

    def layout(self, where: Path, tag: str = "latest") -> Path:
        (where / "blobs/sha256").mkdir(parents=True)
        (where / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        (where / "index.json").write_bytes(self.index(tag))
        for digest, data in self.blobs().items():
            (where / "blobs/sha256" / digest[7:]).write_bytes(data)
        return where

    def saved(self, where: Path, name: str = "saved:1") -> Path:
        """As `docker save` writes it."""
        members = [member(f"{self.id}.json", self.config)]
        paths = []
        for at, layer in enumerate(self.plain):
            paths.append(f"{at:064x}/layer.tar")
            members += [folder(f"{at:064x}"), member(paths[-1], layer)]
        said = [{"Config": f"{self.id}.json", "RepoTags": [name], "Layers": paths}]
        members.append(member("manifest.json", json.dumps(said).encode()))
        where.write_bytes(tar_of(*members))
        return where


def _described(data: bytes) -> dict[str, Any]:
    return {"digest": digest_of(data), "size": len(data)}
