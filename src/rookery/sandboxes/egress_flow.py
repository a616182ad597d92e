"""Bytes between two sockets, a piece at a time, on the owner's loop.

Promises:
- no more than a piece of each direction is in memory: who does not read, is not read for;
- after every piece the loop has its turn: a box that sends as fast as it can slows its own connection alone;
- a side that is done sending is told to the other, which may go on.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable

from rookery.sandboxes import egress_wire as wire

PIECE = 32 << 10
HEAD = 32 << 10
LINE = 1 << 10
TRAILERS = 8 << 10
LINGER_SECONDS = 1.0
_LINGER_BYTES = 1 << 20

Count = Callable[[int], None]


class Gone(Exception):  # noqa: N818  (not a failure)
    """The other side ended in the middle of something."""


class Flow:
    """A socket with what was read of it too early."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._loop = asyncio.get_running_loop()
        self._early = bytearray()

    async def first(self) -> int:
        """The first byte, which stays to be read."""
        await self._more()
        return self._early[0]

    async def until(self, end: bytes, most: int) -> bytes:
        """What comes before `end`, which is taken too."""
        start = 0
        while (at := self._early.find(end, start)) < 0:
            if len(self._early) > most:
                raise wire.Bad(431, f"more than {most} bytes, and no end")
            start = max(0, len(self._early) - len(end) + 1)
            await self._more()
        if at > most:
            raise wire.Bad(431, f"more than {most} bytes")
        found = bytes(self._early[:at])
        del self._early[: at + len(end)]
        return found

    async def exactly(self, count: int) -> bytes:
        while len(self._early) < count:
            await self._more()
        found = bytes(self._early[:count])
        del self._early[:count]
        return found

    async def some(self, most: int = PIECE) -> bytes:
        """Up to so many bytes; none at the end."""
        if self._early:
            found = bytes(self._early[:most])
            del self._early[:most]
        else:
            found = await self._loop.sock_recv(self.sock, min(most, PIECE))
        await asyncio.sleep(0)  # a socket that is always ready would never let go of the loop
        return found

    async def say(self, data: bytes) -> None:
        await self._loop.sock_sendall(self.sock, data)

    def done(self) -> None:
        """Nothing more comes from us."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    async def parting(self, words: bytes = b"") -> None:
        """Ends so that our last words arrive: what is closed with bytes unread is reset."""
        with contextlib.suppress(OSError):  # a TimeoutError is one
            async with asyncio.timeout(LINGER_SECONDS):
                await self.say(words)
                self.done()
                left = _LINGER_BYTES
                self._early.clear()
                while left > 0 and (data := await self.some()):
                    left -= len(data)

    async def _more(self) -> None:
        data = await self._loop.sock_recv(self.sock, PIECE)
        await asyncio.sleep(0)
        if not data:
            raise Gone
        self._early += data


async def pump(source: Flow, sink: Flow, count: Count) -> None:
    """All that comes, then that it ended."""
    while data := await source.some():
        await sink.say(data)
        count(len(data))
    sink.done()


async def body(source: Flow, sink: Flow, length: int, count: Count) -> None:
    """One body: so many bytes, or by its chunks, or to the end."""
    if length == wire.CHUNKED:
        await _chunks(source, sink, count)
        return
    while length:
        data = await source.some(length if length > 0 else PIECE)
        if not data:
            if length > 0:
                raise Gone
            return
        await sink.say(data)
        count(len(data))
        length -= len(data) if length > 0 else 0


async def _chunks(source: Flow, sink: Flow, count: Count) -> None:
    while size := wire.chunk(await source.until(b"\r\n", LINE)):
        while size:
            data = await source.some(size)
            if not data:
                raise Gone
            size -= len(data)
            await sink.say(b"%x\r\n%b\r\n" % (len(data), data))
            count(len(data))
        if await source.exactly(2) != b"\r\n":
            raise wire.Bad(400, "a chunk is longer than it said")
    left = TRAILERS
    while line := await source.until(b"\r\n", LINE):
        left -= len(line)
        if left < 0:
            raise wire.Bad(431, "too many trailers")
    await sink.say(b"0\r\n\r\n")
