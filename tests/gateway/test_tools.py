"""The tools of a call are parsed once, compared by meaning, and tools of unknown types are ignored."""

import re
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
from tests.gateway.scripted_upstream import ANY_SPEED


def raw(*items: Any) -> bytes:
    return msgspec.json.encode(items)


LOOK = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}},
}


def test_tool_is_parsed_and_keeps_its_raw_json() -> None:
    written = b'[{ "type":"function", "function": {"name":"look", "strict": true}, "cache_control": {} }]'
    parsed = parse_chat_tools(written)
    assert parsed.schemas == (ToolSchema("look", "", {}),)
    assert [bytes(one) for one in parsed.raw] == [written[1:-1]]
    body = encode_request(ModelRequest(messages=(Message("user", "hi"),), tools=parsed))
    assert b'"tools":' + written in body


def test_equal_tools_are_parsed_once() -> None:
    data = raw(LOOK)
    assert parse_chat_tools(data) is parse_chat_tools(bytes(bytearray(data)))
    large = raw({**LOOK, "more": "x" * tools.MAX_CACHED_BYTES})
    assert parse_chat_tools(large) is not parse_chat_tools(large), "very large tools are not cached"
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
def test_tools_of_other_types_are_ignored(others: list[Any]) -> None:
    assert parse_chat_tools(raw(*others)) == NO_TOOLS
    parsed = parse_chat_tools(raw(*others, LOOK, *others))
    assert parsed.schemas == (ToolSchema("look", "Looks.", {"type": "object"}),)
    assert len(parsed.raw) == 1


def test_scope_of_tools_ignores_key_order_and_spacing() -> None:
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
    ("data", "index"),
    [
        (b"5", None),
        (b'{"a": 1}', None),
        (b"[5]", 0),
        (b'[{"type": "function"}]', 0),
        (b'[{"type": "function", "function": null}]', 0),
        (b'[{"type": "function", "function": {"name": ""}}]', 0),
        (b'[{"type": "web_search"}, {"function": {"name": 5}}]', 1),
        (b'[{"function": {"name": "x", "parameters": []}}]', 0),
        (b'[{"function": ' + b"[" * 100_000, None),
    ],
)
def test_invalid_tool_error_names_its_index(data: bytes, index: int | None) -> None:
    with pytest.raises(ToolsError) as caught:
        parse_chat_tools(data)
    if index is not None:
        assert re.search(rf"\b{index}\b", str(caught.value))
