"""Samples of TRL's `AsyncGRPOTrainer`, made from groups of rollouts."""

from collections import Counter
from typing import Any, TypeAlias

import numpy as np

from rookery.core import Group
from rookery.training.advantages import Baseline
from rookery.training.config import BatchConfig
from rookery.training.rows import Row, clip_rows, count_left_out_tokens, make_rows, split_by_rollout

MetricValue: TypeAlias = float | tuple[float, float]
"""Value of a metric: a number, or a pair of numerator and denominator whose sums over groups form a ratio."""


def make_samples(
    group: Group, *, baseline: Baseline = "leave_one_out", version: int = 0, context: int | None = None
) -> tuple[list[Any], dict[str, MetricValue]]:
    """Return TRL's `RolloutSample` objects of a group, one per segment, and metrics about the group.

    All samples carry the oldest policy version of the group's trained tokens, so that the trainer drops a stale
    group as a whole; `version` is used if no token has one. A token without a log probability does not train.
    Samples are clipped to `context` tokens; a metric counts the trained tokens after them.
    """
    whole = make_rows([group], BatchConfig(baseline=baseline, without_logprob="mask", extras=()))
    rows = clip_rows(whole, context)
    rollouts = [part[0] for part in split_by_rollout(rows)]
    rewards = [row.reward for row in rollouts if row.reward is not None]
    trained = [row for row in rows if row.trained]
    oldest = min((row.version_range[0] for row in trained if row.version_range), default=version)
    prompt = [{"role": message.role, "content": message.text} for message in group.task.prompt]
    spread = float(np.std(rewards)) if rewards else 0.0
    samples = [_make_sample(row, prompt, oldest, spread) for row in trained]
    figures: dict[str, MetricValue] = {
        "rookery/missing": (float(len(rollouts) - len(rewards)), float(len(rollouts)))
    }
    valid = {row.rollout for row in rollouts if row.valid}
    sampled = sum(one.trained for rollout in group.rollouts if rollout.id in valid for one in rollout.segments)
    counts = Counter(
        f"missing/{'ungraded' if row.record.ungraded else row.outcome}" for row in rollouts if not row.valid
    )
    counts["tokens_without_logprob"] = sampled - sum(row.trained for row in whole)
    counts["tokens_left_out"] = count_left_out_tokens(whole, rows)
    figures |= {f"rookery/{name}_total": float(count) for name, count in counts.items() if count}
    return samples, figures


def _make_sample(row: Row, prompt: list[dict[str, str]], version: int, spread: float) -> Any:
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    return RolloutSample(
        prompt=prompt,
        completion=[],  # the trainer needs token IDs only; `rookery show` displays the text
        input_ids=row.tokens.astype(np.int64),
        completion_mask=row.mask.astype(np.int64),
        old_log_probs=row.logprobs,
        advantage=row.advantage,
        model_version=version,
        group_id=row.group,
        metrics={
            "reward": float(row.reward or 0.0),
            "reward_std": spread,
            **{f"rewards/{name}": float(value) for name, value in row.record.rewards.items()},
            **{f"rookery/metrics/{name}": float(value) for name, value in row.record.metrics.items()},
        },
    )
