"""The embedded policy's chat format: bytes are tokens, and nine ids above them give a conversation its shape.

    <begin> <tools>python(code)<end> <system>…<end> <user>…<end> <assistant>…<call>python{"code":"…"}<end>
    <tool>…<end> <assistant>…<end>

Promises:
- text is only ever bytes: nothing a user, a tool or a model writes turns into one of the ids above them;
- an answer that is sent back renders to the very ids that were sampled, where its bytes are UTF-8;
- a call's arguments are kept exactly as sampled: they may not be valid JSON.
"""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from rookery.core import Message, ToolCall, ToolSchema

BEGIN, END, SYSTEM, USER, ASSISTANT, TOOL, CALL, TOOLS, PAD = range(256, 265)
VOCAB: Final = 272
"""Bytes, the ids above, and some to spare."""
NAMES: Final = {
    BEGIN: "<begin>",
    END: "<end>",
    SYSTEM: "<system>",
    USER: "<user>",
    ASSISTANT: "<assistant>",
    TOOL: "<tool>",
    CALL: "<call>",
    TOOLS: "<tools>",
    PAD: "<pad>",
}
_ROLES: Final = {
    "system": SYSTEM,
    "developer": SYSTEM,
    "user": USER,
    "assistant": ASSISTANT,
    "tool": TOOL,
}


class Prompt(NamedTuple):
    """A conversation as token ids, up to where the answer begins."""

    ids: list[int]
    begun: str = ""
    """The call that a choice of a tool has begun already: part of the answer, not of what was sampled."""


def prompt(
    messages: Iterable[Message], tools: Sequence[ToolSchema] = (), tool_choice: str | None = None
) -> Prompt:
    """The ids of a conversation. `tool_choice` as in `ModelRequest`."""
    ids = [BEGIN]
    if tools and tool_choice != "none":
        ids += (TOOLS, *text_ids("\n".join(map(_signature, tools))), END)
    for message in messages:
        ids += message_ids(message)
    ids.append(ASSISTANT)
    if not tools or tool_choice in (None, "auto", "none"):
        return Prompt(ids)
    named = tool_choice if tool_choice != "required" else tools[0].name if len(tools) == 1 else ""
    ids += (CALL, *text_ids(named))
    return Prompt(ids, NAMES[CALL] + named)


def message_ids(message: Message) -> list[int]:
    """One message, from the id of its role to its `<end>`."""
    ids = [_ROLES[message.role], *text_ids(message.text)]
    for call in message.tool_calls:
        ids += (CALL, *text_ids(call.name), *text_ids(call.arguments))
    ids.append(END)
    return ids


def text_ids(text: str) -> bytes:
    """The ids of a text, which are its bytes. A lone surrogate, which UTF-8 has no bytes for, becomes `?`."""
    return text.encode("utf-8", "replace")


def answer(ids: Sequence[int], begun: str = "", *, at: int = 0) -> Message:
    """The message that sampled ids spell. `at`, the prompt's length, makes the ids of its calls differ by turn."""
    pieces: list[bytearray] = [bytearray()]
    if begun:
        pieces.append(bytearray(text_ids(begun.removeprefix(NAMES[CALL]))))
    for token in ids:
        if token < BEGIN:
            pieces[-1].append(token)
        elif token == CALL:
            pieces.append(bytearray())
        elif token in ENDS:
            break
        else:
            pieces[-1] += "\N{REPLACEMENT CHARACTER}".encode()
    content, *calls = (piece.decode("utf-8", "replace") for piece in pieces)
    return Message(
        "assistant",
        content if content or not calls else None,
        tuple(_call(text, f"call_{at}_{number}") for number, text in enumerate(calls)),
    )


ENDS: Final = frozenset({BEGIN, END, SYSTEM, USER, ASSISTANT, TOOL, TOOLS, PAD})
"""Ids that end an answer: its own end, and every one that would begin another message."""


def _call(text: str, call_id: str) -> ToolCall:
    name, brace, rest = text.partition("{")
    return ToolCall(call_id, name, brace + rest)


def _signature(schema: ToolSchema) -> str:
    named = schema.parameters.get("properties")
    return f"{schema.name}({', '.join(map(str, named)) if isinstance(named, dict) else ''})"
