"""Generate random arithmetic expressions over integers, from `7 + 5` to nested parentheses."""

from random import Random
from typing import Final, NamedTuple

_SUM, _PRODUCT, _ATOM = range(3)
_LARGEST_NUMBER: Final = {1: 99, 2: 60, 3: 60, 4: 300, 5: 2000}


class Expression(NamedTuple):
    """An arithmetic expression, or a part of one."""

    text: str
    value: int
    rank: int
    """Precedence of the outermost operator: `_SUM`, `_PRODUCT`, or `_ATOM` for a number."""


def draw_expression(rng: Random, level: int) -> tuple[str, int]:
    """Draw a random expression of a level from 1 to 5, and return its text and value.

    Every intermediate result is a non-negative integer.
    """
    node = _BUILDERS[level](rng, _LARGEST_NUMBER[level])
    return node.text, node.value


def _build_level_1(rng: Random, largest: int) -> Expression:
    if rng.random() < 0.65:
        return _add(rng, _number(rng, largest), _number(rng, largest))
    return _scale(rng, _number(rng, 12), 12)


def _build_level_2(rng: Random, largest: int) -> Expression:
    if rng.random() < 0.4:
        return _add(
            rng,
            _add(rng, _number(rng, largest), _number(rng, largest)),
            _number(rng, largest),
        )
    return _add_either_way(rng, _scale(rng, _number(rng, 12), 12), _number(rng, largest))


def _build_level_3(rng: Random, largest: int) -> Expression:
    node = _scale(rng, _add(rng, _number(rng, largest), _number(rng, largest)), 12)
    return node if rng.random() < 0.5 else _add_either_way(rng, node, _number(rng, largest))


def _build_level_4(rng: Random, largest: int) -> Expression:
    left = _scale(rng, _add(rng, _number(rng, largest), _number(rng, largest)), 20)
    right = _scale(rng, _add(rng, _number(rng, largest), _number(rng, 40)), 12)
    return _add_either_way(rng, left, right if rng.random() < 0.6 else _number(rng, largest))


def _build_level_5(rng: Random, largest: int) -> Expression:
    inner = _add_either_way(
        rng,
        _scale(rng, _add(rng, _number(rng, largest), _number(rng, largest)), 12),
        _number(rng, 900),
    )
    outer = _scale(rng, inner, 9)
    right = _scale(rng, _add(rng, _number(rng, largest), _number(rng, largest)), 30)
    return _add_either_way(rng, outer, right)


_BUILDERS: Final = {1: _build_level_1, 2: _build_level_2, 3: _build_level_3, 4: _build_level_4, 5: _build_level_5}


def _number(rng: Random, largest: int) -> Expression:
    value = rng.randrange(2, largest + 1)
    return Expression(str(value), value, _ATOM)


def _add_either_way(rng: Random, left: Expression, right: Expression) -> Expression:
    return _add(rng, left, right) if rng.random() < 0.5 else _add(rng, right, left)


def _add(rng: Random, left: Expression, right: Expression) -> Expression:
    """Add two nodes, or subtract the smaller one from the larger one."""
    if rng.random() < 0.5:
        return Expression(f"{left.text} + {right.text}", left.value + right.value, _SUM)
    if left.value < right.value:
        left, right = right, left
    return Expression(f"{left.text} - {_parenthesize(right, _PRODUCT)}", left.value - right.value, _SUM)


def _scale(rng: Random, node: Expression, largest_factor: int) -> Expression:
    """Multiply a node by a random factor, or divide by it. The result of a division is always an integer."""
    text, factor = _parenthesize(node, _PRODUCT), rng.randrange(2, largest_factor + 1)
    if rng.random() < 0.35:
        if node.rank == _ATOM:
            return Expression(f"{node.value * factor} / {factor}", node.value, _PRODUCT)
        if node.value and node.value % factor == 0:
            return Expression(f"{text} / {factor}", node.value // factor, _PRODUCT)
    if rng.random() < 0.5:
        return Expression(f"{text} * {factor}", node.value * factor, _PRODUCT)
    return Expression(f"{factor} * {_parenthesize(node, _ATOM)}", factor * node.value, _PRODUCT)


def _parenthesize(node: Expression, rank: int) -> str:
    """Return the node's text, in parentheses if its operator binds less tightly than `rank`."""
    return node.text if node.rank >= rank else f"({node.text})"
