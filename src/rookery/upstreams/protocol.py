"""The upstream protocol: what a model call is, and what an inference engine must do with it.

Used in runner processes and gateway shards. `ModelRequest` is the only request type between an environment or an
HTTP client and the engine; `ModelReply` is the only reply type on the way back.

Guarantees of every upstream:
- a call returns one reply or raises one typed `UpstreamError`; a truncated reply is never returned as complete;
- a call is retried only if nothing can be sampled twice into a record: no connection, refused before it was read,
  429 and 503; never after the deadline;
- the deadline covers the reply, not the wait for the concurrency gate, which is reported as `queued`;
- cancelling a call closes its connection; engines abort a call when that happens;
- `on_delta` receives every piece of a reply once, in order; the pieces are the beginning of the reply that is
  returned; after the first piece the call is not retried;
- an exception raised by `on_delta` ends the call and propagates unchanged.
"""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias

import msgspec

from rookery.core import Extra, Finish, Message, Sampling, Span, ToolCall, ToolSchema, Turn

if TYPE_CHECKING:
    from rookery.upstreams.token_ids import PromptCache

PauseMode: TypeAlias = Literal["keep", "drain", "abort"]
"""What a pause does with calls in flight: keep them frozen in the inference engine, let them finish first, or
abort them and continue them from their partial tokens afterwards."""

TopLogprobs: TypeAlias = tuple[tuple[tuple[int, float], ...], ...]
"""For each sampled token its most likely alternatives: token ID and logprob."""

DecodeTokens: TypeAlias = Callable[[bytes], list[bytes]]
"""Return the bytes that each of some token IDs (int32) stands for."""


