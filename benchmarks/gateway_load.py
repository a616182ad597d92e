"""Who asks in the `gateway` bench: connections that ask again as soon as they are answered.

Written on bare protocols: a whole answer costs it some 25 µs, a tenth of the fastest that it measures.

Promises:
- every answer has to be complete and to begin with the number of its own question; the last one of every
  connection is read to its last logprob. One that is wrong, or does not come, fails the measurement;
- a window begins after every connection was answered `warm_up` times and ends with all of them busy. It begins
  and ends with an answer on the same connection: who answers many at once is measured over whole bursts;
- a request goes to a session that has had at most `PER_SESSION` of this window, as long as there are enough;
- every wait is bounded, and no connection outlives its crowd.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from statistics import median
from typing import NamedTuple, cast

from benchmarks.gateway_payloads import Ask, WrongAnswer, check
from benchmarks.instant_model import body_length
from benchmarks.process_usage import CpuMeter

WARM_UP = 2
PER_SESSION = 8
ANSWER_SECONDS = 60.0
WINDOW_SECONDS = 120.0
"""For the warm-up, a window's last answers and their checks."""
_HEAD_END = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_CHUNKED = -1


class Target(NamedTuple):
    """Where to ask: one head for each session, up to the figure of its Content-Length."""

    port: int
    heads: tuple[bytes, ...]
    pids: tuple[int, ...] = ()
    """Whose CPU time counts, with all that they started."""


def head(path: str, secret: str = "sk-none") -> bytes:  # noqa: S107  (nobody's: servers that check none)
    """The head that the OpenAI SDK sends, but for compression: nobody wants it on loopback, and some would."""
    return (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept-Encoding: identity\r\nConnection: keep-alive\r\n"
        f"Accept: application/json\r\nAuthorization: Bearer {secret}\r\nUser-Agent: AsyncOpenAI/Python 2.0\r\n"
        "X-Stainless-Lang: python\r\nX-Stainless-Async: async:asyncio\r\nX-Stainless-Retry-Count: 0\r\n"
        "Content-Type: application/json\r\nContent-Length: "
    ).encode()


class Connection(asyncio.Protocol):
    """One kept connection, one request at a time. `answered` is called with each answer, or with an error."""

    def __init__(self) -> None:
        self.answered: Callable[[Connection, Exception | None], None] | None = None
        self.number = 0
        self.asked_at = self.first_at = self.ended_at = 0.0
        self.stream = False
        self._transport: asyncio.Transport | None = None
        self._reset()

    def _reset(self) -> None:
        self._partial = b""
        self._need: int | None = None
        self._parts: list[bytes] = []
        self._got = 0
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def ask(self, head: bytes, number: int, body: bytes, *, stream: bool) -> None:
        assert self._transport is not None
        self._reset()
        self.number, self.stream = number, stream
        self.asked_at, self.first_at = time.perf_counter(), 0.0
        self._transport.write(b"%s%d\r\n\r\n%s" % (head, len(body), body))

    def data_received(self, data: bytes) -> None:
        if self._need is None:
            data = self._partial + data
            end = data.find(_HEAD_END)
            if end < 0:
                self._partial = data
                return
            if not data.startswith(b"HTTP/1.1 200 "):
                self._fail(WrongAnswer(f"an answer with an error: {data[:500]!r}"))
                return
            chunked = b"\r\ntransfer-encoding: chunked" in data[:end].lower()
            self._need = _CHUNKED if chunked else body_length(data[:end])
            data = data[end + 4 :]
            if self._need is None:
                self._fail(WrongAnswer("an answer whose length is not known"))
                return
        if not data:
            return
        if not self._got:
            self.first_at = time.perf_counter()
        self._parts.append(data)
        self._got += len(data)
        self._tail = (self._tail + data)[-7:] if len(data) < 7 else data[-7:]
        # Neither JSON nor its events hold a carriage return: these bytes can only be the last chunk.
        if self._tail.endswith(_LAST_CHUNK) if self._need == _CHUNKED else self._got >= self._need:
            self.ended_at = time.perf_counter()
            self._done()

    def body(self) -> bytes:
        """The last answer's body as it came, with its chunks' frames if it had any."""
        return b"".join(self._parts)

    def plain_body(self) -> bytes:
        """The last answer's body."""
        return dechunked(self.body()) if self._need == _CHUNKED else self.body()

    def _done(self) -> None:
        body = self.body()
        if b'"%08d' % self.number not in body:
            self._fail(WrongAnswer(f"an answer to {self.number} without its number: {body[:300]!r}"))
        elif self.stream and b"[DONE]" not in body[-64:]:
            self._fail(WrongAnswer(f"a stream without an end: …{body[-200:]!r}"))
        elif self.answered is not None:
            self.answered(self, None)

    def _fail(self, error: Exception) -> None:
        if self.answered is not None:
            self.answered(self, error)
        self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        answered, self.answered = self.answered, None
        if answered is not None:
            answered(self, exc or ConnectionResetError("the server closed a connection that was in use"))

    def close(self) -> None:
        self.answered = None
        if self._transport is not None:
            self._transport.abort()


