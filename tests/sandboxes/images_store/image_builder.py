"""Build container images for tests: layers, OCI layouts and archives of `docker save`."""

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


def directory(name: str, mode: int = 0o755, owner: tuple[int, int] = (0, 0), mtime: int = 2_000_000) -> Member:
    return member(name, b"", tarfile.DIRTYPE, "", mode, owner, mtime)


def symlink(name: str, target: str) -> Member:
    return member(name, b"", tarfile.SYMTYPE, target)


def build_tar(*members: Member, form: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as file:
        for info, data in members:
            file.addfile(info, io.BytesIO(data))
    return out.getvalue()


def sha256_digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class BuiltImage:
    """A container image, made from uncompressed layers (lowest first) and settings of its configuration."""

    def __init__(self, *layers: bytes, compress: bool = True, **config: Any) -> None:
        self.plain = layers
        self.layers = [gzip.compress(layer, 1, mtime=0) if compress else layer for layer in layers]
        self.config = json.dumps(
            {
                "architecture": sources.host_platform().split("/")[1],
                "os": "linux",
                "config": config,
                "rootfs": {"type": "layers", "diff_ids": [sha256_digest(layer) for layer in layers]},
                # Podman builds only on images with a history.
                "history": [{"created_by": "a test"} for _ in layers],
            }
        ).encode()
        kind = "application/vnd.oci.image.layer.v1.tar" + ("+gzip" if compress else "")
        self.manifest = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": sources.MANIFESTS[0],
                "config": {**_describe(self.config), "mediaType": "application/vnd.oci.image.config.v1+json"},
                "layers": [{**_describe(layer), "mediaType": kind} for layer in self.layers],
            }
        ).encode()

    @property
    def id(self) -> str:
        return sha256_digest(self.config)[7:]

    def blobs(self) -> dict[str, bytes]:
        return {sha256_digest(data): data for data in (self.config, self.manifest, *self.layers)}

    def index(self, tag: str = "latest") -> bytes:
        one = {
            **_describe(self.manifest),
            "mediaType": sources.MANIFESTS[0],
            "annotations": {"org.opencontainers.image.ref.name": tag},
        }
        return json.dumps({"schemaVersion": 2, "manifests": [one]}).encode()

    def write_layout(self, path: Path, tag: str = "latest") -> Path:
        (path / "blobs/sha256").mkdir(parents=True)
        (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        (path / "index.json").write_bytes(self.index(tag))
        for digest, data in self.blobs().items():
            (path / "blobs/sha256" / digest[7:]).write_bytes(data)
        return path

    def save_docker_archive(self, path: Path, name: str = "saved:1") -> Path:
        """Write the image as `docker save` does."""
        members = [member(f"{self.id}.json", self.config)]
        paths = []
        for at, layer in enumerate(self.plain):
            paths.append(f"{at:064x}/layer.tar")
            members += [directory(f"{at:064x}"), member(paths[-1], layer)]
        manifest = [{"Config": f"{self.id}.json", "RepoTags": [name], "Layers": paths}]
        members.append(member("manifest.json", json.dumps(manifest).encode()))
        path.write_bytes(build_tar(*members))
        return path


def _describe(data: bytes) -> dict[str, Any]:
    return {"digest": sha256_digest(data), "size": len(data)}
