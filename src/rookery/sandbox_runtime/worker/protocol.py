"""Messages (frames) between the host, the monitor and the interpreter of a worker: a length, a kind, and bytes.

All three processes use this module. Nothing is unpickled or evaluated: a frame has numbers at fixed offsets and
texts with their lengths. A frame that is too long or malformed is rejected before memory is allocated for it.
"""

from __future__ import annotations

import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HEAD = struct.Struct("<IB")
SIZE = struct.Struct("<I")
MAX_FRAME = 32 << 20
"""Maximum size of a frame from the host, such as the source of a cell or the result of a host function."""
MAX_UNTRUSTED_FRAME = 5 << 20
"""Maximum size of a frame from the sandbox, which is not trusted."""

# host → monitor
SETUP, CELL, RESULT, CANCEL = range(1, 5)
# monitor → host
HELLO, OUTPUT, CALL, DONE, SAVED, DIED = range(11, 17)
# monitor → interpreter (also CELL and RESULT)
SAVE, RESUME = range(21, 23)
# interpreter → monitor (also CALL and DONE)
COPIED, FROZEN, RESUMED = range(31, 34)

SETUP_HEAD = struct.Struct("<QqqII")
"""The worker's tag, memory limit of each process, memory of the whole sandbox (0: unknown), flags, number of the
last cell."""
CELL_HEAD = struct.Struct("<IddqqIIII")
"""Number of the cell; limits of wall seconds, CPU seconds, memory, output and processes; maximum length of the
displayed value; maximum number of calls of host functions; flags."""
DONE_HEAD = struct.Struct("<IBBdddqii")
"""Number of the cell, outcome, recovery, wall seconds, CPU seconds, seconds in host functions, peak memory, exit
code (or -signal), number of surviving processes."""
INTERPRETER_CELL_HEAD = struct.Struct("<I8sII")
"""Number of the cell, token that its messages must repeat, maximum length of the displayed value, flags."""
INTERPRETER_DONE_HEAD = struct.Struct("<8sBq")
"""Token of the cell, outcome, peak memory in bytes."""
SAVED_HEAD = struct.Struct("<IBd")
"""Number of the last cell, whether a savepoint (a fork to which the worker can return) was taken, seconds that it
took."""

KILL_LEFTOVERS, FIGURES, FILES = 1, 2, 4
"""Flags. `KILL_LEFTOVERS`: kill processes of an earlier monitor. `FIGURES`: save matplotlib figures. `FILES`:
report changed files."""
OK, RUNTIME, SYNTAX, CRASH, TIME, MEMORY, OUTPUT_LIMIT, PROCESSES, DISK, CANCELLED = range(10)
"""Outcomes of a cell."""
NOT_NEEDED, RESTORED, RESET = range(3)
"""The recovery after a cell: the interpreter continues (`NOT_NEEDED`), its savepoint continues (`RESTORED`), or
an interpreter with an empty state was started (`RESET`)."""


class MalformedFrame(Exception):  # noqa: N818  (what the other side did, not an error of ours)
    """The other side sent something that is not a valid frame."""


def pack_texts(texts: Sequence[bytes]) -> bytes:
    return b"".join(part for text in texts for part in (SIZE.pack(len(text)), text))


def unpack_texts(data: bytes, start: int = 0) -> list[bytes]:
    texts = []
    while start < len(data):
        if start + 4 > len(data):
            raise MalformedFrame("the frame ends inside the length of a text")
        (size,) = SIZE.unpack_from(data, start)
        start += 4
        if start + size > len(data):
            raise MalformedFrame("the frame ends inside a text")
        texts.append(data[start : start + size])
        start += size
    return texts


class FrameDecoder:
    """Splits a stream of bytes into frames."""

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self.buffer = bytearray()

    def frames(self) -> Iterator[tuple[int, bytes]]:
        """Yield the kind and payload of every complete frame in the buffer."""
        while len(self.buffer) >= HEAD.size:
            size, kind = HEAD.unpack_from(self.buffer)
            if size > self.max_size:
                raise MalformedFrame(f"the frame has {size} bytes; the maximum is {self.max_size}")
            if len(self.buffer) < HEAD.size + size:
                return
            payload = bytes(self.buffer[HEAD.size : HEAD.size + size])
            del self.buffer[: HEAD.size + size]
            yield kind, payload


class FrameConnection(FrameDecoder):
    """Sends and receives frames without blocking. Data that cannot be sent yet is queued."""

    def __init__(self, read_fd: int, write_fd: int, max_size: int) -> None:
        super().__init__(max_size)
        self.read_fd, self.write_fd = read_fd, write_fd
        self.out = bytearray()
        for fd in {read_fd, write_fd}:
            os.set_blocking(fd, False)

    def receive(self) -> bool:
        """Read the available data into the buffer. Return False if the other side has closed the connection."""
        try:
            data = os.read(self.read_fd, 1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.buffer += data
        return bool(data)

    def send(self, kind: int, *parts: bytes) -> None:
        self.queue(kind, *parts)
        self.flush()

    def queue(self, kind: int, *parts: bytes) -> None:
        """Queue a frame, to be sent with the next flush."""
        self.out += HEAD.pack(sum(map(len, parts)), kind)
        for part in parts:
            self.out += part

    def flush(self) -> None:
        while self.out:
            try:
                del self.out[: os.write(self.write_fd, bytes(self.out[: 1 << 18]))]
            except BlockingIOError:
                return
            except OSError:
                self.out.clear()  # the other side is gone, which the reader notices
                return

    @property
    def unsent(self) -> int:
        return len(self.out)

    def close(self) -> None:
        for fd in {self.read_fd, self.write_fd}:
            os.close(fd)
