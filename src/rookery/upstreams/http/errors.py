"""Exceptions of the HTTP client, by how far a request came.

Guarantees:
- `ConnectError`: nothing was sent; `ConnectionDropped`: the request was sent and no byte came back;
  `IncompleteResponse`: the response ended in the middle; `InvalidResponse`: the response cannot be trusted;
- messages come from the operating system, the TLS library or this package. They never quote what was sent, or a
  header or body that was received.
"""

from typing import Literal, TypeAlias

ConnectErrorReason: TypeAlias = Literal["refused", "name", "timeout", "tls", "network", "closed"]
"""Why there is no connection. Waiting does not help against `tls`; `closed` means that the client was closed."""


class HttpClientError(Exception):
    """Base class: a request got no complete response."""


class ConnectError(HttpClientError):
    """No connection could be opened, so nothing was sent."""

    def __init__(self, reason: ConnectErrorReason, message: str) -> None:
        super().__init__(message)
        self.reason: ConnectErrorReason = reason


class ConnectionDropped(HttpClientError):  # noqa: N818  (says what happened)
    """The connection was closed before any byte of a response. The server may have read the request or not."""

    def __init__(self, message: str, *, reused: bool) -> None:
        super().__init__(message)
        self.reused = reused
        """Whether the connection was used before: then it was probably closed before this request was sent."""


class IncompleteResponse(HttpClientError):  # noqa: N818
    """The connection was closed in the middle of a response."""


class InvalidResponse(HttpClientError):  # noqa: N818
    """The response is not HTTP, contradicts itself or is too long."""


class ResponseTooLong(InvalidResponse):
    """The body is longer than the caller allows."""
