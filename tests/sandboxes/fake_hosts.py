"""Hosts for the network `allow`, without a packet to any: names and addresses that lead to listeners here."""

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from rookery.sandboxes.egress.proxy import EgressProxy, Resolver
from rookery.sandboxes.egress.rules import Address, EgressRules

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
GOOD, OTHER = "93.184.216.34", "93.184.216.35"


class Mapped(Resolver):
    """Each address is one here, or refuses."""

    def __init__(self, names: dict[str, list[str]], ports: dict[str, int]) -> None:
        super().__init__()
        self.names = names
        self.ports = ports
        self.asked: list[str] = []
        self.dialled: list[tuple[str, int]] = []

    def look_up(self, name: str, port: int) -> list[Address]:
        self.asked.append(name)
        if name not in self.names:
            raise socket.gaierror(-2, "Name or service not known")
        return [ipaddress.ip_address(text) for text in self.names[name]]

    async def dial(self, address: Address, port: int) -> socket.socket:
        self.dialled.append((str(address), port))
        if str(address) not in self.ports:
            raise ConnectionRefusedError(111, "Connection refused")
        return await super().dial(ipaddress.ip_address("127.0.0.1"), self.ports[str(address)])


class Site:
    """A server that answers every request in the same way and keeps what it heard."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.heard = b""
        self.port = 0

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heard += await reader.readuntil(b"\r\n\r\n")
        writer.write(self.answer)
        await writer.drain()
        if b"hold" not in self.answer:
            writer.write_eof()
        while data := await reader.read(65536):
            self.heard += data
        writer.close()


@asynccontextmanager
async def served(talk: Talk) -> AsyncIterator[int]:
    """The port of a server on the host's loopback."""
    writers: set[asyncio.StreamWriter] = set()

    async def on_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        try:
            await talk(reader, writer)
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
async def proxy(outside: Resolver, *rules: str) -> AsyncIterator[tuple[EgressProxy, int]]:
    """One that serves a listener of the host, and its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    made = EgressProxy(listener, EgressRules.parse(rules), "box", outside)
    made.start()
    try:
        yield made, listener.getsockname()[1]
    finally:
        await made.close()


async def asked(port: int, data: bytes, *, eof: bool = False) -> bytes:
    """All that is answered, until the other side ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        if eof:
            writer.write_eof()
        said = b""
        try:
            while chunk := await reader.read(65536):
                said += chunk
        except ConnectionResetError:
            pass
        return said
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
async def site() -> AsyncIterator[Site]:
    made = Site(ok("hello"))
    async with served(made.talk) as port:
        made.port = port
        yield made


@pytest.fixture
def outside(site: Site) -> Mapped:
    return Mapped(NAMES, {GOOD: site.port})


def get(url: str, host: str, more: str = "") -> bytes:
    return f"GET {url} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n".encode()


def socks(host: str, port: int) -> bytes:
    return b"\x05\x01\x00\x05\x01\x00\x03" + bytes((len(host),)) + host.encode() + port.to_bytes(2, "big")


def connect(host: str, port: int) -> bytes:
    return f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()
