"""Requests and answers of the gateway's doors, as what works for them sees them.

Promises:
- an answer is complete, or it is disconnect off and its reader sees that something is missing: never neither;
- what is written waits for a slow reader, and ends with one who is gone.
"""

import time
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import msgspec

if TYPE_CHECKING:
    from rookery.gateway.server import Connection

REASONS: Final = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
JSON: Final = b"application/json"
FORWARDED_HEADER: Final = "x-rookery-forwarded"
"""Header of a request that another shard forwards, so that it is not forwarded again."""
EVENT_STREAM: Final = b"text/event-stream; charset=utf-8"


Disconnect: TypeAlias = Literal["closed", "stalled"]
"""How a client ends a connection: it closes it, or takes nothing until the server gives up."""


class Request(msgspec.Struct, gc=False):
    """One request, whole."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    """By names in lower case; of repeated ones the last."""
    body: bytes
    session: str
    """The session that this listener belongs to; empty at the door that is open to all."""
    route: Any = None
    """What the head of it led to."""
    owner: str = ""
    """The session that the connection and the bytes of the body are counted for; empty: nobody's."""


class HttpError(Exception):
    """A request that is not wanted: what to answer instead of reading on."""

    def __init__(self, status: int, body: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status
        self.body = body
        self.headers = headers


Handler = Callable[[Request, "ResponseWriter"], Awaitable[None]]
AdmitRequest = Callable[[Request], int]
"""The most bytes that the body of a request with this head may have; raises `HttpError`."""


class ResponseWriter:
    """The answer to one request: complete with `send`, or begun, written and ended."""

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
        """A complete answer."""
        assert not self.begun
        self.begun = self.done = True
        self._keep = self._keep and not close
        head = self._head(status, kind, headers)
        head += b"content-length: %d\r\n\r\n" % len(body)
        self._connection.write(head if self._head_only or not body else head + body)
        self._connection.finish_response(keep=self._keep)

    def begin(self, status: int, kind: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        assert not self.begun
        self.begun = True
        if not self._chunked:
            self._keep = False
        head = self._head(status, kind, headers)
        self._connection.write(head + (b"transfer-encoding: chunked\r\n\r\n" if self._chunked else b"\r\n"))

    async def write(self, data: bytes) -> None:
        """Waits while the reader is behind; cancelled once it is given up."""
        if not data or self._head_only:
            return
        self._connection.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        if self._connection.write_blocked is not None:
            await self._connection.wait_writable()

    def end(self, last: bytes = b"") -> None:
        """The last piece and the end, in one."""
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
        """Whether there is nobody left to answer."""
        return self._connection.gone

    @property
    def disconnect(self) -> Disconnect | None:
        """How the client ended the connection; None while it is open, and where this server is shutting down."""
        if not self._connection.gone or self._connection.server.stopping:
            return None
        return "stalled" if self._connection.stalled else "closed"

    def abort(self) -> None:
        """An answer that cannot be completed is disconnect off: its reader sees that something is missing."""
        self.done = True
        self._connection.abort()

    def _head(self, status: int, kind: bytes, headers: tuple[tuple[bytes, bytes], ...]) -> bytes:
        if self._connection.server.stopping:
            self._keep = False
        parts = [REASONS[status], b"content-type: ", kind, b"\r\ndate: ", _date(), b"\r\n"]
        for name, value in headers:
            parts += (name, b": ", value, b"\r\n")
        if not self._keep:
            parts.append(b"connection: close\r\n")
        return b"".join(parts)


_dated: tuple[int, bytes] = (0, b"")


def _date() -> bytes:
    global _dated  # noqa: PLW0603  (one clock for all)
    now = int(time.time())
    if now != _dated[0]:
        _dated = (now, formatdate(now, usegmt=True).encode())
    return _dated[1]


def read_error_message(body: bytes) -> str:
    """Return the message of an error response of the gateway; of any other body, its beginning."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError, KeyError):
        return body[:200].decode("utf-8", "replace")
