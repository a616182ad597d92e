"""Open the connections of the HTTP client: resolve the host name, connect the socket, start TLS.

Guarantees:
- opening a connection, including name resolution, takes at most `seconds`. If a host has several addresses, each
  gets a share of the time left, so that one that drops packets leaves time for the next one;
- names are resolved with the system's resolver, in a thread, once for all waiting callers. Results are cached for
  `CACHED_SECONDS`;
- a cancelled call leaves no socket behind; every failure raises `ConnectError` with its reason.
"""

import asyncio
import os
import re
import socket
import ssl
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, TypeAlias, TypeVar

from rookery.core import UsageError
from rookery.upstreams.http_client.errors import ConnectError

CACHED_SECONDS: Final = 10.0
_MAX_PATH_BYTES: Final = 107
_HOST: Final = re.compile(r"[0-9A-Za-z._:%-]*")
_QUEUE_FULL_SECONDS: Final = 0.002

_Address: TypeAlias = tuple[int, int, Any]
"""Address family, protocol number and socket address, as from `socket.getaddrinfo`."""
_P = TypeVar("_P", bound=asyncio.BaseProtocol)


@lru_cache(maxsize=1)
def default_context() -> ssl.SSLContext:
    """Return an SSL context with the system's CA certificates. It is cached, because loading takes tens of
    milliseconds."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


class Dialer:
    """Open connections to one server: over TCP to `host` and `port`, or to the Unix socket `path`.

    `context` is the SSL context; None for a connection without TLS. `seconds` is the timeout for one connection.
    """

    def __init__(
        self, host: str, port: int, *, path: str | None, context: ssl.SSLContext | None, seconds: float
    ) -> None:
        if path is not None:
            if not 0 < len(os.fsencode(path)) <= _MAX_PATH_BYTES or "\0" in path:
                raise UsageError(
                    f"the path of a Unix socket must have 1 to {_MAX_PATH_BYTES} bytes: {path[:120]!r}"
                )
        elif not host or not 0 < port < 65536:
            raise UsageError(f"a server needs a host and a port from 1 to 65535, not {host[:100]!r} and {port}")
        try:
            self._name = host if host.isascii() else host.encode("idna").decode()
        except UnicodeError:
            raise UsageError(f"{host[:100]!r} is not a host name") from None
        if not _HOST.fullmatch(self._name):  # not shown: people paste whole URLs, with a password in them
            raise UsageError(
                "the host of a server contains an invalid character: pass only a host name or an IP address"
            )
        self._port = port
        self._path = path
        self._context = context
        self._seconds = seconds
        self._cached: list[_Address] = []
        self._until = 0.0
        self._lookup: asyncio.Future[list[_Address]] | None = None

    @property
    def authority(self) -> bytes:
        """The value of the Host header."""
        if self._path is not None and not self._name:
            return b"localhost"
        name = self._name.partition("%")[0]  # the scope ID has no meaning for the server
        name = f"[{name}]" if ":" in name else name
        usual = 80 if self._context is None else 443
        return (name if self._port in (0, usual) else f"{name}:{self._port}").encode()

    async def dial(self, protocol_factory: Callable[[], _P]) -> _P:
        """Open a connection, and return its asyncio protocol, which `protocol_factory` creates. Raises
        `ConnectError`."""
        try:
            async with asyncio.timeout(self._seconds):
                if self._path is not None:
                    return await self._connect_to(protocol_factory, (socket.AF_UNIX, 0, self._path))
                return await self._connect_first(protocol_factory, await self._addresses())
        except TimeoutError as error:
            raise ConnectError("timeout", f"no connection within {self._seconds:g} s") from error

    def close(self) -> None:
        if self._lookup is not None:
            self._lookup.cancel()

    async def _connect_first(self, protocol_factory: Callable[[], _P], addresses: list[_Address]) -> _P:
        loop = asyncio.get_running_loop()
        ends = loop.time() + self._seconds
        failure = ConnectError("name", "the host name has no address")
        for tried, address in enumerate(addresses):
            share = (ends - loop.time()) / (len(addresses) - tried)
            try:
                async with asyncio.timeout(share):
                    return await self._connect_to(protocol_factory, address)
            except TimeoutError:
                failure = ConnectError("timeout", f"no connection within {self._seconds:g} s")
            except ConnectError as error:
                failure = error
                if error.reason == "tls":
                    break
        self._until = 0.0  # resolve the name again next time
        raise failure

    async def _connect_to(self, protocol_factory: Callable[[], _P], address: _Address) -> _P:
        family, protocol, sockaddr = address
        loop = asyncio.get_running_loop()
        try:
            sock = socket.socket(family, socket.SOCK_STREAM, protocol)
            try:
                sock.setblocking(False)
                if family == socket.AF_UNIX:
                    await _connect_unix(sock, sockaddr)
                else:
                    _set_options(sock)
                    await loop.sock_connect(sock, sockaddr)
            except BaseException:
                sock.close()
                raise
        except TimeoutError as error:  # from the kernel; our own timeout arrives as a cancellation
            raise ConnectError("timeout", "the connection timed out") from error
        except ConnectionRefusedError as error:
            raise ConnectError("refused", "the connection was refused") from error
        except OSError as error:
            raise ConnectError("network", f"no connection ({_describe(error)})") from error
        name = None if self._context is None else self._name.partition("%")[0] or "localhost"
        create: Any = loop.create_unix_connection if family == socket.AF_UNIX else loop.create_connection
        try:  # the event loop now owns the socket and closes it on every path
            _, connection = await create(protocol_factory, sock=sock, ssl=self._context, server_hostname=name)
        except ssl.SSLError as error:
            raise ConnectError("tls", f"no secure connection ({_describe(error)})") from error
        except OSError as error:
            raise ConnectError("network", f"no connection ({_describe(error)})") from error
        return connection  # type: ignore[no-any-return]

    async def _addresses(self) -> list[_Address]:
        loop = asyncio.get_running_loop()
        if self._cached and loop.time() < self._until:
            return self._cached
        try:
            found = _resolve(self._name, self._port, socket.AI_NUMERICHOST)
        except OSError:  # not a numeric address
            found = await self._look_up(loop)
        self._cached, self._until = found, loop.time() + CACHED_SECONDS
        return found

    async def _look_up(self, loop: asyncio.AbstractEventLoop) -> list[_Address]:
        if self._lookup is None or self._lookup.done():
            self._lookup = loop.run_in_executor(None, _resolve, self._name, self._port, 0)
            self._lookup.add_done_callback(_retrieve_exception)
        try:
            # Shielded, because other callers may wait for the same lookup.
            return await asyncio.shield(self._lookup)
        except OSError as error:
            raise ConnectError("name", f"the host name cannot be resolved ({_describe(error)})") from error
        except UnicodeError as error:
            raise ConnectError("name", "the host name cannot be resolved (it is not a valid name)") from error


def _resolve(host: str, port: int, flags: int) -> list[_Address]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [(int(family), protocol, sockaddr) for family, _, protocol, _, sockaddr in found]


def _retrieve_exception(lookup: asyncio.Future[list[_Address]]) -> None:
    """Retrieve the exception of a lookup, so that asyncio does not log it if all callers were cancelled."""
    if not lookup.cancelled():
        lookup.exception()


def _set_options(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A response may take minutes. Routers drop silent connections, and a host that disappeared is silent too.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def _connect_unix(sock: socket.socket, path: str) -> None:
    """Connect to a Unix socket, with retries while the server's accept queue is full (EAGAIN).

    The event loop's `sock_connect` cannot be used, because it takes EAGAIN for a connection in progress.
    """
    pause = _QUEUE_FULL_SECONDS
    while True:
        try:
            sock.connect(path)
        except BlockingIOError:
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.1)
        else:
            return


def _describe(error: BaseException) -> str:
    text = getattr(error, "verify_message", None) or getattr(error, "reason", None)
    text = text or getattr(error, "strerror", None) or type(error).__name__
    return str(text)[:200]
