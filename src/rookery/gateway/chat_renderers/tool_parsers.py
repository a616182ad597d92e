"""Parsers for tool calls in replies, for the chat format `default`.

The parsers of the `renderers` package find tool calls by special tokens, such as `<tool_call>`, and find nothing
if the tokenizer lacks them. The parser `hermes` reads the same format as `qwen3`, and finds the tags in the text
if they are no special tokens.
"""

import json
from collections.abc import Sequence
from typing import Any, Final

from rookery.core import UsageError
from rookery.gateway.chat_renderers.tokenizer import Tokenizer

HERMES: Final = "hermes"
_BEGIN: Final = "<tool_call>"
_END: Final = "</tool_call>"
_REQUIRED_TOKENS: Final = {
    "qwen3": _BEGIN,
    "qwen3.5": _BEGIN,
    "glm": _BEGIN,
    "deepseek-v3": "<｜tool▁calls▁begin｜>",  # noqa: RUF001
}
"""The token with which tool calls begin, for each parser that finds nothing without it."""


def check_tool_parser(name: str | None, tokenizer: Tokenizer) -> None:
    """Raise `UsageError` if the tool parser does not exist, or needs a special token that the tokenizer lacks."""
    known = _registry()
    if name is None:
        return
    if name not in known:
        raise UsageError(f"there is no tool_parser {name!r}; the known ones are {', '.join(sorted(known))}")
    token = _REQUIRED_TOKENS.get(name)
    if token is not None and not _has_token(tokenizer, token):
        raise UsageError(
            f"the tool parser {name!r} looks for the special token {token}, which the tokenizer in "
            f"{tokenizer.folder} does not have: use {HERMES}, which finds <tool_call> tags in the text"
        )


def _registry() -> dict[str, Any]:
    """Return the tool parsers by name. `hermes` is added to those of the `renderers` package."""
    from renderers import parsers

    known: dict[str, Any] = parsers.TOOL_PARSERS
    known.setdefault(HERMES, _open_hermes)
    return known


def _open_hermes(tokenizer: Tokenizer) -> Any:
    from renderers.parsers import Qwen3ToolParser

    return Qwen3ToolParser(tokenizer) if _has_token(tokenizer, _BEGIN) else HermesTextParser(tokenizer)


def _has_token(tokenizer: Tokenizer, token: str) -> bool:
    return tokenizer.convert_tokens_to_ids(token) not in (None, tokenizer.unk_token_id)


class HermesTextParser:
    """Finds `<tool_call>{"name": …, "arguments": …}</tool_call>` in the text of a reply.

    Implements `ToolParser` of the `renderers` package. As in its parser `qwen3`, text after the first call is not
    part of the content.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def extract(self, token_ids: list[int]) -> tuple[Sequence[int], list[Any]]:
        """Return the token IDs of the text before the first tool call, and the tool calls."""
        text = self._tokenizer.decode(token_ids)
        start = text.find(_BEGIN)
        if start < 0:
            return token_ids, []
        content = self._tokenizer.encode(text[:start])  # a token may hold both text and a part of the tag
        calls = []
        while start >= 0:
            end = text.find(_END, start)
            stop = len(text) if end < 0 else end + len(_END)
            calls.append(_parse_block(text[start:stop], closed=end >= 0))
            start = text.find(_BEGIN, stop)
        return content, calls


def _parse_block(block: str, *, closed: bool) -> Any:
    """Return the result for one tool call, with its tags. `closed` is False if the end tag is missing."""
    from renderers.base import ParsedToolCall, ToolCallParseStatus

    if not closed:
        return ParsedToolCall(raw=block, status=ToolCallParseStatus.UNCLOSED_BLOCK)
    try:
        value = json.loads(block[len(_BEGIN) : -len(_END)])
    except (ValueError, RecursionError):
        return ParsedToolCall(raw=block, status=ToolCallParseStatus.INVALID_JSON)
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return ParsedToolCall(raw=block, status=ToolCallParseStatus.MISSING_NAME)
    return ParsedToolCall(raw=block, name=name, arguments=value.get("arguments", {}))
