"""HTTP requests and responses of the gateway's HTTP server, for its request handlers. Runs in gateway shards.

Guarantees:
- a response is complete, or the connection is aborted so that the client sees that the response is incomplete;
- `ResponseWriter.write` waits for a slow client, and is cancelled when the client disconnects.
"""

import time
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import msgspec

if TYPE_CHECKING:
    from rookery.gateway.server import HttpConnection

STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
JSON: Final = b"application/json"
FORWARDED_HEADER: Final = "x-rookery-forwarded"
"""Header that marks a request as forwarded by another shard, so that it is not forwarded again."""
EVENT_STREAM: Final = b"text/event-stream; charset=utf-8"


Disconnect: TypeAlias = Literal["closed", "stalled"]
"""The end of a client's connection: `closed` by the client, or by the server because the client did not read
(`stalled`)."""


class Request(msgspec.Struct, gc=False):
    """An HTTP request. `body` is empty until the request is complete and is passed to its handler."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    """Values by lower-case header name. If a header is repeated, only its last value is kept."""
    body: bytes
    session: str
    """ID of the session that the listener serves; empty for a listener that serves all sessions."""
    route: Any = None
    """Set by the server's `AdmitRequest` callback, for use by the handler."""
    owner: str = ""
    """ID of the session against whose quota the connection and the body count; empty if it is not known."""


class HttpError(Exception):
    """Raised to reject a request. Carries the status, body and headers of the response."""

    def __init__(self, status: int, body: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status
        self.body = body
        self.headers = headers


Handler = Callable[[Request, "ResponseWriter"], Awaitable[None]]
AdmitRequest = Callable[[Request], int]
"""Called before the body of a request is read. Returns the maximum size of the body in bytes, or raises
`HttpError` to reject the request."""


class ResponseWriter:
    """Writes the response to one request: complete with `send`, or in parts with `begin`, `write` and `end`."""

    __slots__ = ("_chunked", "_connection", "_head_only", "_keep", "begun", "done")

    def __init__(self, connection: "HttpConnection", *, keep: bool, chunked: bool, head_only: bool) -> None:
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
        """Send a complete response. `kind` is its content type; `close` closes the connection afterwards."""
        assert not self.begun
        self.begun = self.done = True
        self._keep = self._keep and not close
        head = self._head(status, kind, headers)
        head += b"content-length: %d\r\n\r\n" % len(body)
        self._connection.write(head if self._head_only or not body else head + body)
        self._connection.finish_response(keep=self._keep)

    def begin(self, status: int, kind: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        """Send the head of a response whose body is written in parts. `kind` is its content type."""
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
        """True if the client has disconnected."""
        return self._connection.gone

    @property
    def disconnect(self) -> Disconnect | None:
        """The end of the connection; None while it is open, and while the server is shutting down."""
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
    """Return the message in the body of an error response of the gateway.

    For a body in another format, return its first 200 bytes as text.
    """
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError, KeyError):
        return body[:200].decode("utf-8", "replace")
