"""A file's bytes as text that can be edited, and back again: nothing is lost on the way.

Promises:
- what was not edited comes back byte for byte: encoding, line endings, byte order mark, missing final newline;
- a file that is no UTF-8 is read one byte a character, so that every byte survives;
- lines end at LF or CRLF and nowhere else; lines that are put in end as those around them do;
- exactly one match is replaced; none, or several, is said with the lines they are on.
"""

import codecs
from typing import Final, NamedTuple

BINARY_LOOK: Final = 8192
"""Bytes at the start that are searched for a NUL."""
SHOWN: Final = 10
"""Line numbers that are said, where there are more."""


class Refused(Exception):  # noqa: N818  (an answer to the model, not an error of ours)
    """Why an edit was not done, in words for the model."""


class Text(NamedTuple):
    """A file as lines see it: line ends are LF where all of them were CRLF."""

    text: str
    encoding: str
    crlf: bool
    """Every line ended with CRLF."""

    def encoded(self, text: str) -> bytes:
        """The bytes of this file with another text."""
        said = text.replace("\n", "\r\n") if self.crlf else text
        try:
            return said.encode(self.encoding)
        except UnicodeEncodeError as error:
            shown = said[error.start : error.end][:20]
            if self.encoding == "latin-1":
                raise Refused(
                    f"The file is not UTF-8 and is kept one byte a character: {shown!r} cannot be written into it."
                ) from None
            raise Refused(f"{shown!r} cannot be written as {self.encoding}.") from None


def decoded(data: bytes) -> Text:
    """The text behind a file's bytes; `Refused` for a binary one."""
    encoding = _encoding(data)
    text = data.decode(encoding)
    crlf = "\r\n" in text and text.count("\n") == text.count("\r\n")
    # Also lone CRs before that would look like a CRLF afterwards keep such a file as it is.
    if crlf and "\r\r\n" not in text:
        return Text(text.replace("\r\n", "\n"), encoding, True)
    return Text(text, encoding, False)


def _encoding(data: bytes) -> str:
    for mark, name in ((codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be")):
        if data.startswith(mark):
            try:
                if data.decode(name).encode(name) == data:
                    return name
            except UnicodeDecodeError:
                pass
            raise Refused("The file is binary: it cannot be shown or edited as text.")
    if b"\0" in data[:BINARY_LOOK]:
        raise Refused("The file is binary: it cannot be shown or edited as text.")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return "latin-1"
    return "utf-8"


def lines_of(text: str) -> list[str]:
    """Without their ends. A final newline ends the last line and begins none."""
    found = text.split("\n")
    if found[-1] == "":
        found.pop()
    return found


def replaced(file: Text, old: str, new: str) -> tuple[str, int]:
    """The text with the one match of `old` replaced, and the line it begins on."""
    if not old:
        raise Refused("old_str is empty: nothing tells what to replace. Use insert to add lines.")
    if old == new:
        raise Refused("old_str and new_str are the same: there is nothing to replace.")
    for was, becomes in _spellings(file, old, new):
        places = _places(file.text, was)
        if len(places) == 1:
            at = places[0]
            text = f"{file.text[:at]}{becomes}{file.text[at + len(was) :]}"
            return text, file.text.count("\n", 0, at) + 1
        if places:
            numbers = [file.text.count("\n", 0, at) + 1 for at in places[:SHOWN]]
            more = f" and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
            raise Refused(
                f"old_str is found {len(places)} times, on the lines {', '.join(map(str, numbers))}{more}. "
                "Nothing was changed: add lines around it until it is unique."
            )
    raise Refused(
        f"old_str is not found in the file{_hint(file.text, old)}. Nothing was changed: "
        "it must be there exactly as given, with every space and line break."
    )


def _spellings(file: Text, old: str, new: str) -> list[tuple[str, str]]:
    """As given; and as a model writes lines of a file whose ends are CRLF."""
    if file.crlf:
        return [(old.replace("\r\n", "\n"), new.replace("\r\n", "\n"))]
    found = [(old, new)]
    if "\n" in old and "\r\n" in file.text:
        plain = old.replace("\r\n", "\n").replace("\n", "\r\n")
        if plain != old:
            found.append((plain, new.replace("\r\n", "\n").replace("\n", "\r\n")))
    return found


def _places(text: str, wanted: str) -> list[int]:
    """Every place, overlapping ones too: an edit of one of two that overlap would be a guess."""
    found = []
    at = text.find(wanted)
    while at >= 0:
        found.append(at)
        at = text.find(wanted, at + 1)
        if len(found) > 10_000:
            break
    return found


def _hint(text: str, old: str) -> str:
    """Where it would be found if white space did not count."""
    first = next((line.strip() for line in old.split("\n") if line.strip()), "")
    if not first:
        return ""
    near = [number for number, line in enumerate(lines_of(text), 1) if line.strip() == first]
    if not near:
        return ""
    return f" (its first line, apart from spaces, is on line {', '.join(map(str, near[:SHOWN]))})"


def inserted(file: Text, line: int, new: str) -> str:
    """The text with `new` as lines of its own after the line of that number; 0 puts them first."""
    count = len(lines_of(file.text))
    if not 0 <= line <= count:
        raise Refused(f"insert_line must be from 0 to {count}, the number of lines in the file; it is {line}.")
    end = _end_near(file, line)
    given = new.replace("\r\n", "\n")
    given = given.removesuffix("\n").replace("\n", end)
    if not file.text:
        return given + end
    at = _offset(file.text, line)
    if at == len(file.text) and not file.text.endswith("\n"):
        return f"{file.text}{end}{given}"  # the last line had no end, and has none now
    return f"{file.text[:at]}{given}{end}{file.text[at:]}"


def _end_near(file: Text, line: int) -> str:
    """The line end where text is put in: that of the line before, or of the first."""
    if "\r\n" not in file.text:
        return "\n"
    at = _offset(file.text, max(line, 1))
    return "\r\n" if file.text[:at].endswith("\r\n") else "\n" if file.text[:at].endswith("\n") else _last(file)


def _last(file: Text) -> str:
    """Of the line before one that has none."""
    cut = file.text.rfind("\n")
    return "\r\n" if cut > 0 and file.text[cut - 1] == "\r" else "\n"


def _offset(text: str, line: int) -> int:
    """Where the line after that number begins."""
    at = 0
    for _ in range(line):
        end = text.find("\n", at)
        if end < 0:
            return len(text)
        at = end + 1
    return at


def numbered(text: str, first: int, last: int) -> str:
    """The lines of a range with their numbers."""
    found = lines_of(text)[first - 1 : last]
    return "".join(f"{number:6}\t{line.removesuffix(chr(13))}\n" for number, line in enumerate(found, first))


def checked_range(text: str, wanted: list[int] | None) -> tuple[int, int]:
    """The first and the last line to show."""
    count = len(lines_of(text))
    if wanted is None:
        return 1, count
    if len(wanted) != 2:
        raise Refused("view_range must be two numbers, [first, last]; -1 as the last is the end of the file.")
    first, last = wanted
    last = count if last == -1 else last
    if not 1 <= first <= max(count, 1) or last < first:
        raise Refused(
            f"view_range {wanted} is not in the file, which has {count} line{'' if count == 1 else 's'}: "
            "the first line is 1, and the last must not come before it."
        )
    return first, min(last, count)
