"""An answer while it is sampled: what can be shown of it already. Pure: no socket, no clock.

Promises:
- the deltas of an answer, joined, are the answer that is not streamed, whatever tokens came together;
- a delta never splits a character, and never shows a part of a stop text: what may become one is held back;
- a call is told by its name first, and its arguments follow exactly as sampled.
"""

import codecs
from collections.abc import Sequence
from typing import Final

import msgspec

from rookery.upstreams.embedded import chat

_STRANGE: Final = "\N{REPLACEMENT CHARACTER}".encode()


class CallDelta(msgspec.Struct, gc=False):
    """A piece of one call; `id` and `name` come with its first."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Delta(msgspec.Struct):
    """What is new. At most one entry for each call."""

    text: str = ""
    calls: list[CallDelta] = []

    def __bool__(self) -> bool:
        return bool(self.text or self.calls)


class DeltaDecoder:
    """One answer. With `plain`, as `/completions` gives it: calls are part of the text; with `mute`, they are not
    shown at all."""

    def __init__(
        self,
        *,
        begun: str = "",
        at: int = 0,
        stop: tuple[bytes, ...] = (),
        plain: bool = False,
        mute: bool = False,
    ) -> None:
        self._at = at
        self._stop = tuple(text for text in stop if text)
        self._plain = plain
        self._mute = mute
        self._shown = 0
        """Tokens that are told, or were passed over."""
        self._over = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._name: str | None = None
        """Of the call under way, as far as it came; None once its arguments have begun."""
        self._delta = Delta()
        self.calls = 0
        if begun:
            self._begin_call()
            self._told(chat.text_ids(begun.removeprefix(chat.NAMES[chat.CALL])))

    def more(self, tokens: Sequence[int], count: int) -> Delta:
        """What the first `count` of the tokens add; the answer may go on."""
        self._until(tokens, count - held(tokens, count, self._stop))
        return self._take()

    def end(self, tokens: Sequence[int], text: int) -> Delta:
        """The rest: the answer is the first `text` of the tokens."""
        self._until(tokens, text)
        self._end_piece()
        return self._take()

    def _until(self, tokens: Sequence[int], count: int) -> None:
        run = bytearray()
        for token in tokens[self._shown : count]:
            if self._over:
                break
            if token < chat.BEGIN:
                run.append(token)
            elif token == chat.CALL and self._mute:
                continue
            elif token == chat.CALL and self._plain:
                run += chat.NAMES[token].encode()
            elif token == chat.CALL:
                self._told(run)
                run = bytearray()
                self._begin_call()
            elif token in chat.ENDS:
                self._over = True
            else:
                run += _STRANGE
        self._told(run)
        self._shown = max(self._shown, count)

    def _take(self) -> Delta:
        delta, self._delta = self._delta, Delta()
        return delta

    def _begin_call(self) -> None:
        self._end_piece()
        self._name = ""
        self.calls += 1

    def _end_piece(self) -> None:
        self._told(b"", final=True)
        if self._name is not None:  # a call that has no arguments
            self._named(self._name)

    def _told(self, data: bytes | bytearray, *, final: bool = False) -> None:
        text = self._decoder.decode(bytes(data), final)
        if final:
            self._decoder.reset()
        if not text:
            return
        if not self.calls:
            self._delta.text += text
        elif self._name is None:
            self._call().arguments += text
        else:
            self._name += text
            name, brace, rest = self._name.partition("{")
            if brace:
                self._named(name)
                self._call().arguments += brace + rest

    def _named(self, name: str) -> None:
        self._name = None
        number = self.calls - 1
        self._delta.calls.append(CallDelta(number, f"call_{self._at}_{number}", name))

    def _call(self) -> CallDelta:
        calls, number = self._delta.calls, self.calls - 1
        if not calls or calls[-1].index != number:
            calls.append(CallDelta(number))
        return calls[-1]


def spelled(tokens: Sequence[int]) -> str:
    """Tokens as the text of `/completions`."""
    return DeltaDecoder(plain=True).end(tokens, len(tokens)).text


def held(tokens: Sequence[int], count: int, stop: tuple[bytes, ...]) -> int:
    """How many of the first `count` tokens, counted from their end, may be the beginning of a stop text."""
    longest = max(map(len, stop), default=0)
    tail = tokens[max(0, count - longest) : count]
    start = next((at + 1 for at in range(len(tail) - 1, -1, -1) if tail[at] >= chat.BEGIN), 0)
    data = bytes(tail[start:])
    for first in range(len(data)):
        if any(text.startswith(data[first:]) for text in stop):
            return len(data) - first
    return 0
