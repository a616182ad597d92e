"""The items of OpenAI's responses: what a client sends as messages, what a model says as items.

Promises:
- items that one answer was told as are one message again, also where a client leaves out ids or reasoning;
- reasoning that went out sealed comes back as it was sampled; who sends none back has edited nothing;
- a call of a tool within a namespace, or of one that takes plain text, is to the model a call like any other, and
  comes back with the arguments that were sampled;
- items of kinds that we do not know are shown to the model as they are.
"""

import base64
import binascii
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec

from rookery.core import Message, ToolCall, ToolSchema
from rookery.gateway.dialects.protocol import BadRequestError
from rookery.gateway.dialects.shared import Content, as_json, as_object, encode, text_in
from rookery.gateway.tools import MAX_KEPT, NO_TOOLS, Tools, ToolsError, tools_as

_SEAL: Final = "rk1."
_RAW: Final = "~"
"""Ends the id of a call whose plain text is the arguments themselves, since those held no such text."""
_TEXTS: Final = ("input_text", "output_text", "text", "reasoning_text", "summary_text")  # a client may send a list


class Name(NamedTuple):
    """A tool, as its client calls it."""

    name: str
    namespace: str | None = None
    custom: bool = False
    """Whether it takes plain text."""


class Offered(msgspec.Struct, frozen=True):
    """The tools of a request, and what their client calls them."""

    tools: Tools = NO_TOOLS
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


def within(namespace: str | None, name: str) -> str:
    """What a model calls a tool of a namespace."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def offered(raw: bytes) -> Offered:
    """Of a client's JSON array."""
    return _remembered(raw) if len(raw) <= MAX_KEPT else _offered(raw)


def _offered(raw: bytes) -> Offered:
    schemas: list[ToolSchema] = []
    names: dict[str, Name] = {}
    try:
        for at, tool in enumerate(_items(raw)):
            space = tool.name if tool.type == "namespace" else None
            for one in map(_tool, tool.tools or ()) if space is not None else (tool,):
                if one.type not in ("function", "custom"):
                    continue  # one that only its own provider runs
                if not one.name:
                    raise ToolsError(f"tool {at} has no name")
                custom = one.type == "custom"
                name = within(space, one.name)
                about = _about(one) if custom else one.description or ""
                schemas.append(ToolSchema(name, about, _PLAIN if custom else one.parameters or {}))
                if custom or space:
                    names[name] = Name(one.name, space, custom)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ToolsError(f"not a list of tools: {error}") from None
    return Offered(tools_as(schemas), names)


def _about(tool: _Tool) -> str:
    """What a model is told of a tool that takes plain text, its grammar included."""
    said = [tool.description or "", "The text goes into the argument `input`."]
    grammar = tool.format.get("definition") if isinstance(tool.format, dict) else None
    if isinstance(grammar, str):
        said.append(f"Its grammar:\n{grammar}")
    return "\n\n".join(part for part in said if part)


_remembered = lru_cache(maxsize=64)(_offered)


# ---- what a client sends


def messages_of(given: str | Sequence[Any]) -> Iterator[Message]:
    """The messages that items are."""
    if isinstance(given, str):
        yield Message("user", given)
        return
    answer = _Answer()
    for at, item in enumerate(given):
        where = f"input[{at}]"
        if not isinstance(item, dict):
            raise BadRequestError("an item of the input is an object", where)
        kind = item.get("type") or ("message" if "role" in item else None)
        if answer.takes(kind, item):
            answer.add(str(kind), item, where)
            continue
        if answer.any:
            yield answer.message()
        answer = _Answer()
        if _spoken(kind, item):
            answer.add(str(kind), item, where)
        else:
            yield _said(kind, item, where)
    if answer.any:
        yield answer.message()


