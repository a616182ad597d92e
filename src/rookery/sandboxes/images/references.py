"""Parse image references such as `python:3.12` or `oci:DIR`. The only I/O is to look at files of this machine.

| reference | meaning |
|---|---|
| `python:3.12`, `registry.example/team/app@sha256:…` | a name: in the store, a container engine or a registry |
| `./rootfs`, `/srv/rootfs.tar.gz` | a directory or an archive of a root file system |
| `oci:DIR[:TAG]`, `oci-archive:FILE[:TAG]` | an OCI layout; the prefix is optional |
| `docker-archive:FILE[:NAME]` | an archive of `docker save`; the prefix is optional |
| `engine:NAME`, `registry:NAME` | a name that is looked up only in the container engine, or only in its registry |
| `dockerfile:DIR`, `dockerfile:FILE` | an image that is built, if a builder is available |

Guarantees:
- a path that exists on this machine takes precedence over a name;
- a name without registry, namespace or tag means what it means to Docker: `docker.io`, `library` and `latest`;
- two references to the same name or the same unchanged file have the same key;
- an invalid reference raises `UsageError` with one sentence.
"""

import os
import re
from itertools import islice
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from rookery.core import UsageError
from rookery.sandboxes.images.unpacker import tar_stream

Kind: TypeAlias = Literal[
    "name", "engine", "registry", "oci", "oci-archive", "docker-archive", "dockerfile", "folder", "tar"
]
HUB, LIBRARY, LATEST = "docker.io", "library", "latest"
MAX_TEXT = 4096
_PREFIXES: dict[str, Kind] = {
    "oci:": "oci",
    "oci-archive:": "oci-archive",
    "docker-archive:": "docker-archive",
    "dockerfile:": "dockerfile",
    "engine:": "engine",
    "docker-daemon:": "engine",
    "registry:": "registry",
    "docker://": "registry",
}
_PART = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")
_HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_IMAGE_ARCHIVE_NAME = re.compile(
    rb"(?:\./)?(?:blobs(?:/.*)?|[0-9a-f]{64}(?:/.*|\.json)?|oci-layout|index\.json|manifest\.json|repositories)/?"
)
MAX_EXAMINED_ENTRIES = 10_000
"""Largest number of entries of an archive that are examined to detect what the archive contains."""


class ImageReference(msgspec.Struct, frozen=True, kw_only=True):
    kind: Kind
    text: str
    """The reference as the user wrote it."""
    path: str = ""
    registry: str = ""
    repository: str = ""
    tag: str = ""
    digest: str = ""

    @property
    def name(self) -> str:
        """The complete name, with registry and tag or digest. For files, the name of the image inside the file."""
        if not self.registry:
            return self.tag
        where = f"{self.registry}/{self.repository}"
        return f"{where}@{self.digest}" if self.digest else f"{where}:{self.tag}"

    @property
    def key(self) -> str:
        """A key by which the store finds the image: its complete name, or for files the path, size and time.

        A file that was rewritten has another key.
        """
        if self.kind in ("name", "engine", "registry"):
            return self.name
        found = Path(self.path)
        if self.kind == "oci" and (found / "index.json").exists():
            found /= "index.json"
        try:
            info = found.stat()
        except OSError:
            return f"{self.kind}:{self.path}:{self.tag}"
        stamp = f"{info.st_dev}:{info.st_ino}:{info.st_size}:{info.st_mtime_ns}"
        return f"{self.kind}:{self.path}:{self.tag}:{stamp}"

    @property
    def plain(self) -> bool:
        """True if the image is a directory or an archive with a root file system.

        The `local` provider uses such an image without the store.
        """
        return self.kind in ("folder", "tar")


def parse_reference(text: str) -> ImageReference:
    """Parse an image reference. Raise `UsageError` if it is invalid or names a path that does not exist."""
    if not text or len(text) > MAX_TEXT or "\0" in text or text != text.strip():
        raise UsageError(
            f"{text[:100]!r} is not a valid image reference: it is empty, too long, padded, or has a NUL byte"
        )
    for prefix, kind in _PREFIXES.items():
        if text.startswith(prefix) and not Path(text).exists():
            rest = text.removeprefix(prefix)
            if kind in ("engine", "registry"):
                return _parse_name(rest, kind, text)
            return _parse_file(kind, rest, text)
    path = Path(text)
    if path.exists():
        return ImageReference(kind=detect_kind(path), text=text, path=str(path.resolve()))
    if text.startswith(("/", "./", "../", "~")) or text in (".", ".."):
        raise UsageError(f"the image {text!r} does not exist on this machine")
    return _parse_name(text, "name", text)


