"""Convert rollouts to rows of TRL's `GRPOTrainer`, and adjust rewards so that TRL computes the right advantages.

All functions are pure.

Guarantees:
- A row consists of the token IDs of one segment, split before its first trained token into prompt and completion.
  Mask and log probabilities are those of the completion.
- A rollout without trained tokens is a row whose completion is one token with mask 0.
- A rollout with several segments is represented by the one with the most trained tokens; the tokens of the others
  are counted.
- With the adjusted rewards, TRL's "reward minus mean of the group" equals the requested advantage, and the mean
  that TRL logs is the mean of the valid rewards.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from rookery.core import Group, Rollout, Segment, label

Baseline: TypeAlias = Literal["leave_one_out", "mean"]


class TrlRow(NamedTuple):
    """One row of a TRL batch: the prompt and the completion of one rollout."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    """Log probability of each completion token: 0.0 where the mask is 0, NaN if the inference engine returned
    none."""
    env_mask: list[int]
    """One number per completion token: 1 if the policy sampled it, else 0."""


def row_from_segment(segment: Segment) -> TrlRow:
    """Return a segment as a TRL row, split into prompt and completion before its first trained token."""
    ids = np.frombuffer(segment.tokens, "<i4")
    mask = np.frombuffer(segment.mask, np.uint8)
    first = int(mask.argmax())
    logprobs = np.frombuffer(segment.logprobs, "<f4")
    return TrlRow(ids[:first].tolist(), ids[first:].tolist(), logprobs[first:].tolist(), mask[first:].tolist())


def make_missing_row(filler: int) -> TrlRow:
    """Return a row that does not train, for a rollout without trained tokens.

    TRL needs a non-empty row for each prompt. `filler` is the token ID of its prompt and its completion.
    """
    return TrlRow([filler], [filler], [0.0], [0])


def get_trained_segments(rollout: Rollout) -> list[Segment]:
    """Return the segments of a valid rollout that contain trained tokens."""
    return [segment for segment in rollout.segments if segment.trained] if rollout.valid else []


def find_most_trained(segments: Sequence[Segment]) -> Segment:
    """Return the segment with the most trained tokens; if several have as many, the last of them."""
    return max(enumerate(segments), key=lambda item: (item[1].trained, item[0]))[1]


def fail_unusable_rollouts(group: Group) -> Group:
    """Return the group with the outcome `Failed` for rollouts that cannot be trained on.

    Missing log probabilities do not make a rollout fail here.
    """
    from rookery.training.config import BatchConfig
    from rookery.training.rollout_checks import check_rollouts

    rules = BatchConfig(without_logprob="mask", extras=())
    return msgspec.structs.replace(group, rollouts=tuple(check_rollouts([group], rules)))


def describe_rollout(rollout: Rollout) -> dict[str, Any]:
    """Return the data of a rollout that TRL passes to reward functions in the column `rollout`."""
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
    """Return adjusted rewards from which TRL computes the requested advantages.

    `rewards` consists of consecutive groups of k rewards; None is a missing reward and stays None. TRL subtracts
    the mean of a group's rewards from each. The adjusted reward is the group's mean plus the advantage. Advantages
    add up to zero, so the mean does not change and TRL's subtraction leaves the advantage. `weight` multiplies the
    advantages.
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
