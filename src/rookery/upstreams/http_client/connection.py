"""One HTTP/1.1 connection of the client: send a request, parse the response, and decide on reusing the connection.

Guarantees:
- a response is complete only if its framing says so: `Content-Length` is reached, the last chunk has arrived, or,
  without either, the connection was closed. Any other end raises `ConnectionDropped`, `IncompleteResponse` or
  `InvalidResponse`;
- an ambiguous response is refused: one with both `Content-Length` and `Transfer-Encoding`, with two lengths, with
  a transfer coding other than `chunked`, with another protocol, or with an upgrade;
- the size of heads and trailers, the number of interim (1xx) responses and the bytes read ahead of the caller are
  bounded;
- a connection is reused only after a complete response that keeps it alive, if the whole request was sent and no
  byte followed the response. If bytes arrive while no request is in flight, the connection is closed.
"""

import asyncio
from typing import Final, Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from rookery.upstreams.http_client.errors import ConnectionDropped, IncompleteResponse, InvalidResponse
from rookery.upstreams.http_client.headers import Headers
from rookery.upstreams.http_client.response import Response

MAX_HEAD: Final = 64 << 10
MAX_INTERIM: Final = 16
_MAX_JOINED: Final = 64 << 10  # copying a larger body to join it with the head costs more than a second call
_H: Final = ord("H")


class _Violation(Exception):  # noqa: N818  (control flow: raised in a callback, it stops the parser)
    """Raised if the response violates HTTP. The text says how, and continues the sentence in `_refuse`."""


class ConnectionOwner(Protocol):
    """Interface of a connection to the client that owns it."""

    def free(self, connection: "ClientConnection") -> None:
        """Called when the response is complete: put the connection back into the pool."""
        ...

    def ended(self, connection: "ClientConnection") -> None:
        """Called when the connection is being closed: remove it from the pool. Its socket may still be open for a
        moment."""
        ...

    def lost(self, connection: "ClientConnection") -> None:
        """Called when the socket of the connection has been closed."""
        ...


