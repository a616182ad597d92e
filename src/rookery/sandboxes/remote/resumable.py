"""A byte stream that survives broken connections. Both ends of a link to a sandbox host run this code.

Each end keeps the bytes that the other end has not acknowledged. When the connection breaks, the process that uses
the sandboxes opens another one. Each end then says how many bytes it has received, and the other end sends what
follows again.

Guarantees:
- every byte arrives once and in order, no matter when and how often connections break;
- an end keeps at most `BUFFER_BYTES` to send them again; after that, writers wait for acknowledgements;
- if no connection can be opened in time, reading and writing fail;
- an end that closes the stream says so, and the other end does not wait for another connection.
"""

import asyncio
import contextlib
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from rookery.core import SandboxError
from rookery.core.errors import describe
from rookery.core.lifetimes import detached_context
from rookery.sandboxes.remote.link import Connection, HostLost, MachineGone

T = TypeVar("T")

RESUME_SECONDS: Final = 30.0
"""A stream that has had no connection for this long is lost."""
BUFFER_BYTES: Final = 4 << 20
PART_BYTES: Final = 64 << 10
ACK_BYTES: Final = 256 << 10
"""Received bytes are acknowledged with the next bytes that are sent, and at the latest after this many."""
HANDSHAKE_SECONDS: Final = 10.0
CLOSE_SECONDS: Final = 2.0
MIN_WAIT: Final = 0.1
"""Delay before a failed attempt to open a connection is repeated. It doubles up to `MAX_WAIT`."""
MAX_WAIT: Final = 2.0
_HEADER = struct.Struct(">IQ")
"""Header of each frame: its number of bytes, and how many bytes the sender of the frame has received in total."""
_CLOSING: Final = 0xFFFFFFFF
"""Number of bytes in the header that closes the stream."""

Reopen = Callable[[], Awaitable[Connection | None]]
"""Opens another connection. Returns None if the program at the other end has ended. Raises `MachineGone` if its
machine does not exist any more, and another error if it may answer later."""


