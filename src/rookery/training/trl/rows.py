"""Rollouts as TRL takes them: one row for each, and rewards that make its own baseline the right one. Pure.

Promises:
- a row's ids are the segment's, cut in two before the first token that trains; its mask and logprobs are the
  segment's from there on;
- a rollout without tokens to train is a row of one token whose mask is 0;
- a rollout of several segments is the row of the one that trains most; how much the others would train is counted;
- out of `shaped` TRL's "reward minus the mean of the group's rewards" gives the advantage that was asked for, and
  the mean of what it logs is the mean of the valid rewards.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from rookery.core import Group, Rollout, Segment, label

Baseline: TypeAlias = Literal["leave_one_out", "mean"]


class Row(NamedTuple):
    """One row of a batch: what the model was given, and what came after it."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    """0.0 where the mask is 0; NaN where the engine gave none."""
    env_mask: list[int]
    """1 where the policy sampled."""


def segment_row(segment: Segment) -> Row:
    """A segment that trains, cut before the first token that does."""
    ids = np.frombuffer(segment.tokens, "<i4")
    mask = np.frombuffer(segment.mask, np.uint8)
    first = int(mask.argmax())
    logprobs = np.frombuffer(segment.logprobs, "<f4")
    return Row(ids[:first].tolist(), ids[first:].tolist(), logprobs[first:].tolist(), mask[first:].tolist())


def missing_row(filler: int) -> Row:
    """The place of a rollout that has nothing to train: TRL wants a row for each prompt, and none empty."""
    return Row([filler], [filler], [0.0], [0])


def trained(rollout: Rollout) -> list[Segment]:
    """The segments of a valid rollout in which something trains."""
    return [segment for segment in rollout.segments if segment.trained] if rollout.valid else []


def most(segments: Sequence[Segment]) -> Segment:
    """The one that trains most; the last of several, which has seen most."""
    return max(enumerate(segments), key=lambda item: (item[1].trained, item[0]))[1]


def usable_group(group: Group) -> Group:
    """Return the group with rollouts that cannot be trained on as `Failed`; TRL handles missing logprobs."""
    from rookery.training.config import BatchConfig
    from rookery.training.screening import screened

    rules = BatchConfig(without_logprob="mask", extras=())
    return msgspec.structs.replace(group, rollouts=tuple(screened([group], rules)))


def about(rollout: Rollout) -> dict[str, Any]:
    """What reward functions get to see of a rollout, as plain data."""
    segments = trained(rollout)
    left = sum(segment.trained for segment in segments) - (most(segments).trained if segments else 0)
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


def shaped(
    rewards: Sequence[float | None], k: int, *, baseline: Baseline = "leave_one_out", weight: float = 1.0
) -> list[float | None]:
    """Rewards of groups of k, one after the other, as TRL must see them.

    TRL takes the mean of a group's rewards off each; None counts as not there. The advantages over the valid
    members add up to zero, so the group's own mean plus the advantage has the same mean, and what TRL leaves is
    the advantage. `weight` goes on the advantages.
    """
    from rookery.training.advantages import advantages

    found: list[float | None] = []
    for start in range(0, len(rewards), k):
        group = rewards[start : start + k]
        valid = [reward for reward in group if reward is not None]
        level = math.fsum(valid) / len(valid) if valid else 0.0
        gains = advantages(group, baseline=baseline).tolist()
        found += [
            None if reward is None else level + weight * gain for reward, gain in zip(group, gains, strict=True)
        ]
    return found
