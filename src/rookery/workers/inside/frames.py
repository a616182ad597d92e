"""What host, monitor and live Python say to each other: a length, a kind, bytes. Stand-alone.

Promises:
- nothing is unpickled or evaluated: a frame is numbers at fixed places and texts with their lengths;
- a frame that is longer than agreed, or not of its form, is `Garbage`, before memory was given to it;
- a `Line` never blocks: what cannot be written waits, and `waiting` says how much does.
"""

from __future__ import annotations

import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HEAD = struct.Struct("<IB")
SIZE = struct.Struct("<I")
MOST = 32 << 20
"""Of a frame in our own direction: a cell's source, a function's answer."""
MOST_BACK = 5 << 20
"""Of a frame from the untrusted side."""

# host → monitor
SETUP, CELL, ANSWER, CANCEL = range(1, 5)
# monitor → host
HELLO, OUTPUT, CALL, DONE, SAVED, DIED = range(11, 17)
# monitor → live (CELL and ANSWER too)
SAVE, GO = range(21, 23)
# live → monitor (CALL and DONE too)
COPIED, FROZEN, LIVE = range(31, 34)

SETUP_HEAD = struct.Struct("<QqqII")
"""The worker's tag, memory of each process, memory of the whole sandbox (0: not told), flags, the last cell."""
CELL_HEAD = struct.Struct("<IddqqIIII")
"""Number, wall, cpu, memory, output, processes, display, calls, flags."""
DONE_HEAD = struct.Struct("<IBBdddqii")
"""Number, ending, recovery, wall, cpu, seconds of calls, peak, exit code (or -signal), processes that go on."""
LIVE_CELL = struct.Struct("<I8sII")
"""Number, token, display, flags."""
LIVE_DONE = struct.Struct("<8sBq")
"""Token, ending, peak."""
SAVED_HEAD = struct.Struct("<IBd")
"""The last cell, made or not, seconds."""

SWEEP, FIGURES, FILES = 1, 2, 4
OK, RUNTIME, SYNTAX, CRASH, TIME, MEMORY, OUTPUT_FULL, PROCESSES, DISK, CANCELLED = range(10)
NONE, KEPT, RESET = range(3)


class Garbage(Exception):  # noqa: N818  (what it is)
    """Not a frame of ours."""


def packed(texts: Sequence[bytes]) -> bytes:
    return b"".join(part for text in texts for part in (SIZE.pack(len(text)), text))


def unpacked(data: bytes, start: int = 0) -> list[bytes]:
    found = []
    while start < len(data):
        if start + 4 > len(data):
            raise Garbage("a text without a length")
        (size,) = SIZE.unpack_from(data, start)
        start += 4
        if start + size > len(data):
            raise Garbage("a text is cut")
        found.append(data[start : start + size])
        start += size
    return found


class Inlet:
    """Frames out of bytes, as they come."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.into = bytearray()

    def frames(self) -> Iterator[tuple[int, bytes]]:
        while len(self.into) >= HEAD.size:
            size, kind = HEAD.unpack_from(self.into)
            if size > self.most:
                raise Garbage(f"a frame of {size} bytes")
            if len(self.into) < HEAD.size + size:
                return
            payload = bytes(self.into[HEAD.size : HEAD.size + size])
            del self.into[: HEAD.size + size]
            yield kind, payload


class Line(Inlet):
    """Both directions of a pipe or socket, from the side that must not block."""

    def __init__(self, read: int, write: int, most: int) -> None:
        super().__init__(most)
        self.read, self.write = read, write
        self.out = bytearray()
        for fd in {read, write}:
            os.set_blocking(fd, False)

    def feed(self) -> bool:
        """Takes what is there; False when the other side is gone."""
        try:
            data = os.read(self.read, 1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.into += data
        return bool(data)

    def send(self, kind: int, *parts: bytes) -> None:
        self.queue(kind, *parts)
        self.flush()

    def queue(self, kind: int, *parts: bytes) -> None:
        """To be sent with the next that is."""
        self.out += HEAD.pack(sum(map(len, parts)), kind)
        for part in parts:
            self.out += part

    def flush(self) -> None:
        while self.out:
            try:
                del self.out[: os.write(self.write, bytes(self.out[: 1 << 18]))]
            except BlockingIOError:
                return
            except OSError:
                self.out.clear()  # the other side is gone, which is seen by who reads
                return

    @property
    def waiting(self) -> int:
        return len(self.out)

    def close(self) -> None:
        for fd in {self.read, self.write}:
            os.close(fd)
