"""The score of a rollout, and the check that every score must pass.

The reward must be a finite number in the range that the environment declares. All other numbers of a score must be
finite.
"""

from collections.abc import Mapping
from math import fsum, isfinite
from numbers import Real

import msgspec

from rookery.core import ScoringError
from rookery.core.errors import describe, escape_surrogates


class Score(msgspec.Struct, frozen=True):
    """The reward of a rollout, with its named components (`parts`) and other metrics."""

    reward: float
    parts: dict[str, float] = {}
    metrics: dict[str, float] = {}

    @classmethod
    def from_parts(
        cls,
        parts: Mapping[str, float],
        weights: Mapping[str, float] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> "Score":
        """Return a score whose reward is the sum of its parts times `weights`. A weight defaults to 1."""
        given = weights or {}
        reward = fsum(given.get(name, 1.0) * value for name, value in parts.items())
        return cls(reward, dict(parts), dict(metrics or {}))


class Ungraded(msgspec.Struct, frozen=True):
    """Result of `score` for a rollout that nothing can grade. The rollout has no reward and does not train.

    It counts in no mean and in no baseline. It can be graded later with `rookery rescore RUN --scorer NAME`.
    """

    metrics: dict[str, float] = {}


def check_score(value: object, low: float, high: float, weights: Mapping[str, float]) -> Score | Ungraded:
    """Return what the `score` stage of an environment returned: as `check_reward` does, or `Ungraded`."""
    if isinstance(value, Ungraded):
        return Ungraded(_check_numbers("metric", value.metrics))
    return check_reward(value, low, high, weights)


def check_reward(value: object, low: float, high: float, weights: Mapping[str, float] | None = None) -> Score:
    """Return the value that an environment's scoring returned, as a `Score`.

    If `weights` is not None, the value may be a dictionary of the parts of the reward, which is their sum times
    `weights`. It must have at least one part.
    Raise `ScoringError(bug.reward)` if the reward is not a finite number from `low` to `high`, or if a part or
    metric is not a finite number.
    """
    if type(value) is float and low <= value <= high and isfinite(value):  # fast path
        return Score(value)
    if isinstance(value, Mapping) and value and weights is not None:
        score = Score.from_parts(_check_numbers("part", value), weights)
    else:
        score = value if isinstance(value, Score) else Score(_to_number("the reward", value))
    reward = _to_number("the reward", score.reward)
    if not low <= reward <= high:
        raise ScoringError(
            (
                f"the reward {reward!r} is outside the declared range {low:g} to {high:g}: return a number "
                "inside it, or declare another reward_range"
            ),
            cause="bug.reward",
        )
    return Score(reward, _check_numbers("part", score.parts), _check_numbers("metric", score.metrics))


def _check_numbers(what: str, values: object) -> dict[str, float]:
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise ScoringError(
            f"the {what}s of the score must map names to numbers, got {_safe_repr(values)}", cause="bug.reward"
        )
    return {escape_surrogates(name): _to_number(f"{what} {name!r:.200}", value) for name, value in values.items()}


def _to_number(what: str, value: object) -> float:
    try:
        # NumPy and torch scalars are `Real` or have `item()`; strings and None have neither.
        item = getattr(value, "item", None)
        plain = item() if callable(item) else value
        number = float(plain) if isinstance(plain, Real) else None
    except Exception as error:  # an array of two elements, an int too large for a float, …
        raise ScoringError(f"{what} is not a number: {describe(error)}", cause="bug.reward") from error
    if number is None:
        raise ScoringError(f"{what} is not a number: {_safe_repr(value)}", cause="bug.reward")
    if not isfinite(number):
        raise ScoringError(f"{what} is not finite: {number!r}", cause="bug.reward")
    return number


def _safe_repr(value: object) -> str:
    try:
        return f"{value!r:.200}"
    except Exception as error:  # noqa: BLE001  (a user's `__repr__` may raise anything)
        return f"{type(value).__name__} (its __repr__ raised {type(error).__name__})"
