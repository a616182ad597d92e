"""Where images come from: one small protocol, and the files of this machine behind it.

Promises:
- what a source gives is what its manifest signed for: configurations are digested here, layers where they are
  fetched or unpacked;
- a source that has no such image raises `task.image`, with the name and what to do; one that cannot be asked,
  `sandbox.image`;
- what is read of a file before anything is checked is bounded.
"""

import os
import platform as machine_platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rookery.core import SandboxError
from rookery.sandboxes.images import records, tars
from rookery.sandboxes.images.records import broken

MAX_MANIFEST = 4 << 20
MAX_CONFIG = 8 << 20
MAX_ENTRIES = 100_000
"""Of an archive that holds an image."""
INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "ppc64le": "ppc64le", "s390x": "s390x"}

OnBytes = Callable[[int], None]


class Span(msgspec.Struct, frozen=True):
    """Bytes of a file of this machine."""

    path: str
    offset: int
    length: int


class Blob(msgspec.Struct, frozen=True, kw_only=True):
    """A layer, as a source has it."""

    digest: str
    """Empty: only its plain content is signed for."""
    size: int
    diff: str = ""
    """The digest of its plain content; empty: nobody said."""
    span: Span | None = None
    """Where it lies already."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """An image, before its layers are fetched."""

    config: bytes
    layers: tuple[Blob, ...]
    """Lowest first."""
    origin: str
    digest: str = ""
    """By which its source knows it."""
    names: tuple[str, ...] = ()
    """That its source calls it by."""
    layered: bool = True
    """False: one archive of a system, in which nothing marks what was removed."""


class Source(Protocol):
    def find(self) -> Found: ...

    def fetch(self, blob: Blob, target: Path, on_bytes: OnBytes) -> Span:
        """A layer as a file: `target`, or where it lies already."""
        ...

    def close(self) -> None: ...


def here() -> str:
    """The platform of this machine."""
    return f"linux/{_ARCHITECTURES.get(machine_platform.machine(), machine_platform.machine())}"


def chosen(name: str, manifests: Sequence[Any], wanted: str) -> dict[str, Any]:
    """The manifest for a platform, out of an index's."""
    system, _, rest = wanted.partition("/")
    architecture, _, variant = rest.partition("/")
    fitting = []
    known = []
    for one in manifests:
        if not isinstance(one, dict) or not records.is_digest(one.get("digest")):
            continue
        said = one.get("platform") or {}
        known.append(f"{said.get('os', '?')}/{said.get('architecture', '?')}")
        if (said.get("os"), said.get("architecture")) == (system, architecture) and (
            not variant or said.get("variant") in (variant, None)
        ):
            fitting.append(one)
    if not fitting and len(manifests) == 1 and isinstance(manifests[0], dict) and not manifests[0].get("platform"):
        fitting = list(manifests)
    if not fitting:
        shown = ", ".join(sorted(set(known) - {"unknown/unknown"})[:10]) or "none"
        raise broken(name, f"it is not there for {wanted}, only for: {shown}")
    return dict(fitting[0])


