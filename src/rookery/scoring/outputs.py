"""Compare the output of a program with the expected output. Pure functions.

Guarantees:
- Without a tolerance, trailing whitespace of lines and empty lines at the end are ignored. Everything else must be
  equal.
- With a tolerance, outputs are compared word by word, and all differences in whitespace are ignored. Finite
  numbers may differ by the tolerance, absolutely or relative to the expected number. All other words must be
  equal, including `inf`, `nan` and numbers beyond the range of a float.
"""

import re
from fractions import Fraction
from math import isfinite
from typing import Final

from rookery.core import ExecResult
from rookery.scoring.programs import Verdict

_NUMBER: Final = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_LIMIT_VERDICTS: dict[str, Verdict] = {
    "time_limit": "time",
    "memory_limit": "memory",
    "output_limit": "output",
}


def outputs_match(expected: str, got: str, tolerance: float | None = None) -> bool:
    """Return whether the output `got` matches the output `expected`; see the module for the rules."""
    if _normalize_lines(expected) == _normalize_lines(got):
        return True
    if tolerance is None:
        return False
    want, have = expected.split(), got.split()
    return len(want) == len(have) and all(_is_close(a, b, tolerance) for a, b in zip(want, have, strict=True))


def get_verdict(result: ExecResult, expected: str | None, tolerance: float | None) -> Verdict:
    """Return the verdict on one execution of a program. Its status must not be `lost`.

    Without `expected`, every output passes if the exit code is 0.
    """
    if result.status in _LIMIT_VERDICTS:
        return _LIMIT_VERDICTS[result.status]
    if not result.ok:
        return "crash"
    if expected is None:
        return "passed"
    if result.stdout_dropped:
        return "output"
    same = outputs_match(expected, result.stdout.decode("utf-8", "replace"), tolerance)
    return "passed" if same else "wrong_answer"


def _normalize_lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _is_close(expected: str, got: str, tolerance: float) -> bool:
    if expected == got:
        return True
    if not _NUMBER.fullmatch(expected) or not _NUMBER.fullmatch(got):
        return False
    want, have = float(expected), float(got)
    if not isfinite(want) or not isfinite(have):
        return False  # beyond the range of a float
    allowed = max(tolerance, tolerance * abs(want))
    if not isfinite(allowed) or not isfinite(want - have):
        return abs(Fraction(want) - Fraction(have)) <= Fraction(tolerance) * max(Fraction(1), abs(Fraction(want)))
    return abs(want - have) <= allowed
