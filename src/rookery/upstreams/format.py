"""Shared parts of the wire formats: the `Format` protocol, and the parser for streamed replies.

A format describes one HTTP endpoint of an inference engine: how a request is encoded, and how a complete or a
streamed reply is decoded. Formats are pure: no socket, no clock.

Guarantees of every format:
- a reply is parsed completely or raises `ReplyFormatError`: nothing is padded, guessed or cut to fit;
- token IDs and logprobs describe the same tokens, or `ReplyFormatError` is raised;
- the pieces (`Delta`) of a stream, joined, are the reply that the parser returns at the end;
- a reply without its finish reason is incomplete, and is never returned as complete.
"""

from typing import Any, Final, Protocol

import msgspec

from rookery.core import Finish, Message, Span, ToolCall, floats
from rookery.upstreams.error_replies import ServerError
from rookery.upstreams.protocol import CallDelta, Delta, ModelReply, ModelRequest
from rookery.upstreams.sse import Events, EventTooLong
from rookery.upstreams.token_ids import pack_ids

MAX_GATHERED: Final = 256 << 20
"""The maximum size of a streamed reply: characters of text plus bytes of token IDs and logprobs."""

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


class ReplyFormatError(Exception):
    """Raised for a reply that is incomplete or cannot be parsed; the message says why."""


class ErrorReply(Exception):  # noqa: N818  (control flow: handled by `HttpUpstream`)
    """Raised if the body of a response with status 200, or an event of a stream, is an error message.

    `error` is the parsed error, `data` its JSON.
    """

    def __init__(self, error: ServerError, data: bytes) -> None:
        super().__init__(error.text)
        self.error = error
        self.data = data


class WireOptions(msgspec.Struct, frozen=True):
    """Options for encoding a request that depend on the server and the caller, not on the request."""

    stream: bool = False
    omit: frozenset[str] = frozenset()
    """Names of fields to leave out because the server rejects them, and paths of endpoints that the server
    lacks."""
    resend_reasoning: bool = False
    """Send the reasoning of earlier replies back to the server."""


class ReplyContext(msgspec.Struct, frozen=True, gc=False):
    """Values for a `ModelReply` that are not in the bytes of the response."""

    version: int = 0
    """The policy version to use if the reply reports none."""
    queued: float = 0.0
    replica: str = ""


class Format(Protocol):
    """Interface of a wire format: encode requests for one endpoint of an inference engine, decode its replies."""

    path: str
    """The endpoint's path, relative to `/v1` unless it begins with a slash."""

    def encode(self, request: ModelRequest, options: WireOptions) -> bytes: ...

    def decode(self, data: bytes, request: ModelRequest, context: ReplyContext) -> ModelReply: ...

    def streams(self, request: ModelRequest) -> bool:
        """Return True if the endpoint can stream the reply to this request."""
        ...

    def stream_parser(self, request: ModelRequest) -> "StreamParser": ...


def parse_finish(reason: str) -> Finish:
    finish = FINISH.get(reason)
    if finish is None:
        raise ReplyFormatError(f"the reply has the unknown finish_reason {reason[:80]!r}")
    return finish


