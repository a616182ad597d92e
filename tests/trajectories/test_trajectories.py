"""Tests of segments and transcripts against the complete input and output of every call."""

import math
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.core import Extra, Message, Segment, Span, Turn, floats, ints
from rookery.trajectories import Recorder, build_segments, build_transcript


@dataclass
class Call:
    """A model call with its complete prompt and reply."""

    role: str
    messages: tuple[Message, ...]
    prompt: list[int]
    sampled: list[int]
    response: Message
    logprobs: list[float] | None
    version: int
    extras: dict[str, Extra] = field(default_factory=dict)

    @property
    def all(self) -> list[int]:
        return self.prompt + self.sampled


ids = st.lists(st.integers(0, 2), max_size=3)  # few ids, so that histories coincide by chance as well
some = st.lists(st.integers(0, 2), min_size=1, max_size=3)
words = st.sampled_from(["a", "b"])
KINDS = ["extend"] * 4 + ["resample", "re-render", "edit", "fresh", "no tokens", "no answer", "tokens in"]


@st.composite
def histories(draw: st.DrawFn, kinds: list[str] = KINDS, most: int = 24) -> list[Call]:
    calls: list[Call] = []
    for _ in range(draw(st.integers(1, most))):
        kind = draw(st.sampled_from(kinds))
        role = draw(st.sampled_from(["policy", "policy", "policy", "judge"]))
        earlier = [call for call in calls if call.role == role and bool(call.messages) == (kind != "tokens in")]
        base = draw(st.sampled_from(earlier)) if earlier and kind != "fresh" else None
        messages: tuple[Message, ...] = (Message("user", draw(words)),)
        prompt = draw(some)
        if base is not None:
            asked = Message("user", draw(words))
            match kind:
                case "extend" | "tokens in" | "no answer":
                    messages, prompt = (*base.messages, base.response, asked), base.all + draw(ids)
                case "resample":
                    messages, prompt = base.messages, list(base.prompt)
                case "re-render":  # the same words, other ids: a template that drops the reasoning, say
                    prompt = [9, *base.all[1:]]
                    messages = (*base.messages, base.response, asked)
                case "edit":  # a context that was summarised
                    messages = (*base.messages[1:], base.response, asked)
                    prompt = base.all[1:] + draw(ids)
        sampled = draw(some)
        if kind == "tokens in":
            messages = ()
        if kind == "no tokens":
            prompt, sampled = [], []
        if kind == "no answer":
            sampled = []
        logprobs = draw(st.none() | st.just([-0.5 - n for n in range(len(sampled))]))
        extras = {"kept": Extra("uint8", 1, bytes(sampled))} if draw(st.booleans()) else {}
        response = Message("assistant", draw(words))
        calls.append(Call(role, messages, prompt, sampled, response, logprobs, draw(st.integers(0, 3)), extras))
    return calls


def recorded(calls: list[Call]) -> list[Turn]:
    turns: list[Turn] = []
    recorder = Recorder("0.0.1", turns.append)
    for call in calls:
        turn = recorder.record(
            recorder.match_history(call.role, call.messages),
            prompt=ints(call.prompt),
            response=call.response,
            sampled=ints(call.sampled),
            logprobs=floats(call.logprobs or []),
            version=call.version,
            extras=call.extras,
        )
        assert turn is turns[-1]
    assert [turn.index for turn in turns] == list(range(len(calls)))
    return turns


def view(segment: Segment) -> tuple[list[int], list[float]]:
    return np.frombuffer(segment.tokens, "<i4").tolist(), np.frombuffer(segment.logprobs, "<f4").tolist()


@settings(deadline=None, max_examples=50)
@given(histories())
def test_every_sampled_token_of_the_role_is_trained_exactly_once(calls: list[Call]) -> None:
    turns = recorded(calls)
    for role in ("policy", "judge"):
        made = build_segments(turns, role)
        trained = [index for segment in made for index in segment.turns]
        assert sorted(trained) == [n for n, call in enumerate(calls) if call.role == role and call.sampled]
        assert sum(segment.trained for segment in made) == sum(
            len(call.sampled) for call in calls if call.role == role
        )


@settings(deadline=None, max_examples=50)
@given(histories())
def test_segments_contain_sampled_tokens_after_their_prompt(calls: list[Call]) -> None:
    for segment in build_segments(recorded(calls)):
        tokens, logprobs = view(segment)
        leaf = calls[segment.turns[-1]]
        assert tokens == leaf.all
        assert len(tokens) == len(segment.mask) == len(logprobs) == len(segment)
        assert len(segment.versions) == len(segment.turns)
        covered = [False] * len(tokens)
        for index, span in zip(segment.turns, segment.versions, strict=True):
            call = calls[index]
            assert tokens[: span.start] == call.prompt
            assert tokens[span.start : span.end] == call.sampled
            assert span.version == call.version
            got = logprobs[span.start : span.end]
            assert all(map(math.isnan, got)) if call.logprobs is None else got == call.logprobs
            covered[span.start : span.end] = [True] * len(call.sampled)
            if "kept" in call.extras:
                assert segment.extras["kept"].data[span.start : span.end] == bytes(call.sampled)
        assert list(segment.mask) == [int(on) for on in covered]
        assert all(value == 0.0 for value, on in zip(logprobs, covered, strict=True) if not on)


