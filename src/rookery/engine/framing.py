"""Send msgpack messages over a socket: length-prefixed frames, one write per iteration of the event loop.

Used between the supervisor and its runners, and between an engine and `RemoteEngine`.
"""

import asyncio
import struct
from collections.abc import Callable
from typing import Any, cast

import msgspec

from rookery.core import RookeryError

MAX_FRAME = 256 << 20
"""Maximum size of a frame in bytes. A longer frame is refused before its content is read."""
_LENGTH = struct.Struct("<I")
encoder = msgspec.msgpack.Encoder()


class FramingError(RookeryError):
    """A message to send or a received frame is longer than allowed."""


def encode_frame(message: object) -> bytes:
    """Return a message as one frame: its length in four bytes (little endian), then its msgpack encoding."""
    data = encoder.encode(message)
    return _LENGTH.pack(len(data)) + data


class FramedConnection(asyncio.Protocol):
    """An asyncio protocol that sends and receives msgpack messages in frames.

    `on_message` gets each decoded message, and `on_lost` is called when the connection is lost. `before_write` is
    called before each write to the socket, to flush data to disk that the messages refer to.
    """

    def __init__(
        self,
        decoder: "msgspec.msgpack.Decoder[Any]",
        on_message: Callable[[Any], None],
        on_lost: Callable[[BaseException | None], None],
        before_write: Callable[[], None] | None = None,
    ) -> None:
        self._decode = decoder.decode
        self._on_message = on_message
        self._on_lost = on_lost
        self._before_write = before_write
        self.limit = MAX_FRAME
        """Maximum size in bytes of a frame that is accepted from the peer."""
        self._received = bytearray()
        self._unsent: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._flush_scheduled = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def send(self, message: object, *, limit: int | None = None) -> None:
        """Queue a message. All messages of one iteration of the event loop are sent in one write, in order.

        Raises `FramingError` if the encoded message is longer than `limit` bytes.
        """
        data = encoder.encode(message)
        if limit is not None and len(data) > limit:
            raise FramingError(f"a message of {len(data):,} bytes cannot be sent: the limit is {limit:,} bytes")
        self._unsent.append(_LENGTH.pack(len(data)))
        self._unsent.append(data)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self.flush)

    def drop_unsent(self) -> None:
        """Discard the queued messages that were not written to the socket yet."""
        self._unsent.clear()

    def flush(self) -> None:
        self._flush_scheduled = False
        if not self._unsent or self._transport is None or self._transport.is_closing():
            return
        if self._before_write is not None:
            self._before_write()
        unsent, self._unsent = self._unsent, []
        self._transport.write(b"".join(unsent))

    def data_received(self, data: bytes) -> None:
        buffer = self._received
        buffer += data
        at, size = 0, len(buffer)
        with memoryview(buffer) as view:
            while size - at >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(view, at)
                if length > self.limit:
                    raise FramingError(f"the peer sent {length:,} bytes in one frame; the limit is {self.limit:,}")
                if size - at - _LENGTH.size < length:
                    break
                with view[at + _LENGTH.size : at + _LENGTH.size + length] as frame:
                    message = self._decode(frame)
                at += _LENGTH.size + length
                self._on_message(message)
        if at:
            del buffer[:at]

    def connection_lost(self, exc: BaseException | None) -> None:
        self._transport = None
        self._on_lost(exc)

    def close(self) -> None:
        """Send the queued messages, then close the connection."""
        if self._transport is not None:
            self.flush()
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once and discard what was not sent, for a peer that may never read it."""
        if self._transport is not None:
            self._transport.abort()