class ClientConnection(asyncio.BufferedProtocol):
    """An asyncio protocol for one connection to the server, with at most one request in flight.

    All connections of a client share the read buffer `view`. Reading stops while more than `buffer_limit` bytes of
    a response are unread.
    """

    def __init__(
        self, owner: ConnectionOwner, loop: asyncio.AbstractEventLoop, view: memoryview, buffer_limit: int
    ) -> None:
        self.loop = loop
        self.idle_since = 0.0
        """Event loop time at which the connection became idle."""
        self.used = False
        """True if a request was completed on this connection."""
        self.reset = False
        """True if the connection was closed or reset by the server, as far as the socket's error tells."""
        self._client = owner
        self._buffer_limit = buffer_limit
        self._view = view
        self.transport: asyncio.Transport | None = None
        self._parser: HttpResponseParser | None = HttpResponseParser(self)
        self._response: Response | None = None
        self._headers: dict[bytes, bytes] = {}
        self._paused = False
        self._keep_alive = False
        self._no_body = False
        self._interim = 0
        self._head_budget = 0
        self._bytes_without_body = 0

    # ---- called by the client

    @property
    def usable(self) -> bool:
        transport = self.transport
        return transport is not None and self._response is None and not transport.is_closing()

    def exchange(self, head: bytes, body: list[bytes], size: int, *, no_body: bool) -> Response:
        """Send a request, and return a response object that is filled as data arrives. The connection must be
        usable.

        `size` is the total size of `body` in bytes. With `no_body`, the response has no body, as for HEAD.
        """
        assert self.transport is not None
        assert self._response is None
        response = self._response = Response(self)
        self._headers = {}
        self._no_body = no_body
        self._interim = 0
        self._head_budget = MAX_HEAD
        self._bytes_without_body = 0
        transport = self.transport
        if size <= _MAX_JOINED:
            transport.write(b"".join((head, *body)))
        else:  # uvloop joins them into one system call
            transport.write(head)
            for part in body:
                transport.write(part)
        return response

    def drop(self) -> None:
        """Close the connection at once. If a response is in flight, the caller must end it with an error."""
        self._response = None
        self._client.ended(self)
        if self.transport is not None:
            self.transport.abort()

    def abandon(self) -> None:
        """Close the connection because its client is closed. A response in flight ends with an error."""
        response = self._response
        if response is not None:
            what = "the client was closed"
            response.fail(IncompleteResponse(what) if response.begun else ConnectionDropped(what, reused=False))
        self.drop()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            if self.transport is not None and not self.transport.is_closing():
                self.transport.resume_reading()

    # ---- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        # All connections of a loop share one buffer, because nothing runs between this and `buffer_updated`. It
        # saves a copy of every response, and the allocation of large buffers in a busy process.
        return self._view

    def buffer_updated(self, nbytes: int) -> None:
        data = self._view[:nbytes]
        response = self._response
        if response is None:  # bytes without a request would be mixed up with the next response
            self.drop()
            return
        chunks = response.chunks
        before = len(chunks)
        try:
            self._feed(response, data)
        except (_Violation, HttpParserError, HttpParserUpgrade) as error:
            self._keep_alive = False
            if not response.done:
                self._refuse(response, error)
                return
        added = len(chunks) - before
        if added > 1:  # otherwise each one-byte chunk would cost fifty bytes
            chunks[before:] = [b"".join(chunks[before:])]
        unread = response.unread
        if response.done:
            self._finish(response)
        elif not added and response.status:
            self._bytes_without_body += len(data)
            if self._bytes_without_body > MAX_HEAD:
                self._refuse(
                    response,
                    _Violation(
                        f"more than {MAX_HEAD} bytes of chunk headers or trailers arrived without body data"
                    ),
                )
                return
        else:
            self._bytes_without_body = 0
            if unread > self._buffer_limit and unread > response.need and not self._paused:
                assert self.transport is not None
                self._paused = True
                self.transport.pause_reading()
        if response.waiter is not None and response.status and (response.done or unread > response.need):
            response.wake()

    def eof_received(self) -> None:
        self.reset = True
        self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None or isinstance(exc, ConnectionError):
            self.reset = True
        self.transport = None
        self._end(exc)
        self._parser = None  # breaks a reference cycle, so that this object is freed at once
        self._client.lost(self)

    # ---- called by the parser

    def on_message_begin(self) -> None:
        response = self._response
        if response is None or response.done:
            raise _Violation("more data follows its end")

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._response is not None
        if self._response.status:  # trailers are ignored
            return
        name = name.lower()
        headers = self._headers
        headers[name] = headers[name] + b", " + value if name in headers else value

    def on_headers_complete(self) -> None:
        response, parser = self._response, self._parser
        assert response is not None
        assert parser is not None
        status = parser.get_status_code()
        version = parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise _Violation(f"its version is HTTP/{version}")
        if not 100 <= status <= 599:
            raise _Violation(f"its status is {status}")
        if status < 200:
            self._interim += 1
            self._headers = {}
            if status == 101:
                raise _Violation("it switches the protocol without a request")
            if self._interim > MAX_INTERIM:
                raise _Violation(f"more than {MAX_INTERIM} interim (1xx) responses precede it")
            return
        headers = self._headers
        length, coding = headers.get(b"content-length"), headers.get(b"transfer-encoding")
        if coding is not None:
            if length is not None:
                raise _Violation("it has both a Content-Length and a Transfer-Encoding")
            if version == "1.0" or coding.strip().lower() != b"chunked":
                raise _Violation("its Transfer-Encoding is not chunked")
        elif length is not None:
            length = length.strip()
            if not length.isdigit() or len(length) > 18:
                raise _Violation("its Content-Length is not a number")
            response.length = int(length)
        response.status = status
        response.headers = Headers(headers)
        if self._no_body or status in (204, 304):
            announced = coding is not None or (status == 204 and bool(response.length))
            response.length = 0
            # The parser handles 204 and 304, but not HEAD. If a body is announced nevertheless, the end of this
            # response is ambiguous, and the connection is closed.
            if self._no_body or announced:
                response.done = True
                raise _Violation("it must not have a body")
        elif coding is None and length is None:
            response.until_close = True

    def on_body(self, data: bytes) -> None:
        response = self._response
        assert response is not None
        response.chunks.append(data)
        response.unread += len(data)

    def on_message_complete(self) -> None:
        response, parser = self._response, self._parser
        assert response is not None
        assert parser is not None
        if response.status:  # otherwise it was an interim response
            response.done = True
            self._keep_alive = parser.should_keep_alive()

    # ---- internal

    def _feed(self, response: Response, data: memoryview) -> None:
        parser = self._parser
        assert parser is not None
        headed = response.status
        if headed:
            parser.feed_data(data)
            return
        if not response.begun:
            response.begun = True
            if data[0] != _H:  # the parser accepts other protocols too, and skips blank lines
                raise _Violation("it does not start like an HTTP response")
        budget = self._head_budget
        if len(data) <= budget:
            self._head_budget = budget - len(data)
            parser.feed_data(data)
            return
        parser.feed_data(data[:budget])
        if not response.status:
            raise _Violation(f"its head is longer than {MAX_HEAD} bytes")
        parser.feed_data(data[budget:])

    def _refuse(self, response: Response, error: Exception) -> None:
        inner = error if isinstance(error, _Violation) else error.__context__
        if isinstance(inner, _Violation):
            reason = str(inner)
        elif inner is not None:
            raise inner  # a bug in this package: the event loop logs it and closes the connection
        elif isinstance(error, HttpParserUpgrade):
            reason = "it switches the protocol without a request"
        else:
            reason = str(error)  # llhttp's message, which quotes nothing
        response.fail(InvalidResponse(f"the response is not valid HTTP: {reason}"))
        self.drop()

    def _finish(self, response: Response) -> None:
        transport = self.transport
        assert transport is not None
        self._response = response.connection = None
        self.resume()  # TLS may deliver decrypted data while reading is paused
        # If the response arrived before the whole request was sent, the rest will never be sent.
        if self._keep_alive and not transport.is_closing() and not transport.get_write_buffer_size():
            self.used = True
            self._client.free(self)
        else:
            self.drop()

    def _end(self, exc: Exception | None) -> None:
        """End the response in flight after the connection was closed.

        The response is complete if the end of the connection marks the end of its body; otherwise it gets an
        error.
        """
        response = self._response
        if response is not None:
            if response.status and response.until_close and exc is None and self.reset:
                response.done = True
                response.connection = None
                response.wake()
            elif response.begun:
                response.fail(
                    IncompleteResponse(f"the connection was closed in the middle of the response{_reason(exc)}")
                )
            else:
                what = f"the connection was closed before a response arrived{_reason(exc)}"
                response.fail(ConnectionDropped(what, reused=self.used))
        self.drop()


def _reason(exc: Exception | None) -> str:
    text = str(getattr(exc, "strerror", None) or "")[:200]
    return f" ({text})" if text else ""