@settings(deadline=None, max_examples=50)
@given(histories())
def test_turn_extends_another_only_if_its_prompt_starts_with_its_tokens(calls: list[Call]) -> None:
    turns = recorded(calls)
    for turn, call in zip(turns, calls, strict=True):
        assert np.frombuffer(turn.sampled, "<i4").tolist() == call.sampled
        assert call.prompt[turn.prefix :] == np.frombuffer(turn.prompt, "<i4").tolist()
        if turn.prefix:
            assert turn.parent is not None
            assert call.prompt[: turn.prefix] == calls[turn.parent].all
        if turn.parent is not None:
            parent = calls[turn.parent]
            assert turn.parent < turn.index
            assert parent.role == call.role
            assert call.messages == ((*parent.messages, parent.response) if call.messages else ()) + turn.messages


@pytest.mark.long
@settings(deadline=None)
@given(histories([kind for kind in KINDS if kind != "tokens in"]))
def test_transcript_is_the_complete_last_conversation(calls: list[Call]) -> None:
    turns = recorded(calls)
    for role in ("policy", "judge"):
        own = [call for call in calls if call.role == role]
        assert build_transcript(turns, role) == ([*own[-1].messages, own[-1].response] if own else [])


@pytest.mark.parametrize("chat", [True, False], ids=["messages", "tokens-in"])
@given(st.lists(st.tuples(some, some), min_size=1, max_size=24))
def test_linear_conversation_is_stored_once_as_one_segment(
    chat: bool, steps: list[tuple[list[int], list[int]]]
) -> None:
    calls: list[Call] = []
    messages: tuple[Message, ...] = ()
    so_far: list[int] = []
    for new, sampled in steps:
        messages = (*messages, Message("user", "q"))
        response = Message("assistant", "r")
        calls.append(Call("policy", messages if chat else (), so_far + new, sampled, response, None, 0))
        messages, so_far = (*messages, response), so_far + new + sampled
    turns = recorded(calls)
    assert sum(len(turn.prompt) + len(turn.sampled) for turn in turns) == 4 * len(so_far)
    assert sum(len(turn.messages) for turn in turns) == (len(steps) if chat else 0)
    (segment,) = build_segments(turns)
    assert view(segment)[0] == so_far
    assert segment.turns == tuple(range(len(steps)))
    assert len(build_transcript(turns)) == (2 if chat else 1) * len(steps)


def test_longest_matching_history_is_extended() -> None:
    first = Call("policy", (Message("user", "q"),), [1], [2], Message("assistant", "a"), None, 0)
    longer = (*first.messages, first.response, Message("user", "more"))
    second = Call("policy", longer, [1, 2, 3], [4], Message("assistant", "b"), None, 0)
    third = Call(
        "policy", (*longer, second.response, Message("user", "c")), [1, 2, 3, 4, 5], [6], first.response, None, 0
    )
    turns = recorded([first, second, first, third])
    assert [turn.parent for turn in turns] == [None, 0, None, 1]
    assert [segment.turns for segment in build_segments(turns)] == [(2,), (0, 1, 3)]


def test_common_history_of_branches_is_trained_in_the_first_branch_only() -> None:
    root = Call("policy", (Message("user", "q"),), [1], [2, 3], Message("assistant", "a"), [-0.5, -1.0], 5)
    history = (*root.messages, root.response, Message("user", "more"))
    branches = [Call("policy", history, [1, 2, 3, 4], [7 + n], root.response, None, 6) for n in range(2)]
    one, two = build_segments(recorded([root, *branches]))
    assert (one.mask, one.versions) == (b"\0\1\1\0\1", (Span(1, 3, 5), Span(4, 5, 6)))
    assert (two.mask, two.versions) == (b"\0\0\0\0\1", (Span(4, 5, 6),))
    assert view(two)[1][:4] == [0.0] * 4


def test_turns_with_missing_parent_are_rejected() -> None:
    calls = [Call("policy", (), [1], [2], Message("assistant", "a"), None, 0)]
    calls.append(Call("policy", (), [1, 2, 3], [4], Message("assistant", "b"), None, 0))
    turns = recorded(calls)
    assert turns[1].parent == 0
    with pytest.raises(ValueError):
        build_segments(turns[1:])
    with pytest.raises(ValueError):
        build_segments([turns[0], msgspec.structs.replace(turns[1], prefix=3)])


def test_old_turns_can_be_extended() -> None:
    first = Call("policy", (Message("user", "q"),), [1], [2], Message("assistant", "a"), None, 0)
    others = [
        Call("policy", (Message("user", str(n)),), [5, n], [3], Message("assistant", "o"), None, 0)
        for n in range(40)
    ]
    last = Call("policy", (*first.messages, first.response), [1, 2, 3], [4], Message("assistant", "z"), None, 0)
    turns = recorded([first, *others, last])
    assert (turns[-1].parent, turns[-1].prefix, turns[-1].messages) == (0, 2, ())
    made = build_segments(turns)
    assert made[-1].turns == (0, 41)
    assert made[-1].mask == b"\0\1\0\1"
    assert all(earlier.turns[-1] < later.turns[-1] for earlier, later in pairwise(made))


def test_turns_without_tokens_give_no_segments() -> None:
    turns = recorded([Call("policy", (Message("user", "q"),), [], [], Message("assistant", "a"), None, 0)])
    assert build_segments(turns) == []
    assert build_segments([]) == []
    assert build_transcript([]) == []
