"""Retry policy, circuit breaker and crash attribution, tested as pure functions without a clock."""

import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.core import CAUSES, Attempt, Cancelled, Completed, Failed, Outcome, Truncated
from rookery.engine.circuit_breaker import MIN_ATTEMPTS, CircuitBreaker
from rookery.engine.crash_attribution import KILLS_ALONE, CrashAttribution
from rookery.engine.retry import MAX_UNCHARGED, EndRollout, Retry, RetryPolicy


def make_attempt(outcome: Outcome, *, charged: bool = True, policy_loss: bool = False) -> Attempt:
    return Attempt(id="0.0.1", number=1, outcome=outcome, charged=charged, policy_loss=policy_loss)


INFRA = Failed("infra", "sandbox.lost", "gone")
TASK = Failed("task", "task.invalid", "bad row")
BUG = Failed("bug", "bug.environment", "raised")
outcomes: st.SearchStrategy[Outcome] = st.sampled_from(
    [Completed(), Truncated("time"), Truncated("lost"), Cancelled("user"), Cancelled("filtered"), INFRA, TASK, BUG]
)
endings = st.builds(make_attempt, outcomes, charged=st.booleans(), policy_loss=st.booleans())
failures = st.builds(make_attempt, st.just(INFRA), charged=st.booleans(), policy_loss=st.booleans())
jitters = st.floats(0.0, 1.0, exclude_max=True)
policies = st.builds(RetryPolicy, st.integers(1, 6), st.floats(0.001, 10.0), st.floats(0.001, 60.0))


# ---- retry


@given(policies, st.lists(failures, max_size=8), endings, jitters)
def test_only_infra_faults_are_retried(
    policy: RetryPolicy, before: list[Attempt], last: Attempt, jitter: float
) -> None:
    decision = policy.decide([*before, last], jitter)
    if not (isinstance(last.outcome, Failed) and last.outcome.fault == "infra"):
        assert decision == EndRollout(last.outcome)
    if isinstance(decision, Retry):
        assert last.outcome == INFRA


@pytest.mark.long
@given(policies, st.lists(st.tuples(st.booleans(), jitters), min_size=60, max_size=60))
def test_retry_budget_bounds_the_charged_attempts(policy: RetryPolicy, tries: list[tuple[bool, float]]) -> None:
    history: list[Attempt] = []
    for charged, jitter in tries:
        history.append(make_attempt(INFRA, charged=charged))
        decision = policy.decide(history, jitter)
        if isinstance(decision, EndRollout):
            assert decision == EndRollout(INFRA)
            break
    charged_for = sum(attempt.charged for attempt in history)
    assert isinstance(decision, EndRollout)
    assert charged_for <= policy.attempts
    assert len(history) - charged_for <= MAX_UNCHARGED
    assert charged_for == policy.attempts or len(history) - charged_for == MAX_UNCHARGED


@given(policies, st.integers(1, 5), jitters)
def test_back_off_grows_up_to_the_cap(policy: RetryPolicy, count: int, jitter: float) -> None:
    generous = RetryPolicy(2000, policy.base, policy.cap)
    delays = []
    for n in (count, count + 1, 1999):
        decision = generous.decide([make_attempt(INFRA)] * n, jitter)
        assert isinstance(decision, Retry)
        delays.append(decision.delay)
        full = min(policy.cap, policy.base * 2.0 ** min(n - 1, 100))
        assert full / 2 <= decision.delay <= full
    assert delays == sorted(delays)


@given(policies, st.lists(failures, max_size=8), jitters)
def test_exhausted_sandbox_is_not_retried(policy: RetryPolicy, before: list[Attempt], jitter: float) -> None:
    last = make_attempt(Failed("infra", "sandbox.exhausted", "the sandbox ran out of memory"))
    assert policy.decide([*before, last], jitter) == EndRollout(Truncated("lost"), minimum_reward=True)


def test_attempts_lost_in_another_rollouts_crash_are_retried_uncharged_up_to_a_bound() -> None:
    policy = RetryPolicy(attempts=1)
    lost = make_attempt(Failed("infra", "runner.lost", "a neighbour crashed"), charged=False)
    for n in range(1, MAX_UNCHARGED):
        assert policy.decide([lost] * n, 0.5) == Retry(0.0)
    assert policy.decide([lost] * MAX_UNCHARGED, 0.5) == EndRollout(lost.outcome)
    assert policy.decide([*[lost] * 5, make_attempt(INFRA)], 0.5) == EndRollout(INFRA)


LOSS = make_attempt(INFRA, policy_loss=True)
OTHER = make_attempt(INFRA)
NEIGHBOUR = make_attempt(INFRA, charged=False)


@pytest.mark.parametrize(
    ("history", "final"),
    [
        ([LOSS], False),
        ([LOSS, LOSS], True),
        ([OTHER, LOSS], False),
        ([LOSS, OTHER], False),
        ([LOSS, OTHER, LOSS], False),
        ([OTHER, LOSS, LOSS], True),
        (
            [LOSS, NEIGHBOUR, LOSS],
            True,
        ),  # an attempt lost in the crash of another rollout does not reset the count
        ([NEIGHBOUR, LOSS], False),
    ],
)
def test_policy_that_loses_its_sandbox_twice_in_a_row_is_responsible(history: list[Attempt], final: bool) -> None:
    decision = RetryPolicy(attempts=9).decide(history, 0.0)
    assert (decision == EndRollout(Truncated("lost"), minimum_reward=True)) == final
    assert isinstance(decision, EndRollout) == final


