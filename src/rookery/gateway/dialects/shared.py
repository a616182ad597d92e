"""What dialects have in common: reading bodies, naming tokens, OpenAI's errors, events of a stream.

Promises:
- a body that cannot be read is a `BadRequestError` that says what is wrong and where;
- a piece of an answer is told once, and a call only when all that came before it is over.
"""

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias, TypeVar, cast

import msgspec
from msgspec import UNSET, UnsetType

from rookery.core import Finish, Message, ToolCall, UpstreamError, ints
from rookery.core.strict import strict_json
from rookery.gateway.dialects.protocol import Ask, BadRequestError, Problem
from rookery.gateway.session import Reply, Spell, Tops
from rookery.upstreams.protocol import CallDelta

log = logging.getLogger("rookery.gateway")
T = TypeVar("T")

MAX_CHOICES: Final = 64
MAX_TOP: Final = 20
NULL: Final = b"null"
ONE_CALL: Final[dict[str, Any]] = {"parallel_tool_calls": False}
"""The sampling option that an answer calls one tool at most. More than one is the default."""
ALIVE: Final = 64
"""After so many pieces without anything to send, a stream sends an empty event: clients give up on silent ones."""

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Seed: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Temperature: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=100)]
Share: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=1)]
TopK: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]

Content: TypeAlias = str | tuple[dict[str, Any], ...] | None

Field: TypeAlias = msgspec.Raw | UnsetType
"""A field that is not decoded."""

