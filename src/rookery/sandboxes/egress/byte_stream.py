"""Copy bytes between a sandbox's connection and a host's, for the egress proxy. Runs in the sandbox's owner.

Guarantees:
- at most one block per direction is in memory: a slow reader slows its sender;
- the event loop runs other tasks after every block: a sandbox that sends continuously slows only its own
  connection;
- when a sender closes its direction, the receiver sees that end, and the other direction may continue.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable

from rookery.sandboxes.egress import messages

BLOCK_BYTES = 32 << 10
MAX_HEAD_BYTES = 32 << 10
MAX_LINE_BYTES = 1 << 10
MAX_TRAILER_BYTES = 8 << 10
LINGER_SECONDS = 1.0
_LINGER_BYTES = 1 << 20

Count = Callable[[int], None]


class StreamEnded(Exception):  # noqa: N818  (not a failure)
    """The peer closed the connection in the middle of a message."""


class ByteStream:
    """A non-blocking socket with a buffer for received data that is not consumed yet."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()

    async def peek(self) -> int:
        """Wait for data and return the next byte without consuming it."""
        await self._fill()
        return self._buffer[0]

    async def read_until(self, end: bytes, limit: int) -> bytes:
        """Return the data before the delimiter `end`, and consume both.

        Raise `BadRequest` if the delimiter does not occur within `limit` bytes.
        """
        start = 0
        while (at := self._buffer.find(end, start)) < 0:
            if len(self._buffer) > limit:
                raise messages.BadRequest(431, f"the head of the message does not end within {limit} bytes")
            start = max(0, len(self._buffer) - len(end) + 1)
            await self._fill()
        if at > limit:
            raise messages.BadRequest(431, f"the head of the message is longer than {limit} bytes")
        found = bytes(self._buffer[:at])
        del self._buffer[: at + len(end)]
        return found

    async def read_exactly(self, count: int) -> bytes:
        while len(self._buffer) < count:
            await self._fill()
        found = bytes(self._buffer[:count])
        del self._buffer[:count]
        return found

    async def read_some(self, limit: int = BLOCK_BYTES) -> bytes:
        """Wait for data and return up to `limit` bytes; b"" at the end of the stream."""
        if self._buffer:
            found = bytes(self._buffer[:limit])
            del self._buffer[:limit]
        else:
            found = await self._loop.sock_recv(self.sock, min(limit, BLOCK_BYTES))
        await asyncio.sleep(0)  # a socket that is always ready would never yield to the event loop
        return found

    async def send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self.sock, data)

    def shut_down_sending(self) -> None:
        """Shut down the sending direction of the socket, so that the peer sees the end of the stream."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    async def close_gracefully(self, data: bytes = b"") -> None:
        """Send `data`, shut down sending, then discard what still arrives, all within `LINGER_SECONDS`.

        Closing a socket with unread data would reset the connection, and the peer could lose `data`.
        """
        with contextlib.suppress(OSError):  # a `TimeoutError` is an `OSError`
            async with asyncio.timeout(LINGER_SECONDS):
                await self.send(data)
                self.shut_down_sending()
                left = _LINGER_BYTES
                self._buffer.clear()
                while left > 0 and (data := await self.read_some()):
                    left -= len(data)

    async def _fill(self) -> None:
        data = await self._loop.sock_recv(self.sock, BLOCK_BYTES)
        await asyncio.sleep(0)
        if not data:
            raise StreamEnded
        self._buffer += data


async def copy_all(source: ByteStream, sink: ByteStream, count: Count) -> None:
    """Copy until the source ends, then shut down the sending direction of the sink.

    `count` is called with the size of each block.
    """
    while data := await source.read_some():
        await sink.send(data)
        count(len(data))
    sink.shut_down_sending()


async def copy_body(source: ByteStream, sink: ByteStream, length: int, count: Count) -> None:
    """Copy one HTTP body. `length` is its number of bytes, `CHUNKED` or `UNTIL_CLOSE`."""
    if length == messages.CHUNKED:
        await _copy_chunks(source, sink, count)
        return
    while length:
        data = await source.read_some(length if length > 0 else BLOCK_BYTES)
        if not data:
            if length > 0:
                raise StreamEnded
            return
        await sink.send(data)
        count(len(data))
        length -= len(data) if length > 0 else 0


async def _copy_chunks(source: ByteStream, sink: ByteStream, count: Count) -> None:
    while size := messages.parse_chunk_size(await source.read_until(b"\r\n", MAX_LINE_BYTES)):
        while size:
            data = await source.read_some(size)
            if not data:
                raise StreamEnded
            size -= len(data)
            await sink.send(b"%x\r\n%b\r\n" % (len(data), data))
            count(len(data))
        if await source.read_exactly(2) != b"\r\n":
            raise messages.BadRequest(400, "a chunk is longer than its size line says")
    left = MAX_TRAILER_BYTES
    while line := await source.read_until(b"\r\n", MAX_LINE_BYTES):
        left -= len(line)
        if left < 0:
            raise messages.BadRequest(431, "the trailers of the chunked body are too long")
    await sink.send(b"0\r\n\r\n")