# ---- breaker


def feed(breaker: CircuitBreaker, sequence: list[Outcome], under_way: int = 0) -> list[bool]:
    return [breaker.observe(outcome, under_way) for outcome in sequence]


@given(
    st.lists(st.tuples(outcomes, st.integers(0, 60)), max_size=300),
    st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    st.sampled_from([1, 64]),
)
def test_breaker_opens_at_the_failure_rate_over_a_minimum_of_attempts(
    sequence: list[tuple[Outcome, int]], rate: float, concurrency: int
) -> None:
    breaker = CircuitBreaker(rate, concurrency=concurrency)
    window = max(100, 2 * concurrency)
    seen: list[bool] = []
    for outcome, under_way in sequence:
        opened_now = breaker.observe(outcome, under_way)
        if isinstance(outcome, Cancelled):
            assert not opened_now
            continue
        bad = isinstance(outcome, Failed) and outcome.fault != "task"
        seen.append(bad)
        last = seen[-window:]
        over = bad and len(last) >= MIN_ATTEMPTS and sum(last) > rate * (len(last) + under_way)
        assert opened_now == over
        assert bool(breaker.message) == over
        if over:
            break
    else:
        assert breaker.message == ""


def test_few_early_failures_do_not_open_the_breaker() -> None:
    breaker = CircuitBreaker(0.5)
    assert not any(feed(breaker, [BUG] * (MIN_ATTEMPTS - 1)))
    assert feed(breaker, [BUG]) == [True]
    assert feed(breaker, [BUG]) == [False], "the breaker opens once"


def test_running_attempts_count_as_not_failed() -> None:
    """Failures are fast: of 64 attempts started together, the first 20 to end may be the only failures."""
    assert not any(feed(CircuitBreaker(0.5, concurrency=64), [INFRA] * 20, under_way=44))
    assert any(feed(CircuitBreaker(0.5, concurrency=64), [INFRA] * 50, under_way=44))


def test_breaker_forgets_old_failures() -> None:
    breaker = CircuitBreaker(0.5)
    feed(breaker, [Completed()] * 40 + [BUG] * 30 + [Completed()] * 100)
    assert not any(feed(breaker, [BUG] * 50))
    assert any(feed(breaker, [BUG] * 2))


@pytest.mark.parametrize("harmless", [TASK, Completed(), Truncated("time"), Cancelled("filtered")])
def test_invalid_tasks_and_results_of_the_policy_do_not_open_the_breaker(harmless: Outcome) -> None:
    breaker = CircuitBreaker(0.1)
    assert not any(feed(breaker, [harmless] * 500))


def test_breaker_message_names_the_most_frequent_cause_and_the_next_step() -> None:
    breaker = CircuitBreaker(0.5)
    feed(breaker, [BUG, INFRA, INFRA] * 10)
    row = CAUSES["sandbox.lost"]
    for part in ("sandbox.lost", row.meaning, row.advice, "rookery resume"):
        assert part in breaker.message
    assert re.search(r"\b20\b.*\b20\b", breaker.message)


def test_breaker_without_a_rate_never_opens() -> None:
    assert not any(feed(CircuitBreaker(None), [BUG] * 500))


# ---- crash attribution

names = st.lists(st.sampled_from([f"{n}.0" for n in range(6)]), min_size=1, max_size=6, unique=True)
deaths: Any = st.sampled_from(["crashed", "blocked", "killed"])


@given(names, deaths, st.none() | st.sampled_from(["0.0", "1.0", "9.9"]))
def test_no_rollout_is_found_guilty_beside_others(rollouts: list[str], death: Any, named: str | None) -> None:
    verdicts = CrashAttribution().attribute(rollouts, death, alone=False, blamed=named)
    assert list(verdicts) == rollouts
    assert "guilty" not in verdicts.values()
    assert "suspect" in verdicts.values()
    if named in rollouts:
        assert {rollout for rollout, verdict in verdicts.items() if verdict == "suspect"} == {named}


@pytest.mark.parametrize("death", ["crashed", "blocked"])
def test_rollout_that_crashes_its_runner_again_alone_is_guilty(death: Any) -> None:
    crashes = CrashAttribution()
    assert crashes.attribute(["1.0"], death, alone=False) == {"1.0": "suspect"}
    assert crashes.attribute(["1.0"], death, alone=True) == {"1.0": "guilty"}


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.booleans()), max_size=20))
def test_lone_rollout_is_guilty_of_sigkills_only_after_several(
    kills: list[tuple[str, bool]],
) -> None:
    crashes = CrashAttribution()
    alone: Counter[str] = Counter()
    for rollout, by_itself in kills:
        verdict = crashes.attribute([rollout], "killed", alone=by_itself)[rollout]
        alone[rollout] += by_itself
        assert verdict == ("guilty" if by_itself and alone[rollout] >= KILLS_ALONE else "suspect")
        if verdict == "guilty":
            crashes.forget(rollout)
            alone[rollout] = 0


def test_recorded_rollout_is_forgotten() -> None:
    crashes = CrashAttribution()
    for _ in range(KILLS_ALONE - 1):
        crashes.attribute(["1.0"], "killed", alone=True)
    crashes.forget("1.0")
    crashes.forget("never there")
    assert crashes.attribute(["1.0"], "killed", alone=True) == {"1.0": "suspect"}


def test_crash_of_an_idle_runner_has_no_suspects() -> None:
    assert CrashAttribution().attribute([], "crashed", alone=False) == {}
    assert CrashAttribution().attribute([], "crashed", alone=True) == {}
