"""A response whose head has arrived, and whose body is read as a whole or in chunks.

Guarantees:
- `read` and `chunk` never treat an incomplete response as complete: they raise `IncompleteResponse` or
  `InvalidResponse`;
- the number of unread bytes is bounded: above the client's buffer limit, the socket is not read until the caller
  reads;
- `close`, and cancelling a wait at any point, close the connection, which makes inference engines abort the call;
- a complete response has already returned its connection to the pool, so closing it later has no effect.
"""

from asyncio import Future
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import msgspec

from rookery.upstreams.http_client.errors import HttpClientError, IncompleteResponse, ResponseTooLong
from rookery.upstreams.http_client.headers import Headers

if TYPE_CHECKING:
    from rookery.upstreams.http_client.connection import ClientConnection

_HEAD: Final = -1


_NO_HEADERS: Final = Headers({})


class Response(msgspec.Struct, eq=False):
    """An HTTP response. `Client.send` returns it as soon as its status and headers have arrived."""

    connection: "ClientConnection | None"
    status: int = 0
    headers: Headers = _NO_HEADERS
    length: int | None = None
    """The length of the whole body in bytes; None if the server did not announce it."""
    until_close: bool = False
    """True if the end of the connection marks the end of the body. A body that was cut off then looks complete."""
    # The following attributes are shared with the connection.
    begun: bool = False
    done: bool = False
    error: HttpClientError | None = None
    chunks: list[bytes] = []
    unread: int = 0
    consumed: int = 0
    need: int = 0
    waiter: Future[None] | None = None

    async def read(self, limit: int, *, cut: bool = False) -> bytes:
        """Return the rest of the body.

        If the rest is longer than `limit` bytes, close the connection at once and raise `ResponseTooLong` or, with
        `cut`, return the first `limit` bytes. Raises `IncompleteResponse` or `InvalidResponse` if the body is not
        complete.
        """
        if not cut and self.length is not None and self.length - self.consumed > limit and self.error is None:
            self.close()
            raise ResponseTooLong(f"the body of the response is longer than {limit} bytes: it has {self.length}")
        while self.unread <= limit and not self.done and self.error is None:
            await self.wait(limit)
        if self.unread > limit:
            body = self._take()
            self.close()
            if cut:
                return body[:limit]
            raise ResponseTooLong(
                f"the body of the response is longer than {limit} bytes, which is the caller's limit"
            )
        if self.error is not None:
            raise self.error
        return self._take()

    async def chunk(self) -> bytes:
        """Return the unread bytes of the body that have arrived, waiting for some if there are none.

        Returns b"" at the end of the response.
        """
        if not self.unread and not self.done and self.error is None:
            await self.wait(0)
        if self.unread:
            return self._take()
        if self.error is not None:
            raise self.error
        return b""

    def close(self) -> None:
        """Discard the unread part of the response. If the response has not fully arrived, close its connection."""
        connection = self.connection
        if (connection is not None or self.unread) and self.error is None:
            self.error = IncompleteResponse("the response was closed before its end")
        self.connection = None
        self.chunks.clear()
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

    # ---- called by the client and the connection

    async def head(self) -> None:
        """Wait until the status and headers have arrived. Raises the error if the response fails before that."""
        if not self.status and self.error is None:
            await self.wait(_HEAD)
        if self.error is not None and not self.status:
            raise self.error

    async def wait(self, need: int) -> None:
        """Wait until the head and more than `need` unread bytes of the body have arrived, or the response has
        ended."""
        if self.waiter is not None:
            raise RuntimeError("two tasks read the same HTTP response at the same time")
        connection = self.connection
        if connection is None:  # callers check for the end and for errors first
            raise RuntimeError("cannot wait for more of an HTTP response that has ended")
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

    def fail(self, error: HttpClientError) -> None:
        """End the response with an error, unless it is complete. Bytes that arrived before can still be read."""
        self.connection = None
        if not self.done and self.error is None:
            self.error = error
        self.wake()

    def _take(self) -> bytes:
        chunks = self.chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self.consumed += self.unread
        self.unread = 0
        return data
