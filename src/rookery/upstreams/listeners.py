"""Sockets to serve at, and which requests a server without a key may answer.

A server that asks for no key serves this machine alone. A web page that the user opens runs on this machine too:
it can send requests to a loopback port, and by DNS rebinding, where its own name leads to 127.0.0.1, it can read
the answers. Such requests carry the page's name in `Host` or `Origin`.
"""

import socket
from ipaddress import ip_address
from urllib.parse import urlsplit

from rookery.core import UsageError


def is_loopback(host: str) -> bool:
    """Whether a host name, or an address with or without brackets, always means this machine."""
    host = host.strip().removeprefix("[").removesuffix("]").removesuffix(".").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def find_foreign_header(host: str | None, origin: str | None) -> str:
    """Return why a request may come from a web page of somebody else; empty if it does not.

    `host`, `origin`: the headers of those names; None where the request has none.
    """
    for name, value, url in (("Host", host, f"//{host}"), ("Origin", origin, origin or "")):
        if value is None:
            continue
        try:
            parts = urlsplit(url)
            found = parts.hostname or ""
            parts.port  # noqa: B018  (raises where it is no number)
        except ValueError:
            found = ""
        if not is_loopback(found) or parts.username is not None or (name == "Host" and parts.path):
            return f"the {name} {value[:100]!r} is not this machine"
    return ""


def bind_listener(host: str, port: int, *, backlog: int = 1024) -> socket.socket:
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
