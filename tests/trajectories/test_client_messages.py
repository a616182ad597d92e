"""Tests of parsing client messages and of the equality of their keys."""

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rookery.core import Message, ToolCall
from rookery.trajectories import MessageError, get_message_key, parse_message
from tests.trajectories.message_encodings import CanonicalMessage, encodings

texts = st.text(max_size=6)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=8
)
saids = st.builds(
    CanonicalMessage,
    st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
    texts,
    st.lists(st.tuples(texts.filter(bool), texts, values.map(json.dumps)), max_size=2).map(tuple),
    st.none() | texts,
    texts,
)


def message(**fields: Any) -> Message:
    return parse_message(json.dumps({"role": "assistant", **fields}).encode())


def call(arguments: str) -> Message:
    return Message("assistant", None, (ToolCall("c", "f", arguments),))


@settings(deadline=None)
@given(st.data(), saids)
def test_every_encoding_of_a_message_parses_to_an_equal_key(
    data: st.DataObject, messages: CanonicalMessage
) -> None:
    one, other = (parse_message(data.draw(encodings(messages))) for _ in range(2))
    assert get_message_key(one) == get_message_key(other) == get_message_key(messages.message())
    assert (one.text, one.role, one.tool_call_id, one.reasoning or "") == (
        messages.text,
        messages.role,
        messages.call_id,
        messages.reasoning,
    )
    assert [json.loads(call.arguments) for call in one.tool_calls] == [
        json.loads(call[2]) for call in messages.calls
    ]


@settings(deadline=None)
@given(st.data(), saids, saids)
def test_different_messages_have_different_keys(
    data: st.DataObject, one: CanonicalMessage, other: CanonicalMessage
) -> None:
    def plain(messages: CanonicalMessage) -> Any:
        # json.dumps distinguishes 1, 1.0 and true, as keys of messages do.
        calls = [(*call[:2], json.dumps(json.loads(call[2]), sort_keys=True)) for call in messages.calls]
        return messages.role, messages.text, calls, messages.call_id

    keys = [get_message_key(parse_message(data.draw(encodings(messages)))) for messages in (one, other)]
    assert (keys[0] == keys[1]) == (plain(one) == plain(other))


