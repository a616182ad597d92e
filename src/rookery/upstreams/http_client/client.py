"""HTTP client for one server, with a pool of connections that each carry one request at a time.

Guarantees:
- the most recently used idle connection is used first. Idle connections are closed after `keepalive` seconds; if
  there are more than `idle` of them, the oldest is closed;
- a request is sent once, with one exception: if the server closed a reused connection before it sent a byte, the
  connection was stale, and with `retry_stale` the request is sent once more over a new connection;
- cancelling `send` at any point closes its connection and leaves nothing pending.

No proxy, redirect or cookie is used, and nothing is read from the environment: requests go to this server only.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ssl import SSLContext
from typing import Final

from rookery.core import UsageError
from rookery.core.lifetimes import AsyncClosesOnExit
from rookery.upstreams.http_client.connection import ClientConnection
from rookery.upstreams.http_client.dial import Dialer, default_context
from rookery.upstreams.http_client.errors import ConnectError, ConnectionDropped
from rookery.upstreams.http_client.headers import NO_HEADERS, EncodedHeaders, encode_headers, request_line
from rookery.upstreams.http_client.response import Response

_CLOSE_SECONDS: Final = 5.0
_READ_BYTES: Final = 128 << 10
_BODILESS_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})


class Client(AsyncClosesOnExit):
    """HTTP client for one server, over TCP (`host`, `port`) or a Unix socket (`path`). Belongs to one event loop.

    The number of connections in use is not limited; callers limit their requests. `ssl` is True for TLS with the
    system's certificates. `headers` are sent with every request. `connect` is the timeout in seconds for a new
    connection, `keepalive` how long an idle one is kept, and `idle` the maximum number of idle ones. `buffer` is
    the number of unread bytes of a response above which the socket is not read. With `retry_stale`, a request is
    sent once more if the server had closed its reused connection; callers that count their tries turn it off.
    """

    def __init__(
        self,
        host: str = "",
        port: int = 0,
        *,
        path: str | None = None,
        ssl: bool | SSLContext = False,
        headers: Mapping[str, str] | None = None,
        connect: float = 10.0,
        keepalive: float = 30.0,
        idle: int = 256,
        buffer: int = 256 << 10,
        retry_stale: bool = True,
    ) -> None:
        if not (connect > 0 and keepalive > 0 and idle >= 0 and buffer > 0):
            raise UsageError("connect, keepalive and buffer must be above 0, and idle at least 0")
        context = default_context() if ssl is True else ssl or None
        self._dialer = Dialer(host, port, path=path, context=context, seconds=connect)
        self._common = b"Host: " + self._dialer.authority + b"\r\n" + encode_headers(headers or {})
        self._keepalive = keepalive
        self._max_idle = idle
        self._buffer = buffer
        self._retry_stale = retry_stale
        self._view = memoryview(bytearray(_READ_BYTES))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle: dict[ClientConnection, None] = {}
        """Idle connections, the one that has been idle longest first."""
        self.connections: set[ClientConnection] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._all_closed: asyncio.Event | None = None

    @property
    def idle(self) -> int:
        """The number of idle connections in the pool."""
        return len(self._idle)

    @property
    def live(self) -> int:
        """The number of connections whose socket is open."""
        return len(self.connections)

    async def send(
        self,
        method: str,
        target: str,
        headers: EncodedHeaders = NO_HEADERS,
        body: bytes | Sequence[bytes] = b"",
    ) -> Response:
        """Send a request, and return the response as soon as its status and headers have arrived.

        The caller must read the response to its end or close it. `target` is the path with the query. `headers`,
        from `encode_headers`, are sent in addition to those of the client. There is no timeout apart from that for
        the connection: use `asyncio.timeout`. Raises a subclass of `HttpClientError`.
        """
        parts = [body] if isinstance(body, bytes) else list(body)
        size = sum(map(len, parts))
        framing = b"\r\n" if not size and method in _BODILESS_METHODS else b"Content-Length: %d\r\n\r\n" % size
        head = b"".join((request_line(method, target), self._common, headers, framing))
        no_body = method == "HEAD"
        loop = asyncio.get_running_loop()
        if self._closed:
            raise ConnectError("closed", "the HTTP client was closed before this request")
        if self._loop is not loop:
            if self._loop is not None:
                raise RuntimeError("an HTTP client can only be used from the event loop that used it first")
            self._loop = loop
        connection: ClientConnection | None = None
        while self._idle and connection is None:
            connection, _ = self._idle.popitem()
            transport = connection.transport
            if (
                transport is None
                or transport.is_closing()
                or loop.time() - connection.idle_since >= self._keepalive
            ):
                connection.drop()
                connection = None
        if connection is None:
            connection = await self._connect()
        response = connection.exchange(head, parts, size, no_body=no_body)
        try:
            await response.head()
        except ConnectionDropped as dropped:
            if not self._retry_stale or not dropped.reused or not connection.reset or self._closed:
                raise
            try:
                connection = await self._connect()
            except ConnectError as error:  # it would claim that the request was never sent
                raise dropped from error
            response = connection.exchange(head, parts, size, no_body=no_body)
            await response.head()
        return response

    async def close(self) -> None:
        """Close every connection; responses in flight fail. Returns when the sockets are closed, after 5 s at the
        latest."""
        self._closed = True
        self._dialer.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._all_closed = asyncio.Event()
        for connection in list(self.connections):
            connection.abandon()
        if self.connections:
            # The connections are aborted: a busy event loop closes them later all the same.
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await self._all_closed.wait()

    # ---- called by connections

    def free(self, connection: ClientConnection) -> None:
        loop = connection.loop
        connection.idle_since = loop.time()
        self._idle[connection] = None
        if len(self._idle) > self._max_idle:
            next(iter(self._idle)).drop()
        if self._timer is None and self._idle:
            self._timer = loop.call_later(self._keepalive, self._sweep, loop)

    def ended(self, connection: ClientConnection) -> None:
        self._idle.pop(connection, None)

    def lost(self, connection: ClientConnection) -> None:
        self.connections.discard(connection)
        if self._all_closed is not None and not self.connections:
            self._all_closed.set()

    # ---- internal

    async def _connect(self) -> ClientConnection:
        loop = asyncio.get_running_loop()
        connection = await self._dialer.dial(lambda: ClientConnection(self, loop, self._view, self._buffer))
        if self._closed:
            connection.drop()
            raise ConnectError("closed", "this client was closed")
        if not connection.usable:  # it was closed in the meantime
            raise ConnectError("network", "the connection was closed as soon as it was opened")
        # Not counted earlier: uvloop does not call `connection_lost` if connecting is cancelled.
        self.connections.add(connection)
        return connection

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close connections that have been idle for `keepalive` seconds, and set the timer for the next one."""
        self._timer = None
        now = loop.time()
        while self._idle:
            oldest = next(iter(self._idle))
            left = oldest.idle_since + self._keepalive - now
            if left > 0:
                self._timer = loop.call_later(left, self._sweep, loop)
                return
            oldest.drop()
