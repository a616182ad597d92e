"""The gateway's HTTP server with handlers that a test provides."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from rookery.gateway.http_messages import HttpError, Request, ResponseWriter
from rookery.gateway.server import HttpConnection, Server
from tests.gateway.kit import RawConnection, request
from tests.gateway.scripted_upstream import WAIT

LIMIT = 1000
PLAIN = request("GET", "/a?b=c", X_One="1")
Handler = Callable[[Request, ResponseWriter], Awaitable[None]]


async def echo(request: Request, writer: ResponseWriter) -> None:
    content = (request.method, request.path, request.query, request.headers, request.body.decode("latin-1"))
    writer.send(200, msgspec.json.encode(content))


def admit(request: Request) -> int:
    if request.path == "/no":
        raise HttpError(401, b'{"error":"no"}', ((b"www-authenticate", b"Bearer"),))
    if request.path == "/broken":
        raise ZeroDivisionError("secret in the exception")
    return LIMIT


def new_server(handler: Handler = echo, **options: Any) -> Server:
    return Server(
        handler,
        admit,
        format_error=lambda status, text: b'{"error":"%b"}' % text.encode(),
        internal_error=b"{}",
        **options,
    )


class RunningServer:
    """HTTP server that listens on a loopback port."""

    def __init__(self, server: Server, port: int) -> None:
        self.server = server
        self.port = port

    async def connect(self) -> RawConnection:
        return await RawConnection.open(self.port)

    async def wait_for_only_connection(self) -> HttpConnection:
        """Wait until exactly one client is connected and return its connection."""
        async with asyncio.timeout(WAIT):
            while len(self.server.connections) != 1:
                await asyncio.sleep(0)
        return next(iter(self.server.connections))

    async def wait_for_no_connections(self) -> None:
        async with asyncio.timeout(WAIT):
            while self.server.connections:
                await asyncio.sleep(0)


async def start_server(handler: Handler = echo, **options: Any) -> RunningServer:
    server = new_server(handler, **options)
    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    await server.listen(sock)
    return RunningServer(server, port)


@asynccontextmanager
async def run_server(handler: Handler = echo, **options: Any) -> AsyncIterator[RunningServer]:
    running = await start_server(handler, **options)
    try:
        yield running
    finally:
        await running.server.close(grace=0)


class BlockingHandler:
    """Handler that echoes the request once the test sets `proceed`."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.proceed = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def __call__(self, request: Request, writer: ResponseWriter) -> None:
        self.started.set()
        try:
            await self.proceed.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        await echo(request, writer)


async def wait_for(event: asyncio.Event) -> None:
    async with asyncio.timeout(WAIT):
        await event.wait()