@given(values, values)
@example(1, 1.0)
@example(1, True)
@example(0, False)
@example(1.0, True)
@example([], {})
@example({"a": None}, {})
@example(10**25, 10**25 + 1)
@example(2**63, float(2**63))
@example("1", 1)
def test_arguments_are_equal_exactly_if_their_json_values_are(one: Any, other: Any) -> None:
    def same(a: Any, b: Any) -> bool:
        if type(a) is not type(b):
            return False
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
        if isinstance(a, list):
            return len(a) == len(b) and all(map(same, a, b))
        return bool(a == b) and (not isinstance(a, float) or math.copysign(1, a) == math.copysign(1, b))

    keys = [get_message_key(call(json.dumps(value, indent=indent))) for value, indent in ((one, None), (other, 2))]
    assert (keys[0] == keys[1]) == same(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a":1,"a":2}', '{"a":2}'),  # parsers disagree on which duplicate counts
        ('{"a":1,"a":2}', '{"a": 1, "a": 2}'),
        ("NaN", "nan"),
        ('{"a":NaN}', '{"a": NaN}'),
        ("1e999", "1e1000"),
        ("1" * 5000, "1" * 5001),
        ('{"a":', '{"a": '),
        ("", "{}"),
        ("[" * 10_000, "[" * 10_001),
        ('"x"', "x"),
        ("1", "1.0"),
        ('{"a":true}', '{"a":1}'),
    ],
)
def test_json_that_parsers_disagree_about_is_compared_as_text(one: str, other: str) -> None:
    assert get_message_key(call(one)) == get_message_key(call(one))
    assert get_message_key(call(one)) != get_message_key(call(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"content": "x"}, {"content": [{"type": "text", "text": "x"}]}),
        ({"content": "x"}, {"content": ["x"]}),
        ({"content": None, "tool_calls": []}, {"content": ""}),
        ({"content": []}, {}),
        ({"content": None, "refusal": "no"}, {"content": "no", "refusal": None}),
        ({"content": "x", "audio": None, "annotations": [], "function_call": None}, {"content": "x"}),
        (
            {"content": [{"type": "image_url", "image_url": {"url": "u", "n": 1}, "cache_control": {}}]},
            {"content": [{"image_url": {"n": 1, "url": "u"}, "type": "image_url", "detail": None}]},
        ),
        (
            {
                "content": [
                    {"type": "tool_result", "content": [{"type": "text", "text": "x", "cache_control": {}}]}
                ]
            },
            {"content": [{"type": "tool_result", "content": [{"type": "text", "text": "x"}]}]},
        ),
        (
            {"function_call": {"name": "f", "arguments": '{"a": 1}'}},
            {"tool_calls": [{"id": "call_0", "function": {"name": "f", "arguments": {"a": 1}}}]},
        ),
        (
            {"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"a":"é", "b": 1e2}'}}]},
            {"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"b":100.0,"a":"\\u00e9"}'}}]},
        ),
    ],
)
def test_formatting_differences_are_no_edits(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert get_message_key(message(**one)) == get_message_key(message(**other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"content": "x"}, {"content": "x "}),
        ({"content": "ab"}, {"content": ["a", "b"]}),
        ({"content": "x"}, {"content": [{"type": "text", "text": "x", "more": 1}]}),
        ({"content": "x"}, {"content": "x", "role": "user"}),
        ({"content": "x"}, {"content": "x", "name": "bob"}),
        (
            {"content": [{"type": "image_url", "image_url": {"url": "u", "n": 1}}]},
            {"content": [{"type": "image_url", "image_url": {"url": "u", "n": True}}]},
        ),
        (
            {"content": [{"type": "tool_use", "input": {"cache_control": 1}}]},
            {"content": [{"type": "tool_use", "input": {}}]},
        ),
        (
            {"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
            {"tool_calls": [{"id": "d", "function": {"name": "f", "arguments": "{}"}}]},
        ),
    ],
)
def test_any_other_difference_is_an_edit(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert get_message_key(message(**one)) != get_message_key(message(**other))


def test_legacy_message_formats_are_parsed() -> None:
    custom = message(tool_calls=[{"id": "c", "type": "custom", "custom": {"name": "f", "input": "free text"}}])
    assert custom.tool_calls == (ToolCall("c", "f", "free text"),)
    answer = parse_message(b'{"role":"function","name":"f","content":"5"}')
    assert answer == Message("tool", "5", tool_call_id="call_0", name="f")
    assert parse_message(msgspec.Raw(b'{"role":"developer","content":"x"}')) == Message("developer", "x")
    assert message(reasoning={"effort": "low"}).reasoning is None
    assert message(tool_calls=[{"function": {"name": "f"}}]).tool_calls == (ToolCall("call_0", "f", "{}"),)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b'{"role":"user"',
        b'{"role":"user","content":"\xff"}',
        b'{"role":"user","content":1e999}',
        b'["role"]',
        b"3",
        b'{"content":"x"}',
        b'{"role":"robot"}',
        b'{"role":["user"]}',
        b'{"role":"user","content":3}',
        b'{"role":"user","content":[3]}',
        b'{"role":"user","name":3}',
        b'{"role":"tool","tool_call_id":3}',
        b'{"role":"assistant","tool_calls":{}}',
        b'{"role":"assistant","tool_calls":[3]}',
        b'{"role":"assistant","tool_calls":[{}]}',
        b'{"role":"assistant","tool_calls":[{"function":{}}]}',
        b'{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":3}}]}',
        b'{"role":"user","content":' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
def test_invalid_message_is_rejected_with_its_position(raw: bytes) -> None:
    with pytest.raises(MessageError) as caught:
        parse_message(raw, 7)
    assert caught.value.position == 7
    with pytest.raises(MessageError) as caught:
        parse_message(msgspec.Raw(raw))
    assert caught.value.position is None


@settings(deadline=None)
@given(
    st.binary(max_size=40)
    | values.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(
        st.sampled_from(["role", "content", "tool_calls", "function_call", "name", "tool_call_id", "refusal"]),
        values | st.just("user") | st.just([{"function": {"name": "f", "arguments": "{"}}]),
    ).map(lambda value: json.dumps(value).encode())
)
def test_any_bytes_give_a_message_or_a_message_error(raw: bytes) -> None:
    try:
        found = parse_message(raw)
    except MessageError:
        return
    assert isinstance(get_message_key(found), tuple)
    hash(get_message_key(found))


@pytest.mark.parametrize("odd", [object(), b"bytes", float("nan"), "\ud800", (1, 2)])
def test_content_parts_may_hold_any_python_object(odd: Any) -> None:
    made = Message("user", ({"type": "x", "odd": odd},))
    assert get_message_key(made) == get_message_key(Message("user", ({"odd": odd, "type": "x"},)))
    circular: dict[str, Any] = {"type": "x", "odd": odd}
    circular["self"] = circular
    mixed: dict[Any, Any] = {1: 2, "a": odd}
    for part in (circular, mixed):
        assert hash(get_message_key(Message("user", (part,)))) == hash(get_message_key(Message("user", (part,))))
