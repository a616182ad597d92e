"""Whose fault a grader's end is, and which form the tests have."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.core import TaskError
from rookery.scoring.forms import uses_of
from rookery.scoring.judging import FAILING, LOSSES, Judge, Step
from rookery.scoring.testing import GraderEnd

ENDS = get_args(GraderEnd)


def play(ends: list[GraderEnd], *, has_solution: bool) -> tuple[Step, list[str]]:
    """The last step, and who ran."""
    judge, ran, step = Judge(has_solution=has_solution), [], "again"
    for end in ends:
        who = "solution" if step == "solution" else "submission"
        ran.append(who)
        step = getattr(judge, who)(end)
        if step not in ("again", "solution"):
            break
    return step, ran  # type: ignore[return-value]


@given(st.lists(st.sampled_from(ENDS), min_size=12, max_size=12), st.booleans())
def test_every_grading_comes_to_an_end_and_a_loss_is_never_held_against_a_submission(
    ends: list[GraderEnd], has_solution: bool
) -> None:
    step, ran = play(ends, has_solution=has_solution)
    assert step not in ("again", "solution")
    assert len(ran) <= 3 + LOSSES
    mine = [end for who, end in zip(ran, ends, strict=False) if who == "submission"]
    if step == "minimum":
        assert sum(end in FAILING for end in mine) == 2
    if step == "infra":
        assert ends[: len(ran)].count("lost") == LOSSES
    if step == "task":
        assert ran[-1] == "solution"
        assert ends[len(ran) - 1] in FAILING


@pytest.mark.parametrize(
    ("ends", "has_solution", "step"),
    [
        (["ended"], True, "score"),
        (["time", "ended"], True, "score"),
        (["time", "time"], False, "minimum"),
        (["crash", "time", "ended"], True, "minimum"),
        (["memory", "memory", "memory"], True, "task"),
        (["lost", "ended"], False, "score"),
        (["lost", "lost", "lost"], True, "infra"),
        (["time", "lost", "crash"], False, "minimum"),
        (["no_tests", "no_tests"], False, "minimum"),
        (["no_tests", "no_tests", "no_tests"], True, "task"),
    ],
)
def test_the_contract(ends: list[GraderEnd], has_solution: bool, step: Step) -> None:
    assert play(ends, has_solution=has_solution)[0] == step


@pytest.mark.parametrize(
    ("tests", "names", "why"),
    [
        ("assert f(1) == g(2)", ("f", "g"), ""),
        ("def check(candidate):\n    assert candidate(1)", (), ""),
        ("from solution import f\n\ndef test_f():\n    assert f(1) in (1, 2)", (), ""),
        ("import solution\nassert solution.f(1) == 1", (), ""),
        ("for x, y in [(1, 2)]:\n    assert f(x) == y", ("f",), ""),
        ("import pytest\nwith pytest.raises(ValueError):\n    f(1)", ("f",), ""),
        ("import pytest\npytest.raises(ValueError, f, 1)", ("f",), ""),
        ("assert isinstance(f(1), list)", ("f",), ""),
        ("assert isinstance(f(1), Node)", ("Node", "f"), "look into Node"),
        ("from solution import *\nassert f(1)", ("f",), "import everything"),
        ("class Mine(Base):\n    pass\nassert Mine().x", ("Base",), "derive a class from Base"),
        ("try:\n    f()\nexcept (KeyError, Own):\n    pass", ("Own", "f"), "catch Own"),
        ("import inspect\nassert 'x' in inspect.getsource(f)", ("f",), "look into f"),
        ("assert type(f(1)) is Node", ("Node", "f"), "ask whether something is Node"),
    ],
)
def test_the_form_is_told_by_the_text_of_the_tests(tests: str, names: tuple[str, ...], why: str) -> None:
    uses = uses_of(tests)
    assert uses.names == names
    assert why in uses.why_shared
    assert bool(why) == bool(uses.why_shared)


def test_tests_that_are_no_python_are_the_tasks_fault() -> None:
    with pytest.raises(TaskError, match=r"tests\[1\] is no Python"):
        uses_of(["assert 1", "assert ("])
