"""The client of one server: its connections, and one request after another over them.

Promises:
- the most recently used idle connection is taken first; idle ones end after `keepalive` seconds, beyond `idle` of
  them, and as soon as the server ends them;
- a request is sent once. The one exception: a connection that had served before, on which not one byte came back
  before the server ended it, had ended before it was used. Then it is sent once more, over a fresh connection;
- cancelling `send` at any point drops its connection and leaves nothing pending;
- no proxy, no redirect, no cookie, nothing from the environment: a request goes to this server alone.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ssl import SSLContext
from typing import Final

from rookery.core import UsageError
from rookery.core.lifetimes import AsyncClosesOnExit
from rookery.upstreams.http.connection import Connection
from rookery.upstreams.http.dial import Dialer, default_context
from rookery.upstreams.http.failures import Dropped, NotConnected
from rookery.upstreams.http.headers import NO_LINES, HeaderLines, header_lines, request_line
from rookery.upstreams.http.response import Response

_CLOSE_SECONDS: Final = 5.0
_READ: Final = 128 << 10
_WITHOUT_BODY: Final = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})


class Client(AsyncClosesOnExit):
    """Talks to one server, over TCP (`host`, `port`) or a Unix socket (`path`). Belongs to one event loop.

    There is no limit on connections in use: who calls has places. `buffer` bounds what is read of an answer ahead
    of its caller. `again`: whether a request is sent once more where its connection had ended before it was used;
    for callers who count their tries, it is not.
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
        again: bool = True,
    ) -> None:
        if not (connect > 0 and keepalive > 0 and idle >= 0 and buffer > 0):
            raise UsageError("connect, keepalive and buffer must be above 0, and idle at least 0")
        context = default_context() if ssl is True else ssl or None
        self._dialer = Dialer(host, port, path=path, context=context, seconds=connect)
        self._common = b"Host: " + self._dialer.authority + b"\r\n" + header_lines(headers or {})
        self._keepalive = keepalive
        self._most = idle
        self._buffer = buffer
        self._again = again
        self._view = memoryview(bytearray(_READ))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle: dict[Connection, None] = {}
        """Oldest first."""
        self._live: set[Connection] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._gone: asyncio.Event | None = None

    @property
    def idle(self) -> int:
        """Connections that wait for a request."""
        return len(self._idle)

    @property
    def live(self) -> int:
        """Connections whose socket is open."""
        return len(self._live)

    async def send(
        self,
        method: str,
        target: str,
        headers: HeaderLines = NO_LINES,
        body: bytes | Sequence[bytes] = b"",
    ) -> Response:
        """Sends a request and returns its answer when the head has come. Read it to its end or close it.

        Headers of every request belong to the client; `headers` are more of them, made by `header_lines`."""
        parts = [body] if isinstance(body, bytes) else list(body)
        size = sum(map(len, parts))
        framing = b"\r\n" if not size and method in _WITHOUT_BODY else b"Content-Length: %d\r\n\r\n" % size
        head = b"".join((request_line(method, target), self._common, headers, framing))
        bodiless = method == "HEAD"
        connection = self._take()
        if connection is None:
            connection = await self._fresh()
        response = connection.exchange(head, parts, size, bodiless=bodiless)
        try:
            await response.head()
        except Dropped as dropped:
            if not self._again or not dropped.reused or not connection.reset or self._closed:
                raise
            try:
                connection = await self._fresh()
            except NotConnected as error:  # the request was sent, so this must not say that it never was
                raise dropped from error
            response = connection.exchange(head, parts, size, bodiless=bodiless)
            await response.head()
        return response

    async def close(self) -> None:
        """Ends every connection; answers under way fail. Returns when the sockets are closed."""
        self._closed = True
        self._dialer.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._gone = asyncio.Event()
        for connection in list(self._live):
            connection.abandon()
        if self._live:
            # They are aborted: a loop that is too busy to say so in time closes them all the same.
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await self._gone.wait()

    # ---- for its connections

    def free(self, connection: Connection) -> None:
        loop = connection.loop
        connection.since = loop.time()
        self._idle[connection] = None
        if len(self._idle) > self._most:
            next(iter(self._idle)).drop()
        if self._timer is None and self._idle:
            self._timer = loop.call_later(self._keepalive, self._sweep, loop)

    def ended(self, connection: Connection) -> None:
        self._idle.pop(connection, None)

    def lost(self, connection: Connection) -> None:
        self._live.discard(connection)
        if self._gone is not None and not self._live:
            self._gone.set()

    # ---- inside

    def _take(self) -> Connection | None:
        loop = asyncio.get_running_loop()
        if self._closed:
            raise NotConnected("closed", "this client is closed")
        if self._loop is not loop:
            if self._loop is not None:
                raise RuntimeError("a client belongs to the event loop that used it first")
            self._loop = loop
        while self._idle:
            connection, _ = self._idle.popitem()
            if connection.usable and loop.time() - connection.since < self._keepalive:
                return connection
            connection.drop()
        return None

    async def _fresh(self) -> Connection:
        loop = asyncio.get_running_loop()
        connection = await self._dialer.dial(lambda: Connection(self, loop, self._view, self._buffer))
        if self._closed:
            connection.drop()
            raise NotConnected("closed", "this client was closed")
        if not connection.usable:  # it ended between its making and now
            raise NotConnected("network", "the connection ended as soon as it was made")
        # Not counted before: uvloop never tells of the end of one whose making was cancelled.
        self._live.add(connection)
        return connection

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Ends what has been idle for too long. One timer serves all."""
        self._timer = None
        now = loop.time()
        while self._idle:
            oldest = next(iter(self._idle))
            left = oldest.since + self._keepalive - now
            if left > 0:
                self._timer = loop.call_later(left, self._sweep, loop)
                return
            oldest.drop()
