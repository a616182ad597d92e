"""A strict JSON decoder: duplicate names, numbers too large for a float, and NaN are errors."""

import json
import math
from collections.abc import Callable
from typing import Any, NoReturn


def strict_json(whole: Callable[[str], int] = int) -> Callable[[str], Any]:
    """Return a function that decodes JSON text, and raises `ValueError` if the text is not valid.

    `whole` converts the text of an integer to a number, and may raise `ValueError` too.
    """
    return json.JSONDecoder(
        object_pairs_hook=_pairs, parse_float=_float, parse_int=whole, parse_constant=_constant
    ).decode


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a duplicate name")
    return found


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is too large")
    return value


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")
