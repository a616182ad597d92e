"""The report: causes, environments, and durations of missing rollouts."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings

from rookery.core import Attempt, Cancelled, Completed, Failed, Group, Outcome, Rollout, Timing, Truncated
from rookery.training import GroupReport, build_report
from tests.training.kit import group, group_of_rewards, many_groups, rollout, segment

LOST = Failed("infra", "sandbox.lost", "gone")


def lasting(
    index: int, member: int, seconds: float, reward: float | None, outcome: Outcome | None = None
) -> Rollout:
    return rollout(index, member, reward, outcome=outcome, timing=Timing(setup=0.0, run=seconds, score=0.0))


@settings(max_examples=30, deadline=None)
@given(many_groups())
def test_missing_rollouts_are_counted_by_cause(groups: list[Group]) -> None:
    found = build_report(groups, environment=lambda one: f"env{one.index % 2}")
    assert found.groups == found.informative + found.uniform + found.short + found.failed == len(groups)
    assert found.rollouts == sum(len(one.rollouts) for one in groups)
    assert found.valid + sum(one.rollouts for one in found.missing.values()) == found.rollouts
    assert sum(place.missing for place in found.environments.values()) == found.rollouts - found.valid
    assert sum(place.rollouts for place in found.environments.values()) == found.rollouts
    assert sum(band.rollouts for band in found.by_duration) == found.rollouts
    sampled = sum(part.trained for one in groups for member in one.valid for part in member.segments)
    assert sum(found.staleness.tokens.values() if found.staleness else []) == sampled
    assert json.loads(json.dumps(found.plain()))["rollouts"] == found.rollouts
    assert all(found.lines())


def test_hand_computed_report() -> None:
    tries = (
        Attempt(id="0.0.1", number=1, outcome=LOST, started=0.0, ended=5.0),
        Attempt(id="0.0.2", number=2, outcome=Completed(), started=10.0, ended=12.0),
    )
    groups = [
        group(
            0,
            rollout(
                0, 0, 1.0, [segment([0, 1, 1], version=4)], attempts=tries, metrics={"level": 3.0, "bad": math.nan}
            ),
            lasting(0, 1, 4.0, 0.0, Truncated("time")),
            lasting(0, 2, 8.0, None, LOST),
            lasting(0, 3, 9.0, None, Cancelled("stale")),
        ),
        group_of_rewards(1, None, None),
        group_of_rewards(2, 1.0, None),
        group_of_rewards(3, 0.5, 0.5),
    ]
    found = build_report(groups, environment="sums", current=6)
    assert (found.informative, found.uniform, found.short, found.failed) == (1, 1, 1, 1)
    assert {cause: (one.fault, one.rollouts) for cause, one in found.missing.items()} == {
        "sandbox.lost": ("infra", 4),
        "cancelled.stale": ("cancelled", 1),
    }
    assert found.missing["cancelled.stale"].seconds.p95 == 9.0
    assert found.retried == {"sandbox.lost": 1}
    assert found.truncated["time"].rollouts == 1
    assert found.truncated["time"].share == 0.2
    assert found.truncated["time"].reward == 0.0
    assert found.environments["sums"].share == 0.5
    assert found.valid_seconds.maximum == 4.0  # the last attempt of the first took 2
    assert found.staleness is not None
    assert found.staleness.maximum == 3
    assert found.staleness.mixed == 0
    assert found.metrics["level"].mean == 3.0
    assert "bad" not in found.metrics
    text = "\n".join(found.lines())
    for figures in ("sandbox.lost (infra): 4 (40.0%)", "5 of 10"):
        assert figures in text, text


def made(slow_fail: bool) -> GroupReport:
    """Create rollouts with long-tailed durations; a tenth is missing, at random or the longest."""
    rng = np.random.default_rng(5)
    seconds = rng.lognormal(3, 1, (200, 8))
    fails = seconds > np.quantile(seconds, 0.9) if slow_fail else rng.random(seconds.shape) < 0.1
    return build_report(
        group(
            index,
            *(
                lasting(index, member, seconds[index, member], None if fails[index, member] else 1.0)
                for member in range(8)
            ),
        )
        for index in range(200)
    )


def test_failures_of_long_rollouts_are_visible_in_the_report() -> None:
    fair, biased = made(False), made(True)
    assert fair.chance_missing_longer is not None
    assert biased.chance_missing_longer is not None
    assert abs(fair.chance_missing_longer - 0.5) < 0.1
    assert biased.chance_missing_longer == 1.0
    assert [band.share for band in biased.by_duration][:3] == [0.0, 0.0, 0.0]
    assert biased.by_duration[3].share > 0.35
    assert all(abs(band.share - 0.1) < 0.06 for band in fair.by_duration)
    assert biased.missing_seconds.p50 > biased.valid_seconds.p95


def test_empty_report_has_lines() -> None:
    found = build_report([])
    assert found.chance_missing_longer is None
    assert found.staleness is None
    assert found.lines()[0].startswith("groups    0")


def test_standard_error_of_the_mean_reward_is_clustered_by_task() -> None:
    found = build_report(
        [group_of_rewards(0, 1.0, 1.0), group_of_rewards(1, 0.0, 0.0), group_of_rewards(2, 1.0, None)]
    )
    assert found.reward == 0.6
    assert found.standard_error == pytest.approx(math.sqrt(3 / 2 * (0.8**2 + 1.2**2 + 0.4**2)) / 5)
    assert found.interval95 is not None
    assert found.per_task["pass@2"].mean == 0.5
    assert (found.per_task["pass@2"].tasks, found.per_task["pass@2"].tasks_left_out) == (2, 1)
    assert found.per_task["avg@2"].mean == pytest.approx(2 / 3)
    assert found.plain()["per_task"]["avg@2"]["tasks"] == 3
