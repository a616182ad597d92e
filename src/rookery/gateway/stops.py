"""Stop strings of answers that we read from token ids ourselves.

Promises:
- a text ends before the stop string that is complete first, and none of that string is ever told;
- text is held back only as long as it may still become a stop string.
"""

import msgspec

from rookery.core import Message


class Stops:
    """For one answer."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self._over = False

    def feed(self, text: str) -> str:
        """What of the text can be told now."""
        if self._over:
            return ""
        self._held += text
        if (at := self._found(self._held)) >= 0:
            told, self._held, self._over = self._held[:at], "", True
            return told
        keep = self._open()
        told, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return told

    def end(self, text: str) -> str:
        """The rest."""
        rest = self.feed(text)
        return rest if self._over else rest + self._held

    def cut(self, message: Message) -> Message:
        if not isinstance(message.content, str) or (at := self._found(message.content)) < 0:
            return message
        return msgspec.structs.replace(message, content=message.content[:at])

    def _found(self, text: str) -> int:
        """Where the stop string begins that ends first: the same however the text is cut into pieces."""
        places = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(places)[1] if places else -1

    def _open(self) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        longest = min(len(self._held), max((len(stop) for stop in self._stops), default=1) - 1)
        for size in range(longest, 0, -1):
            end = self._held[-size:]
            if any(stop.startswith(end) for stop in self._stops):
                return size
        return 0
