"""Tests of segments: no other way to share turns has fewer tokens."""

from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.core import Extra, Message, Segment, Span, Turn, floats, ints
from rookery.core.turns import REPLY_CACHE
from rookery.trajectories import Recorder, build_segments
from rookery.trajectories.branches import common_prefix_length

ANSWER = Message("assistant", "a")
few = st.lists(st.integers(0, 1), max_size=3)


@st.composite
def turn_trees(draw: st.DrawFn, most: int = 6) -> list[tuple[Turn, list[int]]]:
    """Draw turns with frequently equal token IDs and their complete prompts."""
    made: list[tuple[Turn, list[int]]] = []
    for index in range(draw(st.integers(1, most))):
        base = draw(st.none() | st.sampled_from(made)) if made else None
        known: list[int] = []
        if base is not None:
            known = [*base[1], *np.frombuffer(base[0].sampled, "<i4").tolist()]
            if draw(st.booleans()):
                known = known[: draw(st.integers(0, len(known)))]
                base = None
        new, sampled = draw(few), draw(few.filter(bool))
        n = len(sampled)
        linked = base is not None and bool(known) and draw(st.booleans())
        cut = draw(st.integers(0, n))
        spans = (Span(0, cut, index), Span(cut, n, index + 1)) if 0 < cut < n else ()
        extras = draw(
            st.sampled_from(
                [
                    {},
                    {},
                    {"e": Extra("uint8", 1, bytes([index + 1] * n))},
                    {"e": Extra("uint16", 2, bytes([index + 1] * 2 * n))},
                ]
            )
        )
        turn = Turn(
            attempt="a",
            index=index,
            response=ANSWER,
            parent=base[0].index if base is not None else None,
            prefix=len(known) if linked else 0,
            prompt=ints(new if linked else known + new),
            sampled=ints(sampled),
            logprobs=floats([-1.0 - index] * n) if draw(st.booleans()) else b"",
            version=index,
            spans=spans,
            extras=extras,
        )
        made.append((turn, known + new))
    return made


def full_prompt(turn: Turn, prompt: list[int]) -> list[int]:
    return [*prompt, *np.frombuffer(turn.sampled, "<i4").tolist()]


def fewest_tokens(calls: Sequence[tuple[Turn, list[int]]]) -> int:
    """Return the fewest tokens over every choice of which turn continues in which."""
    all_ids = [full_prompt(*call) for call in calls]
    layouts = [sorted((name, extra.dtype) for name, extra in turn.extras.items()) for turn, _ in calls]
    follows = [
        [
            n
            for n, (_, prompt) in enumerate(calls)
            if prompt[: len(ids)] == ids and layouts[n] == layouts[m] and n != m
        ]
        for m, ids in enumerate(all_ids)
    ]

    @cache
    def saved(m: int, taken: int) -> int:
        if m == len(calls):
            return 0
        best = saved(m + 1, taken)
        for n in follows[m]:
            if not taken >> n & 1:
                best = max(best, len(all_ids[m]) + saved(m + 1, taken | 1 << n))
        return best

    return sum(map(len, all_ids)) - saved(0, 0)


@settings(deadline=None, max_examples=120)
@given(turn_trees())
def test_no_other_segments_have_fewer_tokens(calls: list[tuple[Turn, list[int]]]) -> None:
    made = build_segments([turn for turn, _ in calls])
    assert sum(len(segment) for segment in made) == fewest_tokens(calls)


@settings(deadline=None, max_examples=80)
@given(turn_trees(12), st.randoms(use_true_random=False))
def test_arrays_match_sampled_tokens_and_turn_order_does_not_matter(
    calls: list[tuple[Turn, list[int]]], random: Random
) -> None:
    turns = [turn for turn, _ in calls]
    made = build_segments(turns)
    random.shuffle(turns)
    assert build_segments(turns) == made
    assert sorted(index for one in made for index in one.turns) == list(range(len(calls)))
    assert [one.turns[-1] for one in made] == sorted(one.turns[-1] for one in made)
    for one in made:
        check(one, calls)


def check(segment: Segment, calls: list[tuple[Turn, list[int]]]) -> None:
    tokens = np.frombuffer(segment.tokens, "<i4").tolist()
    logprobs = np.frombuffer(segment.logprobs, "<f4")
    assert tokens == full_prompt(*calls[segment.turns[-1]])
    spans: list[Span] = []
    trained = np.zeros(len(tokens), bool)
    for turn, prompt in (calls[index] for index in segment.turns):
        start, end = len(prompt), len(prompt) + len(turn.sampled) // 4
        assert tokens[:end] == full_prompt(turn, prompt)
        spans += [Span(start + span.start, start + span.end, span.version) for span in turn.spans] or [
            Span(start, end, turn.version)
        ]
        assert not trained[start:end].any()
        trained[start:end] = True
        if turn.logprobs:
            assert logprobs[start:end].tobytes() == turn.logprobs
        else:
            assert np.isnan(logprobs[start:end]).all()
        assert turn.extras.keys() == segment.extras.keys()
        for name, extra in turn.extras.items():
            of = segment.extras[name]
            assert (of.dtype, of.width) == (extra.dtype, extra.width)
            assert of.data[start * of.width : end * of.width] == extra.data
    assert segment.versions == tuple(spans)
    assert segment.mask == bytes(trained.astype(np.uint8))
    assert not logprobs[~trained].any()


