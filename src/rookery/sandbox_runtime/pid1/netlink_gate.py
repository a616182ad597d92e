"""Limit the number of netlink sockets in a sandbox. Runs in pid 1 of the sandbox.

The kernel charges the receive queues of netlink sockets to no cgroup: 2,500 sockets can hold hundreds of
megabytes outside of the sandbox's memory limit. The seccomp filter therefore asks pid 1 about every new netlink
socket (`SECCOMP_RET_USER_NOTIF`), and pid 1 allows at most `MAX_SOCKETS` at a time. If the kernel does not support
such questions, the filter refuses all netlink sockets with `ENOSYS`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import time

MAX_SOCKETS = 32
"""Maximum number of netlink sockets of one sandbox at a time. Each can hold 2 x `net.core.rmem_max` bytes, 416
KiB by default."""
_CREATION_SECONDS = 0.005
_NOTIF_RECV, _NOTIF_SEND = 0xC0502100, 0xC0182101
_NOTIFICATION_SIZE, _RESPONSE = 80, struct.Struct("<QqiI")
_CONTINUE = 1
_libc = ctypes.CDLL(None, use_errno=True)


class NetlinkGate:
    """Responds to the kernel's notifications about new netlink sockets.

    A response takes microseconds and never blocks for longer than `_CREATION_SECONDS`.
    """

    def __init__(self, listener: int) -> None:
        self.listener = listener
        self._existing: int | None = None
        """Number of netlink sockets before the first notification. They can belong to the host if the sandbox
        uses its network."""

    def respond(self) -> None:
        """Respond to one notification, after poll has reported it."""
        notification = ctypes.create_string_buffer(_NOTIFICATION_SIZE)
        if _libc.ioctl(self.listener, ctypes.c_ulong(_NOTIF_RECV), notification) < 0:
            return  # the calling process was killed meanwhile
        identity = struct.unpack_from("<Q", notification)[0]
        count = _count_sockets()
        if self._existing is None:
            self._existing = count
        if count < 0 or count - self._existing >= MAX_SOCKETS:
            self._send(_RESPONSE.pack(identity, 0, -errno.ENOBUFS, 0))
            return
        self._send(_RESPONSE.pack(identity, 0, 0, _CONTINUE))
        # The socket is counted only once it exists, so wait for it before the next notification is handled.
        end = time.monotonic() + _CREATION_SECONDS
        while _count_sockets() <= count and time.monotonic() < end:
            os.sched_yield()

    def _send(self, response: bytes) -> None:
        _libc.ioctl(self.listener, ctypes.c_ulong(_NOTIF_SEND), response)


def _count_sockets() -> int:
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
        fields = line.split()
        if fields[:1] == [b"NETLINK"]:
            return int(fields[2])
    return -1