def _parse_file(kind: Kind, rest: str, text: str) -> ImageReference:
    path, tag = rest, ""
    if not Path(path).exists() and ":" in rest:
        # The name can contain colons, so the path is the longest prefix that exists.
        at = rest.rfind(":")
        while at > 0 and not Path(rest[:at]).exists():
            at = rest.rfind(":", 0, at)
        if at > 0:
            path, tag = rest[:at], rest[at + 1 :]
    found = Path(path)
    if not path or not found.exists():
        raise UsageError(f"the image {text!r} does not exist: there is no {path!r} on this machine")
    if kind == "dockerfile":
        wanted = found / "Dockerfile" if found.is_dir() else found
        if not wanted.is_file():
            raise UsageError(f"the image {text!r} cannot be built: there is no file {str(wanted)!r}")
        # A Dockerfile that is a symbolic link is not resolved: the build context is the directory of the link.
        return ImageReference(kind=kind, text=text, path=str(wanted.parent.resolve() / wanted.name), tag=tag)
    if (kind == "oci") != found.is_dir():
        raise UsageError(f"the image {text!r} is not {'a directory' if kind == 'oci' else 'an archive'}")
    return ImageReference(kind=kind, text=text, path=str(found.resolve()), tag=tag)


def _parse_name(rest: str, kind: Kind, text: str) -> ImageReference:
    invalid = UsageError(
        f"{text[:200]!r} does not exist on this machine and is not a valid image name: "
        "names look like python:3.12 or host/team/app@sha256:…"
    )
    body, _, digest = rest.partition("@")
    if digest and not _DIGEST.fullmatch(digest):
        raise invalid
    host, slash, path = body.partition("/")
    if not slash or not ("." in host or ":" in host or host == "localhost"):
        host, path = HUB, body
    path, colon, tag = path.partition(":")
    if not _HOST.fullmatch(host) or (colon and not _TAG.fullmatch(tag)) or len(path) > 255:
        raise invalid
    if host in (HUB, f"index.{HUB}"):
        host = HUB
        path = path if "/" in path else f"{LIBRARY}/{path}"
    if not all(_PART.fullmatch(part) for part in path.split("/")):
        raise invalid
    return ImageReference(
        kind=kind, text=text, registry=host, repository=path, tag=tag or ("" if digest else LATEST), digest=digest
    )


def make_absolute(text: str) -> str:
    """Return a reference to the same image that does not depend on the current directory."""
    try:
        found = parse_reference(text)
    except UsageError:
        return text
    if not found.path:
        return text
    if found.plain or not text.startswith(found.kind):
        return found.path
    return f"{found.kind}:{found.path}" + (f":{found.tag}" if found.tag else "")


def is_image_name(text: str) -> bool:
    """Return whether a text is an image name, and not the path of a file or directory."""
    try:
        return parse_reference(text).kind == "name"
    except UsageError:
        return False


def familiar_name(name: str) -> str:
    """Return a complete image name in the short form that users write, without `docker.io/library/`."""
    short = name.removeprefix(f"{HUB}/")
    return short.removeprefix(f"{LIBRARY}/") if short != name else name


def detect_kind(path: Path) -> Kind:
    """Detect what kind of image a directory or file is: root file system, OCI layout, or `docker save` archive."""
    if path.is_dir():
        return "oci" if (path / "oci-layout").is_file() and (path / "index.json").is_file() else "folder"
    try:
        return _detect_archive_kind(path)
    except (OSError, tar_stream.BadArchiveError):
        return "tar"


def _detect_archive_kind(path: Path) -> Kind:
    """Detect by the names of its first entries whether an archive contains an image or a root file system."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        known = set[bytes]()
        for entry, _ in islice(tar_stream.list_members(fd), MAX_EXAMINED_ENTRIES):
            name = entry.name.removeprefix(b"./").rstrip(b"/")
            if name and not _IMAGE_ARCHIVE_NAME.fullmatch(name):
                break
            known.add(name)
    finally:
        os.close(fd)
    if b"manifest.json" in known:
        return "docker-archive"
    return "oci-archive" if {b"oci-layout", b"index.json"} <= known else "tar"
