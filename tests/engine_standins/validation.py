"""Bodies as pydantic reads them, with msgspec: numbers in texts are numbers, 1 is true; the rest has its type.

Promises:
- a body that is no JSON, or that has a field of a wrong type, is refused with the place of what is wrong;
- fields that the model does not know are named to the caller, who decides what becomes of them.
"""

import re
from typing import Any, TypeVar

import msgspec
import orjson

from rookery.core import Message, ToolSchema
from rookery.upstreams.embedded.openai_requests import MessageBody, read_message, read_tools

T = TypeVar("T")
_PLACE = re.compile(r" - at `(?:key in )?\$\.?(.*)`$")


class Invalid(Exception):
    """What is wrong with a body, and where: `('body', 'temperature')`."""

    def __init__(self, kind: str, where: tuple[str, ...], message: str, given: Any = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.where = where
        self.message = message
        self.given = given

    def listed(self) -> dict[str, Any]:
        """As pydantic lists it."""
        return {"type": self.kind, "loc": self.where, "msg": self.message, "input": self.given}


def read(body: bytes) -> dict[str, Any]:
    """The body's object. Not-a-number and infinities are no JSON."""
    try:
        said = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Invalid("json_invalid", ("body", str(error.pos)), "the body is no JSON", {}) from None
    if not isinstance(said, dict):
        raise Invalid("model_attributes_type", ("body",), "the body is an object", said)
    return said


def into(said: dict[str, Any], kind: type[T], place: str = "") -> T:
    """The object as `kind`. `place`: where in the body it stands."""
    try:
        return msgspec.convert(said, kind, strict=False)
    except msgspec.ValidationError as error:
        words = str(error)
        found = _PLACE.search(words)
        inner = found[1] if found else ""
        where = tuple(part for part in re.split(r"\.|\[|\]", f"{place}.{inner}") if part)
        text = words[: found.start()] if found else words
        missing = re.search(r"missing required field `(.+)`", text)
        if missing:
            raise Invalid("missing", ("body", *where, missing[1]), "the field is missing", said) from None
        raise Invalid("value_error", ("body", *where), text, said.get(where[0]) if where else said) from None


def strangers(said: dict[str, Any], kind: type[Any]) -> list[str]:
    """Fields of an object that its model does not have."""
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    return sorted(set(said) - known)


def conversation(
    said: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> tuple[tuple[Message, ...], tuple[ToolSchema, ...]]:
    """Messages and tools; raises `Invalid` or `RequestError`."""
    found = []
    for number, message in enumerate(said):
        place = f"messages.{number}"
        found.append(read_message(into(message, MessageBody, place), number))
    for number, tool in enumerate(tools or ()):
        if tool.get("type", "function") != "function":
            raise Invalid("literal_error", ("body", "tools", str(number), "type"), "a tool is a function", tool)
    return tuple(found), read_tools([{"type": "function", **tool} for tool in tools or ()])
