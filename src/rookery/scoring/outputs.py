"""Whether an output is the expected one. Pure.

Promises:
- space at the end of lines, and empty lines at the end, never decide; everything else does;
- with a tolerance, words that are numbers in both may differ by it, absolute or relative to the expected one, and
  nothing else may: the words, and their number, are the same.
"""

from math import isfinite, isnan

from rookery.core import ExecResult
from rookery.scoring.programs import Verdict

_BY_STATUS: dict[str, Verdict] = {
    "time_limit": "time",
    "memory_limit": "memory",
    "output_limit": "output",
}


def same_output(expected: str, got: str, tolerance: float | None = None) -> bool:
    """Whether `got` is what was expected."""
    if _normal(expected) == _normal(got):
        return True
    if tolerance is None:
        return False
    want, have = expected.split(), got.split()
    return len(want) == len(have) and all(_near(a, b, tolerance) for a, b in zip(want, have, strict=True))


def verdict_of(result: ExecResult, expected: str | None, tolerance: float | None) -> Verdict:
    """What a run is worth; `result.status` is not `lost`."""
    if result.status in _BY_STATUS:
        return _BY_STATUS[result.status]
    if not result.ok:
        return "crash"
    if expected is None:
        return "passed"
    if result.stdout_dropped:
        return "output"
    same = same_output(expected, result.stdout.decode("utf-8", "replace"), tolerance)
    return "passed" if same else "wrong_answer"


def _normal(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _near(expected: str, got: str, tolerance: float) -> bool:
    if expected == got:
        return True
    try:
        want, have = float(expected), float(got)
    except ValueError:
        return False
    if isnan(want) or isnan(have):
        return isnan(want) and isnan(have)
    if not isfinite(want) or not isfinite(have):
        return want == have
    return abs(want - have) <= max(tolerance, tolerance * abs(want))
