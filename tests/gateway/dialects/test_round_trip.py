"""A conversation means the same in every dialect, however a client encodes it."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.core import Message, ToolCall, Turn
from rookery.gateway.dialects import load_dialects
from rookery.gateway.dialects.messages import MessagesDialect
from rookery.gateway.dialects.protocol import BadRequestError, ClientRequest
from rookery.gateway.dialects.responses import ResponsesDialect
from rookery.gateway.tools import ArgumentRestorer, ToolsError, equal_in_javascript
from rookery.trajectories import get_message_key
from rookery.upstreams.protocol import ModelReply
from tests.gateway.scripted_upstream import ANY_SPEED

MESSAGES, RESPONSES = MessagesDialect(), ResponsesDialect()
words = st.text('ab"\\\n\u2028é😀{}~_', min_size=1, max_size=6)
arguments = st.sampled_from(
    [
        "{}",
        "",
        '{"a": 1.50,  "b": ["é", null]}',
        '{"a":',
        "[1]",
        '"x"',
        '{"a":1,"a":2}',
        '{"input": "x"}',
        '{"input": 5}',
    ]
)
calls = st.lists(st.tuples(st.sampled_from(["look", "patch", "ns__find"]), arguments), max_size=3)


@st.composite
def conversations(draw: Any) -> tuple[Message, ...]:
    """Generate conversations in which every tool call has a result before the next message."""
    messages: list[Message] = []
    if draw(st.booleans()):
        messages.append(Message("system", draw(words)))
    number = 0
    for _ in range(draw(st.integers(1, 3))):
        messages.append(Message("user", draw(words)))
        for requested in draw(st.lists(calls, max_size=2)):
            tool_calls = tuple(
                ToolCall(f"call_{number + at}", name, arguments_text)
                for at, (name, arguments_text) in enumerate(requested)
            )
            number += len(tool_calls)
            text = draw(st.one_of(st.just(""), words))
            thought = draw(st.none() | words)
            messages.append(
                Message("assistant", text if text or not tool_calls else None, tool_calls, reasoning=thought)
            )
            messages += [Message("tool", draw(words), tool_call_id=call.id) for call in tool_calls]
            if not tool_calls:
                break
        if messages[-1].role == "tool":
            messages.append(Message("assistant", draw(words)))
        if messages[-1].role == "user":
            break
    if messages[-1].role == "assistant":
        messages.append(Message("user", draw(words)))
    return tuple(messages)


def reply(message: Message) -> ModelReply:
    return ModelReply(message=message, finish="stop", recorded_turn=Turn(attempt="x", index=0, response=message))


def with_cache_hint(draw: Callable[[Any], Any], block: dict[str, Any]) -> dict[str, Any]:
    return {**block, "cache_control": {"type": "ephemeral"}} if draw(st.booleans()) else block


def as_anthropic(draw: Any, messages: tuple[Message, ...]) -> dict[str, Any]:
    """Build the request of a client that keeps its history in Anthropic's format."""
    body: dict[str, Any] = {"messages": [], "stream": draw(st.booleans())}
    request = ClientRequest(dialect_data=True)
    for message in messages:
        if message.role == "system":
            block = with_cache_hint(draw, {"type": "text", "text": message.text})
            body["system"] = draw(st.sampled_from([message.text, [block]]))
            continue
        if message.role == "assistant":
            response = msgspec.json.decode(MESSAGES.format_response(request, [reply(message)]))
            body["messages"].append({"role": "assistant", "content": response["content"]})
            continue
        block = {"type": "text", "text": message.text}
        if message.role == "tool":
            inner = draw(st.sampled_from([message.text, [{"type": "text", "text": message.text}]]))
            block = {"type": "tool_result", "tool_use_id": message.tool_call_id, "content": inner}
        last = body["messages"][-1] if body["messages"] else None
        if last is not None and last["role"] == "user" and draw(st.booleans()):
            last["content"].append(with_cache_hint(draw, block))
        else:
            body["messages"].append({"role": "user", "content": [with_cache_hint(draw, block)]})
    return body


TOOLS = [
    {"type": "function", "name": "look"},
    {"type": "custom", "name": "patch"},
    {"type": "namespace", "name": "ns", "description": "", "tools": [{"type": "function", "name": "find"}]},
]