def references_in(given: str | Sequence[Any]) -> tuple[str, ...]:
    """The names of the items that an input refers to instead of sending them."""
    if isinstance(given, str):
        return ()
    found: list[str] = []
    for at, item in enumerate(given):
        if isinstance(item, dict) and _refers(item):
            found.append(_text(item, "id", f"input[{at}]"))
    return tuple(found)


def _refers(item: dict[str, Any]) -> bool:
    """Whether an item is a reference. OpenAI lets a client leave its type out."""
    return item.get("type") == "item_reference" or (not item.get("type") and item.keys() - {"type"} == {"id"})


def with_items(given: Sequence[Any], answers: Mapping[str, Message], offer: Offered) -> list[Any]:
    """The input with the items that it refers to. `answers` has the message of each answer, by its name."""
    found: list[Any] = []
    said: set[str] = set()
    for at, item in enumerate(given):
        if not isinstance(item, dict) or not _refers(item):
            found.append(item)
            continue
        name = str(item["id"])
        stem = stem_of(name)
        kind, number = name.partition("_")[0], int(name.rpartition("_")[2])
        made = _item(kind, stem, number, answers[stem], offer)
        if made is None:
            raise BadRequestError(f"there is no item {name[:200]!r} in that answer", f"input[{at}]")
        if kind == "msg" and stem in said:
            continue  # a stream may give text in two items; the first one stands for all of it
        said.update([stem] if kind == "msg" else [])
        found.append(made)
    return found


def _item(kind: str, stem: str, number: int, message: Message, offer: Offered) -> dict[str, Any] | None:
    """One item of an answer; None where it has no such item."""
    if kind == "rs" and message.reasoning and number < 3 + len(message.tool_calls):
        return reasoning_item(stem, number, message.reasoning, seal=False)
    if kind == "msg" and (message.text or not message.tool_calls) and number < 3 + len(message.tool_calls):
        return message_item(stem, number, message.text)
    if kind in ("fc", "ctc") and number < len(message.tool_calls):
        return call_item(stem, number, message.tool_calls[number], offer)
    return None


def _spoken(kind: Any, item: dict[str, Any]) -> bool:
    """Whether an item is a model's."""
    return kind in ("reasoning", "function_call", "custom_tool_call") or (
        kind == "message" and item.get("role") == "assistant"
    )


class _Answer:
    """Items of a model that follow each other, as long as they can be of one answer."""

    def __init__(self) -> None:
        self.any = False
        self._stem = ""
        self._text: list[Any] = []
        self._calls: list[ToolCall] = []
        self._thought: list[str] = []

    def takes(self, kind: Any, item: dict[str, Any]) -> bool:
        if not self.any or not _spoken(kind, item):
            return False
        stem = _stem(item)
        if stem and self._stem:
            return stem == self._stem
        if kind == "reasoning":
            return not self._text and not self._calls
        return kind != "message" or not self._text or bool(self._calls)

    def add(self, kind: str, item: dict[str, Any], where: str) -> None:
        self.any = True
        self._stem = self._stem or _stem(item)
        if kind == "reasoning":
            self._thought.append(thought_in(item))
        elif kind == "message":
            said = _content(item.get("content"), f"{where}.content", "")
            self._text += said if isinstance(said, tuple) else [said or ""]
        else:
            self._calls.append(_call(kind, item, where))

    def message(self) -> Message:
        text = text_in(self._text, "")
        return Message(
            "assistant",
            text or (None if self._calls else ""),
            tuple(self._calls),
            reasoning="".join(self._thought) or None,
        )


def _stem(item: dict[str, Any]) -> str:
    """What the ids of one answer's items share, where they are ours."""
    return stem_of(str(item.get("id") or ""))


def stem_of(name: str) -> str:
    """The name of the answer that an item belongs to; empty where the item is none of ours."""
    parts = name.split("_")
    numbered = len(parts) == 3 and len(parts[2]) < 8 and parts[2].isascii() and parts[2].isdecimal()
    return parts[1] if numbered else ""


