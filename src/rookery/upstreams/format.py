"""What the wire formats share: a settled request, and an answer that is gathered from a stream.

A format is how one endpoint is spoken: a request out, a whole answer in, or its events one by one. Formats are
pure: no socket, no clock.

Promises, of every format:
- an answer is understood completely or raises `WireError`: nothing is padded, guessed or cut to fit;
- token ids and logprobs describe the same tokens, or the answer is refused;
- what a gathering gives piece by piece, joined, is the answer that it gives at the end;
- an answer without its finish is not complete, and is never given as one.
"""

from typing import Any, Final, Protocol

import msgspec

from rookery.core import Finish, Message, Sampling, Span, ToolCall, floats
from rookery.upstreams.complaints import Complaint
from rookery.upstreams.ids import ids_bytes
from rookery.upstreams.protocol import CallDelta, Delta, ModelReply, ModelRequest
from rookery.upstreams.sse import Events, TooLong

MAX_GATHERED: Final = 256 << 20
"""Bytes of text and tokens that one streamed answer may have."""

FINISH: Final[dict[str, Finish]] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
    "abort": "abort",
    "eos_token": "stop",
    "stop_sequence": "stop",
}

Tops = tuple[tuple[int, float], ...]


class WireError(Exception):
    """An answer that cannot be understood; the text says what is wrong with it."""


class Complained(Exception):  # noqa: N818  (never leaves the room)
    """An answer that turned into a complaint."""

    def __init__(self, said: Complaint, data: bytes) -> None:
        super().__init__(said.text)
        self.said = said
        self.data = data


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it will be sent: what the upstream settled about it."""

    request: ModelRequest
    model: str
    sampling: Sampling
    without: frozenset[str] = frozenset()
    """Fields that the server refuses."""
    reasoning: bool = False
    """Whether the reasoning of earlier answers goes along."""
    stream: bool = False
    id: str = ""
    """What the call is called at the engine, where that has a use."""

    @property
    def seen(self) -> bool:
        """Whether the caller looks at the logprobs itself."""
        return self.request.want_logprobs or self.request.top_logprobs > 0


class About(msgspec.Struct, frozen=True, gc=False):
    """What is known about an answer besides its bytes."""

    version: int = 0
    """Taken where the answer says none."""
    queued: float = 0.0
    replica: str = ""


class Format(Protocol):
    """One endpoint."""

    path: str
    """Of the endpoint; below `/v1`, unless it begins with a slash."""

    def encode(self, ask: Ask) -> bytes: ...

    def decode(self, data: bytes, ask: Ask, about: About) -> ModelReply: ...

    def streams(self, request: ModelRequest) -> bool:
        """Whether the endpoint can stream what is asked for."""
        ...

    def gather(self, ask: Ask) -> "Gather": ...


def finish_of(reason: str) -> Finish:
    finish = FINISH.get(reason)
    if finish is None:
        raise WireError(f"unknown finish_reason {reason[:80]!r}")
    return finish


def version_number(value: object) -> int | None:
    """A policy version, where the value is one: an integer, or a string of digits."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 19:
        return int(value)
    return None


def packed(values: list[float]) -> bytes:
    """Logprobs as float32."""
    try:
        return floats(values)
    except OverflowError:
        raise WireError("the answer has a logprob that is not a 32-bit float") from None


def joined_json(lists: list[msgspec.Raw]) -> msgspec.Raw:
    """JSON lists, one after the other, as one."""
    if len(lists) == 1:
        return lists[0]
    inner = (bytes(one).strip()[1:-1].strip() for one in lists)
    return msgspec.Raw(b"[" + b",".join(part for part in inner if part) + b"]")


