"""Exceptions of the HTTP client. The class says how far the request came.

Guarantees:
- `ConnectError`: nothing was sent; `ConnectionDropped`: the request was sent and no byte came back;
  `IncompleteResponse`: the response ended in the middle; `InvalidResponse`: the response cannot be trusted;
- messages come from the operating system, the TLS library or this package. They never quote what was sent, or a
  header or body that was received.
"""

from typing import Literal, TypeAlias

ConnectErrorReason: TypeAlias = Literal["refused", "name", "timeout", "tls", "network", "closed"]
"""The reason why no connection was opened. `name`: the host name cannot be resolved. `tls`: the TLS handshake
failed, which a retry does not change. `closed`: the client was closed."""


class HttpClientError(Exception):
    """Base class of the errors of requests that got no complete response."""


class ConnectError(HttpClientError):
    """No connection could be opened, so nothing was sent."""

    def __init__(self, reason: ConnectErrorReason, message: str) -> None:
        super().__init__(message)
        self.reason: ConnectErrorReason = reason


class ConnectionDropped(HttpClientError):  # noqa: N818  (says what happened)
    """The connection was closed before any byte of a response arrived. The server may or may not have read the
    request."""

    def __init__(self, message: str, *, reused: bool) -> None:
        super().__init__(message)
        self.reused = reused
        """True if an earlier request used the connection. Then the server had probably closed it before this
        request."""


class IncompleteResponse(HttpClientError):  # noqa: N818
    """The connection was closed after a part of the response had arrived."""


class InvalidResponse(HttpClientError):  # noqa: N818
    """The response is not HTTP, contradicts itself or is too long."""


class ResponseTooLong(InvalidResponse):
    """The body of the response is longer than the limit that the caller set."""
