"""What the end of a stage means, asked without running anything."""

import asyncio

import pytest

from rookery.core import (
    Cancelled,
    Completed,
    Failed,
    SandboxError,
    Stage,
    Truncated,
    Truncation,
    UpstreamError,
    label,
)
from rookery.engine.stage_outcome import StageEnd, decide_outcome


@pytest.mark.parametrize(
    ("stage", "on_others", "expected"),
    [
        ("run", True, "truncated.time"),
        ("run", False, "bug.hung"),
        ("setup", True, "engine.setup"),
        ("setup", False, "bug.hung"),
        ("score", True, "scoring.timeout"),
        ("score", False, "bug.hung"),
    ],
)
def test_whose_a_deadline_is_depends_on_what_was_waited_for(stage: Stage, on_others: bool, expected: str) -> None:
    end = StageEnd(stage=stage, error=asyncio.CancelledError(), expired=3.0, waited_on_others=on_others)
    assert label(decide_outcome(end)) == expected
    assert label(decide_outcome(StageEnd(stage=stage, expired=3.0, waited_on_others=on_others))) == expected


def test_a_deadline_at_a_model_server_that_hangs_or_fails_is_infra() -> None:
    hung = StageEnd(
        stage="run", error=asyncio.CancelledError(), expired=3.0, waited_on_others=True, hung="no bytes for 13 s"
    )
    gone = StageEnd(
        stage="run", error=UpstreamError("gone", cause="upstream.cut"), expired=3.0, waited_on_others=True
    )
    for end, cause in ((hung, "upstream.hung"), (gone, "upstream.cut")):
        outcome = decide_outcome(end)
        assert isinstance(outcome, Failed)
        assert (outcome.fault, outcome.cause) == ("infra", cause)


@pytest.mark.parametrize("stage", ["setup", "run", "score"])
def test_an_exception_that_carries_its_own_fault_keeps_it(stage: Stage) -> None:
    lost = SandboxError("gone")
    for error in (lost, BaseExceptionGroup("both", [ValueError("x"), lost])):
        outcome = decide_outcome(StageEnd(stage=stage, error=error))
        assert isinstance(outcome, Failed)
        assert (outcome.fault, outcome.cause, outcome.stage) == ("infra", "sandbox.lost", stage)


def test_a_cancellation_nobody_asked_for_is_the_environments_bug() -> None:
    outcome = decide_outcome(StageEnd(stage="run", error=asyncio.CancelledError()))
    assert label(outcome) == "bug.environment"
    asked = StageEnd(stage="run", error=asyncio.CancelledError(), cancelled="filtered", expired=1.0)
    assert decide_outcome(asked) == Cancelled("filtered")


def test_a_spent_budget_truncates_whatever_was_made_of_the_exception() -> None:
    assert decide_outcome(StageEnd(stage="run")) == Completed()
    assert decide_outcome(StageEnd(stage="run", truncated="turns")) == Truncated("turns")
    assert decide_outcome(StageEnd(stage="run", error=Truncation("context"))) == Truncated("context")
    assert label(decide_outcome(StageEnd(stage="score", error=Truncation("turns")))) == "bug.scoring"


def test_an_exit_is_called_one() -> None:
    for error in (SystemExit(3), KeyboardInterrupt()):
        assert label(decide_outcome(StageEnd(stage="setup", error=error))) == "bug.exit"
