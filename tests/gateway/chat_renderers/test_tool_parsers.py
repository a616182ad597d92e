"""The tool parser `hermes` finds tool calls in the text if the tokenizer has no special tokens for them."""

import json
from pathlib import Path

import pytest

from rookery.core import Message, ToolSchema
from rookery.gateway.chat_renderers import RendererConfig, open_renderer_config
from rookery.gateway.chat_renderers.template_renderer import TemplateRenderer
from tests.conftest import TOKENIZERS
from tests.gateway.chat_renderers.kit import ids_of, ints, parse_in_chunks

SMOLLM2 = TOKENIZERS.parent / "smollm2" / "hf"
PYTHON = ToolSchema("python", "Runs code.", {"type": "object", "properties": {"code": {"type": "string"}}})
QUESTION = (Message("user", "What is 1 + 1?"),)
CALL = '<tool_call>{"name": "python", "arguments": {"code": "print(1)"}}</tool_call>'


@pytest.fixture(params=["smollm2", "llama-3", "qwen3"], scope="module")
def renderer(request: pytest.FixtureRequest) -> TemplateRenderer:
    """Open the chat template of a tokenizer without the special token `<tool_call>`, and of one that has it."""
    folder: Path = SMOLLM2 if request.param == "smollm2" else TOKENIZERS / request.param
    if not (folder / "tokenizer.json").is_file():
        pytest.skip(f"[probed] this machine has no tokenizer of {request.param} (make peers, make engines)")
    opened = open_renderer_config(RendererConfig(name="default", tokenizer=str(folder), tool_prompt="default"))
    assert isinstance(opened, TemplateRenderer)
    return opened


def test_tool_call_makes_the_round_trip(renderer: TemplateRenderer) -> None:
    prompt = renderer.render(QUESTION, (PYTHON,), None)
    assert json.dumps(PYTHON.parameters) in renderer.tokenizer.decode(ids_of(prompt))
    sampled = ints([*renderer.tokenizer.encode(CALL), renderer.stop_token_ids[0]])
    message = renderer.parse(prompt, sampled, (PYTHON,))
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("python", '{"code": "print(1)"}')]
    assert message.content is None
    result = Message("tool", "1", tool_call_id=message.tool_calls[0].id)
    extension = renderer.extend(prompt, sampled, (result,), (PYTHON,), None)
    assert extension is not None
    following = renderer.tokenizer.decode(ids_of(prompt + sampled + extension))
    rendered = renderer.tokenizer.decode(ids_of(renderer.render((*QUESTION, message, result), (PYTHON,), None)))
    assert following.split(CALL)[1] == rendered.split("</tool_call>")[-1]


@pytest.mark.parametrize(
    ("text", "content", "codes"),
    [
        ("Just text.", "Just text.", []),
        (f"Naïve 🙂.{CALL}\n{CALL}", "Naïve 🙂.", ["print(1)", "print(1)"]),
        (f"a\n{CALL} and so on", "a", ["print(1)"]),
        ('a <tool_call>{"name": "python"}', 'a\n<tool_call>{"name": "python"}', []),
        (f"<tool_call>no JSON</tool_call>{CALL}", "<tool_call>no JSON</tool_call>", ["print(1)"]),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
        ("1 < 2 and <tool", "1 < 2 and <tool", []),
    ],
)
def test_replies_are_parsed_alike_at_once_and_in_a_stream(
    renderer: TemplateRenderer, text: str, content: str, codes: list[str]
) -> None:
    prompt = renderer.render(QUESTION, (PYTHON,), None)
    sampled = [*renderer.tokenizer.encode(text), renderer.stop_token_ids[0]]
    message = renderer.parse(prompt, ints(sampled), (PYTHON,))
    assert (message.content or "") == content
    assert [json.loads(call.arguments)["code"] for call in message.tool_calls] == codes
    deltas, streamed = parse_in_chunks(
        renderer.new_reply_parser(prompt, (PYTHON,)), sampled, list(range(len(sampled)))
    )
    assert streamed == message
    assert "".join(delta.content for delta in deltas) == content
    assert renderer.disagreements == 0
