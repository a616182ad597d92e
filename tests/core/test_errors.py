"""Errors carry a cause and a fault, and keep both on the way into a `Failed` outcome."""

import asyncio
import pickle
import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rookery.core
from rookery.core import (
    CAUSES,
    Failed,
    Fault,
    JournalError,
    RookeryError,
    SandboxError,
    ScoringError,
    TaskError,
    Truncation,
    UpstreamError,
    UsageError,
    WorkerRecoveryError,
    failed_outcome,
    get_cause,
    wrap_errors,
)
from rookery.core.errors import MAX_DETAIL, MAX_TRACEBACK, describe, unwrap_group

ALL = [
    RookeryError,
    UsageError,
    JournalError,
    SandboxError,
    WorkerRecoveryError,
    UpstreamError,
    TaskError,
    ScoringError,
]
KINDS = pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
CATEGORIES = {
    *("agent", "bug", "engine", "machine", "runner", "sandbox", "scoring", "task", "tool", "upstream", "worker")
}


class Foreign(Exception):
    """Exception class that Rookery does not know."""


class Unprintable(Exception):
    """Exception whose `__str__` raises."""

    def __str__(self) -> str:
        raise RuntimeError("cannot be printed")


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


# ---- the table of causes


@pytest.mark.parametrize("code", sorted(CAUSES))
def test_every_cause_has_a_fault_a_meaning_and_advice(code: str) -> None:
    cause = CAUSES[code]
    category, dot, name = code.partition(".")
    assert (cause.code, dot) == (code, ".")
    assert category in CATEGORIES
    assert name
    assert cause.fault in get_args(Fault)
    assert cause.meaning.endswith(".")
    assert cause.advice
    assert (cause.fault == "bug") >= (category == "bug")
    assert (cause.fault == "task") >= (category == "task")
    assert (cause.fault == "infra") >= (category in ("sandbox", "worker", "engine", "runner"))
    assert get_cause(code) is cause


def test_every_cause_named_in_the_source_is_in_the_table() -> None:
    home = Path(rookery.core.__file__).parent.parent
    pattern = re.compile(r'''(?:cause=|cause = |Failed\("(?:infra|task|bug)", )"([a-z_]+\.[a-z_]+)"''')
    named = {code for path in home.rglob("*.py") for code in pattern.findall(path.read_text())}
    assert len(named) > 10
    assert named - set(CAUSES) == set()


def test_unknown_cause_is_a_bug() -> None:
    cause = get_cause("mine.odd")
    assert (cause.code, cause.fault) == ("mine.odd", "bug")


@KINDS
def test_every_error_class_takes_its_fault_from_its_cause(kind: type[RookeryError]) -> None:
    error = kind("it broke")
    assert error.fault == CAUSES[error.code].fault
    assert kind("x", cause="task.image").fault == "task"
    assert kind("x", cause="mine.odd").fault == "bug"
    assert kind("x", cause="mine.odd", fault="infra").fault == "infra"


@KINDS
def test_errors_pickle_with_their_cause_and_fault(kind: type[RookeryError]) -> None:
    for error in (kind("it broke"), kind("x", cause="mine.odd", fault="task")):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), again.code, again.fault) == (kind, str(error), error.code, error.fault)
    stop = pickle.loads(pickle.dumps(Truncation("context")))
    assert (stop.reason, str(stop)) == ("context", str(Truncation("context")))


# ---- wrap_errors


def test_wrap_errors_chains_the_original_exception() -> None:
    original = Foreign("deep inside")
    with (
        pytest.raises(SandboxError) as caught,
        wrap_errors(SandboxError, "while writing", Foreign, cause="sandbox.create"),
    ):
        raise original
    assert caught.value.__cause__ is original
    assert caught.value.code == "sandbox.create"
    for part in ("while writing", "Foreign", "deep inside"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        asyncio.CancelledError(),
        KeyboardInterrupt(),
        SystemExit(3),
        GeneratorExit(),
        UpstreamError("typed"),
        Truncation("tokens"),
        ValueError("not named"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_wrap_errors_lets_cancellation_exits_and_typed_errors_pass(error: BaseException) -> None:
    foreign: tuple[type[BaseException], ...] = (Foreign,) if isinstance(error, ValueError) else (BaseException,)
    with pytest.raises(type(error)) as caught, wrap_errors(SandboxError, "anything", *foreign):
        raise error
    assert caught.value is error


# ---- failed_outcome


def test_failed_outcome_keeps_the_whole_chain_of_tracebacks() -> None:
    try:
        try:
            raised(Foreign("first"))
            raise Foreign("first")
        except Foreign as first:
            raise UpstreamError("second", cause="upstream.timeout") from first
    except UpstreamError as error:
        outcome = failed_outcome(error, "setup", cause="bug.environment")
    assert (outcome.fault, outcome.cause, outcome.stage) == ("infra", "upstream.timeout", "setup")
    assert outcome.detail == "second"
    for text in ("Foreign: first", "UpstreamError: second", "direct cause", __file__):
        assert text in outcome.traceback


def test_failed_outcome_gives_an_untyped_exception_the_default_cause() -> None:
    outcome = failed_outcome(raised(Foreign("x")), "score", cause="bug.scoring")
    assert (outcome.fault, outcome.cause, outcome.detail) == ("bug", "bug.scoring", "Foreign: x")


def test_failed_outcome_finds_the_typed_error_in_an_exception_group() -> None:
    inner = ExceptionGroup("in", [Foreign("a"), SandboxError("it is gone")])
    error = ExceptionGroup("out", [Foreign("b"), inner])
    assert isinstance(unwrap_group(error), SandboxError)
    outcome = failed_outcome(raised(error), "run", cause="bug.environment")
    assert (outcome.cause, outcome.detail) == ("sandbox.lost", "it is gone")
    assert "Foreign: a" in outcome.traceback
    assert "Foreign: b" in outcome.traceback


def test_failed_outcome_limits_the_length_of_detail_and_traceback() -> None:
    def deeper(n: int) -> None:
        deeper(n + 1)

    try:
        deeper(0)
    except RecursionError as error:
        outcome = failed_outcome(error, "run", cause="bug.environment")
    assert "RecursionError" in outcome.traceback
    huge = failed_outcome(raised(Foreign("y" * 10 * MAX_TRACEBACK)), "run", cause="bug.environment")
    assert len(huge.detail) <= MAX_DETAIL
    assert len(huge.traceback) <= MAX_TRACEBACK + 100
    assert huge.traceback.startswith("Traceback")
    assert "omitted" in huge.traceback


@pytest.mark.parametrize(
    "error",
    [
        Unprintable(),
        Foreign(),
        Foreign("\udcff in a file name"),
        UpstreamError("\ud83d half a smile"),
        OSError(2, "no such file", b"\xff".decode("utf-8", "surrogateescape")),
        ExceptionGroup("\udcff", [Unprintable()]),
        SystemExit(),
        KeyboardInterrupt(),
        asyncio.CancelledError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_failed_outcome_of_any_exception_can_be_encoded(error: BaseException) -> None:
    outcome = failed_outcome(raised(error), "run", cause="bug.environment", detail="")
    assert outcome.detail
    assert outcome.traceback
    assert msgspec.json.decode(msgspec.json.encode(outcome), type=Failed) == outcome
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(outcome), type=Failed) == outcome


texts: Any = st.text(st.characters(exclude_categories=()), max_size=20)


@given(texts)
def test_describe_is_never_empty_and_never_raises(text: str) -> None:
    description = describe(Foreign(text))
    assert description.startswith("Foreign")
    description.encode()