def manifest_of(name: str, data: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(data)
    except msgspec.MsgspecError as error:
        raise broken(name, "its manifest cannot be read") from error
    if not isinstance(found, dict) or found.get("schemaVersion") == 1:
        raise broken(name, "its manifest is of a kind that is no longer in use; push it again with a newer tool")
    return found


def blobs_of(name: str, manifest: dict[str, Any], diffs: Sequence[str]) -> tuple[Blob, ...]:
    layers = manifest.get("layers")
    if not isinstance(layers, list) or len(layers) != len(diffs):
        raise broken(name, "its manifest and its configuration do not name the same layers")
    found = []
    for layer, diff in zip(layers, diffs, strict=True):
        size = layer.get("size") if isinstance(layer, dict) else None
        if not isinstance(layer, dict) or not records.is_digest(layer.get("digest")) or not isinstance(size, int):
            raise broken(name, "its manifest does not say what its layers are")
        kind = str(layer.get("mediaType") or "")
        if "encrypted" in kind or (kind and ".tar" not in kind):
            raise broken(name, f"it has a layer of the kind {kind[:100]!r}, which cannot be unpacked")
        found.append(Blob(digest=layer["digest"], size=max(0, size), diff=diff))
    return tuple(found)


# ------------------------------------------------------------------------------------------ files of this machine


class Files:
    """The files of a folder, or of an archive as if it were one."""

    def __init__(self, path: str, shown: str) -> None:
        self._path = path
        self._shown = shown
        self._index: dict[str, Span] | None = None if os.path.isdir(path) else _indexed(path, shown)  # noqa: PTH112

    def span(self, name: str) -> Span | None:
        name = os.path.normpath(name)
        if name.startswith(("/", "..")):
            raise broken(self._shown, f"it names the file {name[:200]!r}")
        if self._index is not None:
            return self._index.get(name)
        path = Path(self._path, name)
        # Nothing but what lies in the folder: a link out of it would make us unpack another file of the user's.
        if not path.is_file() or not path.resolve().is_relative_to(Path(self._path).resolve()):
            return None
        return Span(str(path), 0, path.stat().st_size)

    def read(self, name: str, limit: int) -> bytes:
        span = self.span(name)
        if span is None:
            raise broken(self._shown, f"it has no file {name[:200]!r}")
        if span.length > limit:
            raise broken(self._shown, f"its file {name[:200]!r} is too long")
        fd = os.open(span.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(fd, span.length, span.offset)
        finally:
            os.close(fd)


def _indexed(path: str, shown: str) -> dict[str, Span]:
    """Where each file of a plain archive lies. Links, as some tools write them for equal layers, are followed."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    size = os.fstat(fd).st_size
    found: dict[str, Span] = {}
    links: dict[str, str] = {}
    at = 0

    def more() -> bytes:
        nonlocal at
        block = os.pread(fd, tars.BLOCK, at)
        at += len(block)
        return block

    try:
        if os.pread(fd, 2, 0) == b"\x1f\x8b":
            raise broken(shown, "it is compressed: open it first, with gunzip")
        reader = tars.Reader(more)
        for entry in reader.entries():
            name = os.path.normpath(os.fsdecode(entry.name))
            if len(found) + len(links) > MAX_ENTRIES:
                raise broken(shown, "it has too many entries")
            if entry.kind == tars.REGULAR and entry.pieces is None:
                if at + entry.stored > size:
                    raise broken(shown, "it ends in the middle")
                found[name] = Span(path, at, entry.stored)
                at += entry.stored + -entry.stored % tars.BLOCK
                reader.passed()
            elif entry.kind == tars.SYMLINK:
                links[name] = os.path.normpath(os.path.join(os.path.dirname(name), os.fsdecode(entry.link)))  # noqa: PTH118, PTH120
            elif entry.kind == tars.LINK:
                links[name] = os.path.normpath(os.fsdecode(entry.link))
    except tars.BadArchiveError as error:
        raise broken(shown, str(error)) from error
    finally:
        os.close(fd)
    for name, target in links.items():
        if target in found:
            found.setdefault(name, found[target])
    return found


class Local:
    """A source whose layers lie on this machine already."""

    def fetch(self, blob: Blob, target: Path, on_bytes: OnBytes) -> Span:  # noqa: ARG002
        assert blob.span is not None
        on_bytes(blob.size)
        return blob.span

    def close(self) -> None:
        pass


class LayoutSource(Local):
    """An OCI layout: a folder, or a plain archive of one."""

    def __init__(self, path: str, tag: str, shown: str, platform: str) -> None:
        self._files = Files(path, shown)
        self._tag, self._shown, self._platform = tag, shown, platform

    def find(self) -> Found:
        name = self._shown
        index = manifest_of(name, self._files.read("index.json", MAX_MANIFEST))
        entries = [one for one in index.get("manifests") or [] if isinstance(one, dict)]
        if self._tag:
            entries = [one for one in entries if self._tag in _tags(one)]
            if not entries:
                raise broken(name, f"it has no image {self._tag!r}")
        elif len(entries) > 1 and len({one.get("digest") for one in entries if not one.get("platform")}) > 1:
            tags = sorted(tag for one in entries for tag in _tags(one))[:20]
            raise broken(name, f"it has several images: add :TAG, one of {', '.join(tags) or 'those it names'}")
        if not entries:
            raise broken(name, "it has no image")
        one = entries[0] if len(entries) == 1 else chosen(name, entries, self._platform)
        digest, manifest = self._manifest(one)
        for _ in range(3):
            if "manifests" not in manifest:
                break
            digest, manifest = self._manifest(chosen(name, manifest["manifests"], self._platform))
        config = self._blob((manifest.get("config") or {}).get("digest"), MAX_CONFIG)
        blobs = []
        for blob in blobs_of(name, manifest, records.config_of(name, config)[1]):
            span = self._files.span(f"blobs/sha256/{blob.digest[7:]}")
            if span is None or span.length != blob.size:
                raise broken(name, f"its layer {blob.digest[:19]}… is missing or cut off")
            blobs.append(msgspec.structs.replace(blob, span=span))
        return Found(config=config, layers=tuple(blobs), origin="file", digest=digest)

    def _manifest(self, one: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        digest = one.get("digest")
        return str(digest), manifest_of(self._shown, self._blob(digest, MAX_MANIFEST))

    def _blob(self, digest: object, limit: int) -> bytes:
        if not records.is_digest(digest):
            raise broken(self._shown, "it names something by no digest")
        assert isinstance(digest, str)
        data = self._files.read(f"blobs/sha256/{digest[7:]}", limit)
        if records.digest_of(data) != digest:
            raise broken(self._shown, f"its file for {digest[:19]}… has another content")
        return data


def _tags(one: dict[str, Any]) -> set[str]:
    said = one.get("annotations") or {}
    names = {str(said.get(key) or "") for key in ("org.opencontainers.image.ref.name", "io.containerd.image.name")}
    return {name for name in names | {name.rpartition(":")[2] for name in names} if name}


class SavedSource(Local):
    """What `docker save` and an engine's own saving write."""

    def __init__(self, path: str, name: str, shown: str, origin: str = "file") -> None:
        self._files = Files(path, shown)
        self._name, self._shown, self._origin = name, shown, origin

    def find(self) -> Found:
        name = self._shown
        data = self._files.read("manifest.json", MAX_MANIFEST)
        try:
            images = msgspec.json.decode(data, type=list[_Saved])
        except msgspec.MsgspecError as error:
            raise broken(name, "its manifest.json cannot be read") from error
        if self._name:
            images = [one for one in images if self._name in one.names()]
            if not images:
                raise broken(name, f"it has no image {self._name!r}")
        if len(images) != 1:
            known = sorted(tag for one in images for tag in one.names())[:20]
            raise broken(name, f"it has {len(images)} images: add :NAME, one of {', '.join(known) or 'none'}")
        (image,) = images
        config = self._files.read(image.config, MAX_CONFIG)
        stem = os.path.basename(image.config).removesuffix(".json")  # noqa: PTH119
        if len(stem) == 64 and records.digest_of(config) != f"sha256:{stem}":
            raise broken(name, "its configuration has another content than its name says")
        diffs = records.config_of(name, config)[1]
        if len(diffs) != len(image.layers):
            raise broken(name, "its manifest and its configuration do not name the same layers")
        blobs = []
        for path, diff in zip(image.layers, diffs, strict=True):
            span = self._files.span(path)
            if span is None:
                raise broken(name, f"its layer {path[:200]!r} is missing")
            blobs.append(Blob(digest="", size=span.length, diff=diff, span=span))
        return Found(config=config, layers=tuple(blobs), origin=self._origin, names=tuple(image.tags or ()))


class _Saved(msgspec.Struct, rename={"config": "Config", "tags": "RepoTags", "layers": "Layers"}):
    config: str
    layers: list[str]
    tags: list[str] | None = None

    def names(self) -> set[str]:
        tags = set(self.tags or ())
        return tags | {tag.rpartition(":")[2] for tag in tags} | {tag.removesuffix(":latest") for tag in tags}


class SystemSource(Local):
    """One archive of a whole system."""

    def __init__(self, path: str, shown: str) -> None:
        self._path, self._shown = path, shown

    def find(self) -> Found:
        size = os.path.getsize(self._path)  # noqa: PTH202
        blob = Blob(digest="", size=size, span=Span(self._path, 0, size))
        return Found(config=b"", layers=(blob,), origin="file", layered=False)


def unavailable(what: str, why: str) -> SandboxError:
    return SandboxError(f"{what}: {why}", cause="sandbox.image")
