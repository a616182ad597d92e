"""Parse chat messages sent by clients, and decide whether two messages are the same.

Guarantees:
- `parse_message` returns a message or raises `MessageError` for any bytes; unknown fields are ignored;
- `get_message_key` never raises. The keys of two messages are equal exactly if the messages have the same content,
  apart from their reasoning. The order of JSON keys, white space, cache hints (`cache_control`), null fields, text
  as a single content part instead of a string, and the formatting of JSON arguments make no difference;
- numbers are equal if they have the same value and type: 1, 1.0 and true differ. JSON that parsers disagree about
  (duplicate names, NaN, numbers out of range) is compared as text.
"""

import json
from hashlib import blake2b
from typing import Any, Final, TypeAlias, get_args

import msgspec

from rookery.core import Message, RookeryError, ToolCall
from rookery.core.messages import Role
from rookery.core.strict_json import strict_json

MessageKey: TypeAlias = tuple[object, ...]

ROLES: Final = frozenset(get_args(Role))
_MAX_INLINE_KEY: Final = 256
"""Canonical text of more bytes is replaced by its digest in a key, because keys live as long as the session."""


class MessageError(RookeryError):
    """Raised if a client sent an invalid chat message. `position` is the index of the message in the request, from
    0."""

    cause = "bug.environment"
    position: int | None = None


# ---- parsing


class _ChatMessage(msgspec.Struct):
    role: Any = None
    content: Any = None
    tool_calls: Any = None
    function_call: Any = None
    tool_call_id: Any = None
    name: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    refusal: Any = None


_decode = msgspec.json.Decoder(_ChatMessage).decode
_encode = msgspec.json.Encoder().encode


def parse_message(raw: bytes | msgspec.Raw, position: int | None = None) -> Message:
    """Parse a chat message: one JSON object in OpenAI's format. Raises `MessageError` if it is invalid.

    `position` is the index of the message in the request, for the error message.
    """
    try:
        return _convert_message(_decode(raw))
    except _InvalidMessage as error:
        why = str(error)
    except msgspec.ValidationError as error:
        begins = bytes(raw[:1] if isinstance(raw, bytes) else memoryview(raw)[:1])
        why = f"it has a wrong type: {error}" if begins == b"{" else "it is not a JSON object"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        why = f"it is not valid JSON: {error}"
    except RecursionError:
        why = "it is nested too deeply"
    where = "the message" if position is None else f"message {position}"
    failure = MessageError(f"{where} is not a valid chat message: {why}")
    failure.position = position
    raise failure


class _InvalidMessage(Exception):  # noqa: N818  (never leaves this module)
    pass


def _convert_message(chat: _ChatMessage) -> Message:
    role = chat.role
    call_id = _check_string(chat.tool_call_id, "tool_call_id")
    if role == "function":  # the result of a legacy `function_call`, which has no ID
        role, call_id = "tool", call_id or "call_0"
    if not isinstance(role, str) or role not in ROLES:
        known = ", ".join(sorted(ROLES))
        raise _InvalidMessage(
            "it has no field role" if role is None else f"its role is {_shorten_json(role)}, not one of {known}"
        )
    content = _parse_content(chat.content)
    if content is None and isinstance(chat.refusal, str):
        content = chat.refusal  # upstream replies are parsed the same way: a refusal is the content
    reasoning = chat.reasoning_content if isinstance(chat.reasoning_content, str) else chat.reasoning
    return Message(
        role=role,  # type: ignore[arg-type]
        content=content,
        tool_calls=_parse_calls(chat),
        tool_call_id=call_id,
        name=_check_string(chat.name, "name"),
        reasoning=reasoning if isinstance(reasoning, str) else None,
    )


def _parse_content(value: Any) -> str | tuple[dict[str, Any], ...] | None:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _InvalidMessage(f"its content is {_shorten_json(value)}, not a string or a list of parts")
    parts: list[dict[str, Any]] = []
    for n, part in enumerate(value):
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
        elif isinstance(part, dict):
            parts.append(part)
        else:
            raise _InvalidMessage(f"part {n} of its content is {_shorten_json(part)}, not an object")
    return tuple(parts)


