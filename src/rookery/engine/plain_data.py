"""What an environment wants to keep, as plain data: the user's objects end here.

Promises:
- the result encodes to JSON and msgpack, whatever was put in: cycles, objects, lone surrogates, huge numbers;
- it is bounded in depth and in size, and what was left out is said in its place;
- plain data comes out as it went in.
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
MAX_SHOWN = 1_000
LEFT_OUT = "(left out: too large or too deep)"


class _Room:
    """How much may still come in."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = MAX_SIZE


def plain_data(fields: Any) -> dict[str, Any]:
    """A mapping of names to plain data; anything that is no mapping is kept under `value`."""
    cleaned = _clean({} if fields is None else fields, 0, _Room())
    return cleaned if isinstance(cleaned, dict) else {"value": cleaned}


def plain_numbers(metrics: Any) -> tuple[dict[str, float], dict[str, Any]]:
    """The metrics that are numbers, as floats, and the others as plain data."""
    if not isinstance(metrics, Mapping):
        return {}, plain_data(metrics)
    numbers: dict[str, float] = {}
    others: dict[str, Any] = {}
    for name, value in metrics.items():
        number = _number(value)
        if number is None:
            others.update(plain_data({name: value}))
        else:
            numbers[_name(name)] = number
    return numbers, others


def _number(value: Any) -> float | None:
    if type(value) is float:
        return value
    try:
        item = getattr(value, "item", None)
        single = item() if callable(item) else value
        return float(single) if isinstance(single, Real) else None
    except Exception:  # noqa: BLE001  (an array of two, an int too large: it is shown instead)
        return None


def _clean(value: Any, depth: int, room: _Room) -> Any:
    room.left -= 8
    kind = type(value)
    if kind is str:
        return _text(value, room)
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**63 else hex(value)[:MAX_SHOWN]
    if kind is float:
        return value if isfinite(value) else repr(value)  # JSON has no infinity
    if kind is bytes:
        if len(value) > room.left:
            return LEFT_OUT
        room.left -= len(value)
        return value
    if depth >= MAX_DEPTH or room.left <= 0:
        return LEFT_OUT
    if kind is dict:
        named = {_name(key): _clean(each, depth + 1, room) for key, each in _within(value.items(), room)}
        return named | {"…": LEFT_OUT} if len(named) < len(value) else named
    if kind in (list, tuple):
        items = [_clean(each, depth + 1, room) for each in _within(value, room)]
        return [*items, LEFT_OUT] if len(items) < len(value) else items
    return _foreign(value, depth, room)


def _within(items: Iterable[T], room: _Room) -> Iterator[T]:
    """As many as there is room for."""
    for item in items:
        if room.left <= 0:
            return
        yield item


def _foreign(value: Any, depth: int, room: _Room) -> Any:
    try:
        if isinstance(value, str | int | float | bytes):  # subclasses: enums, numpy's float64
            bases: tuple[Any, ...] = (str, int, float, bytes)
            base = next(base for base in bases if isinstance(value, base))
            return _clean(base.__new__(base, value), depth + 1, room)
        if isinstance(value, Mapping):
            return _clean(dict(islice(value.items(), MAX_SIZE // 8)), depth + 1, room)
        if isinstance(value, list | tuple | Set):
            return _clean(list(islice(value, MAX_SIZE // 8)), depth + 1, room)
        tolist = getattr(value, "tolist", None)
        if callable(tolist):
            if getattr(value, "nbytes", MAX_SIZE) >= room.left:
                return LEFT_OUT
            return _clean(tolist(), depth + 1, room)
        data = msgspec.to_builtins(value)
        return _clean(data, depth + 1, room) if type(data) is not type(value) else _shown(value, room)
    except Exception:  # noqa: BLE001  (whatever the user's object raises, its record is kept)
        return _shown(value, room)


def _name(key: Any) -> str:
    return escape_surrogates(key)[:MAX_SHOWN] if isinstance(key, str) else _shown(key, _Room())


def _text(value: str, room: _Room) -> str:
    if len(value) > room.left:
        return LEFT_OUT
    room.left -= len(value)
    return escape_surrogates(value)


def _shown(value: Any, room: _Room) -> str:
    try:
        return _text(repr(value)[:MAX_SHOWN], room)
    except Exception as error:  # noqa: BLE001  (a `__repr__` of the user's may raise anything)
        return f"(a {type(value).__name__} whose repr raised {type(error).__name__})"
