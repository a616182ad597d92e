"""Helpers for tests of the HTTP client: servers that write exact bytes, and checks for leaks.

`run` runs a test's coroutine on an event loop and fails it when a socket or a task is left behind.
`Script` is a server whose connections are each handled by a coroutine; over a Unix socket, so that `Wire.send` can
tell when the client has read a piece and write the next one then: a split of the bytes is a split of the reads.
"""

import array
import asyncio
import fcntl
import gc
import os
import socket
import struct
import tempfile
import termios
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Self

import pytest
import uvloop

from rookery.upstreams.http_client import Client

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


def sockets() -> set[str]:
    """Return the open sockets of this process."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if link.startswith("socket:"):
            found.add(link)
    return found


def run(main: Coroutine[Any, Any, None], loop: str = "uvloop") -> None:
    """Run a coroutine; fail if it leaves a task, a socket or an event loop error behind."""
    complaints: list[str] = []

    async def watched() -> None:
        current = asyncio.get_running_loop()
        current.set_exception_handler(lambda _, context: complaints.append(str(context)))
        before = sockets()
        async with asyncio.timeout(60):
            await main
            await until(lambda: len(asyncio.all_tasks()) == 1)
            gc.collect()
            await until(lambda: not sockets() - before)

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(watched())
    assert not complaints


async def until(true: Callable[[], bool]) -> None:
    """Run the event loop until the condition holds; the timeout of the test bounds it."""
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0)


async def spin(count: int = 20) -> None:
    """Let the event loop run a number of iterations."""
    for _ in range(count):
        await asyncio.sleep(0)


def unread(sock: socket.socket) -> int:
    """Return the number of bytes that the other end of a Unix socket has not read."""
    size = array.array("i", [0])
    fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, size)
    return size[0]


class Wire:
    """The server side of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        self.reader, self.writer = reader, writer
        self.number = number
        """Number of the connection, from 1, in the order of arrival."""

    async def request(self) -> bytes:
        """Return one request, head and body; b"" if the client has disconnected."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return b""
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                return head + await self.reader.readexactly(int(line[15:]))
        return head

    async def send(self, *pieces: bytes) -> None:
        """Send pieces such that the client reads each one separately (Unix sockets only)."""
        for piece in pieces:
            if self.writer.transport.is_closing():  # uvloop would report it as an error of the caller
                raise ConnectionResetError
            self.writer.write(piece)
            await self.writer.drain()
            if len(pieces) > 1:
                await self.wait_until_read()

    async def wait_until_read(self) -> None:
        """Wait until the client has read everything that was sent."""
        sock = self.writer.get_extra_info("socket")
        for _ in range(100_000):
            if self.writer.transport.is_closing() or not unread(sock):
                break
            await asyncio.sleep(0)
        await spin(3)  # the event loop has read it; now the reading task runs

    def reset(self) -> None:
        """Reset the connection, as a crash does."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def wait_until_closed(self) -> None:
        """Wait until the client has closed the connection."""
        try:
            while await self.reader.read(65536):
                pass
        except ConnectionError:
            return


Handler = Callable[[Wire], Awaitable[None]]


class Script:
    """A server with scripted connections. An exception of the handler fails the test."""

    def __init__(self, handler: Handler, *, tcp: bool = False, **tls: Any) -> None:
        self.connections = 0
        self.open = 0
        self._handler = handler
        self._tcp = tcp or bool(tls)
        self._tls = tls
        self._tasks: set[asyncio.Task[None]] = set()
        self._errors: list[BaseException] = []
        self._wires: set[Wire] = set()
        self._folder = tempfile.TemporaryDirectory(prefix="h")
        self.path = f"{self._folder.name}/s"
        self.port = 0

    async def __aenter__(self) -> Self:
        if self._tcp:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=4096, **self._tls)
            self.port = self._server.sockets[0].getsockname()[1]
        else:
            self._server = await asyncio.start_unix_server(self._serve, self.path, backlog=4096)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._folder.cleanup()
        if self._errors:
            raise self._errors[0]

    def cut(self) -> None:
        """Close all open connections."""
        for wire in self._wires:
            wire.writer.close()

    def client(self, **options: Any) -> Client:
        """Return a client for this server."""
        if self._tcp:
            return Client("127.0.0.1", self.port, **options)
        return Client(path=self.path, **options)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        self.open += 1
        wire = Wire(reader, writer, self.connections)
        self._wires.add(wire)
        try:
            await self._handler(wire)
        except asyncio.CancelledError:
            pass  # the test is over
        except ConnectionError:
            pass  # the client disconnected during a write, which many tests do on purpose
        except BaseException as error:
            self._errors.append(error)
        finally:
            self.open -= 1
            self._tasks.discard(task)
            self._wires.discard(wire)
            writer.close()


def answering(*pieces: bytes, close: bool = False, first: bytes = b"") -> Handler:
    """Return a handler that responds with these pieces. `first` is used for the very first request."""
    requests = 0

    async def handle(wire: Wire) -> None:
        nonlocal requests
        while await wire.request():
            requests += 1
            await wire.send(*((first,) if first and requests == 1 else pieces))
            if close:
                return

    return handle


def whole(body: bytes, *more: bytes, status: bytes = b"200 OK") -> bytes:
    """Return a response with a length."""
    lines = b"".join(line + b"\r\n" for line in more)
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n%b\r\n%b" % (status, len(body), lines, body)


def chunked(chunks: Iterable[bytes], *, extension: bytes = b"", trailers: bytes = b"") -> bytes:
    """Return a chunked response."""
    body = b"".join(b"%x%b\r\n%b\r\n" % (len(chunk), extension, chunk) for chunk in chunks if chunk)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n" + trailers + b"\r\n"


async def fetch(client: Client, *, streamed: bool = False, limit: int = 1 << 24) -> bytes:
    """Send one request and read the whole response."""
    response = await client.send("GET", "/")
    if not streamed:
        return await response.read(limit)
    found = []
    while data := await response.chunk():
        found.append(data)
    return b"".join(found)


both_loops = pytest.mark.parametrize("loop", sorted(LOOPS))
