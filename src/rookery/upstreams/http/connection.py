"""One connection: a request out, its answer in, and the question whether it can be used again.

Promises:
- a complete answer is one whose framing said so: `Content-Length` reached, last chunk seen, or, where neither is
  announced, the end of the connection; everything else that ends is `Dropped`, `Broken` or `BadAnswer`;
- contradictions are refused, not interpreted: both lengths, two lengths, a transfer coding that is not `chunked`,
  another protocol, an upgrade;
- heads, interim answers and trailers are bounded, and so is what is read ahead of the caller;
- a connection is given back only after a complete answer that keeps it alive, with nothing unsent and nothing
  received beyond the answer; bytes that nobody asked for end it.
"""

import asyncio
from typing import Final, Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from rookery.upstreams.http.failures import BadAnswer, Broken, Dropped
from rookery.upstreams.http.headers import Headers
from rookery.upstreams.http.response import Response

MAX_HEAD: Final = 64 << 10
MAX_INTERIM: Final = 16
_JOINED: Final = 64 << 10  # above it, copying a body to send it in one call costs more than a second call
_H: Final = ord("H")


class _Refusal(Exception):  # noqa: N818  (a signal through the parser, which stops at it)
    """Raised in a callback of the parser. Its text is the reason."""


class Owner(Protocol):
    """Where connections come from and go back to."""

    def free(self, connection: "Connection") -> None:
        """It can be used again."""
        ...

    def ended(self, connection: "Connection") -> None:
        """It cannot be used again; its socket may be open for a moment yet."""
        ...

    def lost(self, connection: "Connection") -> None:
        """Its socket is closed."""
        ...


