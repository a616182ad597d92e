"""Convert groups of rollouts to samples of TRL's `AsyncGRPOTrainer`, one per segment (token sequence).

Guarantees:
- Every sampled token with a log probability trains in exactly one sample, with the advantage of its rollout.
- Failed rollouts give no sample, and no baseline or denominator counts them.
- All samples of a group carry the oldest policy version of its trained tokens, so that the trainer drops a stale
  group as a whole.
- A token without a log probability does not train and is counted.
- A rollout whose segments contradict each other or its record is treated as failed (`bug.batch`) and does not
  affect others.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from rookery.core import Group, Segment, label
from rookery.training.trl.rows import Baseline, fail_unusable_rollouts, get_trained_segments

MetricValue = float | tuple[float, float]
"""Value of a metric: a number, or a pair of numerator and denominator whose sums over groups form a ratio."""


class GroupSamples(NamedTuple):
    """The samples of one group for TRL, and metrics about the group."""

    samples: list[Any]
    """TRL's `RolloutSample` objects."""
    figures: dict[str, MetricValue]
    """Metrics by name, for the trainer's log."""


def make_samples(group: Group, *, baseline: Baseline = "leave_one_out", version: int = 0) -> GroupSamples:
    """Return the TRL samples of a group, and metrics about it.

    `version` is the policy version of the samples if no trained token has a version.
    """
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    from rookery.training.advantages import compute_advantages

    group = fail_unusable_rollouts(group)
    rewards = [rollout.reward if rollout.valid else None for rollout in group.rollouts]
    valid = [reward for reward in rewards if reward is not None]
    gains = compute_advantages(rewards, baseline=baseline)
    spread = float(np.std(valid)) if valid else math.nan
    spans = [
        span
        for rollout in group.rollouts
        for segment in get_trained_segments(rollout)
        for span in segment.versions
    ]
    oldest = min((span.version for span in spans), default=version)
    prompt = [{"role": message.role, "content": message.text} for message in group.task.prompt]
    samples: list[Any] = []
    without = 0
    for rollout, gain in zip(group.rollouts, gains.tolist(), strict=True):
        for segment in get_trained_segments(rollout):
            ids, mask, logprobs = _read_arrays(segment)
            without += segment.trained - int(mask.sum())
            if not mask.any():
                continue
            samples.append(
                RolloutSample(
                    prompt=prompt,
                    completion=[],  # the trainer needs token IDs only; `rookery show` displays the text
                    input_ids=ids,
                    completion_mask=mask,
                    old_log_probs=logprobs,
                    advantage=gain,
                    model_version=oldest,
                    group_id=group.index,
                    metrics={
                        "reward": float(rollout.reward or 0.0),
                        "reward_std": spread,
                        **{f"rewards/{name}": float(value) for name, value in rollout.rewards.items()},
                        **{f"rookery/metrics/{name}": float(value) for name, value in rollout.metrics.items()},
                    },
                )
            )
    figures: dict[str, MetricValue] = {"rookery/missing": (float(len(rewards) - len(valid)), float(len(rewards)))}
    if without:
        figures["rookery/tokens_without_logprob_total"] = float(without)
    for rollout in group.rollouts:
        if not rollout.valid:
            name = f"rookery/missing/{label(rollout.outcome)}_total"
            count = figures.get(name, 0.0)
            figures[name] = (count if isinstance(count, float) else 0.0) + 1.0
    return GroupSamples(samples, figures)


def _read_arrays(segment: Segment) -> tuple[Any, Any, Any]:
    ids = np.frombuffer(segment.tokens, "<i4").astype(np.int64)
    logprobs = np.frombuffer(segment.logprobs, "<f4").astype(np.float32)
    known = ~np.isnan(logprobs)
    mask = np.frombuffer(segment.mask, np.uint8).astype(np.int64) * known
    return ids, mask, np.where(known, logprobs, np.float32(0.0))
