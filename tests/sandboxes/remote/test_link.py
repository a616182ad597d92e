"""The link between a process and the program that runs its sandboxes, with an end that breaks the rules."""

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from rookery.core import SandboxSpec
from rookery.sandboxes import Command
from rookery.sandboxes.remote import HostLost, client, link
from rookery.sandboxes.remote.client import RemoteHost


class FakeHost:
    """The other end of a connection: frames are read and sent by the test."""

    def __init__(self) -> None:
        self._sent: asyncio.Queue[bytes] = asyncio.Queue()
        self._received: asyncio.Queue[list[Any]] = asyncio.Queue()

    async def read(self) -> bytes:
        return await self._sent.get()

    async def write(self, data: bytes) -> None:
        while data:
            (size,) = struct.unpack_from(">I", data)
            self._received.put_nowait(msgspec.msgpack.decode(data[4 : 4 + size]))
            data = data[4 + size :]

    async def close(self) -> None:
        pass

    async def receive(self) -> list[Any]:
        async with asyncio.timeout(60):
            return await self._received.get()

    def send(self, kind: int, number: int, value: Any) -> None:
        body = msgspec.msgpack.encode((kind, number, value))
        self._sent.put_nowait(struct.pack(">I", len(body)) + body)


@pytest.fixture
async def fake() -> FakeHost:
    return FakeHost()


@pytest.fixture
async def host(fake: FakeHost) -> AsyncIterator[RemoteHost]:
    made = RemoteHost(fake, "fake", "fake")
    yield made
    await made.link.close()


async def test_sandbox_that_was_created_during_a_cancellation_is_closed(fake: FakeHost, host: RemoteHost) -> None:
    creating = asyncio.create_task(host.create(SandboxSpec(), attempt="a", timeout=60.0))
    kind, number, (method, _) = await fake.receive()
    assert (kind, method) == (link.CALL, "create")
    creating.cancel()
    assert await fake.receive() == [link.CANCEL, number, None]
    fake.send(link.RESULT, number, {"id": "late", "url": "", "shared": False})
    with pytest.raises(asyncio.CancelledError):
        await creating
    kind, number, (method, arguments) = await fake.receive()
    assert (kind, method, arguments) == (link.CALL, "close", ["late"])
    fake.send(link.RESULT, number, None)


@pytest.mark.parametrize(
    "frames",
    [
        [(link.DATA, 3, bytes(link.CHUNK_BYTES))] * 10,
        [(link.DATA, 3, "text")],
        [(link.CALL, 3, ("connect", "x"))],
        [(link.CALL, 5, ("connect", "x"))],
        [(link.EVENT, 0, ("x", 1, 2))],
        [(link.ERROR, 3, ("os", 1, 2, "x"))],
        [(link.CREDIT, 3, "much")],
    ],
    ids=["window", "text", "own number", "future number", "event", "error", "credit"],
)
async def test_frames_that_break_the_rules_end_the_connection(
    frames: list[tuple[int, int, Any]], fake: FakeHost, host: RemoteHost
) -> None:
    call = asyncio.create_task(host.link.call("hello"))
    await fake.receive()
    for frame in frames:
        fake.send(*frame)
    async with asyncio.timeout(60):
        with pytest.raises(HostLost):
            await call


async def test_silent_connection_is_opened_again_and_its_loss_is_charged_to_the_host(
    fake: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "PING_SECONDS", 0.001)
    monkeypatch.setattr(link, "STALL_SECONDS", 0.01)
    monkeypatch.setattr(link, "SILENCE_SECONDS", 600.0)
    disconnected: list[bool] = []
    monkeypatch.setattr(FakeHost, "disconnect", lambda _: disconnected.append(True), raising=False)
    host = RemoteHost(fake, "fake", "fake", cause="sandbox.lost")
    waiting = asyncio.ensure_future(host.greet())
    async with asyncio.timeout(60):
        while not disconnected:
            await fake.receive()
        for _ in range(3):  # pings, also of the time after that
            await fake.receive()
        monkeypatch.setattr(link, "SILENCE_SECONDS", 0.0)
        with pytest.raises(HostLost) as caught:
            await waiting
    assert (caught.value.code, disconnected) == ("sandbox.host", [True])
    await host.link.close()


async def test_start_of_a_process_has_a_deadline(
    fake: FakeHost, host: RemoteHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "START_SECONDS", 0.01)
    monkeypatch.setattr(client, "GRACE_SECONDS", 0.01)
    monkeypatch.setattr(link, "CANCEL_SECONDS", 0.01)
    sandbox = host.add(SandboxSpec(), {"id": "silent", "url": "", "shared": False})
    async with asyncio.timeout(60):
        with pytest.raises(HostLost):
            await sandbox.start(Command(argv=("true",)))
    kind, number, (method, _) = await fake.receive()
    assert (kind, method) == (link.CALL, "start")
    assert await fake.receive() == [link.CANCEL, number, None]
