"""Tests of who is at fault when a grader produces no verdict."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.scoring.fault_attribution import FAILURES, MAX_LOSSES, FaultAttribution, GraderExit, GradingStep

ENDS: tuple[GraderExit, ...] = get_args(GraderExit)
NEXT_RUN = {"rerun": "submission", "run_solution": "solution", "run_untouched": "untouched"}


def play(ends: list[GraderExit], *, has_solution: bool) -> tuple[GradingStep, list[str]]:
    """Return the final action and what ran, in order."""
    attribution = FaultAttribution(has_solution=has_solution)
    ran: list[str] = []
    action: GradingStep = "rerun"
    for end in ends:
        ran.append(NEXT_RUN[action])
        action = getattr(attribution, f"after_{ran[-1]}")(end)
        if action not in NEXT_RUN:
            break
    return action, ran


@given(st.lists(st.sampled_from(ENDS), min_size=12, max_size=12), st.booleans())
def test_every_grading_ends_and_lost_sandboxes_never_count_against_a_submission(
    ends: list[GraderExit], has_solution: bool
) -> None:
    action, ran = play(ends, has_solution=has_solution)
    assert action not in NEXT_RUN
    assert len(ran) <= 3 + MAX_LOSSES
    with_submission = [end for what, end in zip(ran, ends, strict=False) if what == "submission"]
    if action == "minimum":
        assert sum(end in FAILURES for end in with_submission) == 2 or "invalid" in with_submission
    if action == "infra_fault":
        assert ends[: len(ran)].count("lost") == MAX_LOSSES
    if action in ("task_fault", "invalid_verdict"):
        assert ran[-1] != "submission"
        assert ends[len(ran) - 1] not in ("scored", "lost", "not_run")


@pytest.mark.parametrize(
    ("ends", "has_solution", "action"),
    [
        (["scored"], True, "score"),
        (["time", "scored"], True, "score"),
        (["time", "time"], False, "minimum"),
        (["crash", "time", "scored"], True, "minimum"),
        (["memory", "memory", "memory"], True, "task_fault"),
        (["crash", "crash", "not_run"], True, "minimum"),
        (["crash", "crash", "lost", "scored"], True, "minimum"),
        (["lost", "scored"], False, "score"),
        (["lost", "lost", "lost"], True, "infra_fault"),
        (["time", "lost", "crash"], False, "minimum"),
        (["no_tests", "no_tests"], False, "minimum"),
        (["no_tests", "no_tests", "no_tests"], True, "task_fault"),
        (["invalid", "scored"], True, "minimum"),
        (["invalid", "invalid"], True, "invalid_verdict"),
        (["invalid", "crash"], True, "invalid_verdict"),
        (["invalid", "invalid"], False, "invalid_verdict"),
        (["invalid", "scored"], False, "minimum"),
        (["invalid", "crash"], False, "minimum"),
    ],
)
def test_attribution_of_each_sequence_of_runs(
    ends: list[GraderExit], has_solution: bool, action: GradingStep
) -> None:
    assert play(ends, has_solution=has_solution)[0] == action
