"""The wire format: messages keep their meaning, and replies are parsed or refused."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.core import Message, Sampling, ToolCall, ToolSchema, floats, ints
from rookery.upstreams.error_replies import ServerError, find_refused_field, is_context_full, parse_error
from rookery.upstreams.format import ReplyContext, ReplyFormatError, WireOptions
from rookery.upstreams.openai_format import decode_reply, encode_request, parse_message
from rookery.upstreams.protocol import ModelRequest, ToolSet
from tests.servers import Answer

text = st.text(max_size=30)
calls = st.builds(ToolCall, text.filter(bool), text, text)
parts = st.builds(lambda t: {"type": "text", "text": t}, text)
messages = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool", "developer"]),
    content=st.none() | text | st.lists(parts, max_size=3).map(tuple),
    tool_calls=st.lists(calls, max_size=3).map(tuple),
    tool_call_id=st.none() | text,
    name=st.none() | text,
    reasoning=st.none() | text,
)


def sent(request: ModelRequest, **more: object) -> dict:
    return json.loads(encode_request(msgspec.structs.replace(request, model="m"), WireOptions(**more)))


def body(**fields: object) -> bytes:
    return json.dumps(Answer(**fields).completion(chat=True)).encode()


@given(messages)
def test_message_is_written_in_the_servers_format(message):
    (written,) = sent(ModelRequest(model="m", messages=(message,)), resend_reasoning=True)["messages"]
    assert written.pop("role") == message.role
    content = written.pop("content")
    expected = list(message.content) if isinstance(message.content, tuple) else message.content
    assert content == (expected if expected is not None or message.tool_calls else "")
    assert written.pop("tool_calls", []) == [
        {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
        for c in message.tool_calls
    ]
    assert written.pop("tool_call_id", None) == message.tool_call_id
    assert written.pop("name", None) == message.name
    assert written.pop("reasoning_content", None) == message.reasoning
    assert written == {}


@given(messages)
def test_message_survives_a_round_trip(message):
    (written,) = sent(ModelRequest(model="m", messages=(message,)), resend_reasoning=True)["messages"]
    answer = {"choices": [{"message": written, "finish_reason": "stop"}]}
    back = decode_reply(json.dumps(answer).encode()).message
    assert back.tool_calls == message.tool_calls
    assert back.reasoning == message.reasoning
    assert back.text == message.text


def test_reasoning_is_not_resent_unless_configured():
    message = Message("assistant", "x", reasoning="hm")
    request = ModelRequest(model="m", messages=(message,))
    assert sent(request)["messages"] == [{"role": "assistant", "content": "x"}]
    assert sent(request, resend_reasoning=True)["messages"][0]["reasoning_content"] == "hm"


def test_unset_fields_are_not_sent():
    request = ModelRequest(model="m", messages=(Message("user", "hi"),), want_tokens=False)
    assert sent(request) == {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def test_sampling_tools_and_extras_are_sent():
    schema = ToolSchema("add", "adds", {"type": "object"})
    sampling = Sampling(
        temperature=0.5, top_p=0.9, top_k=5, max_tokens=7, stop=("x",), seed=3, extra={"min_p": 0.1}
    )
    request = ModelRequest(
        model="m",
        messages=(Message("user", "hi"),),
        tools=ToolSet((schema,)),
        tool_choice="add",
        sampling=sampling,
    )
    written = sent(request)
    written.pop("messages")
    function = {"name": "add", "description": "adds", "parameters": {"type": "object"}}
    assert written == {
        "model": "m",
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "max_tokens": 7,
        "stop": ["x"],
        "seed": 3,
        "min_p": 0.1,
        "logprobs": True,
        "return_token_ids": True,
    }
    less = sent(request, omit=frozenset({"logprobs", "return_token_ids", "max_tokens"}))
    assert "logprobs" not in less
    assert "return_token_ids" not in less
    assert (less.get("max_tokens"), less["max_completion_tokens"]) == (None, 7)


def test_token_ids_go_in_as_a_list():
    written = sent(ModelRequest(model="m", tokens=ints([1, 2, 300_000])))
    assert written["prompt"] == [1, 2, 300_000]
    assert "messages" not in written


def test_token_data_comes_back_exactly():
    reply = decode_reply(body(text="hi", ids=[5, 6], logprobs=[-0.5, -0.25], prompt_ids=[1, 2, 3]))
    assert (reply.sampled, reply.logprobs, reply.prompt) == (ints([5, 6]), floats([-0.5, -0.25]), ints([1, 2, 3]))
    assert (reply.prompt_tokens, reply.sampled_tokens) == (3, 2)


@pytest.mark.parametrize(("ids", "logprobs"), [([1, 2], [-1.0]), ([1], [-1.0, -2.0]), ([1], []), ([], [-1.0])])
def test_ids_and_logprobs_of_different_length_are_refused(ids, logprobs):
    with pytest.raises(ReplyFormatError):
        decode_reply(body(ids=ids, logprobs=logprobs))


def test_logprobs_without_ids_are_not_token_data():
    reply = decode_reply(body(logprobs=[-1.0], prompt_ids=[1, 2]))
    assert (reply.prompt, reply.sampled, reply.logprobs) == (b"", b"", b"")
    assert reply.prompt_tokens == 2


def test_ids_without_logprobs_are_kept():
    reply = decode_reply(body(ids=[1, 2]))
    assert (reply.sampled, reply.logprobs) == (ints([1, 2]), b"")


def test_token_data_that_was_not_requested_is_excluded():
    reply = decode_reply(body(ids=[1], logprobs=[-1.0], prompt_ids=[1]), want_tokens=False)
    assert (reply.prompt, reply.sampled, reply.logprobs) == (b"", b"", b"")


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ("stop", "stop"),
        ("length", "length"),
        ("tool_calls", "tool_calls"),
        ("function_call", "tool_calls"),
        ("content_filter", "content_filter"),
        ("abort", "abort"),
    ],
)
def test_every_finish_reason_has_its_meaning(reason, finish):
    assert decode_reply(body(finish=reason)).finish == finish


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"<html>busy</html>",
        b'{"choices": []}',
        b'{"choices": null}',
        b"{}",
        b'{"choices": [{"finish_reason": "stop"}]}',
        b'{"choices": [{"finish_reason": null, "message": {"content": "x"}}]}',
        b'{"choices": [{"message": {"content": "x"}}]}',
        b'{"choices": [{"finish_reason": "why", "message": {"content": "x"}}]}',
        b'{"choices": [{"finish_reason": "stop", "message": {"content": 3}}]}',
        b'{"choices": [{"finish_reason": "stop", "message": {"content": "x"}, "token_ids": [-1]}]}',
        b'{"choices": [{"finish_reason": "stop", "message": {"content": "x"}, "token_ids": [4294967296]}]}',
        b'{"choices": [{"finish_reason": "stop", "message": {"content": "\xff"}}]}',
        b'{"choices": [{"finish_reason": "stop", "message": {"content": "x"}}',
        b'{"error": {"message": "engine is dead"}}',
        b"[" * 100_000,
        b'{"x":' * 100_000,
        body(ids=[1], logprobs=[1e300]),
    ],
    ids=range(20),
)
def test_reply_that_cannot_be_parsed_is_refused(data):
    with pytest.raises(ReplyFormatError) as caught:
        decode_reply(data)
    assert len(str(caught.value)) < 1_000


def test_unusual_complete_replies_are_parsed():
    calls = [{"id": None, "function": {"name": "f", "arguments": {"a": 1}}}, {"function": None}]
    answer = {"choices": [{"message": {"content": None, "tool_calls": calls}, "finish_reason": "tool_calls"}]}
    message = decode_reply(json.dumps(answer).encode()).message
    assert message.tool_calls == (ToolCall("call_0", "f", '{"a":1}'), ToolCall("call_1", "", "{}"))
    answer = {"choices": [{"message": {"function_call": {"name": "g"}}, "finish_reason": "function_call"}]}
    assert decode_reply(json.dumps(answer).encode()).message.tool_calls == (ToolCall("call_0", "g", "{}"),)
    answer = {"choices": [{"message": {"refusal": "no"}, "finish_reason": "stop"}]}
    assert decode_reply(json.dumps(answer).encode()).message.text == "no"


@pytest.mark.parametrize(
    ("extra", "version"),
    [
        ({"weight_version": 7}, 7),
        ({"weight_version": "12"}, 12),
        ({"metadata": {"weight_version": "3"}}, 3),
        ({"weight_version": "default"}, 2),
        ({"weight_version": True}, 2),
        ({}, 2),
    ],
)
def test_version_reported_by_the_server_wins(extra, version):
    assert decode_reply(body(extra=extra), context=ReplyContext(version=2)).version == version


@given(st.binary(max_size=200))
def test_any_bytes_are_parsed_or_refused(data):
    parse_error(data)
    with pytest.raises(ReplyFormatError):
        decode_reply(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["error", "message", "detail", "code", "choices", "finish_reason", "usage", "text"]),
            inner,
        )
    ),
    max_leaves=8,
)


@given(JSON)
def test_any_json_is_parsed_or_refused(value):
    data = json.dumps(value).encode()
    error = parse_error(data)
    assert len(error.text) <= 500
    is_context_full(error, 5)
    try:
        decode_reply(data)
    except ReplyFormatError:
        return


@pytest.mark.parametrize(
    "data",
    [
        b'{"error": {"message": "no such thing", "code": "x"}}',
        b'{"error": "no such thing"}',
        b'{"object": "error", "message": "no such thing", "code": 400}',
        b'{"detail": "no such thing"}',
        b'{"detail": [{"loc": ["body", "x"], "msg": "no such thing"}]}',
        b"no such thing",
        b"<h1>no such\n\x00 thing</h1>",
    ],
)
def test_error_message_is_found_in_every_format(data):
    assert "no such thing" in parse_error(data).text


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens",
        "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
        "Requested token count exceeds the model's maximum context length of 4096 tokens.",
        "the request exceeds the available context size, try increasing it",
        "The decoder prompt (length 5000) is longer than the maximum model length of 4096.",
        "prompt is too long: 5000 tokens",
    ],
)
def test_full_context_is_recognised(message):
    assert is_context_full(ServerError(message), 100)


def test_full_context_is_recognised_by_its_code_alone():
    assert is_context_full(ServerError("too much", "context_length_exceeded"), None)
    assert not is_context_full(ServerError("bad temperature", "invalid"), None)


def test_max_tokens_as_large_as_the_context_is_not_a_full_context():
    error = ServerError("'max_tokens' is too large: 5000. This model's maximum context length is 4096 tokens")
    assert not is_context_full(error, 5000)
    assert is_context_full(error, 500)


def test_refused_field_is_found():
    data = b'{"error": {"message": "Extra inputs are not permitted: return_token_ids"}}'
    both = {"logprobs", "return_token_ids"}
    assert find_refused_field(parse_error(data), data, both) == "return_token_ids"
    assert find_refused_field(parse_error(data), data, {"logprobs"}) is None
    data = b"Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
    assert find_refused_field(parse_error(data), data, {"max_tokens"}) == "max_tokens"


@given(messages)
def test_raw_json_message_is_sent_unchanged_and_parsed(message):
    written = msgspec.json.encode(
        sent(ModelRequest(model="m", messages=(message,)), resend_reasoning=True)["messages"][0]
    )
    raw = msgspec.Raw(written)
    body = encode_request(ModelRequest(model="m", messages=(raw,)))
    assert written in body
    back = parse_message(raw)
    assert (back.role, back.tool_calls, back.text) == (message.role, message.tool_calls, message.text)
    assert (back.reasoning, back.tool_call_id, back.name) == (
        message.reasoning,
        message.tool_call_id,
        message.name,
    )
    assert parse_message(message) is message


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"{}", b'{"role": "king"}', b'{"role": "user", "content": 3}', b"\xff"]
)
def test_invalid_message_is_refused(raw):
    with pytest.raises(ValueError, match=r".") as caught:
        parse_message(msgspec.Raw(raw))
    assert type(caught.value) is ValueError