def dechunked(body: bytes) -> bytes:
    """A body without the frames of its chunks; WrongAnswer where they are not in order."""
    parts, at = list[bytes](), 0
    while True:
        end = body.find(b"\r\n", at)
        try:
            size = int(body[at:end], 16) if end > at else -1
        except ValueError:
            size = -1
        begin = end + 2
        if size < 0 or body[begin + size : begin + size + 2] != b"\r\n":
            raise WrongAnswer(f"chunks that are not in order at {at}: {body[at : at + 40]!r}")
        if size == 0:
            return b"".join(parts)
        parts.append(body[begin : begin + size])
        at = begin + size + 2


@asynccontextmanager
async def connected(port: int, width: int) -> AsyncIterator[list[Connection]]:
    """This many connections, closed at the end of the block."""
    loop = asyncio.get_running_loop()
    made: list[Connection] = []
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            for _ in range(width):
                _, one = await loop.create_connection(Connection, "127.0.0.1", port)
                made.append(one)
        yield made
    finally:
        for one in made:
            one.close()


class Window(NamedTuple):
    """What one window measured."""

    seconds: float
    latencies: tuple[float, ...]
    """Milliseconds from the request to the end of its answer."""
    firsts: tuple[float, ...]
    """Milliseconds from the request to the first byte of its answer's body."""
    cpu_us: float | None
    """CPU of the one who was asked, for each answer."""

    @property
    def rps(self) -> float:
        return len(self.latencies) / self.seconds

    @property
    def latency(self) -> float:
        return median(self.latencies)

    @property
    def first(self) -> float:
        return median(self.firsts)


class _Crowd:
    """Connections that ask on and on, and the window in which their answers count."""

    def __init__(
        self, target: Target, ask: Ask, connections: list[Connection], warm_up: int, seconds: float
    ) -> None:
        self.target, self.request, self.connections = target, ask, connections
        self.warm_up, self.seconds = warm_up, seconds
        self.places = {id(one): at for at, one in enumerate(connections)}
        self.counts = [0] * len(connections)
        self.cold = self.busy = len(connections)
        self.meter: CpuMeter | None = None
        self.began = self.took = 0.0
        self.cpu: float | None = None
        self.counting = self.stopping = False
        self.latencies: list[float] = []
        self.firsts: list[float] = []
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when all have stopped, or with the first error."""

    def begin(self) -> None:
        for one in self.connections:
            one.answered = self._answered
            self._ask(one)

    def _ask(self, one: Connection) -> None:
        at = self.places[id(one)]
        heads = self.target.heads
        chosen = heads[(at + len(self.connections) * (self.counts[at] // PER_SESSION)) % len(heads)]
        number, body = self.request.next()
        one.ask(chosen, number, body, stream=self.request.stream)

    def _answered(self, one: Connection, error: Exception | None) -> None:
        if error is not None:
            if not self.over.done():
                self.over.set_exception(error)
            return
        at = self.places[id(one)]
        self.counts[at] += 1
        self.cold -= self.counts[at] == self.warm_up
        if self.counting:
            self.latencies.append(1e3 * (one.ended_at - one.asked_at))
            self.firsts.append(1e3 * (one.first_at - one.asked_at))
        if not at and not self.cold and not self.stopping:
            self._mark()
        if not self.stopping:
            self._ask(one)
            return
        self.busy -= 1
        if not self.busy and not self.over.done():
            self.over.set_result(None)

    def _mark(self) -> None:
        """The first connection was answered: the window begins, goes on, or ends."""
        if not self.counting:
            self.meter = CpuMeter(self.target.pids) if self.target.pids else None
            self.counting, self.began = True, time.perf_counter()
        elif time.perf_counter() - self.began >= self.seconds:
            self.took = time.perf_counter() - self.began
            self.cpu = self.meter.used() if self.meter is not None else None
            self.counting, self.stopping = False, True


async def window(target: Target, ask: Ask, width: int, seconds: float, *, warm_up: int = WARM_UP) -> Window:
    """`width` connections ask for at least `seconds`, after a warm-up that does not count."""
    async with connected(target.port, width) as connections:
        crowd = _Crowd(target, ask, connections, warm_up, seconds)
        crowd.begin()
        async with asyncio.timeout(seconds + WINDOW_SECONDS):
            await crowd.over
        for one in connections:
            check(one.number, one.plain_body(), stream=ask.stream)
    cpu_us = None if crowd.cpu is None else 1e6 * crowd.cpu / len(crowd.latencies)
    return Window(crowd.took, tuple(crowd.latencies), tuple(crowd.firsts), cpu_us)


async def at_once(connections: Sequence[Connection], requests: Sequence[tuple[bytes, int, bytes]]) -> None:
    """One request on each connection, all at once; returns when all are answered, and the first one is read."""
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    left = len(requests)

    def answered(_: Connection, error: Exception | None) -> None:
        nonlocal left
        left -= 1
        if over.done():
            return
        if error is not None:
            over.set_exception(error)
        elif not left:
            over.set_result(None)

    for one, (first, number, body) in zip(connections, requests, strict=True):
        one.answered = answered
        one.ask(first, number, body, stream=False)
    async with asyncio.timeout(ANSWER_SECONDS):
        await over
    check(connections[0].number, connections[0].plain_body(), stream=False)
