"""Convert messages to the dictionaries that chat templates expect, and results of reply parsers to messages.

Guarantees:
- the arguments of a tool call are the sampled text if the chat format writes them as JSON, else the parsed value
  encoded as JSON;
- a tool call that cannot be parsed is not lost: its text is appended to the content;
- white space around content and reasoning belongs to the chat format and is removed;
- the generated ID of a tool call depends only on the prompt and on the index of the call in the reply.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from rookery.core import Message, ToolCall, ToolSchema
from rookery.gateway.chat_renderers.protocol import RenderError

_DECODER: Final = json.JSONDecoder()
_KEYS: Final = ("arguments", "parameters")
SEED_BYTES: Final = 1024
"""Number of bytes at the end of the prompt (256 token IDs) from which the IDs of tool calls are derived."""


def convert_messages(
    messages: Sequence[Message], *, developer: str = "system", with_tool_names: bool = False
) -> list[dict[str, Any]]:
    """Convert messages to the dictionaries that chat templates expect. Raises `RenderError` for non-text content.

    `developer` is the role that replaces the role `developer`. `with_tool_names` adds the name of the tool to tool
    results if it is known.
    """
    tool_names = (
        {call.id: call.name for message in messages for call in message.tool_calls} if with_tool_names else {}
    )
    return [_convert_message(message, developer, tool_names) for message in messages]


def _convert_message(message: Message, developer: str, tool_names: dict[str, str]) -> dict[str, Any]:
    role = developer if message.role == "developer" else message.role
    result: dict[str, Any] = {"role": role, "content": get_text(message)}
    if message.reasoning is not None and message.role == "assistant":
        result["reasoning_content"] = message.reasoning
    if message.tool_calls:
        result["tool_calls"] = [
            {
                "type": "function",
                "id": call.id,
                "function": {"name": call.name, "arguments": _parse_arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if name := message.name or tool_names.get(message.tool_call_id or ""):
        result["name"] = name
    return result


def get_text(message: Message) -> str:
    """Return the text of a message. Raises `RenderError` if it has content other than text, such as images."""
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    for part in message.content:
        if part.get("type") not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
            kind = part.get("type", "no type")
            raise RenderError(
                f"a {message.role} message has a content part of type {kind!r}: only text can be rendered"
            )
    return "".join(part["text"] for part in message.content)


def _parse_arguments(arguments: str) -> Any:
    """Return the arguments of a tool call as a dictionary, or unchanged as text if they are not a JSON object."""
    try:
        result = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return result if isinstance(result, dict) else arguments


def convert_tools(tools: Sequence[ToolSchema], tool_choice: str | None = None) -> list[dict[str, Any]] | None:
    """Convert tools to the dictionaries that chat templates expect.

    Returns None if there are no tools or `tool_choice` is `none`.
    """
    if not tools or tool_choice == "none":
        return None
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
        }
        for tool in tools
    ]


class CallIds:
    """Generates the IDs of the tool calls of one reply: call it with the index of a tool call."""

    def __init__(self, prompt_tail: bytes, prompt_length: int) -> None:
        seed = hashlib.blake2b(
            prompt_tail[-SEED_BYTES:], digest_size=9, salt=(prompt_length % 2**63).to_bytes(8, "little")
        ).hexdigest()
        self._prefix = f"call_{seed}_"

    def __call__(self, number: int) -> str:
        return f"{self._prefix}{number}"


def convert_call(result: Any, number: int, call_ids: CallIds) -> ToolCall | None:
    """Convert a parser's result for one tool call; return None if the call is incomplete or invalid.

    `number` is the index of the call, from which its ID is generated if the result has none.
    """
    if not result.name or result.arguments is None or str(result.status) == "unclosed_block":
        return None
    return ToolCall(str(result.id or call_ids(number)), str(result.name), _get_arguments(result))


def _get_arguments(result: Any) -> str:
    arguments = result.arguments
    if isinstance(arguments, str):
        return arguments
    return _find_sampled_arguments(result.raw or "", arguments) or json.dumps(arguments, ensure_ascii=False)


def _find_sampled_arguments(raw: str, arguments: Any) -> str:
    """Return the part of the sampled text `raw` that was parsed as `arguments`; empty if it is not found."""
    for key in _KEYS:
        position = raw.find(f'"{key}"')
        while position >= 0:
            start = position + len(key) + 2
            rest = raw[start:].lstrip()
            if rest.startswith(":"):
                text = rest[1:].lstrip()
                try:
                    value, end = _DECODER.raw_decode(text)
                except (ValueError, RecursionError):
                    return ""
                if value == arguments:
                    return text[:end]
            position = raw.find(f'"{key}"', start)
    return ""


def build_message(
    parsed: Any, sampled: Sequence[int], call_ids: CallIds, decode: Callable[[Sequence[int]], str]
) -> Message:
    """Build the message of a reply from a parser's result.

    The text of tool calls that are incomplete or invalid is appended to the content. `decode` decodes token IDs.
    """
    calls: list[ToolCall] = []
    content = (parsed.content or "").strip()
    for result in parsed.tool_calls:
        call = convert_call(result, len(calls), call_ids)
        if call is not None:
            calls.append(call)
            continue
        span = result.token_span
        text = (decode(sampled[span[0] : span[1]]) if span else result.raw or "").strip()
        content = f"{content}\n{text}" if content and text else content or text
    reasoning = (parsed.reasoning_content or "").strip()
    return Message(
        "assistant", content if content or not calls else None, tuple(calls), reasoning=reasoning or None
    )
