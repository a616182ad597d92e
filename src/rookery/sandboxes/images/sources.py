"""Image sources: the protocol, and the sources that read files of this machine.

Runs in the child process that fetches an image.

Guarantees:
- what a source returns matches the digests in its manifest: configurations are verified here, layers when they are
  fetched or unpacked;
- a missing image raises `SandboxError(task.image)`, with its name and what to do; a source that cannot be reached
  raises `SandboxError(sandbox.image)`.

The amount of data that is read before verification is limited.
"""

import os
import platform as machine_platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rookery.core import SandboxError
from rookery.sandboxes.images import records
from rookery.sandboxes.images.records import unusable_image
from rookery.sandboxes.images.unpacker import tar_stream

MAX_MANIFEST = 4 << 20
MAX_CONFIG = 8 << 20
MAX_ENTRIES = 100_000
"""Largest number of entries in an archive that contains an image."""
INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "ppc64le": "ppc64le", "s390x": "s390x"}

OnBytes = Callable[[int], None]


class FileRange(msgspec.Struct, frozen=True):
    """A range of bytes in a file of this machine."""

    path: str
    offset: int
    length: int


class LayerBlob(msgspec.Struct, frozen=True, kw_only=True):
    """A layer in the form in which its source stores it, usually compressed."""

    digest: str
    """Digest of the stored bytes; empty if only the digest of the decompressed content is known."""
    size: int
    """Number of stored bytes."""
    diff_id: str = ""
    """Digest of the decompressed content (OCI DiffID); empty if unknown."""
    location: FileRange | None = None
    """Path of the stored bytes, if they are on this machine already; else None."""


class ResolvedImage(msgspec.Struct, frozen=True, kw_only=True):
    """The description of an image that a source has found and whose layers are not fetched yet."""

    config: bytes
    """The image configuration, as JSON."""
    layers: tuple[LayerBlob, ...]
    """The layers, lowest first."""
    origin: str
    """Kind of the source: `registry`, `engine` (a container engine), `build` or `file`."""
    digest: str = ""
    """The digest or ID by which the source knows the image."""
    names: tuple[str, ...] = ()
    """The names by which the source knows the image."""
    layered: bool = True
    """False if the image is an archive of a root file system. Such an archive has no whiteouts (marks for files
    that a layer removes)."""


class Source(Protocol):
    def resolve(self) -> ResolvedImage: ...

    def fetch(self, blob: LayerBlob, target: Path, on_bytes: OnBytes) -> FileRange:
        """Return the location of a layer's bytes; download them to `target` if they are not on this machine.

        `on_bytes` is called with the number of bytes of each chunk.
        """
        ...

    def close(self) -> None: ...


def host_platform() -> str:
    """Return the platform of this machine, for example `linux/amd64`."""
    return f"linux/{_ARCHITECTURES.get(machine_platform.machine(), machine_platform.machine())}"


def choose_manifest(name: str, manifests: Sequence[Any], wanted: str) -> dict[str, Any]:
    """Return the entry of an image index for the platform `wanted`. Raise `SandboxError` if there is none."""
    system, _, rest = wanted.partition("/")
    architecture, _, variant = rest.partition("/")
    matching = []
    known = []
    for one in manifests:
        if not isinstance(one, dict) or not records.is_digest(one.get("digest")):
            continue
        attributes = one.get("platform") or {}
        known.append(f"{attributes.get('os', '?')}/{attributes.get('architecture', '?')}")
        if (attributes.get("os"), attributes.get("architecture")) == (system, architecture) and (
            not variant or attributes.get("variant") in (variant, None)
        ):
            matching.append(one)
    if (
        not matching
        and len(manifests) == 1
        and isinstance(manifests[0], dict)
        and not manifests[0].get("platform")
    ):
        matching = list(manifests)
    if not matching:
        platforms = ", ".join(sorted(set(known) - {"unknown/unknown"})[:10]) or "none"
        raise unusable_image(name, f"it does not support {wanted}, only: {platforms}")
    return dict(matching[0])


