"""Evaluations report pass rates, rewards and their intervals, clustered by task and without missing data."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from rookery import Context, Environment, Mixture, MixtureEntry
from rookery.core import Group
from rookery.engine import SyncEngine
from rookery.trainer.metrics import evaluate
from rookery.view.stats import Stats
from tests.training.kit import group_of_rewards


class FakeEngine:
    """Returns groups that were made in advance."""

    def __init__(self, groups: list[Group]) -> None:
        self._groups = groups

    def status(self) -> dict[str, Any]:
        return {"environments": {}, "stopped": ""}

    def groups(self, *_: Any, **__: Any) -> Iterator[Group]:
        return iter(self._groups)


def evaluate_groups(*groups: list[float | None], k: int = 2) -> tuple[dict[str, Any], float | None]:
    made = [group_of_rewards(at, *rewards) for at, rewards in enumerate(groups)]
    return evaluate(cast("SyncEngine", FakeEngine(made)), [], k)


def test_pass_rate_is_the_share_of_valid_rollouts_with_reward_one() -> None:
    row, pass_rate = evaluate_groups([1.0, 0.5], [0.0, None], [1.0, 0.9])
    assert pass_rate == row["eval_pass_rate"] == pytest.approx(2 / 5)
    assert row["eval_reward"] == pytest.approx(3.4 / 5)
    assert (row["eval_rollouts"], row["eval_valid"]) == (6, 5)
    assert row["eval_avg@2"] == pytest.approx((0.75 + 0.0 + 0.95) / 3)
    assert row["eval_pass@2"] == 1.0  # the second task has too few valid rollouts
    for name in ("pass_rate", "avg@2", "pass@2"):
        low, high = row[f"eval_{name}_interval95"]
        assert low <= row[f"eval_{name}"] <= high
    assert 0 <= row["eval_pass@2_interval95"][0] < row["eval_pass@2_interval95"][1] == 1


def test_estimates_equal_those_of_the_summary_of_a_run() -> None:
    rewards: list[list[float | None]] = [[1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, None], [1.0, 1.0, 0.0, 0.0]]
    row, pass_rate = evaluate_groups(*rewards, k=4)
    stats = Stats()
    for at, one in enumerate(rewards):
        for rollout in group_of_rewards(at, *one).rollouts:
            stats.add(rollout)
    expected = stats.reward()
    assert pass_rate == expected["pass_rate"]
    assert row["eval_pass_rate_interval95"] == stats.estimate.interval95
    assert {name: row[f"eval_{name}"] for name in ("avg@4", "pass@2", "pass@4")} == {
        name: expected[name] for name in ("avg@4", "pass@2", "pass@4")
    }


def test_evaluation_without_valid_rollouts_has_no_rates() -> None:
    row, pass_rate = evaluate_groups([None, None])
    assert pass_rate is None
    assert row["eval_reward"] is None
    assert row["eval_pass_rate_interval95"] is None
    assert (row["eval_rollouts"], row["eval_valid"]) == (2, 0)


class Failing(Environment):
    """Raises in every rollout."""

    name = "failing"

    async def run(self, ctx: Context) -> None:
        raise RuntimeError("broken on purpose")

    async def score(self, ctx: Context) -> float:
        return 1.0


def test_evaluation_leaves_out_an_environment_that_fails(tmp_path: Path) -> None:
    entries = [MixtureEntry("arithmetic", num_tasks=4), MixtureEntry(Failing(), tasks=["again"] * 30)]
    with SyncEngine(entries, policy="embedded", runners=0, out=tmp_path) as engine:
        tasks = Mixture(entries).tasks()
        for _ in range(2):  # the environment stops during the first evaluation
            row, _ = evaluate(engine, tasks, 1)
            assert row["eval_reward_by_environment"].keys() == {"arithmetic"}
            assert row["eval_valid"] == 4
        assert row["eval_rollouts"] == 4
