"""What an image can be called by.

| text | is |
|---|---|
| `python:3.12`, `registry.example/team/app@sha256:…` | a name: of the store, of an engine, of a registry |
| `./rootfs`, `/srv/rootfs.tar.gz` | a folder or an archive that holds a whole system |
| `oci:DIR[:TAG]`, `oci-archive:FILE[:TAG]` | an OCI layout; a folder or archive that is one needs no prefix |
| `docker-archive:FILE[:NAME]` | what `docker save` writes; such an archive needs no prefix either |
| `engine:NAME`, `registry:NAME` | a name, looked up there alone |
| `dockerfile:DIR`, `dockerfile:FILE` | built, where a builder is present |

Promises:
- what exists on this machine under that very text is that, before it is a name;
- a name without a registry, a folder or a tag means what it means to Docker;
- two texts that mean the same have the same key;
- text that can be none of these is refused in one sentence.
"""

import os
import re
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from rookery.core import UsageError
from rookery.sandboxes.images import tars

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
_ARCHIVED = re.compile(
    rb"(?:\./)?(?:blobs(?:/.*)?|[0-9a-f]{64}(?:/.*|\.json)?|oci-layout|index\.json|manifest\.json|repositories)/?"
)
MAX_LOOKED_AT = 10_000
"""Entries of an archive that are looked at for what it is."""


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    kind: Kind
    text: str
    """As it was written."""
    path: str = ""
    registry: str = ""
    repository: str = ""
    tag: str = ""
    digest: str = ""

    @property
    def name(self) -> str:
        """In full; of a file, what it names inside of it."""
        if not self.registry:
            return self.tag
        where = f"{self.registry}/{self.repository}"
        return f"{where}@{self.digest}" if self.digest else f"{where}:{self.tag}"

    @property
    def key(self) -> str:
        """The same for all that mean the same now. A file that was written anew is another one."""
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
        """Whether it is a folder or an archive of a system, which `local` uses as it is."""
        return self.kind in ("folder", "tar")


def parse(text: str) -> Reference:
    """`UsageError` where it can be no image's; a path that is not there is one of those."""
    if not text or len(text) > MAX_TEXT or "\0" in text or text != text.strip():
        raise UsageError(f"{text[:100]!r} cannot be the name of an image")
    for prefix, kind in _PREFIXES.items():
        if text.startswith(prefix) and not Path(text).exists():
            rest = text.removeprefix(prefix)
            if kind in ("engine", "registry"):
                return _name(rest, kind, text)
            return _file(kind, rest, text)
    path = Path(text)
    if path.exists():
        return Reference(kind=what_is(path), text=text, path=str(path.resolve()))
    if text.startswith(("/", "./", "../", "~")) or text in (".", ".."):
        raise UsageError(f"The image {text!r} is no folder and no archive on this machine.")
    return _name(text, "name", text)


def _file(kind: Kind, rest: str, text: str) -> Reference:
    path, tag = rest, ""
    if not Path(path).exists() and ":" in rest:
        # A name has colons of its own: the path is the longest start that exists.
        at = rest.rfind(":")
        while at > 0 and not Path(rest[:at]).exists():
            at = rest.rfind(":", 0, at)
        if at > 0:
            path, tag = rest[:at], rest[at + 1 :]
    found = Path(path)
    if not path or not found.exists():
        raise UsageError(f"The image {text!r} is no folder and no archive on this machine: there is no {path!r}.")
    if kind == "dockerfile":
        wanted = found / "Dockerfile" if found.is_dir() else found
        if not wanted.is_file():
            raise UsageError(f"The image {text!r} cannot be built: there is no file {str(wanted)!r}.")
        # A Dockerfile that is a link stays one: its folder is what it is built from, not that of another file.
        return Reference(kind=kind, text=text, path=str(wanted.parent.resolve() / wanted.name), tag=tag)
    if (kind == "oci") != found.is_dir():
        raise UsageError(f"The image {text!r} is no {'folder' if kind == 'oci' else 'archive'}.")
    return Reference(kind=kind, text=text, path=str(found.resolve()), tag=tag)


def _name(rest: str, kind: Kind, text: str) -> Reference:
    wrong = UsageError(
        f"{text[:200]!r} is no folder and no archive on this machine, and cannot be the name of an image: "
        "names are like python:3.12 or host/team/app@sha256:…"
    )
    body, _, digest = rest.partition("@")
    if digest and not _DIGEST.fullmatch(digest):
        raise wrong
    host, slash, path = body.partition("/")
    if not slash or not ("." in host or ":" in host or host == "localhost"):
        host, path = HUB, body
    path, colon, tag = path.partition(":")
    if not _HOST.fullmatch(host) or (colon and not _TAG.fullmatch(tag)) or len(path) > 255:
        raise wrong
    if host in (HUB, f"index.{HUB}"):
        host = HUB
        path = path if "/" in path else f"{LIBRARY}/{path}"
    if not all(_PART.fullmatch(part) for part in path.split("/")):
        raise wrong
    return Reference(
        kind=kind, text=text, registry=host, repository=path, tag=tag or ("" if digest else LATEST), digest=digest
    )


def settled(text: str) -> str:
    """The same image, whatever folder it is asked for from later on."""
    try:
        found = parse(text)
    except UsageError:
        return text
    if not found.path:
        return text
    if found.plain or not text.startswith(found.kind):
        return found.path
    return f"{found.kind}:{found.path}" + (f":{found.tag}" if found.tag else "")


def is_name(text: str) -> bool:
    """Whether it is one, and nothing else."""
    try:
        return parse(text).kind == "name"
    except UsageError:
        return False


def shown(name: str) -> str:
    """A full name as people write it."""
    short = name.removeprefix(f"{HUB}/")
    return short.removeprefix(f"{LIBRARY}/") if short != name else name


def what_is(path: Path) -> Kind:
    """Of something that exists."""
    if path.is_dir():
        return "oci" if (path / "oci-layout").is_file() and (path / "index.json").is_file() else "folder"
    try:
        return _archive_kind(path)
    except (OSError, tars.BadArchiveError):
        return "tar"


def _archive_kind(path: Path) -> Kind:
    """By its first entries. Those of a system are others, so all but the first are looked at only in doubt."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        at, known = 0, set[bytes]()
        for _ in range(MAX_LOOKED_AT):
            header = os.pread(fd, tars.BLOCK, at)
            if len(header) < tars.BLOCK or header[257:262] != b"ustar":
                break
            name = header[:100].partition(b"\0")[0].removeprefix(b"./").rstrip(b"/")
            kind = header[156:157]
            if kind not in b"xgLK" and name and not _ARCHIVED.fullmatch(name):
                break
            known.add(name)
            size = int(header[124:135].strip(b" \0") or b"0", 8) if not header[124] & 0x80 else 1 << 62
            at += tars.BLOCK + size + -size % tars.BLOCK
    except ValueError:
        return "tar"
    finally:
        os.close(fd)
    if b"manifest.json" in known:
        return "docker-archive"
    return "oci-archive" if {b"oci-layout", b"index.json"} <= known else "tar"
