"""The byte stream between a process and its sandbox host, over connections that break."""

import asyncio
import contextlib
import random
import struct

import pytest

from rookery.sandboxes.remote import resumable
from rookery.sandboxes.remote.link import Connection, HostLost
from rookery.sandboxes.remote.resumable import ResumableConnection
from tests.waiting import wait_until


class Wire:
    """One end of a connection in memory. It breaks after a number of bytes, also in the middle of a write."""

    def __init__(self, choices: random.Random, left: list[float]) -> None:
        self._choices = choices
        self._left = left
        self.incoming: asyncio.Queue[bytes] = asyncio.Queue()
        self.peer: Wire = self
        self.closed = False

    @classmethod
    def pair(cls, choices: random.Random, lifetime: float) -> "tuple[Wire, Wire]":
        left = [lifetime]
        one, other = cls(choices, left), cls(choices, left)
        one.peer, other.peer = other, one
        return one, other

    async def read(self) -> bytes:
        return b"" if self.closed and self.incoming.empty() else await self.incoming.get()

    async def write(self, data: bytes) -> None:
        while data:
            await asyncio.sleep(0)
            size = self._choices.choice((1, 100, 1 << 15, 1 << 20))
            part, data = data[: int(min(size, self._left[0]))], data[size:]
            self._left[0] -= len(part)
            if part and not self.closed:
                self.peer.incoming.put_nowait(part)
            if self._left[0] <= 0:
                await self.close()
                raise BrokenPipeError

    async def close(self) -> None:
        for end in (self, self.peer):
            end.closed = True
            end.incoming.put_nowait(b"")


@pytest.mark.parametrize("seed", range(20))
async def test_every_byte_arrives_once_although_connections_break(seed: int) -> None:
    choices = random.Random(seed)
    arrived: asyncio.Queue[Connection] = asyncio.Queue()
    broken = 0

    def lifetime() -> float:
        return choices.choice((5, 40, 3_000, 200_000, 1 << 20)) if broken < 40 else float("inf")

    async def reopen() -> Connection:
        nonlocal broken
        broken += 1
        if choices.random() < 0.2:
            raise ConnectionRefusedError
        one, other = Wire.pair(choices, lifetime())
        arrived.put_nowait(other)
        host.disconnect()
        return one

    one, other = Wire.pair(choices, lifetime())
    client = ResumableConnection(one, reopen, seconds=60.0)
    host = ResumableConnection(other, arrived.get, seconds=60.0)
    sent = {end: [choices.randbytes(choices.randrange(1, 300_000)) for _ in range(30)] for end in (client, host)}

    received = {client: bytearray(), host: bytearray()}

    async def write(end: ResumableConnection) -> None:
        for data in sent[end]:
            await end.write(data)

    async def read(end: ResumableConnection) -> None:
        while True:  # an end must read until it is closed, as a link does
            received[end] += await end.read()
            assert end._kept <= resumable.BUFFER_BYTES + resumable.PART_BYTES

    readers = [asyncio.ensure_future(read(end)) for end in (client, host)]
    async with asyncio.timeout(60):
        await asyncio.gather(write(client), write(host))
        for end, other_end in ((client, host), (host, client)):
            expected = sum(map(len, sent[other_end]))
            await wait_until(lambda end=end, expected=expected: len(received[end]) >= expected)
            assert received[end] == b"".join(sent[other_end])
    assert broken
    for reader in readers:
        reader.cancel()
    await asyncio.wait(readers)
    await client.close()
    await host.close()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable, "MIN_WAIT", 0.001)
    monkeypatch.setattr(resumable, "MAX_WAIT", 0.001)


async def never() -> Connection:
    raise ConnectionRefusedError


class DeadWire(Wire):
    """A connection on which nothing arrives. Writing to it never ends."""

    async def write(self, data: bytes) -> None:
        await asyncio.Event().wait()


async def test_writer_of_a_silent_connection_continues_on_the_next_one() -> None:
    choices, left = random.Random(1), [float("inf")]
    arrived: asyncio.Queue[Connection] = asyncio.Queue()

    async def reopen() -> Connection:
        one, other = Wire.pair(choices, float("inf"))
        arrived.put_nowait(other)
        return one

    client = ResumableConnection(DeadWire(choices, left), reopen, seconds=60.0)
    host = ResumableConnection(DeadWire(choices, left), arrived.get, seconds=60.0)
    reading = asyncio.ensure_future(client.read())
    writing = asyncio.ensure_future(client.write(b"kept"))
    while len(client._waiting) < 2:
        await asyncio.sleep(0)
    client.disconnect()
    host.disconnect()
    async with asyncio.timeout(60):
        assert await host.read() == b"kept"
        await writing
        await host.write(b"answer")
        assert await reading == b"answer"
    await client.close()
    await host.close()


async def test_stream_ends_when_no_connection_can_be_opened_in_time() -> None:
    one, _ = Wire.pair(random.Random(1), 10.0)
    stream = ResumableConnection(one, never, seconds=0.05)
    writing = asyncio.ensure_future(stream.write(bytes(2 * resumable.BUFFER_BYTES)))
    async with asyncio.timeout(60):
        with pytest.raises(HostLost):
            await stream.read()
        with pytest.raises(BrokenPipeError):
            await writing
    await stream.close()


async def test_stream_ends_at_once_when_the_other_end_closes_it_or_is_gone() -> None:
    async def gone() -> None:
        return None

    one, other = Wire.pair(random.Random(1), float("inf"))
    client, host = (ResumableConnection(end, gone, seconds=600.0) for end in (one, other))
    await host.write(b"last")
    await host.close()
    async with asyncio.timeout(60):
        assert [await client.read(), await client.read()] == [b"last", b""]
    await client.close()
    one, other = Wire.pair(random.Random(1), float("inf"))
    client = ResumableConnection(one, gone, seconds=600.0)
    await other.close()
    async with asyncio.timeout(60):
        with pytest.raises(OSError):
            await client.read()
    await client.close()


@pytest.mark.parametrize("header", [(1 << 20, 0), (0, 1)], ids=["too large", "acknowledges what was not sent"])
async def test_frames_that_break_the_rules_are_refused(header: tuple[int, int]) -> None:
    one, other = Wire.pair(random.Random(1), float("inf"))
    stream = ResumableConnection(one, never, seconds=60.0)
    with contextlib.suppress(BrokenPipeError):
        await other.write(struct.pack(">IQ", *header))
    async with asyncio.timeout(60):
        with pytest.raises(ValueError):
            await stream.read()
    await stream.close()
