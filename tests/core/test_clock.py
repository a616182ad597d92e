"""`StageClock` does not charge time on hold; checked against a simple model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.core import StageClock

steps = st.lists(
    st.one_of(st.just("stop"), st.just("restart"), st.integers(0, 1000)),
    max_size=60,
)


@given(steps, st.integers(0, 10**6), st.integers(1, 5000))
def test_time_on_hold_is_not_charged_and_holds_nest(sequence: list[str | int], start: int, budget: int) -> None:
    """Use whole numbers, so that the model and the clock agree exactly."""
    clock = StageClock(float(start), float(budget))
    now, holds, charged = start, 0, 0
    for step in sequence:
        match step:
            case "stop":
                clock.stop(now)
                holds += 1
            case "restart" if holds:
                holds -= 1
                assert clock.restart(now) == (holds == 0)
            case "restart":
                with pytest.raises(ValueError):
                    clock.restart(now)
            case int():
                now += step
                charged += 0 if holds else step
        assert clock.stopped == (holds > 0)
        assert clock.used(now) == charged
        assert clock.remaining(now) == budget - charged


@given(steps, st.floats(0, 1e9), st.floats(0.001, 1e6))
def test_the_clock_never_runs_backwards(sequence: list[str | int], start: float, budget: float) -> None:
    clock = StageClock(start, budget)
    now, holds, last = start, 0, 0.0
    for step in sequence:
        if step == "stop":
            clock.stop(now)
            holds += 1
        elif step == "restart":
            if holds:
                clock.restart(now)
                holds -= 1
        else:
            now += int(step) / 997
        used = clock.used(now)
        assert used >= last - 1e-6
        last = used
