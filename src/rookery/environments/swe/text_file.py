"""Decode a file for the tool `edit`, change its text, and encode it again without loss. Pure functions.

Parts that were not edited are preserved byte for byte: encoding, line endings, byte order mark, missing final
newline. A file that is neither UTF-8 nor UTF-16 with a byte order mark is decoded as Latin-1, so that every byte
survives. Only LF and CRLF end a line; inserted lines get the line ending of their neighbours. A text is replaced
only if it occurs exactly once.
"""

import codecs
from typing import Final, NamedTuple

BINARY_PREFIX: Final = 8192
"""Number of leading bytes that are searched for a NUL, which marks a file as binary."""
MAX_LINES_SHOWN: Final = 10
"""Maximum number of line numbers that a message for the model lists."""


class EditRefused(Exception):  # noqa: N818  (an observation for the model)
    """Raised if a file cannot be viewed or edited as requested. The message is meant for the model."""


class TextFile(NamedTuple):
    """The decoded text of a file. If all its line endings are CRLF, `text` has LF instead."""

    text: str
    encoding: str
    crlf: bool
    """True if all line endings of the file are CRLF, so that `encode` converts LF to CRLF."""

    def encode(self, text: str) -> bytes:
        """Encode `text`, the edited content, with the encoding and line endings of this file."""
        result = text.replace("\n", "\r\n") if self.crlf else text
        try:
            return result.encode(self.encoding)
        except UnicodeEncodeError as error:
            shown = result[error.start : error.end][:20]
            if self.encoding == "latin-1":
                raise EditRefused(
                    f"The file is not UTF-8 and is kept one byte a character: {shown!r} cannot be written into it."
                ) from None
            raise EditRefused(f"{shown!r} cannot be written as {self.encoding}.") from None


def decode_file(data: bytes) -> TextFile:
    """Decode the content of a file; raise `EditRefused` if it is binary."""
    encoding = _encoding(data)
    text = data.decode(encoding)
    crlf = "\r\n" in text and text.count("\n") == text.count("\r\n")
    # A CR before a CRLF would look like part of the line ending after the conversion back.
    if crlf and "\r\r\n" not in text:
        return TextFile(text.replace("\r\n", "\n"), encoding, True)
    return TextFile(text, encoding, False)


