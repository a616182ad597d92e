"""Compare the output of a program with the expected one. Pure.

Guarantees:
- trailing white space of lines, and empty lines at the end, make no difference; everything else does;
- with a tolerance, words that are finite numbers in both may differ by it, absolute or relative to the expected
  one; all other words, `inf`, `nan` and numbers beyond the range of a float among them, must be the same text.
"""

import re
from fractions import Fraction
from math import isfinite
from typing import Final

from rookery.core import ExecResult
from rookery.scoring.programs import Verdict

_NUMBER: Final = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
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
    if not _NUMBER.fullmatch(expected) or not _NUMBER.fullmatch(got):
        return False
    want, have = float(expected), float(got)
    if not isfinite(want) or not isfinite(have):
        return False  # beyond the range of a float: the texts are not the same
    room = max(tolerance, tolerance * abs(want))
    if not isfinite(room) or not isfinite(want - have):
        return abs(Fraction(want) - Fraction(have)) <= Fraction(tolerance) * max(Fraction(1), abs(Fraction(want)))
    return abs(want - have) <= room
