"""JSON that every reader reads alike."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.core.strict import strict_json

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(PLAIN)
def test_plain_json_is_read_as_it_is(value: object) -> None:
    assert strict_json()(json.dumps(value)) == value


@pytest.mark.parametrize("text", ['{"a":1,"a":1}', '[{"b":{"a":1,"a":2}}]', "1e400", "-1e400", "NaN", "Infinity"])
def test_what_readers_differ_on_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"duplicate|too large|not JSON"):
        strict_json()(text)


def test_integers_are_read_by_whom_it_is_told() -> None:
    assert strict_json(len)("[1, 22, 3.5]") == [1, 2, 3.5]
