"""`ChatDialect` parses and formats OpenAI chat completions."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from rookery.core import Finish, Message, Sampling, ToolCall, Turn, floats
from rookery.gateway.dialects.chat import ChatDialect
from rookery.gateway.dialects.protocol import BadRequestError, ClientRequest
from rookery.gateway.dialects.shared import OPENAI_ERRORS, get_finish_reason
from rookery.gateway.tools import ToolsError
from rookery.upstreams.protocol import NO_TOOLS, CallDelta, Delta, ModelReply
from tests.gateway.scripted_upstream import ANY_SPEED, char_ids, to_deltas

DIALECT = ChatDialect()
HELLO = {"role": "user", "content": "hello"}


def parse(**fields: Any) -> ClientRequest:
    return DIALECT.parse_request(msgspec.json.encode({"messages": [HELLO], **fields}))


def reply(message: Message, finish: Finish = "stop", sampled: bytes = b"", **more: Any) -> ModelReply:
    n = len(sampled) // 4
    turn = Turn(
        attempt="x",
        index=0,
        response=message,
        sampled=sampled,
        logprobs=floats([-0.5] * n),
        finish=finish,
        prompt_tokens=3,
        sampled_tokens=n,
    )
    return ModelReply(
        message=message,
        finish=finish,
        sampled=sampled,
        logprobs=turn.logprobs,
        prompt_tokens=3,
        sampled_tokens=n,
        recorded_turn=turn,
        **more,
    )


# ---- requests


def test_request_keeps_the_raw_json_of_messages_and_tools() -> None:
    tool = b'{"type": "function", "function": { "name": "f"}}'
    body = b'{"messages": [{ "role":"user",  "content": "x", "odd": 1}], "tools": [ %b ]}' % tool
    parsed = DIALECT.parse_request(body)
    assert [bytes(one) for one in parsed.messages if isinstance(one, msgspec.Raw)] == [
        b'{ "role":"user",  "content": "x", "odd": 1}'
    ]
    assert [bytes(tool) for tool in parsed.tools.raw] == [tool]
    assert parse().tools is parse(tools=None).tools is NO_TOOLS


def test_null_field_equals_an_absent_field() -> None:
    names = [
        "stream", "stream_options", "tools", "functions", "tool_choice", "n", "temperature", "top_p", "top_k",
        "max_tokens", "max_completion_tokens", "stop", "seed", "logprobs", "top_logprobs", "return_token_ids",
        "frequency_penalty", "logit_bias", "response_format",
    ]  # fmt: skip
    assert parse(**dict.fromkeys(names)) == parse()


@settings(ANY_SPEED, max_examples=60)
@given(
    st.dictionaries(
        st.text("abc_", min_size=1, max_size=6).filter(lambda name: name not in SCHEMA),
        st.sampled_from([None, True, 5, "x", [], [1, [2]], {"a": {}}]),
        max_size=5,
    )
)
def test_unknown_fields_are_ignored(fields: dict[str, Any]) -> None:
    assert parse(**fields) == parse()


SCHEMA = {"messages", "model", "stream", "stream_options", "tools", "functions", "tool_choice", "n", "temperature",
          "top_p", "top_k", "max_tokens", "max_completion_tokens", "stop", "seed", "logprobs", "top_logprobs",
          "return_token_ids"}  # fmt: skip


def test_engine_sampling_options_are_forwarded_unchanged() -> None:
    body = (
        b'{"messages": [{}], "frequency_penalty": 0.50, "logit_bias": { "5": 1 }, "response_format": {"a": [1]}}'
    )
    extra = DIALECT.parse_request(body).sampling.extra
    assert {name: bytes(value) for name, value in extra.items()} == {
        "frequency_penalty": b"0.50",
        "logit_bias": b'{ "5": 1 }',
        "response_format": b'{"a": [1]}',
    }


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 5}, Sampling(max_tokens=5)),
        ({"max_tokens": 5, "max_completion_tokens": 3}, Sampling(max_tokens=3)),
        ({"stop": "x"}, Sampling(stop=("x",))),
        ({"stop": ["x", "", "y"]}, Sampling(stop=("x", "y"))),
        ({"stop": ""}, Sampling()),
        (
            {"temperature": 0, "top_p": 1, "top_k": -1, "seed": -5},
            Sampling(temperature=0, top_p=1, top_k=-1, seed=-5),
        ),
    ],
)
def test_sampling_fields_are_parsed(fields: dict[str, Any], expected: Sampling) -> None:
    assert parse(**fields).sampling == expected


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "function": {"name": "look"}}, "look"),
    ],
)
def test_tool_choice_is_parsed(choice: Any, expected: str) -> None:
    assert parse(tool_choice=choice).tool_choice == expected


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b"", None),
        (b"nonsense", None),
        (b"[]", None),
        (b"\xff\xfe", None),
        (b'{"messages": "x"}', "messages"),
        (b'{"messages": []}', "messages"),
        (b"{}", None),
        (b'{"messages": [{}], "n": 0}', "n"),
        (b'{"messages": [{}], "n": 65}', "n"),
        (b'{"messages": [{}], "temperature": -1}', "temperature"),
        (b'{"messages": [{}], "temperature": "hot"}', "temperature"),
        (b'{"messages": [{}], "top_p": 0}', "top_p"),
        (b'{"messages": [{}], "max_tokens": 0}', "max_tokens"),
        (b'{"messages": [{}], "max_tokens": 10000000000000000000000000}', "max_tokens"),
        (b'{"messages": [{}], "top_k": 10000000000000000000000000}', "top_k"),
        (b'{"messages": [{}], "seed": 10000000000000000000000000}', "seed"),
        (b'{"messages": [{}], "stop": [5]}', "stop[0]"),
        (b'{"messages": [{}], "stream": "yes"}', "stream"),
        (b'{"messages": [{}], "top_logprobs": 2}', "top_logprobs"),
        (b'{"messages": [{}], "logprobs": true, "top_logprobs": 21}', "top_logprobs"),
        (b'{"messages": [{}], "functions": [{"name": "f"}]}', "functions"),
        (b'{"messages": [{}], "tool_choice": "look"}', "tool_choice"),
        (b'{"messages": [{}], "tool_choice": {"type": "function"}}', "tool_choice"),
        (b'{"messages": [{}], "unknown": ' + b"[" * 100_000, None),
        (b'{"model": "\\ud800", "messages": [{}]}', None),
    ],
)
def test_invalid_field_raises_bad_request_that_names_it(body: bytes, where: str | None) -> None:
    with pytest.raises(BadRequestError) as caught:
        DIALECT.parse_request(body)
    assert caught.value.where == where
    assert str(caught.value)


values = st.recursive(
    st.sampled_from([None, 0, -1, 2.5, "", "x", True]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(SCHEMA)), inner, max_size=4)
    ),
    max_leaves=8,
)


@settings(ANY_SPEED, max_examples=200)
@given(st.binary(max_size=40) | values.map(msgspec.json.encode))
def test_any_body_is_parsed_or_raises_bad_request(body: bytes) -> None:
    parsed: ClientRequest | str
    try:
        parsed = DIALECT.parse_request(body)
    except (BadRequestError, ToolsError) as error:  # both are answered with status 400
        parsed = str(error)
    assert parsed


# ---- responses

words = st.text('ab"\\\n\u2028é😀{}', max_size=6)
some = words.filter(bool)
calls = st.lists(st.builds(ToolCall, some, some, words), max_size=3).map(tuple)
messages = st.builds(Message, st.just("assistant"), words, calls, reasoning=st.none() | some)
finishes: st.SearchStrategy[Finish] = st.sampled_from(["stop", "length", "tool_calls", "content_filter"])


@settings(ANY_SPEED)
@given(st.lists(st.tuples(messages, finishes), min_size=1, max_size=3), st.booleans(), st.booleans())
def test_response_validates_against_the_openai_library(
    choices: list[tuple[Message, Finish]], logprobs: bool, ids: bool
) -> None:
    request = parse(model="m", logprobs=logprobs, n=len(choices), return_token_ids=ids)
    data = DIALECT.format_response(
        request, [reply(message, finish, char_ids("ab"), prompt=char_ids("p")) for message, finish in choices]
    )
    parsed = ChatCompletion.model_validate_json(data, strict=True)
    assert (parsed.model, len(parsed.choices)) == ("m", len(choices))
    for choice, (message, finish) in zip(parsed.choices, choices, strict=True):
        assert choice.finish_reason == finish
        assert (choice.message.content or "") == message.text
        assert [
            (call.id, call.function.name, call.function.arguments)
            for call in choice.message.tool_calls or ()
            if call.type == "function"
        ] == [(call.id, call.name, call.arguments) for call in message.tool_calls]
        assert getattr(choice.message, "reasoning_content", None) == message.reasoning
        assert (choice.logprobs is not None) == logprobs
    assert parsed.usage is not None
    assert parsed.usage.total_tokens == 3 + 2 * len(choices)
    assert (msgspec.json.decode(data).get("prompt_token_ids") == [ord("p")]) == ids


def read(data: bytes) -> list[ChatCompletionChunk]:
    parts = data.split(b"\n\n")
    assert parts.pop() == b""
    assert parts[-1] == b"data: [DONE]"
    return [
        ChatCompletionChunk.model_validate_json(part.removeprefix(b"data: "), strict=True) for part in parts[:-1]
    ]


@settings(ANY_SPEED)
@given(st.lists(words, max_size=6), calls, finishes, st.booleans(), st.booleans())
def test_stream_validates_against_the_openai_library(
    texts: list[str], calls: tuple[ToolCall, ...], finish: Finish, logprobs: bool, usage: bool
) -> None:
    request = parse(stream=True, logprobs=logprobs, stream_options={"include_usage": usage})
    stream = DIALECT.open_stream(request)
    deltas = [piece for text in texts for piece in to_deltas(text, 3)]
    for at, call in enumerate(calls):
        deltas.append(Delta(tool_calls=(CallDelta(at, call.id, call.name),)))
        deltas += [Delta(tool_calls=(CallDelta(at, arguments=part),)) for part in call.arguments]
    done = reply(Message("assistant", "".join(texts), calls), finish, char_ids("".join(texts)))
    data = b"".join(stream.format_delta(0, delta) for delta in deltas)
    data += stream.format_choice_end(0, done) + stream.format_end([done])
    chunks = read(data)
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
    if usage:
        last = chunks.pop()
        assert (last.choices, last.usage is not None) == ([], True)
    assert all(chunk.usage is None for chunk in chunks)
    choices = [chunk.choices[0] for chunk in chunks]
    assert [choice.delta.role for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
    assert "".join(choice.delta.content or "" for choice in choices) == "".join(texts)
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + [finish]
    parsed: dict[int, list[str]] = {}
    for choice in choices:
        for call in choice.delta.tool_calls or ():
            assert call.function is not None
            kept = parsed.setdefault(call.index, ["", "", ""])
            kept[0] += call.id or ""
            kept[1] += call.function.name or ""
            kept[2] += call.function.arguments or ""
    assert [tuple(parsed[at]) for at in sorted(parsed)] == [(call.id, call.name, call.arguments) for call in calls]
    logprobs_sent = [
        entry.logprob for choice in choices if choice.logprobs for entry in choice.logprobs.content or ()
    ]
    assert logprobs_sent == ([-0.5] * len("".join(texts)) if logprobs else [])


def test_empty_choice_still_sends_its_role() -> None:
    stream = DIALECT.open_stream(parse(stream=True))
    done = reply(Message("assistant", ""))
    (first, last) = read(stream.format_choice_end(0, done) + stream.format_end([done]))
    assert (first.choices[0].delta.role, last.choices[0].finish_reason) == ("assistant", "stop")


def test_empty_delta_produces_no_event() -> None:
    stream = DIALECT.open_stream(parse(stream=True))
    assert stream.format_delta(0, Delta()).startswith(b"data: {")
    assert stream.format_delta(0, Delta()) == b"", "an empty delta writes nothing"
    assert stream.format_delta(0, Delta(sampled=char_ids("x"))) == b""


def test_aborted_reply_has_finish_reason_length() -> None:
    assert [get_finish_reason(one) for one in ("stop", "length", "abort", "tool_calls")] == [
        "stop", "length", "length", "tool_calls",
    ]  # fmt: skip


# ---- errors


@pytest.mark.parametrize("problem", sorted(OPENAI_ERRORS))
def test_error_has_the_openai_format_and_a_retryable_status_only_if_a_retry_helps(problem: Any) -> None:
    status, body = DIALECT.format_error(problem, "the reason", "messages")
    error = msgspec.json.decode(body)["error"]
    assert (error["message"], error["param"]) == ("the reason", "messages")
    assert set(error) == {"message", "type", "param", "code"}
    retried = status in (408, 409, 429) or status >= 500
    assert retried == (problem in ("unavailable", "timeout", "upstream", "internal", "conflict"))
    stream = DIALECT.open_stream(parse(stream=True))
    event = stream.format_failure(problem, "the reason")
    assert msgspec.json.decode(event.removeprefix(b"data: "))["error"]["message"] == "the reason"
    assert event.endswith(b"\n\n")
