"""Metrics of a training run: one row per step, and evaluations on held-out tasks."""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from rookery.core import Failed, Group, Rollout, Task, label
from rookery.core.estimates import RewardEstimate, shown_ks
from rookery.engine import Stopped, SyncEngine
from rookery.trainer.errors import TrainingError
from rookery.training import Batch


class StepStats(msgspec.Struct, kw_only=True):
    """What one training step measured. Means are over trained tokens."""

    loss: float = 0.0
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    entropy: float = 0.0
    sampler_kl: float = 0.0
    """KL(mu || pi_old), estimated as r - log r - 1 with r = pi_old / mu. It measures numerics and staleness."""
    sampler_ratio: float = 1.0
    """The largest factor between pi_old and mu at one token, in either direction."""
    clipped: float = 0.0
    """Share of tokens without a gradient because of clipping or masking."""
    tokens: int = 0
    updates: int = 0


def evaluate(engine: SyncEngine, tasks: Sequence[Task], k: int) -> tuple[dict[str, Any], float | None]:
    """Run every task k times with the current weights; return a row of metrics, and the pass rate.

    A rollout passes if its reward is 1, as in the summary of `rookery run`. Failed rollouts are missing data. All
    intervals are clustered by task. The pass rate is None if every rollout failed. Environments of a mixture that
    are stopped, because too many of their rollouts failed, are left out.
    """
    began = time.monotonic()
    rollouts: list[Rollout] = []
    stopped = _find_stopped(engine)
    tasks = [task for task in tasks if task.environment not in stopped]
    try:
        if tasks or not stopped:
            for group in engine.groups(tasks, k=k, name="eval", restart=True, load_tokens=False):
                rollouts += group.rollouts
    except Stopped:
        if engine.status()["stopped"]:
            raise  # the whole run, and not only an environment
    rewards, passes = RewardEstimate(), RewardEstimate()
    for rollout in rollouts:
        if rollout.valid:
            rewards.add(rollout.task, rollout.reward or 0.0)
            passes.add(rollout.task, float(rollout.reward == 1.0))
    row: dict[str, Any] = {
        "eval_reward": rewards.mean if rewards.valid else None,
        "eval_interval95": rewards.interval95,
        "eval_pass_rate": passes.mean if passes.valid else None,
        "eval_pass_rate_interval95": passes.interval95,
        "eval_rollouts": len(rollouts),
        "eval_valid": rewards.valid,
        **_average_by_environment("eval_reward", rollouts),
    }
    average = {f"avg@{k}": rewards.average()} if k > 1 else {}
    for name, one in (average | {f"pass@{count}": passes.pass_at(count) for count in shown_ks(k)}).items():
        row[f"eval_{name}"], row[f"eval_{name}_interval95"] = (
            one.mean,
            one.interval95(rate=name.startswith("pass")),
        )
    return row | {"eval_seconds": time.monotonic() - began}, row["eval_pass_rate"]


def step_row(seen: Sequence[Group], batch: Batch, version: int) -> dict[str, Any]:
    """Return the metrics of a step's rollouts. `seen` are its groups and those that `refill` replaced."""
    rollouts = [rollout for group in seen for rollout in group.rollouts]
    rewards = [rollout.reward for rollout in rollouts if rollout.valid and rollout.reward is not None]
    failed = Counter(label(rollout.outcome) for rollout in rollouts if isinstance(rollout.outcome, Failed))
    ages = version - batch.versions[batch.mask] if batch.mask.any() else np.zeros(1)
    lengths = batch.lengths if len(batch.segments) else np.zeros(1)
    return {
        "reward": float(np.mean(rewards)) if rewards else None,
        **_average_by_environment("reward", rollouts),
        "pass_rate": float(np.mean([reward == 1.0 for reward in rewards])) if rewards else None,
        "rollouts": len(rollouts),
        "valid": len(rewards),
        "failed": dict(failed.most_common()),
        "groups": len(seen),
        "informative": int(sum(kind == "informative" for kind in batch.groups.kind)),
        "sampled_tokens": int(sum(rollout.usage.sampled_tokens for rollout in rollouts)),
        "length_mean": float(np.mean(lengths)),
        "length_max": int(np.max(lengths)),
        "staleness_mean": float(np.mean(ages)),
        "staleness_max": int(np.max(ages)),
        **{f"metric_{name}": float(np.mean(values)) for name, values in _collect_metrics(rollouts).items()},
    }


def _find_stopped(engine: SyncEngine) -> set[str]:
    """Return the names of the environments of a mixture that are stopped."""
    return {name for name, one in engine.status()["environments"].items() if one["stopped"]}


def _average_by_environment(name: str, rollouts: Sequence[Rollout]) -> dict[str, dict[str, float]]:
    """Return the mean reward of each environment of a mixture as the metric `NAME_by_environment`."""
    found: dict[str, list[float]] = {}
    for rollout in rollouts:
        if rollout.valid and rollout.reward is not None and rollout.environment:
            found.setdefault(rollout.environment, []).append(rollout.reward)
    means = {environment: float(np.mean(rewards)) for environment, rewards in sorted(found.items())}
    return {f"{name}_by_environment": means} if means else {}


def _collect_metrics(rollouts: Sequence[Rollout]) -> dict[str, list[float]]:
    """Return the values of each metric that the environment recorded for valid rollouts."""
    found: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.metrics.items() if rollout.valid else ():
            found.setdefault(name, []).append(value)
    return found


def no_signal_error(seen: Sequence[Group], steps: int) -> TrainingError:
    """Return the error for training steps without an informative group. The message says why there was none."""
    rollouts = [rollout for group in seen for rollout in group.rollouts]
    failed = Counter(label(rollout.outcome) for rollout in rollouts if isinstance(rollout.outcome, Failed))
    if rollouts and failed.total() == len(rollouts):
        cause, count = failed.most_common(1)[0]
        why = f"every rollout failed ({count} of {len(rollouts)} with {cause}): look at one with `rookery show`"
    else:
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        mean = sum(rewards) / len(rewards) if rewards else 0.0
        why = (
            f"the rewards within each group are equal (mean {mean:.3g}): choose tasks that the policy solves "
            "sometimes, or a larger --group-size"
        )
    return TrainingError(f"{steps} consecutive steps had nothing to learn from: {why}", reason="no_signal")
