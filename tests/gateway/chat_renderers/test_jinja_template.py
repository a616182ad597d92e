"""A model's own chat template, beside the program that its authors run it with."""

from functools import cache
from typing import Any

import pytest
import tokenizers

from rookery.core import Message, ToolCall, UsageError
from rookery.gateway.chat_renderers import RenderError
from rookery.gateway.chat_renderers.conversion import convert_messages, convert_tools
from rookery.gateway.chat_renderers.jinja_template import ChatTemplate
from tests.gateway.chat_renderers.support import TOOLS, rendering

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
        tokenizer_object=small, chat_template=own.chat_template, **own.special_tokens
    )


@pytest.mark.needs("tokenizers")
@pytest.mark.parametrize("name", ["qwen3", "llama-3", "gemma4"])
@pytest.mark.parametrize("tools", [(), TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["one", "four", "calls"])
def test_template_renders_like_transformers(name: str, tools: tuple, messages: list[Message]) -> None:
    own = rendering(name, name).tokenizer
    theirs = transformed(name)
    words = convert_messages(messages)
    expected = theirs.apply_chat_template(
        words, tools=convert_tools(tools), tokenize=False, add_generation_prompt=True, enable_thinking=True
    )
    assert own.template(words, convert_tools(tools), enable_thinking=True) == expected


def test_template_rejection_raises_render_error_with_its_message() -> None:
    template = ChatTemplate("{{ raise_exception('Roles must alternate') }}")
    with pytest.raises(RenderError, match="Roles must alternate"):
        template([])


def test_failing_template_raises_render_error() -> None:
    with pytest.raises(RenderError, match="UndefinedError"):
        ChatTemplate("{{ messages[0].content.nothing.more }}")([])


def test_invalid_template_is_rejected_when_compiled() -> None:
    with pytest.raises(UsageError):
        ChatTemplate("{% if %}")


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_template_runs_in_a_sandbox(attack: str) -> None:
    messages: list = []
    with pytest.raises(RenderError):
        ChatTemplate(attack)(messages)
    assert messages == []


def test_generation_tags_render_as_their_body() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}"
    )
    assert template([{"content": "a"}, {"content": "b"}]) == "a;b;"


def test_special_tokens_and_options_are_template_variables() -> None:
    template = ChatTemplate("{{ bos_token }}{{ 'deep' if effort == 'high' else 'flat' }}", {"bos_token": "<s>"})
    assert template([], effort="high") == "<s>deep"
    assert template([]) == "<s>flat"
