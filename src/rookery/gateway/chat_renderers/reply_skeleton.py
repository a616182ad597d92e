"""Skeleton of a reply: its special tokens, with one placeholder for each stretch of text between them.

The parser of a chat format looks at special tokens ("markers") and only passes text through. So the result for a
skeleton of a few dozen tokens shows how the whole reply is parsed, however long the reply is.

Guarantees:
- a skeleton has every marker of a reply in order, one placeholder for each non-empty stretch of text, and short
  texts verbatim where they may be headers (such as the name of a channel);
- a skeleton only grows at its end;
- the parser's result for the skeleton, with the placeholders replaced by their text, is its result for the reply.
  If a later marker could change that result, the `StreamPlan` is not certain.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

MAX_VERBATIM: Final = 12
"""Stretches of text of up to this many tokens stay verbatim in the skeleton if they may be a header, because
headers decide how the rest of the reply is parsed."""
MAX_MARKERS: Final = 256
"""If a reply has more markers than this, the rest of it is not streamed but parsed at its end."""
PLAN_BUDGET: Final = 40_000
"""Maximum number of tokens that may be parsed to make stream plans for one reply. Cached plans cost nothing."""
_HEADER: Final = re.compile("channel|start|assistant|turn|header|im_")
_FIRST_PLACEHOLDER: Final = 0xE000
_LAST_PLACEHOLDER: Final = 0xF8FF
PROBE: Final = chr(_LAST_PLACEHOLDER)
"""Stands for the text that comes next, to find out how it will be parsed."""
LATER_PROBE: Final = chr(_LAST_PLACEHOLDER - 1)
"""Stands for the text after the next marker, to find out whether the marker changes how earlier text is parsed."""
# Spaces that normalisation does not turn into other spaces.
_SPACES: Final = tuple(chr(0x2002 + n) for n in range(9))

Parse: TypeAlias = Callable[[Sequence[int]], Any]
"""The parser of a chat format. It takes token IDs and returns content, reasoning and tool calls."""


class StreamPlan(NamedTuple):
    """The way the text that follows a skeleton of a reply will be parsed, so that it can be streamed."""

    channel: str
    """The part of the message that the text belongs to: `content` or `reasoning`; empty if neither (for example a
    tool call)."""
    certain: bool
    """True if no possible next marker changes how the text is parsed."""
    content: str
    reasoning: str
    """`content` and `reasoning` are the texts parsed so far, with placeholders."""
    calls: tuple[tuple[int, int], ...]
    """Start and end, in the skeleton, of each complete tool call that the next marker cannot change."""


EMPTY_PLAN: Final = StreamPlan("", False, "", "", ())


class ReplySkeleton:
    """The skeleton of one reply as far as it was sampled: its markers, with placeholders for text."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        """One number per token of the skeleton: the index of the reply's token that it stands for."""
        self.texts: dict[str, str] = {}
        """The text that each placeholder stands for."""
        self.markers = 0
        self.header_possible = True
        """True if the text that comes next may be a header. A reply may start with a header."""

    def add_text(
        self, tokens: Sequence[int], text: str, position: int, encode: Callable[[str], list[int]]
    ) -> None:
        """Add a stretch of text that starts at the token with index `position` of the reply."""
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
        """Return `template` with each placeholder replaced by the text that it stands for."""
        if not self.texts or template.isascii():
            return template
        return "".join([self.texts.get(letter, letter) for letter in template])


def make_stream_plan(
    parse: Parse, ids: Sequence[int], markers: Sequence[int], probe: Sequence[int], later_probe: Sequence[int]
) -> StreamPlan:
    """Find out how the text after the skeleton `ids` will be parsed, by parsing it with probes appended.

    `markers` are the IDs of the markers that the format knows, any of which may come next. `probe` and
    `later_probe` are the token IDs of `PROBE` and `LATER_PROBE`.
    """
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
    """Return the index of a tool call's first token in the parsed reply, and the index after its last token.

    Return None if the call is incomplete or the parser did not report these indexes.
    """
    if call.token_span is None or str(call.status) == "unclosed_block":
        return None
    return (call.token_span[0], call.token_span[1])
