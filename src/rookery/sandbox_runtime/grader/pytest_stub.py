"""Replacement for the parts of pytest that tests use. Runs in the tests' sandbox, where pytest may be missing."""

from __future__ import annotations

import sys

from rookery.sandbox_runtime.grader.remote_objects import Remote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def _is_finite(value: Any) -> bool:
    return bool(value - value == 0)  # neither infinite nor NaN, complex numbers included


def _is_nan(value: Any) -> bool:
    return bool(value != value)  # noqa: PLR0124  (integers and complex numbers too)


def install_pytest_stub() -> None:
    """Put a replacement for pytest into `sys.modules`, with `raises`, `approx`, `fail` and `mark.parametrize`."""
    module = type(sys)("pytest")

    class Raises:
        def __init__(self, kinds: Any, match: str | None = None) -> None:
            self._kinds, self._match, self.value = kinds, match, None

        def __enter__(self) -> Any:
            return self

        def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
            if kind is None:
                raise AssertionError("no exception was raised")
            if not issubclass(kind, self._kinds):
                return False
            self.value = error
            if self._match is not None:
                import re

                assert re.search(self._match, str(error)), (
                    f"the pattern {self._match!r} does not match {str(error)!r}"
                )
            return True

    def raises(kinds: Any, *args: Any, match: str | None = None, **named: Any) -> Any:
        if not args:
            return Raises(kinds, match)
        with Raises(kinds, match) as caught:
            args[0](*args[1:], **named)
        return caught

    def parametrize(names: Any, values: Any, **_: Any) -> Any:
        keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)

        def decorate(function: Any) -> Any:
            old = getattr(function, "rookery_cases", None) or [("", {})]
            function.rookery_cases = [
                (f"{label}[{at}]", {**named, **dict(zip(keys, one if len(keys) > 1 else [one]))})
                for label, named in old
                for at, one in enumerate(values)
            ]
            return function

        return decorate

    class Approx:
        def __init__(
            self,
            expected: Any,
            rel: float | None = None,
            abs: float | None = None,  # noqa: A002  (pytest's name)
            nan_ok: bool = False,
        ) -> None:
            self._expected, self._nan_ok = expected, nan_ok
            # As in pytest: with only an absolute tolerance, there is no relative one.
            self._rel = (0.0 if abs is not None else 1e-6) if rel is None else rel
            self._abs = 1e-12 if abs is None else abs

        def __eq__(self, other: object) -> bool:
            return self._is_close(self._expected, other)

        __hash__ = None  # type: ignore[assignment]

        def __repr__(self) -> str:
            return f"approx({self._expected!r})"

        def _is_close(self, a: Any, b: Any) -> bool:
            if type(b) is Remote:
                return False
            if isinstance(a, dict):
                return isinstance(b, dict) and a.keys() == b.keys() and all(self._is_close(a[k], b[k]) for k in a)
            if isinstance(a, (list, tuple)):
                same = isinstance(b, (list, tuple)) and len(a) == len(b)
                return same and all(map(self._is_close, a, b))
            if not isinstance(a, (int, float, complex)) or not isinstance(b, (int, float, complex)):
                return bool(a == b)
            if _is_nan(a) or _is_nan(b):
                return self._nan_ok and _is_nan(a) and _is_nan(b)
            return bool(a == b) or self._is_within_tolerance(a, b)

        def _is_within_tolerance(self, a: Any, b: Any) -> bool:
            from fractions import Fraction

            if isinstance(a, bool) or isinstance(b, bool):
                return False
            try:
                tolerance = max(self._abs, self._rel * abs(a))
                difference = abs(a - b)
            except OverflowError:  # integers beyond the range of floats are compared exactly
                if not (_is_finite(a) and _is_finite(b)) or isinstance(a, complex) or isinstance(b, complex):
                    return False
                tolerance = max(Fraction(self._abs), Fraction(self._rel) * abs(Fraction(a)))
                difference = abs(Fraction(a) - Fraction(b))
            return _is_finite(difference) and bool(difference <= tolerance)

    def fail(reason: str = "") -> None:
        raise AssertionError(reason)

    module.raises, module.approx, module.fail = raises, Approx, fail  # type: ignore[attr-defined]
    module.mark = type("Mark", (), {"parametrize": staticmethod(parametrize)})()  # type: ignore[attr-defined]
    sys.modules["pytest"] = module