class CallDelta(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A piece of a tool call. The first piece has the ID and the name; every piece may have arguments."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of a reply. `sampled` and `logprobs` describe the same tokens; text may lag behind its tokens."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[CallDelta, ...] = ()
    sampled: bytes = b""
    logprobs: bytes = b""
    prompt: bytes = b""
    """The prompt's token IDs, in the first piece, if the inference engine returns them."""
    tops: TopLogprobs = ()
    logprob_content: msgspec.Raw | None = None
    """As in `ModelReply`, for the tokens of this piece."""
    first: int = 0
    """How many of the tokens the inference engine sent together in its first event; 0 if unknown."""
    version: int | None = None
    """The policy version that sampled the tokens, if the server reports it with each piece."""


OnDelta: TypeAlias = Callable[[Delta], Awaitable[None]]
"""Called with each piece of a reply. While it runs, nothing more is read: a slow caller costs no memory."""

OnWait: TypeAlias = Callable[[bool], None]
"""Called with True when a call starts to wait for the concurrency gate or the end of a pause, and with False when
it continues. The calls alternate and end with False, however the model call ends."""


class ToolSet(msgspec.Struct, frozen=True):
    """The tools that a call offers to the model."""

    schemas: tuple[ToolSchema, ...] = ()
    raw: tuple[msgspec.Raw, ...] = ()
    """The client's JSON of each tool, if they came over HTTP; it may have fields that `ToolSchema` lacks."""
    scope: bytes = b""
    """A digest. Tools are part of the prompt, so turns with different tools belong to different histories."""

    def __bool__(self) -> bool:
        return bool(self.schemas)


NO_TOOLS: Final = ToolSet()


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One model call. It has either `messages` or `tokens`, not both."""

    model: str = ""
    messages: tuple[Message | msgspec.Raw, ...] = ()
    """Messages, or a client's JSON of them, which is passed on unchanged."""
    tokens: bytes = b""
    """The prompt's token IDs (int32), for inference engines that accept them."""
    tools: ToolSet = NO_TOOLS
    tool_choice: str | None = None
    """None, `auto`, `none`, `required`, or the name of a tool."""
    sampling: Sampling = Sampling()
    want_tokens: bool = True
    """Request token IDs and logprobs from the inference engine."""
    want_logprobs: bool = False
    """The caller wants the logprobs as the server writes them."""
    top_logprobs: int = 0
    """The number of alternatives per token that the caller wants."""
    seed: int | None = None
    """The seed to use if `sampling` has none and the inference engine supports one. It makes a run
    reproducible."""
    affinity: str = ""
    """Requests with the same value prefer the same replica, for its prefix cache."""
    avoid: tuple[str, ...] = ()
    """Replicas that an earlier attempt found hung. They are used only if there is no other."""
    stop_ids: tuple[int, ...] = ()
    """Token IDs that end the reply, for calls with `tokens`."""
    memo: "PromptCache | None" = None
    """The long prompts of this conversation with their JSON, so that each is encoded and parsed once."""
    id: str = ""
    """The call's ID at inference engines that can abort a call by ID. Empty: the upstream chooses one if it needs
    it."""

    @property
    def shows_logprobs(self) -> bool:
        """True if the caller itself looks at the logprobs."""
        return self.want_logprobs or self.top_logprobs > 0


class ModelReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply to one model call. Token arrays that the inference engine does not return are empty, never
    guessed."""

    message: Message
    finish: Finish
    prompt: bytes = b""
    """The prompt's token IDs (int32)."""
    sampled: bytes = b""
    """The sampled token IDs (int32)."""
    logprobs: bytes = b""
    """The logprob of each sampled token (float32)."""
    version: int = 0
    """The policy version that sampled the tokens; the oldest one if `spans` has several."""
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    queued: float = 0.0
    """Seconds spent waiting for the concurrency gate or the end of a pause."""
    replica: str = ""
    extras: dict[str, Extra] = {}
    spans: tuple[Span, ...] = ()
    """Ranges of `sampled` by policy version; empty if there was only one version."""
    tops: TopLogprobs = ()
    """The alternatives per token, if they were requested and the inference engine returns token IDs for them."""
    logprob_content: msgspec.Raw | None = None
    """The server's own JSON of `logprobs.content` in a chat reply."""
    recorded_turn: Turn | None = None
    """The turn that recorded the call, once the session has recorded it."""
    decode_tokens: DecodeTokens | None = None
    """Converts token IDs to bytes, if the gateway has the model's tokenizer."""

    @property
    def text(self) -> str:
        """The text of the message."""
        return self.message.text

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls of the message."""
        return self.message.tool_calls

    @property
    def turn(self) -> Turn:
        """The turn that recorded the call. Every reply that a `Model` returns has one."""
        assert self.recorded_turn is not None
        return self.recorded_turn


class UpstreamInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a server reports about itself."""

    url: str
    models: tuple[str, ...] = ()
    context: int | None = None
    """The model's maximum sequence length, if the server reports it."""
    details: dict[str, Any] = {}


class Upstream(Protocol):
    """An inference engine."""

    name: str
    accepts_tokens: bool
    """True if a request may have token IDs instead of messages."""
    accepts_raw_json: bool
    """True if messages and tools may be the JSON that a client wrote."""
    version: int
    """The policy version of replies for which the server reports none. Set after a weight update."""

    async def check(self, *, timeout: float = 10.0) -> UpstreamInfo:
        """Return what the server reports. Raises `UpstreamError` if it cannot be used. Samples nothing."""
        ...

    async def complete(
        self,
        request: ModelRequest,
        *,
        timeout: float,
        on_delta: OnDelta | None = None,
        on_wait: OnWait | None = None,
    ) -> ModelReply:
        """Return the reply to one call; it is streamed if `on_delta` is given.

        If the request has token IDs, the reply's message holds plain text at most: the caller rendered the prompt
        and parses the sampled tokens. A call that the inference engine was asked to abort returns what was sampled
        until then, with the finish reason `abort`.
        """
        ...

    async def freeze(self, mode: PauseMode, *, timeout: float) -> bool:
        """Ask the inference engine to stop sampling on every replica; return False if it has no such feature.

        With `keep`, its calls continue after `thaw`, and the time between does not count towards their deadline.
        With `abort`, they end with the tokens they have. `drain` sends the engine nothing.
        """
        ...

    async def thaw(self, *, timeout: float) -> None:
        """Let the inference engine continue. Has no effect without an earlier `freeze`."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


UNLIMITED: Final = 1 << 30
"""The concurrency limit of a replica that does not report one, unless the configuration sets it."""


class UpstreamConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to reach an upstream. It never contains the API key: `key_env` names the variable that holds it."""

    kind: str = "auto"
    """The kind of the servers. `auto`: the prefix of the first URL, or detected when a run or a gateway starts."""
    urls: tuple[str, ...] = ()
    model: str = ""
    key_env: str = "ROOKERY_API_KEY"
    concurrency: int | None = None
    """Calls in flight per replica. None: what the inference engine reports; without a report, as many as rollouts
    make."""
    share: int = 1
    """The number of processes that divide `concurrency` between them."""
    retries: int = 4
    sampling: Sampling = Sampling()
    """The sampling parameters of the role. They are resolved once, when the role is set up."""
    seeded: bool = False
    """Send calls without a seed with one that is derived from the rollout and the turn."""
    resend_reasoning: bool = False
    """Send the reasoning of earlier replies back to the server, as `reasoning_content`."""
