"""What an attempt used, against a sum over every moment."""

from hypothesis import given
from hypothesis import strategies as st

from rookery.engine.attempt_usage import AttemptTimes

KINDS = ("model", "sandbox")
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from([1, -1]), st.integers(0, 5)), max_size=30)


@given(STEPS, st.integers(0, 5))
def test_time_in_which_several_wait_counts_once_and_up_to_now(
    steps: list[tuple[str, int, int]], last: int
) -> None:
    account, now = AttemptTimes(), 1_000
    waiting, waited = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
    for kind, step, passes in [*steps, ("model", 0, last)]:
        step = max(step, -waiting[kind])  # noqa: PLW2901  (nobody leaves who did not come)
        if step:
            account.count_wait(kind, step, now)
            waiting[kind] += step
        assert account.is_waiting == any(waiting.values())
        for one in KINDS:
            waited[one] += passes if waiting[one] else 0
        now += passes
    timing = account.build_timing(2.0, now)
    assert (timing.queue, timing.model, timing.sandbox) == (2.0, waited["model"], waited["sandbox"])


def test_pauses_of_all_stages_are_told_apart() -> None:
    account = AttemptTimes()
    account.end_stage("setup", 1.0, 0.5)
    account.end_stage("run", 4.0, 3.0)
    timing = account.build_timing(0.0, 9.0)
    assert (timing.setup, timing.run, timing.score, timing.paused) == (1.0, 4.0, 0.0, 3.5)
