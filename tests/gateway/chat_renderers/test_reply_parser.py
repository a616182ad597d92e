"""`ReplyParser` turns sampled tokens into deltas while the reply is still being sampled."""

import pytest

from rookery.core import Message
from rookery.gateway.chat_renderers.reply_skeleton import MAX_MARKERS, PLAN_BUDGET
from rookery.upstreams.protocol import Delta
from tests.gateway.chat_renderers.kit import TOOLS, ints, open_family, open_template

pytestmark = pytest.mark.needs("tokenizers")

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city":  "Oslo"}}\n</tool_call>'


def parse_by_token(name: str, text: str, tokenizer: str = "qwen3", **options: object) -> list[tuple[str, Delta]]:
    """Parse a reply token by token; return each token's text with the delta that it caused."""
    family = open_family(name, tokenizer, **options)
    tail = family.render([Message("user", "Hi.")], TOOLS, None)
    parser = family.new_reply_parser(tail, TOOLS)
    ids = family.tokenizer.encode(text)
    deltas = [(family.tokenizer.decode([at]), parser.feed(ints([at]), b"\0\0\0\0")) for at in ids]
    last, message = parser.finish()
    assert message == family.parse(tail, ints(ids), TOOLS)
    return [*deltas, ("", last)]


def test_text_is_sent_with_its_token() -> None:
    deltas = parse_by_token("qwen3", "<think>\nOne two three\n</think>\n\nFour five")
    assert [(text, delta.reasoning) for text, delta in deltas if delta.reasoning] == [
        ("One", "One"),
        (" two", " two"),
        (" three", " three"),
    ]
    assert [(text, delta.content) for text, delta in deltas if delta.content] == [
        ("Four", "Four"),
        (" five", " five"),
    ]


def test_ids_and_logprobs_pass_through_unchanged() -> None:
    deltas = parse_by_token("qwen3", "One two")
    assert all(len(delta.sampled) == 4 and delta.logprobs == b"\0\0\0\0" for text, delta in deltas if text)


def test_incomplete_character_is_never_sent() -> None:
    family = open_family("qwen3")
    tail = family.render([Message("user", "Hi.")], TOOLS, None)
    parser = family.new_reply_parser(tail, TOOLS)
    byte_ids = {piece: at for at, piece in enumerate(family.tokenizer.token_bytes) if len(piece) == 1}
    deltas = [parser.feed(ints([byte_ids[bytes([byte])]])).content for byte in "é🙂!".encode()]
    assert deltas == ["", "é", "", "", "", "🙂", "!"]
    parser.feed(ints([byte_ids[b"\xf0"], byte_ids[b"\x9f"]]))
    last, message = parser.finish()
    assert last.content == "\N{REPLACEMENT CHARACTER}"
    assert message.content == "é🙂!\N{REPLACEMENT CHARACTER}"


def test_white_space_is_sent_once_text_follows() -> None:
    deltas = parse_by_token("qwen3", "\n\nOne \n\n two \n")
    assert [delta.content for _, delta in deltas if delta.content] == ["One", " \n\n two"]


def test_call_is_sent_when_complete() -> None:
    deltas = parse_by_token("qwen3", f"Look.\n{CALL}\n{CALL}<|im_end|>")
    when = [(text, [call.arguments for call in delta.tool_calls]) for text, delta in deltas if delta.tool_calls]
    assert when == [("</tool_call>", ['{"city":  "Oslo"}'])] * 2


def test_call_in_unfinished_reasoning_is_withheld_until_the_end() -> None:
    """A later end-of-reasoning token would make the call part of the reasoning."""
    deltas = parse_by_token("qwen3", f"<think>\nI could\n{CALL}")
    assert not any(delta.tool_calls for _, delta in deltas[:-1])
    assert len(deltas[-1][1].tool_calls) == 1
    assert not any(
        delta.tool_calls for _, delta in parse_by_token("qwen3", f"<think>\nI could\n{CALL}\nor not</think>No.")
    )


def test_possible_bare_json_call_is_withheld_until_the_end() -> None:
    call = '{"name": "weather", "parameters": {"city": "Oslo"}}'
    deltas = parse_by_token("llama-3", call, "llama-3")
    assert not any(delta.content or delta.tool_calls for _, delta in deltas[:-1])
    assert [call.arguments for call in deltas[-1][1].tool_calls] == ['{"city": "Oslo"}']
    text_first = parse_by_token("llama-3", f"Like {call}", "llama-3")
    assert "".join(delta.content for _, delta in text_first[:-1]) == f"Like {call}"


