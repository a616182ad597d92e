"""The dialect protocol: parse a client's request into a `ClientRequest`, and format replies for the client.

Every dialect guarantees:
- it is pure: bytes in, bytes out; it opens no socket and keeps no timer;
- a field that changes the meaning of a request is supported or rejected with `BadRequestError`, never ignored.
  Each dialect lists the fields of its provider that it ignores because they change nothing. An unknown field is
  dropped with a warning in the log;
- every error has the format that the provider's client library expects;
- equal messages are equal in every dialect, so that a history is recognised whichever dialect sends it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from rookery.core import Message, RookeryError
from rookery.upstreams.protocol import DecodeTokens, Delta, ModelReply, ModelRequest

ErrorKind: TypeAlias = Literal[
    "bad_request", "thread", "unauthorized", "not_found", "method", "gone", "conflict", "too_large", "truncated",
    "context", "unavailable", "timeout", "upstream", "internal",
]  # fmt: skip
"""The kind of an error, independent of the dialect."""


class BadRequestError(RookeryError):
    """The client's request is invalid or not supported; `where` names the field."""

    def __init__(self, message: str, where: str | None = None, problem: ErrorKind = "bad_request") -> None:
        super().__init__(message, cause="upstream.rejected")
        self.where = where
        self.problem: ErrorKind = problem


class ClientRequest(ModelRequest, frozen=True, kw_only=True):
    """A model call as an HTTP client requests it: the call itself, and how the client wants the reply.

    Messages and tools in the chat format stay the client's JSON: most of them were parsed in an earlier turn."""

    prompts: tuple[bytes | str, ...] = ()
    """Instead of messages: token IDs (int32), or texts to tokenise."""
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    """Whether a stream ends with token counts."""
    return_token_ids: bool = False
    """Whether the client requests token IDs."""
    reply_id: str = ""
    """The ID of the reply, if the client can refer to it later."""
    previous_id: str = ""
    """ID of an earlier reply; its whole history precedes the messages."""
    references: tuple[str, ...] = ()
    """IDs of items of earlier replies that the input refers to; `resolve_references` fills in the messages."""
    instruction_length: int = 0
    """Number of leading characters of the first message that only apply to this request and are not part of the
    stored history."""
    object_arguments: bool = False
    """Whether tool call arguments are transmitted as JSON objects, so that clients may reformat them."""
    dialect_data: Any = None
    """Data that the dialect needs to format the reply."""

    @property
    def choices(self) -> int:
        """Number of replies to sample."""
        return self.n * max(1, len(self.prompts))


class ReplyStream(Protocol):
    """Formats one streamed response."""

    def format_delta(self, choice: int, delta: Delta) -> bytes:
        """Return the bytes to send for a delta; empty if there is nothing to send."""
        ...

    def format_choice_end(self, choice: int, reply: ModelReply) -> bytes:
        """Return the bytes that end one choice."""
        ...

    def format_end(self, replies: list[ModelReply]) -> bytes:
        """Return the bytes that end the response."""
        ...

    def format_failure(self, problem: ErrorKind, message: str) -> bytes:
        """Return the bytes that end a stream which cannot be completed."""
        ...


class Dialect(Protocol):
    """One provider's API."""

    name: str
    paths: tuple[str, ...]
    """Paths of model calls, relative to the client's base URL."""

    def parse_request(self, body: bytes) -> ClientRequest: ...

    def format_response(self, client_request: ClientRequest, replies: list[ModelReply]) -> bytes:
        """Return the body of a response that is not streamed."""
        ...

    def open_stream(
        self, client_request: ClientRequest, decode_tokens: DecodeTokens | None = None
    ) -> ReplyStream: ...

    def format_error(self, problem: ErrorKind, message: str, where: str | None = None) -> tuple[int, bytes]:
        """Return status and body of an error response."""
        ...


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAPI description of one path that accepts POST requests.

    Schemas are JSON schemas. One with a `title` becomes a component of the document under that name.
    """

    summary: str
    request: dict[str, Any]
    response: dict[str, Any]
    error: dict[str, Any]
    streams: bool = False
    """Whether a client can request a stream of server-sent events."""


@runtime_checkable
class DescribedDialect(Dialect, Protocol):
    """A dialect that describes its operations for `/openapi.json`. Other dialects get generic schemas there."""

    def describe_operations(self) -> dict[str, Operation]:
        """Return the operations of `paths`, and of `count_paths` if there are any, by path."""
        ...


@runtime_checkable
class TokenCountDialect(Dialect, Protocol):
    """A dialect with an endpoint that counts the tokens of a prompt."""

    count_paths: tuple[str, ...]
    """Paths that accept the body of a model call and return its number of prompt tokens."""

    def format_token_count(self, tokens: int) -> bytes: ...


@runtime_checkable
class StatefulDialect(Dialect, Protocol):
    """A dialect whose clients can refer to stored replies by ID."""

    stored_path: str
    """Path prefix of stored replies; the ID follows."""

    def prepend_history(
        self, client_request: ClientRequest, history: Sequence[Message], head: int
    ) -> ClientRequest:
        """Return the request with the history of an earlier reply before it.

        The first `head` characters of the history's first message are left out.
        """
        ...

    def find_referenced_response(self, name: str) -> str:
        """Return the ID of the reply that contains a referenced item; empty if it cannot be one of ours."""
        ...

    def resolve_references(self, client_request: ClientRequest, answers: Mapping[str, Message]) -> ClientRequest:
        """Return the request with the referenced items filled in.

        Raises `BadRequestError` if one does not exist.
        """
        ...

    def format_stored(self, name: str, reply: ModelReply, model: str) -> bytes:
        """Return the body of a stored reply."""
        ...

    def format_deleted(self, name: str) -> bytes:
        """Return the body that confirms the deletion of a stored reply."""
        ...


@runtime_checkable
class HeaderDialect(Dialect, Protocol):
    """A dialect whose clients are recognised by a request header if the path does not identify them."""

    header: str

    def format_models(self, names: Sequence[str]) -> bytes:
        """Return the list of models."""
        ...
