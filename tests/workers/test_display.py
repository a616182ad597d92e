"""Display of values: exact if they fit, else truncated."""

import re
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from rookery.sandbox_runtime.worker.display import format_value, truncate

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=5), inner, max_size=5)
        | st.sets(st.integers(), max_size=5)
    ),
    max_leaves=30,
)


@dataclass
class Point:
    x: Any
    hidden: int = field(default=0, repr=False)


class Pair(NamedTuple):
    a: Any
    b: Any


@given(PLAIN)
def test_short_values_equal_their_repr(value: object) -> None:
    assert format_value(value, 100_000) == repr(value)


@given(PLAIN, st.integers(16, 200))
def test_long_values_are_limited(value: object, most: int) -> None:
    text = format_value([value] * 10_000, most)
    assert len(text) < 2 * most + 400
    assert text.startswith("[")


def test_only_shown_items_are_formatted() -> None:
    asked = 0

    class Costly:
        def __repr__(self) -> str:
            nonlocal asked
            asked += 1
            return "x"

    big = [Costly() for _ in range(100_000)]
    for value in (
        big,
        (big,),
        {"k": big},
        Point(big),
        Pair(big, 1),
        deque(big),
        OrderedDict(a=big),
        defaultdict(list, a=big),
    ):
        asked = 0
        text = format_value(value, 300)
        assert "more" in text
        assert asked < 500
        assert len(text) < 1000


def test_container_keeps_its_class_name() -> None:
    assert format_value(Point([1] * 1000), 50).startswith("Point(x=[1, 1")
    assert "hidden" not in format_value(Point([1] * 1000), 50)
    assert format_value(Counter(range(1000)), 50).startswith("Counter({0: 1")
    assert format_value(OrderedDict.fromkeys(range(1000)), 50).startswith("OrderedDict({0: None")
    assert format_value(frozenset(range(1000)), 50).startswith("frozenset({")
    assert format_value(Counter("aab"), 100) == "Counter({'a': 2, 'b': 1})"


def test_cycles_depth_and_digits_are_limited() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert format_value(loop, 100) == "[[...]]"
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    assert len(format_value(deep, 100)) < 400
    assert re.fullmatch(r"<.* 301030 .*>", format_value(2**10**6, 100))
    assert re.fullmatch(r"\[<.* 301030 .*>\]", format_value([2**10**6], 100))


@given(st.text(max_size=300), st.integers(8, 100))
def test_truncated_text_has_head_and_tail(text: str, most: int) -> None:
    found = truncate(text, most)
    if len(text) <= most:
        assert found == text
    else:
        assert found.startswith(text[: most - most // 4])
        assert found.endswith(text[len(text) - most // 4 :])
