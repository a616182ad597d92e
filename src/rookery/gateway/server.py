"""HTTP/1.1 server of the gateway, built on the parser of httptools and asyncio protocols. Runs in gateway shards.

`python -m benchmarks libraries` measures it beside aiohttp.web and Starlette with uvicorn: on 2026-11-19 it took
1.8 to 2.1 times less CPU per whole reply, and 1.2 to 1.4 times less per stream.

Guarantees:
- a handler gets only complete requests with a body of limited size; any other request is rejected and its
  connection closed;
- when a client disconnects, the task that handles its request is cancelled at once;
- a handler that writes to a slow client waits until the client has read enough; a client that does not read at all
  is disconnected;
- the number and size of pipelined requests are limited;
- a client that does not complete its request in time, or keeps a connection idle, is disconnected. The head of a
  request has less time than its body;
- connections and bytes of request bodies are limited per session and in total (`quotas`);
- the requests of one connection are handled one after the other;
- an exception in a handler affects only its own request, and its text does not reach the client.
"""

import asyncio
import contextlib
import logging
import socket
from collections import deque
from collections.abc import Callable
from typing import Final, cast

import httptools
import msgspec

from rookery.gateway.http_messages import AdmitRequest, Handler, HttpError, Request, ResponseWriter
from rookery.gateway.quotas import DEFAULT_QUOTA, Quota, QuotaTracker

log = logging.getLogger("rookery.gateway")

MAX_HEAD: Final = 64 << 10
MAX_HEADERS: Final = 200
_LARGE_HEAD: Final = b"the URL and headers of the request are too large"
MAX_PIPELINED: Final = 16
"""Maximum number of requests that a client may send on one connection before an earlier one is answered."""
MAX_PIPELINED_BYTES: Final = 1 << 20
"""Maximum total size of the bodies of the pipelined requests of one connection."""
HEAD_SECONDS: Final = 20.0
"""Time limit for the request line and headers of a request, and for the first byte on a new connection."""
READ_SECONDS: Final = 60.0
"""Time limit for a complete request, from its first byte."""
WRITE_SECONDS: Final = 60.0
"""Time after which a client that does not read its response is disconnected."""
IDLE_SECONDS: Final = 120.0
"""Time after which an idle connection is closed. It is longer than the keep-alive time of usual clients: if the
server closed first, a new request could get lost."""
SWEEP_SECONDS: Final = 5.0
LINGER_SECONDS: Final = 2.0
"""Time that a client whose request was rejected has to receive the error response, before its connection is
closed."""
GRACE_SECONDS: Final = 5.0
"""Time that responses in progress have to end when the server is closed."""


