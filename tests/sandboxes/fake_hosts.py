"""Fake hosts for the network `allow`: names and addresses that lead to listeners of this process."""

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from rookery.sandboxes.egress.proxy import EgressProxy, Resolver
from rookery.sandboxes.egress.rules import Address, EgressRules

ConnectionHandler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
GOOD, OTHER = "93.184.216.34", "93.184.216.35"


class FakeResolver(Resolver):
    """Resolver whose addresses lead to ports of the loopback, or refuse connections."""

    def __init__(self, names: dict[str, list[str]], ports: dict[str, int]) -> None:
        super().__init__()
        self.names = names
        self.ports = ports
        self.names_resolved: list[str] = []
        self.dialled: list[tuple[str, int]] = []

    def look_up(self, name: str, port: int) -> list[Address]:
        self.names_resolved.append(name)
        if name not in self.names:
            raise socket.gaierror(-2, "Name or service not known")
        return [ipaddress.ip_address(text) for text in self.names[name]]

    async def dial(self, address: Address, port: int) -> socket.socket:
        self.dialled.append((str(address), port))
        if str(address) not in self.ports:
            raise ConnectionRefusedError(111, "Connection refused")
        return await super().dial(ipaddress.ip_address("127.0.0.1"), self.ports[str(address)])


class FakeSite:
    """Server that sends the same response to every request and records what it received."""

    def __init__(self, response: bytes) -> None:
        self.response = response
        self.received = b""
        self.port = 0

    async def respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.received += await reader.readuntil(b"\r\n\r\n")
        writer.write(self.response)
        await writer.drain()
        if b"hold" not in self.response:
            writer.write_eof()
        while data := await reader.read(65536):
            self.received += data
        writer.close()


@asynccontextmanager
async def serve(handle: ConnectionHandler) -> AsyncIterator[int]:
    """Run a server on the host's loopback; yield its port."""
    writers: set[asyncio.StreamWriter] = set()

    async def on_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        try:
            await handle(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(on_client, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()


@asynccontextmanager
async def open_proxy(resolver: Resolver, *rules: str) -> AsyncIterator[tuple[EgressProxy, int]]:
    """Open a proxy on a listener of the host; yield it and its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    made = EgressProxy(listener, EgressRules.parse(rules), "sandbox", resolver)
    made.start()
    try:
        yield made, listener.getsockname()[1]
    finally:
        await made.close()


async def exchange(port: int, data: bytes, *, eof: bool = False) -> bytes:
    """Send data to a port of the loopback; return the response until the end of the stream."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        if eof:
            writer.write_eof()
        response = b""
        try:
            while chunk := await reader.read(65536):
                response += chunk
        except ConnectionResetError:
            pass
        return response
    finally:
        writer.close()


def ok(text: str) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()


NAMES = {
    "good.test": [GOOD],
    "other.test": [OTHER],
    "inside.test": ["127.0.0.1"],
    "private.test": ["10.0.0.7", "fd00::7"],
    "metadata.test": ["169.254.169.254"],
    "both.test": ["10.0.0.7", GOOD],
    "dead.test": [OTHER],
    "empty.test": [],
}


@pytest.fixture
async def site() -> AsyncIterator[FakeSite]:
    made = FakeSite(ok("hello"))
    async with serve(made.respond) as port:
        made.port = port
        yield made


@pytest.fixture
def resolver(site: FakeSite) -> FakeResolver:
    return FakeResolver(NAMES, {GOOD: site.port})


def http_get(url: str, host: str, more: str = "") -> bytes:
    return f"GET {url} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n".encode()


def socks_connect(host: str, port: int) -> bytes:
    return b"\x05\x01\x00\x05\x01\x00\x03" + bytes((len(host),)) + host.encode() + port.to_bytes(2, "big")


def http_connect(host: str, port: int) -> bytes:
    return f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()
