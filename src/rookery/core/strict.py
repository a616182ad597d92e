"""JSON that every reader reads alike.

Promise: what readers differ on is an error: a name that stands twice, a number too large for a float, NaN.
"""

import json
import math
from collections.abc import Callable
from typing import Any, NoReturn


def strict_json(whole: Callable[[str], int] = int) -> Callable[[str], Any]:
    """Reads JSON, its integers by `whole`; a ValueError says what is wrong."""
    return json.JSONDecoder(
        object_pairs_hook=_pairs, parse_float=_float, parse_int=whole, parse_constant=_constant
    ).decode


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is doubled")
    return found


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is too large")
    return value


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")