class HttpConnection(asyncio.Protocol):
    """The connection of one client. `session` is the only session that its listening socket serves, or empty."""

    def __init__(self, server: "Server", session: str, *, trusted: bool = False) -> None:
        self.server = server
        self.session = session
        self.owner = session
        """ID of the session against whose quota the connection counts. On a listening socket for all sessions,
        this is the session of the last request."""
        self.trusted = trusted
        """True if the client is another shard. The number of such connections is not limited, and they are not
        closed to make room; bytes of their request bodies count like any other."""
        self.write_blocked: asyncio.Future[None] | None = None
        self.deadline = 0.0
        """Event loop time after which the connection is closed; infinite while a request is handled."""
        self._loop = server.loop
        self.transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._pipelined: deque[tuple[Request, ResponseWriter]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self.stalled = False
        """True if the connection was closed because the client did not read its response."""
        self._reading = False
        """True if a part of a request was received that is not complete yet."""
        self._begun_at = 0.0
        self._handled_bytes = 0
        """Size of the body of the request that is being handled."""
        self._rejection: tuple[HttpError, bool] | None = None
        """The error response to the last request, which is sent after the responses to earlier requests; and
        whether it is sent without a body, because the method is HEAD."""
        self._last_buffered = 0
        """Size of the write buffer when it was last checked."""
        self._reset()

    def _reset(self) -> None:
        self._url = b""
        self._headers: dict[str, str] = {}
        self._head = 0
        self._body: list[bytes] = []
        self._size = 0
        self._limit = 0
        self._request: Request | None = None

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's transport is not a subclass
        if not self.server.add_connection(self):
            self.transport.abort()
            return
        self.deadline = self._loop.time() + HEAD_SECONDS

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        self.server.remove_connection(self)
        self.transport = None
        self._closing = True
        self._drop_pipelined()
        self._drop_unfinished()
        if self._task is not None:
            self._task.cancel()
        if self.write_blocked is not None:
            # Cancelled instead of an exception, which the stream would take for a failure of the upstream.
            self.write_blocked.cancel()

    def data_received(self, data: bytes) -> None:
        if self._closing or self._rejection is not None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            rejection = error.__context__
            if not isinstance(rejection, HttpError):
                log.error("an unexpected error occurred while a request was being received", exc_info=rejection)
                rejection = HttpError(500, self.server.internal_error)
            self.reject(rejection)
        except httptools.HttpParserError as error:
            self.reject(HttpError(400, f"invalid HTTP request: {error}".encode()))

    def pause_writing(self) -> None:
        if self.write_blocked is None:
            self.write_blocked = self._loop.create_future()

    def resume_writing(self) -> None:
        if self.write_blocked is not None:
            if not self.write_blocked.done():
                self.write_blocked.set_result(None)
            self.write_blocked = None

    async def wait_writable(self) -> None:
        """Wait until the client has read enough of the response. Cancelled if the connection ends.

        A client that reads nothing for `WRITE_SECONDS` is disconnected.
        """
        write_blocked = self.write_blocked
        if write_blocked is None:
            return
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                await asyncio.shield(write_blocked)
        except TimeoutError:
            log.info("closing a connection whose client has read nothing for %g seconds", WRITE_SECONDS)
            self.stalled = True
            self.abort()
            await asyncio.shield(write_blocked)

    def write(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.write(data)

    # ---- parser callbacks

    def on_message_begin(self) -> None:
        self._reset()
        self._reading = True
        self._begun_at = self._loop.time()
        if self._task is None:  # otherwise a response is in progress, without a deadline
            self.deadline = self._begun_at + HEAD_SECONDS

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._head += len(url)
        if self._head > MAX_HEAD:
            raise HttpError(431, _LARGE_HEAD)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head += len(name) + len(value)
        if self._head > MAX_HEAD:
            raise HttpError(431, _LARGE_HEAD)
        if self._request is not None:
            return  # a trailer; the request was already admitted by its headers
        if len(self._headers) >= MAX_HEADERS:
            raise HttpError(431, b"the request has too many headers")
        # The parser does not strip a tab at the end of a value.
        self._headers[name.decode("latin-1").lower()] = value.strip(b" \t").decode("latin-1")

    def on_headers_complete(self) -> None:
        parser, headers = self._parser, self._headers
        path, _, query = self._url.decode("latin-1").partition("?")
        if not path.startswith("/"):  # the absolute form, as proxies send it
            _, _, rest = path.partition("://")
            path = "/" + rest.partition("/")[2]
        method = parser.get_method().decode("latin-1")
        request = self._request = Request(method, path, query, headers, b"", self.session)
        if parser.should_upgrade():  # the parser would leave the body unread
            raise HttpError(400, b"protocol upgrades are not supported; use plain HTTP/1.1")
        self._limit = self.server.admit(request)
        self.server.quotas.touch(self, request.owner)
        if self._task is None:
            self.deadline = self._begun_at + READ_SECONDS
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._limit:
            raise HttpError(413, b"the body of the request is too large")
        if headers.get("expect", "").lower() == "100-continue" and not self._pipelined and self._task is None:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        assert self._request is not None
        if self._closing or self._rejection is not None:
            return
        size = self._size + len(body)
        if size > self._limit:
            raise HttpError(413, b"the body of the request is too large")
        if (
            self._task is not None
            and size + sum(len(one.body) for one, _ in self._pipelined) > MAX_PIPELINED_BYTES
        ):
            raise HttpError(400, b"the pipelined requests are too large; wait for the responses")
        self.server.quotas.add_bytes(self, self._request.owner, len(body))
        self._size = size
        self._body.append(body)

    def on_message_complete(self) -> None:
        request = self._request
        assert request is not None
        request.body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        self._reading = False
        response = ResponseWriter(
            self,
            keep=self._parser.should_keep_alive(),
            chunked=self._parser.get_http_version() == "1.1",
            head_only=request.method == "HEAD",
        )
        self.deadline = float("inf")
        if self._task is not None:
            if len(self._pipelined) >= MAX_PIPELINED:
                raise HttpError(400, b"too many pipelined requests; wait for the responses")
            self._pipelined.append((request, response))
            self._size = 0  # counted as part of the request from now on
            return
        self._size = 0
        self._start(request, response)

    # ---- responses

    def _start(self, request: Request, response: ResponseWriter) -> None:
        quotas, owner, size = self.server.quotas, request.owner, len(request.body)
        self._handled_bytes = size
        self._task = self._loop.create_task(self._handle(request, response))
        # Not in the task itself: a task that is cancelled before it starts runs no code.
        self._task.add_done_callback(lambda _: quotas.remove_bytes(owner, size))

    def _drop_pipelined(self) -> None:
        for request, _ in self._pipelined:
            self.server.quotas.remove_bytes(request.owner, len(request.body))
        self._pipelined.clear()

    def _drop_unfinished(self) -> None:
        """Drop the received part of an incomplete request, and stop counting its bytes."""
        if self._request is not None:
            self.server.quotas.remove_bytes(self._request.owner, self._size)
        self._body = []
        self._size = 0

    async def _handle(self, request: Request, response: ResponseWriter) -> None:
        try:
            await self.server.handler(request, response)
        except asyncio.CancelledError:
            if not self._closing:
                response.abort()
            raise
        except HttpError as error:
            if response.begun:
                response.abort()
            else:
                response.send(error.status, error.body, headers=error.headers)
        except Exception:
            log.exception("the handler of %s %s raised an exception", request.method, request.path)
            if response.begun:
                response.abort()
            else:
                response.send(500, self.server.internal_error)
        else:
            if not response.done:
                log.error(
                    "the handler of %s %s returned without ending its response; the connection is closed",
                    request.method,
                    request.path,
                )
                response.abort()
        finally:
            self._task = None
            self._handled_bytes = 0
            if self._pipelined and not self._closing:
                self._start(*self._pipelined.popleft())
            elif self._rejection is not None and not self._closing:
                self._send_rejection(*self._rejection)

    def finish_response(self, *, keep: bool) -> None:
        """Called by `ResponseWriter` at the end of a response. If not `keep`, the connection is closed."""
        now = self._loop.time()
        if not keep:
            self._drop_pipelined()
            self.deadline = now + WRITE_SECONDS
            self.close()
        elif not self._pipelined:
            self.deadline = now + (READ_SECONDS if self._reading else IDLE_SECONDS)

    @property
    def unfinished_bytes(self) -> int:
        """Number of bytes received so far of the body of an incomplete request."""
        return self._size

    @property
    def body_bytes(self) -> int:
        """Bytes of request bodies in memory: of the request being handled and of the one being received."""
        return self._size + self._handled_bytes

    def reject(self, error: HttpError) -> None:
        """Answer the request that is being received with an error, and close the connection.

        Responses to earlier requests are completed first.
        """
        self._drop_unfinished()
        if self._closing or self._rejection is not None:
            return
        head_only = self._request is not None and self._request.method == "HEAD"
        self._rejection = error, head_only
        if self._task is None:
            self._send_rejection(error, head_only)

    def _send_rejection(self, error: HttpError, head_only: bool) -> None:
        body = error.body
        if not body.startswith(b"{"):
            route = self._request.route if self._request is not None else None
            format_error = getattr(route, "format_error", None) or self.server.format_error
            body = format_error(error.status, body.decode("latin-1"))
        # If the socket were closed with unread data, the kernel would reset it and the client lose the response.
        ResponseWriter(self, keep=True, chunked=True, head_only=head_only).send(
            error.status, body, headers=(*error.headers, (b"connection", b"close"))
        )
        self._closing = True
        self.deadline = self._loop.time() + LINGER_SECONDS
        if self.transport is not None and self.transport.can_write_eof():
            self.transport.write_eof()

    def close(self) -> None:
        """Stop receiving, and close the connection once all written data is sent."""
        self._closing = True
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        self._closing = True
        if self.transport is not None:
            self.transport.abort()

    def overdue(self, now: float) -> bool:
        """Return whether the connection's deadline has passed.

        If the client has read data since the last check, the deadline is extended instead.
        """
        if self.deadline >= now:
            return False
        left = self.transport.get_write_buffer_size() if self.transport is not None else 0
        moves = 0 < left != self._last_buffered
        self._last_buffered = left
        if moves:
            self.deadline = now + WRITE_SECONDS
        return not moves

    @property
    def task(self) -> asyncio.Task[None] | None:
        """The task that handles the current request; None if no request is being handled."""
        return self._task

    @property
    def gone(self) -> bool:
        """True if the client has disconnected."""
        return self.transport is None or self.transport.is_closing()


class Server:
    """Accepts connections on any number of listening sockets and passes their requests to one handler."""

    def __init__(
        self,
        handler: Handler,
        admit: AdmitRequest,
        *,
        format_error: Callable[[int, str], bytes],
        internal_error: bytes,
        quota: Quota = DEFAULT_QUOTA,
        max_connections: int | None = None,
    ) -> None:
        """Create a server that does not listen yet.

        `admit` is called before the body of a request is read, and `handler` with the complete request.
        `format_error` formats the body of an error response, and `internal_error` is the body of a response with
        status 500. `max_connections` replaces `quota.connections`.
        """
        self.handler = handler
        self.admit = admit
        self.format_error = format_error
        self.internal_error = internal_error
        self.stopping = False
        self.loop = asyncio.get_running_loop()
        self.connections: set[HttpConnection] = set()
        self.quotas = QuotaTracker(
            quota if max_connections is None else msgspec.structs.replace(quota, connections=max_connections)
        )
        self._servers: list[asyncio.Server] = []
        self._empty = asyncio.Event()
        self._timer = self.loop.call_later(SWEEP_SECONDS, self._sweep)

    async def listen(
        self, sock: socket.socket, *, session: str = "", trusted: bool = False, backlog: int = 4096
    ) -> asyncio.Server:
        """Accept connections on a socket. The server takes ownership of the socket and closes it.

        With `session`, only that session is served on it. With `trusted`, its connections come from
        other shards, and their number is not limited.
        """
        sock.setblocking(False)
        server = await self.loop.create_server(
            lambda: HttpConnection(self, session, trusted=trusted), sock=sock, backlog=backlog
        )
        self._servers.append(server)
        return server

    async def stop_listening(self, server: asyncio.Server, session: str) -> None:
        """Close the listening socket of a session, and abort the connections that it has accepted."""
        server.close()
        with contextlib.suppress(ValueError):
            self._servers.remove(server)
        for connection in [one for one in self.connections if one.session == session]:
            connection.abort()

    def add_connection(self, connection: HttpConnection) -> bool:
        """Add a new connection. Return False if it exceeds a quota and must be closed."""
        if not connection.trusted and not self.quotas.add(connection):
            return False
        self.connections.add(connection)
        self._empty.clear()
        return True

    def remove_connection(self, connection: HttpConnection) -> None:
        self.quotas.remove(connection)
        self.connections.discard(connection)
        if not self.connections:
            self._empty.set()

    def close_overdue(self) -> None:
        """Abort the connections whose deadline has passed."""
        now = self.loop.time()
        for connection in [one for one in self.connections if one.overdue(now)]:
            connection.abort()

    def _sweep(self) -> None:
        self.close_overdue()
        self._timer = self.loop.call_later(SWEEP_SECONDS, self._sweep)

    async def close(self, grace: float = GRACE_SECONDS) -> None:
        """Close all listening sockets and connections. Responses in progress get `grace` seconds to end."""
        self.stopping = True
        self._timer.cancel()
        for server in self._servers:
            server.close()
        self._servers.clear()
        for connection in [one for one in self.connections if one.task is None]:
            connection.close()
        tasks: set[asyncio.Task[None]] = set()
        try:
            if self.connections:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(grace):
                        await self._empty.wait()
        finally:
            tasks.update(task for one in self.connections if (task := one.task) is not None)
            for connection in list(self.connections):
                connection.abort()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=GRACE_SECONDS)
            for task in late:
                log.error("a request handler did not end after it was cancelled: %r", task)
        if self.connections:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_SECONDS):
                    await self._empty.wait()
