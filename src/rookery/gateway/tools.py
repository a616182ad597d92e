"""Parse the tool schemas of a request, and restore tool call arguments that a client sends back reformatted.

Runs in gateway shards, and in runners for calls made in Python.

Guarantees:
- tools that are equal to those of a recent request are taken from a cache, unless they are very large;
- tools that only the API provider's own servers can run, such as web search, are left out without an error.
"""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec

from rookery.core import Message, ToolCall, ToolSchema, Turn
from rookery.core.messages import hash_tools
from rookery.upstreams.protocol import NO_TOOLS, ToolSet


class _Function(msgspec.Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct, frozen=True):
    type: str = "function"
    function: msgspec.Raw = msgspec.Raw(b"null")


class ToolsError(ValueError):
    """The tools of a request are invalid. The message names the index of the tool if one tool is the reason."""


_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_tool = msgspec.json.Decoder(_Tool).decode
_decode_function = msgspec.json.Decoder(_Function | None).decode
MAX_CACHED_BYTES: Final = 1 << 20
"""JSON arrays of tools with more bytes are not cached and are parsed again for each request."""


def cached_tool_set(schemas: tuple[ToolSchema, ...]) -> ToolSet:
    """Return the tool set for these schemas, from a cache if the same schema objects were passed before.

    For calls made in Python, which pass the same objects in each turn.
    """
    key = tuple(map(id, schemas))
    cached = _cache.get(key)
    if cached is None or cached.schemas != schemas:
        if len(_cache) >= 64:
            _cache.clear()
        cached = _cache[key] = ToolSet(schemas, scope=hash_tools(schemas))
    return cached


_cache: dict[tuple[int, ...], ToolSet] = {}


def make_tool_set(schemas: Sequence[ToolSchema]) -> ToolSet:
    """Return a new tool set for these schemas, for API dialects that parse and cache tools themselves."""
    return ToolSet(tuple(schemas), scope=hash_tools(schemas)) if schemas else NO_TOOLS


def parse_chat_tools(raw: bytes) -> ToolSet:
    """Parse a JSON array of tools in the format of OpenAI's chat API. Raises `ToolsError` if it is invalid."""
    return _parse_cached(raw) if len(raw) <= MAX_CACHED_BYTES else _parse(raw)


def _parse(raw: bytes) -> ToolSet:
    try:
        items = _decode_items(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ToolsError(f"the list of tools in the request is invalid: {error}") from None
    schemas: list[ToolSchema] = []
    kept: list[msgspec.Raw] = []
    for at, item in enumerate(items):
        try:
            tool = _decode_tool(item)
            if tool.type != "function":
                continue  # a tool that runs on the provider's servers
            function = _decode_function(tool.function)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ToolsError(f"tool {at} of the request is invalid: {error}") from None
        if function is None or not function.name:
            raise ToolsError(f"tool {at} of the request has no function with a name")
        kept.append(item.copy())
        schemas.append(ToolSchema(function.name, function.description or "", function.parameters or {}))
    if not schemas:
        return NO_TOOLS
    return ToolSet(tuple(schemas), tuple(kept), hash_tools(schemas))


_parse_cached = lru_cache(maxsize=64)(_parse)


# ---- tool call arguments that a client sends back

_AMBIGUOUS_NUMBER: Final = re.compile(r"\d\.\d|\d[eE]|\d{16}|-0")
"""Numbers that JavaScript may write differently after parsing: 1.0 becomes 1, and long integers lose digits."""


class ArgumentRestorer:
    """Restores the sampled text of tool call arguments that a JavaScript client has parsed and written again.

    Arguments are restored only if JavaScript parses both texts to the same value; arguments that the client has
    edited stay edited.
    """

    def __init__(self) -> None:
        self._known: dict[str, list[ToolCall]] = {}

    def add_turn(self, turn: Turn) -> None:
        """Remember the tool calls of a recorded turn whose arguments JavaScript may rewrite."""
        for call in turn.response.tool_calls:
            if _AMBIGUOUS_NUMBER.search(call.arguments):
                known = self._known.setdefault(call.id, [])
                if call not in known:
                    known.append(call)

    def restore(self, message: Message) -> Message:
        """Return a message from a client with the sampled text of its tool call arguments.

        Arguments that the client has edited stay as they are.
        """
        if not message.tool_calls or not any(call.id in self._known for call in message.tool_calls):
            return message
        calls = tuple([self._restore_call(call) for call in message.tool_calls])
        return message if calls == message.tool_calls else msgspec.structs.replace(message, tool_calls=calls)

    def _restore_call(self, call: ToolCall) -> ToolCall:
        known = self._known.get(call.id, ())
        if call in known:
            return call
        same = (
            one for one in known if one.name == call.name and equal_in_javascript(one.arguments, call.arguments)
        )
        return next(same, call)


def equal_in_javascript(one: str, other: str) -> bool:
    """Return whether JavaScript parses two JSON texts to the same value."""
    try:
        return _canonical_json(one) == _canonical_json(other)
    except (ValueError, RecursionError, OverflowError):
        return False


def _canonical_json(text: str) -> str:
    return json.dumps(_normalise_zeros(json.loads(text, parse_int=float)), sort_keys=True)


def _normalise_zeros(value: Any) -> Any:
    """Return a JSON value with every -0.0 replaced by 0.0."""
    if isinstance(value, float):
        return value + 0.0
    if isinstance(value, dict):
        return {name: _normalise_zeros(inner) for name, inner in value.items()}
    return [_normalise_zeros(inner) for inner in value] if isinstance(value, list) else value
