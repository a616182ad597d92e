"""What scoring returns, and the check that every reward passes."""

from math import isfinite
from numbers import Real

import msgspec

from rookery.core import ScoringError


class Score(msgspec.Struct, frozen=True):
    """A reward with its named parts and other numbers worth watching."""

    reward: float
    parts: dict[str, float] = {}
    metrics: dict[str, float] = {}


def checked(value: object, low: float, high: float) -> Score:
    """The score behind what an environment's scoring returned, or `ScoringError(bug.reward)`."""
    score = value if isinstance(value, Score) else Score(_number("the reward", value))
    reward = _number("the reward", score.reward)
    if not low <= reward <= high:
        raise ScoringError(
            f"the reward {reward!r} is outside of the declared range {low:g} to {high:g}; "
            "return a number inside it or declare another reward_range",
            cause="bug.reward",
        )
    return Score(
        reward,
        {name: _number(f"part {name!r}", part) for name, part in score.parts.items()},
        {name: _number(f"metric {name!r}", metric) for name, metric in score.metrics.items()},
    )


def _number(what: str, value: object) -> float:
    # numpy and torch scalars are Real or have item(); strings and None are neither.
    item = getattr(value, "item", None)
    plain = item() if callable(item) else value
    if not isinstance(plain, Real):
        raise ScoringError(f"{what} is {value!r:.200}, which is not a number", cause="bug.reward")
    number = float(plain)
    if not isfinite(number):
        raise ScoringError(f"{what} is {number!r}, which is not finite", cause="bug.reward")
    return number
