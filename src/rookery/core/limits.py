"""Budgets of a rollout and deadlines of its stages."""

from typing import Any

import msgspec


def whole(value: Any) -> Any:
    """Return a float without a fraction, such as 256e6, as an int, and every other value as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Deadlines of stages in seconds, and budgets of the policy. None: not set at this level.

    A limit that the run sets explicitly wins over the task's, then over the environment's, then over the default.
    """

    turns: int | None = None
    """Model calls the policy may make."""
    tokens: int | None = None
    """Tokens the policy may sample, over all turns."""
    context: int | None = None
    """Tokens of prompt and reply together in one turn."""
    queue: float | None = None
    setup: float | None = None
    run: float | None = None
    """Pauses and the upstream's queue do not count."""
    score: float | None = None
    teardown: float | None = None
    call: float | None = None
    """One tool call."""
    test_timeout: float | None = None
    """One run of a task's tests, in environments that grade with tests (`swe` and `agent`)."""
    model_call: float | None = None
    """One model call, without the upstream's queue."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"limits.{name} must be a finite number above 0, got {value!r}")

    def over(self, below: "Limits") -> "Limits":
        """Return these limits, with `below` for limits that are None."""
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
