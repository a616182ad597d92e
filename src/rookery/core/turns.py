"""Turns (recorded model calls) and segments (token sequences for training).

Token data is stored as bytes (int32 and float32, little endian). Bytes are encoded without a copy, and
`numpy.frombuffer` reads them without a copy, so this package does not need numpy.

- Arrays that describe the same tokens have the same length, else the constructor raises.
- A turn has a log probability for every sampled token, or for none.
- The spans of a turn, if it has any, cover its sampled tokens exactly and in order.
"""

import struct
from collections.abc import Iterable
from typing import Final, Literal, TypeAlias

import msgspec

from rookery.core.messages import Message, ToolSchema

Finish: TypeAlias = Literal["stop", "length", "tool_calls", "content_filter", "abort"]
REPLY_CACHE: Final = "cache"
"""`Turn.upstream` of a turn whose reply came from the cache of replies (`--cache`). Its tokens never train."""


def ints(values: Iterable[int]) -> bytes:
    """Encode token IDs as little-endian int32."""
    items = values if isinstance(values, list | tuple) else list(values)
    return struct.pack(f"<{len(items)}i", *items)


def floats(values: Iterable[float]) -> bytes:
    """Encode log probabilities as little-endian float32."""
    items = values if isinstance(values, list | tuple) else list(values)
    return struct.pack(f"<{len(items)}f", *items)


