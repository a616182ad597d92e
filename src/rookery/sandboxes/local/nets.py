"""Networks of boxes: a loopback each, and nothing else. Stand-alone.

Making one costs the kernel more than half a millisecond, and its end as much again. So one that was never used
goes to the next box: nothing but packets leaves a trace in a network when its processes are gone (a closed
connection keeps its port for a minute), and every packet in it passes the loopback, which counts them.

Promises:
- a box never gets a network in which anything was ever sent;
- a network that somebody outside of its box may still hold a socket of is not used again.
"""

import _socket
import fcntl
import os
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING or "rookery.sandboxes" in sys.modules:
    from rookery.sandboxes.local import kernel as k
    from rookery.sandboxes.small import suppress
else:
    import kernel as k
    from small import suppress

MAX_FREE = 32
_UP = struct.pack("16sH22x", b"lo", 1)
_SIOCSIFFLAGS = 0x8914


class Nets:
    """Only for a keeper with rights in the host's own network: others could not come back to it."""

    def __init__(self) -> None:
        self.host = _own()
        self._free: list[int] = []

    def enter_host(self) -> None:
        k.setns(self.host, k.NEWNET)

    def enter(self) -> int:
        """What is cloned from here on has a network of its own; its descriptor, to be given back."""
        while self._free:
            net = self._free.pop()
            try:
                k.setns(net, k.NEWNET)
            except OSError:
                os.close(net)
                continue
            return net
        k.unshare(k.NEWNET)
        loopback()
        return _own()

    def give_back(self, net: int, *, shared: bool) -> None:
        """The box is gone. `shared`: a socket of its network went to somebody else."""
        if not shared and len(self._free) < MAX_FREE:
            with suppress(OSError, ValueError, IndexError):
                k.setns(net, k.NEWNET)
                if _unused():
                    self._free.append(net)
                    return
        os.close(net)


def _own() -> int:
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _unused() -> bool:
    fd = os.open("/proc/self/net/dev", os.O_RDONLY | os.O_CLOEXEC)
    try:
        lines = os.read(fd, 8192).splitlines()[2:]
    finally:
        os.close(fd)
    numbers = lines[0].partition(b":")[2].split()
    return len(lines) == 1 and {numbers[at] for at in (0, 1, 8, 9)} == {b"0"}


def loopback() -> None:
    """Of the present network, up."""
    sock = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
    try:
        fcntl.ioctl(sock.fileno(), _SIOCSIFFLAGS, _UP)
    finally:
        sock.close()
