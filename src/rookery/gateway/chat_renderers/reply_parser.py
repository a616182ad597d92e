"""Parse a reply of any model family while it is sampled: stream text as it comes, and tool calls when they are
complete.

Guarantees:
- the deltas, joined, are the message that the parser finishes with, however the tokens were split into chunks;
- that message equals the result of `parse` for the whole reply. If earlier deltas contradict that result, the
  message is what the deltas said, and the renderer counts the disagreement;
- the cost of a chunk depends on its own length: the family's parser runs only at markers (special tokens), on the
  skeleton of the reply (its markers with placeholders for text), and results are cached;
- neither an incomplete UTF-8 character is sent, nor text whose meaning the next marker could change.
"""

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from rookery.core import Message, ToolCall, ToolSchema
from rookery.gateway.chat_renderers.conversion import CallIds, convert_call
from rookery.gateway.chat_renderers.reply_skeleton import EMPTY_PLAN, MAX_MARKERS, PLAN_BUDGET, ReplySkeleton
from rookery.upstreams.protocol import CallDelta, Delta

if TYPE_CHECKING:
    from rookery.gateway.chat_renderers.family_renderer import FamilyRenderer

_NAMES: Final = ("content", "reasoning")


class _TextChannel:
    """The content or the reasoning that was sent so far. White space is held back until other text follows it."""

    def __init__(self) -> None:
        self.sent = ""
        self.pending_space = ""

    def push(self, text: str) -> str:
        if not self.sent:
            text = text.lstrip()
        body = text.rstrip()
        if not body:
            if self.sent:
                self.pending_space += text
            return ""
        new = self.pending_space + body
        self.sent += new
        self.pending_space = text[len(body) :]
        return new

    def catch_up(self, complete: str) -> str | None:
        """Return the unsent part of `complete`, and mark it as sent.

        Returns None if `complete` does not start with the text that was sent before.
        """
        complete = complete.lstrip()
        if not complete.startswith(self.sent):
            return None
        self.pending_space = ""
        return self.push(complete[len(self.sent) :])


