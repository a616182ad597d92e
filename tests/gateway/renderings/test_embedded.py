"""The embedded policy's format as a rendering."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.core import Message, ToolCall, ToolSchema, UsageError
from rookery.gateway.renderings import Unrenderable, open_rendering
from rookery.gateway.renderings.embedded import Embedded
from rookery.upstreams.embedded import chat
from tests.gateway.renderings.support import ints, numbers, told

TOOLS = (ToolSchema("python", "Runs.", {"type": "object", "properties": {"code": {}}}),)
ASK = (Message("system", "Be."), Message("user", "1+1?"))

IDS = st.lists(
    st.one_of(
        st.integers(0, 255),
        st.sampled_from([chat.CALL, chat.CALL, chat.END, chat.PAD, chat.VOCAB, 10_000, -1]),
        st.sampled_from([*"naïve{🙂".encode()]),
    ),
    max_size=40,
)


@pytest.fixture
def embedded() -> Embedded:
    found = open_rendering("embedded")
    assert isinstance(found, Embedded)
    return found


@given(
    sampled=IDS,
    cuts=st.lists(st.integers(0, 40), max_size=6),
    choice=st.sampled_from([None, "python", "required"]),
)
def test_what_a_reader_told_is_the_message_however_the_ids_were_cut(
    sampled: list[int], cuts: list[int], choice: str | None
) -> None:
    embedded = Embedded()
    tail = embedded.render(ASK, TOOLS, choice)[-1024:]
    deltas, message = told(embedded.reader(tail, TOOLS, at=9), sampled, cuts)
    assert message == embedded.parse(tail, ints(sampled), TOOLS, at=9)
    assert "".join(delta.content for delta in deltas) == (message.content or "")
    calls: dict[int, list[str]] = {}
    for delta in deltas:
        for call in delta.tool_calls:
            found = calls.setdefault(call.index, [call.id, call.name, ""])
            found[2] += call.arguments
    assert [ToolCall(*call) for call in calls.values()] == list(message.tool_calls)


@given(
    text=st.text(max_size=20),
    arguments=st.text(max_size=20),
    new=st.sampled_from(
        [(Message("tool", "2", tool_call_id="c"),), (Message("system", "x"), Message("user", "y"))]
    ),
    choice=st.sampled_from([None, "none", "python", "required"]),
    ended=st.booleans(),
)
def test_extending_is_rendering_again_where_bytes_are_text(
    text: str, arguments: str, new: tuple[Message, ...], choice: str | None, ended: bool
) -> None:
    embedded = Embedded()
    answer = Message("assistant", text, (ToolCall("c", "python", "{" + arguments),))
    body = chat.message_ids(answer)[1:]
    sampled = body if ended else body[:-1]
    prompt = embedded.render(ASK, TOOLS, None)
    more = embedded.extend(prompt[-1024:], ints(sampled), new, TOOLS, choice)
    assert more is not None
    # A choice of none hides the tools at the very front: that part of a prompt is not ours to change here.
    expected = chat.prompt((*ASK, answer, *new), TOOLS, None if choice == "none" else choice).ids
    assert [*numbers(prompt), *sampled, *numbers(more)] == expected


def test_what_is_not_sure_is_not_extended(embedded: Embedded) -> None:
    prompt = embedded.render(ASK, TOOLS, None)
    user = [Message("user", "x")]
    assert embedded.extend(prompt, ints([65, chat.END]), [], TOOLS, None) is None
    assert embedded.extend(prompt, ints([65, chat.END]), [Message("assistant", "x"), *user], TOOLS, None) is None
    assert embedded.extend(prompt, ints([65, chat.END, 66]), user, TOOLS, None) is None
    assert embedded.extend(prompt, ints([65, chat.USER]), user, TOOLS, None) is None


def test_stop_is_what_ends_an_answer(embedded: Embedded) -> None:
    assert embedded.stop[0] == chat.END
    assert set(embedded.stop) == chat.ENDS


def test_spelled_are_the_bytes_of_each_id(embedded: Embedded) -> None:
    assert embedded.spelled(ints([104, 105, chat.CALL, 9_999, -1])) == [b"h", b"i", b"<call>", b"", b""]


def test_a_picture_is_unrenderable(embedded: Embedded) -> None:
    with pytest.raises(Unrenderable, match="reads text only"):
        embedded.render([Message("user", ({"type": "image_url"},))], (), None)


def test_it_needs_nothing_and_takes_nothing() -> None:
    with pytest.raises(UsageError, match="its own tokenizer"):
        open_rendering("embedded", tool_parser="qwen3")
