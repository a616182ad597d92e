"""Extending a prompt keeps sampled tokens that rendering the conversation again would lose.

The tests use the real template and vocabulary of Qwen3.
"""

import json

import pytest

from rookery.core import Message, ToolCall
from tests.gateway.chat_renderers.kit import TOOLS, ids_of, ints, open_family, open_template

pytestmark = pytest.mark.needs("tokenizers")

MESSAGES = (Message("system", "You help."), Message("user", "How is the weather in Oslo?"))
RESULT = Message("tool", '{"degrees": -3}', tool_call_id="c")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def common_prefix_length(left: list[int], right: list[int]) -> int:
    return next(
        (at for at, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]),
        min(len(left), len(right)),
    )


def sample(text: str, *, end: bool = True) -> list[int]:
    family = open_family("qwen3")
    return family.tokenizer.encode(text) + ([family.stop_token_ids[0]] if end else [])


def extend_prompt(sampled: list[int], new: Message = RESULT) -> tuple[list[int], list[int], str]:
    """Return the prompt, the next prompt, and the text that was added between them."""
    family = open_family("qwen3")
    prompt = family.render(MESSAGES, TOOLS, None)
    more = family.extend(prompt[-1024:], ints(sampled), [new], TOOLS, None)
    assert more is not None
    return ids_of(prompt), [*ids_of(prompt), *sampled, *ids_of(more)], family.tokenizer.decode(ids_of(more))


def render_again(message: Message, new: Message = RESULT) -> list[int]:
    """Render the whole conversation anew, with the reply as a client sends it back."""
    return ids_of(open_family("qwen3").render([*MESSAGES, message, new], TOOLS, None))


def test_extending_keeps_every_sampled_token_when_the_client_drops_reasoning() -> None:
    family = open_family("qwen3")
    sampled = sample("<think>\nThe user wants Oslo.\n</think>\n\n" + CALL)
    prompt, longer, added = extend_prompt(sampled)
    reply = family.parse(ints(prompt), ints(sampled), TOOLS)
    dropped = Message("assistant", reply.content, reply.tool_calls)
    assert reply.reasoning == "The user wants Oslo."
    assert common_prefix_length(longer, render_again(dropped)) == len(prompt)
    assert added == (
        '\n<|im_start|>user\n<tool_response>\n{"degrees": -3}\n</tool_response><|im_end|>\n<|im_start|>assistant\n'
    )


def test_reasoning_is_retained_after_a_user_message_although_the_template_drops_it() -> None:
    family = open_family("qwen3")
    sampled = sample("<think>\nHm.\n</think>\n\nCold.")
    prompt, longer, _ = extend_prompt(sampled, Message("user", "And Rome?"))
    reply = family.parse(ints(prompt), ints(sampled), TOOLS)
    assert common_prefix_length(longer, render_again(reply, Message("user", "And Rome?"))) == len(prompt)
    strict = open_family("qwen3", thinking_retention="tool_cycle")
    assert strict.extend(ints(prompt), ints(sampled), [Message("user", "And Rome?")], TOOLS, None) is None


@pytest.mark.parametrize(
    "arguments", ['{"city":"Oslo","days":3}', '{ "city": "Oslo", "days": 3 }', '{"days": 3,\n "city": "Oslo"}']
)
def test_json_spacing_is_lost_by_rendering_and_kept_by_extending(arguments: str) -> None:
    family = open_family("qwen3")
    sampled = sample(f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>')
    prompt, longer, _ = extend_prompt(sampled)
    reply = family.parse(ints(prompt), ints(sampled), TOOLS)
    assert reply.tool_calls[0].arguments == arguments
    tidy = ToolCall("c", "weather", json.dumps(json.loads(arguments)))
    kept = common_prefix_length(longer, render_again(Message("assistant", None, (tidy,)))) - len(prompt)
    assert kept < len(sampled) - 2


def test_sampled_tokenisation_is_kept_where_bpe_would_differ() -> None:
    family = open_family("qwen3")
    whole = family.tokenizer.encode("Hello world")
    char_ids = [at for letter in "Hello world" for at in family.tokenizer.encode(letter)]
    assert family.tokenizer.decode(char_ids) == family.tokenizer.decode(whole)
    assert char_ids != whole
    sampled = [*char_ids, family.stop_token_ids[0]]
    prompt, longer, _ = extend_prompt(sampled)
    assert longer[len(prompt) : len(prompt) + len(sampled)] == sampled
    reply = family.parse(ints(prompt), ints(sampled), TOOLS)
    assert reply.content == "Hello world"
    assert render_again(reply)[len(prompt) : len(prompt) + len(whole)] != char_ids[: len(whole)]


def test_booleans_keep_their_type() -> None:
    family = open_family("qwen3")
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "true", "metric": true}}\n</tool_call>'
    prompt = family.render(MESSAGES, TOOLS, None)
    reply = family.parse(prompt, ints(sample(text)), TOOLS)
    assert reply.tool_calls[0].arguments == '{"city": "true", "metric": true}'
    ids = ids_of(family.render([*MESSAGES, reply, RESULT], TOOLS, None))
    assert '"arguments": {"city": "true", "metric": true}' in family.tokenizer.decode(ids)


