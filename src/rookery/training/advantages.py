"""Compute the advantages of the rollouts of a group, that is of the k rollouts of one task.

Guarantees:
- Only rollouts with a reward count. A rollout without one is in no baseline and no standard deviation, and its
  advantage is 0.
- With fewer than two rewards, all advantages are exactly 0. With equal rewards they are 0 as well, unless neither
  a baseline nor a scale is used.
- The leave-one-out baseline is unbiased, however many rewards are missing. A baseline that includes the
  rollout itself shrinks advantages in small groups.
- A reward that is not finite raises `BatchError`.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from rookery.core import UsageError
from rookery.core.errors import BatchError

Baseline: TypeAlias = Literal["leave_one_out", "mean", "none"]
Scale: TypeAlias = Literal["none", "std"]
Float64: TypeAlias = npt.NDArray[np.float64]

_RELATIVE_TOLERANCE = 1e-12
"""Rewards whose difference, relative to the largest absolute reward, is at most this are treated as equal."""
_SMALLEST_NORMAL = 1e-300
"""Rewards whose absolute difference is at most this are treated as equal, because such small floats lose
precision."""


def check_choice(name: str, value: Any, kind: Any) -> None:
    """Raise `UsageError` if `value` is not one of the values of the `Literal` type `kind`.

    `name` is the name of the setting in the message.
    """
    if value not in get_args(kind):
        raise UsageError(f"{name} must be one of {', '.join(map(repr, get_args(kind)))}, not {value!r}")


def compute_advantages(
    rewards: Sequence[float | None], *, baseline: Baseline = "leave_one_out", scale: Scale = "none"
) -> Float64:
    """Return the advantage of each rollout of a group. A reward of None is missing and gets the advantage 0.

    `baseline` says what is subtracted from a reward: the mean of the other rewards (`leave_one_out`, as in RLOO),
    the mean of all rewards (`mean`, as in GRPO), or nothing (`none`). `scale='std'` divides the result by the
    sample standard deviation of the rewards.
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
        raise BatchError(
            f"rewards from {valid.min()} to {valid.max()} differ too much: their advantages are not finite numbers"
        )
    advantages[members] = values
    return advantages


def is_informative(rewards: Sequence[float | None]) -> bool:
    """Return whether at least two of a group's rewards differ. None is a missing reward."""
    valid = np.array([reward for reward in rewards if reward is not None], dtype=np.float64)
    return len(valid) > 1 and not _all_equal(valid)


def _all_equal(valid: Float64) -> bool:
    low, high = float(valid.min()), float(valid.max())
    return high - low <= max(_RELATIVE_TOLERANCE * max(abs(low), abs(high)), _SMALLEST_NORMAL)
