"""Helpers shared by the API dialects: decode request bodies, format logprobs, OpenAI's errors and stream
events."""

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias, TypeVar, cast

import msgspec
from msgspec import UNSET, UnsetType

from rookery.core import Finish, Message, ToolCall, UpstreamError, ints
from rookery.core.strict_json import strict_json
from rookery.gateway.dialects.protocol import BadRequestError, ClientRequest, ErrorKind
from rookery.upstreams.protocol import CallDelta, DecodeTokens, Delta, ModelReply, TopLogprobs

log = logging.getLogger("rookery.gateway")
T = TypeVar("T")

MAX_CHOICES: Final = 64
MAX_TOP_LOGPROBS: Final = 20
NULL: Final = b"null"
SINGLE_CALL: Final[dict[str, Any]] = {"parallel_tool_calls": False}
"""Sampling parameter for inference engines that limits a reply to one tool call. By default several are
allowed."""
KEEPALIVE_INTERVAL: Final = 64
"""Number of parts of a reply with nothing to send after which a stream sends an empty event, because clients give
up on a stream without events."""

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Seed: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Temperature: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=100)]
Probability: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=1)]
TopK: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]

Content: TypeAlias = str | tuple[dict[str, Any], ...] | None

Field: TypeAlias = msgspec.Raw | UnsetType
"""Type of a request field that is kept as raw JSON instead of being decoded."""

