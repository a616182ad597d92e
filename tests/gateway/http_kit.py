"""An HTTP server of the gateway's with handlers of the test's."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from rookery.gateway.http import HttpError, Request, ResponseWriter
from rookery.gateway.server import Connection, Server
from tests.gateway.kit import Wire, request
from tests.gateway.scripted import WAIT

LIMIT = 1000
PLAIN = request("GET", "/a?b=c", X_One="1")
Handler = Callable[[Request, ResponseWriter], Awaitable[None]]


async def echo(request: Request, out: ResponseWriter) -> None:
    said = (request.method, request.path, request.query, request.headers, request.body.decode("latin-1"))
    out.send(200, msgspec.json.encode(said))


def admit(request: Request) -> int:
    if request.path == "/no":
        raise HttpError(401, b'{"error":"no"}', ((b"www-authenticate", b"Bearer"),))
    if request.path == "/broken":
        raise ZeroDivisionError("secret of the head")
    return LIMIT


def made(handler: Handler = echo, **more: Any) -> Server:
    return Server(
        handler,
        admit,
        format_error=lambda status, text: b'{"said":"%b"}' % text.encode(),
        internal_error=b"{}",
        **more,
    )


class Door:
    """A server at a loopback port."""

    def __init__(self, server: Server, port: int) -> None:
        self.server = server
        self.port = port

    async def wire(self) -> Wire:
        return await Wire.to(self.port)

    async def alone(self) -> Connection:
        """The connection of the only client, when it has come."""
        async with asyncio.timeout(WAIT):
            while len(self.server.connections) != 1:
                await asyncio.sleep(0)
        return next(iter(self.server.connections))

    async def empty(self) -> None:
        async with asyncio.timeout(WAIT):
            while self.server.connections:
                await asyncio.sleep(0)


@asynccontextmanager
async def door(handler: Handler = echo, **more: Any) -> AsyncIterator[Door]:
    server = made(handler, **more)
    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    await server.listen(sock)
    try:
        yield Door(server, port)
    finally:
        await server.close(grace=0)


class Gate:
    """A handler that begins, and goes on when it is told."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.go = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def __call__(self, request: Request, out: ResponseWriter) -> None:
        self.begun.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        await echo(request, out)


async def within(event: asyncio.Event) -> None:
    async with asyncio.timeout(WAIT):
        await event.wait()
