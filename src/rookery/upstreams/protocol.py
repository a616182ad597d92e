"""The upstream protocol: the types of a model call, and the interface to an inference engine.

Used in runner processes and gateway shards. `ModelRequest` is the only request type between an environment or an
HTTP client and the inference engine; `ModelReply` is the only reply type on the way back.

Guarantees of every upstream:
- a call returns one reply or raises one typed `UpstreamError`; a truncated reply is never returned as complete;
- a failed call is retried only as `retry.py` allows, for example if there was no connection or the server refused
  the request with 429 or 503, so that a reply is never recorded twice; it is never retried after its deadline;
- the deadline covers the reply, not the wait for the concurrency gate (the limit on calls in flight per server);
  that wait is reported as `queued`;
- cancelling a call closes its connection, which makes inference engines abort the call;
- `on_delta` receives every piece of a reply once, in order; the pieces are the beginning of the reply that is
  returned; after the first piece the call is not retried;
- an exception raised by `on_delta` ends the call and propagates unchanged.
"""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from rookery.core import Extra, Finish, Message, Sampling, Span, ToolCall, ToolSchema, Turn

if TYPE_CHECKING:
    from rookery.upstreams.token_ids import PromptCache

PauseMode: TypeAlias = Literal["keep", "drain", "abort"]
"""The effect of a pause on calls in flight.

`keep` freezes them in the inference engine, `drain` lets them finish first, and `abort` ends them and requests the
rest of each reply after the pause, from the tokens sampled so far.
"""

TopLogprobs: TypeAlias = tuple[tuple[tuple[int, float], ...], ...]
"""One list per sampled token: the most likely tokens at its position, each as a pair of token ID and logprob."""

DecodeTokens: TypeAlias = Callable[[bytes], list[bytes]]
"""A function that takes token IDs (int32 bytes) and returns, for each ID, the bytes of text that it stands for."""


