"""Reward estimates are clustered by task and stay unbiased when rollouts are missing."""

import random
from itertools import combinations
from math import sqrt
from statistics import mean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.core.estimates import RewardEstimate, pass_at_k, shown_ks, t_quantile_975, wilson


def estimate(*tasks: list[float]) -> RewardEstimate:
    result = RewardEstimate()
    for at, rewards in enumerate(tasks):
        for reward in rewards:
            result.add(str(at), reward)
    return result


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=30))
def test_one_rollout_per_task_gives_the_ordinary_standard_error(rewards: list[float]) -> None:
    result = estimate(*([reward] for reward in rewards))
    assert result.mean == pytest.approx(mean(rewards), abs=1e-9)
    assert result.standard_error == pytest.approx(stdev(rewards) / sqrt(len(rewards)), abs=1e-9)


def test_identical_rollouts_of_a_task_add_no_information() -> None:
    once = estimate(*([float(n % 2)] for n in range(40)))
    copies = estimate(*([float(n % 2)] * 8 for n in range(40)))
    assert copies.mean == once.mean
    assert copies.standard_error == pytest.approx(once.standard_error)
    assert copies.interval95 is not None
    assert once.interval95 is not None
    assert copies.interval95 == pytest.approx(once.interval95, abs=0.01)


def test_interval_of_a_rate_of_zero_or_one_counts_each_task_once() -> None:
    assert estimate(*([1.0] * 8 for _ in range(5))).interval95 == wilson(1.0, 5)
    assert estimate(*([0.0] * 8 for _ in range(5))).interval95 == wilson(0.0, 5)


def test_one_rollout_per_task_has_wilsons_interval() -> None:
    result = estimate(*([float(n < 6)] for n in range(12)))
    assert result.interval95 == pytest.approx(wilson(0.5, 12))


def test_one_task_has_no_standard_error_and_no_interval() -> None:
    result = estimate([1.0, 0.0, 1.0])
    assert result.standard_error is None
    assert result.interval95 is None


@pytest.mark.parametrize("binary", [True, False])
def test_interval_has_its_nominal_coverage(binary: bool) -> None:
    draw = random.Random(7)
    covered = 0
    for _ in range(400):
        result = RewardEstimate()
        for task in range(25):
            chance = draw.random()
            for _ in range(8):
                result.add(str(task), float(draw.random() < chance) if binary else chance + draw.gauss(0, 0.1))
        assert result.interval95 is not None
        low, high = result.interval95
        covered += low <= 0.5 <= high
    assert 0.92 <= covered / 400 <= 0.985


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(passed: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(passed)))
    subsets = list(combinations(passed, k))
    expected = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(len(passed), sum(passed), k) == pytest.approx(expected)


def test_pass_at_k_rejects_k_above_the_number_of_rollouts() -> None:
    with pytest.raises(ValueError):
        pass_at_k(2, 1, 3)


def test_pass_at_k_skips_tasks_with_too_few_valid_rollouts() -> None:
    result = estimate([1.0, 0.0, 0.0, 0.0], [1.0], [0.0, 0.0])
    assert result.pass_at(2).tasks == 2
    assert result.pass_at(2).mean == pytest.approx((0.5 + 0.0) / 2)
    assert result.pass_at(5).mean is None
    assert result.average().mean == pytest.approx((0.25 + 1 + 0) / 3)


@pytest.mark.parametrize(
    ("k", "shown"), [(1, []), (2, [2]), (3, [2, 3]), (4, [2, 4]), (6, [2, 4, 6]), (8, [2, 4, 8])]
)
def test_pass_at_k_is_reported_for_powers_of_two_and_k(k: int, shown: list[int]) -> None:
    assert shown_ks(k) == shown


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042), (1000, 1.962)],
)
def test_quantiles_of_students_t(freedom: int, quantile: float) -> None:
    assert t_quantile_975(freedom) == pytest.approx(quantile, rel=2e-3)


def test_wilson_interval_stays_between_zero_and_one() -> None:
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(0.0, 0) == (0.0, 1.0)
