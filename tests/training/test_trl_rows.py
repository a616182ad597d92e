"""Rows and rewards for TRL, without TRL."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery import Message, Segment, Task, UsageError
from rookery.core import Span, floats, ints
from rookery.training.advantages import compute_advantages
from rookery.training.trl.prompts import find_task, make_rows
from rookery.training.trl.rows import find_most_trained, row_from_segment, shape_rewards

REWARD = st.one_of(st.none(), st.floats(-10, 10))


@st.composite
def groups(draw: st.DrawFn) -> list[list[float | None]]:
    k = draw(st.integers(2, 6))
    return draw(st.lists(st.lists(REWARD, min_size=k, max_size=k), min_size=1, max_size=4))


@given(some=groups(), weight=st.floats(0.5, 3))
def test_shaped_rewards_give_the_requested_advantages_in_trl(
    some: list[list[float | None]], weight: float
) -> None:
    given_to_trl = shape_rewards([reward for group in some for reward in group], len(some[0]), weight=weight)
    for number, group in enumerate(some):
        seen = given_to_trl[number * len(group) : (number + 1) * len(group)]
        assert [one is None for one in seen] == [one is None for one in group]
        valid = [one for one in group if one is not None]
        if not valid:
            continue
        mean = math.fsum(one for one in seen if one is not None) / len(valid)
        assert mean == pytest.approx(math.fsum(valid) / len(valid), abs=1e-9)
        left = [0.0 if one is None else one - mean for one in seen]
        assert left == pytest.approx((weight * compute_advantages(group)).tolist(), abs=1e-9)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    mask = [
        0,
        *draw(st.lists(st.integers(0, 1), min_size=0, max_size=20)),
        1,
        *draw(st.lists(st.integers(0, 1), max_size=9)),
    ]
    ids = draw(st.lists(st.integers(0, 300), min_size=len(mask), max_size=len(mask)))
    chances = [-float(draw(st.integers(1, 50))) if own else 0.0 for own in mask]
    spans = tuple(Span(n, n + 1, 3) for n, own in enumerate(mask) if own)
    return Segment(tokens=ints(ids), mask=bytes(mask), logprobs=floats(chances), versions=spans)


@given(segments())
def test_row_is_the_segment_split_before_the_first_trained_token(segment: Segment) -> None:
    row = row_from_segment(segment)
    assert ints(row.prompt_ids + row.completion_ids) == segment.tokens
    assert bytes([0] * len(row.prompt_ids) + row.env_mask) == segment.mask
    assert floats([0.0] * len(row.prompt_ids) + row.logprobs) == segment.logprobs
    assert row.prompt_ids
    assert row.env_mask[0] == 1
    assert find_most_trained([segment, segment]) is segment


def test_invalid_task_has_no_row_and_an_unknown_task_is_refused() -> None:
    task = Task(id="a", prompt=(Message("user", "hello"),))
    (row,) = make_rows([task, Task(id="b", invalid="it has no prompt")])
    assert find_task(row["prompt"], {"a": task}) is task
    with pytest.raises(UsageError):
        find_task(row["prompt"], {})
