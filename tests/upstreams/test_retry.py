"""The retry controller, without a clock."""

from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from rookery.upstreams.replica import retry_after
from rookery.upstreams.retry import MAX_RETRY_AFTER, Backoff, FailureKind

KINDS = get_args(FailureKind)
draws = st.floats(0, 1, exclude_max=True)
seconds = st.floats(0, 1e5)


kinds = st.sampled_from(KINDS)
counts = st.integers(0, 100)


@given(kinds, counts, counts, seconds, seconds, draws, st.none() | seconds)
def test_no_delay_ends_at_or_after_the_deadline(kind, attempt, retries, elapsed, deadline, draw, after):
    delay = Backoff(retries=retries).delay(
        kind, attempt=attempt, elapsed=elapsed, deadline=deadline, draw=draw, retry_after=after
    )
    if delay is not None:
        assert delay >= 0
        assert elapsed + delay < deadline


@given(st.sampled_from(KINDS), st.integers(0, 20), draws)
def test_call_is_retried_at_most_retries_times(kind, retries, draw):
    backoff = Backoff(retries=retries)
    tries = 0
    while backoff.delay(kind, attempt=tries, elapsed=0, deadline=1e9, draw=draw, elsewhere=True) is not None:
        tries += 1
        assert tries <= retries
    assert tries == (0 if kind == "final" else retries)


@given(st.integers(1, 20), draws)
def test_server_error_is_retried_once_and_only_at_another_replica(retries, draw):
    backoff = Backoff(retries=retries)
    ask = {"elapsed": 0, "deadline": 1e9, "draw": draw}
    assert backoff.delay("error", attempt=0, **ask) is None
    assert backoff.delay("error", attempt=0, elsewhere=True, **ask) is not None
    assert backoff.delay("error", attempt=1, dropped=1, elsewhere=True, **ask) is None


@given(st.integers(1, 20), draws)
def test_dropped_connection_is_retried_once(retries, draw):
    backoff = Backoff(retries=retries)
    assert backoff.delay("dropped", attempt=0, dropped=0, elapsed=0, deadline=1e9, draw=draw) is not None
    assert backoff.delay("dropped", attempt=1, dropped=1, elapsed=0, deadline=1e9, draw=draw) is None
    assert backoff.delay("dropped", attempt=0, dropped=1, elapsed=0, deadline=1e9, draw=draw) is None


@given(st.integers(0, 40), draws)
def test_delays_are_sampled_from_a_window_that_doubles_up_to_the_cap(attempt, draw):
    backoff = Backoff(retries=100, base=0.25, cap=8)
    delay = backoff.delay("connect", attempt=attempt, elapsed=0, deadline=1e9, draw=draw)
    assert delay is not None
    assert 0 <= delay <= min(8, 0.25 * 2**attempt)


@given(seconds, draws)
def test_retry_after_is_honoured_up_to_its_cap(after, draw):
    delay = Backoff().delay("overloaded", attempt=0, elapsed=0, deadline=1e9, draw=draw, retry_after=after)
    assert delay is not None
    assert min(after, MAX_RETRY_AFTER) <= delay <= MAX_RETRY_AFTER + Backoff().base


@given(st.text() | st.none())
def test_any_retry_after_header_is_seconds_or_nothing(value):
    seconds = retry_after(value)
    assert seconds is None or 0 <= seconds < float("inf")


def test_retry_after_reads_numbers_and_dates():
    assert retry_after("7") == 7
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert retry_after("soon") is None
    assert retry_after("nan") is None
