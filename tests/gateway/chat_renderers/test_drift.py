"""Where rendering a conversation again would lose what was sampled, and extending it does not.

Real template, real vocabulary: Qwen3's.
"""

import json

import pytest

from rookery.core import Message, ToolCall
from tests.gateway.chat_renderers.support import TOOLS, ints, numbers, rendering, templated

pytestmark = pytest.mark.needs("tokenizers")

ASK = (Message("system", "You help."), Message("user", "How is the weather in Oslo?"))
RESULT = Message("tool", '{"degrees": -3}', tool_call_id="c")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def common(left: list[int], right: list[int]) -> int:
    return next(
        (at for at, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]),
        min(len(left), len(right)),
    )


def sampled_text(text: str, *, end: bool = True) -> list[int]:
    family = rendering("qwen3")
    return family.tokenizer.encode(text) + ([family.stop_token_ids[0]] if end else [])


def extended(sampled: list[int], new: Message = RESULT) -> tuple[list[int], list[int], str]:
    """The prompt, the prompt after it, and the text of what was added."""
    family = rendering("qwen3")
    prompt = family.render(ASK, TOOLS, None)
    more = family.extend(prompt[-1024:], ints(sampled), [new], TOOLS, None)
    assert more is not None
    return numbers(prompt), [*numbers(prompt), *sampled, *numbers(more)], family.tokenizer.decode(numbers(more))


def again(message: Message, new: Message = RESULT) -> list[int]:
    """The same conversation rendered as a whole, with the answer as a client sends it back."""
    return numbers(rendering("qwen3").render([*ASK, message, new], TOOLS, None))


def test_a_client_that_drops_reasoning_loses_every_sampled_token_and_extending_none() -> None:
    family = rendering("qwen3")
    sampled = sampled_text("<think>\nThe user wants Oslo.\n</think>\n\n" + CALL)
    prompt, longer, added = extended(sampled)
    answer = family.parse(ints(prompt), ints(sampled), TOOLS)
    dropped = Message("assistant", answer.content, answer.tool_calls)
    assert answer.reasoning == "The user wants Oslo."
    assert common(longer, again(dropped)) == len(prompt)
    assert added == (
        '\n<|im_start|>user\n<tool_response>\n{"degrees": -3}\n</tool_response><|im_end|>\n<|im_start|>assistant\n'
    )


def test_reasoning_is_retained_after_a_user_message_although_the_template_drops_it() -> None:
    family = rendering("qwen3")
    sampled = sampled_text("<think>\nHm.\n</think>\n\nCold.")
    prompt, longer, _ = extended(sampled, Message("user", "And Rome?"))
    answer = family.parse(ints(prompt), ints(sampled), TOOLS)
    assert common(longer, again(answer, Message("user", "And Rome?"))) == len(prompt)
    strict = rendering("qwen3", thinking_retention="tool_cycle")
    assert strict.extend(ints(prompt), ints(sampled), [Message("user", "And Rome?")], TOOLS, None) is None


@pytest.mark.parametrize(
    "arguments", ['{"city":"Oslo","days":3}', '{ "city": "Oslo", "days": 3 }', '{"days": 3,\n "city": "Oslo"}']
)
def test_json_spacing_is_lost_by_rendering_and_kept_by_extending(arguments: str) -> None:
    family = rendering("qwen3")
    sampled = sampled_text(f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>')
    prompt, longer, _ = extended(sampled)
    answer = family.parse(ints(prompt), ints(sampled), TOOLS)
    assert answer.tool_calls[0].arguments == arguments
    tidy = ToolCall("c", "weather", json.dumps(json.loads(arguments)))
    kept = common(longer, again(Message("assistant", None, (tidy,)))) - len(prompt)
    assert kept < len(sampled) - 2


def test_sampled_tokenisation_is_kept_where_bpe_would_differ() -> None:
    family = rendering("qwen3")
    whole = family.tokenizer.encode("Hello world")
    letters = [at for letter in "Hello world" for at in family.tokenizer.encode(letter)]
    assert family.tokenizer.decode(letters) == family.tokenizer.decode(whole)
    assert letters != whole
    sampled = [*letters, family.stop_token_ids[0]]
    prompt, longer, _ = extended(sampled)
    assert longer[len(prompt) : len(prompt) + len(sampled)] == sampled
    answer = family.parse(ints(prompt), ints(sampled), TOOLS)
    assert answer.content == "Hello world"
    assert again(answer)[len(prompt) : len(prompt) + len(whole)] != letters[: len(whole)]


def test_booleans_keep_their_type() -> None:
    family = rendering("qwen3")
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "true", "metric": true}}\n</tool_call>'
    prompt = family.render(ASK, TOOLS, None)
    answer = family.parse(prompt, ints(sampled_text(text)), TOOLS)
    assert answer.tool_calls[0].arguments == '{"city": "true", "metric": true}'
    ids = numbers(family.render([*ASK, answer, RESULT], TOOLS, None))
    assert '"arguments": {"city": "true", "metric": true}' in family.tokenizer.decode(ids)


