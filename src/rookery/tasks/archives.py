"""Unpacking an archive of tasks that somebody else made.

Promises:
- nothing is written outside of the folder: absolute names, `..`, links that lead out and names through links are
  refused;
- devices, FIFOs and entries that come twice are refused, and names that are no UTF-8 or hold a NUL;
- bytes, entries, depth and names are bounded: a bomb ends as an error, whatever it claims to hold;
- each refusal is one sentence that names the archive and the entry;
- owners, times and set-user-id bits are not taken over.
"""

import bz2
import gzip
import lzma
import os
import zlib
from pathlib import Path
from typing import IO, Final, cast

from rookery.core import UsageError
from rookery.sandboxes.images import tars

SUFFIXES: Final = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2", ".tbz2")
MAX_BYTES: Final = 64 << 30
MAX_ENTRIES: Final = 5_000_000
MAX_DEPTH: Final = 100
MAX_PATH: Final = 1_024
CHUNK: Final = 1 << 20
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def is_archive(path: Path) -> bool:
    return path.name.lower().endswith(SUFFIXES)


class RefusedError(Exception):
    """What is wrong with an entry; never leaves the module."""


def unpack(archive: Path, folder: Path, *, most: int = MAX_BYTES, entries: int = MAX_ENTRIES) -> None:
    """All of an archive, into an empty folder of our own. `UsageError` in words; the folder is then half-full."""
    try:
        with archive.open("rb") as raw:
            _Unpacking(folder, most, entries).all(_opened(raw))
    except RefusedError as problem:
        raise UsageError(f"the archive {archive} is refused: {problem}") from None
    except (tars.BadArchiveError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise UsageError(f"{archive} is not a whole archive: {error}") from None
    except FileNotFoundError as error:
        if error.filename == str(archive):
            raise UsageError(f"the archive {archive} does not exist") from None
        raise
    except PermissionError as error:
        raise UsageError(f"the archive {archive} cannot be read: {error.strerror}") from None
    except OSError as error:
        if error.errno is None:  # bz2 says so that data are broken
            raise UsageError(f"{archive} is not a whole archive: {error}") from None
        raise


def _opened(raw: IO[bytes]) -> IO[bytes]:
    head = raw.read(6)
    raw.seek(0)
    if head.startswith(b"\x1f\x8b"):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=raw))
    if head.startswith(b"\xfd7zXZ"):
        return cast("IO[bytes]", lzma.LZMAFile(raw))
    if head.startswith(b"BZh"):
        return cast("IO[bytes]", bz2.BZ2File(raw))
    return raw


class _Unpacking:
    """Nobody else writes to the folder: what we made is what is there."""

    def __init__(self, folder: Path, most: int, entries: int) -> None:
        self.folder = folder
        self.most = most
        self.most_entries = entries
        self.read = 0
        self.entries = 0
        self.folders: set[str] = {""}
        self.files: set[str] = set()
        self.links: dict[str, str] = {}

    def all(self, stream: IO[bytes]) -> None:
        def more() -> bytes:
            data = stream.read(CHUNK)
            self.read += len(data)
            if self.read > self.most + self.most_entries * 2 * tars.BLOCK:
                raise RefusedError(f"it holds more than {self.most:,} bytes")
            return data

        reader = tars.Reader(more)
        written = 0
        for entry in reader.entries():
            self.entries += 1
            if self.entries > self.most_entries:
                raise RefusedError(f"it holds more than {self.most_entries:,} entries")
            path = self._path(entry.name)
            if entry.kind == tars.FOLDER:
                self._folder(path)
                continue
            if not path:
                raise RefusedError("it has an entry without a name")
            if path in self.files or path in self.folders or path in self.links:
                raise RefusedError(f"{_shown(path)} comes twice")
            self._folder(path.rpartition("/")[0])
            if entry.kind == tars.REGULAR:
                written += entry.size
                if written > self.most:
                    raise RefusedError(f"its files are longer than {self.most:,} bytes")
                self._file(path, entry, reader)
            elif entry.kind == tars.SYMLINK:
                self.links[path] = self._text(entry.link, path)
            elif entry.kind == tars.LINK:
                self._second_name(path, self._path(entry.link))
            else:
                raise RefusedError(f"{_shown(path)} is a device, a FIFO or of an unknown kind")
        self._make_links()

    def _text(self, name: bytes, where: str = "") -> str:
        try:
            text = name.decode()
        except UnicodeDecodeError:
            raise RefusedError(f"the name {name[:80]!r} is not UTF-8") from None
        if "\0" in text or not text:
            raise RefusedError(f"a name of {_shown(where)} is empty or holds a NUL")
        return text

    def _path(self, name: bytes) -> str:
        text = self._text(name)
        if text.startswith("/"):
            raise RefusedError(f"the name {_shown(text)} is absolute")
        parts = [part for part in text.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise RefusedError(f"the name {_shown(text)} leads out of it")
        if len(name) > MAX_PATH or len(parts) > MAX_DEPTH or any(len(part.encode()) > 255 for part in parts):
            raise RefusedError(f"the name {_shown(text)} is too long or too deep")
        return "/".join(parts)

    def _folder(self, path: str) -> None:
        if path in self.folders:
            return
        if path in self.files or path in self.links:
            raise RefusedError(f"{_shown(path)} is both a folder and something else")
        self._folder(path.rpartition("/")[0])
        (self.folder / path).mkdir()
        self.folders.add(path)

    def _file(self, path: str, entry: tars.Entry, reader: tars.Reader) -> None:
        if entry.pieces is not None:
            raise RefusedError(f"{_shown(path)} is a sparse file")
        fd = os.open(self.folder / path, _NEW, 0o755 if entry.mode & 0o111 else 0o644)
        with os.fdopen(fd, "wb") as file:
            file.writelines(reader.data(entry.size))
        self.files.add(path)

    def _second_name(self, path: str, first: str) -> None:
        if first not in self.files:
            raise RefusedError(f"{_shown(path)} is a second name of {_shown(first)}, which is no file before it")
        os.link(self.folder / first, self.folder / path, follow_symlinks=False)
        self.files.add(path)

    def _make_links(self) -> None:
        """Last of all: until now there was none that a name could go through."""
        for path, target in self.links.items():
            (self.folder / path).symlink_to(target)
        top = Path(os.path.realpath(self.folder))
        for path, target in self.links.items():
            if target.startswith("/") or not Path(os.path.realpath(self.folder / path)).is_relative_to(top):
                raise RefusedError(f"{_shown(path)} is a link that leads out of it: {_shown(target)}")


def _shown(name: str) -> str:
    return repr(name[:120])
