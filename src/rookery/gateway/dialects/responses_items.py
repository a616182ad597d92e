"""Convert between the items of OpenAI's Responses API and messages. Runs in gateway shards.

Guarantees:
- if a client sends the items of one reply back, they become one message again, also if it leaves out IDs or
  reasoning;
- reasoning that a client sends back as `encrypted_content` is restored as it was sampled;
- the model sees a tool in a namespace, or one that takes plain text, as an ordinary tool; if a client sends back a
  call of such a tool, its sampled arguments are restored;
- items of unknown types are shown to the model as JSON.
"""

import base64
import binascii
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec

from rookery.core import Message, ToolCall, ToolSchema
from rookery.gateway.dialects.protocol import BadRequestError
from rookery.gateway.dialects.shared import (
    Content,
    encode,
    encode_json,
    merge_text_parts,
    parse_object,
    require_text,
)
from rookery.gateway.tools import MAX_CACHED_BYTES, ToolsError, make_tool_set
from rookery.upstreams.protocol import NO_TOOLS, ToolSet

_REASONING_PREFIX: Final = "rk1."
_RAW: Final = "~"
"""Suffix of the ID of a call to a tool that takes plain text, if that text is the sampled arguments themselves.
The model should have sent an object with the only argument `input`, but did not."""
_TEXTS: Final = ("input_text", "output_text", "text", "reasoning_text", "summary_text")  # a client may send a list


class Name(NamedTuple):
    """The name that the client uses for a tool, which may differ from the name that the model sees."""

    name: str
    namespace: str | None = None
    custom: bool = False
    """True if the tool takes plain text instead of JSON arguments (a custom tool of the Responses API)."""


class RequestTools(msgspec.Struct, frozen=True):
    """The tools of a request, and the client's names of tools by the names that the model sees."""

    tools: ToolSet = NO_TOOLS
    names: dict[str, Name] = {}

    def name(self, name: str) -> Name:
        return self.names.get(name, Name(name))


# ---- tools


class _Tool(msgspec.Struct, frozen=True):
    type: str = "function"
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    tools: list[msgspec.Raw] | None = None
    format: Any = None


_items = msgspec.json.Decoder(list[_Tool]).decode
_tool = msgspec.json.Decoder(_Tool).decode
_PLAIN: Final = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def qualify_name(namespace: str | None, name: str) -> str:
    """Return the name under which the model sees a tool: with its namespace as a prefix, if it has one."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def parse_tools(raw: bytes) -> RequestTools:
    """Parse a JSON array of tools in the format of the Responses API. Raises `ToolsError` if it is invalid."""
    return _parse_tools_cached(raw) if len(raw) <= MAX_CACHED_BYTES else _parse_tools(raw)


def _parse_tools(raw: bytes) -> RequestTools:
    schemas: list[ToolSchema] = []
    names: dict[str, Name] = {}
    try:
        for at, tool in enumerate(_items(raw)):
            space = tool.name if tool.type == "namespace" else None
            for one in map(_tool, tool.tools or ()) if space is not None else (tool,):
                if one.type not in ("function", "custom"):
                    continue  # a tool that runs on the provider's servers
                if not one.name:
                    raise ToolsError(f"tool {at} of the request has no name")
                custom = one.type == "custom"
                name = qualify_name(space, one.name)
                description = _describe_custom_tool(one) if custom else one.description or ""
                schemas.append(ToolSchema(name, description, _PLAIN if custom else one.parameters or {}))
                if custom or space:
                    names[name] = Name(one.name, space, custom)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ToolsError(f"the list of tools in the request is invalid: {error}") from None
    return RequestTools(make_tool_set(schemas), names)


def _describe_custom_tool(tool: _Tool) -> str:
    """Return the description that the model sees of a tool that takes plain text, including its grammar."""
    parts = [tool.description or "", "The text goes into the argument `input`."]
    grammar = tool.format.get("definition") if isinstance(tool.format, dict) else None
    if isinstance(grammar, str):
        parts.append(f"Its grammar:\n{grammar}")
    return "\n\n".join(part for part in parts if part)


_parse_tools_cached = lru_cache(maxsize=64)(_parse_tools)


# ---- parsing


def parse_items(items: str | Sequence[Any]) -> Iterator[Message]:
    """Yield the messages that the input items of a request represent. A string is one user message.

    Consecutive items of one model reply become one message. Raises `BadRequestError` for an invalid item.
    """
    if isinstance(items, str):
        yield Message("user", items)
        return
    reply = _ReplyItems()
    for at, item in enumerate(items):
        where = f"input[{at}]"
        if not isinstance(item, dict):
            raise BadRequestError("an input item must be an object", where)
        kind = item.get("type") or ("message" if "role" in item else None)
        if reply.accepts(kind, item):
            reply.add(str(kind), item, where)
            continue
        if not reply.empty:
            yield reply.message()
        reply = _ReplyItems()
        if _is_model_item(kind, item):
            reply.add(str(kind), item, where)
        else:
            yield _parse_client_item(kind, item, where)
    if not reply.empty:
        yield reply.message()


def find_references(items: str | Sequence[Any]) -> tuple[str, ...]:
    """Return the IDs of the items of earlier replies that an input refers to without sending them."""
    if isinstance(items, str):
        return ()
    references: list[str] = []
    for at, item in enumerate(items):
        if isinstance(item, dict) and _refers(item):
            references.append(require_text(item, "id", f"input[{at}]"))
    return tuple(references)


def _refers(item: dict[str, Any]) -> bool:
    """Return whether an input item is a reference to an item of an earlier reply. Its type may be left out."""
    return item.get("type") == "item_reference" or (not item.get("type") and item.keys() - {"type"} == {"id"})


def insert_items(items: Sequence[Any], replies: Mapping[str, Message], request_tools: RequestTools) -> list[Any]:
    """Return the input with each reference replaced by the item that it refers to.

    `replies` maps reply IDs to the messages of those replies. Raises `BadRequestError` if an item does not exist.
    """
    inserted: list[Any] = []
    with_text: set[str] = set()
    for at, item in enumerate(items):
        if not isinstance(item, dict) or not _refers(item):
            inserted.append(item)
            continue
        name = str(item["id"])
        stem = get_reply_id(name)
        kind, number = name.partition("_")[0], int(name.rpartition("_")[2])
        made = _item(kind, stem, number, replies[stem], request_tools)
        if made is None:
            raise BadRequestError(
                f"no reply of this session has an item with the ID {name[:200]!r}", f"input[{at}]"
            )
        if kind == "msg" and stem in with_text:
            continue  # a stream may split text into two items; the first one stands for both
        with_text.update([stem] if kind == "msg" else [])
        inserted.append(made)
    return inserted


def _item(
    kind: str, stem: str, number: int, message: Message, request_tools: RequestTools
) -> dict[str, Any] | None:
    """Return one item of a reply, by the kind and number in the item's ID; None if the reply has no such item."""
    if kind == "rs" and message.reasoning and number < 3 + len(message.tool_calls):
        return reasoning_item(stem, number, message.reasoning, encrypted=False)
    if kind == "msg" and (message.text or not message.tool_calls) and number < 3 + len(message.tool_calls):
        return message_item(stem, number, message.text)
    if kind in ("fc", "ctc") and number < len(message.tool_calls):
        return call_item(stem, number, message.tool_calls[number], request_tools)
    return None


