"""Tools for chat templates that have no place for them.

Many templates silently ignore the tools of a call. `drops_tools` finds that out, `with_tool_prompt` describes the
tools in the system message instead, in the format that most parsers of tool calls read.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from rookery.core import Message, ToolSchema, UsageError
from rookery.gateway.renderings.protocol import Unrenderable

DEFAULT: Final = "default"
TOOLS: Final = "{tools}"
PROMPT: Final = """\
You can call functions. Their signatures, one JSON object per line:
<tools>
{tools}
</tools>
To call one, write a JSON object with its name and arguments between tags:
<tool_call>
{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}
</tool_call>"""
"""The prompt that `default` stands for."""

_PROBE: Final = (
    ToolSchema(
        "rookery_probe",
        "Finds out whether a template knows tools.",
        {"type": "object", "properties": {"probe": {"type": "string"}}},
    ),
)


def read_tool_prompt(given: str) -> str:
    """Return the text of a tool prompt, which is given as `default`, as the path of a file or as the text."""
    if given == DEFAULT:
        return PROMPT
    text = given
    if "\n" not in given and TOOLS not in given:
        try:
            text = Path(given).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UsageError(f"the tool prompt {given!r:.200} cannot be read: {error}") from None
    if TOOLS not in text:
        raise UsageError(f"a tool prompt says with {TOOLS} where the tools go, and this one does not")
    return text


def drops_tools(render: Callable[[Sequence[Message], Sequence[ToolSchema], str | None], bytes]) -> bool:
    """Whether a prompt is the same with and without tools: the model would never hear of them."""
    asked = (Message("user", "a"),)
    try:
        return render(asked, _PROBE, None) == render(asked, (), None)
    except Unrenderable:
        return False  # refused in words, so nothing is dropped silently


def without_tools(name: str) -> str:
    """The sentence for users whose template drops tools."""
    return (
        f"the chat template ({name}) has no place for tools, so the model would not know of them: configure a "
        "tool prompt (--tool-prompt default), use another template, or go on without tools (--allow-no-tools)"
    )


def with_tool_prompt(
    words: Sequence[dict[str, Any]], offered: Sequence[dict[str, Any]], prompt: str
) -> list[dict[str, Any]]:
    """The messages with the tools in the system message, and with earlier calls as the text that was asked for."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in offered)
    text = prompt.replace(TOOLS, listed)
    found = [_with_calls(word) for word in words]
    if found and found[0]["role"] == "system":
        before = found[0]["content"]
        found[0] = {**found[0], "content": f"{before}\n\n{text}" if before else text}
        return found
    return [{"role": "system", "content": text}, *found]


def _with_calls(word: dict[str, Any]) -> dict[str, Any]:
    calls = [
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        for call in word.get("tool_calls", ())
    ]
    if not calls:
        return word
    said = [word["content"]] if word["content"] else []
    rest = {name: value for name, value in word.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join([*said, *calls])}
