"""Times of an attempt, compared with a sum over every moment."""

from hypothesis import given
from hypothesis import strategies as st

from rookery.engine.attempt_usage import AttemptTimes

KINDS = ("tool", "sandbox")
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from([1, -1]), st.integers(0, 5)), max_size=30)


@given(STEPS, st.integers(0, 5))
def test_overlapping_waits_count_once_and_open_waits_count_until_now(
    steps: list[tuple[str, int, int]], last: int
) -> None:
    account, now = AttemptTimes(), 1_000
    waiting, waited = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
    for kind, step, passes in [*steps, ("tool", 0, last)]:
        step = max(step, -waiting[kind])  # noqa: PLW2901  (a wait cannot end before it starts)
        if step:
            account.count_wait(kind, step, now)
            waiting[kind] += step
        assert account.is_waiting == any(waiting.values())
        for one in KINDS:
            waited[one] += passes if waiting[one] else 0
        now += passes
    timing = account.build_timing(2.0, now, 7.0)
    assert (timing.queue, timing.model, timing.sandbox) == (2.0, 7.0, waited["sandbox"])


def test_pauses_are_reported_separately_from_stage_times() -> None:
    account = AttemptTimes()
    account.end_stage("setup", 1.0, 0.5)
    account.end_stage("run", 4.0, 3.0)
    timing = account.build_timing(0.0, 9.0, 0.0)
    assert (timing.setup, timing.run, timing.score, timing.paused) == (1.0, 4.0, 0.0, 3.5)
