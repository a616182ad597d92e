"""Advantages: examples, properties, and the bias of other ways to treat missing rollouts."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.core import UsageError
from rookery.training import BatchError, compute_advantages, is_informative

rewards = st.lists(st.none() | st.sampled_from([0.0, 1.0]) | st.floats(-100, 100), max_size=9)


@pytest.mark.parametrize(
    ("group_rewards", "options", "expected"),
    [
        ([1.0, 0.0, 0.0, 1.0], {}, [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
        ([1.0, None, 0.0, None, 0.5], {}, [0.75, 0, -0.75, 0, 0]),
        ([1.0, None, 0.0, None, 0.5], {"baseline": "mean"}, [0.5, 0, -0.5, 0, 0]),
        ([1.0, None, 0.0, None, 0.5], {"baseline": "none"}, [1, 0, 0, 0, 0.5]),
        ([1.0, 0.0, None], {"baseline": "mean", "scale": "std"}, [math.sqrt(0.5), -math.sqrt(0.5), 0]),
        ([1.0, 0.0, None], {"scale": "std"}, [math.sqrt(2), -math.sqrt(2), 0]),
        ([3.0, None, None], {"baseline": "none"}, [0, 0, 0]),
        ([None, None], {}, [0, 0]),
        ([0.7, 0.7, 0.7], {"scale": "std"}, [0, 0, 0]),
        ([0.7, 0.7, 0.7], {"baseline": "none", "scale": "std"}, [0, 0, 0]),
        ([0.1 + 0.2, 0.3], {"scale": "std"}, [0, 0]),
        ([0.0, 5e-324], {"scale": "std"}, [0, 0]),
        ([0.0, 1e-200], {"scale": "std"}, [-math.sqrt(2), math.sqrt(2)]),
        ([0.0, 1e200], {"scale": "std"}, [-math.sqrt(2), math.sqrt(2)]),
        ([], {}, []),
    ],
)
def test_hand_computed_advantages(
    group_rewards: list[float | None], options: dict[str, str], expected: list[float]
) -> None:
    advantages = compute_advantages(group_rewards, **options)  # type: ignore[arg-type]
    assert advantages.dtype == np.float64
    np.testing.assert_allclose(advantages, expected, atol=1e-15)


@given(rewards, st.sampled_from(["leave_one_out", "mean"]), st.sampled_from(["none", "std"]))
def test_only_valid_rollouts_count(group_rewards: list[float | None], baseline: str, scale: str) -> None:
    advantages = compute_advantages(group_rewards, baseline=baseline, scale=scale)  # type: ignore[arg-type]
    valid = [at for at, reward in enumerate(group_rewards) if reward is not None]
    alone = compute_advantages([group_rewards[at] for at in valid], baseline=baseline, scale=scale)  # type: ignore[arg-type]
    assert (advantages[valid] == alone).all()
    assert not advantages[[at for at, reward in enumerate(group_rewards) if reward is None]].any()
    assert abs(advantages.sum()) <= 1e-9 * max(1.0, np.abs(advantages).sum())
    assert advantages.any() == is_informative(group_rewards)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=9))
def test_leave_one_out_compares_with_the_mean_of_the_others(values: list[float]) -> None:
    advantages = compute_advantages(values)
    if is_informative(values):
        expected = [
            value - np.mean([other for index, other in enumerate(values) if index != at])
            for at, value in enumerate(values)
        ]
        np.testing.assert_allclose(advantages, expected, atol=1e-9)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_reward_is_refused(bad: float) -> None:
    with pytest.raises(BatchError, match=rf"\b1\b.*{bad}"):
        compute_advantages([0.0, bad])


def test_rewards_that_overflow_are_refused() -> None:
    with pytest.raises(BatchError, match=r"1\.7e\+308"):
        compute_advantages([1.7e308, -1.7e308])


@pytest.mark.parametrize("options", [{"baseline": "median"}, {"scale": "max"}])
def test_unknown_baseline_or_scale_is_refused(options: dict[str, str]) -> None:
    (field,) = options
    with pytest.raises(UsageError, match=rf"\b{field}\b.*'{options[field]}'"):
        compute_advantages([0.0, 1.0], **options)  # type: ignore[arg-type]


# A toy model for the figures about bias. A policy that answers right with probability P = sigmoid(theta), reward 1
# if right: the gradient of the expected reward is P (1 - P) = 0.09. A rollout fails with probability FAILS, right
# or not. The estimate is the mean of advantage times (answer - P) over the rollouts that train.
P, K, FAILS = 0.9, 8, 0.1
TRUE = P * (1 - P)
GROUPS = 200_000


def table(baseline: str, scale: str = "none") -> np.ndarray:
    """Return the advantages of a [wrong, right] answer, by the number of valid and of right rollouts."""
    advantages = np.zeros((K + 1, K + 1, 2))
    for n, right in product(range(K + 1), range(K + 1)):
        if right <= n:
            scores = compute_advantages([1.0] * right + [0.0] * (n - right), baseline=baseline, scale=scale)  # type: ignore[arg-type]
            advantages[n, right] = (scores[-1] if right < n else 0.0, scores[0] if right else 0.0)
    return advantages


class Toy:
    """Simulated groups: which rollouts answered right, and which did not fail."""

    def __init__(self) -> None:
        rng = np.random.default_rng(20261115)
        self.right = rng.random((GROUPS, K)) < P
        self.valid = rng.random((GROUPS, K)) >= FAILS
        self.slope = self.right - P
        self.all = np.ones((GROUPS, K), dtype=bool)

    def scores(self, baseline: str, seen: np.ndarray, reward: np.ndarray, scale: str = "none") -> np.ndarray:
        """Return the advantages if the rollouts `seen` count, with rewards that may be filled in."""
        known = table(baseline, scale)
        return known[seen.sum(1)[:, None], (reward & seen).sum(1)[:, None], reward.astype(int)]

    def estimate(self, scores: np.ndarray, train: np.ndarray) -> tuple[float, float]:
        """Return the estimated gradient and its standard error. Groups are independent; members of one are not."""
        sums, counts = (scores * self.slope * train).sum(1), train.sum(1)
        value = sums.sum() / counts.sum()
        return value, float(np.std(sums - value * counts) / counts.mean() / math.sqrt(GROUPS))


def test_leave_one_out_is_unbiased_and_other_treatments_are_not() -> None:
    toy = Toy()
    filled = toy.right & toy.valid  # a failure as if it were a wrong answer
    mean_valid = K * (1 - FAILS)
    cases = {
        # A baseline of the others does not depend on the answer: unbiased, whatever is missing.
        "leave-one-out over valid": (toy.scores("leave_one_out", toy.valid, toy.right), toy.valid, TRUE, 0.0901),
        # The rollout itself is in the baseline: the estimate is short by 1/n, and n is smaller if members are
        # missing.
        "mean over valid": (
            toy.scores("mean", toy.valid, toy.right),
            toy.valid,
            TRUE * (1 - 1 / mean_valid),
            0.0774,
        ),
        "no failures": (toy.scores("mean", toy.all, toy.right), toy.all, TRUE * (1 - 1 / K), 0.0787),
        # The baseline is wrong, and by chance shrinks by 1/K again.
        "zero-filled, masked": (toy.scores("mean", toy.all, filled), toy.valid, TRUE * (1 - 1 / K), 0.0788),
        # A failed rollout trains as if its answer were wrong, even if it was right.
        "zero-filled, trained": (
            toy.scores("mean", toy.all, filled),
            toy.all,
            (1 - FAILS) * TRUE * (1 - 1 / K),
            0.0709,
        ),
    }
    for name, (scores, train, exact, expected) in cases.items():
        value, error = toy.estimate(scores, train)
        assert error < 3e-4, name
        assert abs(value - exact) < 4 * error, (name, value, exact, error)
        assert abs(exact - expected) < 1.5e-4, (name, exact, expected)


def test_filled_in_zeros_shrink_advantages_scaled_by_std() -> None:
    toy = Toy()
    filled = toy.right & toy.valid
    reference, error = toy.estimate(toy.scores("mean", toy.all, toy.right, "std"), toy.all)
    value, other = toy.estimate(toy.scores("mean", toy.all, filled, "std"), toy.valid)
    off = 1 - value / reference
    assert abs(off - 0.09) < 4 * (error + other) / reference  # the facts round it to a tenth


def test_filled_in_zeros_make_uniform_groups_look_informative() -> None:
    toy = Toy()
    right = (toy.right & toy.valid).sum(1)
    valid = toy.valid.sum(1)
    uniform = (right == 0) | (right == valid)
    looks = uniform & (right > 0) & (right < K)  # some zeros are filled in beside some ones
    error = math.sqrt(0.25 / GROUPS)
    # All valid ones right and at least one missing: (F + (1 - F) P)^8 - ((1 - F) P)^8. Nobody right is rare.
    exact = (FAILS + (1 - FAILS) * P) ** K - ((1 - FAILS) * P) ** K
    assert abs(looks.mean() - exact) < 4 * error
    assert abs(exact - 0.28) < 0.01  # of all groups; of the uniform ones it is 0.60
    assert abs(looks.sum() / uniform.sum() - 0.605) < 0.01
    ours = table("leave_one_out")
    assert not ours[valid[looks], right[looks]].any(), "without filled-in zeros these groups are uniform"
    kept = (valid == K).mean()
    assert abs(kept - (1 - FAILS) ** K) < 4 * error
    assert abs((1 - FAILS) ** K - 0.43) < 0.001
