"""What a client's dialect is to us: a request becomes an `Ask`, replies become bytes in the client's own shape.

Promises, of every dialect:
- pure: bytes in, bytes out; no socket, no clock of its own;
- what it does not know of a request it tolerates; what it knows and cannot read is a `BadRequestError` in words;
- every error has the shape that the client's own library understands.
"""

from typing import Literal, Protocol, TypeAlias

import msgspec

from rookery.core import Message, RookeryError, Sampling
from rookery.gateway.session import Reply, Spell
from rookery.upstreams.protocol import Delta

Problem: TypeAlias = Literal[
    "bad_request", "unauthorized", "not_found", "method", "gone", "conflict", "too_large", "truncated", "context",
    "unavailable", "timeout", "upstream", "internal",
]  # fmt: skip
"""What is wrong, whatever the dialect calls it."""


class BadRequestError(RookeryError):
    """The client's request cannot be understood; `where` names the part of it."""

    def __init__(self, message: str, where: str | None = None) -> None:
        super().__init__(message, cause="upstream.rejected")
        self.where = where


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What a client wants of a model. Messages and tools are kept as they came: most of them were seen before."""

    messages: tuple[Message | msgspec.Raw, ...]
    model: str = ""
    tools: msgspec.Raw | None = None
    tool_choice: str | None = None
    sampling: Sampling = Sampling()
    n: int = 1
    stream: bool = False
    usage: bool = False
    """Whether a stream ends with what it cost."""
    logprobs: bool = False
    top_logprobs: int = 0
    ids: bool = False
    """Whether the client wants to see token ids."""


class Answering(Protocol):
    """One answer being told, piece by piece."""

    def piece(self, choice: int, delta: Delta) -> bytes:
        """Bytes for the client; empty where the piece has nothing for it."""
        ...

    def end(self, choice: int, reply: Reply) -> bytes:
        """The end of one choice."""
        ...

    def done(self, replies: list[Reply]) -> bytes:
        """The end of the whole answer."""
        ...

    def broken(self, problem: Problem, message: str) -> bytes:
        """What a stream that cannot be completed ends with instead."""
        ...


class Dialect(Protocol):
    """One kind of client."""

    name: str
    paths: tuple[str, ...]
    """What its clients append to their base URL."""

    def ask(self, body: bytes) -> Ask: ...

    def whole(self, ask: Ask, replies: list[Reply]) -> bytes:
        """A complete answer."""
        ...

    def answering(self, ask: Ask, spell: Spell | None = None) -> Answering: ...

    def error(self, problem: Problem, message: str, where: str | None = None) -> tuple[int, bytes]:
        """Status and body."""
        ...
