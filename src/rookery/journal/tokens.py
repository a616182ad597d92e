"""Token files: append-only frames, written by whoever produced the tokens, read by extent.

Promises:
- `append` touches no disk; `flush` is one write, and after it every extent handed out is readable;
- a failed or partial write leaves earlier frames intact and offsets true: the next `flush` writes the same bytes
  to the same place;
- a frame is read back exactly as written, or a `JournalError` names the file and the offset;
- a reader opens plain files of its own folder only: no links, no paths, no devices;
- a torn tail ends a scan quietly; a whole frame with damaged bytes does not.
"""

import errno
import os
import re
import stat
import struct
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from zlib import crc32

import msgspec

from rookery.core import Extent, JournalError, Turn
from rookery.core.closing import Closing
from rookery.journal.schema import folder_removed

MAGIC = b"RKfr"
VERSION = 1
_HEADER = struct.Struct("<4sI")
_FRAME = struct.Struct("<4sII")
FILE_HEADER = _HEADER.pack(b"RKtk", VERSION)
OVERHEAD = _FRAME.size
MAX_BYTES = 256 << 20
MAX_PENDING = 256 << 20
MAX_PAYLOAD = 0x7FFFFFFF

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}\.rtk")
_WRITER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Turn)


def encode_turn(turn: Turn) -> bytes:
    """A turn as a frame's payload."""
    return _encoder.encode(turn)