class ResumableConnection:
    """A `Connection` that continues on another connection when its own breaks. Use one reader and one writer."""

    def __init__(self, connection: Connection, reopen: Reopen, *, seconds: float) -> None:
        """Use `connection` until it breaks; then call `reopen`, again and again for up to `seconds`."""
        self._latest = connection
        self._connected = True
        self._reopen = reopen
        self._seconds = seconds
        self._unsent: deque[bytes] = deque()
        self._unacked: deque[bytes] = deque()
        self._acked = self._kept = 0
        """Number of sent bytes that the other end has, and number of bytes in the two queues."""
        self._received = self._reported = 0
        """Number of bytes that arrived, and how many of them were acknowledged."""
        self._buffer = bytearray()
        self._changed = asyncio.Event()
        self._sending = asyncio.Lock()
        self._sending_task: asyncio.Task[None] | None = None
        self._waiting: set[asyncio.Task[object]] = set()
        """Tasks that wait for the current connection. `disconnect` removes and interrupts them."""
        self._closed = False

    # ---- writing

    async def write(self, data: bytes) -> None:
        """Send all of `data`. Return early while there is no connection and the buffer is not full."""
        for at in range(0, len(data), PART_BYTES):
            while self._kept >= BUFFER_BYTES and not self._closed:
                self._changed.clear()
                await self._changed.wait()
            if self._closed:
                raise BrokenPipeError("the connection is closed")
            part = data[at : at + PART_BYTES]
            self._unsent.append(part)
            self._kept += len(part)
            await self._send_frames()

    async def _send_frames(self) -> None:
        """Send the queued bytes, and an acknowledgement if it is due, over the current connection."""
        async with self._sending:
            while self._connected and (self._unsent or self._received - self._reported >= ACK_BYTES):
                part = b""
                if self._unsent:
                    part = self._unsent.popleft()
                    self._unacked.append(part)
                self._reported = self._received
                connection = self._latest
                try:
                    await self._wait(connection.write(_HEADER.pack(len(part), self._received) + part))
                except (OSError, SandboxError):
                    if connection is self._latest:
                        self.disconnect()

    def _start_sending(self) -> None:
        if self._sending_task is None or self._sending_task.done():
            self._sending_task = asyncio.get_running_loop().create_task(
                self._send_frames(), context=detached_context()
            )

    # ---- reading

    async def read(self) -> bytes:
        """Return the next bytes, or `b""` after the other end closed the stream.

        Raise `OSError` if the program at the other end has ended, `MachineGone` if its machine is gone, `HostLost`
        if no other connection could be opened in time, and `ValueError` for invalid frames.
        """
        while not (data := self._take_received()):
            if self._closed:
                return b""
            data = await self._read_connection() if self._connected else b""
            if data:
                self._buffer += data
            else:
                await self._reconnect()
        return data

    async def _read_connection(self) -> bytes:
        """Return bytes of the current connection, or `b""` if it broke or `disconnect` was called."""
        try:
            return await self._wait(self._latest.read())
        except (OSError, SandboxError):
            return b""

    def _take_received(self) -> bytes:
        """Remove all complete frames from the buffer and return their contents."""
        at, parts = 0, []
        while len(self._buffer) - at >= _HEADER.size and not self._closed:
            size, count = _HEADER.unpack_from(self._buffer, at)
            start = at + _HEADER.size
            if size == _CLOSING:
                self._set_closed()
                break
            if size > PART_BYTES:
                raise ValueError("a frame is too large")
            if len(self._buffer) - start < size:
                break
            self._drop_acknowledged(count)
            at = start + size
            parts.append(bytes(self._buffer[start:at]))
            self._received += size
        del self._buffer[:at]
        if self._received - self._reported >= ACK_BYTES:
            self._start_sending()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _drop_acknowledged(self, count: int) -> None:
        """Forget what the other end has received. Raise `ValueError` unless it received whole frames."""
        while self._acked < count and self._unacked:
            size = len(self._unacked.popleft())
            self._acked += size
            self._kept -= size
        if self._acked != count:
            raise ValueError("an acknowledgement is wrong")
        self._changed.set()

    # ---- connections

    def disconnect(self) -> None:
        """Stop using the current connection; `read` continues with another one."""
        self._connected = False
        while self._waiting:
            self._waiting.pop().cancel()

    async def _wait(self, work: Awaitable[T]) -> T:
        """Await an operation of the current connection. Raise `OSError` if `disconnect` interrupts it."""
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)
        try:
            return await work
        except asyncio.CancelledError:
            if task in self._waiting or task.uncancel():
                raise
            raise ConnectionResetError("the connection was given up") from None
        finally:
            self._waiting.discard(task)

    async def _reconnect(self) -> None:
        self._connected = False
        self._buffer.clear()
        wait, reason = MIN_WAIT, "the connection broke"
        try:
            async with asyncio.timeout(self._seconds):
                await _close(self._latest)
                while True:
                    try:
                        connection = await self._reopen()
                        if connection is None:
                            reason = "the program at the other end has ended"
                        else:
                            await self._resume(connection)
                    except MachineGone:
                        raise
                    except (OSError, SandboxError) as error:
                        reason = describe(error)
                    else:
                        break
                    await asyncio.sleep(wait)
                    wait = min(MAX_WAIT, 2 * wait)
        except TimeoutError:
            raise HostLost(f"no new connection could be opened within {self._seconds:g} s: {reason}") from None
        finally:
            if not self._connected:
                self._set_closed()
        if not self._connected:
            raise ConnectionResetError(reason)

    async def _resume(self, connection: Connection) -> None:
        """Exchange the numbers of received bytes over a new connection, and send the rest again."""
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await connection.write(_HEADER.pack(0, self._received))
                while len(self._buffer) < _HEADER.size:
                    data = await connection.read()
                    if not data:
                        raise ConnectionResetError("the new connection broke")
                    self._buffer += data
            size, count = _HEADER.unpack_from(self._buffer)
            if size != _CLOSING:
                self._drop_acknowledged(count)
        except BaseException:
            self._buffer.clear()
            await _close(connection)
            raise
        self._reported = self._received
        self._unsent.extendleft(reversed(self._unacked))
        self._unacked.clear()
        self._latest, self._connected = connection, True
        self._start_sending()

    # ---- end

    def _set_closed(self) -> None:
        self._closed = True
        self._changed.set()

    async def close(self) -> None:
        """Tell the other end that the stream is closed, and close the connection."""
        self._set_closed()
        if self._sending_task is not None:
            self._sending_task.cancel()
            await asyncio.wait({self._sending_task})
        if self._connected:
            with contextlib.suppress(OSError, SandboxError, TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS), self._sending:
                    await self._latest.write(_HEADER.pack(_CLOSING, self._received))
        await self._latest.close()


async def _close(connection: Connection) -> None:
    with contextlib.suppress(OSError, SandboxError):
        await connection.close()