class Gather:
    """An answer under way. Subclasses read one event; what is new is taken after every read."""

    __slots__ = (
        "_calls",
        "_content",
        "_events",
        "_first",
        "_fresh_calls",
        "_fresh_content",
        "_fresh_ids",
        "_fresh_logprobs",
        "_fresh_reasoning",
        "_fresh_seen",
        "_fresh_tops",
        "_ids",
        "_logprobs",
        "_prompt",
        "_prompt_told",
        "_reasoning",
        "_seen",
        "_size",
        "_tops",
        "_versions",
        "ask",
        "count",
        "done",
        "finish",
        "prompt_tokens",
        "sampled_tokens",
    )

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.finish: Finish | None = None
        self.done = False
        """Whether the stream said that it has ended."""
        self.count = 0
        """Tokens so far."""
        self.prompt_tokens: int | None = None
        self.sampled_tokens: int | None = None
        self._events = Events()
        self._size = 0
        self._prompt = ask.request.tokens
        self._prompt_told = bool(self._prompt)
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[str, list[str], list[str]]] = []
        """Id, name and arguments of each call, as they came."""
        self._ids: list[bytes] = []
        self._logprobs: list[bytes] = []
        self._tops: list[Tops] = []
        self._seen: list[msgspec.Raw] = []
        self._versions: list[tuple[int, int]] = []
        """From which token on which version, where the events say one."""
        self._first = 0
        self._fresh_content: list[str] = []
        self._fresh_reasoning: list[str] = []
        self._fresh_calls: list[CallDelta] = []
        self._fresh_ids: list[int] = []
        self._fresh_logprobs: list[float] = []
        self._fresh_tops: list[Tops] = []
        self._fresh_seen: list[msgspec.Raw] = []

    def feed(self, data: bytes) -> Delta | None:
        """What these bytes add to the answer, if anything."""
        try:
            events = self._events.feed(data)
        except TooLong:
            raise WireError("the answer has an event that does not end") from None
        for event in events:
            if event == b"[DONE]":
                self.done = True
                break
            self.event(event)
        return self._take()

    def event(self, data: bytes) -> None:
        """Takes in one event."""
        raise NotImplementedError

    def ended(self) -> str:
        """The stream is at its end: what is missing, in words; nothing where the answer is whole."""
        if self.finish is not None:
            return ""
        if self._events.half:
            return "the stream ended in the middle of an event"
        return "the stream ended without the answer's finish"

    def reply(self, about: About) -> ModelReply:
        """The whole answer."""
        if self.finish is None:
            raise WireError("the answer has no finish_reason: it is not complete")
        sampled, logprobs = b"".join(self._ids), b"".join(self._logprobs)
        version, spans = self._spans(about.version)
        prompt = self._prompt
        return ModelReply(
            message=self._message(),
            finish=self.finish,
            prompt=prompt,
            sampled=sampled,
            logprobs=logprobs,
            version=version,
            prompt_tokens=len(prompt) // 4 if self.prompt_tokens is None else self.prompt_tokens,
            sampled_tokens=self.count if self.sampled_tokens is None else self.sampled_tokens,
            queued=about.queued,
            replica=about.replica,
            spans=spans,
            tops=tuple(self._tops),
            logprob_content=joined_json(self._seen) if self._seen else None,
        )

    # --------------------------------------------------------------------------------- for the formats

    def tokens(self, ids: list[int], logprobs: list[float] | None) -> None:
        """Sampled tokens, and the logprobs of the same ones."""
        if not ids and not logprobs:
            return
        if logprobs is not None and len(logprobs) != len(ids):
            raise WireError(f"the answer has {len(ids)} token ids but {len(logprobs)} logprobs")
        known = self._logprobs or self._fresh_logprobs
        if self.count and bool(known) != (logprobs is not None):
            raise WireError("the answer has logprobs for some of its tokens only")
        if not self._fresh_ids:
            self._first = len(ids)
        self._fresh_ids += ids
        if logprobs:
            self._fresh_logprobs += logprobs
        self.count += len(ids)

    def text(self, content: str) -> None:
        self._fresh_content.append(content)

    def thought(self, reasoning: str) -> None:
        self._fresh_reasoning.append(reasoning)

    def prompt(self, ids: bytes) -> None:
        self._prompt = ids

    def alternatives(self, tops: list[Tops]) -> None:
        self._fresh_tops += tops

    def as_written(self, content: msgspec.Raw) -> None:
        self._fresh_seen.append(content)

    def version(self, number: int) -> None:
        """The next tokens are of this version."""
        if not self._versions or self._versions[-1][1] != number:
            self._versions.append((self.count, number))

    def called(self, index: int, name_of: str | None, name: str | None, arguments: str | None) -> None:
        """A piece of a tool call. Servers that do not number their calls begin each with its id and name."""
        calls = self._calls
        if not 0 <= index <= len(calls):
            raise WireError(f"a piece of tool call {index}, and there are {len(calls)}")
        if index == len(calls):
            begun = (name_of or f"call_{index}", [name] if name else [], [] if arguments is None else [arguments])
            calls.append(begun)
            self._fresh_calls.append(CallDelta(index, begun[0], name or "", arguments or ""))
            return
        _, names, parts = calls[index]
        # Some servers repeat the name with every piece: it is told once.
        if named := bool(name and not names):
            names.append(name or "")
        if arguments is not None:
            parts.append(arguments)
        if named or arguments:
            said = (name or "") if named else ""
            self._fresh_calls.append(CallDelta(index, name=said, arguments=arguments or ""))

    # ------------------------------------------------------------------------------------------- pieces

    def _take(self) -> Delta | None:
        content, reasoning = "".join(self._fresh_content), "".join(self._fresh_reasoning)
        ids, calls = self._fresh_ids, self._fresh_calls
        prompt = b"" if self._prompt_told else self._prompt
        if not (content or reasoning or ids or calls or prompt):
            return None
        sampled = logprobs = b""
        more: dict[str, Any] = {}
        if content:
            self._content.append(content)
            self._fresh_content = []
        if reasoning:
            self._reasoning.append(reasoning)
            self._fresh_reasoning = []
        if ids:
            try:
                sampled = ids_bytes(ids)
            except ValueError as error:
                raise WireError(f"the answer has {error}") from None
            self._ids.append(sampled)
            self._fresh_ids = []
            more["first"] = self._first
            if self._fresh_logprobs:
                logprobs = packed(self._fresh_logprobs)
                self._logprobs.append(logprobs)
                self._fresh_logprobs = []
        if calls:
            more["tool_calls"] = tuple(calls)
            self._fresh_calls = []
        if self._fresh_tops:
            more["tops"] = tuple(self._fresh_tops)
            self._tops += self._fresh_tops
            self._fresh_tops = []
        if self._fresh_seen:
            seen = joined_json(self._fresh_seen)
            more["logprob_content"] = seen
            self._seen.append(seen)
            self._fresh_seen = []
        if self._versions:
            more["version"] = self._versions[-1][1]
        self._prompt_told = self._prompt_told or bool(prompt)
        self._size += len(content) + len(reasoning) + len(sampled) + len(logprobs)
        if self._size > MAX_GATHERED:
            raise WireError(f"the answer is longer than {MAX_GATHERED >> 20} MB")
        return Delta(content, reasoning, sampled=sampled, logprobs=logprobs, prompt=prompt, **more)

    def _message(self) -> Message:
        calls = tuple(
            ToolCall(name_of, "".join(names), "".join(parts) if parts else "{}")
            for name_of, names, parts in self._calls
        )
        content = "".join(self._content)
        reasoning = "".join(self._reasoning)
        return Message("assistant", content if content or not calls else None, calls, reasoning=reasoning or None)

    def _spans(self, fallback: int) -> tuple[int, tuple[Span, ...]]:
        said = self._versions
        if not said:
            return fallback, ()
        bounds = [start for start, _ in said] + [self.count]
        bounds[0] = 0
        spans = tuple(
            Span(start, end, number)
            for (_, number), start, end in zip(said, bounds[:-1], bounds[1:], strict=True)
            if end > start
        )
        if len(spans) < 2:
            return (spans[0].version if spans else said[-1][1]), ()
        return min(span.version for span in spans), spans
