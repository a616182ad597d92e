"""Outcomes of stages, decided by a pure function."""

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
def test_fault_of_a_deadline_depends_on_what_the_stage_waited_for(
    stage: Stage, on_others: bool, expected: str
) -> None:
    end = StageEnd(stage=stage, error=asyncio.CancelledError(), expired=3.0, waited_on_others=on_others)
    assert label(decide_outcome(end)) == expected
    assert label(decide_outcome(StageEnd(stage=stage, expired=3.0, waited_on_others=on_others))) == expected


def test_deadline_during_a_hung_or_failed_model_call_is_infra() -> None:
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
def test_exception_with_a_fault_keeps_it(stage: Stage) -> None:
    lost = SandboxError("gone")
    for error in (lost, BaseExceptionGroup("both", [ValueError("x"), lost])):
        outcome = decide_outcome(StageEnd(stage=stage, error=error))
        assert isinstance(outcome, Failed)
        assert (outcome.fault, outcome.cause, outcome.stage) == ("infra", "sandbox.lost", stage)


def test_unrequested_cancellation_is_a_bug_of_the_environment() -> None:
    outcome = decide_outcome(StageEnd(stage="run", error=asyncio.CancelledError()))
    assert label(outcome) == "bug.environment"
    asked = StageEnd(stage="run", error=asyncio.CancelledError(), cancelled="filtered", expired=1.0)
    assert decide_outcome(asked) == Cancelled("filtered")


def test_spent_budget_truncates_even_if_its_exception_was_replaced() -> None:
    assert decide_outcome(StageEnd(stage="run")) == Completed()
    assert decide_outcome(StageEnd(stage="run", truncated="turns")) == Truncated("turns")
    assert decide_outcome(StageEnd(stage="run", error=Truncation("context"))) == Truncated("context")
    assert label(decide_outcome(StageEnd(stage="score", error=Truncation("turns")))) == "bug.scoring"


def test_exit_has_its_own_cause() -> None:
    for error in (SystemExit(3), KeyboardInterrupt()):
        assert label(decide_outcome(StageEnd(stage="setup", error=error))) == "bug.exit"
