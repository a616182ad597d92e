"""Network namespaces of sandboxes, which have a loopback interface only. Runs in the keeper and in pid 1.

Creating a network namespace takes the kernel more than half a millisecond, and removing it as long again. The
namespace of a closed sandbox is therefore given to the next sandbox, under two conditions:

- No packet was sent in it. Packets leave traces, for example a closed connection keeps its port for a minute.
  Every packet passes the loopback interface, which counts them.
- No process outside the sandbox got one of its sockets. All processes of the sandbox itself are dead.
"""

import _socket
import fcntl
import os
import struct

from rookery.sandbox_runtime import syscalls
from rookery.sandbox_runtime.lightweight import suppress

MAX_FREE = 32
_LOOPBACK_UP = struct.pack("16sH22x", b"lo", 1)
_SIOCSIFFLAGS = 0x8914


class NetworkNamespacePool:
    """Creates network namespaces and keeps unused ones for later sandboxes.

    Only a keeper with privileges in the host's network namespace can use it; others could not return to that
    namespace.
    """

    def __init__(self) -> None:
        self.host = _open_current()
        self._free: list[int] = []

    def enter_host(self) -> None:
        """Move this process back into the host's network namespace."""
        syscalls.setns(self.host, syscalls.CLONE_NEWNET)

    def enter_unused(self) -> int:
        """Move this process, and all that it forks from now on, into an unused namespace.

        Return a file descriptor of the namespace.
        """
        while self._free:
            namespace = self._free.pop()
            try:
                syscalls.setns(namespace, syscalls.CLONE_NEWNET)
            except OSError:
                os.close(namespace)
                continue
            return namespace
        syscalls.unshare(syscalls.CLONE_NEWNET)
        bring_up_loopback()
        return _open_current()

    def release(self, namespace: int, *, shared: bool) -> None:
        """Take back the namespace of a closed sandbox: keep it if it is unused, else close it.

        `shared` says that a process outside the sandbox got one of its sockets. This process may be in `namespace`
        afterwards.
        """
        if not shared and len(self._free) < MAX_FREE:
            with suppress(OSError, ValueError, IndexError):
                syscalls.setns(namespace, syscalls.CLONE_NEWNET)
                if _is_unused():
                    self._free.append(namespace)
                    return
        os.close(namespace)


def _open_current() -> int:
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _is_unused() -> bool:
    """Return whether no packet was sent in the network namespace of this process.

    It must have no interface except the loopback, whose counters of packets and bytes must be 0.
    """
    fd = os.open("/proc/self/net/dev", os.O_RDONLY | os.O_CLOEXEC)
    try:
        lines = os.read(fd, 8192).splitlines()[2:]
    finally:
        os.close(fd)
    counters = lines[0].partition(b":")[2].split()
    return len(lines) == 1 and {counters[column] for column in (0, 1, 8, 9)} == {b"0"}


def bring_up_loopback() -> None:
    """Bring up the loopback interface of the current network namespace."""
    sock = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
    try:
        fcntl.ioctl(sock.fileno(), _SIOCSIFFLAGS, _LOOPBACK_UP)
    finally:
        sock.close()
