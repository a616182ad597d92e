"""Reading an answer while it is sampled."""

import pytest

from rookery.core import Message
from rookery.gateway.renderings.outline import ALLOWANCE, MOST
from rookery.upstreams.protocol import Delta
from tests.gateway.renderings.support import TOOLS, ints, rendering, templated

pytestmark = pytest.mark.needs("tokenizers")

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city":  "Oslo"}}\n</tool_call>'


def pieces(name: str, text: str, tokenizer: str = "qwen3", **options: object) -> list[tuple[str, Delta]]:
    """What each token of a text made the reader tell."""
    family = rendering(name, tokenizer, **options)
    tail = family.render([Message("user", "Hi.")], TOOLS, None)
    reader = family.reader(tail, TOOLS)
    ids = family.tokenizer.encode(text)
    found = [(family.tokenizer.decode([at]), reader.feed(ints([at]), b"\0\0\0\0")) for at in ids]
    last, message = reader.end()
    assert message == family.parse(tail, ints(ids), TOOLS)
    return [*found, ("", last)]


def test_text_is_told_with_the_token_that_spells_it() -> None:
    told = pieces("qwen3", "<think>\nOne two three\n</think>\n\nFour five")
    assert [(text, delta.reasoning) for text, delta in told if delta.reasoning] == [
        ("One", "One"),
        (" two", " two"),
        (" three", " three"),
    ]
    assert [(text, delta.content) for text, delta in told if delta.content] == [
        ("Four", "Four"),
        (" five", " five"),
    ]


def test_ids_and_logprobs_pass_through_unchanged() -> None:
    told = pieces("qwen3", "One two")
    assert all(len(delta.sampled) == 4 and delta.logprobs == b"\0\0\0\0" for text, delta in told if text)


def test_half_a_character_is_never_told() -> None:
    family = rendering("qwen3")
    tail = family.render([Message("user", "Hi.")], TOOLS, None)
    reader = family.reader(tail, TOOLS)
    letters = {piece: at for at, piece in enumerate(family.tokenizer.pieces) if len(piece) == 1}
    told = [reader.feed(ints([letters[bytes([byte])]])).content for byte in "é🙂!".encode()]
    assert told == ["", "é", "", "", "", "🙂", "!"]
    reader.feed(ints([letters[b"\xf0"], letters[b"\x9f"]]))
    last, message = reader.end()
    assert last.content == "\N{REPLACEMENT CHARACTER}"
    assert message.content == "é🙂!\N{REPLACEMENT CHARACTER}"


def test_space_is_told_once_something_follows_it() -> None:
    told = pieces("qwen3", "\n\nOne \n\n two \n")
    assert [delta.content for _, delta in told if delta.content] == ["One", " \n\n two"]


def test_a_call_is_told_when_it_is_whole() -> None:
    told = pieces("qwen3", f"Look.\n{CALL}\n{CALL}<|im_end|>")
    when = [(text, [call.arguments for call in delta.tool_calls]) for text, delta in told if delta.tool_calls]
    assert when == [("</tool_call>", ['{"city":  "Oslo"}'])] * 2


def test_a_call_in_unfinished_reasoning_waits_for_the_end() -> None:
    """Its format may still say that it was only thought of: a later mark makes it reasoning."""
    told = pieces("qwen3", f"<think>\nI could\n{CALL}")
    assert not any(delta.tool_calls for _, delta in told[:-1])
    assert len(told[-1][1].tool_calls) == 1
    assert not any(
        delta.tool_calls for _, delta in pieces("qwen3", f"<think>\nI could\n{CALL}\nor not</think>No.")
    )


def test_a_format_whose_calls_are_bare_json_tells_text_and_waits_with_what_may_be_one() -> None:
    call = '{"name": "weather", "parameters": {"city": "Oslo"}}'
    told = pieces("llama-3", call, "llama-3")
    assert not any(delta.content or delta.tool_calls for _, delta in told[:-1])
    assert [call.arguments for call in told[-1][1].tool_calls] == ['{"city": "Oslo"}']
    plain = pieces("llama-3", f"Like {call}", "llama-3")
    assert "".join(delta.content for _, delta in plain[:-1]) == f"Like {call}"