encode = msgspec.json.Encoder().encode
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*)`$")
_warned: set[str] = set()
MAX_WARNED: Final = 100
_EMPTY_VALUES: Final = frozenset({NULL, b"false", b"[]", b"{}", b'""'})

OPENAI_ERRORS: Final[dict[ErrorKind, tuple[int, str, str | None]]] = {
    "bad_request": (400, "invalid_request_error", None),
    "thread": (400, "invalid_request_error", "thread_unsupported_request"),
    "unauthorized": (401, "authentication_error", "invalid_api_key"),
    "not_found": (404, "invalid_request_error", "not_found"),
    "method": (405, "invalid_request_error", "method_not_allowed"),
    "gone": (410, "invalid_request_error", "rollout_gone"),
    "conflict": (409, "invalid_request_error", "conflict"),
    "too_large": (413, "invalid_request_error", "request_too_large"),
    "truncated": (400, "invalid_request_error", "rollout_truncated"),
    "context": (400, "invalid_request_error", "context_length_exceeded"),
    "unavailable": (503, "server_error", "upstream_unavailable"),
    "timeout": (504, "server_error", "upstream_timeout"),
    "upstream": (502, "server_error", "upstream_error"),
    "internal": (500, "server_error", "internal_error"),
}
"""Status, type and code of an error in OpenAI's format, by kind of error. An exhausted budget has status 400,
because OpenAI's client library retries 408, 409, 429 and 5xx."""


def decode_body(decode: Callable[[bytes], T], body: bytes) -> T:
    """Decode the JSON body of a request. Raises `BadRequestError` if it is invalid.

    Unknown fields are dropped; a warning is logged once per field name and process.
    """
    fields: dict[str, msgspec.Raw] | None = None
    try:
        while True:
            try:
                return decode(body if fields is None else encode(fields))
            except msgspec.ValidationError as error:
                unknown = _UNKNOWN.match(str(error))
                if unknown is None:
                    raise
                fields = _fields(body) if fields is None else fields
                _warn(unknown[1], fields.pop(unknown[1]))
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        field = path[1:-1]
        raise BadRequestError(f"{what}{f' (at {field})' if field else ''}", field or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequestError(f"the body of the request is not valid JSON: {error}") from None


def _warn(name: str, value: msgspec.Raw) -> None:
    if bytes(value) != NULL and name not in _warned and len(_warned) < MAX_WARNED:
        _warned.add(name)
        log.warning("the unknown field %r of a client's request is ignored", name[:80])


def reject_fields(request: msgspec.Struct, reasons: Mapping[str, str]) -> None:
    """Raise `BadRequestError` if the request has a field that is not supported.

    `reasons` maps the names of such fields to the reason. Null, false and empty values are accepted.
    """
    for name, why in reasons.items():
        value = getattr(request, name)
        if value is not UNSET and bytes(value) not in _EMPTY_VALUES:
            raise BadRequestError(f"the request field {name} is not supported: {why}", name)


def require_text(item: Mapping[str, Any], field: str, where: str) -> str:
    """Return a field of an object in a request. Raises `BadRequestError` if it is missing or not a string."""
    value = item.get(field)
    if not isinstance(value, str):
        raise BadRequestError(f"{field} is required and must be a string", f"{where}.{field}")
    return value


def openai_error(problem: ErrorKind, message: str, where: str | None = None) -> tuple[int, dict[str, Any]]:
    """Return the status of an error, and the content of the `error` object in OpenAI's format."""
    status, kind, code = OPENAI_ERRORS[problem]
    return status, {"message": message, "type": kind, "param": where, "code": code}


def event(name: str, data: Any) -> bytes:
    """Format one named server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode(data))


def get_finish_reason(finish: Finish) -> str:
    """Return OpenAI's finish reason. An aborted reply gets the reason `length`."""
    return "length" if finish == "abort" else finish


def normalise_stops(stops: str | Sequence[str] | None) -> tuple[str, ...]:
    return tuple(text for text in ((stops,) if isinstance(stops, str) else stops or ()) if text)


def encode_json(value: Any) -> str:
    """Encode a value that was parsed from a client's JSON. It may contain integers of any size."""
    try:
        return encode(value).decode()
    except OverflowError:  # a number of more than 64 bits
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def join_content(one: Content, other: Content, separator: str) -> Content:
    """Join the content of two messages: as one text if both are texts, else as a list of content parts."""
    if not one or not other:
        return one or other
    if isinstance(one, str) and isinstance(other, str):
        return f"{one}{separator}{other}"
    return (*_parts(one), *_parts(other))


def _parts(content: str | tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    return ({"type": "text", "text": content},) if isinstance(content, str) else content


def move_system_first(messages: Iterable[Message], *, merge: bool) -> tuple[Message, ...]:
    """Reorder messages so that every chat format can render them.

    System messages at the start become one message. Later ones become user messages whose text is enclosed in
    `<system>` tags, because agents put system messages anywhere and many chat formats accept them only at the
    start. With `merge`, neighbouring user messages are joined.
    """
    found: list[Message] = []
    for message in messages:
        last = found[-1] if found else None
        if message.role in ("system", "developer"):
            if last is None:
                found.append(message)
                continue
            if last.role in ("system", "developer") and len(found) == 1:
                found[0] = Message(last.role, join_content(last.content, message.content, "\n\n"))
                continue
            marked = join_content(join_content("<system>", message.content, "\n"), "</system>", "\n")
            message = Message("user", marked)  # noqa: PLW2901
        if merge and last is not None and last.role == message.role == "user":
            found[-1] = Message("user", join_content(last.content, message.content, "\n"))
        else:
            found.append(message)
    return tuple(found)


def merge_text_parts(parts: Iterable[Any], separator: str) -> Content:
    """Join parts into one string if all are texts; else return them as content parts of the chat API.

    None is skipped. Without any part, the result is None.
    """
    found = [part for part in parts if part is not None]
    if all(isinstance(part, str) for part in found):
        return separator.join(found) if found else None
    return tuple(part if isinstance(part, dict) else {"type": "text", "text": part} for part in found)


def make_response_format(name: str, schema: Any, strict: Any = None) -> msgspec.Raw:
    """Return the field `response_format` with which inference engines restrict a reply to a JSON schema."""
    named: dict[str, Any] = {"name": name, "schema": schema}
    if strict is not None:
        named["strict"] = strict
    return msgspec.Raw(encode({"type": "json_schema", "json_schema": named}))


def parse_object(arguments: str) -> dict[str, Any] | None:
    """Parse the arguments of a tool call.

    Returns None if they are not a JSON object, or if clients could parse them differently (large integers, lone
    surrogates).
    """
    try:
        found = _load(arguments)
        if "\\u" in arguments:
            json.dumps(found, ensure_ascii=False).encode()  # a lone surrogate cannot be encoded
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _parse_int(text: str) -> int:
    value = int(text)
    if not -(2**63) <= value < 2**64:
        raise ValueError("a number is too large")
    return value


_load = strict_json(_parse_int)


class CallEvent(NamedTuple):
    """An event of a streamed tool call: it begins, its arguments continue, or it ends. `at` is its index."""

    kind: Literal["begin", "more", "end"]
    at: int
    id: str
    name: str
    text: str = ""
    """The next part of the arguments for `more`, the complete arguments for `end`."""


class CallSequencer:
    """Converts the deltas of tool calls to events, for APIs that stream one call completely after the other.

    Events that depend on the complete reply are deferred to `finish`. For example, only the complete reply shows
    whether a call without arguments is complete.
    """

    def __init__(self) -> None:
        self.started = False
        """True if a delta of a tool call has arrived."""
        self._current: ToolCall | None = None
        self._index = -1
        self._deferred = False

    def feed(self, delta: CallDelta) -> Iterator[CallEvent]:
        """Yield the events that can be sent after this delta.

        Raises `UpstreamError` if the inference engine continues an earlier call, or sends the name of a call
        twice.
        """
        self.started = True
        if delta.index < self._index:
            raise UpstreamError(
                f"the inference engine continued tool call {delta.index} after it started another one",
                cause="upstream.protocol",
            )
        if self._deferred:
            return
        current = self._current
        if delta.index > self._index:
            if current is not None and not current.arguments:
                self._deferred = True
                return
            if current is not None:
                yield CallEvent("end", self._index, current.id, current.name, current.arguments)
            self._index += 1
            self._current = ToolCall(delta.id, delta.name, delta.arguments)
            if not delta.id or not delta.name or delta.index != self._index:
                self._index, self._current, self._deferred = self._index - 1, None, True
                return
            yield CallEvent("begin", self._index, delta.id, delta.name)
        else:
            assert current is not None
            self._current = ToolCall(current.id, current.name + delta.name, current.arguments + delta.arguments)
            if delta.name:
                raise UpstreamError(
                    "the inference engine sent the name of a tool call twice", cause="upstream.protocol"
                )
        if delta.arguments:
            yield CallEvent("more", self._index, self._current.id, self._current.name, delta.arguments)

    def finish(self, calls: Sequence[ToolCall]) -> Iterator[CallEvent]:
        """Yield the remaining events at the end of a reply. `calls` are all its tool calls."""
        current = self._current
        if current is not None:
            rest = calls[self._index].arguments if self._index < len(calls) else current.arguments
            if rest.startswith(current.arguments) and len(rest) > len(current.arguments):
                yield CallEvent("more", self._index, current.id, current.name, rest[len(current.arguments) :])
                current = ToolCall(current.id, current.name, rest)
            elif not current.arguments:
                current = ToolCall(current.id, current.name, rest)
            yield CallEvent("end", self._index, current.id, current.name, current.arguments)
        for at in range(self._index + 1, len(calls)):
            call = calls[at]
            yield CallEvent("begin", at, call.id, call.name)
            if call.arguments:
                yield CallEvent("more", at, call.id, call.name, call.arguments)
            yield CallEvent("end", at, call.id, call.name, call.arguments)


# ---- tokens


def openai_usage(replies: list[ModelReply], n: int) -> dict[str, Any]:
    """Return token counts in OpenAI's format. The tokens of a prompt are counted once for its `n` choices."""
    prompt = sum(reply.prompt_tokens for reply in replies[::n])
    sampled = sum(reply.sampled_tokens for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def format_reply_logprobs(
    client_request: ClientRequest, reply: ModelReply
) -> list[dict[str, Any]] | msgspec.Raw | None:
    """Return the logprobs of a complete reply in the format of OpenAI's chat API; None if it has none."""
    if reply.logprob_content is not None and reply.decode_tokens is None:
        return reply.logprob_content
    turn = reply.turn
    if not turn.logprobs:
        return None
    return format_logprobs(
        turn.sampled, turn.logprobs, reply.tops, client_request.top_logprobs, reply.decode_tokens
    )


def format_delta_logprobs(
    client_request: ClientRequest, delta: Delta, decode_tokens: DecodeTokens | None
) -> list[dict[str, Any]] | msgspec.Raw | None:
    """Return the logprobs of a delta in the format of OpenAI's chat API.

    Returns None if the delta has none or the client did not request logprobs.
    """
    if not client_request.want_logprobs:
        return None
    if delta.logprob_content is not None and decode_tokens is None:
        return delta.logprob_content
    if not delta.logprobs:
        return None
    return format_logprobs(delta.sampled, delta.logprobs, delta.tops, client_request.top_logprobs, decode_tokens)


def decode_logprobs(content: list[dict[str, Any]] | msgspec.Raw | None) -> list[dict[str, Any]]:
    """Return logprobs in the format of OpenAI's chat API as Python objects, decoding them if they are raw JSON."""
    if isinstance(content, msgspec.Raw):
        decoded: list[dict[str, Any]] = msgspec.json.decode(content)
        return decoded
    return content or []


def format_logprobs(
    sampled: bytes, logprobs: bytes, tops: TopLogprobs, most: int, decode_tokens: DecodeTokens | None
) -> list[dict[str, Any]]:
    """Return logprobs in the format of OpenAI's chat API.

    `tops` are the most likely tokens at each position, of which up to `most` are included. Without
    `decode_tokens`, a token is named by its ID (`token_id:42`), as inference engines do.
    """
    tokens = memoryview(sampled).cast("i").tolist()
    values = cast("list[float]", memoryview(logprobs).cast("f").tolist())
    found = _format_tokens(tokens, values, decode_tokens(sampled) if decode_tokens is not None else None)
    for at, entry in enumerate(found):
        entry["top_logprobs"] = []
        if most and at < len(tops):
            pairs = tops[at][:most]
            texts = decode_tokens(ints([token for token, _ in pairs])) if decode_tokens is not None else None
            entry["top_logprobs"] = _format_tokens(
                [token for token, _ in pairs], [value for _, value in pairs], texts
            )
    return found


def _format_tokens(
    tokens: Sequence[int], values: Sequence[float], texts: list[bytes] | None
) -> list[dict[str, Any]]:
    if texts is None:
        return [
            {"token": f"token_id:{token}", "logprob": value, "bytes": None}
            for token, value in zip(tokens, values, strict=True)
        ]
    return [
        {"token": text.decode("utf-8", "replace"), "logprob": value, "bytes": list(text)}
        for text, value in zip(texts, values, strict=True)
    ]


def find_stop_string(reply: ModelReply, stops: Sequence[str]) -> str | None:
    """Return the stop string that ended a reply.

    Returns None if no stop string ended it, or if the sampled tokens cannot be decoded to find out.
    """
    if not stops or reply.decode_tokens is None or reply.finish != "stop":
        return None
    text = b"".join(reply.decode_tokens(reply.sampled)).decode("utf-8", "replace")
    matches = [(at + len(stop), stop) for stop in stops if (at := text.find(stop)) >= 0]
    return min(matches)[1] if matches else None