class Extra(msgspec.Struct, frozen=True):
    """A per-token array besides tokens and log probabilities, such as the routed experts of each token.

    It has `width` bytes per token, which hold values of the numpy type `dtype`.
    """

    dtype: str
    width: int
    data: bytes


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens `[start, end)` were sampled by policy version `version`."""

    start: int
    end: int
    version: int


def spans_cover(spans: tuple[Span, ...], tokens: int) -> bool:
    """Return True if the spans cover all tokens in order, without gaps and overlaps."""
    at = 0
    for span in spans:
        if span.start != at or span.end <= at:
            return False
        at = span.end
    return at == tokens


class Turn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One recorded model call: prompt tokens in, sampled tokens out.

    A turn that continues an earlier turn (its parent) stores only the messages and prompt tokens that were added.
    """

    attempt: str
    index: int
    response: Message
    role: str = "policy"
    parent: int | None = None
    """Index of the turn whose prompt and reply this prompt continues, or None if this turn starts a conversation
    (a root)."""
    messages: tuple[Message, ...] = ()
    """Messages that were added after the parent turn."""
    prefix: int = 0
    """Number of prompt tokens, from the start, that are equal to the parent's prompt and sampled tokens."""
    prompt: bytes = b""
    """Prompt token IDs after the prefix, as int32."""
    sampled: bytes = b""
    logprobs: bytes = b""
    version: int = 0
    """Policy version that sampled the tokens; the oldest one if `spans` lists several."""
    spans: tuple[Span, ...] = ()
    """Policy version of each part of `sampled`, if the weights changed during the call."""
    finish: Finish = "stop"
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    started: float = 0.0
    seconds: float = 0.0
    queued: float = 0.0
    upstream: str = ""
    """Replica that replied, or `REPLY_CACHE`."""
    extras: dict[str, Extra] = {}
    scope: bytes = b""
    """Digest of the inputs besides messages that shape the prompt, such as tools; empty if the turn has a parent.
    A turn never continues a turn of another scope."""
    tools: tuple[ToolSchema, ...] = ()
    """The tools that the call offered to the model, in the first turn of each role and scope."""
    partial: bool = False
    """True if the client closed the stream before the reply was complete. The sampled tokens count against the
    rollout's budgets. Only those tokens train that are part of the prompt of a later turn."""
    cuts: bytes = b""
    """For a partial turn: positions at which its client may have stopped reading. Four int32 for each position:
    characters of content, characters of reasoning, tool calls, and the number of sampled tokens."""
    key: str = ""
    """Idempotency key of a call over HTTP: a digest of the client's request and, if the reply has an ID, that ID.
    Empty for calls from Python."""

    def __post_init__(self) -> None:
        if len(self.prompt) % 4 or len(self.sampled) % 4:
            raise ValueError(
                "the token IDs of a turn must be int32: the number of bytes must be a multiple of 4, got "
                f"{len(self.prompt)} for the prompt and {len(self.sampled)} for the sampled tokens"
            )
        if self.logprobs and len(self.logprobs) != len(self.sampled):
            raise ValueError(
                f"a turn has {len(self.sampled) // 4} sampled tokens but {len(self.logprobs) // 4} logprobs"
            )
        if self.spans and not spans_cover(self.spans, len(self.sampled) // 4):
            raise ValueError(
                f"the version spans of a turn do not cover its {len(self.sampled) // 4} sampled tokens exactly"
            )
        for name, extra in self.extras.items():
            if len(extra.data) != len(self.sampled) // 4 * extra.width:
                raise ValueError(
                    f"the per-token array {name!r} (an extra) has {len(extra.data)} bytes, but the turn has "
                    f"{len(self.sampled) // 4} sampled tokens of {extra.width} bytes each"
                )
        if len(self.cuts) % 16:
            raise ValueError(
                f"the cuts of a partial turn must be four int32 each: {len(self.cuts)} bytes are no multiple of 16"
            )

    def shortened(self, tokens: int) -> "Turn":
        """Return the turn with only its first `tokens` sampled tokens."""
        if tokens >= len(self.sampled) // 4:
            return self
        return msgspec.structs.replace(
            self,
            sampled=self.sampled[: 4 * tokens],
            logprobs=self.logprobs[: 4 * tokens],
            spans=tuple(
                Span(span.start, min(span.end, tokens), span.version) for span in self.spans if span.start < tokens
            ),
            extras={
                name: Extra(extra.dtype, extra.width, extra.data[: tokens * extra.width])
                for name, extra in self.extras.items()
            },
        )


class Segment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A token sequence ready for training.

    `tokens` holds int32 token IDs. `mask` has one byte per token: 1 if the token was sampled by the policy and
    trains, otherwise 0.
    """

    tokens: bytes
    mask: bytes
    logprobs: bytes
    """One float32 per token; 0.0 if the mask is 0."""
    versions: tuple[Span, ...] = ()
    """Policy version of each contiguous range of trained tokens, in order and without overlap."""
    extras: dict[str, Extra] = {}
    turns: tuple[int, ...] = ()
    """Indices of the turns whose sampled tokens train in this segment."""

    def __post_init__(self) -> None:
        n = len(self.tokens) // 4
        if len(self.tokens) % 4 or len(self.mask) != n or len(self.logprobs) != 4 * n:
            raise ValueError(
                f"a segment of {len(self.tokens) / 4:g} tokens has {len(self.mask)} mask values "
                f"and {len(self.logprobs) / 4:g} logprobs"
            )
        at = trained = 0
        for span in self.versions:
            if not at <= span.start < span.end <= n:
                raise ValueError(f"version span {span} is out of order or outside the {n} tokens")
            if self.mask.count(1, span.start, span.end) != span.end - span.start:
                raise ValueError(f"version span {span} covers tokens that do not train")
            at = span.end
            trained += span.end - span.start
        if trained != self.mask.count(1):
            raise ValueError("the version spans of a segment do not cover its trained tokens exactly")
        if trained + self.mask.count(0) != n:
            raise ValueError("the mask of a segment must contain only zeros and ones")
        for name, extra in self.extras.items():
            if len(extra.data) != n * extra.width:
                raise ValueError(
                    f"the per-token array {name!r} (an extra) has {len(extra.data)} bytes, but the segment has "
                    f"{n} tokens of {extra.width} bytes each"
                )

    def __len__(self) -> int:
        return len(self.tokens) // 4

    @property
    def trained(self) -> int:
        """Number of tokens that train."""
        return self.mask.count(1)
