"""Text edits preserve every other byte; compared with a reference that works on lists of lines."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.environments.swe import text_file
from rookery.environments.swe.text_file import EditRefused

CHARACTERS = st.sampled_from("ab \t\r éßł€😀\u2028\x0b\x0c\ufeff")
LINES = st.lists(st.text(CHARACTERS, max_size=6), min_size=0, max_size=8)
ENDS = st.sampled_from(["\n", "\r\n"])
ENCODINGS = st.sampled_from(["utf-8", "utf-8-bom", "latin-1", "utf-16-le", "utf-16-be"])


def encode(text: str, encoding: str) -> bytes:
    match encoding:
        case "utf-8-bom":
            return b"\xef\xbb\xbf" + text.encode()
        case "latin-1":
            # The first byte makes the file invalid UTF-8.
            return b"\xff" + text.encode("latin-1", "replace")
        case "utf-16-le" | "utf-16-be":
            return ("\ufeff" + text).encode(encoding)
    return text.encode()


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """Draw files with any encoding, uniform or mixed line endings, with or without a final newline."""
    lines = draw(LINES)
    ends = [draw(ENDS)] * len(lines) if draw(st.booleans()) else [draw(ENDS) for _ in lines]
    if ends and draw(st.booleans()):
        ends[-1] = ""
    text = "".join(line + end for line, end in zip(lines, ends, strict=True))
    return encode(text, draw(ENCODINGS))


@given(files() | st.binary(max_size=60))
def test_unedited_file_is_encoded_byte_for_byte(data: bytes) -> None:
    try:
        file = text_file.decode_file(data)
    except EditRefused:
        assert b"\0" in data or data[:2] in (b"\xff\xfe", b"\xfe\xff")
        return
    assert file.encode(file.text) == data


@given(files(), st.data())
def test_single_match_is_replaced_and_every_other_byte_is_kept(data: bytes, draws: st.DataObject) -> None:
    file = text_file.decode_file(data)
    if not file.text:
        return
    start = draws.draw(st.integers(0, len(file.text) - 1))
    end = draws.draw(st.integers(start + 1, min(len(file.text), start + 12)))
    old, new = file.text[start:end], draws.draw(st.text("xyz\n", max_size=4))
    if old == new:
        return
    overlapping = sum(file.text.startswith(old, at) for at in range(len(file.text)))
    if file.crlf or "\r\n" not in old:
        try:
            text, line = text_file.replace_once(file, old, new)
        except EditRefused as refused:
            said = str(refused)
        else:
            said = ""
        if overlapping > 1:
            assert re.search(rf"\b{overlapping}\b", said)
            return
        assert said == ""
        assert text == file.text[:start] + new + file.text[end:]
        assert line == file.text[:start].count("\n") + 1
        if file.encoding == "utf-8" and not file.crlf:
            before = len(file.text[:start].encode())
            after = data[before + len(old.encode()) :]
            assert file.encode(text) == data[:before] + new.encode() + after


@given(files(), st.data())
def test_inserted_lines_have_the_line_endings_of_their_neighbours(data: bytes, draws: st.DataObject) -> None:
    file = text_file.decode_file(data)
    lines = text_file.split_lines(file.text)
    at = draws.draw(st.integers(0, len(lines)))
    new = draws.draw(st.lists(st.text("xyz", max_size=3), min_size=1, max_size=3))
    given_text = "\n".join(new) + draws.draw(st.sampled_from(["", "\n"]))
    if given_text == "":
        return
    result = file.encode(text_file.insert_lines(file, at, given_text)).decode(file.encoding)
    whole = data.decode(file.encoding)
    # The reference keeps all line endings and inserts the new lines.
    pieces = [piece + "\n" for piece in whole.split("\n")]
    pieces[-1] = pieces[-1][:-1]
    if pieces[-1] == "":
        pieces.pop()
    expected = "\r\n" if _around(pieces, at) == "\r\n" else "\n"
    given_lines = given_text.removesuffix("\n").split("\n")
    if pieces and at == len(pieces) and not pieces[-1].endswith("\n"):
        reference = "".join(pieces) + "".join(expected + line for line in given_lines)
    else:
        reference = "".join([*pieces[:at], *(line + expected for line in given_lines), *pieces[at:]])
    assert result == reference


def _around(pieces: list[str], at: int) -> str:
    """The end of the line before, or of the first; of the one before that where it has none."""
    if not pieces:
        return "\n"
    for piece in reversed(pieces[: max(at, 1)]):
        if piece.endswith("\r\n"):
            return "\r\n"
        if piece.endswith("\n"):
            return "\n"
    return "\n"


@given(files())
def test_lines_are_counted_like_the_reference(data: bytes) -> None:
    file = text_file.decode_file(data)
    count = len(text_file.split_lines(file.text))
    assert count == file.text.count("\n") + (not file.text.endswith("\n") and file.text != "")
    if count:
        shown = text_file.number_lines(file.text, 1, count)
        assert shown.count("\n") == count


def test_old_str_with_lf_matches_crlf_lines() -> None:
    file = text_file.decode_file(b"one\r\ntwo\r\nthree\r\n")
    text, line = text_file.replace_once(file, "one\ntwo", "1\n2")
    assert file.encode(text) == b"1\r\n2\r\nthree\r\n"
    assert line == 1
    mixed = text_file.decode_file(b"one\r\ntwo\nthree\r\nfour\r\n")
    text, line = text_file.replace_once(mixed, "three\nfour", "3\n4")
    assert mixed.encode(text) == b"one\r\ntwo\n3\r\n4\r\n"


def test_no_match_or_several_matches_are_refused_with_line_numbers() -> None:
    file = text_file.decode_file(b"a\nb\na\n  deep()\n")
    with pytest.raises(EditRefused, match="1, 3"):
        text_file.replace_once(file, "a", "c")
    with pytest.raises(EditRefused, match=r"\b4\b"):
        text_file.replace_once(file, "deep()\n\n", "c")
    with pytest.raises(EditRefused):
        text_file.replace_once(file, "nowhere", "c")
    with pytest.raises(EditRefused):
        text_file.replace_once(file, "", "c")
    with pytest.raises(EditRefused):
        text_file.replace_once(file, "b", "b")


def test_text_that_cannot_be_encoded_is_refused() -> None:
    file = text_file.decode_file(b"caf\xe9\n")
    text, _ = text_file.replace_once(file, "café", "thé")
    assert file.encode(text) == b"th\xe9\n"
    with pytest.raises(EditRefused, match="€"):
        file.encode("€")


def test_range_outside_of_the_file_is_refused() -> None:
    text = "a\nb\nc\n"
    assert text_file.resolve_range(text, None) == (1, 3)
    assert text_file.resolve_range(text, [2, -1]) == (2, 3)
    assert text_file.resolve_range(text, [3, 99]) == (3, 3)
    for wrong in ([0, 2], [4, 5], [3, 2], [1], [1, 2, 3]):
        with pytest.raises(EditRefused):
            text_file.resolve_range(text, wrong)
