"""Model calls and the token sequences that train.

Token data is kept as bytes (int32 and float32, little endian): it encodes without a copy, compares as
fast as memory does, and `numpy.frombuffer` views it for free, while core stays free of numpy.

Promises:
- arrays that describe the same tokens have the same length, or the object is not built;
- a logprob exists for every sampled token, or for none of a turn's;
- the spans of a turn cover its sampled tokens exactly, in order, or there are none.
"""

import struct
from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec

from rookery.core.messages import Message

Finish: TypeAlias = Literal["stop", "length", "tool_calls", "content_filter", "abort"]


def ints(values: Iterable[int]) -> bytes:
    """Token ids as little-endian int32."""
    items = values if isinstance(values, list | tuple) else list(values)
    return struct.pack(f"<{len(items)}i", *items)


def floats(values: Iterable[float]) -> bytes:
    """Logprobs as little-endian float32."""
    items = values if isinstance(values, list | tuple) else list(values)
    return struct.pack(f"<{len(items)}f", *items)


class Extra(msgspec.Struct, frozen=True):
    """A named per-token array (routed experts, kept tokens): `width` bytes for each token."""

    dtype: str
    width: int
    data: bytes


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens `[start, end)` were sampled by policy version `version`."""

    start: int
    end: int
    version: int


def spans_cover(spans: tuple[Span, ...], tokens: int) -> bool:
    """Whether the spans follow each other from the first token to the last."""
    at = 0
    for span in spans:
        if span.start != at or span.end <= at:
            return False
        at = span.end
    return at == tokens


class Turn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One model call: prompt tokens in, sampled tokens out. Stores what its parent turn does not have."""

    attempt: str
    index: int
    response: Message
    role: str = "policy"
    parent: int | None = None
    """The turn whose prompt and answer this one's prompt extends; None at a root."""
    messages: tuple[Message, ...] = ()
    """Messages new since the parent."""
    prefix: int = 0
    """How many prompt tokens are the parent's prompt and sampled tokens."""
    prompt: bytes = b""
    """Prompt ids after the prefix, int32."""
    sampled: bytes = b""
    logprobs: bytes = b""
    version: int = 0
    """The policy version that sampled it; the oldest, where `spans` says that there were several."""
    spans: tuple[Span, ...] = ()
    """Stretches of `sampled` by version, where weights changed in the middle of it."""
    finish: Finish = "stop"
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    started: float = 0.0
    seconds: float = 0.0
    queued: float = 0.0
    upstream: str = ""
    extras: dict[str, Extra] = {}
    scope: bytes = b""
    """At a root: a digest of what else shaped the prompt, as tools do; turns share nothing across scopes."""
    partial: bool = False
    """Whether the client closed the stream before the answer was complete. What was sampled until then counts
    against the budgets; it trains only as far as a later turn continues from it."""
    cuts: bytes = b""
    """Of a partial turn: where its client may have stopped reading. Four int32 for each place: characters of
    content, characters of reasoning, tool calls, and the sampled tokens that they were read from."""
    key: str = ""
    """A digest of the client's request, by which its retry is known, and its answer's name, if it has one; empty
    for calls made in Python."""

    def __post_init__(self) -> None:
        if len(self.prompt) % 4 or len(self.sampled) % 4:
            raise ValueError("token ids are int32: their bytes must be a multiple of 4")
        if self.logprobs and len(self.logprobs) != len(self.sampled):
            raise ValueError(f"{len(self.sampled) // 4} sampled tokens but {len(self.logprobs) // 4} logprobs")
        if self.spans and not spans_cover(self.spans, len(self.sampled) // 4):
            raise ValueError(f"the version spans do not cover {len(self.sampled) // 4} sampled tokens exactly")
        for name, extra in self.extras.items():
            if len(extra.data) != len(self.sampled) // 4 * extra.width:
                raise ValueError(f"extra {name!r} does not describe {len(self.sampled) // 4} tokens")
        if len(self.cuts) % 16:
            raise ValueError("the cuts of a partial turn are four int32 each")

    def shortened(self, tokens: int) -> "Turn":
        """The same turn with its first `tokens` sampled tokens only."""
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
    """A token sequence ready for training. `mask` is 1 where the policy sampled; there it trains."""

    tokens: bytes
    mask: bytes
    logprobs: bytes
    """float32 per token; 0.0 where the mask is 0."""
    versions: tuple[Span, ...] = ()
    """One span for each stretch of trained tokens, in order, disjoint."""
    extras: dict[str, Extra] = {}
    turns: tuple[int, ...] = ()
    """Indices of the turns whose sampled tokens train here."""

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
                raise ValueError(f"version span {span} is out of order or outside of {n} tokens")
            if self.mask.count(1, span.start, span.end) != span.end - span.start:
                raise ValueError(f"version span {span} covers tokens that do not train")
            at = span.end
            trained += span.end - span.start
        if trained != self.mask.count(1):
            raise ValueError("the version spans do not cover the trained tokens exactly")
        if trained + self.mask.count(0) != n:
            raise ValueError("a mask holds zeros and ones only")
        for name, extra in self.extras.items():
            if len(extra.data) != n * extra.width:
                raise ValueError(f"extra {name!r} does not describe {n} tokens")

    def __len__(self) -> int:
        return len(self.tokens) // 4

    @property
    def trained(self) -> int:
        """How many tokens train."""
        return self.mask.count(1)
