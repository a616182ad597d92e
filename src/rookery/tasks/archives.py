"""Unpack archives of tasks that come from untrusted sources.

Guarantees:
- Nothing is written outside the target directory: absolute names, `..`, symbolic links that lead outside, and
  names that pass through links are refused.
- Devices, FIFOs, duplicate entries, and names that are not UTF-8 or contain NUL are refused.
- The number of bytes and entries, the depth and the length of names are limited, whatever sizes the archive
  declares.
- An error names the archive and, if one entry is the reason, that entry.
- Owners, times and set-user-ID bits are not restored.
"""

import bz2
import gzip
import lzma
import os
import zlib
from pathlib import Path
from typing import IO, Final, cast

from rookery.core import UsageError
from rookery.sandboxes.images.unpacker import tar_stream

SUFFIXES: Final = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2", ".tbz2")
MAX_BYTES: Final = 64 << 30
MAX_ENTRIES: Final = 5_000_000
MAX_DEPTH: Final = 100
MAX_PATH: Final = 1_024
CHUNK: Final = 1 << 20
_CREATE_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def is_archive(path: Path) -> bool:
    """Return whether a path has the suffix of a supported archive, such as `.tar.gz`."""
    return path.name.lower().endswith(SUFFIXES)


class ArchiveRefusedError(Exception):
    """An archive or one of its entries is refused. `unpack` converts this exception to `UsageError`."""


def unpack(archive: Path, folder: Path, *, most: int = MAX_BYTES, entries: int = MAX_ENTRIES) -> None:
    """Unpack a tar archive into the empty directory `folder`.

    `most` and `entries` are the maximum numbers of bytes and entries. Raise `UsageError` if the archive is damaged
    or is refused; the directory is then incomplete.
    """
    try:
        with archive.open("rb") as raw:
            _Unpacker(folder, most, entries).all(_decompress(raw))
    except ArchiveRefusedError as problem:
        raise UsageError(f"refused to unpack {archive}: {problem}") from None
    except (tar_stream.BadArchiveError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise UsageError(f"{archive} is damaged or not an archive: {error}") from None
    except FileNotFoundError as error:
        if error.filename == str(archive):
            raise UsageError(f"the archive {archive} does not exist") from None
        raise
    except PermissionError as error:
        raise UsageError(f"cannot read the archive {archive}: {error.strerror}") from None
    except OSError as error:
        if error.errno is None:  # bz2 reports corrupt data like this
            raise UsageError(f"{archive} is damaged or not an archive: {error}") from None
        raise


def _decompress(raw: IO[bytes]) -> IO[bytes]:
    head = raw.read(6)
    raw.seek(0)
    if head.startswith(b"\x1f\x8b"):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=raw))
    if head.startswith(b"\xfd7zXZ"):
        return cast("IO[bytes]", lzma.LZMAFile(raw))
    if head.startswith(b"BZh"):
        return cast("IO[bytes]", bz2.BZ2File(raw))
    return raw


class _Unpacker:
    """Unpacks one archive into a directory that no other process writes to."""

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
            if self.read > self.most + self.most_entries * 2 * tar_stream.BLOCK:
                raise ArchiveRefusedError(f"the archive contains more than {self.most:,} bytes")
            return data

        reader = tar_stream.TarReader(more)
        written = 0
        for entry in reader.entries():
            self.entries += 1
            if self.entries > self.most_entries:
                raise ArchiveRefusedError(f"the archive contains more than {self.most_entries:,} entries")
            path = self._path(entry.name)
            if entry.kind == tar_stream.DIRECTORY:
                self._folder(path)
                continue
            if not path:
                raise ArchiveRefusedError("the archive has an entry without a name")
            if path in self.files or path in self.folders or path in self.links:
                raise ArchiveRefusedError(f"{_quote(path)} occurs twice")
            self._folder(path.rpartition("/")[0])
            if entry.kind == tar_stream.REGULAR:
                written += entry.size
                if written > self.most:
                    raise ArchiveRefusedError(
                        f"the files in the archive are larger than {self.most:,} bytes in total"
                    )
                self._file(path, entry, reader)
            elif entry.kind == tar_stream.SYMLINK:
                self.links[path] = self._text(entry.link, path)
            elif entry.kind == tar_stream.HARD_LINK:
                self._second_name(path, self._path(entry.link))
            else:
                raise ArchiveRefusedError(f"{_quote(path)} is a device, a FIFO or of an unknown type")
        self._make_links()

    def _text(self, name: bytes, where: str = "") -> str:
        try:
            text = name.decode()
        except UnicodeDecodeError:
            raise ArchiveRefusedError(f"the name {name[:80]!r} is not UTF-8") from None
        if "\0" in text or not text:
            raise ArchiveRefusedError(f"a name of {_quote(where)} is empty or contains NUL")
        return text

    def _path(self, name: bytes) -> str:
        text = self._text(name)
        if text.startswith("/"):
            raise ArchiveRefusedError(f"the name {_quote(text)} is absolute")
        parts = [part for part in text.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise ArchiveRefusedError(f"the name {_quote(text)} leads outside the archive")
        if len(name) > MAX_PATH or len(parts) > MAX_DEPTH or any(len(part.encode()) > 255 for part in parts):
            raise ArchiveRefusedError(f"the name {_quote(text)} is too long or too deep")
        return "/".join(parts)

    def _folder(self, path: str) -> None:
        if path in self.folders:
            return
        if path in self.files or path in self.links:
            raise ArchiveRefusedError(f"{_quote(path)} is both a directory and something else")
        self._folder(path.rpartition("/")[0])
        (self.folder / path).mkdir()
        self.folders.add(path)

    def _file(self, path: str, entry: tar_stream.TarEntry, reader: tar_stream.TarReader) -> None:
        if entry.pieces is not None:
            raise ArchiveRefusedError(f"{_quote(path)} is a sparse file")
        fd = os.open(self.folder / path, _CREATE_FLAGS, 0o755 if entry.mode & 0o111 else 0o644)
        with os.fdopen(fd, "wb") as file:
            file.writelines(reader.data(entry.size))
        self.files.add(path)

    def _second_name(self, path: str, first: str) -> None:
        if first not in self.files:
            raise ArchiveRefusedError(
                f"{_quote(path)} is a hard link to {_quote(first)}, which is not a file before it"
            )
        os.link(self.folder / first, self.folder / path, follow_symlinks=False)
        self.files.add(path)

    def _make_links(self) -> None:
        """Create all symbolic links after all files, so that no file is written through a link.

        Raise `ArchiveRefusedError` if a link is absolute or leads outside the directory.
        """
        for path, target in self.links.items():
            (self.folder / path).symlink_to(target)
        top = Path(os.path.realpath(self.folder))
        for path, target in self.links.items():
            if target.startswith("/") or not Path(os.path.realpath(self.folder / path)).is_relative_to(top):
                raise ArchiveRefusedError(
                    f"{_quote(path)} is a symbolic link that leads outside the archive: {_quote(target)}"
                )


def _quote(name: str) -> str:
    return repr(name[:120])
