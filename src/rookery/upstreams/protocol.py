"""What an inference engine is to us: messages or token ids in; token ids, logprobs, finish and version out.

Promises, of every upstream:
- one call, one answer or one typed `UpstreamError`; a truncated answer is never a complete one;
- a call is retried only where nothing can have been sampled twice into a record: no connection, refused
  before it was read, 429 and 503; never after the deadline;
- the deadline covers the answer, not the waiting for a place, which is reported as `queued`;
- cancelling a call closes its connection, which is how engines learn to abort;
- `news` gets every piece of an answer once, in order, as it arrives; what it was told is the beginning of the
  answer that is returned; once it was told anything, the call is not tried again elsewhere;
- what `news` raises ends the call and comes out of it as it stands.
"""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias

import msgspec

from rookery.core import Extra, Finish, Message, Sampling, Span, ToolSchema

if TYPE_CHECKING:
    from rookery.upstreams.ids import Memo

PauseMode: TypeAlias = Literal["keep", "drain", "abort"]
"""What becomes of calls under way at a pause: kept frozen in the engine, finished first, or aborted and continued
from their partial tokens afterwards."""


class CallDelta(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A piece of a tool call: the first of a call has its id and name, all of them may have arguments."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of an answer. `sampled` and `logprobs` are of the same tokens; text may lag behind its tokens."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[CallDelta, ...] = ()
    sampled: bytes = b""
    logprobs: bytes = b""
    prompt: bytes = b""
    """The prompt's ids, in the first piece, where the engine tells them."""
    tops: tuple[tuple[tuple[int, float], ...], ...] = ()
    """As in `ModelReply`, for the tokens of this piece."""
    logprob_content: msgspec.Raw | None = None
    """As in `ModelReply`, for the tokens of this piece."""
    first: int = 0
    """How many of the tokens the engine told at once, first; 0 where that is not known."""
    version: int | None = None
    """The policy version that sampled the tokens, where the server says it with each piece."""


News: TypeAlias = Callable[[Delta], Awaitable[None]]
"""Told each piece. Waiting in it slows the reading down: a slow reader costs no memory."""

Held: TypeAlias = Callable[[bool], None]
"""Told True when a call begins to wait for a place or for the end of a pause, False when it goes on: a session
stops its clock in between. True and False alternate, and the last one is False, however the call ends."""


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One model call. Exactly one of `messages` and `tokens` is given."""

    model: str
    messages: tuple[Message | msgspec.Raw, ...] = ()
    """Messages, or messages as a client wrote them: JSON that is passed on as it stands."""
    tokens: bytes = b""
    """Prompt ids, int32, for engines that take tokens in."""
    tools: tuple[ToolSchema | msgspec.Raw, ...] = ()
    tool_choice: str | None = None
    """None, `auto`, `none`, `required`, or a tool's name."""
    sampling: Sampling = Sampling()
    want_tokens: bool = True
    """Ask for token ids and logprobs."""
    seed: int | None = None
    """Where the sampling names no seed and the engine can draw from one: what makes a run draw the same again."""
    affinity: str = ""
    """Requests with the same value like the same replica (its prefix cache)."""
    avoid: tuple[str, ...] = ()
    """Names of replicas that are used only where there is no other: an earlier attempt found them hung."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end an answer, for calls with token ids in."""
    top_logprobs: int = 0
    """How many alternatives for each token the caller wants to see."""
    want_logprobs: bool = False
    """Whether the caller wants to see the logprobs as the server writes them; with `top_logprobs` it does."""
    memo: "Memo | None" = None
    """What its conversation's long prompts were, as ids and as JSON: they are read and written only once."""
    id: str = ""
    """Names the call at engines that can abort one by name; empty: the upstream makes one up."""


class ModelReply(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. The token arrays are empty where the engine does not give them; they are never guessed."""

    message: Message
    finish: Finish
    prompt: bytes = b""
    sampled: bytes = b""
    logprobs: bytes = b""
    version: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    queued: float = 0.0
    replica: str = ""
    extras: dict[str, Extra] = {}
    spans: tuple[Span, ...] = ()
    """Stretches of `sampled` by version, where there was more than one; then `version` is the oldest."""
    tops: tuple[tuple[tuple[int, float], ...], ...] = ()
    """For each sampled token its likeliest alternatives, id and logprob, where they were asked for as ids."""
    logprob_content: msgspec.Raw | None = None
    """The chat answer's own `logprobs.content`, as it came: for callers who want to see it."""


class UpstreamInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a check found out."""

    url: str
    models: tuple[str, ...] = ()
    context: int | None = None
    """The model's longest sequence, where the server says it."""
    details: dict[str, Any] = {}


class Upstream(Protocol):
    """An inference engine."""

    name: str
    tokens_in: bool
    """Whether calls may bring token ids instead of messages."""
    raw_in: bool
    """Whether tools may be the JSON that a client wrote."""
    version: int
    """The policy version that answers carry where the server says none. Set when weights were replaced."""

    async def check(self, *, timeout: float = 10.0) -> UpstreamInfo:
        """Raises `UpstreamError` in words when the server cannot be used; samples nothing."""
        ...

    async def complete(
        self, request: ModelRequest, *, timeout: float, news: News | None = None, held: Held | None = None
    ) -> ModelReply:
        """One answer; streamed where somebody wants its `news`. Where token ids went in, the message holds plain
        text at most: who rendered the prompt reads the answer.

        An answer that the engine was told to abort has the finish `abort` and what was sampled until then."""
        ...

    async def freeze(self, mode: PauseMode, *, timeout: float) -> bool:
        """Tells the engine itself to stop sampling, on every replica; whether it can. With `keep` its calls go on
        after `thaw`, and the time between does not count as theirs; with `abort` they end with what they have;
        `drain` asks it nothing."""
        ...

    async def thaw(self, *, timeout: float) -> None:
        """Lets the engine go on. Without a freeze before it, nothing happens."""
        ...

    async def close(self) -> None: ...


CONCURRENCY: Final = 256
"""Calls under way at once at a replica that says nothing about it."""


class UpstreamConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to reach an upstream. The key is never part of it: `key_env` names the variable that holds it."""

    kind: str = "openai"
    urls: tuple[str, ...] = ()
    model: str = ""
    key_env: str = "ROOKERY_API_KEY"
    concurrency: int | None = None
    """Calls under way at once, per replica; None: what the engine says it can take, or 256."""
    share: int = 1
    """Processes that divide it."""
    retries: int = 4
    sampling: Sampling = Sampling()
    seeded: bool = False
    """Whether calls whose sampling has no seed are sent with one that is derived from the rollout and the turn."""
    resend_reasoning: bool = False
    """Whether the reasoning of earlier answers goes back to the server (as `reasoning_content`)."""