encode = msgspec.json.Encoder().encode
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*)`$")
_warned: set[str] = set()
MAX_WARNED: Final = 100
_NOTHING: Final = frozenset({NULL, b"false", b"[]", b"{}", b'""'})

PROBLEMS: Final[dict[Problem, tuple[int, str, str | None]]] = {
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
"""Status, type and code of OpenAI's. A spent budget is a 400: its library tries 408, 409, 429 and 5xx again."""


def read(decode: Callable[[bytes], T], body: bytes) -> T:
    """The request in a body. Fields that are not known here are left out, with one warning for each name."""
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
        what, _, where = str(error).partition(" - at `$")
        place = where[1:-1]
        raise BadRequestError(f"{what}{f' (at {place})' if place else ''}", place or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequestError(f"the body is not JSON: {error}") from None


def _warn(name: str, value: msgspec.Raw) -> None:
    if bytes(value) != NULL and name not in _warned and len(_warned) < MAX_WARNED:
        _warned.add(name)
        log.warning("clients send the field %r, which is not known here: it has no effect", name[:80])


def refuse(request: msgspec.Struct, reasons: Mapping[str, str]) -> None:
    """Raises for a field of a request that is not supported. Null, false and empty values ask for nothing."""
    for name, why in reasons.items():
        value = getattr(request, name)
        if value is not UNSET and bytes(value) not in _NOTHING:
            raise BadRequestError(f"{name} is not supported: {why}", name)


def openai_error(problem: Problem, message: str, where: str | None = None) -> tuple[int, dict[str, Any]]:
    """Status, and what OpenAI's `error` holds."""
    status, kind, code = PROBLEMS[problem]
    return status, {"message": message, "type": kind, "param": where, "code": code}


def event(name: str, data: Any) -> bytes:
    """One event of a stream whose events have names."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode(data))


def finish_of(finish: Finish) -> str:
    """As OpenAI calls it. An answer that was aborted for good ends like one that was cut."""
    return "length" if finish == "abort" else finish


def stops_of(given: str | Sequence[str] | None) -> tuple[str, ...]:
    return tuple(text for text in ((given,) if isinstance(given, str) else given or ()) if text)


def as_json(value: Any) -> str:
    """JSON text of what a client's JSON was read as."""
    try:
        return encode(value).decode()
    except OverflowError:  # a number of more than 64 bits
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def joined(one: Content, other: Content, glue: str) -> Content:
    """The contents of two messages as one."""
    if not one or not other:
        return one or other
    if isinstance(one, str) and isinstance(other, str):
        return f"{one}{glue}{other}"
    return (*_parts(one), *_parts(other))


def _parts(content: str | tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    return ({"type": "text", "text": content},) if isinstance(content, str) else content


def system_first(messages: Iterable[Message], *, merge: bool) -> tuple[Message, ...]:
    """The messages as every chat format can say them: what the system says first is one message, what it says
    later is a user's that says so. Neighbouring messages of users are one, where `merge`.

    Agents tell the system's words at any place; many formats refuse them anywhere but at the beginning.
    """
    found: list[Message] = []
    for message in messages:
        last = found[-1] if found else None
        if message.role in ("system", "developer"):
            if last is None:
                found.append(message)
                continue
            if last.role in ("system", "developer") and len(found) == 1:
                found[0] = Message(last.role, joined(last.content, message.content, "\n\n"))
                continue
            said = joined(joined("<system>", message.content, "\n"), "</system>", "\n")
            message = Message("user", said)  # noqa: PLW2901  (the same, as formats have it)
        if merge and last is not None and last.role == message.role == "user":
            found[-1] = Message("user", joined(last.content, message.content, "\n"))
        else:
            found.append(message)
    return tuple(found)


def text_in(parts: Iterable[Any], glue: str) -> Content:
    """Parts as one text where they are only text; else as they are, texts as chat has them."""
    found = [part for part in parts if part is not None]
    if all(isinstance(part, str) for part in found):
        return glue.join(found) if found else None
    return tuple(part if isinstance(part, dict) else {"type": "text", "text": part} for part in found)


def schema_extra(name: str, schema: Any, strict: Any = None) -> msgspec.Raw:
    """A wish for JSON of a schema, as engines read it."""
    wish: dict[str, Any] = {"name": name, "schema": schema}
    if strict is not None:
        wish["strict"] = strict
    return msgspec.Raw(encode({"type": "json_schema", "json_schema": wish}))


def as_object(arguments: str) -> dict[str, Any] | None:
    """A call's arguments where they are an object that every client reads alike; else None."""
    try:
        found = _load(arguments)
        if "\\u" in arguments:
            json.dumps(found, ensure_ascii=False).encode()  # half a character cannot be sent
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _whole(text: str) -> int:
    value = int(text)
    if not -(2**63) <= value < 2**64:
        raise ValueError("a number is too large")
    return value


_load = strict_json(_whole)


class Told(NamedTuple):
    """What can be told of a tool call: that it begins, more of its arguments, or that it is over."""

    kind: Literal["begin", "more", "end"]
    at: int
    id: str
    name: str
    text: str = ""
    """More of the arguments; all of them at its end."""


class CallsInOrder:
    """The calls of an answer while it comes, for streams that tell one after the other.

    What cannot be known before the whole answer is there waits for it: whether a call without arguments has none.
    """

    def __init__(self) -> None:
        self.begun = False
        """Whether any call has come."""
        self._open: ToolCall | None = None
        self._at = -1
        self._waits = False

    def feed(self, piece: CallDelta) -> Iterator[Told]:
        self.begun = True
        if piece.index < self._at:
            raise UpstreamError(
                f"the engine came back to tool call {piece.index} after it began another: a stream cannot say so",
                cause="upstream.protocol",
            )
        if self._waits:
            return
        now = self._open
        if piece.index > self._at:
            if now is not None and not now.arguments:
                self._waits = True
                return
            if now is not None:
                yield Told("end", self._at, now.id, now.name, now.arguments)
            self._at += 1
            self._open = ToolCall(piece.id, piece.name, piece.arguments)
            if not piece.id or not piece.name or piece.index != self._at:
                self._at, self._open, self._waits = self._at - 1, None, True
                return
            yield Told("begin", self._at, piece.id, piece.name)
        else:
            assert now is not None
            self._open = ToolCall(now.id, now.name + piece.name, now.arguments + piece.arguments)
            if piece.name:
                raise UpstreamError("the engine named a tool call twice", cause="upstream.protocol")
        if piece.arguments:
            yield Told("more", self._at, self._open.id, self._open.name, piece.arguments)

    def finish(self, calls: Sequence[ToolCall]) -> Iterator[Told]:
        """What is left to tell, where these are the calls of the whole answer."""
        now = self._open
        if now is not None:
            rest = calls[self._at].arguments if self._at < len(calls) else now.arguments
            if rest.startswith(now.arguments) and len(rest) > len(now.arguments):
                yield Told("more", self._at, now.id, now.name, rest[len(now.arguments) :])
                now = ToolCall(now.id, now.name, rest)
            elif not now.arguments:
                now = ToolCall(now.id, now.name, rest)
            yield Told("end", self._at, now.id, now.name, now.arguments)
        for at in range(self._at + 1, len(calls)):
            call = calls[at]
            yield Told("begin", at, call.id, call.name)
            if call.arguments:
                yield Told("more", at, call.id, call.name, call.arguments)
            yield Told("end", at, call.id, call.name, call.arguments)


# ---- tokens


def ids(tokens: bytes) -> list[int]:
    return memoryview(tokens).cast("i").tolist() if tokens else []


def openai_usage(replies: list[Reply], n: int) -> dict[str, Any]:
    """Of `n` choices for each prompt, which share it."""
    prompt = sum(reply.turn.prompt_tokens for reply in replies[::n])
    sampled = sum(reply.turn.sampled_tokens for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def logprob_entries(ask: Ask, reply: Reply) -> list[dict[str, Any]] | msgspec.Raw | None:
    """The logprobs of a whole answer, as OpenAI's chat has them."""
    if reply.logprob_content is not None and reply.spell is None:
        return reply.logprob_content
    turn = reply.turn
    if not turn.logprobs:
        return None
    return entries(turn.sampled, turn.logprobs, reply.tops, ask.top_logprobs, reply.spell)


def entries(sampled: bytes, logprobs: bytes, tops: Tops, most: int, spell: Spell | None) -> list[dict[str, Any]]:
    """The shape of OpenAI's. Where no tokenizer is at hand a token is named by its id, as engines do."""
    tokens = ids(sampled)
    values = cast("list[float]", memoryview(logprobs).cast("f").tolist())
    found = _named(tokens, values, spell(sampled) if spell is not None else None)
    for at, entry in enumerate(found):
        entry["top_logprobs"] = []
        if most and at < len(tops):
            pairs = tops[at][:most]
            spelled = spell(ints([token for token, _ in pairs])) if spell is not None else None
            entry["top_logprobs"] = _named([token for token, _ in pairs], [value for _, value in pairs], spelled)
    return found


def _named(tokens: Sequence[int], values: Sequence[float], spelled: list[bytes] | None) -> list[dict[str, Any]]:
    if spelled is None:
        return [
            {"token": f"token_id:{token}", "logprob": value, "bytes": None}
            for token, value in zip(tokens, values, strict=True)
        ]
    return [
        {"token": text.decode("utf-8", "replace"), "logprob": value, "bytes": list(text)}
        for text, value in zip(spelled, values, strict=True)
    ]


def stopped_by(reply: Reply, stops: Sequence[str]) -> str | None:
    """The stop string that ended an answer, where its tokens tell."""
    if not stops or reply.spell is None or reply.finish != "stop":
        return None
    text = b"".join(reply.spell(reply.turn.sampled)).decode("utf-8", "replace")
    places = [(at + len(stop), stop) for stop in stops if (at := text.find(stop)) >= 0]
    return min(places)[1] if places else None