def as_openai(draw: Any, messages: tuple[Message, ...]) -> dict[str, Any]:
    """Build the request of a client that keeps its history as items of the responses API."""
    body: dict[str, Any] = {"input": [], "tools": TOOLS, "stream": draw(st.booleans())}
    ids, sealed = draw(st.booleans()), draw(st.booleans())
    include = ["reasoning.encrypted_content"] if sealed else []
    request = RESPONSES.parse_request(msgspec.json.encode({"input": "x", "tools": TOOLS, "include": include}))
    custom: set[str] = set()
    for at, message in enumerate(messages):
        if message.role == "system":
            body["instructions"] = message.text
        elif message.role == "assistant":
            named = msgspec.structs.replace(request, id=f"{at:024x}")
            for item in msgspec.json.decode(RESPONSES.format_response(named, [reply(message)]))["output"]:
                if not ids:
                    del item["id"], item["status"]
                if sealed and item["type"] == "reasoning":
                    del item["content"]
                if item["type"] == "custom_tool_call":
                    custom.add(item["call_id"])
                body["input"].append(item)
        elif message.role == "tool":
            called = str(message.tool_call_id)
            kind = "custom_tool_call" if {called, called + "~"} & custom else "function_call"
            called = called + "~" if called + "~" in custom else called
            body["input"].append({"type": f"{kind}_output", "call_id": called, "output": message.text})
        else:
            part = [{"type": "input_text", "text": message.text}]
            content = draw(st.sampled_from([message.text, part]))
            body["input"].append({"role": "user", "content": content})
    return body


def encode_randomly(draw: Any, body: dict[str, Any]) -> bytes:
    return json.dumps(body, indent=draw(st.sampled_from([None, 1])), ensure_ascii=draw(st.booleans())).encode()


