"""Bounds the number of netlink sockets in a sandbox. Runs in pid 1 of the sandbox; standard library only.

The kernel charges what waits in the receive queue of a netlink socket to nobody: 2,500 sockets can hold hundreds
of megabytes outside of the sandbox's memory limit. The seccomp filter therefore asks pid 1 about every netlink
socket (`SECCOMP_RET_USER_NOTIF`), and pid 1 lets programs have `MOST` of them at a time. Where the kernel cannot
ask, the filter refuses all of them (`ENOSYS`).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import time

MOST = 32
"""Netlink sockets of one sandbox at a time. Each can hold 2 x `net.core.rmem_max` bytes, 416 KiB by default."""
_CREATED_SECONDS = 0.005
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_NOTIFICATION, _ANSWER = 80, struct.Struct("<QqiI")
_CONTINUE = 1
_libc = ctypes.CDLL(None, use_errno=True)


class NetlinkGate:
    """Answers the kernel's questions about new netlink sockets.

    Answering takes microseconds. It never blocks for longer than `_CREATED_SECONDS`.
    """

    def __init__(self, listener: int) -> None:
        self.listener = listener
        self._others: int | None = None
        """Sockets that were there before the first request: on the host's network they are the host's."""

    def answer(self) -> None:
        """Answer one request, which poll said is there."""
        request = ctypes.create_string_buffer(_NOTIFICATION)
        if _libc.ioctl(self.listener, ctypes.c_ulong(_RECEIVE), request) < 0:
            return  # whoever asked was killed meanwhile
        identity = struct.unpack_from("<Q", request)[0]
        count = _count()
        if self._others is None:
            self._others = count
        if count < 0 or count - self._others >= MOST:
            self._send(_ANSWER.pack(identity, 0, -errno.ENOBUFS, 0))
            return
        self._send(_ANSWER.pack(identity, 0, 0, _CONTINUE))
        # Until the socket exists it is not counted; the next request must not be answered before that.
        end = time.monotonic() + _CREATED_SECONDS
        while _count() <= count and time.monotonic() < end:
            os.sched_yield()

    def _send(self, answer: bytes) -> None:
        _libc.ioctl(self.listener, ctypes.c_ulong(_SEND), answer)


def _count() -> int:
    """Return the number of netlink sockets in this network namespace, bound or not; -1 if it cannot be read."""
    try:
        fd = os.open("/proc/self/net/protocols", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
    try:
        text = b""
        while block := os.read(fd, 1 << 16):
            text += block
    finally:
        os.close(fd)
    for line in text.split(b"\n"):
        words = line.split()
        if words[:1] == [b"NETLINK"]:
            return int(words[2])
    return -1
