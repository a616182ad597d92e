"""HTTP/1.1 for the gateway's doors: a parser in C, one small protocol on top of it.

`python -m benchmarks libraries` measures it beside aiohttp.web and Starlette with uvicorn: on 2026-11-17 it took
1.6 to 1.9 times less CPU per whole reply, and 1.3 to 1.5 times less per stream.

Promises:
- a request is handed over whole, its body bounded, or it is answered here and its connection closed;
- a client that goes away cancels what works for it, at once;
- a slow reader costs no more than one piece in memory, and one that does not read at all is left behind;
- what a client sends ahead of its answers is bounded;
- a client that does not finish its request, or keeps an idle connection, is left behind after a while; the head
  of a request has less time than its body;
- connections and bytes of bodies are bounded for each owner and for the server (`quotas`);
- requests of one connection are answered one after the other, in their order;
- no exception of a handler ends anything but its own request, and its text does not reach the client.
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

from rookery.gateway.http import AdmitRequest, Handler, HttpError, Request, ResponseWriter
from rookery.gateway.quotas import DEFAULT_QUOTA, Quota, QuotaTracker

log = logging.getLogger("rookery.gateway")

MAX_HEAD: Final = 64 << 10
MAX_HEADERS: Final = 200
MAX_PIPELINED: Final = 16
"""Requests that one connection may send ahead of their answers."""
MAX_PIPELINED_BYTES: Final = 1 << 20
"""Bytes of their bodies, together."""
HEAD_SECONDS: Final = 20.0
"""For the head of a request to come in, from its first byte, and for the first byte of a new connection."""
READ_SECONDS: Final = 60.0
"""For a request to come in, from its first byte."""
WRITE_SECONDS: Final = 60.0
"""For a reader to take what is written."""
IDLE_SECONDS: Final = 120.0
"""Longer than clients keep theirs: who closes first loses a race."""
SWEEP_SECONDS: Final = 5.0
LINGER_SECONDS: Final = 2.0
"""For a client that is still sending to see that it was refused."""
GRACE_SECONDS: Final = 5.0
"""For answers under way when the server stops."""


class Connection(asyncio.Protocol):
    """One client."""

    def __init__(self, server: "Server", session: str, *, trusted: bool = False) -> None:
        self.server = server
        self.session = session
        self.owner = session
        """The session that it is counted for; of a listener that is open to all, that of its last request."""
        self.trusted = trusted
        """Whether it comes from a process of ours: then it is not counted, and never closed for others' sake."""
        self.write_blocked: asyncio.Future[None] | None = None
        self.until = 0.0
        """When it is left behind; infinite while it is being answered."""
        self._loop = server.loop
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._pipelined: deque[tuple[Request, ResponseWriter]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self.stalled = False
        """Whether the client took nothing until it was given up."""
        self._reading = False
        """Whether a request has begun and not ended."""
        self._begun_at = 0.0
        self._handled_bytes = 0
        """Bytes of the body of the request that is being answered."""
        self._refusal: tuple[HttpError, bool] | None = None
        """What the last request is answered, after those before it; whether without a body."""
        self._last_buffered = 0
        """Bytes that waited for the reader when it was last looked at."""
        self._reset()

    def _reset(self) -> None:
        self._url = b""
        self._headers: dict[str, str] = {}
        self._head = 0
        self._body: list[bytes] = []
        self._size = 0
        self._limit = 0
        self._request: Request | None = None

    # ---- the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by name
        if not self.server.add_connection(self):
            self._transport.abort()
            return
        self.until = self._loop.time() + HEAD_SECONDS

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        self.server.remove_connection(self)
        self._transport = None
        self._closing = True
        self._drop_pipelined()
        self._drop_unfinished()
        if self._task is not None:
            self._task.cancel()
        if self.write_blocked is not None:
            # Not an error: who streams would take it for one of the upstream that is just telling its news.
            self.write_blocked.cancel()

    def data_received(self, data: bytes) -> None:
        if self._closing or self._refusal is not None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            refusal = error.__context__
            if not isinstance(refusal, HttpError):
                log.error("the header of a request could not be processed", exc_info=refusal)
                refusal = HttpError(500, self.server.internal_error)
            self.refuse(refusal)
        except httptools.HttpParserError as error:
            self.refuse(HttpError(400, f"not HTTP: {error}".encode()))

    def pause_writing(self) -> None:
        if self.write_blocked is None:
            self.write_blocked = self._loop.create_future()

    def resume_writing(self) -> None:
        if self.write_blocked is not None:
            if not self.write_blocked.done():
                self.write_blocked.set_result(None)
            self.write_blocked = None

    async def wait_writable(self) -> None:
        """Returns when the reader has caught up. The end of the connection cancels who waits."""
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
        if self._transport is not None:
            self._transport.write(data)

    # ---- the parser

    def on_message_begin(self) -> None:
        self._reset()
        self._reading = True
        self._begun_at = self._loop.time()
        if self._task is None:  # else the answer under way has its time
            self.until = self._begun_at + HEAD_SECONDS

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value))
        if self._request is not None:
            return  # a trailer: what was decided by the head stays so
        if len(self._headers) >= MAX_HEADERS:
            raise HttpError(431, b"too many headers")
        # the parser leaves a tab at the end of a value, which is space around it and not a part of it
        self._headers[name.decode("latin-1").lower()] = value.strip(b" \t").decode("latin-1")

    def _count_head(self, size: int) -> None:
        self._head += size
        if self._head > MAX_HEAD:
            raise HttpError(431, b"the head of the request is too large")

    def on_headers_complete(self) -> None:
        parser, headers = self._parser, self._headers
        path, _, query = self._url.decode("latin-1").partition("?")
        if not path.startswith("/"):  # the absolute form, which proxies send
            _, _, rest = path.partition("://")
            path = "/" + rest.partition("/")[2]
        method = parser.get_method().decode("latin-1")
        request = self._request = Request(method, path, query, headers, b"", self.session)
        if parser.should_upgrade():  # the parser would leave the body unread
            raise HttpError(400, b"this server speaks HTTP/1.1 only, and upgrades to nothing else")
        self._limit = self.server.admit(request)
        self.server.quotas.touch(self, request.owner)
        if self._task is None:
            self.until = self._begun_at + READ_SECONDS
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._limit:
            raise HttpError(413, b"the body of the request is too large")
        if headers.get("expect", "").lower() == "100-continue" and not self._pipelined and self._task is None:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        assert self._request is not None
        if self._closing or self._refusal is not None:
            return
        size = self._size + len(body)
        if size > self._limit:
            raise HttpError(413, b"the body of the request is too large")
        if (
            self._task is not None
            and size + sum(len(one.body) for one, _ in self._pipelined) > MAX_PIPELINED_BYTES
        ):
            raise HttpError(400, b"too much was sent ahead of the answers to requests before it")
        self.server.quotas.add_bytes(self, self._request.owner, len(body))
        self._size = size
        self._body.append(body)

    def on_message_complete(self) -> None:
        request = self._request
        assert request is not None
        request.body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        self._reading = False
        answer = ResponseWriter(
            self,
            keep=self._parser.should_keep_alive(),
            chunked=self._parser.get_http_version() == "1.1",
            head_only=request.method == "HEAD",
        )
        self.until = float("inf")
        if self._task is not None:
            if len(self._pipelined) >= MAX_PIPELINED:
                raise HttpError(400, b"too many requests ahead of their answers")
            self._pipelined.append((request, answer))
            self._size = 0  # from now on the request holds them
            return
        self._size = 0
        self._start(request, answer)

    # ---- answering

    def _start(self, request: Request, answer: ResponseWriter) -> None:
        quotas, owner, size = self.server.quotas, request.owner, len(request.body)
        self._handled_bytes = size
        self._task = self._loop.create_task(self._answer(request, answer))
        # Not in the task itself: one that is cancelled before it begins runs no line of its own.
        self._task.add_done_callback(lambda _: quotas.remove_bytes(owner, size))

    def _drop_pipelined(self) -> None:
        for request, _ in self._pipelined:
            self.server.quotas.remove_bytes(request.owner, len(request.body))
        self._pipelined.clear()

    def _drop_unfinished(self) -> None:
        """Drop what has come of a request that will not be completed."""
        if self._request is not None:
            self.server.quotas.remove_bytes(self._request.owner, self._size)
        self._body = []
        self._size = 0

    async def _answer(self, request: Request, answer: ResponseWriter) -> None:
        try:
            await self.server.handler(request, answer)
        except asyncio.CancelledError:
            if not self._closing:
                answer.abort()
            raise
        except HttpError as refusal:
            if answer.begun:
                answer.abort()
            else:
                answer.send(refusal.status, refusal.body, headers=refusal.headers)
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            if answer.begun:
                answer.abort()
            else:
                answer.send(500, self.server.internal_error)
        else:
            if not answer.done:
                log.error("the response to %s %s is incomplete", request.method, request.path)
                answer.abort()
        finally:
            self._task = None
            self._handled_bytes = 0
            if self._pipelined and not self._closing:
                self._start(*self._pipelined.popleft())
            elif self._refusal is not None and not self._closing:
                self._send_rejection(*self._refusal)

    def finish_response(self, *, keep: bool) -> None:
        now = self._loop.time()
        if not keep:
            self._drop_pipelined()
            self.until = now + WRITE_SECONDS
            self.close()
        elif not self._pipelined:
            self.until = now + (READ_SECONDS if self._reading else IDLE_SECONDS)

    @property
    def unfinished_bytes(self) -> int:
        """Bytes of the body of a request that has not come in whole."""
        return self._size

    @property
    def body_bytes(self) -> int:
        """Bytes of bodies that it holds, but for those of requests that wait for their turn."""
        return self._size + self._handled_bytes

    def refuse(self, refusal: HttpError) -> None:
        """End a connection whose next request is not read; answers under way go before it."""
        self._drop_unfinished()
        if self._closing or self._refusal is not None:
            return
        head_only = self._request is not None and self._request.method == "HEAD"
        self._refusal = refusal, head_only
        if self._task is None:
            self._send_rejection(refusal, head_only)

    def _send_rejection(self, refusal: HttpError, head_only: bool) -> None:
        body = refusal.body
        if not body.startswith(b"{"):
            route = self._request.route if self._request is not None else None
            format_error = getattr(route, "format_error", None) or self.server.format_error
            body = format_error(refusal.status, body.decode("latin-1"))
        # Closed at once, with something unread, the kernel would take the answer back from the client.
        ResponseWriter(self, keep=True, chunked=True, head_only=head_only).send(
            refusal.status, body, headers=(*refusal.headers, (b"connection", b"close"))
        )
        self._closing = True
        self.until = self._loop.time() + LINGER_SECONDS
        if self._transport is not None and self._transport.can_write_eof():
            self._transport.write_eof()

    def close(self) -> None:
        """Reads no more, and goes when what was written is taken."""
        self._closing = True
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        self._closing = True
        if self._transport is not None:
            self._transport.abort()

    def overdue(self, now: float) -> bool:
        """Whether its time is up; who still takes what was written gets more of it."""
        if self.until >= now:
            return False
        left = self._transport.get_write_buffer_size() if self._transport is not None else 0
        moves = 0 < left != self._last_buffered
        self._last_buffered = left
        if moves:
            self.until = now + WRITE_SECONDS
        return not moves

    @property
    def task(self) -> asyncio.Task[None] | None:
        """What works on its answer."""
        return self._task

    @property
    def gone(self) -> bool:
        return self._transport is None or self._transport.is_closing()


