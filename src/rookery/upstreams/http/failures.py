"""How an exchange fails: four kinds, told apart by how far it came.

Promises:
- `NotConnected`: nothing was sent; `Dropped`: it was sent and not one byte came back; `Broken`: the answer ended
  in the middle; `BadAnswer`: what came is not an answer that can be trusted;
- the words of a failure come from the operating system, the TLS library or this package: nothing that was sent
  and no header or body that was received is ever quoted in them.
"""

from typing import Literal, TypeAlias

Why: TypeAlias = Literal["refused", "name", "timeout", "tls", "network", "closed"]
"""Why there is no connection. `tls` does not pass by waiting; `closed` means the client was closed."""


class HttpFailure(Exception):  # noqa: N818  (a base: its kinds say what failed)
    """An exchange that gave no complete answer."""


class NotConnected(HttpFailure):
    """No connection: nothing of the request was sent."""

    def __init__(self, why: Why, message: str) -> None:
        super().__init__(message)
        self.why: Why = why


class Dropped(HttpFailure):
    """The connection ended before any byte of an answer came. The server may have read the request, or not."""

    def __init__(self, message: str, *, reused: bool) -> None:
        super().__init__(message)
        self.reused = reused
        """Whether the connection had served an exchange before: then it had likely ended before it was used."""


class Broken(HttpFailure):
    """The connection ended in the middle of an answer."""


class BadAnswer(HttpFailure):
    """What came is not HTTP, contradicts itself, or is longer than it may be."""


class TooLong(BadAnswer):
    """The body is longer than the caller takes."""
