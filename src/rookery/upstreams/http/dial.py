"""How a connection is made: names, addresses, sockets, TLS.

Promises:
- making a connection is bounded: all of it, resolving included, takes `seconds` at most, and one address that
  swallows packets leaves time for the next;
- names are resolved as every program on the machine does it, off the event loop, once for all who wait;
- who is cancelled leaves no socket behind; whatever fails says why, as `NotConnected`.
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
from rookery.upstreams.http.failures import NotConnected

CACHED_SECONDS: Final = 10.0
_LONGEST_PATH: Final = 107
_HOST: Final = re.compile(r"[0-9A-Za-z._:%-]*")
_FULL_SECONDS: Final = 0.002

_Address: TypeAlias = tuple[int, int, Any]
"""Family, protocol, socket address."""
_P = TypeVar("_P", bound=asyncio.BaseProtocol)


@lru_cache(maxsize=1)
def default_context() -> ssl.SSLContext:
    """The machine's trust, loaded once: that takes tens of milliseconds."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


class Dialer:
    """Makes connections to one server."""

    def __init__(
        self, host: str, port: int, *, path: str | None, context: ssl.SSLContext | None, seconds: float
    ) -> None:
        if path is not None:
            if not 0 < len(os.fsencode(path)) <= _LONGEST_PATH or "\0" in path:
                raise UsageError(f"the path of a Unix socket must have 1 to {_LONGEST_PATH} bytes: {path[:120]!r}")
        elif not host or not 0 < port < 65536:
            raise UsageError(f"a server needs a host and a port from 1 to 65535, not {host[:100]!r} and {port}")
        try:
            self._name = host if host.isascii() else host.encode("idna").decode()
        except UnicodeError:
            raise UsageError(f"{host[:100]!r} is not a host name") from None
        if not _HOST.fullmatch(self._name):  # not shown: people paste whole URLs, with a password in them
            raise UsageError("the host contains an invalid character: pass only a name or an address")
        self._port = port
        self._path = path
        self._context = context
        self._seconds = seconds
        self._cached: list[_Address] = []
        self._until = 0.0
        self._lookup: asyncio.Future[list[_Address]] | None = None

    @property
    def authority(self) -> bytes:
        """What the Host header says."""
        if self._path is not None and not self._name:
            return b"localhost"
        name = self._name.partition("%")[0]  # a scope is for this machine alone
        name = f"[{name}]" if ":" in name else name
        usual = 80 if self._context is None else 443
        return (name if self._port in (0, usual) else f"{name}:{self._port}").encode()

    async def dial(self, made: Callable[[], _P]) -> _P:
        """A connection, whose protocol `made` makes, or `NotConnected`."""
        try:
            async with asyncio.timeout(self._seconds):
                if self._path is not None:
                    return await self._try(made, (socket.AF_UNIX, 0, self._path))
                return await self._first(made, await self._addresses())
        except TimeoutError as error:
            raise NotConnected("timeout", f"no connection within {self._seconds:g} s") from error

    def close(self) -> None:
        if self._lookup is not None:
            self._lookup.cancel()

    async def _first(self, made: Callable[[], _P], addresses: list[_Address]) -> _P:
        loop = asyncio.get_running_loop()
        ends = loop.time() + self._seconds
        failure = NotConnected("name", "the host's name has no address")
        for tried, address in enumerate(addresses):
            share = (ends - loop.time()) / (len(addresses) - tried)
            try:
                async with asyncio.timeout(share):
                    return await self._try(made, address)
            except TimeoutError:
                failure = NotConnected("timeout", f"no connection within {self._seconds:g} s")
            except NotConnected as error:
                failure = error
                if error.why == "tls":
                    break
        self._until = 0.0  # the name may mean other addresses by now
        raise failure

    async def _try(self, made: Callable[[], _P], address: _Address) -> _P:
        family, protocol, where = address
        loop = asyncio.get_running_loop()
        try:
            sock = socket.socket(family, socket.SOCK_STREAM, protocol)
            try:
                sock.setblocking(False)
                if family == socket.AF_UNIX:
                    await _connect_unix(sock, where)
                else:
                    _set_options(sock)
                    await loop.sock_connect(sock, where)
            except BaseException:
                sock.close()
                raise
        except TimeoutError as error:  # the kernel's, ours is a cancellation in here
            raise NotConnected("timeout", "the connection timed out") from error
        except ConnectionRefusedError as error:
            raise NotConnected("refused", "the connection was refused") from error
        except OSError as error:
            raise NotConnected("network", f"no connection ({_words(error)})") from error
        name = None if self._context is None else self._name.partition("%")[0] or "localhost"
        create: Any = loop.create_unix_connection if family == socket.AF_UNIX else loop.create_connection
        try:  # from here on the socket is the loop's, which closes it on every path
            _, connection = await create(made, sock=sock, ssl=self._context, server_hostname=name)
        except ssl.SSLError as error:
            raise NotConnected("tls", f"no secure connection ({_words(error)})") from error
        except OSError as error:
            raise NotConnected("network", f"no connection ({_words(error)})") from error
        return connection  # type: ignore[no-any-return]

    async def _addresses(self) -> list[_Address]:
        loop = asyncio.get_running_loop()
        if self._cached and loop.time() < self._until:
            return self._cached
        try:
            found = _resolve(self._name, self._port, socket.AI_NUMERICHOST)
        except OSError:  # a name, then
            found = await self._looked_up(loop)
        self._cached, self._until = found, loop.time() + CACHED_SECONDS
        return found

    async def _looked_up(self, loop: asyncio.AbstractEventLoop) -> list[_Address]:
        if self._lookup is None or self._lookup.done():
            self._lookup = loop.run_in_executor(None, _resolve, self._name, self._port, 0)
            self._lookup.add_done_callback(_seen)
        try:
            # Shielded: who is cancelled must not take the answer from those who wait with it.
            return await asyncio.shield(self._lookup)
        except OSError as error:
            raise NotConnected("name", f"the host's name cannot be resolved ({_words(error)})") from error
        except UnicodeError as error:
            raise NotConnected("name", "the host's name cannot be resolved (it is no valid name)") from error


def _resolve(host: str, port: int, flags: int) -> list[_Address]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [(int(family), protocol, where) for family, _, protocol, _, where in found]


def _seen(lookup: asyncio.Future[list[_Address]]) -> None:
    """Everyone who waited may be gone: a failure that nobody fetches must not be logged as forgotten."""
    if not lookup.cancelled():
        lookup.exception()


def _set_options(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # An answer may be minutes of silence: routers forget such connections, and hosts that vanished look like it.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def _connect_unix(sock: socket.socket, path: str) -> None:
    """A full queue answers EAGAIN, which event loops take for a connection under way; it is not."""
    pause = _FULL_SECONDS
    while True:
        try:
            sock.connect(path)
        except BlockingIOError:
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.1)
        else:
            return


def _words(error: BaseException) -> str:
    text = getattr(error, "verify_message", None) or getattr(error, "reason", None)
    text = text or getattr(error, "strerror", None) or type(error).__name__
    return str(text)[:200]
