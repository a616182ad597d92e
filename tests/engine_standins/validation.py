"""Validate bodies with msgspec as pydantic would: numeric strings are numbers, 1 is true, other types are strict.

Behaviour:
- a body that is not JSON, or that has a field of a wrong type, is refused with the location of the error;
- fields that the model does not have are returned to the caller, which decides what to do with them.
"""

import re
from typing import Any, TypeVar

import msgspec
import orjson

from rookery.core import Message, ToolSchema
from rookery.upstreams.embedded.openai_requests import MessageBody, read_message, read_tools

T = TypeVar("T")
_LOCATION = re.compile(r" - at `(?:key in )?\$\.?(.*)`$")


class Invalid(Exception):
    """A validation error and its location, such as `('body', 'temperature')`."""

    def __init__(self, kind: str, where: tuple[str, ...], message: str, value: Any = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.where = where
        self.message = message
        self.value = value

    def listed(self) -> dict[str, Any]:
        """Return the error as pydantic formats it."""
        return {"type": self.kind, "loc": self.where, "msg": self.message, "input": self.value}


def read(body: bytes) -> dict[str, Any]:
    """Decode a body to an object. NaN and infinities are refused."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Invalid("json_invalid", ("body", str(error.pos)), "the body is no JSON", {}) from None
    if not isinstance(fields, dict):
        raise Invalid("model_attributes_type", ("body",), "the body is an object", fields)
    return fields


def convert(fields: dict[str, Any], kind: type[T], location: str = "") -> T:
    """Convert an object to `kind`. `location` is its location in the body."""
    try:
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as error:
        words = str(error)
        found = _LOCATION.search(words)
        inner = found[1] if found else ""
        where = tuple(part for part in re.split(r"\.|\[|\]", f"{location}.{inner}") if part)
        text = words[: found.start()] if found else words
        missing = re.search(r"missing required field `(.+)`", text)
        if missing:
            raise Invalid("missing", ("body", *where, missing[1]), "the field is missing", fields) from None
        raise Invalid("value_error", ("body", *where), text, fields.get(where[0]) if where else fields) from None


def find_unknown_fields(fields: dict[str, Any], kind: type[Any]) -> list[str]:
    """Return the fields of an object that its model does not have."""
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    return sorted(set(fields) - known)


def conversation(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> tuple[tuple[Message, ...], tuple[ToolSchema, ...]]:
    """Return messages and tools. Raises `Invalid` or `RequestError`."""
    found = []
    for number, message in enumerate(messages):
        location = f"messages.{number}"
        found.append(read_message(convert(message, MessageBody, location), number))
    for number, tool in enumerate(tools or ()):
        if tool.get("type", "function") != "function":
            raise Invalid("literal_error", ("body", "tools", str(number), "type"), "a tool is a function", tool)
    return tuple(found), read_tools([{"type": "function", **tool} for tool in tools or ()])
