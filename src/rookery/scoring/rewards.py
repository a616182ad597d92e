"""What scoring returns, and the check that every reward passes."""

from collections.abc import Mapping
from math import isfinite
from numbers import Real

import msgspec

from rookery.core import ScoringError
from rookery.core.errors import describe, encodable


class Score(msgspec.Struct, frozen=True):
    """A reward with its named parts and other numbers worth watching."""

    reward: float
    parts: dict[str, float] = {}
    metrics: dict[str, float] = {}


def checked(value: object, low: float, high: float) -> Score:
    """The score behind what an environment's scoring returned, or `ScoringError(bug.reward)`."""
    if type(value) is float and low <= value <= high and isfinite(value):  # nearly always
        return Score(value)
    score = value if isinstance(value, Score) else Score(_number("the reward", value))
    reward = _number("the reward", score.reward)
    if not low <= reward <= high:
        raise ScoringError(
            f"the reward {reward!r} is outside of the declared range {low:g} to {high:g}; "
            "return a number inside it or declare another reward_range",
            cause="bug.reward",
        )
    return Score(reward, _numbers("part", score.parts), _numbers("metric", score.metrics))


def _numbers(what: str, values: object) -> dict[str, float]:
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise ScoringError(f"the {what}s of the score are no mapping of names to numbers", cause="bug.reward")
    return {encodable(name): _number(f"{what} {name!r:.200}", value) for name, value in values.items()}


def _number(what: str, value: object) -> float:
    try:
        # numpy and torch scalars are Real or have item(); strings and None are neither.
        item = getattr(value, "item", None)
        plain = item() if callable(item) else value
        number = float(plain) if isinstance(plain, Real) else None
    except Exception as error:  # an array of two, an int too large: whatever the value raises
        raise ScoringError(f"{what} is not a number: {describe(error)}", cause="bug.reward") from error
    if number is None:
        raise ScoringError(f"{what} is {_shown(value)}, which is not a number", cause="bug.reward")
    if not isfinite(number):
        raise ScoringError(f"{what} is {number!r}, which is not finite", cause="bug.reward")
    return number


def _shown(value: object) -> str:
    try:
        return f"{value!r:.200}"
    except Exception as error:  # noqa: BLE001  (a `__repr__` of the user's may raise anything)
        return f"a {type(value).__name__} whose repr raised {type(error).__name__}"
