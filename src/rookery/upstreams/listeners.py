"""Bind listening sockets, and detect requests that come from web pages of other sites.

A server that requires no API key serves this machine only. A web page that the user opens runs on this machine
too: it can send requests to a loopback port, and by DNS rebinding, where its host name resolves to 127.0.0.1, it
can read the responses. Such requests have the page's host name in `Host` or `Origin`.
"""

import socket
from ipaddress import ip_address
from urllib.parse import urlsplit

from rookery.core import UsageError


def is_loopback(host: str) -> bool:
    """Return True if a host name or IP address, with or without brackets, always refers to this machine."""
    host = host.strip().removeprefix("[").removesuffix("]").removesuffix(".").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def find_foreign_header(host: str | None, origin: str | None) -> str:
    """Return a message that names the header by which a request may come from a web page of another site.

    Returns an empty string if both headers name this machine or are missing. `host` and `origin` are the values of
    the headers `Host` and `Origin`; None if the request lacks them.
    """
    for name, value, url in (("Host", host, f"//{host}"), ("Origin", origin, origin or "")):
        if value is None:
            continue
        try:
            parts = urlsplit(url)
            found = parts.hostname or ""
            parts.port  # noqa: B018  (raises if it is not a number)
        except ValueError:
            found = ""
        if not is_loopback(found) or parts.username is not None or (name == "Host" and parts.path):
            return f"the header {name} has the value {value[:100]!r}, which is not this machine"
    return ""


def bind_listener(host: str, port: int, *, backlog: int = 1024) -> socket.socket:
    """Return a TCP socket that listens on `host` and `port`. Raises `UsageError` if the address cannot be used."""
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
