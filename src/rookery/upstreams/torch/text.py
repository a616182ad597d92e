"""Convert sampled token IDs to text while they arrive, and find stop strings in it."""

from collections.abc import Sequence
from typing import Any, Final

_INCOMPLETE: Final = "\ufffd"
"""What a tokenizer returns for the first bytes of a character whose other bytes are in the next token."""


class TextDecoder:
    """Convert the tokens of one reply to text, piece by piece. Special tokens have no text.

    Text that may be the beginning of a stop string, and incomplete characters, are withheld until more tokens
    arrive or the reply ends. The text ends before the first stop string.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = [text for text in stop if text]
        self._start = self._read = 0
        """The text of the tokens from `_start` to `_read` is decoded again with the next ones, because the text of
        a token may depend on the token before it."""
        self._pending = ""
        self.stopped = False
        """True if the text has reached a stop string."""

    def feed(self, tokens: Sequence[int], *, final: bool = False) -> str:
        """Return the text that `tokens`, all tokens of the reply so far, add to what was returned before.

        With `final`, nothing is withheld, because the reply has ended.
        """
        before = self._decode(tokens[self._start : self._read])
        now = self._decode(tokens[self._start :])
        if (final or not now.endswith(_INCOMPLETE)) and len(now) > len(before):
            self._pending += now[len(before) :]
            self._start, self._read = self._read, len(tokens)
        if self.stopped:
            return ""
        found = min((at for text in self._stop if (at := self._pending.find(text)) >= 0), default=-1)
        if found >= 0:
            self.stopped = True
            return self._pending[:found]
        keep = 0 if final else max((_overlap(self._pending, text) for text in self._stop), default=0)
        ready = self._pending[: len(self._pending) - keep]
        self._pending = self._pending[len(ready) :]
        return ready

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            if tokens
            else ""
        )


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` with which `stop` begins."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
