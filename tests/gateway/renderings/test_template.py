"""A model's own chat template, beside the program that its authors run it with."""

from functools import cache
from typing import Any

import pytest
import tokenizers

from rookery.core import Message, ToolCall, UsageError
from rookery.gateway.renderings import Unrenderable
from rookery.gateway.renderings.template import ChatTemplate
from rookery.gateway.renderings.words import plain, schemas
from tests.gateway.renderings.support import TOOLS, rendering

CALLS = (ToolCall("call00001", "weather", '{"city": "Åre", "metric": true, "days": 2}'),)
CONVERSATIONS = (
    [Message("user", "Hi <b>&</b> 'you'.")],
    [Message("system", "Be brief."), Message("user", "Hi."), Message("assistant", "Yes?"), Message("user", "No.")],
    [
        Message("user", "Weather?"),
        Message("assistant", "Looking.", CALLS, reasoning="Where?"),
        Message("tool", '{"degrees": -3}', tool_call_id="call00001", name="weather"),
    ],
)


@cache
def transformed(name: str) -> Any:
    """Their tokenizer; templates only need it to know the special tokens, so any vocabulary will do."""
    transformers = pytest.importorskip("transformers", reason="[probed] transformers is not installed")
    own = rendering(name, name).tokenizer
    small = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=small, chat_template=own.chat_template, **own.specials
    )


@pytest.mark.needs("tokenizers")
@pytest.mark.parametrize("name", ["qwen3", "llama-3", "gemma4"])
@pytest.mark.parametrize("tools", [(), TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["one", "four", "calls"])
def test_a_template_renders_as_transformers_renders_it(name: str, tools: tuple, messages: list[Message]) -> None:
    own = rendering(name, name).tokenizer
    theirs = transformed(name)
    words = plain(messages)
    expected = theirs.apply_chat_template(
        words, tools=schemas(tools), tokenize=False, add_generation_prompt=True, enable_thinking=True
    )
    assert own.template(words, schemas(tools), enable_thinking=True) == expected


def test_what_a_template_refuses_is_unrenderable_in_its_own_words() -> None:
    template = ChatTemplate("{{ raise_exception('Roles must alternate') }}")
    with pytest.raises(Unrenderable, match="Roles must alternate"):
        template([])


def test_what_a_template_cannot_do_is_unrenderable() -> None:
    with pytest.raises(Unrenderable, match="UndefinedError"):
        ChatTemplate("{{ messages[0].content.nothing.more }}")([])


def test_a_template_that_cannot_be_read_is_said_when_it_is_built() -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        ChatTemplate("{% if %}")


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_template_is_foreign_code(attack: str) -> None:
    messages: list = []
    with pytest.raises(Unrenderable):
        ChatTemplate(attack)(messages)
    assert messages == []


def test_marks_of_generations_are_read_as_their_text() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}"
    )
    assert template([{"content": "a"}, {"content": "b"}]) == "a;b;"


def test_special_tokens_and_options_have_names() -> None:
    template = ChatTemplate("{{ bos_token }}{{ 'deep' if effort == 'high' else 'flat' }}", {"bos_token": "<s>"})
    assert template([], effort="high") == "<s>deep"
    assert template([]) == "<s>flat"
