"""Convert values that an environment stored in a rollout's record to plain data. Runs in the runner process.

- The result can be encoded as JSON and msgpack for every input: cycles, objects, lone surrogates, huge numbers.
- The depth and size of the result are bounded. A placeholder replaces values that are left out.
- Plain data is returned unchanged.
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import islice
from math import isfinite
from numbers import Real
from typing import Any, TypeVar

import msgspec

from rookery.core.errors import escape_surrogates

T = TypeVar("T")
MAX_DEPTH = 24
MAX_SIZE = 8 << 20
MAX_REPR = 1_000
LEFT_OUT = "(left out: too large or too deep)"


class _Budget:
    """The approximate number of bytes by which the result of a conversion may still grow."""

    def __init__(self) -> None:
        self.left = MAX_SIZE


def plain_data(fields: Any) -> dict[str, Any]:
    """Return a mapping as plain data. None gives `{}`, and other values that are no mapping `{"value": …}`."""
    converted = _convert({} if fields is None else fields, 0, _Budget())
    return converted if isinstance(converted, dict) else {"value": converted}


def plain_numbers(metrics: Any) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the metrics that are numbers, as floats, and the others, as plain data."""
    if not isinstance(metrics, Mapping):
        return {}, plain_data(metrics)
    numbers: dict[str, float] = {}
    others: dict[str, Any] = {}
    for name, value in metrics.items():
        number = _to_float(value)
        if number is None:
            others.update(plain_data({name: value}))
        else:
            numbers[_to_key(name)] = number
    return numbers, others


def _to_float(value: Any) -> float | None:
    if type(value) is float:
        return value
    try:
        item = getattr(value, "item", None)
        single = item() if callable(item) else value
        return float(single) if isinstance(single, Real) else None
    except Exception:  # noqa: BLE001  (an array with several elements, or an int too large for a float)
        return None


def _convert(value: Any, depth: int, budget: _Budget) -> Any:
    budget.left -= 8
    kind = type(value)
    if kind is str:
        return _to_text(value, budget)
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**63 else hex(value)[:MAX_REPR]
    if kind is float:
        return value if isfinite(value) else repr(value)  # JSON has no infinity
    if kind is bytes:
        if len(value) > budget.left:
            return LEFT_OUT
        budget.left -= len(value)
        return value
    if depth >= MAX_DEPTH or budget.left <= 0:
        return LEFT_OUT
    if kind is dict:
        named = {
            _to_key(key): _convert(each, depth + 1, budget) for key, each in _take_within(value.items(), budget)
        }
        return named | {"…": LEFT_OUT} if len(named) < len(value) else named
    if kind in (list, tuple):
        items = [_convert(each, depth + 1, budget) for each in _take_within(value, budget)]
        return [*items, LEFT_OUT] if len(items) < len(value) else items
    return _convert_object(value, depth, budget)


def _take_within(items: Iterable[T], budget: _Budget) -> Iterator[T]:
    """Yield items until the budget of bytes is used up."""
    for item in items:
        if budget.left <= 0:
            return
        yield item


def _convert_object(value: Any, depth: int, budget: _Budget) -> Any:
    try:
        if isinstance(value, str | int | float | bytes):  # subclasses: enums, numpy's float64
            bases: tuple[Any, ...] = (str, int, float, bytes)
            base = next(base for base in bases if isinstance(value, base))
            return _convert(base.__new__(base, value), depth + 1, budget)
        if isinstance(value, Mapping):
            return _convert(dict(islice(value.items(), MAX_SIZE // 8)), depth + 1, budget)
        if isinstance(value, list | tuple | Set):
            return _convert(list(islice(value, MAX_SIZE // 8)), depth + 1, budget)
        tolist = getattr(value, "tolist", None)
        if callable(tolist):
            if getattr(value, "nbytes", MAX_SIZE) >= budget.left:
                return LEFT_OUT
            return _convert(tolist(), depth + 1, budget)
        data = msgspec.to_builtins(value)
        return _convert(data, depth + 1, budget) if type(data) is not type(value) else _to_repr(value, budget)
    except Exception:  # noqa: BLE001  (the user's object may raise anything)
        return _to_repr(value, budget)


def _to_key(key: Any) -> str:
    return escape_surrogates(key)[:MAX_REPR] if isinstance(key, str) else _to_repr(key, _Budget())


def _to_text(value: str, budget: _Budget) -> str:
    if len(value) > budget.left:
        return LEFT_OUT
    budget.left -= len(value)
    return escape_surrogates(value)


def _to_repr(value: Any, budget: _Budget) -> str:
    try:
        return _to_text(repr(value)[:MAX_REPR], budget)
    except Exception as error:  # noqa: BLE001  (the user's `__repr__` may raise anything)
        return f"(a {type(value).__name__} whose repr raised {type(error).__name__})"
