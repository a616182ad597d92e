"""Which names tests use of a submission, and whether they need it in their own process."""

import pytest

from rookery.core import TaskError
from rookery.scoring.test_analysis import analyze_tests


@pytest.mark.parametrize(
    ("tests", "names", "named"),
    [
        ("assert f(1) == g(2)", ("f", "g"), ""),
        ("def check(candidate):\n    assert candidate(1)", (), ""),
        ("from solution import f\n\ndef test_f():\n    assert f(1) in (1, 2)", (), ""),
        ("import solution\nassert solution.f(1) == 1", (), ""),
        ("for x, y in [(1, 2)]:\n    assert f(x) == y", ("f",), ""),
        ("import pytest\nwith pytest.raises(ValueError):\n    f(1)", ("f",), ""),
        ("import pytest\npytest.raises(ValueError, f, 1)", ("f",), ""),
        ("assert isinstance(f(1), list)", ("f",), ""),
        ("assert isinstance(f(1), Node)", ("Node", "f"), "Node"),
        ("from solution import *\nassert f(1)", ("f",), "solution"),
        ("class Mine(Base):\n    pass\nassert Mine().x", ("Base",), "Base"),
        ("try:\n    f()\nexcept (KeyError, Own):\n    pass", ("Own", "f"), "Own"),
        ("import inspect\nassert 'x' in inspect.getsource(f)", ("f",), "f"),
        ("assert type(f(1)) is Node", ("Node", "f"), "Node"),
    ],
)
def test_isolation_follows_from_the_source_of_the_tests(tests: str, names: tuple[str, ...], named: str) -> None:
    usage = analyze_tests(tests)
    assert usage.names == names
    assert named in usage.shared_reason
    assert bool(named) == bool(usage.shared_reason)


def test_tests_with_a_syntax_error_are_the_tasks_fault() -> None:
    with pytest.raises(TaskError, match=r"tests\[1\]"):
        analyze_tests(["assert 1", "assert ("])
