"""Load generator of the benchmark `gateway`: each connection sends its next request as soon as it has an answer.

It uses bare asyncio protocols and costs about 25 µs per answer, a tenth of the fastest server that it measures.

Method:
- every answer must be complete and start with the number of its question; the last answer of every connection is
  parsed completely. A wrong or missing answer fails the measurement;
- a window starts after every connection has received `warm_up` answers and ends while all are busy. It starts and
  ends with an answer on the same connection, so a server that answers in bursts is measured over whole bursts;
- a session gets at most `REQUESTS_PER_SESSION` requests in a window, if there are enough sessions;
- every wait has a timeout, and no connection outlives its window.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from statistics import median
from typing import NamedTuple, cast

from benchmarks.gateway_payloads import RequestFactory, WrongAnswerError, check_answer
from benchmarks.instant_model import body_length
from benchmarks.process_usage import CpuMeter

WARM_UP = 2
REQUESTS_PER_SESSION = 8
ANSWER_SECONDS = 60.0
WINDOW_SECONDS = 120.0
"""Timeout for the warm-up, the last answers of a window and their checks."""
_HEAD_END = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_CHUNKED = -1


class Target(NamedTuple):
    """A server under load: its port and one request head per session, up to the value of Content-Length."""

    port: int
    heads: tuple[bytes, ...]
    pids: tuple[int, ...] = ()
    """Processes whose CPU time counts, with their descendants."""


def request_head(path: str, secret: str = "sk-none") -> bytes:  # noqa: S107  (a placeholder for servers without authentication)
    """Return the head that the OpenAI SDK sends, without compression, which would distort the figures."""
    return (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept-Encoding: identity\r\nConnection: keep-alive\r\n"
        f"Accept: application/json\r\nAuthorization: Bearer {secret}\r\nUser-Agent: AsyncOpenAI/Python 2.0\r\n"
        "X-Stainless-Lang: python\r\nX-Stainless-Async: async:asyncio\r\nX-Stainless-Retry-Count: 0\r\n"
        "Content-Type: application/json\r\nContent-Length: "
    ).encode()


class Connection(asyncio.Protocol):
    """A persistent connection with one request at a time. `on_answer` is called with each answer or error."""

    def __init__(self) -> None:
        self.on_answer: Callable[[Connection, Exception | None], None] | None = None
        self.number = 0
        self.sent_at = self.first_at = self.ended_at = 0.0
        self.stream = False
        self._transport: asyncio.Transport | None = None
        self._reset()

    def _reset(self) -> None:
        self._partial = b""
        self._expected: int | None = None
        self._parts: list[bytes] = []
        self._received = 0
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def send(self, head: bytes, number: int, body: bytes, *, stream: bool) -> None:
        assert self._transport is not None
        self._reset()
        self.number, self.stream = number, stream
        self.sent_at, self.first_at = time.perf_counter(), 0.0
        self._transport.write(b"%s%d\r\n\r\n%s" % (head, len(body), body))

    def data_received(self, data: bytes) -> None:
        if self._expected is None:
            data = self._partial + data
            end = data.find(_HEAD_END)
            if end < 0:
                self._partial = data
                return
            if not data.startswith(b"HTTP/1.1 200 "):
                self._fail(WrongAnswerError(f"the server answered with an error: {data[:500]!r}"))
                return
            chunked = b"\r\ntransfer-encoding: chunked" in data[:end].lower()
            self._expected = _CHUNKED if chunked else body_length(data[:end])
            data = data[end + 4 :]
            if self._expected is None:
                self._fail(WrongAnswerError("the answer has neither a valid Content-Length nor chunks"))
                return
        if not data:
            return
        if not self._received:
            self.first_at = time.perf_counter()
        self._parts.append(data)
        self._received += len(data)
        self._tail = (self._tail + data)[-7:] if len(data) < 7 else data[-7:]
        # JSON and its events contain no carriage return, so these bytes can only be the last chunk.
        if self._tail.endswith(_LAST_CHUNK) if self._expected == _CHUNKED else self._received >= self._expected:
            self.ended_at = time.perf_counter()
            self._done()

    def body(self) -> bytes:
        """Return the body of the last answer as received, including chunk framing."""
        return b"".join(self._parts)

    def plain_body(self) -> bytes:
        """Return the decoded body of the last answer."""
        return decode_chunked(self.body()) if self._expected == _CHUNKED else self.body()

    def _done(self) -> None:
        body = self.body()
        if b'"%08d' % self.number not in body:
            self._fail(
                WrongAnswerError(f"the answer to {self.number} does not contain its number: {body[:300]!r}")
            )
        elif self.stream and b"[DONE]" not in body[-64:]:
            self._fail(WrongAnswerError(f"the stream of {self.number} does not end with [DONE]: …{body[-200:]!r}"))
        elif self.on_answer is not None:
            self.on_answer(self, None)

    def _fail(self, error: Exception) -> None:
        if self.on_answer is not None:
            self.on_answer(self, error)
        self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        on_answer, self.on_answer = self.on_answer, None
        if on_answer is not None:
            on_answer(self, exc or ConnectionResetError("the server closed a connection that was in use"))

    def close(self) -> None:
        self.on_answer = None
        if self._transport is not None:
            self._transport.abort()


def decode_chunked(body: bytes) -> bytes:
    """Remove the chunk framing from a body. Raise WrongAnswerError if the framing is invalid."""
    parts, at = list[bytes](), 0
    while True:
        end = body.find(b"\r\n", at)
        try:
            size = int(body[at:end], 16) if end > at else -1
        except ValueError:
            size = -1
        start = end + 2
        if size < 0 or body[start + size : start + size + 2] != b"\r\n":
            raise WrongAnswerError(f"invalid chunk framing at byte {at}: {body[at : at + 40]!r}")
        if size == 0:
            return b"".join(parts)
        parts.append(body[start : start + size])
        at = start + size + 2


@asynccontextmanager
async def open_connections(port: int, width: int) -> AsyncIterator[list[Connection]]:
    """Open `width` connections and close them at the end of the block."""
    loop = asyncio.get_running_loop()
    made: list[Connection] = []
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            for _ in range(width):
                _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
                made.append(connection)
        yield made
    finally:
        for connection in made:
            connection.close()


class Window(NamedTuple):
    """The measurements of one window."""

    seconds: float
    latencies: tuple[float, ...]
    """Milliseconds from the request to the end of its answer."""
    first_byte_times: tuple[float, ...]
    """Milliseconds from the request to the first byte of its answer's body."""
    cpu_us: float | None
    """CPU microseconds of the server per answer."""

    @property
    def rps(self) -> float:
        return len(self.latencies) / self.seconds

    @property
    def latency(self) -> float:
        return median(self.latencies)

    @property
    def first_byte(self) -> float:
        return median(self.first_byte_times)


