"""The tools of a call: read once, told apart by what they mean, tolerant of kinds that are none of ours."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.core import Message, ToolSchema
from rookery.gateway import tools
from rookery.gateway.tools import NO_TOOLS, ToolsError, cached_tool_set, parse_chat_tools
from rookery.upstreams import ModelRequest
from rookery.upstreams.openai_format import encode_request
from tests.gateway.scripted import ANY_SPEED


def raw(*items: Any) -> bytes:
    return msgspec.json.encode(items)


LOOK = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}},
}


def test_a_function_is_read_and_kept_as_it_was_written() -> None:
    written = b'[{ "type":"function", "function": {"name":"look", "strict": true}, "cache_control": {} }]'
    found = parse_chat_tools(written)
    assert found.schemas == (ToolSchema("look", "", {}),)
    assert [bytes(one) for one in found.raw] == [written[1:-1]]
    body = encode_request(ModelRequest(messages=(Message("user", "hi"),), tools=found))
    assert b'"tools":' + written in body


def test_tools_that_were_seen_just_before_are_read_once() -> None:
    data = raw(LOOK)
    assert parse_chat_tools(data) is parse_chat_tools(bytes(bytearray(data)))
    large = raw({**LOOK, "more": "x" * tools.MAX_CACHED_BYTES})
    assert parse_chat_tools(large) is not parse_chat_tools(large), "what is very large is not kept"
    schemas = (ToolSchema("look", "", {}),)
    assert cached_tool_set(schemas) is cached_tool_set(schemas)
    assert cached_tool_set(()) == NO_TOOLS or cached_tool_set(()).schemas == ()


@settings(ANY_SPEED, max_examples=60)
@given(
    st.lists(
        st.fixed_dictionaries(
            {"type": st.sampled_from(["web_search", "namespace", "custom", "mcp", "computer_use_preview"])},
            optional={
                "function": st.sampled_from([None, 5, "x", {}, []]),
                "name": st.text("ab", max_size=3),
                "tools": st.just([1, 2]),
            },
        ),
        max_size=4,
    )
)
def test_kinds_that_no_model_of_ours_can_call_are_left_out_never_an_error(others: list[Any]) -> None:
    assert parse_chat_tools(raw(*others)) == NO_TOOLS
    found = parse_chat_tools(raw(*others, LOOK, *others))
    assert found.schemas == (ToolSchema("look", "Looks.", {"type": "object"}),)
    assert len(found.raw) == 1


def test_order_of_keys_and_spacing_do_not_tell_tools_apart_and_their_meaning_does() -> None:
    same = b'[{"function": {"parameters": {"type": "object"},   "description": "Looks.", "name": "look"}}]'
    assert (
        parse_chat_tools(same).scope
        == parse_chat_tools(raw(LOOK)).scope
        == cached_tool_set(parse_chat_tools(same).schemas).scope
    )
    scopes = {
        parse_chat_tools(raw(LOOK)).scope,
        parse_chat_tools(raw(LOOK, LOOK)).scope,
        parse_chat_tools(b"[]").scope,
    }
    for name, value in (("name", "see"), ("description", "Sees."), ("parameters", {"type": "object", "x": 1})):
        scopes.add(parse_chat_tools(raw({"function": {**LOOK["function"], name: value}})).scope)
    assert len(scopes) == 6


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"5", "not a list of tools"),
        (b'{"a": 1}', "not a list of tools"),
        (b"[5]", "tool 0"),
        (b'[{"type": "function"}]', "tool 0 has no function with a name"),
        (b'[{"type": "function", "function": null}]', "tool 0 has no function with a name"),
        (b'[{"type": "function", "function": {"name": ""}}]', "tool 0 has no function with a name"),
        (b'[{"type": "web_search"}, {"function": {"name": 5}}]', "tool 1: Expected `str`"),
        (b'[{"function": {"name": "x", "parameters": []}}]', "tool 0: Expected `object"),
        (b'[{"function": ' + b"[" * 100_000, "not a list of tools"),
    ],
)
def test_tools_that_cannot_be_read_are_named(data: bytes, says: str) -> None:
    with pytest.raises(ToolsError, match=says):
        parse_chat_tools(data)
