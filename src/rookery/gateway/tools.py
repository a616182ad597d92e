"""The tools of a call, as they came and as a chat format reads them.

Promises:
- tools that were seen just before are read once, however many turns bring them again;
- kinds of tools that no model of ours can call are left out, never an error.
"""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final

import msgspec

from rookery.core import ToolSchema
from rookery.upstreams.protocol import NO_TOOLS, ToolSet


class _Function(msgspec.Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct, frozen=True):
    type: str = "function"
    function: msgspec.Raw = msgspec.Raw(b"null")


class ToolsError(ValueError):
    """A client's tools that cannot be read; the text says which and why."""


_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_tool = msgspec.json.Decoder(_Tool).decode
_function = msgspec.json.Decoder(_Function | None).decode
MAX_KEPT: Final = 1 << 20
"""Bytes of tools that are worth remembering."""
_order = msgspec.json.Encoder(order="sorted").encode


def tools_of(schemas: tuple[ToolSchema, ...]) -> ToolSet:
    """Of calls made in Python: the same objects each turn."""
    key = tuple(map(id, schemas))
    found = _recent.get(key)
    if found is None or found.schemas != schemas:
        if len(_recent) >= 64:
            _recent.clear()
        found = _recent[key] = ToolSet(schemas, scope=_scope(schemas))
    return found


_recent: dict[tuple[int, ...], ToolSet] = {}


def tools_as(schemas: Sequence[ToolSchema]) -> ToolSet:
    """Of a dialect that writes tools in its own way; it remembers them itself."""
    return ToolSet(tuple(schemas), scope=_scope(schemas)) if schemas else NO_TOOLS


def tools_in(raw: bytes) -> ToolSet:
    """Of a client's JSON array."""
    return _remembered(raw) if len(raw) <= MAX_KEPT else _read(raw)


def _read(raw: bytes) -> ToolSet:
    try:
        items = _items(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ToolsError(f"not a list of tools: {error}") from None
    schemas: list[ToolSchema] = []
    kept: list[msgspec.Raw] = []
    for at, item in enumerate(items):
        try:
            tool = _tool(item)
            if tool.type != "function":
                continue  # clients offer kinds that only their own provider runs
            function = _function(tool.function)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ToolsError(f"tool {at}: {error}") from None
        if function is None or not function.name:
            raise ToolsError(f"tool {at} has no function with a name")
        kept.append(item.copy())
        schemas.append(ToolSchema(function.name, function.description or "", function.parameters or {}))
    if not schemas:
        return NO_TOOLS
    return ToolSet(tuple(schemas), tuple(kept), _scope(schemas))


_remembered = lru_cache(maxsize=64)(_read)


def _scope(schemas: Sequence[ToolSchema]) -> bytes:
    """Equal for tools that mean the same, whatever their keys' order and spacing."""
    return blake2b(_order(schemas), digest_size=16).digest()