@settings(ANY_SPEED, max_examples=100)
@given(st.data(), conversations(), st.sampled_from(["messages", "responses"]))
def test_conversation_round_trips_through_the_dialect(
    data: st.DataObject, conversation: tuple[Message, ...], name: str
) -> None:
    write = as_anthropic if name == "messages" else as_openai
    parsed = (
        load_dialects()[name].parse_request(encode_randomly(data.draw, write(data.draw, conversation))).messages
    )
    assert all(isinstance(message, Message) for message in parsed)
    assert [get_message_key(message) for message in parsed if isinstance(message, Message)] == [
        get_message_key(one) for one in conversation
    ]
    assert [one.reasoning for one in parsed if isinstance(one, Message)] == [one.reasoning for one in conversation]


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ("a a", ["a", "a"]),  # two replies, because there is no call between them
        ("r a r a", ["ra", "ra"]),
        ("r r a", ["rra"]),
        ("a c a", ["aac"]),  # text between the calls of one reply
        ("r c c a", ["racc"]),
        ("a c o a c", ["ac", "o", "ac"]),
        ("c r a", ["c", "ra"]),
    ],
)
def test_items_without_ids_are_joined_into_one_reply_where_possible(items: str, expected: list[str]) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "a": {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        "r": {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        "c": {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        "o": {"type": "function_call_output", "call_id": "1", "output": "o"},
    }
    parsed = RESPONSES.parse_request(
        msgspec.json.encode({"input": [kinds[one] for one in items.split()]})
    ).messages
    contents = [
        (one.reasoning or "") + one.text + "c" * len(one.tool_calls) for one in parsed if isinstance(one, Message)
    ]
    assert contents == expected


def test_items_with_ids_are_joined_by_their_ids() -> None:
    def item(kind: str, stem: str) -> dict[str, Any]:
        return {**kinds[kind], "id": f"{kind}_{stem}_0"}

    kinds: dict[str, dict[str, Any]] = {
        "msg": {"type": "message", "role": "assistant", "content": "a"},
        "rs": {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r"}]},
        "fc": {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    }
    items = [item("msg", "1"), item("rs", "1"), item("msg", "1"), item("fc", "2"), item("msg", "3")]
    parsed = RESPONSES.parse_request(msgspec.json.encode({"input": items})).messages
    assert [(one.text, one.reasoning, len(one.tool_calls)) for one in parsed if isinstance(one, Message)] == [
        ("aa", "r", 0),
        ("", None, 1),
        ("a", None, 0),
    ]


json_values = st.recursive(
    st.sampled_from([None, 0, -1, 2.5, "", "x", True, 2**70]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "messages",
                    "input",
                    "role",
                    "user",
                    "content",
                    "type",
                    "text",
                    "tool_result",
                    "tools",
                    "name",
                    "id",
                    "system",
                    "prompt",
                    "tool_use",
                    "function_call",
                    "call_id",
                    "output",
                    "reasoning",
                    "instructions",
                    "tool_choice",
                    "source",
                    "thinking",
                    "arguments",
                    "message",
                    "assistant",
                    "image",
                ]
            ),
            inner
            | st.sampled_from(["user", "assistant", "message", "text", "tool_use", "tool_result", "reasoning"]),
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(ANY_SPEED, max_examples=150)
@given(
    st.sampled_from(["completions", "messages", "responses"]), st.binary(max_size=20) | json_values.map(json.dumps)
)
def test_any_body_is_parsed_or_raises_a_typed_error(name: str, body: bytes | str) -> None:
    parsed: ClientRequest | str
    try:
        parsed = load_dialects()[name].parse_request(body.encode() if isinstance(body, str) else body)
    except (BadRequestError, ToolsError) as error:
        parsed = str(error)
    assert parsed


@pytest.mark.long
@settings(ANY_SPEED, max_examples=150)
@given(
    st.sampled_from(["messages", "input"]),
    st.lists(
        json_values
        | st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": json_values})
    ),
)
def test_any_message_is_parsed_or_raises_bad_request(field: str, messages: list[Any]) -> None:
    name = "messages" if field == "messages" else "responses"
    parsed: object
    try:
        parsed = load_dialects()[name].parse_request(json.dumps({field: messages}).encode()).messages
    except BadRequestError as error:
        parsed = str(error)
    assert parsed


# ---- entry points and errors


def test_every_dialect_has_an_entry_point_and_unique_paths() -> None:
    parsed = load_dialects()
    assert {"chat", "completions", "messages", "responses"} <= set(parsed)
    assert [name for name, dialect in parsed.items() if dialect.name != name] == []
    paths = [path for dialect in parsed.values() for path in dialect.paths]
    assert len(set(paths)) == len(paths)


@pytest.mark.parametrize(
    ("problem", "retried"),
    [
        *((name, False) for name in ("bad_request", "unauthorized", "gone", "truncated", "context", "too_large")),
        *((name, True) for name in ("unavailable", "timeout", "upstream", "internal")),
    ],
)
@pytest.mark.parametrize("name", ["completions", "messages", "responses"])
def test_error_has_the_providers_format_and_a_retryable_status_only_if_a_retry_helps(
    name: str, problem: Any, retried: bool
) -> None:
    status, body = load_dialects()[name].format_error(problem, "the reason", "messages")
    parsed = msgspec.json.decode(body)
    assert (status >= 500) == retried
    assert status not in (408, 409, 429)
    assert "the reason" in parsed["error"]["message"]
    if name == "messages":
        assert (set(parsed), set(parsed["error"])) == ({"type", "error"}, {"type", "message"})
        assert parsed["type"] == "error"
    else:
        assert set(parsed["error"]) == {"message", "type", "param", "code"}


# ---- numbers re-encoded by JavaScript


def javascript(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) > 2**53:
        return int(
            f"{float(value):.17g}".split("e")[0].replace(".", "").ljust(len(str(value)), "0")[: len(str(value))]
        )
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 1e21 else value
    if isinstance(value, dict):
        return {name: javascript(inner) for name, inner in value.items()}
    return [javascript(inner) for inner in value] if isinstance(value, list) else value


numbers = st.recursive(
    st.sampled_from([0, 1, 1.0, -0.0, 2.5, 1e20, 1e21, True, "1.0", None])
    | st.integers(-(2**53), 2**53)
    | st.floats(-1e9, 1e9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2),
    max_leaves=6,
)


@settings(ANY_SPEED)
@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), numbers, max_size=3), numbers)
def test_arguments_re_encoded_by_javascript_are_restored(sampled_arguments: dict[str, Any], other: Any) -> None:
    sampled, back = json.dumps(sampled_arguments, indent=1), json.dumps(javascript(sampled_arguments))
    assert equal_in_javascript(sampled, back)
    respelled = ArgumentRestorer()
    call = ToolCall("c", "f", sampled)
    respelled.add_turn(Turn(attempt="x", index=0, response=Message("assistant", None, (call,))))
    restored = respelled.restore(Message("assistant", None, (ToolCall("c", "f", back),)))
    assert get_message_key(restored) == get_message_key(Message("assistant", None, (call,)))
    edited = ToolCall("c", "f", json.dumps({**sampled_arguments, "d": other}))
    assert respelled.restore(Message("assistant", None, (edited,))).tool_calls == (edited,)
    elsewhere = ToolCall("another", "f", back)
    assert respelled.restore(Message("assistant", None, (elsewhere,))).tool_calls == (elsewhere,)
