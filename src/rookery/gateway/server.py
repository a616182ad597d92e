"""HTTP/1.1 for the gateway's doors: a parser in C, one small protocol on top of it.

General servers cost half a millisecond for each request that passes; here it is a tenth of that.

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

from rookery.gateway.http import Admit, Answer, Handler, Refusal, Request
from rookery.gateway.quotas import USUAL, Ledger, Quota

log = logging.getLogger("rookery.gateway")

MAX_HEAD: Final = 64 << 10
MAX_HEADERS: Final = 200
MAX_WAITING: Final = 16
"""Requests that one connection may send ahead of their answers."""
MAX_AHEAD: Final = 1 << 20
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

    def __init__(self, server: "Server", bound: str, *, trusted: bool = False) -> None:
        self.server = server
        self.bound = bound
        self.owner = bound
        """The session that it is counted for; of a listener that is open to all, that of its last request."""
        self.trusted = trusted
        """Whether it comes from a process of ours: then it is not counted, and never closed for others' sake."""
        self.choked: asyncio.Future[None] | None = None
        self.until = 0.0
        """When it is left behind; infinite while it is being answered."""
        self._loop = server.loop
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[tuple[Request, Answer]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self.stalled = False
        """Whether the client took nothing until it was given up."""
        self._reading = False
        """Whether a request has begun and not ended."""
        self._begun_at = 0.0
        self._answering = 0
        """Bytes of the body of the request that is being answered."""
        self._refusal: tuple[Refusal, bool] | None = None
        """What the last request is answered, after those before it; whether without a body."""
        self._left = 0
        """Bytes that waited for the reader when it was last looked at."""
        self._fresh()

    def _fresh(self) -> None:
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
        if not self.server.joined(self):
            self._transport.abort()
            return
        self.until = self._loop.time() + HEAD_SECONDS

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        self.server.left(self)
        self._transport = None
        self._closing = True
        self._forget_waiting()
        self._forget_unfinished()
        if self._task is not None:
            self._task.cancel()
        if self.choked is not None:
            # Not an error: who streams would take it for one of the upstream that is just telling its news.
            self.choked.cancel()

    def data_received(self, data: bytes) -> None:
        if self._closing or self._refusal is not None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            refusal = error.__context__
            if not isinstance(refusal, Refusal):
                log.error("the head of a request could not be dealt with", exc_info=refusal)
                refusal = Refusal(500, self.server.failure)
            self.refuse(refusal)
        except httptools.HttpParserError as error:
            self.refuse(Refusal(400, f"not HTTP: {error}".encode()))

    def pause_writing(self) -> None:
        if self.choked is None:
            self.choked = self._loop.create_future()

    def resume_writing(self) -> None:
        if self.choked is not None:
            if not self.choked.done():
                self.choked.set_result(None)
            self.choked = None

    async def drained(self) -> None:
        """Returns when the reader has caught up. The end of the connection cancels who waits."""
        choked = self.choked
        if choked is None:
            return
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                await asyncio.shield(choked)
        except TimeoutError:
            log.info("a client took nothing for %g seconds and is left behind", WRITE_SECONDS)
            self.stalled = True
            self.abort()
            await asyncio.shield(choked)

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    # ---- the parser

    def on_message_begin(self) -> None:
        self._fresh()
        self._reading = True
        self._begun_at = self._loop.time()
        if self._task is None:  # else the answer under way has its time
            self.until = self._begun_at + HEAD_SECONDS

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._weigh(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._weigh(len(name) + len(value))
        if self._request is not None:
            return  # a trailer: what was decided by the head stays so
        if len(self._headers) >= MAX_HEADERS:
            raise Refusal(431, b"too many headers")
        # the parser leaves a tab at the end of a value, which is space around it and not a part of it
        self._headers[name.decode("latin-1").lower()] = value.strip(b" \t").decode("latin-1")

    def _weigh(self, size: int) -> None:
        self._head += size
        if self._head > MAX_HEAD:
            raise Refusal(431, b"the head of the request is too large")

    def on_headers_complete(self) -> None:
        parser, headers = self._parser, self._headers
        path, _, query = self._url.decode("latin-1").partition("?")
        if not path.startswith("/"):  # the absolute form, which proxies send
            _, _, rest = path.partition("://")
            path = "/" + rest.partition("/")[2]
        method = parser.get_method().decode("latin-1")
        request = self._request = Request(method, path, query, headers, b"", self.bound)
        if parser.should_upgrade():  # the parser would leave the body unread
            raise Refusal(400, b"this server speaks HTTP/1.1 only, and upgrades to nothing else")
        self._limit = self.server.admit(request)
        self.server.ledger.use(self, request.owner)
        if self._task is None:
            self.until = self._begun_at + READ_SECONDS
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._limit:
            raise Refusal(413, b"the body of the request is too large")
        if headers.get("expect", "").lower() == "100-continue" and not self._waiting and self._task is None:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        assert self._request is not None
        if self._closing or self._refusal is not None:
            return
        size = self._size + len(body)
        if size > self._limit:
            raise Refusal(413, b"the body of the request is too large")
        if self._task is not None and size + sum(len(one.body) for one, _ in self._waiting) > MAX_AHEAD:
            raise Refusal(400, b"too much was sent ahead of the answers to requests before it")
        self.server.ledger.hold(self, self._request.owner, len(body))
        self._size = size
        self._body.append(body)

    def on_message_complete(self) -> None:
        request = self._request
        assert request is not None
        request.body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        self._reading = False
        answer = Answer(
            self,
            keep=self._parser.should_keep_alive(),
            chunked=self._parser.get_http_version() == "1.1",
            head_only=request.method == "HEAD",
        )
        self.until = float("inf")
        if self._task is not None:
            if len(self._waiting) >= MAX_WAITING:
                raise Refusal(400, b"too many requests ahead of their answers")
            self._waiting.append((request, answer))
            self._size = 0  # from now on the request holds them
            return
        self._size = 0
        self._start(request, answer)

    # ---- answering

    def _start(self, request: Request, answer: Answer) -> None:
        ledger, owner, size = self.server.ledger, request.owner, len(request.body)
        self._answering = size
        self._task = self._loop.create_task(self._answer(request, answer))
        # Not in the task itself: one that is cancelled before it begins runs no line of its own.
        self._task.add_done_callback(lambda _: ledger.release(owner, size))

    def _forget_waiting(self) -> None:
        for request, _ in self._waiting:
            self.server.ledger.release(request.owner, len(request.body))
        self._waiting.clear()

    def _forget_unfinished(self) -> None:
        """Drop what has come of a request that will not be completed."""
        if self._request is not None:
            self.server.ledger.release(self._request.owner, self._size)
        self._body = []
        self._size = 0

    async def _answer(self, request: Request, answer: Answer) -> None:
        try:
            await self.server.handler(request, answer)
        except asyncio.CancelledError:
            if not self._closing:
                answer.abort()
            raise
        except Refusal as refusal:
            if answer.begun:
                answer.abort()
            else:
                answer.send(refusal.status, refusal.body, headers=refusal.headers)
        except Exception:
            log.exception("%s %s could not be answered", request.method, request.path)
            if answer.begun:
                answer.abort()
            else:
                answer.send(500, self.server.failure)
        else:
            if not answer.done:
                log.error("%s %s got no complete answer", request.method, request.path)
                answer.abort()
        finally:
            self._task = None
            self._answering = 0
            if self._waiting and not self._closing:
                self._start(*self._waiting.popleft())
            elif self._refusal is not None and not self._closing:
                self._say(*self._refusal)

    def answered(self, *, keep: bool) -> None:
        now = self._loop.time()
        if not keep:
            self._forget_waiting()
            self.until = now + WRITE_SECONDS
            self.close()
        elif not self._waiting:
            self.until = now + (READ_SECONDS if self._reading else IDLE_SECONDS)

    @property
    def unfinished(self) -> int:
        """Bytes of the body of a request that has not come in whole."""
        return self._size

    @property
    def held(self) -> int:
        """Bytes of bodies that it holds, but for those of requests that wait for their turn."""
        return self._size + self._answering

    def refuse(self, refusal: Refusal) -> None:
        """End a connection whose next request is not read; answers under way go before it."""
        self._forget_unfinished()
        if self._closing or self._refusal is not None:
            return
        head_only = self._request is not None and self._request.method == "HEAD"
        self._refusal = refusal, head_only
        if self._task is None:
            self._say(refusal, head_only)

    def _say(self, refusal: Refusal, head_only: bool) -> None:
        body = refusal.body
        if not body.startswith(b"{"):
            route = self._request.route if self._request is not None else None
            worded = getattr(route, "worded", None) or self.server.worded
            body = worded(refusal.status, body.decode("latin-1"))
        # Closed at once, with something unread, the kernel would take the answer back from the client.
        Answer(self, keep=True, chunked=True, head_only=head_only).send(
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
        moves = 0 < left != self._left
        self._left = left
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
        admit: Admit,
        *,
        worded: Callable[[int, str], bytes],
        failure: bytes,
        quota: Quota = USUAL,
        most: int | None = None,
    ) -> None:
        """`most`: connections, instead of the quota's."""
        self.handler = handler
        self.admit = admit
        self.worded = worded
        self.failure = failure
        self.stopping = False
        self.loop = asyncio.get_running_loop()
        self.connections: set[Connection] = set()
        self.ledger = Ledger(quota if most is None else msgspec.structs.replace(quota, connections=most))
        self._servers: list[asyncio.Server] = []
        self._empty = asyncio.Event()
        self._timer = self.loop.call_later(SWEEP_SECONDS, self._again)

    async def listen(
        self, sock: socket.socket, *, bound: str = "", trusted: bool = False, backlog: int = 4096
    ) -> asyncio.Server:
        """Serve this socket until it is closed; the socket is ours from now on.

        `bound`: the session that alone is served there. `trusted`: only processes of ours can connect.
        """
        sock.setblocking(False)
        server = await self.loop.create_server(
            lambda: Connection(self, bound, trusted=trusted), sock=sock, backlog=backlog
        )
        self._servers.append(server)
        return server

    async def unlisten(self, server: asyncio.Server, bound: str) -> None:
        """Serves a listener no more, nor those who came through it."""
        server.close()
        with contextlib.suppress(ValueError):
            self._servers.remove(server)
        for connection in [one for one in self.connections if one.bound == bound]:
            connection.abort()

    @property
    def refused(self) -> int:
        """How many connections and requests were turned away, or closed for others' sake."""
        return self.ledger.refused

    def joined(self, connection: Connection) -> bool:
        if not connection.trusted and not self.ledger.join(connection):
            return False
        self.connections.add(connection)
        self._empty.clear()
        return True

    def left(self, connection: Connection) -> None:
        self.ledger.leave(connection)
        self.connections.discard(connection)
        if not self.connections:
            self._empty.set()

    def sweep(self) -> None:
        """Leaves behind whose time is up."""
        now = self.loop.time()
        for connection in [one for one in self.connections if one.overdue(now)]:
            connection.abort()

    def _again(self) -> None:
        self.sweep()
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
                log.error("an answer does not end: %r", task)
        if self.connections:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_SECONDS):
                    await self._empty.wait()
