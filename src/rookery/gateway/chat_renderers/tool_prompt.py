"""Describe tools in the system message, for chat templates that ignore tools.

Many templates silently ignore the tools of a call. `ignores_tools` detects this, and `insert_tool_prompt`
describes the tools in the format that most parsers of tool calls read.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from rookery.core import Message, ToolSchema, UsageError
from rookery.gateway.chat_renderers.protocol import RenderError

DEFAULT_NAME: Final = "default"
PLACEHOLDER: Final = "{tools}"
DEFAULT_PROMPT: Final = """\
You can call functions. Their signatures, one JSON object per line:
<tools>
{tools}
</tools>
To call one, write a JSON object with its name and arguments between tags:
<tool_call>
{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}
</tool_call>"""
"""The tool prompt that is used for the setting `default`."""

_PROBE_TOOL: Final = (
    ToolSchema(
        "rookery_probe",
        "Detects whether a template renders tools.",
        {"type": "object", "properties": {"probe": {"type": "string"}}},
    ),
)


def read_tool_prompt(value: str) -> str:
    """Return the text of a tool prompt, which describes tools in the system message.

    `value` is `default`, the text itself (with `{tools}` in it), or the path of a file. Raises `UsageError` if the
    file cannot be read or the text has no `{tools}`.
    """
    if value == DEFAULT_NAME:
        return DEFAULT_PROMPT
    text = value
    if "\n" not in value and PLACEHOLDER not in value:
        try:
            text = Path(value).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UsageError(f"the tool prompt {value!r:.200} cannot be read: {error}") from None
    if PLACEHOLDER not in text:
        raise UsageError(f"the tool prompt does not contain {PLACEHOLDER}, which marks where the tools go")
    return text


def ignores_tools(render: Callable[[Sequence[Message], Sequence[ToolSchema], str | None], bytes]) -> bool:
    """Return whether a chat format ignores tools: whether its prompts are the same with and without them."""
    messages = (Message("user", "a"),)
    try:
        return render(messages, _PROBE_TOOL, None) == render(messages, (), None)
    except RenderError:
        return False  # rejected with an error, so not ignored silently


def dropped_tools_message(name: str) -> str:
    """Return the error message for a chat template that ignores tools."""
    return (
        f"the chat template ({name}) ignores tools, so the model would not see them: configure a "
        "tool prompt (--tool-prompt default), use another template, or continue without tools (--allow-no-tools)"
    )


def insert_tool_prompt(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], prompt: str
) -> list[dict[str, Any]]:
    """Return the messages with a description of the tools in the system message.

    `prompt` is the text of the description, in which `{tools}` is replaced by the schemas. Earlier tool calls in
    the messages are written as text in the `<tool_call>` format.
    """
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = prompt.replace(PLACEHOLDER, schemas)
    result = [_write_calls_as_text(message) for message in messages]
    if result and result[0]["role"] == "system":
        before = result[0]["content"]
        result[0] = {**result[0], "content": f"{before}\n\n{text}" if before else text}
        return result
    return [{"role": "system", "content": text}, *result]


def _write_calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        for call in message.get("tool_calls", ())
    ]
    if not calls:
        return message
    content = [message["content"]] if message["content"] else []
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join([*content, *calls])}
