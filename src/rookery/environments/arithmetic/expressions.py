"""Generate integer expressions, from `7 + 5` to nested brackets."""

from random import Random
from typing import Final, NamedTuple

_SUM, _PRODUCT, _ATOM = range(3)
_LARGEST: Final = {1: 99, 2: 60, 3: 60, 4: 300, 5: 2000}


class Node(NamedTuple):
    text: str
    value: int
    rank: int
    """Precedence of the outermost operator."""


def expression(rng: Random, level: int) -> tuple[str, int]:
    """Return an expression and its value. Every intermediate result is a non-negative integer."""
    node = _BUILD[level](rng, _LARGEST[level])
    return node.text, node.value


def _one(rng: Random, largest: int) -> Node:
    if rng.random() < 0.65:
        return _added(rng, _atom(rng, largest), _atom(rng, largest))
    return _scaled(rng, _atom(rng, 12), 12)


def _two(rng: Random, largest: int) -> Node:
    if rng.random() < 0.4:
        return _added(rng, _added(rng, _atom(rng, largest), _atom(rng, largest)), _atom(rng, largest))
    return _either(rng, _scaled(rng, _atom(rng, 12), 12), _atom(rng, largest))


def _three(rng: Random, largest: int) -> Node:
    node = _scaled(rng, _added(rng, _atom(rng, largest), _atom(rng, largest)), 12)
    return node if rng.random() < 0.5 else _either(rng, node, _atom(rng, largest))


def _four(rng: Random, largest: int) -> Node:
    left = _scaled(rng, _added(rng, _atom(rng, largest), _atom(rng, largest)), 20)
    right = _scaled(rng, _added(rng, _atom(rng, largest), _atom(rng, 40)), 12)
    return _either(rng, left, right if rng.random() < 0.6 else _atom(rng, largest))


def _five(rng: Random, largest: int) -> Node:
    inner = _either(rng, _scaled(rng, _added(rng, _atom(rng, largest), _atom(rng, largest)), 12), _atom(rng, 900))
    outer = _scaled(rng, inner, 9)
    right = _scaled(rng, _added(rng, _atom(rng, largest), _atom(rng, largest)), 30)
    return _either(rng, outer, right)


_BUILD: Final = {1: _one, 2: _two, 3: _three, 4: _four, 5: _five}


def _atom(rng: Random, largest: int) -> Node:
    value = rng.randrange(2, largest + 1)
    return Node(str(value), value, _ATOM)


def _either(rng: Random, left: Node, right: Node) -> Node:
    return _added(rng, left, right) if rng.random() < 0.5 else _added(rng, right, left)


def _added(rng: Random, left: Node, right: Node) -> Node:
    if rng.random() < 0.5:
        return Node(f"{left.text} + {right.text}", left.value + right.value, _SUM)
    if left.value < right.value:
        left, right = right, left
    return Node(f"{left.text} - {_bound(right, _PRODUCT)}", left.value - right.value, _SUM)


def _scaled(rng: Random, node: Node, most: int) -> Node:
    """Multiply or divide the node by a number; division is exact."""
    text, by = _bound(node, _PRODUCT), rng.randrange(2, most + 1)
    if rng.random() < 0.35:
        if node.rank == _ATOM:
            return Node(f"{node.value * by} / {by}", node.value, _PRODUCT)
        if node.value and node.value % by == 0:
            return Node(f"{text} / {by}", node.value // by, _PRODUCT)
    if rng.random() < 0.5:
        return Node(f"{text} * {by}", node.value * by, _PRODUCT)
    return Node(f"{by} * {_bound(node, _ATOM)}", by * node.value, _PRODUCT)


def _bound(node: Node, rank: int) -> str:
    return node.text if node.rank >= rank else f"({node.text})"
