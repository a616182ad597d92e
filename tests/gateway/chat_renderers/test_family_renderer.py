"""Every model family renders like its chat template, and extends from a prompt's tail as from the whole prompt."""

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rookery.core import Message, ToolCall
from rookery.gateway.chat_renderers import RenderError, open_renderer
from rookery.gateway.chat_renderers.conversion import convert_messages, convert_tools
from rookery.gateway.chat_renderers.family_renderer import FamilyRenderer, list_families
from tests.conftest import TOKENIZERS
from tests.gateway.chat_renderers.kit import (
    TOOLS,
    build_shared_tokenizer,
    ids_of,
    ints,
    open_family,
    parse_in_chunks,
    sampled_replies,
)

pytestmark = pytest.mark.needs("tokenizers")

LONG = "Lorem ipsum dolor sit amet, <think> consectetur. " * 80
NEW = (
    [Message("tool", "42", tool_call_id="c", name="weather")],
    [Message("tool", "42", tool_call_id="c", name="weather"), Message("tool", "43", tool_call_id="d", name="now")],
    [Message("user", "And then?")],
    [Message("system", "Be brief."), Message("user", "And then?")],
)
# Its own library downloads its vocabulary, so the tests have none.
UNAVAILABLE = {"gpt-oss"}


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FamilyRenderer]:
    folder = build_shared_tokenizer(tmp_path_factory.mktemp("tokenizers") / "all")
    renderers = {}
    for name in list_families():
        if name in UNAVAILABLE:
            continue
        tokenizer = TOKENIZERS / "gemma4" if name == "gemma4" else folder
        family = open_renderer(name, str(tokenizer))
        assert isinstance(family, FamilyRenderer)
        renderers[name] = family
    return renderers


NAMES = sorted(set(list_families()) - UNAVAILABLE) if (TOKENIZERS / "qwen3").is_dir() else ["none"]


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_extending_from_the_prompt_tail_equals_extending_from_the_whole_prompt(
    families: dict[str, FamilyRenderer], name: str, data: st.DataObject
) -> None:
    family = families[name]
    before = [Message("user", LONG)]
    if data.draw(st.booleans()):
        before = [Message("user", "Hi."), Message("assistant", "Hello."), *before]
    prompt = family.render(before, TOOLS, None)
    assert len(prompt) > 4 * 512
    sampled = data.draw(sampled_replies(family))
    if data.draw(st.booleans()):
        sampled = [*sampled, family.stop_token_ids[0]]
    new = data.draw(st.sampled_from(NEW))
    extension = family.extend(prompt[-1024:], ints(sampled), new, TOOLS, None)
    converted = convert_messages(new, developer=family.developer_role, with_tool_names=family.with_tool_names)
    try:
        whole = family.renderer.bridge_to_next_turn(ids_of(prompt), sampled, converted, tools=convert_tools(TOOLS))
    except Exception:
        whole = None
    expected = whole and whole.token_ids
    start = [*ids_of(prompt), *sampled]
    if expected is None or expected[: len(start)] != start or not family.stop_ids.isdisjoint(sampled[:-1]):
        assert extension is None
    else:
        assert extension is not None
        assert ids_of(extension) == expected[len(start) :]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_streamed_deltas_join_to_the_message_for_any_chunking(
    families: dict[str, FamilyRenderer], name: str, data: st.DataObject
) -> None:
    family = families[name]
    tail = family.render([Message("user", "Hi.")], TOOLS, None)
    sampled = data.draw(sampled_replies(family))
    before = family.disagreements
    whole = family.parse(tail, ints(sampled), TOOLS, prompt_length=7)
    ends = []
    for cuts in ([], list(range(len(sampled))), data.draw(st.lists(st.integers(0, 200), max_size=6))):
        deltas, message = parse_in_chunks(family.new_reply_parser(tail, TOOLS, prompt_length=7), sampled, cuts)
        assert "".join(delta.content for delta in deltas) == (message.content or "")
        assert "".join(delta.reasoning for delta in deltas) == (message.reasoning or "")
        calls = [call for delta in deltas for call in delta.tool_calls]
        assert [ToolCall(call.id, call.name, call.arguments) for call in calls] == list(message.tool_calls)
        assert [call.index for call in calls] == list(range(len(calls)))
        assert b"".join(delta.sampled for delta in deltas) == ints(sampled)
        ends.append(message)
    assert ends[0] == ends[1] == ends[2]
    assert ends[0] == whole or family.disagreements - before == 3