def test_reasoning_started_by_the_prompt_is_sent_as_reasoning(tmp_path) -> None:
    family = open_family("qwen3")
    prompt = family.tokenizer.encode("<|im_start|>assistant\n<think>\n")
    parser = family.new_reply_parser(ints(prompt), TOOLS)
    assert parser.feed(ints(family.tokenizer.encode("Hm"))).reasoning == "Hm"
    parser.feed(ints(family.tokenizer.encode("\n</think>\n\n")))
    assert parser.feed(ints(family.tokenizer.encode("So."))).content == "So."


def test_possible_text_markers_are_held_back() -> None:
    """In this vocabulary `</think>` is several tokens."""
    family = open_template("llama-3", None)
    assert "</think>" in family.text_markers
    tail = family.render([Message("user", "Hi.")], (), None)
    parser = family.new_reply_parser(tail, ())
    deltas = [parser.feed(ints([at])) for at in family.tokenizer.encode("<think>1 < 2 </b> so</think> Yes")]
    last, message = parser.finish()
    assert (message.reasoning, message.content) == ("1 < 2 </b> so", "Yes")
    assert "".join(delta.reasoning for delta in deltas) == "1 < 2 </b> so"
    assert "".join(delta.content for delta in deltas) == "Yes"
    assert not last.content


def test_reply_of_only_markers_costs_no_more_than_its_skeleton() -> None:
    family = open_family("qwen3")
    tail = family.render([Message("user", "Hi.")], TOOLS, None)
    begin, end = (family.tokenizer.convert_tokens_to_ids(mark) for mark in ("<tool_call>", "</tool_call>"))
    sampled = [begin, end] * 3 * MAX_MARKERS
    parser = family.new_reply_parser(tail, TOOLS)
    parsed = 0
    parse = family.parse_ids

    def count_parsed(*arguments):
        nonlocal parsed
        parsed += len(arguments[1])
        return parse(*arguments)

    family.parse_ids = count_parsed  # type: ignore[method-assign]
    try:
        for at in sampled:
            parser.feed(ints([at]))
        parsed_while_streaming = parsed
        _, message = parser.finish()
    finally:
        family.parse_ids = parse  # type: ignore[method-assign]
    assert message == family.parse(tail, ints(sampled), TOOLS)
    assert parsed_while_streaming < 2 * PLAN_BUDGET


def test_stream_plan_is_cached_per_skeleton() -> None:
    family = open_family("qwen3")
    tails = [family.render([Message("user", text)], TOOLS, None) for text in ("Hi.", "Another question. " * 50)]
    ids = ints(family.tokenizer.encode("<think>\nOne two three\n</think>\n\nFour"))
    family.new_reply_parser(tails[0], TOOLS).feed(ids)
    before = len(family._plan_cache)
    family.new_reply_parser(tails[1][-1024:], TOOLS).feed(ids)
    assert len(family._plan_cache) == before > 0


def test_sent_deltas_win_over_the_parsed_message_and_are_counted() -> None:
    """A special token splits a character; the family's parser drops the token and joins the halves."""
    family = open_family("qwen3")
    tail = family.render([Message("user", "Hi.")], TOOLS, None)
    byte_ids = {piece: at for at, piece in enumerate(family.tokenizer.token_bytes) if len(piece) == 1}
    think, end_think = (family.tokenizer.convert_tokens_to_ids(mark) for mark in ("<think>", "</think>"))
    sampled = [think, byte_ids[b"\xc3"], think, byte_ids[b"\xa9"], end_think, *family.tokenizer.encode("So.")]
    before = family.disagreements
    parser = family.new_reply_parser(tail, TOOLS)
    deltas = [parser.feed(ints([at])) for at in sampled]
    last, message = parser.finish()
    assert family.parse(tail, ints(sampled), TOOLS).reasoning == "é"
    assert (
        message.reasoning
        == "".join(delta.reasoning for delta in [*deltas, last])
        == "\N{REPLACEMENT CHARACTER}" * 2
    )
    assert message.content == "".join(delta.content for delta in [*deltas, last])
    assert family.disagreements == before + 1
