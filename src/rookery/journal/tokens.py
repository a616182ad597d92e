"""Read and write token files: append-only files of checksummed frames. A frame holds one turn (one model call).

The process that calls the model (a runner or a gateway shard) writes them. An `Extent` says where a frame is: file
name, offset, length and checksum. Records in the journal contain the extents of their turns.

- `TokenWriter.append` does no I/O. After `flush`, every extent that `append` returned is readable.
- After a failed or partial write, frames written earlier are intact, and the next `flush` writes the pending bytes
  to the same offset again.
- A frame is read exactly as it was written; otherwise `JournalError` names the file and the offset.
- A reader opens only regular files directly in its own directory: no links, no other paths, no devices.
- A scan of a file ends without an error at an incomplete last frame. A complete frame with a wrong checksum is an
  error.
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
from rookery.core.lifetimes import ClosesOnExit
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
    """Encode a turn (one model call) as the payload of a frame, in msgpack."""
    return _encoder.encode(turn)


def decode_turn(payload: bytes) -> Turn:
    """Decode the payload of a frame to a turn; raise `JournalError` if it does not contain one."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, ValueError) as error:
        raise JournalError(f"a token frame does not contain a turn: {error}") from error


class TokenWriter(ClosesOnExit):
    """Write the token files `<writer_id>-<n>.rtk` of one process. Not thread-safe.

    A frame that would make the current file larger than `max_bytes` goes to a new file.
    """

    def __init__(self, folder: Path, writer_id: str, *, max_bytes: int = MAX_BYTES) -> None:
        if not _WRITER.fullmatch(writer_id):
            raise JournalError(
                f"{writer_id!r} is not a valid writer_id of a token writer: use up to 100 letters, digits, "
                "'.', '_' and '-', and begin with a letter, a digit or '_'"
            )
        self.folder = folder
        self.writer_id = writer_id
        self._max = max_bytes
        self._number = self._first_free()
        self._end = len(FILE_HEADER)
        """Offset in the current file at which the next appended frame will be written."""
        self._parts: list[bytes] = []
        self._bytes = 0
        self._full: list[tuple[str, bytes]] = []
        """Unwritten data for earlier files that have reached `max_bytes`: file name and bytes."""
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
        """Name of the current file. The next frame goes to this file, or to a new one if it does not fit."""
        return f"{self.writer_id}-{self._number}.rtk"

    @property
    def pending(self) -> int:
        """Number of appended bytes that `flush` has not yet written."""
        return self._bytes

    def append(self, payload: bytes) -> Extent:
        """Queue a payload as a new frame, without I/O. The returned extent is readable after the next `flush`.

        Raise `JournalError` if the payload or the pending data is too large, if the writer is closed, or if the
        last `flush` failed.
        """
        if self._failed is not None:
            raise JournalError(self._failed)
        if self._closed:
            raise JournalError(f"token writer {self.writer_id!r} is closed")
        size = OVERHEAD + len(payload)
        if len(payload) > MAX_PAYLOAD:
            raise JournalError(
                f"a turn of {len(payload)} bytes is too large to be recorded: the limit is {MAX_PAYLOAD}"
            )
        if self._bytes + size > MAX_PENDING and self._bytes:
            raise JournalError(f"{self._bytes} bytes of tokens are pending: call flush before appending more")
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
        """Write all pending frames.

        If that raises `JournalError`, they are kept and the next `flush` tries again.
        """
        try:
            while self._full:
                self._write(*self._full[0])
                self._bytes -= len(self._full.pop(0)[1])
            if self._parts:
                self._write(self.name, b"".join(self._parts))
                self._parts.clear()
                self._bytes = 0
        except OSError as error:
            self._failed = self._explain_error(error)
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
            # Readers ignore an incomplete frame at the end, but truncating it frees space on a full disk.
            with suppress(OSError):
                os.ftruncate(self._fd, self._at)
            raise
        self._at += len(data)

    def _explain_error(self, error: OSError) -> str:
        where = self.folder / self.name
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            run = self.folder.parent.name
            return f"disk full while writing {where}: free space, then `rookery resume {run}`"
        if error.errno == errno.EEXIST:
            return f"{where} already exists: two writers have the name {self.writer_id!r}"
        if error.errno == errno.ENOENT and not self.folder.exists():
            return str(folder_removed(self.folder.parent))
        return f"cannot write {where}: {error.strerror}"

    def _close_file(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self._file = ""
            os.close(fd)

    def close(self) -> None:
        """Write all pending frames and close the file. The file is closed even if writing raises."""
        try:
            if not self._closed:
                self.flush()
        finally:
            self._closed = True
            self._close_file()


class TokenReader(ClosesOnExit):
    """Read frames from the token files of a run. Not thread-safe.

    `folder` is the directory `tokens` of the run. At most `open_files` files are kept open between calls.
    """

    def __init__(self, folder: Path, *, open_files: int = 16) -> None:
        self.folder = folder
        self._limit = max(1, open_files)
        self._fds: OrderedDict[str, int] = OrderedDict()

    def read(self, extent: Extent) -> bytes:
        """Return the payload of the frame at `extent`; raise `JournalError` if it is missing or damaged."""
        fd = self._open(extent.file)
        size = os.fstat(fd).st_size
        if extent.offset < len(FILE_HEADER) or extent.offset + OVERHEAD + extent.length > size:
            raise self._damaged(extent.file, extent.offset, f"the frame exceeds the file size of {size} bytes")
        data = self._pread(fd, OVERHEAD + extent.length, extent.offset, extent.file)
        if data[:OVERHEAD] != _FRAME.pack(MAGIC, extent.length, extent.crc):
            raise self._damaged(extent.file, extent.offset, "no frame with that length and checksum starts there")
        payload = data[OVERHEAD:]
        if crc32(payload) != extent.crc:
            raise self._damaged(extent.file, extent.offset, "the checksum of the frame does not match")
        return payload

    def exists(self, extent: Extent) -> bool:
        """Return whether the extent's file is large enough to contain its frame. The checksum is not verified."""
        try:
            size = os.fstat(self._open(extent.file)).st_size
        except JournalError:
            return False
        return len(FILE_HEADER) <= extent.offset and extent.offset + OVERHEAD + extent.length <= size

    def scan(self, file: str) -> Iterator[tuple[Extent, bytes]]:
        """Yield extent and payload of every complete frame of a file, in order.

        A damaged frame raises `JournalError`.
        """
        at = len(FILE_HEADER)
        if self._has_no_header(file):
            return
        while True:
            fd = self._open(file)
            size = os.fstat(fd).st_size
            if at + OVERHEAD > size:
                return
            head = self._pread(fd, OVERHEAD, at, file)
            magic, length, crc = _FRAME.unpack(head)
            if magic != MAGIC:
                if not any(head):  # after a power failure the end of a file can consist of zeros
                    return
                raise self._damaged(file, at, "no frame starts there")
            if at + OVERHEAD + length > size:
                return
            payload = self._pread(fd, length, at + OVERHEAD, file)
            if crc32(payload) != crc:
                raise self._damaged(file, at, "the checksum of the frame does not match")
            yield Extent(file, at, length, crc), payload
            at += OVERHEAD + length

    def files(self) -> list[str]:
        """Return the names of all token files (`*.rtk`) of the run, sorted."""
        try:
            return sorted(path.name for path in self.folder.iterdir() if _NAME.fullmatch(path.name))
        except FileNotFoundError:
            return []

    def _has_no_header(self, name: str) -> bool:
        """Return whether the writer was killed during its first write and left an incomplete file header."""
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
            # O_NONBLOCK: opening a FIFO that someone put there must not block. Regular files ignore the flag.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise JournalError(f"cannot read {path}: {error.strerror}") from error
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise JournalError(f"{path} is not a regular file")
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
            raise JournalError(f"{path} was written by a newer Rookery (token format {version}): upgrade")

    def _pread(self, fd: int, length: int, offset: int, file: str) -> bytes:
        data = os.pread(fd, length, offset)
        while len(data) < length:
            more = os.pread(fd, length - len(data), offset + len(data))
            if not more:
                raise self._damaged(file, offset, "the file ends inside the frame")
            data += more
        return data

    def _damaged(self, file: str, offset: int, what: str) -> JournalError:
        return JournalError(f"{self.folder / file} is damaged at byte {offset}: {what}")

    def close(self) -> None:
        """Close all open token files."""
        while self._fds:
            os.close(self._fds.popitem()[1])
