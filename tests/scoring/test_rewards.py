"""A reward is a finite number in its declared range, or a fault; a failure never becomes a zero."""

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.core import CAUSES, ScoringError
from rookery.scoring import Score, check_reward


class Item:
    """Looks like a scalar tensor."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def item(self) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (1, 1.0),
        (0.25, 0.25),
        (True, 1.0),
        (False, 0.0),
        (-0.0, 0.0),
        (np.float32(0.5), 0.5),
        (np.float64(0.5), 0.5),
        (np.int64(1), 1.0),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
        (np.array([0.5]), 0.5),
        (Fraction(1, 2), 0.5),
        (Item(0.5), 0.5),
        (Score(0.5), 0.5),
        (Score(np.float32(0.5)), 0.5),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_kind_of_number_is_a_reward(value: object, reward: float) -> None:
    score = check_reward(value, 0.0, 1.0)
    assert score == Score(reward)
    assert type(score.reward) is float


@pytest.mark.parametrize(
    "value",
    [
        None,
        "1",
        "",
        b"1",
        [],
        [1.0],
        {},
        {"reward": 1.0},
        object(),
        Unprintable(),
        1j,
        np.array([0.5, 0.5]),
        np.array([]),
        np.complex128(1),
        Decimal("NaN"),
        Item("1"),
        Item(ValueError("a tensor with two elements")),
        math.nan,
        math.inf,
        -math.inf,
        np.float32("nan"),
        10**400,
        Score("x"),  # type: ignore[arg-type]
        Score(0.5, {"part": math.nan}),
        Score(0.5, {}, {"metric": None}),  # type: ignore[dict-item]
        Score(0.5, None),  # type: ignore[arg-type]
        Score(0.5, {1: 2.0}),  # type: ignore[dict-item]
    ],
    ids=lambda value: type(value).__name__,
)
def test_missing_or_non_finite_reward_is_a_fault_of_its_author(value: object) -> None:
    with pytest.raises(ScoringError) as caught:
        check_reward(value, -math.inf, math.inf)
    assert caught.value.code == "bug.reward"
    assert caught.value.fault == CAUSES["bug.reward"].fault == "bug"


@pytest.mark.parametrize("value", [{}, {"part": math.nan}, {"part": "1"}, {1: 1.0}, {"part": 2.0}])
def test_wrong_parts_of_a_reward_are_a_fault_of_their_author(value: object) -> None:
    with pytest.raises(ScoringError) as caught:
        check_reward(value, 0.0, 1.0, {})
    assert caught.value.code == "bug.reward"


@pytest.mark.parametrize("value", [1.0000001, -1e-9, 2, np.float64(1.5), Score(2.0)])
def test_reward_out_of_range_is_a_fault(value: object) -> None:
    with pytest.raises(ScoringError, match=r"\b0\b.*\b1\b.*reward_range"):
        check_reward(value, 0.0, 1.0)


@given(st.floats(), st.floats(-10, 10), st.floats(0, 10))
def test_reward_is_stored_exactly_or_refused(value: float, low: float, width: float) -> None:
    high = low + width
    if math.isfinite(value) and low <= value <= high:
        assert check_reward(value, low, high).reward == value
    else:
        with pytest.raises(ScoringError):
            check_reward(value, low, high)


def test_parts_and_metrics_must_be_finite_numbers() -> None:
    score = check_reward(Score(1, {"a": np.float64(0.5), "b": 3}, {"c": True}), 0.0, 1.0)
    assert score == Score(1.0, {"a": 0.5, "b": 3.0}, {"c": 1.0})
    assert {type(value) for value in (*score.parts.values(), *score.metrics.values())} == {float}