class Server:
    """Accepts clients at any number of listeners and hands their requests to one handler."""

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
        """`max_connections`: connections, instead of the quota's."""
        self.handler = handler
        self.admit = admit
        self.format_error = format_error
        self.internal_error = internal_error
        self.stopping = False
        self.loop = asyncio.get_running_loop()
        self.connections: set[Connection] = set()
        self.quotas = QuotaTracker(
            quota if max_connections is None else msgspec.structs.replace(quota, connections=max_connections)
        )
        self._servers: list[asyncio.Server] = []
        self._empty = asyncio.Event()
        self._timer = self.loop.call_later(SWEEP_SECONDS, self._again)

    async def listen(
        self, sock: socket.socket, *, session: str = "", trusted: bool = False, backlog: int = 4096
    ) -> asyncio.Server:
        """Serve this socket until it is closed; the socket is ours from now on.

        `session`: the session that alone is served there. `trusted`: only processes of ours can connect.
        """
        sock.setblocking(False)
        server = await self.loop.create_server(
            lambda: Connection(self, session, trusted=trusted), sock=sock, backlog=backlog
        )
        self._servers.append(server)
        return server

    async def stop_listening(self, server: asyncio.Server, session: str) -> None:
        """Serves a listener no more, nor those who came through it."""
        server.close()
        with contextlib.suppress(ValueError):
            self._servers.remove(server)
        for connection in [one for one in self.connections if one.session == session]:
            connection.abort()

    @property
    def rejected(self) -> int:
        """How many connections and requests were turned away, or closed for others' sake."""
        return self.quotas.rejected

    def add_connection(self, connection: Connection) -> bool:
        if not connection.trusted and not self.quotas.add(connection):
            return False
        self.connections.add(connection)
        self._empty.clear()
        return True

    def remove_connection(self, connection: Connection) -> None:
        self.quotas.remove(connection)
        self.connections.discard(connection)
        if not self.connections:
            self._empty.set()

    def close_overdue(self) -> None:
        """Leaves behind whose time is up."""
        now = self.loop.time()
        for connection in [one for one in self.connections if one.overdue(now)]:
            connection.abort()

    def _again(self) -> None:
        self.close_overdue()
        self._timer = self.loop.call_later(SWEEP_SECONDS, self._again)

    async def close(self, grace: float = GRACE_SECONDS) -> None:
        """Accepts nobody any more; answers under way get a while to end."""
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
                log.error("a request handler did not end: %r", task)
        if self.connections:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_SECONDS):
                    await self._empty.wait()