def test_reasoning_that_the_prompt_began_is_told_as_reasoning(tmp_path) -> None:
    family = rendering("qwen3")
    begun = family.tokenizer.encode("<|im_start|>assistant\n<think>\n")
    reader = family.reader(ints(begun), TOOLS)
    assert reader.feed(ints(family.tokenizer.encode("Hm"))).reasoning == "Hm"
    reader.feed(ints(family.tokenizer.encode("\n</think>\n\n")))
    assert reader.feed(ints(family.tokenizer.encode("So."))).content == "So."


def test_marks_that_text_spells_are_held_back_until_they_are_none_or_whole() -> None:
    """In this vocabulary `</think>` is several tokens."""
    family = templated("llama-3", None)
    assert "</think>" in family.text_marks
    tail = family.render([Message("user", "Hi.")], (), None)
    reader = family.reader(tail, ())
    told = [reader.feed(ints([at])) for at in family.tokenizer.encode("<think>1 < 2 </b> so</think> Yes")]
    last, message = reader.end()
    assert (message.reasoning, message.content) == ("1 < 2 </b> so", "Yes")
    assert "".join(delta.reasoning for delta in told) == "1 < 2 </b> so"
    assert "".join(delta.content for delta in told) == "Yes"
    assert not last.content


def test_an_answer_of_nothing_but_marks_costs_no_more_than_its_outline() -> None:
    family = rendering("qwen3")
    tail = family.render([Message("user", "Hi.")], TOOLS, None)
    begin, end = (family.tokenizer.convert_tokens_to_ids(mark) for mark in ("<tool_call>", "</tool_call>"))
    sampled = [begin, end] * 3 * MOST
    reader = family.reader(tail, TOOLS)
    asked = 0
    parse = family.found

    def counted(*arguments):
        nonlocal asked
        asked += len(arguments[1])
        return parse(*arguments)

    family.found = counted  # type: ignore[method-assign]
    try:
        for at in sampled:
            reader.feed(ints([at]))
        most = asked
        _, message = reader.end()
    finally:
        family.found = parse  # type: ignore[method-assign]
    assert message == family.parse(tail, ints(sampled), TOOLS)
    assert most < 2 * ALLOWANCE


def test_an_outline_that_was_planned_once_is_remembered() -> None:
    family = rendering("qwen3")
    tails = [family.render([Message("user", text)], TOOLS, None) for text in ("Hi.", "Another question. " * 50)]
    ids = ints(family.tokenizer.encode("<think>\nOne two three\n</think>\n\nFour"))
    family.reader(tails[0], TOOLS).feed(ids)
    before = len(family._plans)
    family.reader(tails[1][-1024:], TOOLS).feed(ids)
    assert len(family._plans) == before > 0


def test_what_was_told_stands_and_is_counted() -> None:
    """Half a character before a mark and half after it: the family's parser takes the mark out and joins them."""
    family = rendering("qwen3")
    tail = family.render([Message("user", "Hi.")], TOOLS, None)
    letters = {piece: at for at, piece in enumerate(family.tokenizer.pieces) if len(piece) == 1}
    think, done = (family.tokenizer.convert_tokens_to_ids(mark) for mark in ("<think>", "</think>"))
    sampled = [think, letters[b"\xc3"], think, letters[b"\xa9"], done, *family.tokenizer.encode("So.")]
    before = family.disagreements
    reader = family.reader(tail, TOOLS)
    told = [reader.feed(ints([at])) for at in sampled]
    last, message = reader.end()
    assert family.parse(tail, ints(sampled), TOOLS).reasoning == "é"
    assert (
        message.reasoning == "".join(delta.reasoning for delta in [*told, last]) == "\N{REPLACEMENT CHARACTER}" * 2
    )
    assert message.content == "".join(delta.content for delta in [*told, last])
    assert family.disagreements == before + 1
