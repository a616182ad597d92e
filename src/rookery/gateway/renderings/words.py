"""Messages in the words of chat templates, and a parser's findings as a message.

Promises:
- a call's arguments are text as sampled wherever the format writes them as JSON; else JSON of what was read;
- a call that cannot be read is not lost: it is text, after the rest of the content, as it was sampled;
- space around content and around reasoning is the format's, not the message's: both are told without it;
- ids of calls are the same whenever the same prompt is answered, and differ by prompt and by place.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from rookery.core import Message, ToolCall, ToolSchema
from rookery.gateway.renderings.protocol import Unrenderable

_DECODER: Final = json.JSONDecoder()
_KEYS: Final = ("arguments", "parameters")
TAIL: Final = 1024
"""Bytes of a prompt's end that name its calls: what everybody has who reads the answer."""


def plain(messages: Sequence[Message], *, developer: str = "system", named: bool = False) -> list[dict[str, Any]]:
    """Messages as templates know them. `named`: tools' answers say which tool answered, where that is known."""
    called = {call.id: call.name for message in messages for call in message.tool_calls} if named else {}
    return [_plain(message, developer, called) for message in messages]


def _plain(message: Message, developer: str, called: dict[str, str]) -> dict[str, Any]:
    role = developer if message.role == "developer" else message.role
    found: dict[str, Any] = {"role": role, "content": text_of(message)}
    if message.reasoning is not None and message.role == "assistant":
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "type": "function",
                "id": call.id,
                "function": {"name": call.name, "arguments": _read(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if name := message.name or called.get(message.tool_call_id or ""):
        found["name"] = name
    return found


def text_of(message: Message) -> str:
    """The text of a message; `Unrenderable` where it is not only text."""
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    for part in message.content:
        if part.get("type") not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
            kind = part.get("type", "no type")
            raise Unrenderable(
                f"a {message.role} message holds a part of type {kind!r}: only text can be rendered"
            )
    return "".join(part["text"] for part in message.content)


def _read(arguments: str) -> Any:
    """Arguments as an object where they are one, as templates want them; else as they stand."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def schemas(tools: Sequence[ToolSchema], tool_choice: str | None = None) -> list[dict[str, Any]] | None:
    """Tools as templates know them; a choice of none hides them all."""
    if not tools or tool_choice == "none":
        return None
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
        }
        for tool in tools
    ]


# -------------------------------------------------------------------------------------------- what was parsed


class CallIds:
    """Names the calls of one answer."""

    __slots__ = ("_stem",)

    def __init__(self, tail: bytes, at: int) -> None:
        seed = hashlib.blake2b(tail[-TAIL:], digest_size=9, salt=(at % 2**63).to_bytes(8, "little")).hexdigest()
        self._stem = f"call_{seed}_"

    def __call__(self, number: int) -> str:
        return f"{self._stem}{number}"


def call_of(found: Any, number: int, ids: CallIds) -> ToolCall | None:
    """The call that a parser found; None where it found one that cannot be made."""
    if not found.name or found.arguments is None or str(found.status) == "unclosed_block":
        return None
    return ToolCall(str(found.id or ids(number)), str(found.name), _arguments(found))


def _arguments(found: Any) -> str:
    arguments = found.arguments
    if isinstance(arguments, str):
        return arguments
    return _as_sampled(found.raw or "", arguments) or json.dumps(arguments, ensure_ascii=False)


def _as_sampled(raw: str, arguments: Any) -> str:
    """The very text that was read as `arguments`; empty where there is no such text."""
    for key in _KEYS:
        at = raw.find(f'"{key}"')
        while at >= 0:
            start = at + len(key) + 2
            rest = raw[start:].lstrip()
            if rest.startswith(":"):
                text = rest[1:].lstrip()
                try:
                    value, end = _DECODER.raw_decode(text)
                except (ValueError, RecursionError):
                    return ""
                if value == arguments:
                    return text[:end]
            at = raw.find(f'"{key}"', start)
    return ""


def message_of(
    parsed: Any, sampled: Sequence[int], ids: CallIds, decode: Callable[[Sequence[int]], str]
) -> Message:
    """The message that a parser's findings mean."""
    calls: list[ToolCall] = []
    content = (parsed.content or "").strip()
    for found in parsed.tool_calls:
        call = call_of(found, len(calls), ids)
        if call is not None:
            calls.append(call)
            continue
        span = found.token_span
        text = (decode(sampled[span[0] : span[1]]) if span else found.raw or "").strip()
        content = f"{content}\n{text}" if content and text else content or text
    reasoning = (parsed.reasoning_content or "").strip()
    return Message(
        "assistant", content if content or not calls else None, tuple(calls), reasoning=reasoning or None
    )