def test_truncated_reply_is_closed_by_tokens_of_the_next_prompt() -> None:
    family = rendering("qwen3")
    sampled = sampled_text("Cold, and it", end=False)
    prompt, longer, added = extended(sampled, Message("user", "Go on."))
    assert longer[len(prompt) : len(prompt) + len(sampled)] == sampled
    assert added.startswith("<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>")
    assert family.stop_token_ids[0] not in sampled


def test_unfinished_reasoning_is_closed_before_the_reply() -> None:
    sampled = sampled_text("<think>\nLet me see, the", end=False)
    _, _, added = extended(sampled, Message("user", "Well?"))
    assert added.startswith("</think><|im_end|>\n<|im_start|>user\nWell?<|im_end|>")


def test_reasoning_that_ended_without_its_close_is_not_extended() -> None:
    family = rendering("qwen3")
    prompt = family.render(ASK, TOOLS, None)
    sampled = sampled_text("<think>\nLet me see")
    assert family.extend(prompt, ints(sampled), [RESULT], TOOLS, None) is None
    answer = family.parse(prompt, ints(sampled), TOOLS)
    assert (answer.content, answer.reasoning) == ("", "Let me see")


def test_parallel_calls_are_read_in_order_and_their_results_share_one_turn() -> None:
    family = rendering("qwen3")
    second = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    sampled = sampled_text(f"Both.\n{CALL}\n{second}")
    prompt = family.render(ASK, TOOLS, None)
    answer = family.parse(prompt, ints(sampled), TOOLS)
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [
        ("weather", '{"city": "Oslo"}'),
        ("now", "{}"),
    ]
    assert len({call.id for call in answer.tool_calls}) == 2
    results = [Message("tool", str(at), tool_call_id=call.id) for at, call in enumerate(answer.tool_calls)]
    more = family.extend(prompt[-1024:], ints(sampled), results, TOOLS, None)
    assert more is not None
    text = family.tokenizer.decode(numbers(more))
    assert text.count("<|im_start|>user") == 1
    assert "<tool_response>\n0\n</tool_response>\n<tool_response>\n1\n</tool_response><|im_end|>" in text


def test_unparsable_call_becomes_text_as_sampled() -> None:
    family = rendering("qwen3")
    prompt = family.render(ASK, TOOLS, None)
    broken = '<tool_call>\n{"name": "weather", "arguments": {"city": }}\n</tool_call>'
    answer = family.parse(prompt, ints(sampled_text(f"So.\n{broken}")), TOOLS)
    assert answer.content == f"So.\n{broken}"
    half = family.parse(prompt, ints(sampled_text('<tool_call>\n{"name": "wea', end=False)), TOOLS)
    assert half.content == '<tool_call>\n{"name": "wea'
    assert not half.tool_calls


def test_assistant_message_from_the_client_is_never_an_extension() -> None:
    family = rendering("qwen3")
    prompt = family.render(ASK, TOOLS, None)
    sampled = ints(sampled_text("Yes."))
    assert family.extend(prompt, sampled, [Message("assistant", "No."), RESULT], TOOLS, None) is None
    assert family.extend(prompt, sampled, [], TOOLS, None) is None
    assert templated().extend(prompt, sampled, [Message("assistant", "No."), RESULT], TOOLS, None) is None


def test_reply_that_continues_after_its_stop_token_is_not_extended() -> None:
    family = rendering("qwen3")
    prompt = family.render(ASK, TOOLS, None)
    sampled = ints([*sampled_text("Yes."), *family.tokenizer.encode("No.")])
    assert family.extend(prompt, sampled, [RESULT], TOOLS, None) is None
    assert family.parse(prompt, sampled, TOOLS).content == "Yes."


@pytest.mark.parametrize("end", [True, False])
@pytest.mark.parametrize("new", [RESULT, Message("user", "And Rome?")])
def test_template_renderer_extends_like_the_family_renderer(new: Message, end: bool) -> None:
    family, own = rendering("qwen3"), templated()
    prompt = family.render(ASK, TOOLS, None)
    assert own.render(ASK, TOOLS, None) == prompt
    sampled = ints(sampled_text("<think>\nHm.\n</think>\n\nCold.", end=end))
    assert own.extend(prompt[-1024:], sampled, [new], TOOLS, None) == family.extend(
        prompt[-1024:], sampled, [new], TOOLS, None
    )


def test_reply_that_a_template_cannot_close_is_not_extended() -> None:
    own = templated()
    prompt = own.render(ASK, TOOLS, None)
    for text in ("<think>\nHm", CALL.removesuffix("</tool_call>")):
        assert own.extend(prompt, ints(sampled_text(text, end=False)), [RESULT], TOOLS, None) is None