class CallDelta(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A piece of a streamed tool call.

    The first piece of a call has its ID and, normally, its name. Each piece may add text to the arguments.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of a streamed reply: what it adds to the text, the tool calls and the tokens.

    `sampled` (token IDs, int32) and `logprobs` (float32) describe the same tokens. The text of a token may arrive
    in a later piece than the token.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[CallDelta, ...] = ()
    sampled: bytes = b""
    logprobs: bytes = b""
    prompt: bytes = b""
    """The token IDs of the prompt (int32). Only one piece of a reply has them, and only if they were returned."""
    tops: TopLogprobs = ()
    logprob_content: msgspec.Raw | None = None
    """The JSON list that the server sent as `logprobs.content`, for the tokens of this piece."""
    first: int = 0
    """Number of tokens of this piece that came in the first server-sent event that it was built from; 0 if
    unknown."""
    version: int | None = None
    """The policy version that sampled the tokens, or None if the server does not report it during a stream."""


OnDelta: TypeAlias = Callable[[Delta], Awaitable[None]]
"""Callback for each piece of a streamed reply. The stream is not processed further until the callback returns, so
that a slow callback slows down the server instead of filling memory."""

OnWait: TypeAlias = Callable[[bool], None]
"""Callback for waits of a model call: for the concurrency gate (the limit on calls in flight) or the end of a
pause.

It is called with True when a wait begins and with False when the wait ends. True and False alternate, and the last
value is False, however the model call ends.
"""


class ToolSet(msgspec.Struct, frozen=True):
    """The tools that a call offers to the model."""

    schemas: tuple[ToolSchema, ...] = ()
    raw: tuple[msgspec.Raw, ...] = ()
    """The JSON of each tool as the HTTP client sent it, which may have fields that `ToolSchema` lacks; empty for
    tools that did not come over HTTP."""
    scope: bytes = b""
    """A digest of the tools. Tools are part of the prompt, so calls with different tools share no recorded
    history."""

    def __bool__(self) -> bool:
        return bool(self.schemas)


NO_TOOLS: Final = ToolSet()


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One model call. It has either `messages` or `tokens`, not both."""

    model: str = ""
    messages: tuple[Message | msgspec.Raw, ...] = ()
    """The conversation. A message may be the JSON that an HTTP client sent; it is passed on unchanged."""
    tokens: bytes = b""
    """The token IDs of the prompt (int32), for inference engines that accept them instead of messages."""
    tools: ToolSet = NO_TOOLS
    tool_choice: str | None = None
    """None, `auto`, `none`, `required`, or the name of a tool."""
    sampling: Sampling = Sampling()
    want_tokens: bool = True
    """Request token IDs and logprobs from the inference engine."""
    want_logprobs: bool = False
    """True if the reply must have the server's JSON of the logprobs, in `ModelReply.logprob_content`."""
    top_logprobs: int = 0
    """Number of most likely tokens to return for each position (`ModelReply.tops`); 0 for none."""
    seed: int | None = None
    """The seed to use if `sampling` has none. It makes a run reproducible. Upstreams for vLLM, SGLang and other
    OpenAI-compatible servers send it only if they are configured with `seeded`."""
    affinity: str = ""
    """Key for choosing a replica: calls with the same value go to the same replica if possible, to use its prefix
    cache. It is empty for calls without a preference; for a rollout it identifies the attempt."""
    avoid: tuple[str, ...] = ()
    """Names of replicas that hung in an earlier attempt. They are used only if no other healthy replica exists."""
    stop_ids: tuple[int, ...] = ()
    """Token IDs that end the reply when they are sampled. Used only for calls with `tokens`."""
    prompt_cache: "PromptCache | None" = None
    """Cache of this conversation's long prompts as token IDs and as JSON, so that a shared prefix is converted
    once."""
    id: str = ""
    """The request ID to send to inference engines that can abort a call by ID. If it is empty, the upstream
    chooses an ID where it needs one."""

    @property
    def shows_logprobs(self) -> bool:
        """True if the caller requested logprobs in the reply (`want_logprobs` or `top_logprobs`)."""
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
    """The policy version (number of the weights) that sampled the tokens; the oldest one if `spans` has
    several."""
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    queued: float = 0.0
    """Seconds spent waiting for the concurrency gate or the end of a pause."""
    replica: str = ""
    extras: dict[str, Extra] = {}
    spans: tuple[Span, ...] = ()
    """The ranges of tokens in `sampled` that each policy version sampled; empty if one version sampled all of
    them."""
    tops: TopLogprobs = ()
    """The most likely tokens at each position; empty unless they were requested and the server returns their
    IDs."""
    logprob_content: msgspec.Raw | None = None
    """The JSON list that the server sent as `logprobs.content` of a chat reply, if the request wants logprobs."""
    recorded_turn: Turn | None = None
    """The turn as which this call was recorded; None until it is recorded. Upstreams leave it None."""
    decode_tokens: DecodeTokens | None = None
    """A function that converts token IDs to bytes; None if the gateway does not have the model's tokenizer."""

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
        """The turn as which this call was recorded. Every reply that a `Model` returns has one; other replies may
        not."""
        assert self.recorded_turn is not None
        return self.recorded_turn


class UpstreamInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that an inference engine reports about itself: its models and their context length."""

    url: str
    models: tuple[str, ...] = ()
    context: int | None = None
    """The model's maximum sequence length, if the server reports it."""
    details: dict[str, Any] = {}


class Upstream(Protocol):
    """Interface to an inference engine: one or more servers of the same model, or a model in this process.

    A class that derives from it needs no `freeze`, `thaw` and `close` if it cannot pause and holds no connections.
    """

    name: str
    accepts_tokens: bool
    """True if a request may have token IDs instead of messages."""
    accepts_raw_json: bool
    """True if the messages and tools of a request may be the JSON that an HTTP client sent (`msgspec.Raw`)."""
    version: int
    """The policy version recorded for replies in which the server reports none. The caller sets it after each
    weight update."""

    async def check(self, *, timeout: float = 10.0) -> UpstreamInfo:
        """Return what the server reports about itself. Raises `UpstreamError` if no server can be used. Samples no
        token."""
        ...

    async def complete(
        self,
        request: ModelRequest,
        *,
        timeout: float,
        on_delta: OnDelta | None = None,
        on_wait: OnWait | None = None,
    ) -> ModelReply:
        """Return the reply to one call. If `on_delta` is given, the reply is streamed to it as well.

        If the request has token IDs, the reply's message holds plain text at most: the caller rendered the prompt
        and parses the sampled tokens. A call that the inference engine aborts on request returns what was sampled
        until then, with the finish reason `abort`. `timeout` does not include waiting for the concurrency gate.
        """
        ...

    async def freeze(self, mode: PauseMode, *, timeout: float) -> bool:  # noqa: ARG002  (it cannot pause)
        """Ask the inference engine to stop sampling on every replica. Return False if a replica lacks this
        feature.

        With `keep`, calls in flight continue after `thaw`, and the time until then does not count towards their
        deadline. With `abort`, calls in flight end with the tokens sampled so far. With `drain`, nothing is sent
        to the inference engine and False is returned.
        """
        return False

    async def thaw(self, *, timeout: float) -> None:
        """Ask the inference engine to continue sampling after `freeze`. Has no effect if it is not frozen."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


UNLIMITED: Final = 1 << 30
"""The concurrency limit of a replica that does not report one, unless the configuration sets it."""


class UpstreamConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Configuration of an upstream. It never contains the API key; `key_env` names the environment variable with
    it."""

    kind: str = "auto"
    """The kind of the servers, such as `vllm`. With `auto`, the kind is the prefix of the first URL (`embedded:`)
    if it has one; otherwise it is detected when a run or a gateway starts."""
    urls: tuple[str, ...] = ()
    model: str = ""
    key_env: str = "ROOKERY_API_KEY"
    concurrency: int | None = None
    """The maximum number of calls in flight per replica. If None, the limit is what the inference engine reports;
    if it reports nothing, there is no limit."""
    share: int = 1
    """The number of processes that use this upstream. Each gets an equal share of the concurrency limit."""
    retries: int = 4
    sampling: Sampling = Sampling()
    """Sampling parameters of the model role (policy, judge, …) that uses this upstream. They are merged with other
    sources once, when the role is set up."""
    seeded: bool = False
    """If True, a call without a seed in its sampling parameters is sent with a seed derived from rollout and
    turn."""
    cache: str = ""
    """Directory of a cache of replies, for repeated evaluations. Empty means none."""
    resend_reasoning: bool = False
    """If True, the reasoning of earlier replies is sent back to the server, as `reasoning_content`."""


class LoadMetrics(msgspec.Struct, frozen=True):
    """Names of the Prometheus metrics in which one kind of inference engine reports its load."""

    running: str
    """Requests that are processed. The engine must process many at once: one that processes fewer requests than
    it received has lost some."""
    waiting: str
    """Requests that wait in the engine's queue."""
    tokens: tuple[str, ...]
    """Counters whose sum is the number of processed tokens, those of prompts and generated ones."""


@runtime_checkable
class AcceptsPath(Protocol):
    """A class of upstreams whose address may be a prefix and a file path, such as `embedded:weights/`."""

    path_prefixes: tuple[str, ...]
    """The prefixes of such addresses. Relative paths after them are made absolute."""


@runtime_checkable
class SuppliesRendering(Protocol):
    """A class of upstreams whose model has a chat format of its own, so that users need not configure one."""

    @classmethod
    def own_rendering(cls, config: UpstreamConfig) -> dict[str, Any]:
        """Return the settings of the model's chat format, without opening files or connections.

        With `tokenizer`, runs record tokens by default, and users may change the other settings. With `name`, the
        name of a chat renderer, no other chat format can be used.
        """
        ...
