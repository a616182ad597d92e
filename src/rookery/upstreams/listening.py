"""A socket to serve at, or one sentence about why there is none."""

import socket

from rookery.core import UsageError


def bound(host: str, port: int, *, backlog: int = 1024) -> socket.socket:
    """A socket that listens; raises `UsageError` in words where it cannot."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(backlog)
        except BaseException:
            sock.close()
            raise
    except (OSError, UnicodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UsageError(f"cannot serve at {host} port {port}: {why[:1].lower()}{why[1:]}") from error
    return sock
