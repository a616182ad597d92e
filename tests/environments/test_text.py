"""Rendering tool results as text, and comparing answers."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.core import Task
from rookery.environments.text import clip
from rookery.scoring.answers import match_answer
from tests.environments.helpers import observe_call


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        (None, "(no output)"),
        (3, "3"),
        (True, "true"),
        (float("nan"), "nan"),
        ({"a": [1, None]}, '{"a":[1,null]}'),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        (b"caf\xc3\xa9\xff", "café�"),
        ("\ud800", "?"),
        (Task(id="t"), '{"id":"t"}'),
        (2**80, str(2**80)),
        (1j, "1j"),
    ],
)
async def test_results_of_every_type_become_text(value, text):
    def give() -> Any:
        return value

    assert (await observe_call(give))[0] == text


async def test_value_whose_repr_raises_is_a_tool_error():
    class Shy:
        def __repr__(self) -> str:
            raise ValueError("no")

    def give() -> Any:
        return Shy()

    assert (await observe_call(give))[0] == "give failed: ValueError: no"


async def test_numpy_values_are_rendered_as_json():
    import numpy as np

    def give() -> Any:
        return {"a": np.arange(3), "b": np.float64(0.5)}

    assert (await observe_call(give))[0] == '{"a":[0,1,2],"b":0.5}'


async def test_long_result_keeps_head_and_tail_and_counts_what_was_cut():
    def give() -> str:
        return "a" * 5_000 + "é" * 5_000

    text, _ = await observe_call(give, max_result=101)
    assert text == f"{'a' * 51}\n… 14899 bytes cut …\n{'é' * 25}"


@given(st.text(), st.integers(1, 40), st.integers(0, 3))
@settings(deadline=None)
def test_clipped_text_is_bounded_and_short_text_is_unchanged(text, limit, dropped):
    cut = clip(text, limit, dropped)
    size = len(text.encode())
    if size <= limit and not dropped:
        assert cut == text
    else:
        assert f"… {size - min(size, limit) + dropped} bytes cut …" in cut
        assert len(cut.encode()) <= limit + 60


@pytest.mark.parametrize(
    ("text", "answer", "equal"),
    [
        ("42", 42, True),
        (" Paris\n", "Paris", True),
        ("It is Paris", "Paris", False),
        ("So it is 42.", "42", True),
        ("1,000 and then 2,000.50", 2000.5, True),
        ("first 42, then 43", 42, False),
        ("it costs $12.00", 12, True),
        ("\N{MINUS SIGN}3", "-3", True),
        ("10-3", 3, True),
        (r"\boxed{41} no, \boxed{42}, not 7", "42", True),
        (r"42 \boxed{41}", "42", False),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", True),
        (r"\boxed{x = 42}", "42", False),
        (r"\boxed{42", "42", True),
        ("", 42, False),
        ("1e9999", "1e9999", True),
        ("1e999999999999", 5, False),
        ("9" * 100_000, 5, False),
        ("True", True, True),
        ("1", True, False),
        ("nan", float("nan"), True),
        ("version 3.14", "14", False),
    ],
)
def test_answers_are_compared_as_documented(text, answer, equal):
    assert match_answer(text, answer) is equal


@given(st.text(), st.one_of(st.text(), st.integers(), st.floats()))
@settings(deadline=None)
def test_no_text_breaks_the_comparison(text, answer):
    match_answer(text, answer)