def test_streamed_deltas_rarely_disagree_with_the_parsed_message(families: dict[str, FamilyRenderer]) -> None:
    """Replies that models really give parse the same both ways; only random tokens, as above, can differ."""
    family = families["qwen3"]
    before = family.disagreements
    tail = family.render([Message("user", "Hi.")], TOOLS, None)
    draw = random.Random(7)
    parts = ("Some words. ", "\n", "naïve 🙂", "1 < 2 and </p>", "    indented", '{"a": 1}')
    for _ in range(100):
        text = "".join(draw.choices(parts, k=draw.randrange(6)))
        if draw.random() < 0.6:
            text = f"<think>\n{text}\n</think>\n\n" + "".join(draw.choices(parts, k=draw.randrange(6)))
        for _ in range(draw.randrange(3)):
            text += '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Åre"}}\n</tool_call>'
        sampled = [*family.tokenizer.encode(text), family.stop_token_ids[0]]
        _, message = parse_in_chunks(family.new_reply_parser(tail, TOOLS), sampled, list(range(len(sampled))))
        assert message == family.parse(tail, ints(sampled), TOOLS)
    assert family.disagreements == before


CONVERSATIONS = (
    [Message("user", "Hi.")],
    [Message("system", "Be brief."), Message("user", "naïve 🙂\n\n  语言 ")],
    [Message("user", ({"type": "text", "text": "in "}, {"type": "text", "text": "parts"}))],
)


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3", "llama-3", "gemma4"])
@pytest.mark.parametrize("tools", [(), TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["user", "system", "parts"])
def test_first_prompt_equals_the_chat_template(name: str, tools: tuple, messages: list[Message]) -> None:
    family = open_family(name, name)
    converted = convert_messages(messages)
    # The family renderer uses the fallback date of its template; ours would use today's date.
    options = {"date_string": "26 Jul 2024"} if name == "llama-3" else {}
    text = family.tokenizer.template(converted, convert_tools(tools), **options)
    assert family.tokenizer.decode(ids_of(family.render(messages, tools, None))) == text
    assert ids_of(family.render(messages, tools, None)) == family.tokenizer.encode(text)


def test_tool_choice_none_hides_the_tools() -> None:
    family = open_family("qwen3")
    messages = [Message("user", "Hi.")]
    assert family.render(messages, TOOLS, "none") == family.render(messages, (), None)


def test_developer_role_becomes_system_in_formats_without_it() -> None:
    family = open_family("qwen3")
    messages = [Message("user", "Hi.")]
    assert family.render([Message("developer", "Be."), *messages], (), None) == family.render(
        [Message("system", "Be."), *messages], (), None
    )


def test_non_text_content_is_neither_rendered_nor_extended() -> None:
    family = open_family("qwen3")
    image = Message("user", ({"type": "image_url", "image_url": {"url": "data:"}},))
    with pytest.raises(RenderError, match="image_url"):
        family.render([image], (), None)
    prompt = family.render([Message("user", "Hi.")], (), None)
    assert family.extend(prompt, ints([family.stop_token_ids[0]]), [image], (), None) is None
    with pytest.raises(RenderError):
        family.render([], (), None)


def test_call_ids_depend_on_prompt_and_position_only() -> None:
    family = open_family("qwen3")
    text = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    sampled = ints(family.tokenizer.encode(text * 2))
    tail = family.render([Message("user", LONG)], (), None)
    other = family.render([Message("user", "Hi.")], (), None)
    first = [call.id for call in family.parse(tail, sampled, (), prompt_length=1).tool_calls]
    assert first == [call.id for call in family.parse(tail[-1024:], sampled, (), prompt_length=1).tool_calls]
    seen = {*first}
    for ids in (
        family.parse(tail, sampled, (), prompt_length=2),
        family.parse(other, sampled, (), prompt_length=1),
    ):
        assert seen.isdisjoint(call.id for call in ids.tool_calls)


def test_token_bytes_returns_the_bytes_of_each_id() -> None:
    family = open_family("qwen3")
    ids = family.tokenizer.encode("naïve 🙂<|im_end|>")
    assert b"".join(family.token_bytes(ints(ids))).decode() == "naïve 🙂<|im_end|>"
    assert family.token_bytes(ints([-1, 2**31 - 1])) == [b"", b""]


def test_failing_family_parser_gives_the_reply_as_text(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    family = open_renderer("qwen3", str(TOKENIZERS / "qwen3"))
    assert isinstance(family, FamilyRenderer)
    tail = family.render([Message("user", "Hi.")], (), None)

    class Broken:
        def __getattr__(self, name: str) -> object:
            raise ZeroDivisionError

    family.renderer = Broken()
    sampled = ints([*family.tokenizer.encode("some text"), family.stop_token_ids[0]])
    assert family.parse(tail, sampled, ()).content == "some text"
    assert family.extend(tail, sampled, [Message("user", "Hi.")], (), None) is None
    assert family.failures == 2
    assert len(caplog.records) == 1