class _LoadGenerator:
    """Connections that send requests without pause, and the window in which their answers count."""

    def __init__(
        self, target: Target, requests: RequestFactory, connections: list[Connection], warm_up: int, seconds: float
    ) -> None:
        self.target, self.requests, self.connections = target, requests, connections
        self.warm_up, self.seconds = warm_up, seconds
        self.indexes = {id(connection): at for at, connection in enumerate(connections)}
        self.counts = [0] * len(connections)
        self.warming_up = self.active = len(connections)
        self.meter: CpuMeter | None = None
        self.began = self.took = 0.0
        self.cpu: float | None = None
        self.counting = self.stopping = False
        self.latencies: list[float] = []
        self.first_byte_times: list[float] = []
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when all connections have stopped; holds the first error."""

    def start(self) -> None:
        for connection in self.connections:
            connection.on_answer = self._on_answer
            self._send_next(connection)

    def _send_next(self, connection: Connection) -> None:
        at = self.indexes[id(connection)]
        heads = self.target.heads
        chosen = heads[(at + len(self.connections) * (self.counts[at] // REQUESTS_PER_SESSION)) % len(heads)]
        number, body = self.requests.next()
        connection.send(chosen, number, body, stream=self.requests.stream)

    def _on_answer(self, connection: Connection, error: Exception | None) -> None:
        if error is not None:
            if not self.finished.done():
                self.finished.set_exception(error)
            return
        at = self.indexes[id(connection)]
        self.counts[at] += 1
        self.warming_up -= self.counts[at] == self.warm_up
        if self.counting:
            self.latencies.append(1e3 * (connection.ended_at - connection.sent_at))
            self.first_byte_times.append(1e3 * (connection.first_at - connection.sent_at))
        if not at and not self.warming_up and not self.stopping:
            self._on_first_connection()
        if not self.stopping:
            self._send_next(connection)
            return
        self.active -= 1
        if not self.active and not self.finished.done():
            self.finished.set_result(None)

    def _on_first_connection(self) -> None:
        """Start, continue or end the window; called when the first connection has received an answer."""
        if not self.counting:
            self.meter = CpuMeter(self.target.pids) if self.target.pids else None
            self.counting, self.began = True, time.perf_counter()
        elif time.perf_counter() - self.began >= self.seconds:
            self.took = time.perf_counter() - self.began
            self.cpu = self.meter.used() if self.meter is not None else None
            self.counting, self.stopping = False, True


async def measure_window(
    target: Target, requests: RequestFactory, width: int, seconds: float, *, warm_up: int = WARM_UP
) -> Window:
    """Send requests over `width` connections for at least `seconds`, after a warm-up that does not count."""
    async with open_connections(target.port, width) as connections:
        load = _LoadGenerator(target, requests, connections, warm_up, seconds)
        load.start()
        async with asyncio.timeout(seconds + WINDOW_SECONDS):
            await load.finished
        for connection in connections:
            check_answer(connection.number, connection.plain_body(), stream=requests.stream)
    cpu_us = None if load.cpu is None else 1e6 * load.cpu / len(load.latencies)
    return Window(load.took, tuple(load.latencies), tuple(load.first_byte_times), cpu_us)


async def request_all(connections: Sequence[Connection], requests: Sequence[tuple[bytes, int, bytes]]) -> None:
    """Send one request on each connection and wait for all answers. The first answer is checked completely."""
    finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    left = len(requests)

    def on_answer(_: Connection, error: Exception | None) -> None:
        nonlocal left
        left -= 1
        if finished.done():
            return
        if error is not None:
            finished.set_exception(error)
        elif not left:
            finished.set_result(None)

    for connection, (head, number, body) in zip(connections, requests, strict=True):
        connection.on_answer = on_answer
        connection.send(head, number, body, stream=False)
    async with asyncio.timeout(ANSWER_SECONDS):
        await finished
    check_answer(connections[0].number, connections[0].plain_body(), stream=False)
