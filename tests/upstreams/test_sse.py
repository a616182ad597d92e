"""The parser of server-sent events, fed with arbitrary pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.upstreams import sse
from rookery.upstreams.sse import Events, EventTooLong

data = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=12).map(str.encode)
lines = st.one_of(
    data.map(lambda value: b"data: " + value),
    data.map(lambda value: b"data:" + value),
    data.map(lambda value: b": " + value),
    data.map(lambda value: b"event: " + value),
    st.sampled_from([b"data", b":", b"id: 4", b"retry: 10", b"what is this"]),
)
events = st.lists(st.lists(lines, min_size=1, max_size=4), max_size=6)


def reference(stream: list[list[bytes]]) -> list[bytes]:
    """Parse an event as the standard describes it, line by line."""
    found = []
    for event in stream:
        values = []
        for line in event:
            name, _, value = line.partition(b":")
            if name == b"data":
                values.append(value[1:] if value.startswith(b" ") else value)
        if values:
            found.append(b"\n".join(values))
    return found


@given(st.data(), events, st.sampled_from([b"\n", b"\r\n", b"\r"]), st.booleans())
def test_event_is_the_same_wherever_its_bytes_were_split(draw, stream, ending, mark):
    raw = (b"\xef\xbb\xbf" if mark else b"") + b"".join(
        b"".join(line + ending for line in event) + ending for event in stream
    )
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    parser, found = Events(), []
    for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        found += parser.feed(raw[begin:end])
    assert found == reference(stream)
    assert not parser.incomplete


@given(events, st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_single_bytes_give_the_same_events(stream, ending):
    raw = b"".join(b"".join(line + ending for line in event) + ending for event in stream)
    parser = Events()
    assert [one for byte in raw for one in parser.feed(bytes([byte]))] == Events().feed(raw) == reference(stream)


def test_event_is_returned_with_its_last_byte_and_not_before():
    raw = b'data: {"a": 1}\n\n'
    parser = Events()
    assert [parser.feed(raw[n : n + 1]) for n in range(len(raw))][:-1] == [[]] * (len(raw) - 1)
    parser = Events()
    assert parser.feed(raw[:-1]) == []
    assert parser.incomplete
    assert parser.feed(raw[-1:]) == [b'{"a": 1}']
    assert not parser.incomplete


def test_carriage_return_ends_a_line_without_waiting_for_what_follows():
    parser = Events()
    assert parser.feed(b"data: 1\r\r") == [b"1"]
    assert parser.feed(b"\ndata: 2\r\n\r\n") == [b"2"]


def test_event_that_does_not_end_is_refused(monkeypatch):
    monkeypatch.setattr(sse, "MAX_EVENT", 1000)
    parser = Events()
    for _ in range(10):
        assert parser.feed(b"x" * 100) == []
    with pytest.raises(EventTooLong):
        parser.feed(b"x")


def test_cost_of_an_event_is_linear_in_its_bytes():
    """Each byte is searched once, not again with every piece; the test counts the searched bytes."""
    parser = Events()
    raw = b"data: " + b"x" * 100_000 + b"\n\n"
    found = []
    for at in range(0, len(raw), 100):
        found += parser.feed(raw[at : at + 100])
        assert parser._searched == len(parser._buffer)
    assert found == [b"x" * 100_000]
