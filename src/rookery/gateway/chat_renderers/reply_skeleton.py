"""Skeleton of a reply: its special tokens, with one placeholder for each stretch of text between them.

The parser of a chat format looks at special tokens ("markers") and only passes text through. So it gives the same
result for a skeleton of a few dozen tokens as for the whole reply, however long it is.

Guarantees:
- a skeleton has every marker of a reply in order, one placeholder for each non-empty stretch of text, and short
  headers verbatim;
- a skeleton only grows at its end;
- the parser's result for the skeleton, with the text filled in, is its result for the reply. If a later marker
  could change it, the plan is not certain.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

MAX_VERBATIM: Final = 12
"""Stretches of up to this many tokens stay verbatim if they may be a header, because headers decide how the rest
is parsed."""
MAX_MARKERS: Final = 256
"""Markers in one reply above which streaming stops and the reply is parsed at its end."""
PLAN_BUDGET: Final = 40_000
"""Tokens that may be parsed for the uncached plans of one reply."""
_HEADER: Final = re.compile("channel|start|assistant|turn|header|im_")
_FIRST_PLACEHOLDER: Final = 0xE000
_LAST_PLACEHOLDER: Final = 0xF8FF
PROBE: Final = chr(_LAST_PLACEHOLDER)
"""Placeholder for the text that comes next."""
LATER_PROBE: Final = chr(_LAST_PLACEHOLDER - 1)
"""Placeholder for the text after the next marker."""
# Spaces that normalisation does not turn into other spaces.
_SPACES: Final = tuple(chr(0x2002 + n) for n in range(9))

Parse: TypeAlias = Callable[[Sequence[int]], Any]
"""The parser of a chat format: token IDs to a result with content, reasoning and tool calls."""


class StreamPlan(NamedTuple):
    """How the text after a skeleton will be parsed."""

    channel: str
    """`content`, `reasoning`, or empty if the text is neither."""
    certain: bool
    """Whether no possible next marker changes how the text is parsed."""
    content: str
    reasoning: str
    """Content and reasoning parsed so far, with placeholders."""
    calls: tuple[tuple[int, int], ...]
    """Positions in the skeleton of the complete tool calls that no next marker can undo."""


EMPTY_PLAN: Final = StreamPlan("", False, "", "", ())


class ReplySkeleton:
    """The skeleton of one reply so far."""

    __slots__ = ("header_possible", "ids", "markers", "positions", "texts")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        """For each token of the skeleton, its position in the reply."""
        self.texts: dict[str, str] = {}
        """The text of each placeholder."""
        self.markers = 0
        self.header_possible = True
        """Whether the text that comes next may be a header; a reply may start with one."""

    def add_text(
        self, tokens: Sequence[int], text: str, position: int, encode: Callable[[str], list[int]]
    ) -> None:
        """Add a stretch of text that starts at token `position`."""
        if not text:  # tokens without text still belong to the skeleton
            tokens = tokens[:MAX_VERBATIM]
        body = text.strip()
        short = len(tokens) <= MAX_VERBATIM and (self.header_possible or not body)
        if short and not any(_FIRST_PLACEHOLDER <= ord(letter) <= _LAST_PLACEHOLDER for letter in body):
            self._add(tokens, range(position, position + len(tokens)))
            return
        number = len(self.texts)
        placeholder = chr(_FIRST_PLACEHOLDER + number) if body else _SPACES[number % len(_SPACES)]
        self.texts[placeholder] = text
        ids = encode(placeholder)
        self._add(ids, [position] * len(ids))

    def add_marker(self, token: int, text: str, position: int) -> None:
        self._add([token], [position])
        self.markers += 1
        self.header_possible = _HEADER.search(text) is not None

    def _add(self, ids: Sequence[int], positions: Sequence[int]) -> None:
        self.ids += ids
        self.positions += positions

    def fill_placeholders(self, template: str) -> str:
        """Replace the placeholders by their text."""
        if not self.texts or template.isascii():
            return template
        return "".join([self.texts.get(letter, letter) for letter in template])


def make_stream_plan(
    parse: Parse, ids: Sequence[int], markers: Sequence[int], probe: Sequence[int], later_probe: Sequence[int]
) -> StreamPlan:
    """Find out how the text after a skeleton will be parsed. `markers` are the markers that the format knows."""
    parsed = parse([*ids, *probe])
    channel = next((name for name in ("content", "reasoning") if PROBE in _get_channel(parsed, name)), "")
    before_probe = {name: _get_channel(parsed, name).partition(PROBE)[0] for name in ("content", "reasoning")}
    complete = [span for span in map(_get_span, parsed.tool_calls) if span is not None]
    calls = [span for span in complete if span[1] <= len(ids)]
    certain = True
    for marker in markers:
        after = parse([*ids, *probe, marker, *later_probe])
        for then in (after, parse([*ids, marker])) if calls else ():
            spans = [_get_span(call) for call in then.tool_calls]
            while calls and spans[: len(calls)] != calls:
                calls.pop()
        for name, before in before_probe.items():
            expected = before + PROBE if name == channel else before
            certain = certain and _get_channel(after, name).lstrip().startswith(expected.strip())
    return StreamPlan(channel, certain, before_probe["content"], before_probe["reasoning"], tuple(calls))


def _get_channel(parsed: Any, name: str) -> str:
    return (parsed.content if name == "content" else parsed.reasoning_content) or ""


def _get_span(call: Any) -> tuple[int, int] | None:
    """Return the position of a complete tool call; None if it is incomplete or unknown."""
    if call.token_span is None or str(call.status) == "unclosed_block":
        return None
    return (call.token_span[0], call.token_span[1])
