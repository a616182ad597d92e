"""One answer as it comes in: its head, then its body whole or in pieces.

Promises:
- `read` and `chunk` never return the end of an answer that did not end: they raise `Broken` or `BadAnswer`;
- what is unread is bounded: beyond it the socket is not read until the caller has taken something;
- `close`, and cancelling a wait at any point, drop the connection: engines learn to abort from that;
- a complete answer has already given its connection back: closing it afterwards harms nobody.
"""

from asyncio import Future
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from rookery.upstreams.http.failures import Broken, HttpFailure, TooLong
from rookery.upstreams.http.headers import Headers

if TYPE_CHECKING:
    from rookery.upstreams.http.connection import Connection

_HEAD: Final = -1


class Response:
    """An answer. Made by `Client.send`, which returns it when its head is complete."""

    __slots__ = (
        "begun",
        "connection",
        "done",
        "error",
        "headers",
        "length",
        "need",
        "pieces",
        "status",
        "taken",
        "unread",
        "until_close",
        "waiter",
    )

    def __init__(self, connection: "Connection") -> None:
        self.status = 0
        self.headers: Headers = _NO_HEADERS
        self.length: int | None = None
        """The length of the whole body, where the server announced it."""
        self.until_close = False
        """The body ends where the connection does: one that ended early looks complete."""
        # The rest is between this and its connection.
        self.connection: Connection | None = connection
        self.begun = False
        self.done = False
        self.error: HttpFailure | None = None
        self.pieces: list[bytes] = []
        self.unread = 0
        self.taken = 0
        self.need = 0
        self.waiter: Future[None] | None = None

    async def read(self, limit: int, *, cut: bool = False) -> bytes:
        """The rest of the body. One longer than `limit` raises `TooLong`, or is cut there; either drops the
        connection as soon as it is known."""
        if not cut and self.length is not None and self.length - self.taken > limit and self.error is None:
            self.close()
            raise TooLong(f"the answer is longer than {limit} bytes: it announces {self.length}")
        while self.unread <= limit and not self.done and self.error is None:
            await self.wait(limit)
        if self.unread > limit:
            body = self._take()
            self.close()
            if cut:
                return body[:limit]
            raise TooLong(f"the answer is longer than {limit} bytes")
        if self.error is not None:
            raise self.error
        return self._take()

    async def chunk(self) -> bytes:
        """What has arrived and was not taken yet, waiting for it if need be; b"" at the end of the answer."""
        if not self.unread and not self.done and self.error is None:
            await self.wait(0)
        if self.unread:
            return self._take()
        if self.error is not None:
            raise self.error
        return b""

    def close(self) -> None:
        """Gives the answer up. Before its end this drops the connection."""
        connection = self.connection
        if (connection is not None or self.unread) and self.error is None:
            self.error = Broken("the answer was given up before its end")
        self.connection = None
        self.pieces.clear()
        self.unread = 0
        if connection is not None:
            connection.drop()
            self.wake()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- between this and its connection

    async def head(self) -> None:
        """Returns when the head is complete."""
        if not self.status and self.error is None:
            await self.wait(_HEAD)
        if self.error is not None and not self.status:
            raise self.error

    async def wait(self, need: int) -> None:
        """Returns when more than `need` bytes are unread after a complete head, or nothing more will come."""
        if self.waiter is not None:
            raise RuntimeError("two tasks read the same response")
        connection = self.connection
        if connection is None:  # it ended or failed, and the callers look at that first
            raise RuntimeError("the response has ended")
        self.need = need
        waiter = self.waiter = connection.loop.create_future()
        connection.resume()
        try:
            await waiter
        except BaseException:
            self.close()
            raise
        finally:
            self.waiter = None
            self.need = 0

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def fail(self, error: HttpFailure) -> None:
        """Ends it without an end: what came before can still be taken."""
        self.connection = None
        if not self.done and self.error is None:
            self.error = error
        self.wake()

    def _take(self) -> bytes:
        pieces = self.pieces
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self.taken += self.unread
        self.unread = 0
        return data


_NO_HEADERS: Final = Headers({})
