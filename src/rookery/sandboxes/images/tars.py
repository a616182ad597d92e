"""A reader of tar streams, for layers. Stand-alone: a program of its own runs it, and imports little.

Python's own reader takes four times as long for a layer of small files, most of it in objects that nobody needs.

Promises:
- ustar, GNU and pax are read: long names, numbers of any size, sparse files of every kind that GNU tar writes;
- names are bytes, as they are in the archive;
- what one entry can make us keep is bounded, and so is what the whole stream can hold;
- a stream that ends in the middle is told from one that ends.
"""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BLOCK = 512
MAX_NAME = 4095
MAX_EXTRA = 1 << 20
"""Bytes of an entry's extended header."""
MAX_PIECES = 100_000
"""Of a sparse file."""
REGULAR, LINK, SYMLINK, CHARACTER, DEVICE, FOLDER, FIFO = b"0", b"1", b"2", b"3", b"4", b"5", b"6"
_EMPTY = bytes(BLOCK)
_FIELDS = struct.Struct("100s7sx7sx7sx11sx11sx8s1s100s6s82s155s12s")
"""Without the last byte of each number, which is a NUL in all but odd headers."""


class BadArchiveError(Exception):
    """It cannot be what it is taken for."""


class Entry:
    """One member: what it is called and what it is."""

    __slots__ = ("gid", "kind", "link", "mode", "mtime", "name", "pieces", "size", "stored", "uid")

    name: bytes
    kind: bytes
    mode: int
    uid: int
    gid: int
    size: int
    """Of the file."""
    stored: int
    """Bytes of it in the stream."""
    mtime: int
    """In nanoseconds."""
    link: bytes
    pieces: list[tuple[int, int]] | None
    """Of a sparse file: where data lies, and how much. None: everywhere."""


