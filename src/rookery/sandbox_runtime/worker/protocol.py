"""Frames between the host, the monitor and the interpreter of a worker: a length, a kind, and bytes.

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
"""Frames towards the sandbox: the source of a cell, the result of a host function."""
MAX_UNTRUSTED_FRAME = 5 << 20
"""Frames from the untrusted side."""

# host → monitor
SETUP, CELL, RESULT, CANCEL = range(1, 5)
# monitor → host
HELLO, OUTPUT, CALL, DONE, SAVED, DIED = range(11, 17)
# monitor → interpreter (also CELL and RESULT)
SAVE, RESUME = range(21, 23)
# interpreter → monitor (also CALL and DONE)
COPIED, FROZEN, RESUMED = range(31, 34)

SETUP_HEAD = struct.Struct("<QqqII")
"""The worker's tag, memory of each process, memory of the whole sandbox (0: unknown), flags, the last cell."""
CELL_HEAD = struct.Struct("<IddqqIIII")
"""Number, wall seconds, CPU seconds, memory, output, processes, display, calls, flags."""
DONE_HEAD = struct.Struct("<IBBdddqii")
"""Number, outcome, recovery, wall, CPU and call seconds, peak, exit code (or -signal), surviving processes."""
INTERPRETER_CELL_HEAD = struct.Struct("<I8sII")
"""Number, token, display, flags."""
INTERPRETER_DONE_HEAD = struct.Struct("<8sBq")
"""Token, outcome, peak."""
SAVED_HEAD = struct.Struct("<IBd")
"""The last cell, whether a savepoint was taken, seconds."""

KILL_LEFTOVERS, FIGURES, FILES = 1, 2, 4
"""Flags."""
OK, RUNTIME, SYNTAX, CRASH, TIME, MEMORY, OUTPUT_LIMIT, PROCESSES, DISK, CANCELLED = range(10)
"""Outcomes of a cell."""
NOT_NEEDED, RESTORED, RESET = range(3)
"""Recovery: the interpreter continues, its savepoint continues, or an empty one was started."""


class MalformedFrame(Exception):  # noqa: N818  (what the other side did, not an error of ours)
    """The other side sent something that is not a valid frame."""


def pack_texts(texts: Sequence[bytes]) -> bytes:
    return b"".join(part for text in texts for part in (SIZE.pack(len(text)), text))


def unpack_texts(data: bytes, start: int = 0) -> list[bytes]:
    texts = []
    while start < len(data):
        if start + 4 > len(data):
            raise MalformedFrame("a text without a length")
        (size,) = SIZE.unpack_from(data, start)
        start += 4
        if start + size > len(data):
            raise MalformedFrame("a text that is cut off")
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
                raise MalformedFrame(f"a frame of {size} bytes")
            if len(self.buffer) < HEAD.size + size:
                return
            payload = bytes(self.buffer[HEAD.size : HEAD.size + size])
            del self.buffer[: HEAD.size + size]
            yield kind, payload


class FrameConnection(FrameDecoder):
    """Sends and receives frames without blocking; what cannot be sent yet is queued."""

    def __init__(self, read_fd: int, write_fd: int, max_size: int) -> None:
        super().__init__(max_size)
        self.read_fd, self.write_fd = read_fd, write_fd
        self.out = bytearray()
        for fd in {read_fd, write_fd}:
            os.set_blocking(fd, False)

    def receive(self) -> bool:
        """Read what is available. Return False when the other side is gone."""
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
