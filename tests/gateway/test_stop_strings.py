"""Text is sent up to the first complete stop string, however it is split into deltas."""

from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from rookery.core import Message
from rookery.gateway.reply_reader import StopStringFilter
from tests.gateway.scripted_upstream import ANY_SPEED

texts = st.text("ab c", max_size=14)
stops = st.lists(st.text("abc", max_size=4), max_size=4).map(tuple)


def expected(text: str, stops: tuple[str, ...]) -> str:
    """Compute the expected text character by character: it ends at the first complete stop string."""
    for end in range(1, len(text) + 1):
        ends = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if ends:
            return text[: end - len(max(ends, key=len))]
    return text


@settings(ANY_SPEED, max_examples=400)
@given(texts, stops, st.lists(st.integers(0, 14), max_size=6))
@example("abc", ("abc", "b"), [1, 2])
@example("ab", ("ab", "b"), [1])
@example("aab", ("ab",), [1, 2])
def test_text_ends_before_the_first_complete_stop_string(
    text: str, stops: tuple[str, ...], cuts: list[int]
) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    cutter = StopStringFilter(stops)
    sent = "".join(cutter.feed(piece) for piece in pieces[:-1])
    sent += cutter.finish(pieces[-1])
    assert sent == expected(text, stops)
    assert StopStringFilter(stops).cut(Message("assistant", text)).content == sent
    assert cutter.feed("more") == "" or not any(stop in text for stop in stops if stop)


@settings(ANY_SPEED)
@given(texts, stops)
def test_only_a_possible_start_of_a_stop_string_is_held_back(text: str, stops: tuple[str, ...]) -> None:
    cutter, sent, so_far = StopStringFilter(stops), "", ""
    for letter in text:
        sent += cutter.feed(letter)
        so_far += letter
        if expected(so_far, stops) != so_far:
            return
        withheld = so_far[len(sent) :]
        assert so_far.startswith(sent)
        assert not withheld or any(stop.startswith(withheld) for stop in stops)


def test_message_without_text_is_unchanged() -> None:
    for message in (Message("assistant"), Message("assistant", ({"type": "text", "text": "ab"},))):
        assert StopStringFilter(("a",)).cut(message) is message