def _is_model_item(kind: Any, item: dict[str, Any]) -> bool:
    """Return whether an input item was written by a model: a reply's reasoning, text or tool call."""
    return kind in ("reasoning", "function_call", "custom_tool_call") or (
        kind == "message" and item.get("role") == "assistant"
    )


class _ReplyItems:
    """Collects consecutive input items that can belong to one reply of a model, and joins them to one message."""

    def __init__(self) -> None:
        self.empty = True
        self._stem = ""
        self._text: list[Any] = []
        self._calls: list[ToolCall] = []
        self._reasoning: list[str] = []

    def accepts(self, kind: Any, item: dict[str, Any]) -> bool:
        """Return whether an item can belong to the same reply as the items that were added before."""
        if self.empty or not _is_model_item(kind, item):
            return False
        stem = _stem(item)
        if stem and self._stem:
            return stem == self._stem
        if kind == "reasoning":
            return not self._text and not self._calls
        return kind != "message" or not self._text or bool(self._calls)

    def add(self, kind: str, item: dict[str, Any], where: str) -> None:
        self.empty = False
        self._stem = self._stem or _stem(item)
        if kind == "reasoning":
            self._reasoning.append(read_reasoning(item))
        elif kind == "message":
            content = _content(item.get("content"), f"{where}.content", "")
            self._text += content if isinstance(content, tuple) else [content or ""]
        else:
            self._calls.append(_call(kind, item, where))

    def message(self) -> Message:
        text = merge_text_parts(self._text, "")
        return Message(
            "assistant",
            text or (None if self._calls else ""),
            tuple(self._calls),
            reasoning="".join(self._reasoning) or None,
        )


def _stem(item: dict[str, Any]) -> str:
    """Return the reply ID that is part of an item's ID; empty if the gateway did not generate the item's ID."""
    return get_reply_id(str(item.get("id") or ""))


def get_reply_id(name: str) -> str:
    """Return the ID of the reply that the item with the ID `name` belongs to.

    Returns an empty string if the gateway did not generate that ID.
    """
    parts = name.split("_")
    numbered = len(parts) == 3 and len(parts[2]) < 8 and parts[2].isascii() and parts[2].isdecimal()
    return parts[1] if numbered else ""


