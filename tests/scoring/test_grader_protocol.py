"""The data exchanged between tests and a submission: plain data only, equal on both sides."""

import datetime as dt
import math
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.sandbox_runtime import bundle
from rookery.sandbox_runtime.grader.codec import NotPlain, decode, encode, reduce_to_base
from rookery.sandbox_runtime.grader.remote_objects import Remote

Point = namedtuple("Point", "x y")


class Level(IntEnum):
    LOW = 1


class Liar(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__

    def __add__(self, other: Any) -> Any:
        return self

    def __int__(self) -> int:
        return 99


def refuse(value: Any) -> Any:
    return encode(reduce_to_base(value), refuse)


def round_trip(value: Any) -> Any:
    import json

    return decode(json.loads(json.dumps(encode(value, refuse))), lambda plain: plain)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=2**61, max_value=2**2_000)
    | st.floats(allow_nan=False)
    | st.text(st.characters())
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.decimals(allow_nan=False)
    | st.fractions()
    | st.dates()
    | st.datetimes()
    | st.timedeltas()
)
keys = st.integers() | st.text() | st.tuples(st.integers(), st.booleans()) | st.frozensets(st.integers())
plain = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.tuples(inner, inner)
        | st.sets(st.integers() | st.text())
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b)) and type(a) is type(b)
    return type(a) is type(b) and a == b


@settings(max_examples=60)
@given(plain)
def test_plain_data_survives_a_round_trip_with_its_types(value: Any) -> None:
    assert same(round_trip(value), value)


def test_non_finite_numbers_survive_a_round_trip() -> None:
    assert math.isnan(round_trip(float("nan")))
    assert round_trip([float("inf"), -float("inf")]) == [float("inf"), -float("inf")]


def test_subclasses_of_builtins_are_returned_as_builtins() -> None:
    numbers = defaultdict(list, {1: [2]})
    made = [Point(1, 2), Level.LOW, numbers, Counter("aa"), OrderedDict(a=1), Liar(7), range(3), bytearray(b"x")]
    back = round_trip(made)
    assert [type(one) for one in back] == [tuple, int, dict, dict, dict, int, range, bytearray]
    assert back == [(1, 2), 1, {1: [2]}, {"a": 2}, {"a": 1}, 7, range(3), bytearray(b"x")]


@pytest.mark.parametrize(
    "value", [object(), lambda: 1, iter([]), sys, ValueError("x")], ids=lambda value: type(value).__name__
)
def test_other_objects_are_refused(value: Any) -> None:
    with pytest.raises(NotPlain):
        encode([value], refuse)


def test_recursive_value_is_refused_in_bounded_time() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match=r"."):
        encode(loop, refuse)


KINDS = [
    "tuple",
    "set",
    "dict",
    "int",
    "float",
    "complex",
    "bytes",
    "range",
    "Decimal",
    "date",
    "datetime",
    "ndarray",
]
json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["t", "v", "n"]), inner, max_size=3)
        | st.fixed_dictionaries(
            {
                "t": st.sampled_from(KINDS),
                "v": inner,
            }
        )
    ),
    max_leaves=10,
)


@given(json_like)
def test_hostile_input_decodes_to_exact_builtins_or_an_ordinary_error(message: Any) -> None:
    try:
        value = decode(message, lambda plain: None)
    except (KeyError, ValueError, TypeError, ArithmeticError, LookupError, AttributeError):
        return
    # Decoded data can always be encoded again; otherwise its sender could force the shared form.
    encode(value, refuse_nothing)


def refuse_nothing(value: Any) -> Any:
    raise AssertionError(f"{type(value)} came in and cannot go out")


def test_remote_reference_equals_no_plain_value() -> None:
    class Silent:
        def request(self, do: str, args: Any) -> Any:
            raise AssertionError(f"{do} was asked")

    remote = Remote(Silent(), 5, "thing")  # type: ignore[arg-type]
    assert remote == remote
    assert remote != 5
    assert remote not in [1, "x", None, Fraction(1), Decimal(1), dt.date(2020, 1, 1)]


@pytest.mark.parametrize("name", ["runner", "submission"])
def test_bundled_program_needs_only_the_standard_library(name: str) -> None:
    text = bundle.build_source("grader", name)
    compile(text, name, "exec")
    assert "rookery.scoring" not in text
    assert all(
        len(word) < 100_000 for word in bundle.build_command("grader", name)
    )  # the kernel limits one argument to 128 kB


@pytest.mark.parametrize("magic", ["", "another"])
def test_bundled_program_runs_from_code_and_from_source(magic: str) -> None:
    import subprocess

    _, dash_c, boot, own, code, source = bundle.build_command("grader", "submission")
    words = (sys.executable, "-I", dash_c, boot, magic or own, code if not magic else "00", source)
    asked = '{"do": "call", "a": [{"t": "ref", "v": "f"}, [21], {"t": "dict", "v": []}]}'
    given = ('s{"source": "def f(x): return x * 2"}\nc' + asked + "\n").encode()
    done = subprocess.run(words, input=given, capture_output=True, timeout=30, check=False)
    assert done.stdout == b'rnull\nr{"v":42}\n', done.stderr