class Reader:
    """Entries in order. After each, `data` gives its content, or what is left of it is passed over."""

    def __init__(self, more: Callable[[], bytes]) -> None:
        """`more` gives the next bytes of the stream; none at its end."""
        self._more = more
        self._buffer = b""
        self._at = 0
        self._left = 0
        """Of the present entry's content, with what fills its last block."""
        self._globals: dict[bytes, bytes] = {}

    def _take(self, count: int, what: str = "it ends in the middle") -> bytes:
        """Exactly so many bytes."""
        end = self._at + count
        if end <= len(self._buffer):
            taken = self._buffer[self._at : end]
            self._at = end
            return taken
        parts = [self._buffer[self._at :]]
        have = len(parts[0])
        while have < count:
            chunk = self._more()
            if not chunk:
                raise BadArchiveError(what)
            parts.append(chunk)
            have += len(chunk)
        over = have - count
        self._buffer = parts[-1]
        self._at = len(self._buffer) - over
        if over:
            parts[-1] = self._buffer[: self._at]
        return b"".join(parts)

    def data(self, size: int) -> Iterator[memoryview]:
        """The next bytes of the present entry's content, in pieces that are to be used at once."""
        self._left -= size
        while size:
            have = len(self._buffer) - self._at
            if not have:
                self._buffer = self._more()
                self._at = 0
                if not self._buffer:
                    raise BadArchiveError("it ends in the middle")
                continue
            count = min(size, have)
            piece = memoryview(self._buffer)[self._at : self._at + count]
            self._at += count
            size -= count
            yield piece

    def whole(self, size: int) -> memoryview | None:
        """All of the present entry's content, where it is at hand in one piece: most files are small."""
        end = self._at + size
        if end > len(self._buffer):
            return None
        piece = memoryview(self._buffer)[self._at : end]
        self._at = end
        self._left -= size
        return piece

    def passed(self) -> None:
        """The present entry's content was passed over outside of this."""
        self._left = 0

    def _skip(self) -> None:
        if self._left <= len(self._buffer) - self._at:
            self._at += self._left
            self._left = 0
            return
        left = self._left
        for _ in self.data(left):
            pass

    def entries(self) -> Iterator[Entry]:
        extra: dict[bytes, bytes] = {}
        pairs: list[tuple[int, int]] = []
        while True:
            if self._left:
                self._skip()
            end = self._at + BLOCK
            header = self._buffer[self._at : end]
            if len(header) == BLOCK and header[257:262] == b"ustar":
                self._at = end
            else:
                found = self._header()
                if found is None:
                    return
                header = found
            kind = header[156:157]
            if kind in b"xgLK":
                self._extend(header, kind, extra, pairs)
                continue
            entry = self._entry(header, kind, extra, pairs)
            if extra:
                extra, pairs = {}, []
            yield entry

    def _header(self) -> bytes | None:
        """None at the end of the archive: an empty block, or no more bytes at all."""
        if self._at == len(self._buffer):
            self._buffer = self._more()
            self._at = 0
            if not self._buffer:
                return None
        header = self._take(BLOCK)
        if header == _EMPTY:
            return None
        if header[257:262] != b"ustar" and _number(header[148:156]) != sum(header[:148]) + 256 + sum(header[156:]):
            raise BadArchiveError("it is no archive that can be read: a header is wrong")
        return header

    def drain(self) -> None:
        """To the end of the stream: what comes after the archive's end is part of what was signed for."""
        while self._more():
            pass

    def _extend(self, header: bytes, kind: bytes, extra: dict[bytes, bytes], pairs: list[tuple[int, int]]) -> None:
        """An entry about the next one (or about all that follow)."""
        size = _number(header[124:136])
        if not 0 <= size <= MAX_EXTRA:
            raise BadArchiveError("an extended header is too long")
        data = self._take(size + -size % BLOCK)[:size]
        if kind in b"LK":
            extra[b"path" if kind == b"L" else b"linkpath"] = data.partition(b"\0")[0]
            return
        into = self._globals if kind == b"g" else extra
        at = 0
        while at < size:
            space = data.find(b" ", at, at + 20)
            digits = data[at:space]
            if space < 0 or not digits.isdigit():
                break  # padding
            end = at + int(digits)
            name, equals, value = data[space + 1 : end - 1].partition(b"=")
            if not equals or end > size or end <= at:
                raise BadArchiveError("an extended header is wrong")
            if name == b"GNU.sparse.offset":
                pairs.append((_decimal(value), 0))
            elif name == b"GNU.sparse.numbytes" and pairs:
                pairs[-1] = (pairs[-1][0], _decimal(value))
            else:
                into[name] = value
            at = end

    def _entry(self, header: bytes, kind: bytes, extra: dict[bytes, bytes], pairs: list[tuple[int, int]]) -> Entry:
        entry = Entry()
        name, mode, uid, gid, length, mtime, _, kind, link, magic, _, prefix, _ = _FIELDS.unpack(header)
        try:
            entry.mode, entry.uid, entry.gid = int(mode, 8), int(uid, 8), int(gid, 8)
            size, entry.mtime = int(length, 8), int(mtime, 8) * 1_000_000_000
        except ValueError:
            entry.mode, entry.uid, entry.gid = (_number(header[at : at + 8]) for at in (100, 108, 116))
            size, entry.mtime = _number(header[124:136]), _number(header[136:148]) * 1_000_000_000
        name = name.rstrip(b"\0") if name[-1:] == b"\0" else name
        if b"\0" in name:
            name = name.partition(b"\0")[0]
        if prefix[0] and magic == b"ustar\0":
            name = prefix.partition(b"\0")[0] + b"/" + name
        if kind in (b"\0", b"7"):
            kind = FOLDER if name.endswith(b"/") and kind == b"\0" else REGULAR
        entry.kind = kind
        entry.link = link.partition(b"\0")[0] if kind in b"12" else b""
        entry.pieces = None
        known = extra
        if extra or self._globals:
            known = {**self._globals, **extra}
            name = known.get(b"path", name)
            entry.link = known.get(b"linkpath", entry.link)
            if b"size" in known:
                size = _decimal(known[b"size"])
            if b"uid" in known:
                entry.uid = _decimal(known[b"uid"])
            if b"gid" in known:
                entry.gid = _decimal(known[b"gid"])
            if b"mtime" in known:
                entry.mtime = _time(known[b"mtime"])
        if size < 0:
            raise BadArchiveError("a size is negative")
        entry.name = name
        entry.size = entry.stored = 0 if kind in b"123456" else size
        self._left = entry.stored + -entry.stored % BLOCK
        if kind == b"S" or pairs or (known and any(word.startswith(b"GNU.sparse.") for word in known)):
            self._sparse(entry, header, known, pairs)
        if len(entry.name) > MAX_NAME or len(entry.link) > MAX_NAME:
            raise BadArchiveError("a name is too long")
        return entry

    def _sparse(
        self, entry: Entry, header: bytes, known: dict[bytes, bytes], pairs: list[tuple[int, int]]
    ) -> None:
        if entry.kind == b"S":
            entry.kind = REGULAR
            pieces = _pairs(header[386:482])
            more, entry.size = header[482], _number(header[483:495])
            while more:
                block = self._take(BLOCK)
                pieces += _pairs(block[:504])
                more = block[504]
                if len(pieces) > MAX_PIECES:
                    raise BadArchiveError("a sparse file has too many pieces")
        elif known.get(b"GNU.sparse.major") == b"1":
            pieces = self._sparse_map(entry)
        elif b"GNU.sparse.map" in known:
            numbers = [_decimal(word) for word in known[b"GNU.sparse.map"].split(b",")]
            pieces = list(zip(numbers[::2], numbers[1::2], strict=False))
        else:
            pieces = list(pairs)
        entry.name = known.get(b"GNU.sparse.name", entry.name)
        for word in (b"GNU.sparse.size", b"GNU.sparse.realsize"):
            if word in known:
                entry.size = _decimal(known[word])
        at = 0
        for offset, length in pieces:
            if offset < at or length < 0:
                raise BadArchiveError("the pieces of a sparse file are out of order")
            at = offset + length
        if at > entry.size or sum(length for _, length in pieces) > entry.stored:
            raise BadArchiveError("a sparse file has more data than it is long")
        entry.pieces = pieces

    def _sparse_map(self, entry: Entry) -> list[tuple[int, int]]:
        """Lines of numbers at the start of the content, which fill whole blocks."""
        numbers: list[int] = []
        text, wanted = b"", 1
        while len(numbers) < wanted:
            if self._left < BLOCK:
                raise BadArchiveError("the map of a sparse file is cut off")
            text += self._take(BLOCK)
            self._left -= BLOCK
            entry.stored = max(0, entry.stored - BLOCK)
            *lines, text = text.split(b"\n")
            numbers += [_decimal(line) for line in lines if len(numbers) < wanted or not line.strip(b"\0")]
            wanted = 1 + 2 * numbers[0] if numbers else 1
            if wanted > 2 * MAX_PIECES or len(text) > BLOCK:
                raise BadArchiveError("a sparse file has too many pieces")
        return list(zip(numbers[1:wanted:2], numbers[2:wanted:2], strict=False))


def _pairs(field: bytes) -> list[tuple[int, int]]:
    found = []
    for at in range(0, len(field), 24):
        if not field[at]:
            break
        found.append((_number(field[at : at + 12]), _number(field[at + 12 : at + 24])))
    return found


def _number(field: bytes) -> int:
    """Octal, or binary where the first bit says so."""
    if field[0] & 0x80:
        value = int.from_bytes(field, "big")
        bits = 8 * len(field)
        if field[0] == 0xFF:
            return value - (1 << bits)
        return value & ((1 << (bits - 1)) - 1)
    try:
        return int(field.partition(b"\0")[0] or b"0", 8)
    except ValueError:
        text = field.partition(b"\0")[0].strip(b" ")
        if not text:
            return 0
        try:
            return int(text, 8)
        except ValueError:
            raise BadArchiveError("it is no archive that can be read: a number is wrong") from None


def _decimal(text: bytes) -> int:
    if not text.isdigit() or len(text) > 20:
        raise BadArchiveError("an extended header holds a wrong number")
    return int(text)


def _time(text: bytes) -> int:
    try:
        return int(float(text[:40]) * 1_000_000_000)
    except (ValueError, OverflowError):
        raise BadArchiveError("an extended header holds a wrong time") from None