def _encoding(data: bytes) -> str:
    for mark, name in ((codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be")):
        if data.startswith(mark):
            try:
                if data.decode(name).encode(name) == data:
                    return name
            except UnicodeDecodeError:
                pass
            raise EditRefused("The file is binary: it cannot be shown or edited as text.")
    if b"\0" in data[:BINARY_PREFIX]:
        raise EditRefused("The file is binary: it cannot be shown or edited as text.")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return "latin-1"
    return "utf-8"


def split_lines(text: str) -> list[str]:
    """Split text into lines without their endings. A final newline does not start another line."""
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    return lines


def replace_once(file: TextFile, old: str, new: str) -> tuple[str, int]:
    """Replace `old`, which must occur exactly once in the file, with `new`.

    Return the new text and the line number of the match. Raise `EditRefused` if `old` is empty, equal to `new`,
    missing, or found more than once.
    """
    if not old:
        raise EditRefused("old_str is empty: nothing tells what to replace. Use insert to add lines.")
    if old == new:
        raise EditRefused("old_str and new_str are the same: there is nothing to replace.")
    for old_variant, new_variant in _line_ending_variants(file, old, new):
        positions = _find_all(file.text, old_variant)
        if len(positions) == 1:
            position = positions[0]
            text = f"{file.text[:position]}{new_variant}{file.text[position + len(old_variant) :]}"
            return text, file.text.count("\n", 0, position) + 1
        if positions:
            numbers = [file.text.count("\n", 0, position) + 1 for position in positions[:MAX_LINES_SHOWN]]
            more = f" and {len(positions) - MAX_LINES_SHOWN} more" if len(positions) > MAX_LINES_SHOWN else ""
            raise EditRefused(
                f"old_str is found {len(positions)} times, on the lines {', '.join(map(str, numbers))}{more}. "
                "Nothing was changed: add lines around it until it is unique."
            )
    raise EditRefused(
        f"old_str is not found in the file{_find_similar(file.text, old)}. Nothing was changed: "
        "it must match exactly, with every space and line break."
    )


def _line_ending_variants(file: TextFile, old: str, new: str) -> list[tuple[str, str]]:
    """Return the pairs of `old` and `new` to try: as they are, and with CRLF line endings if the file has some."""
    if file.crlf:
        return [(old.replace("\r\n", "\n"), new.replace("\r\n", "\n"))]
    variants = [(old, new)]
    if "\n" in old and "\r\n" in file.text:
        plain = old.replace("\r\n", "\n").replace("\n", "\r\n")
        if plain != old:
            variants.append((plain, new.replace("\r\n", "\n").replace("\n", "\r\n")))
    return variants


def _find_all(text: str, wanted: str) -> list[int]:
    """Return the positions of all matches, including overlapping ones, up to about 10,000."""
    positions = []
    position = text.find(wanted)
    while position >= 0:
        positions.append(position)
        position = text.find(wanted, position + 1)
        if len(positions) > 10_000:
            break
    return positions


def _find_similar(text: str, old: str) -> str:
    """Return a hint at lines that equal the first line of `old` apart from white space around them, if any."""
    first = next((line.strip() for line in old.split("\n") if line.strip()), "")
    if not first:
        return ""
    similar = [number for number, line in enumerate(split_lines(text), 1) if line.strip() == first]
    if not similar:
        return ""
    return f" (its first line, apart from spaces, is on line {', '.join(map(str, similar[:MAX_LINES_SHOWN]))})"


def insert_lines(file: TextFile, line: int, new: str) -> str:
    """Return the file's text with `new` inserted as separate lines after line number `line`; 0 means at the start.

    Raise `EditRefused` if the file does not have that many lines.
    """
    count = len(split_lines(file.text))
    if not 0 <= line <= count:
        raise EditRefused(f"insert_line must be from 0 to {count}, the number of lines in the file; it is {line}.")
    ending = _line_ending_at(file, line)
    inserted = new.replace("\r\n", "\n")
    inserted = inserted.removesuffix("\n").replace("\n", ending)
    if not file.text:
        return inserted + ending
    position = _offset(file.text, line)
    if position == len(file.text) and not file.text.endswith("\n"):
        return f"{file.text}{ending}{inserted}"  # the last line had no line ending, and still has none
    return f"{file.text[:position]}{inserted}{ending}{file.text[position:]}"


def _line_ending_at(file: TextFile, line: int) -> str:
    """Return the line ending for text inserted after line number `line`: that of this line if it has one."""
    if "\r\n" not in file.text:
        return "\n"
    position = _offset(file.text, max(line, 1))
    if file.text[:position].endswith("\r\n"):
        return "\r\n"
    return "\n" if file.text[:position].endswith("\n") else _last_line_ending(file)


def _last_line_ending(file: TextFile) -> str:
    """Return the line ending of the file's last line that has one."""
    cut = file.text.rfind("\n")
    return "\r\n" if cut > 0 and file.text[cut - 1] == "\r" else "\n"


def _offset(text: str, line: int) -> int:
    """Return the offset in `text` at which the line after line number `line` begins."""
    position = 0
    for _ in range(line):
        end = text.find("\n", position)
        if end < 0:
            return len(text)
        position = end + 1
    return position


def number_lines(text: str, first: int, last: int) -> str:
    """Return the lines from number `first` to `last`, each preceded by its number and a tab."""
    lines = split_lines(text)[first - 1 : last]
    return "".join(f"{number:6}\t{line.removesuffix(chr(13))}\n" for number, line in enumerate(lines, first))


def resolve_range(text: str, wanted: list[int] | None) -> tuple[int, int]:
    """Return the numbers of the first and last line to show: all lines, or the range `wanted`.

    A last line of -1 means the end of the file. Raise `EditRefused` if the range is invalid.
    """
    count = len(split_lines(text))
    if wanted is None:
        return 1, count
    if len(wanted) != 2:
        raise EditRefused("view_range must be two numbers, [first, last]; -1 as the last is the end of the file.")
    first, last = wanted
    last = count if last == -1 else last
    if not 1 <= first <= max(count, 1) or last < first:
        raise EditRefused(
            f"view_range {wanted} is not in the file, which has {count} line{'' if count == 1 else 's'}: "
            "the first line is 1, and the last must not come before it."
        )
    return first, min(last, count)