def _parse_calls(chat: _ChatMessage) -> tuple[ToolCall, ...]:
    value = chat.tool_calls
    if value is None or value == []:
        return () if chat.function_call is None else (_parse_call({"function": chat.function_call}, 0),)
    if not isinstance(value, list):
        raise _InvalidMessage(f"its tool_calls are {_shorten_json(value)}, not a list")
    return tuple(_parse_call(call, n) for n, call in enumerate(value))


def _parse_call(call: Any, n: int) -> ToolCall:
    what = f"tool call {n}"
    if not isinstance(call, dict):
        raise _InvalidMessage(f"{what} is {_shorten_json(call)}, not an object")
    function, field = call.get("function"), "arguments"
    if function is None and call.get("custom") is not None:
        function, field = call["custom"], "input"
    if not isinstance(function, dict):
        raise _InvalidMessage(f"{what} has no function")
    name = function.get("name")
    if not isinstance(name, str):
        raise _InvalidMessage(f"{what} has no function name")
    arguments = function.get(field)
    if arguments is None:
        arguments = "{}"
    elif isinstance(arguments, dict):
        arguments = _encode(arguments).decode()
    elif not isinstance(arguments, str):
        raise _InvalidMessage(f"{what} has arguments {_shorten_json(arguments)}, not a string with JSON")
    return ToolCall(_check_string(call.get("id"), f"the ID of {what}") or f"call_{n}", name, arguments)


def _check_string(value: Any, field: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise _InvalidMessage(f"{field} is {_shorten_json(value)}, not a string")


def _shorten_json(value: Any) -> str:
    text = _encode(value).decode()
    return text if len(text) <= 60 else f"{text[:59]}…"


# ---- comparison


def get_message_key(message: Message) -> MessageKey:
    """Return a hashable key that is equal for two messages exactly if they have the same content.

    The key ignores the reasoning, and differences in JSON formatting that do not change the content.
    """
    content = message.content
    return (
        message.role,
        content if isinstance(content, str) else _get_content_key(content),
        tuple((call.id, call.name, _get_arguments_key(call.arguments)) for call in message.tool_calls),
        message.tool_call_id,
        message.name,
    )


def _get_content_key(content: tuple[dict[str, Any], ...] | None) -> str | bytes:
    """Return the key of a message's content parts: a string for plain text, bytes for anything else.

    The two types are never equal.
    """
    if not content:
        return ""
    if len(content) == 1:
        part = _normalise_part(content[0])
        if isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text":
            text = part["text"]
            if isinstance(text, str):
                return text
    return _limit_length(_dump_value([_normalise_part(part) for part in content]))


def _normalise_part(part: Any) -> Any:
    """Remove the fields of a content part that clients may add or drop between calls, also from nested parts."""
    if not isinstance(part, dict):
        return part
    kept = {name: value for name, value in part.items() if value is not None and name != "cache_control"}
    if kept.get("annotations") == []:
        del kept["annotations"]
    if isinstance(kept.get("content"), list):
        kept["content"] = [_normalise_part(inner) for inner in kept["content"]]
    return kept


def _get_arguments_key(text: str) -> str | bytes:
    """Return the key of a tool call's arguments: canonical bytes for valid JSON, the text itself for anything
    else."""
    if text == "{}":
        return b"{}"
    try:
        return _limit_length(_dump_json(_load_json(text)))
    except (ValueError, RecursionError):
        return text


def _limit_length(text: str) -> bytes:
    data = text.encode()  # always ASCII: the JSON encoder escapes everything else, lone surrogates included
    return data if len(data) <= _MAX_INLINE_KEY else blake2b(data, digest_size=32).digest()


_load_json = strict_json()


def _encode_object(value: object) -> str:
    """Return a string for an object that JSON cannot represent: bytes by value, anything else by type and
    `id()`."""
    return ascii(value) if isinstance(value, bytes) else f"{type(value).__name__} at {id(value)}"


_dump_json = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=_encode_object).encode


def _dump_value(value: Any) -> str:
    try:
        return _dump_json(value)
    except (TypeError, ValueError, RecursionError):  # keys of mixed types, or a part that contains itself
        return ascii(value)