class Connection(asyncio.BufferedProtocol):
    """One connection, with at most one exchange on it."""

    __slots__ = (
        "_bodiless",
        "_bound",
        "_headers",
        "_interim",
        "_keep",
        "_owner",
        "_parser",
        "_paused",
        "_quiet",
        "_response",
        "_room",
        "_transport",
        "_view",
        "loop",
        "reset",
        "since",
        "used",
    )

    def __init__(self, owner: Owner, loop: asyncio.AbstractEventLoop, view: memoryview, bound: int) -> None:
        self.loop = loop
        self.since = 0.0
        """When it became idle."""
        self.used = False
        """Whether an exchange was complete on it."""
        self.reset = False
        """Whether the server ended it, rather than the network or this side."""
        self._owner = owner
        self._bound = bound
        self._view = view
        self._transport: asyncio.Transport | None = None
        self._parser: HttpResponseParser | None = HttpResponseParser(self)
        self._response: Response | None = None
        self._headers: dict[bytes, bytes] = {}
        self._paused = False
        self._keep = False
        self._bodiless = False
        self._interim = 0
        self._room = 0
        self._quiet = 0

    # ---- for the client

    @property
    def usable(self) -> bool:
        transport = self._transport
        return transport is not None and self._response is None and not transport.is_closing()

    def exchange(self, head: bytes, body: list[bytes], size: int, *, bodiless: bool) -> Response:
        """Sends a request; its answer is the one that is returned. The connection must be usable."""
        assert self._transport is not None
        assert self._response is None
        response = self._response = Response(self)
        self._headers = {}
        self._bodiless = bodiless
        self._interim = 0
        self._room = MAX_HEAD
        self._quiet = 0
        transport = self._transport
        if size <= _JOINED:
            transport.write(b"".join((head, *body)))
        else:  # uvloop gathers them into one call by itself
            transport.write(head)
            for part in body:
                transport.write(part)
        return response

    def drop(self) -> None:
        """Ends it at once. An answer under way is its caller's to fail."""
        self._response = None
        self._owner.ended(self)
        if self._transport is not None:
            self._transport.abort()

    def abandon(self) -> None:
        """Ends it because its client is closed."""
        response = self._response
        if response is not None:
            what = "the client was closed"
            response.fail(Broken(what) if response.begun else Dropped(what, reused=False))
        self.drop()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()

    # ---- for the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        # One for all connections of a loop: between this and `buffer_updated` the loop does nothing else. It saves
        # a copy of every answer, and memory that a busy process gets from the system and gives back at each.
        return self._view

    def buffer_updated(self, nbytes: int) -> None:
        data = self._view[:nbytes]
        response = self._response
        if response is None:  # it belongs to no request of ours: the next answer could not be told from it
            self.drop()
            return
        pieces = response.pieces
        before = len(pieces)
        try:
            self._feed(response, data)
        except (_Refusal, HttpParserError, HttpParserUpgrade) as error:
            self._keep = False
            if not response.done:
                self._refuse(response, error)
                return
        added = len(pieces) - before
        if added > 1:  # chunks of one byte each must not cost fifty bytes each
            pieces[before:] = [b"".join(pieces[before:])]
        unread = response.unread
        if response.done:
            self._finish(response)
        elif not added and response.status:
            self._quiet += len(data)
            if self._quiet > MAX_HEAD:
                self._refuse(response, _Refusal(f"more than {MAX_HEAD} bytes contained no body data"))
                return
        else:
            self._quiet = 0
            if unread > self._bound and unread > response.need and not self._paused:
                assert self._transport is not None
                self._paused = True
                self._transport.pause_reading()
        if response.waiter is not None and response.status and (response.done or unread > response.need):
            response.wake()

    def eof_received(self) -> None:
        self.reset = True
        self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None or isinstance(exc, ConnectionError):
            self.reset = True
        self._transport = None
        self._end(exc)
        self._parser = None  # it holds this object, which would be freed late otherwise
        self._owner.lost(self)

    # ---- for the parser

    def on_message_begin(self) -> None:
        response = self._response
        if response is None or response.done:
            raise _Refusal("data follows the response")

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._response is not None
        if self._response.status:  # a trailer: nothing in it is for us
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
            raise _Refusal(f"its version is HTTP/{version}")
        if not 100 <= status <= 599:
            raise _Refusal(f"its status is {status}")
        if status < 200:
            self._interim += 1
            self._headers = {}
            if status == 101:
                raise _Refusal("it switches the protocol without a request")
            if self._interim > MAX_INTERIM:
                raise _Refusal(f"there are more than {MAX_INTERIM} interim answers")
            return
        headers = self._headers
        length, coding = headers.get(b"content-length"), headers.get(b"transfer-encoding")
        if coding is not None:
            if length is not None:
                raise _Refusal("it has both a length and a transfer coding")
            if version == "1.0" or coding.strip().lower() != b"chunked":
                raise _Refusal("its transfer coding is not plain chunked")
        elif length is not None:
            length = length.strip()
            if not length.isdigit() or len(length) > 18:
                raise _Refusal("its length is not a number")
            response.length = int(length)
        response.status = status
        response.headers = Headers(headers)
        if self._bodiless or status in (204, 304):
            told = coding is not None or (status == 204 and bool(response.length))
            response.length = 0
            # The parser knows of 204 and 304, not of HEAD. Where a body is told of all the same, the end of this
            # answer could not be told from the beginning of the next: the connection ends.
            if self._bodiless or told:
                response.done = True
                raise _Refusal("it has no body")
        elif coding is None and length is None:
            response.until_close = True

    def on_body(self, data: bytes) -> None:
        response = self._response
        assert response is not None
        response.pieces.append(data)
        response.unread += len(data)

    def on_message_complete(self) -> None:
        response, parser = self._response, self._parser
        assert response is not None
        assert parser is not None
        if response.status:  # else it was an interim answer
            response.done = True
            self._keep = parser.should_keep_alive()

    # ---- inside

    def _feed(self, response: Response, data: memoryview) -> None:
        parser = self._parser
        assert parser is not None
        headed = response.status
        if headed:
            parser.feed_data(data)
            return
        if not response.begun:
            response.begun = True
            if data[0] != _H:  # the parser knows other protocols too, and skips blank lines
                raise _Refusal("it does not start like an HTTP response")
        room = self._room
        if len(data) <= room:
            self._room = room - len(data)
            parser.feed_data(data)
            return
        parser.feed_data(data[:room])
        if not response.status:
            raise _Refusal(f"its head is longer than {MAX_HEAD} bytes")
        parser.feed_data(data[room:])

    def _refuse(self, response: Response, error: Exception) -> None:
        inner = error if isinstance(error, _Refusal) else error.__context__
        if isinstance(inner, _Refusal):
            reason = str(inner)
        elif inner is not None:
            raise inner  # a fault of this package: the event loop shows it and ends the connection
        elif isinstance(error, HttpParserUpgrade):
            reason = "it switches the protocol without a request"
        else:
            reason = str(error)  # llhttp's own words, which quote nothing
        response.fail(BadAnswer(f"the answer is not valid HTTP: {reason}"))
        self.drop()

    def _finish(self, response: Response) -> None:
        transport = self._transport
        assert transport is not None
        self._response = response.connection = None
        self.resume()  # TLS may hand over the end while it is paused, having decrypted it before
        # An answer that came before the request was sent whole leaves a request that nobody will finish.
        if self._keep and not transport.is_closing() and not transport.get_write_buffer_size():
            self.used = True
            self._owner.free(self)
        else:
            self.drop()

    def _end(self, exc: Exception | None) -> None:
        """The server, the network or this side ended the connection."""
        response = self._response
        if response is not None:
            if response.status and response.until_close and exc is None and self.reset:
                response.done = True
                response.connection = None
                response.wake()
            elif response.begun:
                response.fail(Broken(f"the connection ended in the middle of the answer{_reason(exc)}"))
            else:
                what = f"the connection ended before an answer came{_reason(exc)}"
                response.fail(Dropped(what, reused=self.used))
        self.drop()


def _reason(exc: Exception | None) -> str:
    text = str(getattr(exc, "strerror", None) or "")[:200]
    return f" ({text})" if text else ""
