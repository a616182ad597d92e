"""Decode sampled tokens of the embedded policy into text and tool calls while a reply is sampled. Pure: no I/O.

Guarantees:
- the deltas (pieces) of a reply, joined, equal the reply that is not streamed, however the tokens arrive;
- a delta never splits a character and never contains a part of a stop string: tokens that may be the beginning of
  a stop string are withheld;
- a tool call starts with its name, and its arguments follow exactly as sampled.
"""

import codecs
from collections.abc import Sequence
from typing import Final

import msgspec

from rookery.upstreams.embedded import chat

_UNKNOWN: Final = "\N{REPLACEMENT CHARACTER}".encode()


class DecodedCall(msgspec.Struct, gc=False):
    """A piece of tool call number `index`. Only the first piece of a call has its ID and name."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class DecodedDelta(msgspec.Struct):
    """The addition of new tokens to a reply: text, and pieces of tool calls, with at most one piece per call."""

    text: str = ""
    calls: list[DecodedCall] = []

    def __bool__(self) -> bool:
        return bool(self.text or self.calls)


class DeltaDecoder:
    """Incremental decoder for the tokens of one reply.

    `prefix` is the start of a tool call that the prompt contains, if the tool choice requires a call; it belongs
    to the reply. `prompt_length` makes call IDs unique across turns. `stop` are the stop strings. With
    `calls_as_text`, tool calls are part of the text, as in `/completions`; with `hide_calls`, the token `<call>`
    is skipped.
    """

    def __init__(
        self,
        *,
        prefix: str = "",
        prompt_length: int = 0,
        stop: tuple[bytes, ...] = (),
        calls_as_text: bool = False,
        hide_calls: bool = False,
    ) -> None:
        self._prompt_length = prompt_length
        self._stop = tuple(text for text in stop if text)
        self._calls_as_text = calls_as_text
        self._hide_calls = hide_calls
        self._decoded = 0
        """The number of tokens from the start of the reply that were decoded or skipped."""
        self._ended = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._name: str | None = None
        """The name of the current tool call so far; None outside a call and once its arguments have begun."""
        self._delta = DecodedDelta()
        self.calls = 0
        if prefix:
            self._begin_call()
            self._add_text(chat.text_ids(prefix.removeprefix(chat.NAMES[chat.CALL])))

    def feed(self, tokens: Sequence[int], count: int) -> DecodedDelta:
        """Decode up to the first `count` of the reply's tokens, and return what is new. More tokens may follow.

        `tokens` are all tokens of the reply so far, not only the new ones.
        """
        self._decode_until(tokens, count - count_withheld(tokens, count, self._stop))
        return self._take()

    def finish(self, tokens: Sequence[int], text: int) -> DecodedDelta:
        """Decode the rest of the reply, which consists of the first `text` tokens, and return what is new."""
        self._decode_until(tokens, text)
        self._end_piece()
        return self._take()

    def _decode_until(self, tokens: Sequence[int], count: int) -> None:
        run = bytearray()
        for token in tokens[self._decoded : count]:
            if self._ended:
                break
            if token < chat.BEGIN:
                run.append(token)
            elif token == chat.CALL and self._hide_calls:
                continue
            elif token == chat.CALL and self._calls_as_text:
                run += chat.NAMES[token].encode()
            elif token == chat.CALL:
                self._add_text(run)
                run = bytearray()
                self._begin_call()
            elif token in chat.ENDS:
                self._ended = True
            else:
                run += _UNKNOWN
        self._add_text(run)
        self._decoded = max(self._decoded, count)

    def _take(self) -> DecodedDelta:
        delta, self._delta = self._delta, DecodedDelta()
        return delta

    def _begin_call(self) -> None:
        self._end_piece()
        self._name = ""
        self.calls += 1

    def _end_piece(self) -> None:
        self._add_text(b"", final=True)
        if self._name is not None:  # a call without arguments
            self._start_arguments(self._name)

    def _add_text(self, data: bytes | bytearray, *, final: bool = False) -> None:
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
                self._start_arguments(name)
                self._call().arguments += brace + rest

    def _start_arguments(self, name: str) -> None:
        self._name = None
        number = self.calls - 1
        self._delta.calls.append(DecodedCall(number, f"call_{self._prompt_length}_{number}", name))

    def _call(self) -> DecodedCall:
        calls, number = self._delta.calls, self.calls - 1
        if not calls or calls[-1].index != number:
            calls.append(DecodedCall(number))
        return calls[-1]


def completion_text(tokens: Sequence[int]) -> str:
    """Return the text of tokens as `/completions` returns it, with tool calls as part of the text."""
    return DeltaDecoder(calls_as_text=True).finish(tokens, len(tokens)).text


def count_withheld(tokens: Sequence[int], count: int, stop: tuple[bytes, ...]) -> int:
    """Return how many of the first `count` tokens, counted from their end, may be the beginning of a stop
    string."""
    longest = max(map(len, stop), default=0)
    tail = tokens[max(0, count - longest) : count]
    start = next((at + 1 for at in range(len(tail) - 1, -1, -1) if tail[at] >= chat.BEGIN), 0)
    data = bytes(tail[start:])
    for first in range(len(data)):
        if any(text.startswith(data[first:]) for text in stop):
            return len(data) - first
    return 0
