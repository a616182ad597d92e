"""Incremental parser for server-sent events. Pure: no socket, no clock.

Guarantees:
- an event is returned as soon as its last byte has arrived, however the bytes are split;
- every line ending of the standard is accepted; comments and unknown fields are skipped;
- only the bytes of an incomplete event are kept between two calls, and more than `MAX_EVENT` of them raise
  `EventTooLong`.
"""

from typing import Final

MAX_EVENT: Final = 64 << 20
_BOM: Final = b"\xef\xbb\xbf"
_END: Final = b"\n\n"
_DATA: Final = b"data: "


class EventTooLong(Exception):  # noqa: N818  (converted to `ReplyFormatError` by the caller)
    """Raised for a server-sent event that is longer than `MAX_EVENT` bytes."""


class Events:
    """Incremental parser for one stream of server-sent events. The `data:` lines of an event are joined with
    newlines."""

    __slots__ = ("_begun", "_buffer", "_carriage", "_searched")

    def __init__(self) -> None:
        self._buffer = bytearray()
        """The beginning of an incomplete event."""
        self._searched = 0
        """The length of the prefix of the buffer that was already searched for the end of the event."""
        self._carriage = False
        """True if the last byte was a carriage return, which may be the first half of a line ending."""
        self._begun = False

    def feed(self, data: bytes) -> list[bytes]:
        """Parse the next bytes of the stream. Return the data of each event that they complete, without events
        that have no data."""
        if self._carriage or b"\r" in data:
            data = self._normalize_newlines(data)
        if not self._begun and data:
            data = self._strip_bom(data)
        buffer = self._buffer
        if buffer:
            buffer += data
            end = buffer.rfind(_END, max(0, self._searched - 1))
            if end < 0:
                self._searched = len(buffer)
                self._check()
                return []
            data = bytes(memoryview(buffer)[: end + 2])
            del buffer[: end + 2]
        else:
            end = data.rfind(_END)
            if end < 0:
                buffer += data
                self._searched = len(buffer)
                self._check()
                return []
            buffer += data[end + 2 :]
            data = data[: end + 2]
        self._searched = len(buffer)
        if data.startswith(_DATA):
            found = data[len(_DATA) : -len(_END)].split(_END + _DATA)
            if data.count(b"\n") == 2 * len(found):  # one `data:` line per event, as every inference engine writes
                return found
        found = []
        for event in data.split(_END):
            if event and (joined := _join_data_lines(event)) is not None:
                found.append(joined)
        return found

    @property
    def incomplete(self) -> bool:
        """True if the stream is in the middle of an event."""
        return bool(self._buffer.strip(b"\n"))

    def _check(self) -> None:
        if len(self._buffer) > MAX_EVENT:
            raise EventTooLong

    def _strip_bom(self, data: bytes) -> bytes:
        """Remove a byte order mark, which may arrive in pieces."""
        if self._buffer:
            data = bytes(self._buffer) + data
            self._buffer.clear()
        if len(data) < len(_BOM) and _BOM.startswith(data):
            return data
        self._begun = True
        return data.removeprefix(_BOM)

    def _normalize_newlines(self, data: bytes) -> bytes:
        """Convert all line endings to newlines. A carriage return at the end of `data` becomes a newline at once,
        and a newline that follows it in the next call is dropped."""
        if self._carriage and data.startswith(b"\n"):
            data = data[1:]
            if not data:
                self._carriage = False
                return data
        if data:
            self._carriage = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _join_data_lines(event: bytes) -> bytes | None:
    """Return the `data:` values of a server-sent event, joined with newlines, or None if it has none."""
    lines = []
    for line in event.split(b"\n"):
        name, _, value = line.partition(b":")
        if name == b"data":
            lines.append(value.removeprefix(b" "))
    return b"\n".join(lines) if lines else None
