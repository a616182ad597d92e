"""HTTP requests and responses, as the request handlers of the gateway's server see them. Runs in gateway shards.

Guarantees:
- a response is complete, or the connection is aborted so that the client sees that the response is incomplete;
- a write waits for a slow client, and is cancelled when the client disconnects.
"""

import time
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import msgspec

if TYPE_CHECKING:
    from rookery.gateway.server import Connection

STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
JSON: Final = b"application/json"
FORWARDED_HEADER: Final = "x-rookery-forwarded"
"""Header of a request that another shard forwards, so that it is not forwarded again."""
EVENT_STREAM: Final = b"text/event-stream; charset=utf-8"


Disconnect: TypeAlias = Literal["closed", "stalled"]
"""How a client ended a connection: it closed it, or it stopped reading until the server gave up."""


class Request(msgspec.Struct, gc=False):
    """A complete HTTP request."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    """By lower-case name. Of a repeated header, the last value."""
    body: bytes
    session: str
    """The session that the listener serves; empty for the public listener."""
    route: Any = None
    """Set by `admit`, for use by the handler."""
    owner: str = ""
    """The session whose quota the connection and the body count against; empty if not known."""


class HttpError(Exception):
    """Rejects a request with a status, a body and headers."""

    def __init__(self, status: int, body: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status
        self.body = body
        self.headers = headers


Handler = Callable[[Request, "ResponseWriter"], Awaitable[None]]
AdmitRequest = Callable[[Request], int]
"""Called with the head of a request. Returns the maximum size of its body in bytes, or raises `HttpError`."""


class ResponseWriter:
    """Writes the response to one request: complete with `send`, or in parts with `begin`, `write` and `end`."""

    __slots__ = ("_chunked", "_connection", "_head_only", "_keep", "begun", "done")

    def __init__(self, connection: "Connection", *, keep: bool, chunked: bool, head_only: bool) -> None:
        self._connection = connection
        self._keep = keep
        self._chunked = chunked
        self._head_only = head_only
        self.begun = False
        self.done = False

    def send(
        self,
        status: int,
        body: bytes = b"",
        kind: bytes = JSON,
        headers: tuple[tuple[bytes, bytes], ...] = (),
        *,
        close: bool = False,
    ) -> None:
        """Send a complete response."""
        assert not self.begun
        self.begun = self.done = True
        self._keep = self._keep and not close
        head = self._head(status, kind, headers)
        head += b"content-length: %d\r\n\r\n" % len(body)
        self._connection.write(head if self._head_only or not body else head + body)
        self._connection.finish_response(keep=self._keep)

    def begin(self, status: int, kind: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        """Start a response whose body is written in parts."""
        assert not self.begun
        self.begun = True
        if not self._chunked:
            self._keep = False
        head = self._head(status, kind, headers)
        self._connection.write(head + (b"transfer-encoding: chunked\r\n\r\n" if self._chunked else b"\r\n"))

    async def write(self, data: bytes) -> None:
        """Write a part of the body, and wait while the client is slow. Cancelled if the client disconnects."""
        if not data or self._head_only:
            return
        self._connection.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        if self._connection.write_blocked is not None:
            await self._connection.wait_writable()

    def end(self, last: bytes = b"") -> None:
        """Write the last part of the body and end the response."""
        assert self.begun
        assert not self.done
        self.done = True
        if self._chunked:
            last = b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last) if last else b"0\r\n\r\n"
        if last and not self._head_only:
            self._connection.write(last)
        self._connection.finish_response(keep=self._keep)

    @property
    def gone(self) -> bool:
        """Whether the client has disconnected."""
        return self._connection.gone

    @property
    def disconnect(self) -> Disconnect | None:
        """How the client ended the connection; None if it is open or the server is shutting down."""
        if not self._connection.gone or self._connection.server.stopping:
            return None
        return "stalled" if self._connection.stalled else "closed"

    def abort(self) -> None:
        """Abort the connection, so that the client sees that the response is incomplete."""
        self.done = True
        self._connection.abort()

    def _head(self, status: int, kind: bytes, headers: tuple[tuple[bytes, bytes], ...]) -> bytes:
        if self._connection.server.stopping:
            self._keep = False
        parts = [STATUS_LINES[status], b"content-type: ", kind, b"\r\ndate: ", _date(), b"\r\n"]
        for name, value in headers:
            parts += (name, b": ", value, b"\r\n")
        if not self._keep:
            parts.append(b"connection: close\r\n")
        return b"".join(parts)


_cached_date: tuple[int, bytes] = (0, b"")


def _date() -> bytes:
    """Return the value of the `Date` header, formatted once per second."""
    global _cached_date  # noqa: PLW0603
    now = int(time.time())
    if now != _cached_date[0]:
        _cached_date = (now, formatdate(now, usegmt=True).encode())
    return _cached_date[1]


def read_error_message(body: bytes) -> str:
    """Return the message of an error response of the gateway; of any other body, its beginning."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError, KeyError):
        return body[:200].decode("utf-8", "replace")