def test_truncated_reply_is_closed_by_tokens_of_the_next_prompt() -> None:
    family = open_family("qwen3")
    sampled = sample("Cold, and it", end=False)
    prompt, longer, added = extend_prompt(sampled, Message("user", "Go on."))
    assert longer[len(prompt) : len(prompt) + len(sampled)] == sampled
    assert added.startswith("<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>")
    assert family.stop_token_ids[0] not in sampled


def test_unfinished_reasoning_is_closed_before_the_reply() -> None:
    sampled = sample("<think>\nLet me see, the", end=False)
    _, _, added = extend_prompt(sampled, Message("user", "Well?"))
    assert added.startswith("</think><|im_end|>\n<|im_start|>user\nWell?<|im_end|>")


def test_reasoning_that_ended_without_its_close_is_not_extended() -> None:
    family = open_family("qwen3")
    prompt = family.render(MESSAGES, TOOLS, None)
    sampled = sample("<think>\nLet me see")
    assert family.extend(prompt, ints(sampled), [RESULT], TOOLS, None) is None
    reply = family.parse(prompt, ints(sampled), TOOLS)
    assert (reply.content, reply.reasoning) == ("", "Let me see")


def test_parallel_calls_are_read_in_order_and_their_results_share_one_turn() -> None:
    family = open_family("qwen3")
    second = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    sampled = sample(f"Both.\n{CALL}\n{second}")
    prompt = family.render(MESSAGES, TOOLS, None)
    reply = family.parse(prompt, ints(sampled), TOOLS)
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [
        ("weather", '{"city": "Oslo"}'),
        ("now", "{}"),
    ]
    assert len({call.id for call in reply.tool_calls}) == 2
    results = [Message("tool", str(at), tool_call_id=call.id) for at, call in enumerate(reply.tool_calls)]
    more = family.extend(prompt[-1024:], ints(sampled), results, TOOLS, None)
    assert more is not None
    text = family.tokenizer.decode(ids_of(more))
    assert text.count("<|im_start|>user") == 1
    assert "<tool_response>\n0\n</tool_response>\n<tool_response>\n1\n</tool_response><|im_end|>" in text


def test_unparsable_call_becomes_text_as_sampled() -> None:
    family = open_family("qwen3")
    prompt = family.render(MESSAGES, TOOLS, None)
    broken = '<tool_call>\n{"name": "weather", "arguments": {"city": }}\n</tool_call>'
    reply = family.parse(prompt, ints(sample(f"So.\n{broken}")), TOOLS)
    assert reply.content == f"So.\n{broken}"
    half = family.parse(prompt, ints(sample('<tool_call>\n{"name": "wea', end=False)), TOOLS)
    assert half.content == '<tool_call>\n{"name": "wea'
    assert not half.tool_calls


def test_assistant_message_from_the_client_is_never_an_extension() -> None:
    family = open_family("qwen3")
    prompt = family.render(MESSAGES, TOOLS, None)
    sampled = ints(sample("Yes."))
    assert family.extend(prompt, sampled, [Message("assistant", "No."), RESULT], TOOLS, None) is None
    assert family.extend(prompt, sampled, [], TOOLS, None) is None
    assert open_template().extend(prompt, sampled, [Message("assistant", "No."), RESULT], TOOLS, None) is None


def test_reply_that_continues_after_its_stop_token_is_not_extended() -> None:
    family = open_family("qwen3")
    prompt = family.render(MESSAGES, TOOLS, None)
    sampled = ints([*sample("Yes."), *family.tokenizer.encode("No.")])
    assert family.extend(prompt, sampled, [RESULT], TOOLS, None) is None
    assert family.parse(prompt, sampled, TOOLS).content == "Yes."


@pytest.mark.parametrize("end", [True, False])
@pytest.mark.parametrize("new", [RESULT, Message("user", "And Rome?")])
def test_template_renderer_extends_like_the_family_renderer(new: Message, end: bool) -> None:
    family, own = open_family("qwen3"), open_template()
    prompt = family.render(MESSAGES, TOOLS, None)
    assert own.render(MESSAGES, TOOLS, None) == prompt
    sampled = ints(sample("<think>\nHm.\n</think>\n\nCold.", end=end))
    assert own.extend(prompt[-1024:], sampled, [new], TOOLS, None) == family.extend(
        prompt[-1024:], sampled, [new], TOOLS, None
    )


def test_reply_that_a_template_cannot_close_is_not_extended() -> None:
    own = open_template()
    prompt = own.render(MESSAGES, TOOLS, None)
    for text in ("<think>\nHm", CALL.removesuffix("</tool_call>")):
        assert own.extend(prompt, ints(sample(text, end=False)), [RESULT], TOOLS, None) is None
