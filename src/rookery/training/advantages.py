"""Compute the advantages of the rollouts of a group.

Guarantees:
- Only valid rollouts count. A missing one is in no baseline and no standard deviation, and its advantage is 0.
- With fewer than two valid rollouts, or equal rewards, all advantages are exactly 0.
- The leave-one-out baseline is unbiased, however many rollouts are missing. A baseline that includes the
  rollout itself shrinks advantages in small groups.
- A reward that is not finite is rejected, never trained.
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

_RELATIVE_TOLERANCE = 1e-12
"""Relative to the largest reward. Smaller differences are rounding errors."""
_SMALLEST_NORMAL = 1e-300
"""Below this, floats lose precision."""


def check_choice(name: str, value: Any, kind: Any) -> None:
    """Raise `UsageError` if a setting is not one of its allowed values."""
    if value not in get_args(kind):
        raise UsageError(f"{name} must be one of {', '.join(map(repr, get_args(kind)))}, not {value!r}")


def compute_advantages(
    rewards: Sequence[float | None], *, baseline: Baseline = "leave_one_out", scale: Scale = "none"
) -> Float64:
    """Return the advantage of each member of a group. A reward of None is missing data, as in `Group.rewards`.

    `leave_one_out` subtracts the mean of the other rewards (RLOO), `mean` that of all (GRPO), `none` nothing.
    `std` divides by the sample standard deviation of the valid rewards.
    """
    check_choice("baseline", baseline, Baseline)
    check_choice("scale", scale, Scale)
    advantages = np.zeros(len(rewards))
    members = [at for at, reward in enumerate(rewards) if reward is not None]
    for at in members:
        if not math.isfinite(rewards[at] or 0.0):
            raise BatchError(f"the reward of member {at} is {rewards[at]}: a reward must be a finite number")
    if len(members) < 2:
        return advantages
    valid = np.array([rewards[at] for at in members], dtype=np.float64)
    same = _all_equal(valid)
    if same and (baseline != "none" or scale == "std"):
        return advantages
    count = len(valid)
    with np.errstate(over="ignore", invalid="ignore"):  # checked below
        centred = valid - valid.mean()
        match baseline:
            case "leave_one_out":
                values = centred * (count / (count - 1))
            case "mean":
                values = centred
            case "none":
                values = valid
        if scale == "std":
            most = np.abs(centred).max()  # squares of very large or small rewards would overflow or underflow
            values = values / (most * np.sqrt(np.square(centred / most).sum() / (count - 1)))
    if not np.isfinite(values).all():
        raise BatchError(f"rewards from {valid.min()} to {valid.max()} differ too much to be compared")
    advantages[members] = values
    return advantages


def is_informative(rewards: Sequence[float | None]) -> bool:
    """Return whether a group has at least two valid rewards that differ."""
    valid = np.array([reward for reward in rewards if reward is not None], dtype=np.float64)
    return len(valid) > 1 and not _all_equal(valid)


def _all_equal(valid: Float64) -> bool:
    low, high = float(valid.min()), float(valid.max())
    return high - low <= max(_RELATIVE_TOLERANCE * max(abs(low), abs(high)), _SMALLEST_NORMAL)