class FamilyReplyParser:
    """Parses one reply of a model family while it is sampled. Implements `ReplyParser`."""

    def __init__(
        self, renderer: "FamilyRenderer", prompt_tail: bytes, tools: Sequence[ToolSchema], prompt_length: int
    ) -> None:
        self._renderer = renderer
        self._context = renderer.get_context(prompt_tail)
        self._tools = tools
        self._call_ids = CallIds(prompt_tail, prompt_length)
        self._ids: list[int] = []
        self._skeleton = ReplySkeleton()
        self._text_start = 0
        """Position of the first token of the current stretch of text."""
        self._text_parts: list[str] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._token_bytes = renderer.tokenizer.token_bytes
        self._mid_character = False
        """True if the decoder holds an incomplete character."""
        self._content, self._reasoning = _TextChannel(), _TextChannel()
        self._calls: list[ToolCall] = []
        self._seen_calls = 0
        """Number of tool calls examined, invalid ones included."""
        self._ended = False
        self._withheld = not renderer.tokenizer.is_per_token
        """True if nothing more is sent until `finish`, because the reply cannot be parsed safely before."""
        self._possible_marker = ""
        """Text at the end of the reply that may be the start of a marker that is written as ordinary text."""
        self._plan_budget = PLAN_BUDGET
        self._plan = EMPTY_PLAN
        self._update_plan()

    # ---------------------------------------------------------------------------------------------- pieces

    def feed(self, sampled: bytes, logprobs: bytes = b"") -> Delta:
        ids = memoryview(sampled).cast("i").tolist()
        before = len(self._ids)
        self._ids += ids
        if self._is_silent():
            return Delta(sampled=sampled, logprobs=logprobs)
        renderer = self._renderer
        sent: list[tuple[str, str]] = []
        calls: list[CallDelta] = []
        if len(ids) == 1 and (text := self._decode_single(ids[0])) is not None:
            self._push_text(text, sent)
        elif renderer.added_ids.isdisjoint(ids):
            self._push_text(self._decode(ids), sent)
        else:
            start = 0
            for at, token in enumerate(ids):
                if token not in renderer.added_ids:
                    continue
                self._push_text(self._decode(ids[start:at], final=True), sent)
                start = at + 1
                self._handle_marker(token, before + at, sent, calls)
                if self._is_silent():
                    break
            else:
                self._push_text(self._decode(ids[start:]), sent)
        content, reasoning = _join_text(sent)
        return Delta(content, reasoning, tuple(calls), sampled, logprobs)

    def _is_silent(self) -> bool:
        return self._ended or self._withheld

    def _decode_single(self, token: int) -> str | None:
        """Return the text of one ASCII token, the common case; None if the token needs the incremental decoder."""
        pieces = self._token_bytes
        if self._mid_character or token in self._renderer.added_ids or not 0 <= token < len(pieces):
            return None
        piece = pieces[token]
        return piece.decode() if piece.isascii() else None

    def _decode(self, ids: Sequence[int], *, final: bool = False) -> str:
        text = self._decoder.decode(self._renderer.tokenizer.decode_bytes(ids), final)
        if final:
            self._decoder.reset()
        self._mid_character = not final and bool(self._decoder.getstate()[0])
        return text

    def _push_text(self, text: str, sent: list[tuple[str, str]]) -> None:
        """Add text to the current stretch of text, and handle markers that are written as ordinary text in it."""
        if not text or self._is_silent():
            return
        markers = self._renderer.text_markers
        if markers:
            text = self._possible_marker + text
            self._possible_marker = ""
            while (found := _find_first_marker(text, markers)) is not None:
                at, marker = found
                self._push_plain(text[:at], sent)
                self._handle_text_marker(marker, sent)
                text = text[at + len(marker) :]
                if self._is_silent():
                    return
            held_back = _count_held_back(text, markers)
            self._possible_marker = text[len(text) - held_back :]
            text = text[: len(text) - held_back]
        self._push_plain(text, sent)

    def _push_plain(self, text: str, sent: list[tuple[str, str]]) -> None:
        if not text:
            return
        self._text_parts.append(text)
        plan = self._plan
        if not plan.channel or not plan.certain:
            return
        if plan.channel == "reasoning":
            sent.append(("reasoning", self._reasoning.push(text)))
            return
        # The format writes tool calls as bare JSON: only the end shows whether this is one.
        if self._renderer.has_bare_json_calls and not self._content.sent and text.lstrip().startswith("{"):
            self._withheld = True
            return
        sent.append(("content", self._content.push(text)))

    # ----------------------------------------------------------------------------------------------- marks

    def _handle_marker(self, token: int, at: int, sent: list[tuple[str, str]], calls: list[CallDelta]) -> None:
        if self._possible_marker:  # it was ordinary text
            self._push_plain(self._possible_marker, sent)
            self._possible_marker = ""
        self._close_text(at)
        self._skeleton.add_marker(token, self._renderer.tokenizer.added_tokens[token], at)
        self._text_start = at + 1
        if token in self._renderer.stop_ids:
            self._ended = True
            return
        self._apply_plan(sent)
        if not self._withheld and not self._renderer.text_markers:
            self._push_new_calls(at + 1, calls)

    def _handle_text_marker(self, marker: str, sent: list[tuple[str, str]]) -> None:
        """Handle a marker that is written as ordinary text.

        Its position among the tokens is unknown and not needed.
        """
        self._close_text(len(self._ids))
        for token in self._renderer.tokenizer.encode(marker):
            self._skeleton.add_marker(token, marker, len(self._ids))
        self._text_start = len(self._ids)
        self._apply_plan(sent)

    def _close_text(self, at: int) -> None:
        """End the current stretch of text before token `at`, and add it to the skeleton."""
        text = "".join(self._text_parts)
        self._text_parts.clear()
        run = self._ids[self._text_start : at]
        if self._renderer.text_markers:  # a token may contain both text and a part of a marker
            run = self._renderer.tokenizer.encode(text)
        self._skeleton.add_text(run, text, self._text_start, self._renderer.tokenizer.encode)

    def _apply_plan(self, sent: list[tuple[str, str]]) -> None:
        self._update_plan()
        plan = self._plan
        if self._withheld or not plan.certain:
            return
        for name, channel, template in (
            ("content", self._content, plan.content),
            ("reasoning", self._reasoning, plan.reasoning),
        ):
            new = channel.catch_up(self._skeleton.fill_placeholders(template))
            if new is None:
                self._withheld = True
                return
            sent.append((name, new))

    def _update_plan(self) -> None:
        """Find out how the next text will be parsed.

        If that is too expensive, send nothing more until `finish`.
        """
        plan, cost = self._renderer.get_plan(self._context, tuple(self._skeleton.ids), self._plan_budget)
        self._plan_budget -= cost
        if plan is None or self._skeleton.markers > MAX_MARKERS:
            self._withheld = True
        else:
            self._plan = plan

    def _push_new_calls(self, end: int, calls: list[CallDelta]) -> None:
        while self._seen_calls < len(self._plan.calls):
            first, last = self._plan.calls[self._seen_calls]
            ids, positions = self._skeleton.ids, self._skeleton.positions
            stop = positions[last] if last < len(positions) else end
            complete = [*ids[:first], *self._ids[positions[first] : stop], *ids[last:]]
            found = self._renderer.parse_ids(self._context, complete, self._tools).tool_calls
            if self._seen_calls >= len(found):
                return
            call = convert_call(found[self._seen_calls], len(self._calls), self._call_ids)
            self._seen_calls += 1
            if call is not None:
                calls.append(CallDelta(len(self._calls), call.id, call.name, call.arguments))
                self._calls.append(call)

    # ------------------------------------------------------------------------------------------------- end

    def finish(self) -> tuple[Delta, Message]:
        parsed = self._renderer.parse_message(self._context, self._ids, self._tools, self._call_ids)
        content, reasoning = parsed.content or "", parsed.reasoning or ""
        calls = parsed.tool_calls
        assert isinstance(content, str)
        known = len(self._calls)
        agreed = (
            content.startswith(self._content.sent)
            and reasoning.startswith(self._reasoning.sent)
            and list(calls[:known]) == self._calls
        )
        if not agreed:
            self._renderer.count_disagreement()
            content, reasoning, calls = self._content.sent, self._reasoning.sent, tuple(self._calls)
        delta = Delta(
            content[len(self._content.sent) :],
            reasoning[len(self._reasoning.sent) :],
            tuple(
                CallDelta(number, call.id, call.name, call.arguments)
                for number, call in enumerate(calls)
                if number >= known
            ),
        )
        self._content.sent, self._reasoning.sent, self._calls = content, reasoning, list(calls)
        self._withheld = True
        return delta, Message(
            "assistant", content if content or not calls else None, tuple(calls), reasoning=reasoning or None
        )


def _join_text(sent: list[tuple[str, str]]) -> tuple[str, str]:
    if len(sent) == 1:
        name, text = sent[0]
        return (text, "") if name == "content" else ("", text)
    return (
        "".join([text for name, text in sent if name == "content"]),
        "".join([text for name, text in sent if name == "reasoning"]),
    )


def _find_first_marker(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Return the position and text of the first marker in a text; None if there is no marker.

    If several markers start at that position, the longest is returned.
    """
    found = [(at, -len(marker), marker) for marker in markers if (at := text.find(marker)) >= 0]
    if not found:
        return None
    at, _, marker = min(found)
    return at, marker


def _count_held_back(text: str, markers: Sequence[str]) -> int:
    """Return how many characters at the end of a text may be the start of a marker."""
    longest = max(map(len, markers)) - 1
    for size in range(min(longest, len(text)), 0, -1):
        end = text[-size:]
        if any(marker.startswith(end) for marker in markers):
            return size
    return 0
