"""Logprobs are decoded once; they are cut out of a reply only if it has a single choice."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rookery.upstreams import logprobs
from rookery.upstreams.format import ReplyFormatError
from rookery.upstreams.openai_format import decode_reply

HARD = ['"logprobs":{"content":[', '"top_logprobs":[]}]', "}]", "[\t\n\t]", "\\", '\\"', "a", "é", ""]
texts = st.lists(st.sampled_from(HARD), max_size=3).map("".join)
values = st.floats(-30, 0, width=32)


def entries(alternatives: bool) -> Any:
    tops = st.lists(st.fixed_dictionaries({"token": texts, "logprob": values}), max_size=2)
    return st.fixed_dictionaries(
        {
            "token": texts,
            "logprob": values,
            "bytes": st.none() | st.lists(st.integers(0, 255), max_size=3),
            "top_logprobs": tops if alternatives else st.just([]),
        }
    )


lists = st.booleans().flatmap(lambda alternatives: st.lists(entries(alternatives), max_size=4))
logprob_objects = st.one_of(
    st.none(),
    lists.map(lambda one: {"content": one}),
    st.tuples(lists, lists).map(lambda both: {"content": both[0], "refusal": both[1]}),
    lists.map(lambda one: {"refusal": None, "content": one}),
)
arguments = st.one_of(
    texts, logprob_objects.map(lambda one: {"logprobs": one}), logprob_objects.map(lambda one: {"x": [one]})
)


@st.composite
def choices(draw: st.DrawFn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": draw(texts)}
    if draw(st.booleans()):
        message["tool_calls"] = [{"id": "1", "function": {"name": "f", "arguments": draw(arguments)}}]
    choice = {"index": 0, "message": message, "logprobs": draw(logprob_objects), "finish_reason": "stop"}
    size = len((choice["logprobs"] or {}).get("content") or ())
    if draw(st.booleans()):
        choice["token_ids"] = list(range(size + draw(st.sampled_from([0, 0, 0, 1]))))
    return dict(draw(st.permutations(list(choice.items()))))


answers = st.fixed_dictionaries(
    {"id": texts, "choices": st.lists(choices(), min_size=1, max_size=2)},
    optional={"metadata": logprob_objects.map(lambda one: {"logprobs": one})},
)


def outcome(data: bytes, raw: bool, named: bool) -> Any:
    try:
        reply = decode_reply(data, raw_logprobs=raw, named=named)
    except ReplyFormatError as error:
        return str(error)
    content = reply.logprob_content
    plain = msgspec.structs.replace(reply, logprob_content=None)
    return plain, None if content is None else bytes(content)


TRAP = {"content": [{"token": "a", "logprob": -1.0, "bytes": None, "top_logprobs": []}]}


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(answers, st.booleans(), st.booleans(), st.sampled_from([(",", ":"), (", ", ": ")]))
@example(
    {
        "choices": [
            {
                "message": {"tool_calls": [{"function": {"name": "f", "arguments": {"logprobs": TRAP}}}]},
                "logprobs": None,
                "token_ids": [1],
                "finish_reason": "stop",
            }
        ]
    },
    False,
    False,
    (",", ":"),
)
def test_only_the_logprobs_of_the_only_choice_are_cut_out(
    answer: dict[str, Any], raw: bool, named: bool, separators: tuple[str, str]
) -> None:
    data = json.dumps(answer, separators=separators).encode()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(logprobs, "_SHORT", 1 << 30)
        whole = outcome(data, raw, named)
        patched.setattr(logprobs, "_SHORT", 0)
        assert outcome(data, raw, named) == whole


def test_long_reply_is_cut() -> None:
    entry = {"token": "}]", "logprob": -0.5, "bytes": [125, 93], "top_logprobs": []}
    answer = {"choices": [{"message": {"content": "x"}, "logprobs": {"content": [entry] * 99}}]}
    pieces = logprobs.split_logprobs(json.dumps(answer, separators=(",", ":")).encode())
    assert pieces is not None
    assert pieces.values == [-0.5] * 99
    assert json.loads(bytes(pieces.content)) == [entry] * 99
    assert len(pieces.rest) < 100
