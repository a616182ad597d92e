"""Chat format of the embedded policy: bytes are tokens, and nine special tokens structure a conversation.

    <begin> <tools>python(code)<end> <system>…<end> <user>…<end> <assistant>…<call>python{"code":"…"}<end>
    <tool>…<end> <assistant>…<end>

Text is encoded as UTF-8 bytes, so that nothing that a user, a tool or a model writes becomes a special token. A
reply that is sent back in a later prompt is encoded as the token IDs that were sampled, if its bytes are valid
UTF-8. The arguments of a tool call are kept exactly as sampled and may be invalid JSON.
"""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from rookery.core import Message, ToolCall, ToolSchema

BEGIN, END, SYSTEM, USER, ASSISTANT, TOOL, CALL, TOOLS, PAD = range(256, 265)
VOCAB: Final = 272
"""Size of the vocabulary: bytes, special tokens and a few unused IDs."""
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
    """A rendered prompt: the token IDs of a conversation, up to the start of the reply."""

    ids: list[int]
    begun: str = ""
    """The start of a tool call with which the prompt ends, if `tool_choice` requires a call; otherwise empty.

    It belongs to the reply but is not sampled.
    """


def prompt(
    messages: Iterable[Message], tools: Sequence[ToolSchema] = (), tool_choice: str | None = None
) -> Prompt:
    """Render a conversation as the token IDs of a prompt.

    `tool_choice` is None, `auto`, `none`, `required`, or the name of a tool.
    """
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
    """Return the token IDs of one message, from the special token of its role to `<end>`."""
    ids = [_ROLES[message.role], *text_ids(message.text)]
    for call in message.tool_calls:
        ids += (CALL, *text_ids(call.name), *text_ids(call.arguments))
    ids.append(END)
    return ids


def text_ids(text: str) -> bytes:
    """Encode text as UTF-8 bytes, which are its token IDs. A lone surrogate becomes `?`."""
    return text.encode("utf-8", "replace")


def answer(ids: Sequence[int], begun: str = "", *, at: int = 0) -> Message:
    """Convert sampled token IDs to an assistant message.

    `begun` is the start of a tool call that the prompt ends with, from `Prompt.begun`. `at` is the length of the
    prompt, which makes the IDs of tool calls unique across turns.
    """
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
        tuple(parse_call(text, f"call_{at}_{number}") for number, text in enumerate(calls)),
    )


ENDS: Final = frozenset({BEGIN, END, SYSTEM, USER, ASSISTANT, TOOL, TOOLS, PAD})
"""Tokens that end a reply: `<end>`, and every token that would start another message."""


def parse_call(text: str, call_id: str) -> ToolCall:
    name, brace, rest = text.partition("{")
    return ToolCall(call_id, name, brace + rest)


def _signature(schema: ToolSchema) -> str:
    named = schema.parameters.get("properties")
    return f"{schema.name}({', '.join(map(str, named)) if isinstance(named, dict) else ''})"
