"""An answer's outline: its marks as they stand, and one stand-in for each stretch of text between them.

A format's parser looks at marks (tokens that text is never cut into), and at text only to hand it on. So what it
says of an outline, a few dozen ids, it says of the whole answer, however long that is.

Promises:
- an outline holds every mark of an answer, in order, and of its text whether there is any, and short headers;
- an answer's outline grows at its end only;
- what a parser makes of an outline, with the texts put back, is what it makes of the answer; where a later mark
  could still change that, it is not called sure.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

VERBATIM: Final = 12
"""Stretches of up to this many tokens stay as they are where words matter: headers decide what comes after."""
MOST: Final = 256
"""Marks in one answer beyond which nothing is planned any more."""
ALLOWANCE: Final = 40_000
"""Ids that a parser may be asked about, in all, for the plans of one answer that nobody made before it."""
_HEADER: Final = re.compile("channel|start|assistant|turn|header|im_")
_FIRST: Final = 0xE000
_LAST: Final = 0xF8FF
PROBE: Final = chr(_LAST)
"""Stands for the text that comes next."""
LATER: Final = chr(_LAST - 1)
"""Stands for the text that comes after that."""
# Spaces that are no other space under normalisation.
_SPACES: Final = tuple(chr(0x2002 + at) for at in range(9))

Parse: TypeAlias = Callable[[Sequence[int]], Any]
"""A family's parser: ids to its findings."""


class Plan(NamedTuple):
    """What an outline says of the text that comes next."""

    live: str
    """`content`, `reasoning`, or nothing where the text is neither."""
    sure: bool
    """Whether no mark that may come next would make something else of it."""
    content: str
    reasoning: str
    """With stand-ins; of what came before."""
    calls: tuple[tuple[int, int], ...]
    """Where in the outline complete calls are, in order, as far as no next mark would undo them."""


NOTHING: Final = Plan("", False, "", "", ())


class Outline:
    """The outline of one answer so far."""

    __slots__ = ("ids", "marks", "places", "texts", "words")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.places: list[int] = []
        """For each id of the outline, where in the answer it begins."""
        self.texts: dict[str, str] = {}
        """What each stand-in stands for."""
        self.marks = 0
        self.words = True
        """Whether the words that come next matter: an answer may begin with a header."""

    def text(self, run: Sequence[int], text: str, at: int, spell: Callable[[str], list[int]]) -> None:
        """A stretch of text, which begins at token `at`."""
        if not text:  # ids that spell nothing: they are there all the same
            run = run[:VERBATIM]
        body = text.strip()
        short = len(run) <= VERBATIM and (self.words or not body)
        if short and not any(_FIRST <= ord(letter) <= _LAST for letter in body):
            self._add(run, range(at, at + len(run)))
            return
        number = len(self.texts)
        stand_in = chr(_FIRST + number) if body else _SPACES[number % len(_SPACES)]
        self.texts[stand_in] = text
        ids = spell(stand_in)
        self._add(ids, [at] * len(ids))

    def mark(self, token: int, text: str, at: int) -> None:
        self._add([token], [at])
        self.marks += 1
        self.words = _HEADER.search(text) is not None

    def _add(self, ids: Sequence[int], places: Sequence[int]) -> None:
        self.ids += ids
        self.places += places

    def filled(self, shape: str) -> str:
        """A shape with the texts put back."""
        if not self.texts or shape.isascii():
            return shape
        return "".join([self.texts.get(letter, letter) for letter in shape])


def plan(
    parse: Parse, ids: Sequence[int], marks: Sequence[int], probe: Sequence[int], later: Sequence[int]
) -> Plan:
    """What comes next after an outline. `marks` are those that a format knows; the probes are given as ids."""
    ahead = parse([*ids, *probe])
    live = next((name for name in ("content", "reasoning") if PROBE in _of(ahead, name)), "")
    now = {name: _of(ahead, name).partition(PROBE)[0] for name in ("content", "reasoning")}
    done = [span for span in map(_span, ahead.tool_calls) if span is not None]
    calls = [span for span in done if span[1] <= len(ids)]
    sure = True
    for mark in marks:
        after = parse([*ids, *probe, mark, *later])
        for then in (after, parse([*ids, mark])) if calls else ():
            spans = [_span(call) for call in then.tool_calls]
            while calls and spans[: len(calls)] != calls:
                calls.pop()
        for name, before in now.items():
            expected = before + PROBE if name == live else before
            sure = sure and _of(after, name).lstrip().startswith(expected.strip())
    return Plan(live, sure, now["content"], now["reasoning"], tuple(calls))


def _of(parsed: Any, name: str) -> str:
    return (parsed.content if name == "content" else parsed.reasoning_content) or ""


def _span(call: Any) -> tuple[int, int] | None:
    """Where a complete call is; None where it is not complete, or nobody knows."""
    if call.token_span is None or str(call.status) == "unclosed_block":
        return None
    return (call.token_span[0], call.token_span[1])
