"""`strict_json` rejects JSON that parsers read differently."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.core.strict_json import strict_json

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(PLAIN)
def test_unambiguous_json_decodes_unchanged(value: object) -> None:
    assert strict_json()(json.dumps(value)) == value


@pytest.mark.parametrize("text", ['{"a":1,"a":1}', '[{"b":{"a":1,"a":2}}]', "1e400", "-1e400", "NaN", "Infinity"])
def test_json_that_parsers_read_differently_is_rejected(text: str) -> None:
    with pytest.raises(ValueError):
        strict_json()(text)


def test_integers_are_converted_by_the_given_function() -> None:
    assert strict_json(len)("[1, 22, 3.5]") == [1, 2, 3.5]
