"""Reads an answer of any family while it is sampled: text as it comes, calls when they are whole.

Promises:
- what was told, put together, is the message that the reader ends with, however the ids were cut into pieces;
- that message is what `parse` makes of the whole; where it had already told otherwise, what was told stands, and
  the rendering counts it;
- a piece costs what it is long: the family's parser is asked at marks only, about an outline, and remembers;
- half a character is never told, and nothing that the next mark could make something else of.
"""

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from rookery.core import Message, ToolCall, ToolSchema
from rookery.gateway.renderings.outline import ALLOWANCE, MOST, NOTHING, Outline
from rookery.gateway.renderings.words import CallIds, call_of
from rookery.upstreams.protocol import CallDelta, Delta

if TYPE_CHECKING:
    from rookery.gateway.renderings.families import Family

_NAMES: Final = ("content", "reasoning")


class _Channel:
    """What was told of one kind of text. Space is told once something follows it."""

    __slots__ = ("space", "told")

    def __init__(self) -> None:
        self.told = ""
        self.space = ""

    def more(self, text: str) -> str:
        if not self.told:
            text = text.lstrip()
        body = text.rstrip()
        if not body:
            if self.told:
                self.space += text
            return ""
        new = self.space + body
        self.told += new
        self.space = text[len(body) :]
        return new

    def until(self, whole: str) -> str | None:
        """What is new now that the text so far is this; None where that is not how it began."""
        whole = whole.lstrip()
        if not whole.startswith(self.told):
            return None
        self.space = ""
        return self.more(whole[len(self.told) :])


