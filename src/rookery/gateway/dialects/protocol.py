"""What a client's dialect is to us: a request becomes an `Ask`, replies become bytes in the client's own shape.

Promises, of every dialect:
- pure: bytes in, bytes out; no socket, no clock of its own;
- a field that changes the meaning of a request is supported or refused with a `BadRequestError`, never ignored.
  Each dialect lists the fields of its provider that it ignores because they change nothing. A field that no
  provider has is left out, with a warning in the log;
- every error has the shape that the client's own library understands;
- a message that means the same is the same, whichever dialect it came in: what was sampled is found again.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from rookery.core import Message, RookeryError, Sampling
from rookery.gateway.session import Reply, Spell
from rookery.gateway.tools import Tools
from rookery.upstreams.protocol import Delta

Problem: TypeAlias = Literal[
    "bad_request", "thread", "unauthorized", "not_found", "method", "gone", "conflict", "too_large", "truncated",
    "context", "unavailable", "timeout", "upstream", "internal",
]  # fmt: skip
"""What is wrong, whatever the dialect calls it."""


class BadRequestError(RookeryError):
    """The client's request cannot be understood; `where` names the part of it."""

    def __init__(self, message: str, where: str | None = None, problem: Problem = "bad_request") -> None:
        super().__init__(message, cause="upstream.rejected")
        self.where = where
        self.problem: Problem = problem


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What a client wants of a model: an answer to messages, or what follows prompts.

    Messages and tools in chat's shape are kept as they came: most of them were seen before."""

    messages: tuple[Message | msgspec.Raw, ...] = ()
    prompts: tuple[bytes | str, ...] = ()
    """Instead of messages: token ids (int32), or texts that are yet to be tokenised."""
    model: str = ""
    tools: msgspec.Raw | Tools | None = None
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
    id: str = ""
    """The answer's name, where a client may come back to it by that."""
    after: str = ""
    """The name of an earlier answer: its whole history comes before the messages."""
    references: tuple[str, ...] = ()
    """Names of parts of earlier answers that stand in the place of those parts; the messages come with them."""
    head: int = 0
    """How many characters of the first message are of this request alone: no later one inherits them."""
    objects: bool = False
    """Whether calls' arguments travel as objects, which a client's language writes in its own way."""
    own: Any = None
    """What the dialect itself remembers of the request."""

    @property
    def choices(self) -> int:
        """How many answers there are."""
        return self.n * max(1, len(self.prompts))


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


@runtime_checkable
class Counts(Dialect, Protocol):
    """A dialect whose clients may ask how long a prompt is."""

    counts: tuple[str, ...]
    """Paths that take the same bodies as those of calls, and answer with a number."""

    def counted(self, tokens: int) -> bytes: ...


@runtime_checkable
class Keeps(Dialect, Protocol):
    """A dialect whose clients may come back to an answer by its name."""

    keeps: str
    """What names follow in a path."""

    def continued(self, ask: Ask, history: Sequence[Message], head: int) -> Ask:
        """The ask with an earlier answer's history before it, of whose first message `head` characters are left
        out."""
        ...

    def referenced(self, name: str) -> str:
        """The name of the answer that a reference leads into; empty where it can be none of ours."""
        ...

    def resolved(self, ask: Ask, answers: Mapping[str, Message]) -> Ask:
        """The ask with the parts that its references mean. Raises `BadRequestError` where one is not there."""
        ...

    def kept(self, name: str, reply: Reply, model: str) -> bytes:
        """An answer that was given before."""
        ...

    def forgotten(self, name: str) -> bytes:
        """Says that there is no answer of that name any more."""
        ...


@runtime_checkable
class Marked(Dialect, Protocol):
    """A dialect whose clients can be told by a header, also where the path does not say it."""

    mark: str

    def models(self, names: Sequence[str]) -> bytes:
        """The list of models."""
        ...
