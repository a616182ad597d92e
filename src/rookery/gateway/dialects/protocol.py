"""Protocols of API dialects: parse a client's request into a `ClientRequest`, and format replies for the client.

A dialect implements the API of one provider, such as OpenAI's chat completions. Dialects run in gateway shards.

Every dialect guarantees:
- it only converts data: it does no I/O and keeps no timer;
- a field that changes the meaning of a request is supported or rejected with `BadRequestError`, never ignored.
  Each dialect lists the fields of its provider that it ignores because they change nothing. An unknown field is
  dropped with a warning in the log;
- every error has the format that the provider's client library expects;
- the same message is parsed to the same `Message` in every dialect, so that the gateway recognises a conversation
  that continues in another dialect.
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
"""The kind of an error, from which each dialect derives status and error type.

`thread`: the request uses Anthropic's threads. `gone`: the session has ended. `truncated`: a budget of the session
is exhausted. `context`: the prompt exceeds the context limit. `upstream`: the inference engine failed.
"""


class BadRequestError(RookeryError):
    """The client's request is invalid or not supported.

    `where` names the field, or is None if no field is at fault.
    """

    def __init__(self, message: str, where: str | None = None, problem: ErrorKind = "bad_request") -> None:
        super().__init__(message, cause="upstream.rejected")
        self.where = where
        self.problem: ErrorKind = problem


class ClientRequest(ModelRequest, frozen=True, kw_only=True):
    """A model call as an HTTP client requests it: the call itself, and how the client wants the reply.

    The chat dialect leaves messages as the client's JSON, because most of them were parsed in an earlier turn.
    """

    prompts: tuple[bytes | str, ...] = ()
    """Prompts that are used instead of messages: each is token IDs (int32 bytes) or a text to tokenise."""
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    """True if the client wants token counts at the end of a stream."""
    return_token_ids: bool = False
    """True if the response includes the token IDs of the prompt and the reply."""
    reply_id: str = ""
    """ID under which the client can refer to the reply later; empty if it cannot."""
    previous_id: str = ""
    """ID of an earlier reply that the request continues: its whole conversation precedes `messages`. Empty for
    none."""
    references: tuple[str, ...] = ()
    """IDs of items of earlier replies that the input refers to. If there are any, `messages` is empty until
    `StatefulDialect.resolve_references` sets it."""
    instruction_length: int = 0
    """Number of leading characters of the first message that apply only to this request (`instructions` of the
    Responses API). They are left out when a later request continues this reply by ID."""
    object_arguments: bool = False
    """True if the API transmits tool call arguments as JSON objects, so that clients may send them back
    reformatted."""
    dialect_data: Any = None
    """Data that only the dialect itself uses, to format the reply."""

    @property
    def choices(self) -> int:
        """Number of replies to sample: `n` for each prompt."""
        return self.n * max(1, len(self.prompts))


class ReplyStream(Protocol):
    """Formats one streamed response as server-sent events."""

    def format_delta(self, choice: int, delta: Delta) -> bytes:
        """Return the bytes to send for the next part of a choice's reply; empty if there is nothing to send."""
        ...

    def format_choice_end(self, choice: int, reply: ModelReply) -> bytes:
        """Return the bytes that end one choice, given its complete reply."""
        ...

    def format_end(self, replies: list[ModelReply]) -> bytes:
        """Return the bytes that end the response, after all choices have ended."""
        ...

    def format_failure(self, problem: ErrorKind, message: str) -> bytes:
        """Return the bytes that end the stream with an error."""
        ...


class Dialect(Protocol):
    """The API of one provider: parses requests for model calls, and formats responses and errors."""

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
        """Return the status and the body of an error response.

        `where` names the request field at fault, if any.
        """
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
    """True if a client can request a stream of server-sent events."""


@runtime_checkable
class DescribedDialect(Dialect, Protocol):
    """A dialect that describes its operations for `/openapi.json`. Other dialects get generic schemas there."""

    def describe_operations(self) -> dict[str, Operation]:
        """Return the description of each path in `paths` and, for a `TokenCountDialect`, in `count_paths`."""
        ...


@runtime_checkable
class TokenCountDialect(Dialect, Protocol):
    """A dialect with an endpoint that counts the tokens of a prompt."""

    count_paths: tuple[str, ...]
    """Paths that accept the body of a model call and return its number of prompt tokens."""

    def format_token_count(self, tokens: int) -> bytes: ...


@runtime_checkable
class StatefulDialect(Dialect, Protocol):
    """A dialect whose clients can refer to earlier replies of the session by ID."""

    stored_path: str
    """Path prefix at which clients get and delete earlier replies; the ID of the reply follows."""

    def prepend_history(
        self, client_request: ClientRequest, history: Sequence[Message], head: int
    ) -> ClientRequest:
        """Return the request with the conversation up to an earlier reply (`history`) before its own messages.

        The first `head` characters of the history's first message are left out, because they applied only to the
        earlier request.
        """
        ...

    def find_referenced_response(self, name: str) -> str:
        """Return the ID of the reply that contains the item with the ID `name`.

        Returns an empty string if the gateway cannot have generated that ID.
        """
        ...

    def resolve_references(self, client_request: ClientRequest, answers: Mapping[str, Message]) -> ClientRequest:
        """Return the request with its messages, after inserting the items that it refers to by ID.

        `answers` maps reply IDs to the messages of those replies. Raises `BadRequestError` if an item does not
        exist.
        """
        ...

    def format_stored(self, name: str, reply: ModelReply, model: str) -> bytes:
        """Return the body of the response to a request for an earlier reply.

        `name` is its ID, `model` its model.
        """
        ...

    def format_deleted(self, name: str) -> bytes:
        """Return the body of the response that confirms the deletion of an earlier reply. `name` is its ID."""
        ...


@runtime_checkable
class HeaderDialect(Dialect, Protocol):
    """A dialect whose clients are recognised by a request header if the path does not identify them."""

    header: str

    def format_models(self, names: Sequence[str]) -> bytes:
        """Return the body of the response that lists the available models."""
        ...