def parse_version(value: object) -> int | None:
    """Return the policy version in a value that a server sent: an integer or a string of digits. Else return
    None."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 19:
        return int(value)
    return None


def pack_logprobs(values: list[float]) -> bytes:
    """Pack logprobs as float32 bytes. Raises `ReplyFormatError` if one does not fit."""
    try:
        return floats(values)
    except OverflowError:
        raise ReplyFormatError("the reply has a logprob that does not fit a 32-bit float") from None


def join_json_lists(lists: list[msgspec.Raw]) -> msgspec.Raw:
    """Concatenate the text of JSON lists into one JSON list, without decoding the entries."""
    if len(lists) == 1:
        return lists[0]
    inner = [bytes(one).strip()[1:-1].strip() for one in lists]
    return msgspec.Raw(b"[%b]" % b",".join(filter(None, inner)))


class StreamParser:
    """Incremental parser for one streamed reply.

    A subclass implements `event`, which parses the data of one server-sent event and adds to the reply with
    `tokens`, `text`, `called` and the other methods.
    """

    def __init__(self, request: ModelRequest) -> None:
        self.request = request
        self.finish: Finish | None = None
        self.done = False
        """True if the stream announced its end with `[DONE]` or an equivalent event."""
        self.count = 0
        """The number of sampled tokens so far."""
        self.prompt_tokens: int | None = None
        self.sampled_tokens: int | None = None
        self._events = Events()
        self._size = 0
        self._prompt = request.tokens
        self._prompt_sent = bool(self._prompt)
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[str, list[str], list[str]]] = []
        """One entry per tool call: its ID, the pieces of its name, and the pieces of its arguments."""
        self._ids: list[bytes] = []
        self._logprobs: list[bytes] = []
        self._tops: list[Tops] = []
        self._raw_logprobs: list[msgspec.Raw] = []
        self._versions: list[tuple[int, int]] = []
        """One entry per change of the policy version that the events report: index of the first token, and the
        version."""
        self._first = 0
        self._fresh_content: list[str] = []
        self._fresh_reasoning: list[str] = []
        self._fresh_calls: list[CallDelta] = []
        self._fresh_ids: list[int] = []
        self._fresh_logprobs: list[float] = []
        self._fresh_tops: list[Tops] = []
        self._fresh_raw_logprobs: list[msgspec.Raw] = []

    def feed(self, data: bytes) -> Delta | None:
        """Parse the next bytes of the stream. Return what they add to the reply; None if they add nothing."""
        try:
            events = self._events.feed(data)
        except EventTooLong:
            raise ReplyFormatError(
                "a server-sent event in the reply's stream is longer than Rookery accepts: "
                "request fewer top logprobs, or check the server"
            ) from None
        if b"[DONE]" in events:
            self.done = True
            del events[events.index(b"[DONE]") :]
        self.events(events)
        return self._take()

    def events(self, events: list[bytes]) -> None:
        """Parse the data of several server-sent events that arrived together, and add them to the reply."""
        for event in events:
            self.event(event)

    def event(self, data: bytes) -> None:
        """Parse the data of one server-sent event, and add it to the reply."""
        raise NotImplementedError

    def ended(self) -> str:
        """Check the reply at the end of the stream. Return an error message if it is incomplete; otherwise
        empty."""
        if self.finish is not None:
            return ""
        if self._events.incomplete:
            return "the stream ended in the middle of an event"
        return "the stream ended without a finish reason"

    def reply(self, context: ReplyContext) -> ModelReply:
        """Return the complete reply. Raises `ReplyFormatError` if no finish reason has arrived."""
        if self.finish is None:
            raise ReplyFormatError("the reply has no finish_reason: it is incomplete")
        sampled, logprobs = b"".join(self._ids), b"".join(self._logprobs)
        version, spans = self._spans(context.version)
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
            queued=context.queued,
            replica=context.replica,
            spans=spans,
            tops=tuple(self._tops),
            logprob_content=join_json_lists(self._raw_logprobs) if self._raw_logprobs else None,
        )

    # --------------------------------------------------------------------------------- for the formats

    def tokens(self, ids: list[int], logprobs: list[float] | None) -> None:
        """Add sampled tokens and their logprobs; `logprobs` is None if the server sent none."""
        if not ids and not logprobs:
            return
        if logprobs is not None and len(logprobs) != len(ids):
            raise ReplyFormatError(f"the reply has {len(ids)} token IDs but {len(logprobs)} logprobs")
        known = self._logprobs or self._fresh_logprobs
        if self.count and bool(known) != (logprobs is not None):
            raise ReplyFormatError("the reply has logprobs for some of its tokens but not for all")
        if not self._fresh_ids:
            self._first = len(ids)
        self._fresh_ids += ids
        if logprobs:
            self._fresh_logprobs += logprobs
        self.count += len(ids)

    def text(self, content: str) -> None:
        self._fresh_content.append(content)

    def add_reasoning(self, reasoning: str) -> None:
        self._fresh_reasoning.append(reasoning)

    def prompt(self, ids: bytes) -> None:
        self._prompt = ids

    def alternatives(self, tops: list[Tops]) -> None:
        self._fresh_tops += tops

    def add_raw_logprobs(self, content: msgspec.Raw) -> None:
        self._fresh_raw_logprobs.append(content)

    def version(self, number: int) -> None:
        """Set the policy version that sampled the tokens added from now on."""
        if not self._versions or self._versions[-1][1] != number:
            self._versions.append((self.count, number))

    def called(self, index: int, name_of: str | None, name: str | None, arguments: str | None) -> None:
        """Add a piece of tool call number `index`. `name_of` is the call's ID, `name` the name of the tool."""
        calls = self._calls
        if not 0 <= index <= len(calls):
            raise ReplyFormatError(f"the reply continues tool call {index}, but only {len(calls)} have started")
        if index == len(calls):
            begun = (name_of or f"call_{index}", [name] if name else [], [] if arguments is None else [arguments])
            calls.append(begun)
            self._fresh_calls.append(CallDelta(index, begun[0], name or "", arguments or ""))
            return
        _, names, parts = calls[index]
        # Some servers repeat the name in every piece; it is passed on once.
        if named := bool(name and not names):
            names.append(name or "")
        if arguments is not None:
            parts.append(arguments)
        if named or arguments:
            new_name = (name or "") if named else ""
            self._fresh_calls.append(CallDelta(index, name=new_name, arguments=arguments or ""))

    # ------------------------------------------------------------------------------------------- pieces

    def _take(self) -> Delta | None:
        content, reasoning = "".join(self._fresh_content), "".join(self._fresh_reasoning)
        ids, calls = self._fresh_ids, self._fresh_calls
        prompt = b"" if self._prompt_sent else self._prompt
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
                sampled = pack_ids(ids)
            except ValueError as error:
                raise ReplyFormatError(f"the reply has an invalid token ID: {error}") from None
            self._ids.append(sampled)
            self._fresh_ids = []
            more["first"] = self._first
            if self._fresh_logprobs:
                logprobs = pack_logprobs(self._fresh_logprobs)
                self._logprobs.append(logprobs)
                self._fresh_logprobs = []
        if calls:
            more["tool_calls"] = tuple(calls)
            self._fresh_calls = []
        if self._fresh_tops:
            more["tops"] = tuple(self._fresh_tops)
            self._tops += self._fresh_tops
            self._fresh_tops = []
        if self._fresh_raw_logprobs:
            joined = join_json_lists(self._fresh_raw_logprobs)
            more["logprob_content"] = joined
            self._raw_logprobs.append(joined)
            self._fresh_raw_logprobs = []
        if self._versions:
            more["version"] = self._versions[-1][1]
        self._prompt_sent = self._prompt_sent or bool(prompt)
        self._size += len(content) + len(reasoning) + len(sampled) + len(logprobs)
        if self._size > MAX_GATHERED:
            raise ReplyFormatError(f"the reply is longer than {MAX_GATHERED >> 20} MB")
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
        versions = self._versions
        if not versions:
            return fallback, ()
        bounds = [start for start, _ in versions] + [self.count]
        bounds[0] = 0
        spans = tuple(
            Span(start, end, number)
            for (_, number), start, end in zip(versions, bounds[:-1], bounds[1:], strict=True)
            if end > start
        )
        if len(spans) < 2:
            return (spans[0].version if spans else versions[-1][1]), ()
        return min(span.version for span in spans), spans


def delta_from_reply(reply: ModelReply) -> Delta:
    """Return a complete reply as a single piece of a stream, for callers that requested a stream."""
    message = reply.message
    calls = tuple(CallDelta(n, call.id, call.name, call.arguments) for n, call in enumerate(message.tool_calls))
    return Delta(
        content=message.text,
        reasoning=message.reasoning or "",
        tool_calls=calls,
        sampled=reply.sampled,
        logprobs=reply.logprobs,
        prompt=reply.prompt,
        tops=reply.tops,
        logprob_content=reply.logprob_content,
    )
