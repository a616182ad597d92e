"""The interpreter's end of its connection to the monitor. It blocks, since the interpreter has nothing else to do.

A cell may close the connection's file descriptor or put another file in its place. The descriptor is then not used
any more: the process exits, which counts as a crash of the cell. It also exits when the monitor closes the
connection.
"""

from __future__ import annotations

import _socket
import array
import fcntl
import os

from rookery.sandbox_runtime.worker import protocol as p

MIN_FD = 200
"""The interpreter's own file descriptors start at this number, out of the way of programs that close low ones."""
CHANNEL_LOST, BROKEN = 91, 92
"""Exit codes of the interpreter. `CHANNEL_LOST`: a cell closed or replaced one of its file descriptors.
`BROKEN`: its own code failed."""


def move_fd_up(fd: int) -> int:
    """Duplicate a descriptor to a high number and close the old one."""
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, MIN_FD)
    finally:
        os.close(fd)


def identify(fd: int) -> tuple[int, int]:
    """Return device and inode of an open file."""
    info = os.fstat(fd)
    return info.st_dev, info.st_ino


class MonitorConnection:
    """Blocking connection to the monitor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._socket = _socket.socket(fileno=fd)
        self._socket.setblocking(True)
        self._identity = identify(fd)

    def check_own(self) -> None:
        """Exit the process if the connection's file descriptor was closed or refers to another file."""
        try:
            if identify(self.fd) == self._identity:
                return
        except OSError:
            pass
        os._exit(CHANNEL_LOST)

    def send(self, kind: int, *parts: bytes) -> None:
        self.check_own()
        data = memoryview(p.HEAD.pack(sum(map(len, parts)), kind) + b"".join(parts))
        while data:
            data = data[os.write(self.fd, data) :]

    def receive(self) -> tuple[int, bytes, list[int]]:
        """Return the kind, the payload and the file descriptors of the next frame."""
        self.check_own()
        data, ancillary, _, _ = self._socket.recvmsg(p.HEAD.size, _socket.CMSG_SPACE(4), _socket.MSG_CMSG_CLOEXEC)
        if not data:
            os._exit(0)
        fds = array.array("i")
        for _, _, raw in ancillary:
            fds.frombytes(raw)
        size, kind = p.HEAD.unpack(data + self._read_exactly(p.HEAD.size - len(data)))
        return kind, self._read_exactly(size), list(fds)

    def _read_exactly(self, size: int) -> bytes:
        parts = []
        while size:
            part = os.read(self.fd, min(size, 1 << 20))
            if not part:
                os._exit(0)
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        """Close the connection in a process that a cell forked, because it belongs to the interpreter."""
        if self.fd >= 0:
            self.fd = -1
            self._socket.close()

    def abandon(self) -> None:
        """Close this process's copy of the connection, without an effect on the interpreter's copy.

        A savepoint, which is a fork of the interpreter, calls this: it has its own connection to the monitor.
        """
        self._socket.detach()
        os.close(self.fd)
