"""Chat messages as clients send them, and when two of them are the same message.

Promises:
- `message_of` reads a message or raises `MessageError` in words, whatever the bytes are; what it does not know it
  skips;
- `key_of` never raises, and is equal for two messages exactly when one is no edit of the other, apart from their
  reasoning: key order, spacing, cache hints, fields that are null, text as one part, arguments that are the same
  JSON are no edits;
- a number is the same where it has the same value and the same kind: 1, 1.0 and true are three things; JSON that
  not every parser reads alike (doubled names, NaN, numbers beyond measure) is compared as text.
"""

import json
from hashlib import blake2b
from typing import Any, Final, TypeAlias, get_args

import msgspec

from rookery.core import Message, RookeryError, ToolCall
from rookery.core.messages import Role
from rookery.core.strict import strict_json

Key: TypeAlias = tuple[object, ...]

ROLES: Final = frozenset(get_args(Role))
_LONG: Final = 256
"""Canonical text above this many characters is kept as a digest: keys live as long as the session."""


class MessageError(RookeryError):
    """What a client sent is no chat message. `position` says which of its messages, counted from 0."""

    cause = "bug.environment"
    position: int | None = None


# ----------------------------------------------------------------------------------------------- reading


class _Chat(msgspec.Struct):
    role: Any = None
    content: Any = None
    tool_calls: Any = None
    function_call: Any = None
    tool_call_id: Any = None
    name: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    refusal: Any = None


_decode = msgspec.json.Decoder(_Chat).decode
_encode = msgspec.json.Encoder().encode


def message_of(raw: bytes | msgspec.Raw, position: int | None = None) -> Message:
    """The message in one JSON object of OpenAI's chat shape; `position` is for the words of an error."""
    try:
        return _message(_decode(raw))
    except _Unreadable as error:
        why = str(error)
    except msgspec.ValidationError as error:
        begins = bytes(raw[:1] if isinstance(raw, bytes) else memoryview(raw)[:1])
        why = f"it cannot be read: {error}" if begins == b"{" else "it is no JSON object"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        why = f"it is not valid JSON: {error}"
    except RecursionError:
        why = "it is nested too deeply"
    where = "the message" if position is None else f"message {position}"
    found = MessageError(f"{where} is no chat message: {why}")
    found.position = position
    raise found


class _Unreadable(Exception):  # noqa: N818  (never leaves this module)
    pass


def _message(chat: _Chat) -> Message:
    role = chat.role
    call_id = _string(chat.tool_call_id, "tool_call_id")
    if role == "function":  # the answer to a `function_call`, from before there were ids
        role, call_id = "tool", call_id or "call_0"
    if not isinstance(role, str) or role not in ROLES:
        known = ", ".join(sorted(ROLES))
        raise _Unreadable("it has no role" if role is None else f"its role is {_shown(role)}, not one of {known}")
    content = _content(chat.content)
    if content is None and isinstance(chat.refusal, str):
        content = chat.refusal  # as answers are read: a refusal is what was said
    reasoning = chat.reasoning_content if isinstance(chat.reasoning_content, str) else chat.reasoning
    return Message(
        role=role,  # type: ignore[arg-type]
        content=content,
        tool_calls=_calls(chat),
        tool_call_id=call_id,
        name=_string(chat.name, "name"),
        reasoning=reasoning if isinstance(reasoning, str) else None,
    )


def _content(given: Any) -> str | tuple[dict[str, Any], ...] | None:
    if given is None or isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise _Unreadable(f"its content is {_shown(given)}; a text or a list of parts is read")
    parts: list[dict[str, Any]] = []
    for n, part in enumerate(given):
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
        elif isinstance(part, dict):
            parts.append(part)
        else:
            raise _Unreadable(f"part {n} of its content is {_shown(part)}, not an object")
    return tuple(parts)


def _calls(chat: _Chat) -> tuple[ToolCall, ...]:
    given = chat.tool_calls
    if given is None or given == []:
        return () if chat.function_call is None else (_call({"function": chat.function_call}, 0),)
    if not isinstance(given, list):
        raise _Unreadable(f"its tool_calls are {_shown(given)}, not a list")
    return tuple(_call(call, n) for n, call in enumerate(given))


def _call(call: Any, n: int) -> ToolCall:
    what = f"tool call {n}"
    if not isinstance(call, dict):
        raise _Unreadable(f"{what} is {_shown(call)}, not an object")
    function, field = call.get("function"), "arguments"
    if function is None and call.get("custom") is not None:
        function, field = call["custom"], "input"
    if not isinstance(function, dict):
        raise _Unreadable(f"{what} has no function")
    name = function.get("name")
    if not isinstance(name, str):
        raise _Unreadable(f"{what} has no function name")
    arguments = function.get(field)
    if arguments is None:
        arguments = "{}"
    elif isinstance(arguments, dict):
        arguments = _encode(arguments).decode()
    elif not isinstance(arguments, str):
        raise _Unreadable(f"{what} has {_shown(arguments)} as arguments; JSON text is read")
    return ToolCall(_string(call.get("id"), f"the id of {what}") or f"call_{n}", name, arguments)


def _string(value: Any, field: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise _Unreadable(f"{field} is {_shown(value)}, not a text")


def _shown(value: Any) -> str:
    text = _encode(value).decode()
    return text if len(text) <= 60 else f"{text[:59]}…"


# --------------------------------------------------------------------------------------------- comparing


def key_of(message: Message) -> Key:
    """What two messages have in common when neither is an edit of the other; their reasoning is not in it."""
    content = message.content
    return (
        message.role,
        content if isinstance(content, str) else _content_key(content),
        tuple((call.id, call.name, _arguments_key(call.arguments)) for call in message.tool_calls),
        message.tool_call_id,
        message.name,
    )


def _content_key(content: tuple[dict[str, Any], ...] | None) -> str | bytes:
    """Text where it is only text, bytes where it is not: the two are never equal."""
    if not content:
        return ""
    if len(content) == 1:
        part = _part(content[0])
        if isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text":
            text = part["text"]
            if isinstance(text, str):
                return text
    return _bounded(_dumps([_part(part) for part in content]))


def _part(part: Any) -> Any:
    """A part without what may come and go; what tools were given to see is made of parts as well."""
    if not isinstance(part, dict):
        return part
    found = {name: value for name, value in part.items() if value is not None and name != "cache_control"}
    if found.get("annotations") == []:
        del found["annotations"]
    if isinstance(found.get("content"), list):
        found["content"] = [_part(inner) for inner in found["content"]]
    return found


def _arguments_key(text: str) -> str | bytes:
    """Bytes for JSON, the text itself for what is none."""
    if text == "{}":
        return b"{}"
    try:
        return _bounded(_dump(_load(text)))
    except (ValueError, RecursionError):
        return text


def _bounded(text: str) -> bytes:
    data = text.encode()  # ASCII: the encoder escapes everything else, lone surrogates too
    return data if len(data) <= _LONG else blake2b(data, digest_size=32).digest()


_load = strict_json()


def _odd(value: object) -> str:
    """Parts made in Python may hold anything; what is no JSON is the same where it is the same object."""
    return ascii(value) if isinstance(value, bytes) else f"{type(value).__name__} at {id(value)}"


_dump = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=_odd).encode


def _dumps(value: Any) -> str:
    try:
        return _dump(value)
    except (TypeError, ValueError, RecursionError):  # names of several kinds, a part inside itself
        return ascii(value)