def _call(kind: str, item: dict[str, Any], where: str) -> ToolCall:
    custom = kind == "custom_tool_call"
    called, text = _text(item, "call_id", where), _text(item, "input" if custom else "arguments", where)
    if custom:
        text = text if called.endswith(_RAW) else encode({"input": text}).decode()
    space = item.get("namespace")
    if space is not None and not isinstance(space, str):
        raise BadRequestError("a namespace must be a string", f"{where}.namespace")
    name = within(space, _text(item, "name", where))
    return ToolCall(called.removesuffix(_RAW), name, text)


def _said(kind: Any, item: dict[str, Any], where: str) -> Message:
    """An item that is no model's."""
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "system", "developer"):
            raise BadRequestError("the role of a message is user, assistant, system or developer", f"{where}.role")
        return Message(role, _content(item.get("content"), f"{where}.content", "\n") or "")
    if kind in ("function_call_output", "custom_tool_call_output"):
        said = _content(item.get("output"), f"{where}.output", "\n")
        return Message("tool", said or "", tool_call_id=_text(item, "call_id", where).removesuffix(_RAW))
    if not isinstance(kind, str):
        raise BadRequestError("an item of the input has a type or a role", where)
    shown = {name: value for name, value in item.items() if name not in ("id", "status") and value is not None}
    return Message("user", as_json(shown))


def _content(given: Any, where: str, glue: str) -> Content:
    if given is None or isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise BadRequestError("content is a text or a list of parts", where)
    return text_in([_part(part, f"{where}[{n}]") for n, part in enumerate(given)], glue)


def _part(part: Any, where: str) -> str | dict[str, Any]:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise BadRequestError("a part of content is an object", where)
    kind = part.get("type")
    if kind in _TEXTS:
        return _text(part, "text", where)
    if kind == "refusal":
        return _text(part, "refusal", where)
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    return part


def _text(item: dict[str, Any], field: str, where: str) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        raise BadRequestError(f"{field} is a text that must be there", f"{where}.{field}")
    return value


# ---- reasoning


def sealed(thought: str) -> str:
    """Reasoning as something that clients only pass on."""
    return _SEAL + base64.urlsafe_b64encode(thought.encode("utf-8", "replace")).decode()


def thought_in(item: dict[str, Any]) -> str:
    """The reasoning of an item; nothing where it is not ours and not told."""
    seal = item.get("encrypted_content")
    if isinstance(seal, str) and seal.startswith(_SEAL):
        try:
            return base64.b64decode(seal[len(_SEAL) :], altchars=b"-_", validate=True).decode()
        except (binascii.Error, ValueError):
            return ""
    content = item.get("content")
    parts = content if isinstance(content, list) else ()
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


# ---- what a model says


def reasoning_item(stem: str, at: int, thought: str, *, seal: bool, status: str = "completed") -> dict[str, Any]:
    item: dict[str, Any] = {
        "id": f"rs_{stem}_{at}",
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": thought}] if thought else [],
        "status": status,
    }
    if seal:
        item["encrypted_content"] = sealed(thought) if thought else None
    return item


def message_item(
    stem: str, at: int, text: str | None, logprobs: Iterable[Any] = (), status: str = "completed"
) -> dict[str, Any]:
    """`text` is None where it is yet to come."""
    content = [] if text is None else [text_part(text, logprobs)]
    return {"id": f"msg_{stem}_{at}", "type": "message", "role": "assistant", "status": status, "content": content}


def text_part(text: str, logprobs: Iterable[Any] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def call_item(stem: str, at: int, call: ToolCall, offer: Offered, *, status: str = "completed") -> dict[str, Any]:
    """A call as its client knows the tool. `at` is its number among the calls of the answer."""
    name = offer.name(call.name)
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
    """The plain text that a call brings; None where its arguments are something else."""
    found = as_object(arguments)
    text = found.get("input") if found is not None and found.keys() == {"input"} else None
    return text if isinstance(text, str) else None