class FamilyReader:
    """Reads one answer."""

    def __init__(self, family: "Family", tail: bytes, tools: Sequence[ToolSchema], at: int) -> None:
        self._family = family
        self._context = family.context(tail)
        self._tools = tools
        self._tail, self._at = tail, at
        self._call_ids = CallIds(tail, at)
        self._ids: list[int] = []
        self._outline = Outline()
        self._run = 0
        """Where the stretch of text under way begins."""
        self._text: list[str] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pieces = family.tokenizer.pieces
        self._partial = False
        """Whether half a character is waiting for the rest of it."""
        self._content, self._reasoning = _Channel(), _Channel()
        self._calls: list[ToolCall] = []
        self._seen = 0
        """Calls that were looked at, the unreadable ones among them."""
        self._over = False
        self._held = not family.tokenizer.spells
        """Nothing is told any more until the end."""
        self._pending = ""
        """Text that may be the beginning of a mark that is written as text."""
        self._allowance = ALLOWANCE
        self._plan = NOTHING
        self._ask()

    # ---------------------------------------------------------------------------------------------- pieces

    def feed(self, sampled: bytes, logprobs: bytes = b"") -> Delta:
        ids = memoryview(sampled).cast("i").tolist()
        before = len(self._ids)
        self._ids += ids
        if self._silent():
            return Delta(sampled=sampled, logprobs=logprobs)
        family = self._family
        told: list[tuple[str, str]] = []
        calls: list[CallDelta] = []
        if len(ids) == 1 and (text := self._alone(ids[0])) is not None:
            self._flow(text, told)
        elif family.added.isdisjoint(ids):
            self._flow(self._decoded(ids), told)
        else:
            start = 0
            for at, token in enumerate(ids):
                if token not in family.added:
                    continue
                self._flow(self._decoded(ids[start:at], final=True), told)
                start = at + 1
                self._mark(token, before + at, told, calls)
                if self._silent():
                    break
            else:
                self._flow(self._decoded(ids[start:]), told)
        content, reasoning = _joined(told)
        return Delta(content, reasoning, tuple(calls), sampled, logprobs)

    def _silent(self) -> bool:
        return self._over or self._held

    def _alone(self, token: int) -> str | None:
        """The text of one token that is nothing but ASCII, as most are; None where it is not, or not all."""
        pieces = self._pieces
        if self._partial or token in self._family.added or not 0 <= token < len(pieces):
            return None
        piece = pieces[token]
        return piece.decode() if piece.isascii() else None

    def _decoded(self, ids: Sequence[int], *, final: bool = False) -> str:
        text = self._decoder.decode(self._family.tokenizer.spell(ids), final)
        if final:
            self._decoder.reset()
        self._partial = not final and bool(self._decoder.getstate()[0])
        return text

    def _flow(self, text: str, told: list[tuple[str, str]]) -> None:
        """Text of the stretch under way."""
        if not text or self._silent():
            return
        marks = self._family.text_marks
        if marks:
            text = self._pending + text
            self._pending = ""
            while (found := _first(text, marks)) is not None:
                at, mark = found
                self._plain(text[:at], told)
                self._text_mark(mark, told)
                text = text[at + len(mark) :]
                if self._silent():
                    return
            keep = _begun(text, marks)
            self._pending = text[len(text) - keep :]
            text = text[: len(text) - keep]
        self._plain(text, told)

    def _plain(self, text: str, told: list[tuple[str, str]]) -> None:
        if not text:
            return
        self._text.append(text)
        plan = self._plan
        if not plan.live or not plan.sure:
            return
        if plan.live == "reasoning":
            told.append(("reasoning", self._reasoning.more(text)))
            return
        # A format whose calls are bare JSON: whether this is one is known at its end only.
        if self._family.bare_calls and not self._content.told and text.lstrip().startswith("{"):
            self._held = True
            return
        told.append(("content", self._content.more(text)))

    # ----------------------------------------------------------------------------------------------- marks

    def _mark(self, token: int, at: int, told: list[tuple[str, str]], calls: list[CallDelta]) -> None:
        if self._pending:  # it was no mark after all
            self._plain(self._pending, told)
            self._pending = ""
        self._close(at)
        self._outline.mark(token, self._family.tokenizer.added[token], at)
        self._run = at + 1
        if token in self._family.stops:
            self._over = True
            return
        self._replan(told)
        if not self._held and not self._family.text_marks:
            self._new_calls(at + 1, calls)

    def _text_mark(self, mark: str, told: list[tuple[str, str]]) -> None:
        """A mark that text spells. Where it lies among the tokens is not known, and not needed: text is told."""
        self._close(len(self._ids))
        for token in self._family.tokenizer.encode(mark):
            self._outline.mark(token, mark, len(self._ids))
        self._run = len(self._ids)
        self._replan(told)

    def _close(self, at: int) -> None:
        """Ends the stretch of text under way."""
        text = "".join(self._text)
        self._text.clear()
        run = self._ids[self._run : at]
        if self._family.text_marks:  # its tokens may reach into a mark: only its text is known
            run = self._family.tokenizer.encode(text)
        self._outline.text(run, text, self._run, self._family.tokenizer.encode)

    def _replan(self, told: list[tuple[str, str]]) -> None:
        self._ask()
        plan = self._plan
        if self._held or not plan.sure:
            return
        for name, channel, shape in (
            ("content", self._content, plan.content),
            ("reasoning", self._reasoning, plan.reasoning),
        ):
            new = channel.until(self._outline.filled(shape))
            if new is None:
                self._held = True
                return
            told.append((name, new))

    def _ask(self) -> None:
        """What comes next; a strange answer that costs too much to follow is read at its end."""
        plan, cost = self._family.plan(self._context, tuple(self._outline.ids), self._allowance)
        self._allowance -= cost
        if plan is None or self._outline.marks > MOST:
            self._held = True
        else:
            self._plan = plan

    def _new_calls(self, end: int, calls: list[CallDelta]) -> None:
        while self._seen < len(self._plan.calls):
            first, last = self._plan.calls[self._seen]
            ids, places = self._outline.ids, self._outline.places
            until = places[last] if last < len(places) else end
            whole = [*ids[:first], *self._ids[places[first] : until], *ids[last:]]
            found = self._family.found(self._context, whole, self._tools).tool_calls
            if self._seen >= len(found):
                return
            call = call_of(found[self._seen], len(self._calls), self._call_ids)
            self._seen += 1
            if call is not None:
                calls.append(CallDelta(len(self._calls), call.id, call.name, call.arguments))
                self._calls.append(call)

    # ------------------------------------------------------------------------------------------------- end

    def end(self) -> tuple[Delta, Message]:
        parsed = self._family.parsed(self._context, self._ids, self._tools, self._call_ids)
        content, reasoning = parsed.content or "", parsed.reasoning or ""
        calls = parsed.tool_calls
        assert isinstance(content, str)
        known = len(self._calls)
        agreed = (
            content.startswith(self._content.told)
            and reasoning.startswith(self._reasoning.told)
            and list(calls[:known]) == self._calls
        )
        if not agreed:
            self._family.disagreed()
            content, reasoning, calls = self._content.told, self._reasoning.told, tuple(self._calls)
        delta = Delta(
            content[len(self._content.told) :],
            reasoning[len(self._reasoning.told) :],
            tuple(
                CallDelta(number, call.id, call.name, call.arguments)
                for number, call in enumerate(calls)
                if number >= known
            ),
        )
        self._content.told, self._reasoning.told, self._calls = content, reasoning, list(calls)
        self._held = True
        return delta, Message(
            "assistant", content if content or not calls else None, tuple(calls), reasoning=reasoning or None
        )


def _joined(told: list[tuple[str, str]]) -> tuple[str, str]:
    if len(told) == 1:
        name, text = told[0]
        return (text, "") if name == "content" else ("", text)
    return (
        "".join([text for name, text in told if name == "content"]),
        "".join([text for name, text in told if name == "reasoning"]),
    )


def _first(text: str, marks: Sequence[str]) -> tuple[int, str] | None:
    """The first mark in a text, the longest where several begin at one place."""
    found = [(at, -len(mark), mark) for mark in marks if (at := text.find(mark)) >= 0]
    if not found:
        return None
    at, _, mark = min(found)
    return at, mark


def _begun(text: str, marks: Sequence[str]) -> int:
    """How much of a text's end may be the beginning of a mark."""
    longest = max(map(len, marks)) - 1
    for size in range(min(longest, len(text)), 0, -1):
        end = text[-size:]
        if any(mark.startswith(end) for mark in marks):
            return size
    return 0
