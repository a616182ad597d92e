"""`ChatTemplate` renders a model's own chat template like transformers does, in a sandbox."""

from functools import cache
from typing import Any

import jinja2
import pytest
import tokenizers

from rookery.core import Message, ToolCall, UsageError
from rookery.gateway.chat_renderers import RenderError
from rookery.gateway.chat_renderers.conversion import convert_messages, convert_tools
from rookery.gateway.chat_renderers.jinja_template import ChatTemplate
from tests.gateway.chat_renderers.kit import TOOLS, open_family

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
def transformers_tokenizer(name: str) -> Any:
    """Return a transformers tokenizer. A template needs only its special tokens, so the vocabulary is tiny."""
    transformers = pytest.importorskip("transformers", reason="[probed] transformers is not installed")
    tokenizer = open_family(name, name).tokenizer
    vocabulary = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=vocabulary, chat_template=tokenizer.chat_template, **tokenizer.special_tokens
    )


@pytest.mark.long
@pytest.mark.needs("tokenizers")
@pytest.mark.parametrize("name", ["qwen3", "llama-3", "gemma4"])
@pytest.mark.parametrize("tools", [(), TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["one", "four", "calls"])
def test_template_renders_like_transformers(name: str, tools: tuple, messages: list[Message]) -> None:
    tokenizer = open_family(name, name).tokenizer
    theirs = transformers_tokenizer(name)
    converted = convert_messages(messages)
    expected = theirs.apply_chat_template(
        converted, tools=convert_tools(tools), tokenize=False, add_generation_prompt=True, enable_thinking=True
    )
    assert tokenizer.template(converted, convert_tools(tools), enable_thinking=True) == expected


def test_template_rejection_raises_render_error_with_its_message() -> None:
    template = ChatTemplate("{{ raise_exception('Roles must alternate') }}")
    with pytest.raises(RenderError, match="Roles must alternate"):
        template([])


def test_failing_template_raises_render_error() -> None:
    with pytest.raises(RenderError) as caught:
        ChatTemplate("{{ messages[0].content.nothing.more }}")([])
    assert isinstance(caught.value.__cause__, jinja2.UndefinedError)


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
