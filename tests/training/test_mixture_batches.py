"""Batches of groups of several environments, and of rewards with several parts."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.core import Group, UsageError
from rookery.training import BatchConfig, check_batch, make_batch
from tests.training.kit import group, group_of_rewards, many_groups, rollout


def tag(one: Group, environment: str) -> Group:
    return msgspec.structs.replace(one, task=msgspec.structs.replace(one.task, environment=environment))


def get_shares(batch: Any) -> dict[str, float]:
    """Return the share of each environment in the sum of all token weights."""
    environments = np.array(batch.groups.environment)[batch.rollouts.group[batch.segments.rollout]]
    by_token = np.repeat(environments, batch.lengths)
    total = batch.weights.sum(dtype=np.float64)
    return {
        name: float(batch.weights[by_token == name].sum(dtype=np.float64) / total) for name in set(environments)
    }


@settings(max_examples=30, deadline=None)
@given(many_groups(), st.sampled_from(["token-mean", "seq-mean-token-mean", "prompt-mean"]), st.floats(0.05, 0.95))
def test_quota_is_the_share_of_the_loss_weight(groups: list[Group], normalise: Any, quota: float) -> None:
    tagged = [tag(one, "ab"[at % 2]) for at, one in enumerate(groups)]
    plain = make_batch(tagged, BatchConfig(normalise=normalise))
    batch = make_batch(tagged, BatchConfig(normalise=normalise, quotas={"a": quota, "absent": 0.05}))
    assert batch.weights.sum(dtype=np.float64) == pytest.approx(plain.weights.sum(dtype=np.float64), abs=1e-5)
    assert (batch.advantages == plain.advantages).all()
    if batch.mask.any():
        found, before = get_shares(batch), get_shares(plain)
        if min(before.get("a", 0.0), before.get("b", 0.0)) > 0:
            # The share of the absent environment goes to the others.
            assert found["a"] == pytest.approx(quota / 0.95, abs=1e-4)
        else:
            assert found == pytest.approx(before)
    check_batch(batch, tagged)


def test_environment_scale_gives_environments_the_same_influence() -> None:
    groups = [
        tag(group_of_rewards(0, 0.0, 1.0, 1.0), "small"),
        tag(group_of_rewards(1, 0.0, 100.0, 0.0), "large"),
        tag(group_of_rewards(2, 50.0, 100.0, 0.0), "large"),
        tag(group_of_rewards(3, 1.0, 1.0, 1.0), "settled"),
    ]
    batch = make_batch(groups, BatchConfig(environment_scale="std"))
    environments = np.array(batch.groups.environment)[batch.rollouts.group]
    for name in ("small", "large"):
        assert np.square(batch.rollouts.advantage[environments == name]).mean() == pytest.approx(1.0)
    assert not batch.rollouts.advantage[environments == "settled"].any()
    plain = make_batch(groups)
    assert (np.sign(plain.rollouts.advantage) == np.sign(batch.rollouts.advantage)).all()


def test_leaving_out_a_rollout_keeps_quotas_and_scale() -> None:
    groups = [tag(group_of_rewards(at, 0.0, 1.0, 3.0), "ab"[at % 2]) for at in range(4)]
    config = BatchConfig(environment_scale="std", quotas={"a": 0.8})
    batch = make_batch(groups, config).leave_out({0: "too long"})
    assert get_shares(batch)["a"] == pytest.approx(0.8)
    counted = batch.rollouts.advantage[[1, 2, 6, 7, 8]]
    assert np.square(counted).mean() == pytest.approx(1.0)


def test_parts_of_rewards_stay_apart_and_can_be_weighed_again() -> None:
    def member(number: int, reward: float, **parts: float) -> Any:
        return msgspec.structs.replace(rollout(0, number, reward), rewards=parts)

    one = group(0, member(0, 1.0, correct=1.0, style=0.0), member(1, 0.5, correct=0.0, style=0.5), member(2, 0.25))
    batch = make_batch([one])
    assert batch.rollouts.reward.tolist() == [1.0, 0.5, 0.25]
    np.testing.assert_array_equal(batch.rollouts.parts["style"], [0.0, 0.5, np.nan])
    weighed = make_batch([one], BatchConfig(part_weights={"style": 2.0, "correct": 0.1}))
    assert weighed.rollouts.reward.tolist() == pytest.approx([0.1, 1.0, 0.25])
    np.testing.assert_array_equal(weighed.rollouts.parts["correct"], [1.0, 0.0, np.nan])


@pytest.mark.parametrize(
    "options",
    [
        {"quotas": {"a": 0.0}},
        {"quotas": {"a": 0.7, "b": 0.7}},
        {"environment_scale": "max"},
        {"part_weights": {"a": float("nan")}},
    ],
)
def test_wrong_settings_are_refused(options: Any) -> None:
    with pytest.raises(UsageError):
        BatchConfig(**options)