def decode_turn(payload: bytes) -> Turn:
    """The turn in a frame's payload."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, ValueError) as error:
        raise JournalError(f"a token frame does not hold a turn: {error}") from error


class TokenWriter(Closing):
    """One process's token files in a run: `<writer>-<n>.rtk`, begun anew above `max_bytes`. For one thread."""

    def __init__(self, folder: Path, writer_id: str, *, max_bytes: int = MAX_BYTES) -> None:
        if not _WRITER.fullmatch(writer_id):
            raise JournalError(f"a token writer cannot be called {writer_id!r}")
        self.folder = folder
        self.writer_id = writer_id
        self._max = max_bytes
        self._number = self._first_free()
        self._end = len(FILE_HEADER)
        """Where the next frame will lie, once everything pending is written."""
        self._parts: list[bytes] = []
        self._bytes = 0
        self._full: list[tuple[str, bytes]] = []
        """What still has to be written to files that were left behind by rotation."""
        self._fd: int | None = None
        self._file = ""
        self._at = 0
        self._failed: str | None = None
        self._closed = False

    def _first_free(self) -> int:
        pattern = re.compile(re.escape(self.writer_id) + r"-([0-9]{1,9})\.rtk")
        try:
            names = [path.name for path in self.folder.iterdir()]
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise JournalError(f"cannot read {self.folder}: {error.strerror}") from error
        return max((int(found[1]) + 1 for name in names if (found := pattern.fullmatch(name))), default=0)

    @property
    def name(self) -> str:
        """The file that the next frame goes to."""
        return f"{self.writer_id}-{self._number}.rtk"

    @property
    def pending(self) -> int:
        """Bytes not yet written."""
        return self._bytes

    def append(self, payload: bytes) -> Extent:
        """Where the payload will lie after the next `flush`."""
        if self._failed is not None:
            raise JournalError(self._failed)
        if self._closed:
            raise JournalError(f"token writer {self.writer_id!r} is closed")
        size = OVERHEAD + len(payload)
        if len(payload) > MAX_PAYLOAD:
            raise JournalError(f"a token frame of {len(payload)} bytes is too large")
        if self._bytes + size > MAX_PENDING and self._bytes:
            raise JournalError(f"{self._bytes} bytes of tokens wait to be written: flush before appending more")
        if self._end + size > self._max and self._end > len(FILE_HEADER):
            self._rotate()
        crc = crc32(payload)
        extent = Extent(self.name, self._end, len(payload), crc)
        self._parts.append(_FRAME.pack(MAGIC, len(payload), crc))
        self._parts.append(payload)
        self._bytes += size
        self._end += size
        return extent

    def _rotate(self) -> None:
        if self._parts:
            self._full.append((self.name, b"".join(self._parts)))
            self._parts.clear()
        self._number += 1
        self._end = len(FILE_HEADER)

    def flush(self) -> None:
        """Write what is pending; when it fails, everything is kept and the next `flush` tries again."""
        try:
            while self._full:
                self._write(*self._full[0])
                self._bytes -= len(self._full.pop(0)[1])
            if self._parts:
                self._write(self.name, b"".join(self._parts))
                self._parts.clear()
                self._bytes = 0
        except OSError as error:
            self._failed = self._in_words(error)
            raise JournalError(self._failed) from error
        self._failed = None

    def _write(self, name: str, data: bytes) -> None:
        if name != self._file:
            self._close_file()
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(self.folder / name, flags, 0o644)
            self._file, self._at = name, 0
        assert self._fd is not None
        if self._at == 0:
            data = FILE_HEADER + data
        try:
            done = os.pwrite(self._fd, data, self._at)
            while done < len(data):
                more = os.pwrite(self._fd, memoryview(data)[done:], self._at + done)
                if not more:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                done += more
        except BaseException:
            # Half a frame at the end is harmless to readers; giving its space back helps a full disk.
            with suppress(OSError):
                os.ftruncate(self._fd, self._at)
            raise
        self._at += len(data)

    def _in_words(self, error: OSError) -> str:
        where = self.folder / self.name
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            run = self.folder.parent.name
            return f"disk full while writing {where}: free space, then `rookery resume {run}`"
        if error.errno == errno.EEXIST:
            return f"{where} is already there: two writers are called {self.writer_id!r}"
        if error.errno == errno.ENOENT and not self.folder.exists():
            return str(folder_removed(self.folder.parent))
        return f"cannot write {where}: {error.strerror}"

    def _close_file(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self._file = ""
            os.close(fd)

    def close(self) -> None:
        """Write what is pending and let go of the file, also when the writing fails."""
        try:
            if not self._closed:
                self.flush()
        finally:
            self._closed = True
            self._close_file()


class TokenReader(Closing):
    """Reads frames of a run's `tokens` folder; keeps a few files open. For one thread at a time."""

    def __init__(self, folder: Path, *, open_files: int = 16) -> None:
        self.folder = folder
        self._limit = max(1, open_files)
        self._fds: OrderedDict[str, int] = OrderedDict()

    def read(self, extent: Extent) -> bytes:
        """The payload, as written."""
        fd = self._open(extent.file)
        size = os.fstat(fd).st_size
        if extent.offset < len(FILE_HEADER) or extent.offset + OVERHEAD + extent.length > size:
            raise self._bad(extent.file, extent.offset, f"the frame ends after the file's {size} bytes")
        data = self._pread(fd, OVERHEAD + extent.length, extent.offset, extent.file)
        if data[:OVERHEAD] != _FRAME.pack(MAGIC, extent.length, extent.crc):
            raise self._bad(extent.file, extent.offset, "no frame of that length and checksum begins there")
        payload = data[OVERHEAD:]
        if crc32(payload) != extent.crc:
            raise self._bad(extent.file, extent.offset, "the frame's checksum does not match its bytes")
        return payload

    def exists(self, extent: Extent) -> bool:
        """Whether the file is long enough to hold the frame: cheap, and says nothing about its bytes."""
        try:
            size = os.fstat(self._open(extent.file)).st_size
        except JournalError:
            return False
        return len(FILE_HEADER) <= extent.offset and extent.offset + OVERHEAD + extent.length <= size

    def scan(self, file: str) -> Iterator[tuple[Extent, bytes]]:
        """Every whole frame of a file, in order."""
        at = len(FILE_HEADER)
        if self._unbegun(file):
            return
        while True:
            fd = self._open(file)
            size = os.fstat(fd).st_size
            if at + OVERHEAD > size:
                return
            head = self._pread(fd, OVERHEAD, at, file)
            magic, length, crc = _FRAME.unpack(head)
            if magic != MAGIC:
                if not any(head):  # a power loss can leave the grown tail of a file as zeros
                    return
                raise self._bad(file, at, "no frame begins there")
            if at + OVERHEAD + length > size:
                return
            payload = self._pread(fd, length, at + OVERHEAD, file)
            if crc32(payload) != crc:
                raise self._bad(file, at, "the frame's checksum does not match its bytes")
            yield Extent(file, at, length, crc), payload
            at += OVERHEAD + length

    def files(self) -> list[str]:
        """Names of the token files."""
        try:
            return sorted(path.name for path in self.folder.iterdir() if _NAME.fullmatch(path.name))
        except FileNotFoundError:
            return []

    def _unbegun(self, name: str) -> bool:
        """A writer killed in its first write leaves an empty file, or less than its header."""
        if not _NAME.fullmatch(name):
            return False
        path = self.folder / name
        try:
            size = path.lstat().st_size
            return size == 0 or (size < len(FILE_HEADER) and FILE_HEADER.startswith(path.read_bytes()))
        except OSError:
            return False

    def _open(self, name: str) -> int:
        fd = self._fds.get(name)
        if fd is not None:
            self._fds.move_to_end(name)
            return fd
        if not _NAME.fullmatch(name):
            raise JournalError(f"{name!r} is not the name of a token file")
        path = self.folder / name
        try:
            # O_NONBLOCK: a pipe put there by someone must not hang us; plain files ignore it.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise JournalError(f"cannot read {path}: {error.strerror}") from error
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise JournalError(f"{path} is not a plain file")
            self._check_header(os.pread(fd, _HEADER.size, 0), path)
        except BaseException:
            os.close(fd)
            raise
        if len(self._fds) >= self._limit:
            os.close(self._fds.popitem(last=False)[1])
        self._fds[name] = fd
        return fd

    @staticmethod
    def _check_header(head: bytes, path: Path) -> None:
        if len(head) < _HEADER.size or head[:4] != FILE_HEADER[:4]:
            raise JournalError(f"{path} is not a token file")
        version = _HEADER.unpack(head)[1]
        if version > VERSION:
            raise JournalError(f"{path} was made by a newer Rookery (token format {version}): upgrade")

    def _pread(self, fd: int, length: int, offset: int, file: str) -> bytes:
        data = os.pread(fd, length, offset)
        while len(data) < length:
            more = os.pread(fd, length - len(data), offset + len(data))
            if not more:
                raise self._bad(file, offset, "the file ends inside the frame")
            data += more
        return data

    def _bad(self, file: str, offset: int, what: str) -> JournalError:
        return JournalError(f"{self.folder / file} is damaged at byte {offset}: {what}")

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])
