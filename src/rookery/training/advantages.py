"""How much better than its siblings a rollout was.

Promises:
- only valid rollouts count: a missing one is in no baseline and no spread, and its own advantage is 0;
- fewer than two valid rollouts, or rewards that do not differ, teach nothing: all zero, exactly;
- a baseline of the others is unbiased whatever is missing; one that a rollout is part of shrinks with the group;
- a reward that is not a finite number is refused, never trained.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from rookery.core import UsageError
from rookery.training.errors import BatchError

Baseline: TypeAlias = Literal["leave_one_out", "mean", "none"]
Scale: TypeAlias = Literal["none", "std"]
Float64: TypeAlias = npt.NDArray[np.float64]

_ROUNDING = 1e-12
"""Of the largest reward: rewards closer than this differ by how they were added up, not by what was done."""
_NOTHING = 1e-300
"""Where floats lose their digits."""


def chosen(name: str, value: Any, kind: Any) -> None:
    """Refuses a setting that is not one of its words."""
    if value not in get_args(kind):
        raise UsageError(f"{name} must be one of {', '.join(map(repr, get_args(kind)))}, not {value!r}")


def advantages(
    rewards: Sequence[float | None], *, baseline: Baseline = "leave_one_out", scale: Scale = "none"
) -> Float64:
    """One entry for each member of a group. None is missing data, as in `Group.rewards`.

    `leave_one_out` compares with the mean of the others (RLOO), `mean` with that of all (GRPO), `none` with
    nothing. `std` divides by the sample standard deviation of the valid rewards.
    """
    chosen("baseline", baseline, Baseline)
    chosen("scale", scale, Scale)
    found = np.zeros(len(rewards))
    there = [at for at, reward in enumerate(rewards) if reward is not None]
    for at in there:
        if not math.isfinite(rewards[at] or 0.0):
            raise BatchError(f"the reward of member {at} is {rewards[at]}: a reward is a finite number")
    if len(there) < 2:
        return found
    valid = np.array([rewards[at] for at in there], dtype=np.float64)
    same = _same(valid)
    if same and (baseline != "none" or scale == "std"):
        return found
    count = len(valid)
    with np.errstate(over="ignore", invalid="ignore"):  # what came of it is looked at below
        centred = valid - valid.mean()
        match baseline:
            case "leave_one_out":
                values = centred * (count / (count - 1))
            case "mean":
                values = centred
            case "none":
                values = valid
        if scale == "std":
            most = np.abs(centred).max()  # squares of very large or small rewards would leave the range of floats
            values = values / (most * np.sqrt(np.square(centred / most).sum() / (count - 1)))
    if not np.isfinite(values).all():
        raise BatchError(f"rewards from {valid.min()} to {valid.max()} are too far apart to be compared")
    found[there] = values
    return found


def informative(rewards: Sequence[float | None]) -> bool:
    """Whether a group teaches: at least two valid rewards, and they differ."""
    valid = np.array([reward for reward in rewards if reward is not None], dtype=np.float64)
    return len(valid) > 1 and not _same(valid)


def _same(valid: Float64) -> bool:
    low, high = float(valid.min()), float(valid.max())
    return high - low <= max(_ROUNDING * max(abs(low), abs(high)), _NOTHING)