def parse_manifest(name: str, data: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise unusable_image(name, "its manifest is malformed") from error
    if not isinstance(found, dict) or found.get("schemaVersion") == 1:
        raise unusable_image(
            name, "its manifest has the obsolete schema version 1; push it again with a newer tool"
        )
    return found


def parse_layers(name: str, manifest: dict[str, Any], diff_ids: Sequence[str]) -> tuple[LayerBlob, ...]:
    layers = manifest.get("layers")
    if not isinstance(layers, list) or len(layers) != len(diff_ids):
        raise unusable_image(name, "its manifest and its configuration list different layers")
    found = []
    for layer, diff_id in zip(layers, diff_ids, strict=True):
        size = layer.get("size") if isinstance(layer, dict) else None
        if not isinstance(layer, dict) or not records.is_digest(layer.get("digest")) or not isinstance(size, int):
            raise unusable_image(name, "its manifest has a malformed list of layers")
        kind = str(layer.get("mediaType") or "")
        if "encrypted" in kind or (kind and ".tar" not in kind):
            raise unusable_image(name, f"its layer type {kind[:100]!r} is not supported")
        found.append(LayerBlob(digest=layer["digest"], size=max(0, size), diff_id=diff_id))
    return tuple(found)


# ------------------------------------------------------------------------------------------ files of this machine


class ImageFiles:
    """The files of an image that is stored as a directory or as an uncompressed tar archive."""

    def __init__(self, path: str, display_name: str) -> None:
        self._path = path
        self._display_name = display_name
        self._index: dict[str, FileRange] | None = (
            None if Path(path).is_dir() else _index_archive(path, display_name)
        )

    def locate(self, name: str) -> FileRange | None:
        name = os.path.normpath(name)
        if name.startswith(("/", "..")):
            raise unusable_image(self._display_name, f"it refers to the file {name[:200]!r} outside of itself")
        if self._index is not None:
            return self._index.get(name)
        path = Path(self._path, name)
        # A symbolic link out of the directory would expose other files of the user.
        if not path.is_file() or not path.resolve().is_relative_to(Path(self._path).resolve()):
            return None
        return FileRange(str(path), 0, path.stat().st_size)

    def read(self, name: str, limit: int) -> bytes:
        location = self.locate(name)
        if location is None:
            raise unusable_image(self._display_name, f"it has no file {name[:200]!r}")
        if location.length > limit:
            raise unusable_image(self._display_name, f"its file {name[:200]!r} is larger than {limit} bytes")
        fd = os.open(location.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(fd, location.length, location.offset)
        finally:
            os.close(fd)


def _index_archive(path: str, display_name: str) -> dict[str, FileRange]:
    """Return the location of each file in an uncompressed tar archive. Links between files are resolved."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    size = os.fstat(fd).st_size
    found: dict[str, FileRange] = {}
    links: dict[str, str] = {}
    try:
        if os.pread(fd, 2, 0) == b"\x1f\x8b":
            raise unusable_image(display_name, "it is compressed: decompress it first with gunzip")
        for entry, at in tar_stream.list_members(fd):
            name = os.path.normpath(os.fsdecode(entry.name))
            if len(found) + len(links) > MAX_ENTRIES:
                raise unusable_image(display_name, f"it has more than {MAX_ENTRIES:,} entries")
            if entry.kind == tar_stream.REGULAR and entry.pieces is None:
                if at + entry.stored > size:
                    raise unusable_image(display_name, "it is truncated")
                found[name] = FileRange(path, at, entry.stored)
            elif entry.kind == tar_stream.SYMLINK:
                links[name] = os.path.normpath(os.path.join(os.path.dirname(name), os.fsdecode(entry.link)))  # noqa: PTH118, PTH120
            elif entry.kind == tar_stream.HARD_LINK:
                links[name] = os.path.normpath(os.fsdecode(entry.link))
    except tar_stream.BadArchiveError as error:
        raise unusable_image(display_name, str(error)) from error
    finally:
        os.close(fd)
    for name, target in links.items():
        if target in found:
            found.setdefault(name, found[target])
    return found


class LocalSource:
    """Base class of image sources whose layers are files of this machine."""

    def fetch(self, blob: LayerBlob, target: Path, on_bytes: OnBytes) -> FileRange:  # noqa: ARG002
        assert blob.location is not None
        on_bytes(blob.size)
        return blob.location

    def close(self) -> None:
        pass


class OciLayoutSource(LocalSource):
    """Image source: an OCI image layout, which is a directory or an uncompressed archive of such a directory."""

    def __init__(self, path: str, tag: str, display_name: str, platform: str) -> None:
        self._files = ImageFiles(path, display_name)
        self._tag, self._display_name, self._platform = tag, display_name, platform

    def resolve(self) -> ResolvedImage:
        name = self._display_name
        index = parse_manifest(name, self._files.read("index.json", MAX_MANIFEST))
        entries = [one for one in index.get("manifests") or [] if isinstance(one, dict)]
        if self._tag:
            entries = [one for one in entries if self._tag in _list_tags(one)]
            if not entries:
                raise unusable_image(name, f"it has no image {self._tag!r}")
        elif len(entries) > 1 and len({one.get("digest") for one in entries if not one.get("platform")}) > 1:
            tags = sorted(tag for one in entries for tag in _list_tags(one))[:20]
            raise unusable_image(
                name, f"it contains several images: add :TAG, one of {', '.join(tags) or 'its tags'}"
            )
        if not entries:
            raise unusable_image(name, "its index lists no image")
        one = entries[0] if len(entries) == 1 else choose_manifest(name, entries, self._platform)
        digest, manifest = self._manifest(one)
        for _ in range(3):
            if "manifests" not in manifest:
                break
            digest, manifest = self._manifest(choose_manifest(name, manifest["manifests"], self._platform))
        config = self._blob((manifest.get("config") or {}).get("digest"), MAX_CONFIG)
        blobs = []
        for blob in parse_layers(name, manifest, records.parse_config(name, config)[1]):
            location = self._files.locate(f"blobs/sha256/{blob.digest[7:]}")
            if location is None or location.length != blob.size:
                raise unusable_image(name, f"its layer {blob.digest[:19]}… is missing or truncated")
            blobs.append(msgspec.structs.replace(blob, location=location))
        return ResolvedImage(config=config, layers=tuple(blobs), origin="file", digest=digest)

    def _manifest(self, one: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        digest = one.get("digest")
        return str(digest), parse_manifest(self._display_name, self._blob(digest, MAX_MANIFEST))

    def _blob(self, digest: object, limit: int) -> bytes:
        if not records.is_digest(digest):
            raise unusable_image(self._display_name, "a reference in it is not a digest")
        assert isinstance(digest, str)
        data = self._files.read(f"blobs/sha256/{digest[7:]}", limit)
        if records.sha256_digest(data) != digest:
            raise unusable_image(self._display_name, f"its file for {digest[:19]}… has another digest")
        return data


def _list_tags(one: dict[str, Any]) -> set[str]:
    attributes = one.get("annotations") or {}
    names = {
        str(attributes.get(key) or "") for key in ("org.opencontainers.image.ref.name", "io.containerd.image.name")
    }
    return {name for name in names | {name.rpartition(":")[2] for name in names} if name}


class DockerArchiveSource(LocalSource):
    """Image source: an archive that `docker save` wrote."""

    def __init__(self, path: str, name: str, display_name: str, origin: str = "file") -> None:
        self._files = ImageFiles(path, display_name)
        self._name, self._display_name, self._origin = name, display_name, origin

    def resolve(self) -> ResolvedImage:
        name = self._display_name
        data = self._files.read("manifest.json", MAX_MANIFEST)
        try:
            images = msgspec.json.decode(data, type=list[_ManifestEntry])
        except (msgspec.MsgspecError, RecursionError) as error:
            raise unusable_image(name, "its manifest.json is malformed") from error
        if self._name:
            images = [one for one in images if self._name in one.names()]
            if not images:
                raise unusable_image(name, f"it has no image {self._name!r}")
        if len(images) != 1:
            known = sorted(tag for one in images for tag in one.names())[:20]
            raise unusable_image(
                name, f"it contains {len(images)} images: add :NAME, one of {', '.join(known) or 'none'}"
            )
        (image,) = images
        config = self._files.read(image.config, MAX_CONFIG)
        stem = os.path.basename(image.config).removesuffix(".json")  # noqa: PTH119
        if len(stem) == 64 and records.sha256_digest(config) != f"sha256:{stem}":
            raise unusable_image(name, "the digest of its configuration does not match its name")
        diff_ids = records.parse_config(name, config)[1]
        if len(diff_ids) != len(image.layers):
            raise unusable_image(name, "its manifest and its configuration list different layers")
        blobs = []
        for path, diff_id in zip(image.layers, diff_ids, strict=True):
            location = self._files.locate(path)
            if location is None:
                raise unusable_image(name, f"its layer {path[:200]!r} is missing")
            blobs.append(LayerBlob(digest="", size=location.length, diff_id=diff_id, location=location))
        return ResolvedImage(
            config=config, layers=tuple(blobs), origin=self._origin, names=tuple(image.tags or ())
        )


class _ManifestEntry(msgspec.Struct, rename={"config": "Config", "tags": "RepoTags", "layers": "Layers"}):
    config: str
    layers: list[str]
    tags: list[str] | None = None

    def names(self) -> set[str]:
        tags = set(self.tags or ())
        return tags | {tag.rpartition(":")[2] for tag in tags} | {tag.removesuffix(":latest") for tag in tags}


class RootfsSource(LocalSource):
    """Image source: a tar archive of a root file system."""

    def __init__(self, path: str, display_name: str) -> None:
        self._path, self._display_name = path, display_name

    def resolve(self) -> ResolvedImage:
        size = os.path.getsize(self._path)  # noqa: PTH202
        blob = LayerBlob(digest="", size=size, location=FileRange(self._path, 0, size))
        return ResolvedImage(config=b"", layers=(blob,), origin="file", layered=False)


def image_unavailable(what: str, why: str) -> SandboxError:
    return SandboxError(f"{what}: {why}", cause="sandbox.image")
