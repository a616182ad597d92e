"""The live Python's end of its line to the monitor. Stand-alone.

Promises:
- a descriptor that is not our own any more is never used: then there is no answer, which is a crash;
- it ends with the line.
"""

from __future__ import annotations

import _socket
import array
import fcntl
import os
import sys

TYPE_CHECKING = False

if TYPE_CHECKING or "rookery.workers" in sys.modules:
    from rookery.workers.inside import frames as f
else:
    import frames as f

HIGH = 200
"""Our descriptors lie from here on, out of the way of those who close what is low."""
CHANNEL_LOST, BROKEN = 91, 92
"""Exit codes."""


def high(fd: int) -> int:
    """The same, out of the way; closes the old one."""
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH)
    finally:
        os.close(fd)


def identity(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


class Wire:
    """Blocks, as it has nothing else to do."""

    def attach(self, line: int) -> None:
        self.line = line
        self.socket = _socket.socket(fileno=line)
        self.socket.setblocking(True)
        self.line_known = identity(line)

    def own(self) -> None:
        """A descriptor that a cell closed may be another file by now."""
        try:
            if identity(self.line) == self.line_known:
                return
        except OSError:
            pass
        os._exit(CHANNEL_LOST)

    def say(self, kind: int, *parts: bytes) -> None:
        self.own()
        data = memoryview(f.HEAD.pack(sum(map(len, parts)), kind) + b"".join(parts))
        while data:
            data = data[os.write(self.line, data) :]

    def exactly(self, size: int) -> bytes:
        parts = []
        while size:
            part = os.read(self.line, min(size, 1 << 20))
            if not part:
                os._exit(0)
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def hear(self) -> tuple[int, bytes, list[int]]:
        self.own()
        data, extra, _, _ = self.socket.recvmsg(f.HEAD.size, _socket.CMSG_SPACE(4), _socket.MSG_CMSG_CLOEXEC)
        if not data:
            os._exit(0)
        fds = array.array("i")
        for _, _, raw in extra:
            fds.frombytes(raw)
        size, kind = f.HEAD.unpack(data + self.exactly(f.HEAD.size - len(data)))
        return kind, self.exactly(size), list(fds)