def _call(kind: str, item: dict[str, Any], where: str) -> ToolCall:
    custom = kind == "custom_tool_call"
    called, text = (
        require_text(item, "call_id", where),
        require_text(item, "input" if custom else "arguments", where),
    )
    if custom:
        text = text if called.endswith(_RAW) else encode({"input": text}).decode()
    space = item.get("namespace")
    if space is not None and not isinstance(space, str):
        raise BadRequestError("the namespace of a tool call must be a string or null", f"{where}.namespace")
    name = qualify_name(space, require_text(item, "name", where))
    return ToolCall(called.removesuffix(_RAW), name, text)


def _parse_client_item(kind: Any, item: dict[str, Any], where: str) -> Message:
    """Convert an input item that was not written by the model to a message. Unknown items become JSON text."""
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "system", "developer"):
            raise BadRequestError(
                "the role of a message must be user, assistant, system or developer", f"{where}.role"
            )
        return Message(role, _content(item.get("content"), f"{where}.content", "\n") or "")
    if kind in ("function_call_output", "custom_tool_call_output"):
        output = _content(item.get("output"), f"{where}.output", "\n")
        return Message("tool", output or "", tool_call_id=require_text(item, "call_id", where).removesuffix(_RAW))
    if not isinstance(kind, str):
        raise BadRequestError("an input item needs a type or a role", where)
    shown = {name: value for name, value in item.items() if name not in ("id", "status") and value is not None}
    return Message("user", encode_json(shown))


def _content(content: Any, where: str, separator: str) -> Content:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequestError("content must be a string or a list of parts", where)
    return merge_text_parts([_part(part, f"{where}[{n}]") for n, part in enumerate(content)], separator)


def _part(part: Any, where: str) -> str | dict[str, Any]:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise BadRequestError("a content part must be an object", where)
    kind = part.get("type")
    if kind in _TEXTS:
        return require_text(part, "text", where)
    if kind == "refusal":
        return require_text(part, "refusal", where)
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    return part


# ---- reasoning


def encode_reasoning(reasoning: str) -> str:
    """Encode reasoning (without encryption) as `encrypted_content`, which clients send back unchanged."""
    return _REASONING_PREFIX + base64.urlsafe_b64encode(reasoning.encode("utf-8", "replace")).decode()


def read_reasoning(item: dict[str, Any]) -> str:
    """Return the text of a reasoning item; empty if it has none that can be read."""
    encoded = item.get("encrypted_content")
    if isinstance(encoded, str) and encoded.startswith(_REASONING_PREFIX):
        try:
            return base64.b64decode(encoded[len(_REASONING_PREFIX) :], altchars=b"-_", validate=True).decode()
        except (binascii.Error, ValueError):
            return ""
    content = item.get("content")
    parts = content if isinstance(content, list) else ()
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


# ---- formatting


def reasoning_item(stem: str, at: int, text: str, *, encrypted: bool, status: str = "completed") -> dict[str, Any]:
    """Return a reasoning item with index `at` of the reply `stem`.

    With `encrypted`, it has `encrypted_content`.
    """
    item: dict[str, Any] = {
        "id": f"rs_{stem}_{at}",
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}] if text else [],
        "status": status,
    }
    if encrypted:
        item["encrypted_content"] = encode_reasoning(text) if text else None
    return item


def message_item(
    stem: str, at: int, text: str | None, logprobs: Iterable[Any] = (), status: str = "completed"
) -> dict[str, Any]:
    """Return a message item with index `at` of the reply `stem`. If `text` is None, the item has no content."""
    content = [] if text is None else [text_part(text, logprobs)]
    return {"id": f"msg_{stem}_{at}", "type": "message", "role": "assistant", "status": status, "content": content}


def text_part(text: str, logprobs: Iterable[Any] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def call_item(
    stem: str, at: int, call: ToolCall, request_tools: RequestTools, *, status: str = "completed"
) -> dict[str, Any]:
    """Return a tool call of the reply `stem` as an item, with the client's name for the tool.

    `at` is the index of the call among the tool calls of the reply.
    """
    name = request_tools.name(call.name)
    item: dict[str, Any] = {"type": "custom_tool_call" if name.custom else "function_call", "name": name.name}
    if name.custom:
        text = plain_input(call.arguments)
        item |= {"id": f"ctc_{stem}_{at}", "call_id": call.id if text is not None else call.id + _RAW}
        item["input"] = call.arguments if text is None else text
    else:
        item |= {"id": f"fc_{stem}_{at}", "call_id": call.id, "arguments": call.arguments}
    item["status"] = status
    if name.namespace is not None:
        item["namespace"] = name.namespace
    return item


def plain_input(arguments: str) -> str | None:
    """Return the text in the arguments of a call to a tool that takes plain text.

    Returns None if the arguments are not a JSON object with only the string `input`.
    """
    found = parse_object(arguments)
    text = found.get("input") if found is not None and found.keys() == {"input"} else None
    return text if isinstance(text, str) else None
