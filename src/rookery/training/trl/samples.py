"""Groups as TRL's async trainer takes them: a sample for each segment. Pure, but for TRL's own type.

Promises:
- a sample is a segment: every token that was sampled trains in exactly one of them, with its rollout's advantage;
- members that failed give no sample, and no baseline and no denominator counts them;
- all samples of a group carry the oldest version that any of its trained tokens has, so that a group is too old
  as a whole or not at all;
- a token without a logprob does not train, and is counted;
- a rollout whose segments contradict each other or its record is missing (`bug.batch`), and affects no other.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from rookery.core import Group, Segment, label
from rookery.training.trl.rows import Baseline, trained, usable_group

MetricValue = float | tuple[float, float]
"""A gauge or a count, or a numerator and a denominator."""


class Sampled(NamedTuple):
    """What one group gives the trainer."""

    samples: list[Any]
    """Of `RolloutSample`."""
    figures: dict[str, MetricValue]


def samples_of(group: Group, *, baseline: Baseline = "leave_one_out", version: int = 0) -> Sampled:
    """The samples of a group; `version` is that of a group in which nothing says one."""
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    from rookery.training.advantages import advantages

    group = usable_group(group)
    rewards = [rollout.reward if rollout.valid else None for rollout in group.rollouts]
    valid = [reward for reward in rewards if reward is not None]
    gains = advantages(rewards, baseline=baseline)
    spread = float(np.std(valid)) if valid else math.nan
    spans = [span for rollout in group.rollouts for segment in trained(rollout) for span in segment.versions]
    oldest = min((span.version for span in spans), default=version)
    prompt = [{"role": message.role, "content": message.text} for message in group.task.prompt]
    found: list[Any] = []
    without = 0
    for rollout, gain in zip(group.rollouts, gains.tolist(), strict=True):
        for segment in trained(rollout):
            ids, mask, logprobs = _arrays(segment)
            without += segment.trained - int(mask.sum())
            if not mask.any():
                continue
            found.append(
                RolloutSample(
                    prompt=prompt,
                    completion=[],  # `rookery show` has it; the trainer needs ids only
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
            was = figures.get(name, 0.0)
            figures[name] = (was if isinstance(was, float) else 0.0) + 1.0
    return Sampled(found, figures)


def _arrays(segment: Segment) -> tuple[Any, Any, Any]:
    ids = np.frombuffer(segment.tokens, "<i4").astype(np.int64)
    logprobs = np.frombuffer(segment.logprobs, "<f4").astype(np.float32)
    known = ~np.isnan(logprobs)
    mask = np.frombuffer(segment.mask, np.uint8).astype(np.int64) * known
    return ids, mask, np.where(known, logprobs, np.float32(0.0))
