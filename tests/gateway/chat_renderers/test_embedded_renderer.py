"""`EmbeddedRenderer` renders, extends and parses the chat format of the embedded policy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.core import Message, ToolCall, ToolSchema, UsageError
from rookery.gateway.chat_renderers import RenderError, open_renderer
from rookery.gateway.chat_renderers.embedded_renderer import EmbeddedRenderer
from rookery.upstreams.embedded import chat
from tests.gateway.chat_renderers.kit import ids_of, ints, parse_in_chunks

TOOLS = (ToolSchema("python", "Runs.", {"type": "object", "properties": {"code": {}}}),)
MESSAGES = (Message("system", "Be."), Message("user", "1+1?"))

IDS = st.lists(
    st.one_of(
        st.integers(0, 255),
        st.sampled_from([chat.CALL, chat.CALL, chat.END, chat.PAD, chat.VOCAB, 10_000, -1]),
        st.sampled_from([*"naïve{🙂".encode()]),
    ),
    max_size=40,
)


@pytest.fixture
def embedded() -> EmbeddedRenderer:
    found = open_renderer("embedded")
    assert isinstance(found, EmbeddedRenderer)
    return found


@given(
    sampled=IDS,
    cuts=st.lists(st.integers(0, 40), max_size=6),
    choice=st.sampled_from([None, "python", "required"]),
)
def test_streamed_deltas_join_to_the_message_for_any_chunking(
    sampled: list[int], cuts: list[int], choice: str | None
) -> None:
    embedded = EmbeddedRenderer()
    tail = embedded.render(MESSAGES, TOOLS, choice)[-1024:]
    deltas, message = parse_in_chunks(embedded.new_reply_parser(tail, TOOLS, prompt_length=9), sampled, cuts)
    assert message == embedded.parse(tail, ints(sampled), TOOLS, prompt_length=9)
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
def test_extending_equals_rendering_for_byte_tokens(
    text: str, arguments: str, new: tuple[Message, ...], choice: str | None, ended: bool
) -> None:
    embedded = EmbeddedRenderer()
    reply = Message("assistant", text, (ToolCall("c", "python", "{" + arguments),))
    body = chat.message_ids(reply)[1:]
    sampled = body if ended else body[:-1]
    prompt = embedded.render(MESSAGES, TOOLS, None)
    more = embedded.extend(prompt[-1024:], ints(sampled), new, TOOLS, choice)
    assert more is not None
    # The choice "none" would hide the tools at the start of the prompt, which extending cannot change.
    expected = chat.prompt((*MESSAGES, reply, *new), TOOLS, None if choice == "none" else choice).ids
    assert [*ids_of(prompt), *sampled, *ids_of(more)] == expected


def test_ambiguous_reply_is_not_extended(embedded: EmbeddedRenderer) -> None:
    prompt = embedded.render(MESSAGES, TOOLS, None)
    user = [Message("user", "x")]
    assert embedded.extend(prompt, ints([65, chat.END]), [], TOOLS, None) is None
    assert embedded.extend(prompt, ints([65, chat.END]), [Message("assistant", "x"), *user], TOOLS, None) is None
    assert embedded.extend(prompt, ints([65, chat.END, 66]), user, TOOLS, None) is None
    assert embedded.extend(prompt, ints([65, chat.USER]), user, TOOLS, None) is None


def test_stop_token_ids_end_a_reply(embedded: EmbeddedRenderer) -> None:
    assert embedded.stop_token_ids[0] == chat.END
    assert set(embedded.stop_token_ids) == chat.ENDS


def test_token_bytes_returns_the_bytes_of_each_id(embedded: EmbeddedRenderer) -> None:
    assert embedded.token_bytes(ints([104, 105, chat.CALL, 9_999, -1])) == [b"h", b"i", b"<call>", b"", b""]


def test_image_raises_render_error(embedded: EmbeddedRenderer) -> None:
    with pytest.raises(RenderError):
        embedded.render([Message("user", ({"type": "image_url"},))], (), None)


def test_embedded_renderer_accepts_no_settings() -> None:
    with pytest.raises(UsageError):
        open_renderer("embedded", tool_parser="qwen3")
