"""Reading an answer while it is sampled."""

import pytest

from rookery.core import Message
from rookery.gateway.chat_renderers.reply_skeleton import MAX_MARKERS, PLAN_BUDGET
from rookery.upstreams.protocol import Delta
from tests.gateway.chat_renderers.support import TOOLS, ints, rendering, templated

pytestmark = pytest.mark.needs("tokenizers")

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city":  "Oslo"}}\n</tool_call>'


def pieces(name: str, text: str, tokenizer: str = "qwen3", **options: object) -> list[tuple[str, Delta]]:
    """What each token of a text made the reader tell."""
    family = rendering(name, tokenizer, **options)
    tail = family.render([Message("user", "Hi.")], TOOLS, None)
    reader = family.new_reply_parser(tail, TOOLS)
    ids = family.tokenizer.encode(text)
    found = [(family.tokenizer.decode([at]), reader.feed(ints([at]), b"\0\0\0\0")) for at in ids]
    last, message = reader.finish()
    assert message == family.parse(tail, ints(ids), TOOLS)
    return [*found, ("", last)]


def test_text_is_sent_with_its_token() -> None:
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


def test_incomplete_character_is_never_sent() -> None:
    family = rendering("qwen3")
    tail = family.render([Message("user", "Hi.")], TOOLS, None)
    reader = family.new_reply_parser(tail, TOOLS)
    letters = {piece: at for at, piece in enumerate(family.tokenizer.token_bytes) if len(piece) == 1}
    told = [reader.feed(ints([letters[bytes([byte])]])).content for byte in "é🙂!".encode()]
    assert told == ["", "é", "", "", "", "🙂", "!"]
    reader.feed(ints([letters[b"\xf0"], letters[b"\x9f"]]))
    last, message = reader.finish()
    assert last.content == "\N{REPLACEMENT CHARACTER}"
    assert message.content == "é🙂!\N{REPLACEMENT CHARACTER}"


def test_white_space_is_sent_once_text_follows() -> None:
    told = pieces("qwen3", "\n\nOne \n\n two \n")
    assert [delta.content for _, delta in told if delta.content] == ["One", " \n\n two"]


def test_call_is_sent_when_complete() -> None:
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


def test_possible_bare_json_call_is_withheld_until_the_end() -> None:
    call = '{"name": "weather", "parameters": {"city": "Oslo"}}'
    told = pieces("llama-3", call, "llama-3")
    assert not any(delta.content or delta.tool_calls for _, delta in told[:-1])
    assert [call.arguments for call in told[-1][1].tool_calls] == ['{"city": "Oslo"}']
    convert_messages = pieces("llama-3", f"Like {call}", "llama-3")
    assert "".join(delta.content for _, delta in convert_messages[:-1]) == f"Like {call}"


def test_reasoning_started_by_the_prompt_is_sent_as_reasoning(tmp_path) -> None:
    family = rendering("qwen3")
    begun = family.tokenizer.encode("<|im_start|>assistant\n<think>\n")
    reader = family.new_reply_parser(ints(begun), TOOLS)
    assert reader.feed(ints(family.tokenizer.encode("Hm"))).reasoning == "Hm"
    reader.feed(ints(family.tokenizer.encode("\n</think>\n\n")))
    assert reader.feed(ints(family.tokenizer.encode("So."))).content == "So."


def test_possible_text_markers_are_held_back() -> None:
    """In this vocabulary `</think>` is several tokens."""
    family = templated("llama-3", None)
    assert "</think>" in family.text_markers
    tail = family.render([Message("user", "Hi.")], (), None)
    reader = family.new_reply_parser(tail, ())
    told = [reader.feed(ints([at])) for at in family.tokenizer.encode("<think>1 < 2 </b> so</think> Yes")]
    last, message = reader.finish()
    assert (message.reasoning, message.content) == ("1 < 2 </b> so", "Yes")
    assert "".join(delta.reasoning for delta in told) == "1 < 2 </b> so"
    assert "".join(delta.content for delta in told) == "Yes"
    assert not last.content


def test_reply_of_only_markers_costs_no_more_than_its_skeleton() -> None:
    family = rendering("qwen3")
    tail = family.render([Message("user", "Hi.")], TOOLS, None)
    begin, end = (family.tokenizer.convert_tokens_to_ids(mark) for mark in ("<tool_call>", "</tool_call>"))
    sampled = [begin, end] * 3 * MAX_MARKERS
    reader = family.new_reply_parser(tail, TOOLS)
    asked = 0
    parse = family.parse_ids

    def counted(*arguments):
        nonlocal asked
        asked += len(arguments[1])
        return parse(*arguments)

    family.parse_ids = counted  # type: ignore[method-assign]
    try:
        for at in sampled:
            reader.feed(ints([at]))
        most = asked
        _, message = reader.finish()
    finally:
        family.parse_ids = parse  # type: ignore[method-assign]
    assert message == family.parse(tail, ints(sampled), TOOLS)
    assert most < 2 * PLAN_BUDGET


def test_stream_plan_is_cached_per_skeleton() -> None:
    family = rendering("qwen3")
    tails = [family.render([Message("user", text)], TOOLS, None) for text in ("Hi.", "Another question. " * 50)]
    ids = ints(family.tokenizer.encode("<think>\nOne two three\n</think>\n\nFour"))
    family.new_reply_parser(tails[0], TOOLS).feed(ids)
    before = len(family._plan_cache)
    family.new_reply_parser(tails[1][-1024:], TOOLS).feed(ids)
    assert len(family._plan_cache) == before > 0


def test_sent_deltas_win_over_the_parsed_message_and_are_counted() -> None:
    """Half a character before a mark and half after it: the family's parser takes the mark out and joins them."""
    family = rendering("qwen3")
    tail = family.render([Message("user", "Hi.")], TOOLS, None)
    letters = {piece: at for at, piece in enumerate(family.tokenizer.token_bytes) if len(piece) == 1}
    think, done = (family.tokenizer.convert_tokens_to_ids(mark) for mark in ("<think>", "</think>"))
    sampled = [think, letters[b"\xc3"], think, letters[b"\xa9"], done, *family.tokenizer.encode("So.")]
    before = family.disagreements
    reader = family.new_reply_parser(tail, TOOLS)
    told = [reader.feed(ints([at])) for at in sampled]
    last, message = reader.finish()
    assert family.parse(tail, ints(sampled), TOOLS).reasoning == "é"
    assert (
        message.reasoning == "".join(delta.reasoning for delta in [*told, last]) == "\N{REPLACEMENT CHARACTER}" * 2
    )
    assert message.content == "".join(delta.content for delta in [*told, last])
    assert family.disagreements == before + 1