def test_context_tokens_keep_the_extras_of_the_turn_that_sampled_them() -> None:
    rest: dict[str, Any] = {"attempt": "a", "response": ANSWER}
    turns = [
        Turn(index=0, prompt=ints([1]), sampled=ints([2, 3]), extras={"e": Extra("uint8", 1, b"\7\x08")}, **rest),
        Turn(index=1, parent=0, prefix=3, sampled=ints([4]), extras={"e": Extra("uint8", 1, b"\x09")}, **rest),
        Turn(index=2, parent=0, prefix=3, sampled=ints([5]), extras={"e": Extra("uint8", 1, b"\x0a")}, **rest),
    ]
    one, two = build_segments(turns)
    assert (one.turns, one.extras["e"].data) == ((0, 1), b"\0\7\x08\x09")
    assert (two.turns, two.extras["e"].data, two.mask) == ((2,), b"\0\7\x08\x0a", b"\0\0\0\1")


def test_turns_share_a_segment_without_being_recorded_as_parent_and_child() -> None:
    """Turns of another scope or a drifted template share a segment if their token IDs are equal."""
    turns: list[Turn] = []
    recorder = Recorder("a", turns.append)
    for scope, prompt, sampled in ((b"", [1], [2]), (b"tools", [1, 2, 3], [4]), (b"", [1, 2, 3, 4, 5], [6])):
        place = recorder.match_history("policy", [Message("user", str(len(turns)))], scope)
        recorder.record(place, prompt=ints(prompt), response=ANSWER, sampled=ints(sampled))
    assert [turn.parent for turn in turns] == [None] * 3
    (segment,) = build_segments(turns)
    assert (segment.turns, segment.mask) == ((0, 1, 2), b"\0\1\0\1\0\1")


def test_two_equal_turns_are_trained_once_each() -> None:
    rest: dict[str, Any] = {"attempt": "a", "response": ANSWER, "prompt": ints([1]), "sampled": ints([2])}
    turns = [Turn(index=n, **rest) for n in range(3)]
    turns.append(Turn(attempt="a", index=3, response=ANSWER, parent=2, prefix=2, sampled=ints([3])))
    assert [segment.turns for segment in build_segments(turns)] == [(1,), (2,), (0, 3)]
    with pytest.raises(ValueError, match=r"\b3\b"):
        build_segments([*turns, turns[3]])


def test_chain_of_turns_copies_no_token_twice() -> None:
    """The bytes of a turn are stored once, so the cost of a long conversation is its own size."""
    turns: list[Turn] = []
    length = 0
    for index in range(2_000):
        made: dict[str, Any] = {"parent": index - 1, "prefix": length} if index else {}
        ids = ints([index, 1, 2])
        turns.append(Turn(attempt="a", index=index, response=ANSWER, prompt=ids, sampled=ints([index]), **made))
        length += 4
    (segment,) = build_segments(turns)
    assert segment.tokens == b"".join(turn.prompt + turn.sampled for turn in turns)
    assert segment.trained == 2_000


@given(st.binary(max_size=700), st.binary(max_size=3), st.integers(0, 3), st.integers(0, 700), st.booleans())
def test_common_prefix_length_of_random_bytes(
    data: bytes, before: bytes, more: int, at: int, changed: bool
) -> None:
    own = bytearray(data)
    if changed and own:
        own[at % len(own)] ^= 1
    prompt = before + data + bytes(more)
    expected = next((n for n, (a, b) in enumerate(zip(data, own, strict=True)) if a != b), len(data))
    assert common_prefix_length(prompt, len(before), own) == expected
    assert common_prefix_length(prompt[: len(before) + at], len(before), own) == min(expected, at)


def test_segments_are_built_from_decoded_turns() -> None:
    turn = Turn(attempt="a", index=0, response=ANSWER, prompt=ints([1]), sampled=ints([2]), scope=b"s")
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(turn), type=Turn)
    assert build_segments([again]) == build_segments([turn])


def test_tokens_of_a_cached_reply_never_train() -> None:
    first = Turn(
        attempt="a", index=0, response=ANSWER, prompt=ints([1]), sampled=ints([2, 3]), upstream=REPLY_CACHE
    )
    second = Turn(
        attempt="a",
        index=1,
        response=ANSWER,
        prompt=ints([1, 2, 3, 4]),
        sampled=ints([5]),
        logprobs=floats([-1.0]),
    )
    (segment,) = build_segments([first, second])
    assert (segment.mask, segment.turns) == (bytes([0, 0, 0, 0, 1]), (1,))
    assert segment.versions == (Span(4, 5, 0),)
    (alone,) = build_segments([first])
    assert (alone.tokens, alone.mask, alone.turns) == (ints([1, 2, 3]), bytes(3), ())
