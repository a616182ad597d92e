"""Budgets of a rollout's policy and time limits of its stages."""

from typing import Any

import msgspec


def whole(value: Any) -> Any:
    """Return a float without a fraction, such as 256e6, as an int, and every other value as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Time limits in seconds, and budgets of the policy. None means that the limit is not set at this level.

    Limits can be set for a run, for a task and by an environment. The run's limit wins over the task's, the task's
    over the environment's, and the environment's over the default.
    """

    turns: int | None = None
    """Maximum number of model calls that the policy may make in a rollout."""
    tokens: int | None = None
    """Maximum number of tokens that the policy may sample, over all turns of a rollout."""
    context: int | None = None
    """Maximum number of tokens of prompt and reply together in one turn."""
    queue: float | None = None
    """Time limit for waiting for a runner process."""
    setup: float | None = None
    """Time limit of the setup stage."""
    run: float | None = None
    """Time limit of the run stage. Pauses and time in the inference engine's queue do not count."""
    score: float | None = None
    """Time limit of the score stage."""
    teardown: float | None = None
    """Time limit of the teardown stage."""
    call: float | None = None
    """Time limit of one tool call."""
    test_timeout: float | None = None
    """Time limit of one execution of a task's tests, in environments that grade with tests (`swe` and `agent`)."""
    model_call: float | None = None
    """Time limit of one model call. Time in the inference engine's queue does not count."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and 0 < value < float("inf")):
                raise ValueError(f"limits.{name} must be a finite number above 0, got {value!r}")

    def over(self, below: "Limits") -> "Limits":
        """Return these limits, with the values of `below` for limits that are None here."""
        if self is NO_LIMITS:
            return below
        values = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}
        return msgspec.structs.replace(below, **values) if values else below


NO_LIMITS = Limits()

DEFAULT_LIMITS = Limits(
    turns=64,
    queue=3600.0,
    setup=300.0,
    run=1800.0,
    score=300.0,
    teardown=30.0,
    call=60.0,
    model_call=600.0,
)
