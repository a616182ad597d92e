"""Convert rollouts to TRL rows, and shape rewards so that TRL's baseline gives the right advantages. Pure
functions.

Guarantees:
- The token IDs of a row are those of a segment, split before the first trained token. Mask and log
  probabilities are those of the segment from there on.
- A rollout without trained tokens is a row of one token with mask 0.
- A rollout with several segments is represented by the one with the most trained tokens; the others are
  counted.
- With shaped rewards, TRL's "reward minus mean of the group" equals the requested advantage, and the logged
  mean is the mean of the valid rewards.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from rookery.core import Group, Rollout, Segment, label

Baseline: TypeAlias = Literal["leave_one_out", "mean"]


class TrlRow(NamedTuple):
    """One row of a batch: prompt and completion."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    """0.0 where the mask is 0; NaN if the inference engine returned none."""
    env_mask: list[int]
    """1 for tokens that the policy sampled."""


def row_from_segment(segment: Segment) -> TrlRow:
    """Split a segment before its first trained token."""
    ids = np.frombuffer(segment.tokens, "<i4")
    mask = np.frombuffer(segment.mask, np.uint8)
    first = int(mask.argmax())
    logprobs = np.frombuffer(segment.logprobs, "<f4")
    return TrlRow(ids[:first].tolist(), ids[first:].tolist(), logprobs[first:].tolist(), mask[first:].tolist())


def make_missing_row(filler: int) -> TrlRow:
    """Return a row for a rollout without trained tokens, because TRL needs a non-empty row for each prompt."""
    return TrlRow([filler], [filler], [0.0], [0])


def get_trained_segments(rollout: Rollout) -> list[Segment]:
    """Return the segments of a valid rollout that contain trained tokens."""
    return [segment for segment in rollout.segments if segment.trained] if rollout.valid else []


def find_most_trained(segments: Sequence[Segment]) -> Segment:
    """Return the segment with the most trained tokens; of several, the last, which has the longest context."""
    return max(enumerate(segments), key=lambda item: (item[1].trained, item[0]))[1]


def fail_unusable_rollouts(group: Group) -> Group:
    """Return the group with untrainable rollouts marked as `Failed`. Missing log probabilities are left to TRL."""
    from rookery.training.config import BatchConfig
    from rookery.training.rollout_checks import check_rollouts

    rules = BatchConfig(without_logprob="mask", extras=())
    return msgspec.structs.replace(group, rollouts=tuple(check_rollouts([group], rules)))


def describe_rollout(rollout: Rollout) -> dict[str, Any]:
    """Return the data of a rollout that reward functions receive."""
    segments = get_trained_segments(rollout)
    left = sum(segment.trained for segment in segments) - (find_most_trained(segments).trained if segments else 0)
    return {
        "id": rollout.id,
        "task": rollout.task,
        "outcome": label(rollout.outcome),
        "reward": rollout.reward if rollout.valid else None,
        "rewards": dict(rollout.rewards),
        "metrics": dict(rollout.metrics),
        "info": dict(rollout.info),
        "turns": rollout.usage.turns,
        "tool_calls": rollout.usage.tool_calls,
        "versions": sorted({span.version for segment in segments for span in segment.versions}),
        "segments": len(segments),
        "tokens_left_out": left,
    }


def shape_rewards(
    rewards: Sequence[float | None], k: int, *, baseline: Baseline = "leave_one_out", weight: float = 1.0
) -> list[float | None]:
    """Return the rewards of consecutive groups of k as TRL must see them.

    TRL subtracts the mean of a group's rewards; None is ignored. The advantages of the valid members add up to
    zero, so "group mean plus advantage" has the same mean, and TRL's subtraction leaves the advantage. `weight`
    scales the advantages.
    """
    from rookery.training.advantages import compute_advantages

    shaped: list[float | None] = []
    for start in range(0, len(rewards), k):
        group = rewards[start : start + k]
        valid = [reward for reward in group if reward is not None]
        level = math.fsum(valid) / len(valid) if valid else 0.0
        gains = compute_advantages(group, baseline=baseline).tolist()
        shaped += [
            None if reward is None else level + weight * gain for reward, gain in zip(group, gains, strict=True)
        ]
    return shaped
