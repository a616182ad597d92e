"""Server-sent events, taken apart as their bytes arrive. Pure: no socket, no clock.

Promises:
- an event is given when its last byte is there, not before and not later, wherever the bytes were split;
- every line ending of the standard is understood, comments and unknown fields are passed over;
- what is kept between two reads is one unfinished event, and never more than `MAX_EVENT` bytes of it.
"""

from typing import Final

MAX_EVENT: Final = 64 << 20
_BOM: Final = b"\xef\xbb\xbf"
_END: Final = b"\n\n"
_DATA: Final = b"data: "


class TooLong(Exception):  # noqa: N818  (never leaves the room)
    """An event that does not end."""


class Events:
    """One stream. What an event holds is its data, lines joined as the standard says."""

    __slots__ = ("_begun", "_carriage", "_kept", "_seen")

    def __init__(self) -> None:
        self._kept = bytearray()
        """The beginning of an event that has not ended."""
        self._seen = 0
        """Up to where it was looked through for its end."""
        self._carriage = False
        """Whether the last byte was a carriage return, which a newline may belong to."""
        self._begun = False

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that end in these bytes; those without any data are no events."""
        if self._carriage or b"\r" in data:
            data = self._plain(data)
        if not self._begun and data:
            data = self._first(data)
        kept = self._kept
        if kept:
            kept += data
            end = kept.rfind(_END, max(0, self._seen - 1))
            if end < 0:
                self._seen = len(kept)
                self._check()
                return []
            data = bytes(memoryview(kept)[: end + 2])
            del kept[: end + 2]
        else:
            end = data.rfind(_END)
            if end < 0:
                kept += data
                self._seen = len(kept)
                self._check()
                return []
            kept += data[end + 2 :]
            data = data[: end + 2]
        self._seen = len(kept)
        found = []
        for event in data.split(_END):
            if event.startswith(_DATA) and b"\n" not in event:  # how every engine writes them
                found.append(event[6:])
            elif event and (joined := _joined(event)) is not None:
                found.append(joined)
        return found

    @property
    def half(self) -> bool:
        """Whether an event has begun and not ended."""
        return bool(self._kept.strip(b"\n"))

    def _check(self) -> None:
        if len(self._kept) > MAX_EVENT:
            raise TooLong

    def _first(self, data: bytes) -> bytes:
        """Without the mark that some servers begin with. It may come in pieces."""
        if self._kept:
            data = bytes(self._kept) + data
            self._kept.clear()
        if len(data) < len(_BOM) and _BOM.startswith(data):
            return data
        self._begun = True
        return data.removeprefix(_BOM)

    def _plain(self, data: bytes) -> bytes:
        """With newlines alone as line endings. A lone carriage return at the end is one already."""
        if self._carriage and data.startswith(b"\n"):
            data = data[1:]
            if not data:
                self._carriage = False
                return data
        if data:
            self._carriage = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _joined(event: bytes) -> bytes | None:
    """The data lines of an event, joined; None where there are none."""
    lines = []
    for line in event.split(b"\n"):
        name, _, value = line.partition(b":")
        if name == b"data":
            lines.append(value.removeprefix(b" "))
    return b"\n".join(lines) if lines else None
