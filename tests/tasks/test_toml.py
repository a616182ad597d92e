"""The TOML writer: written data reads as the same data."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.tasks.toml_writer import dumps

words = st.text(st.characters(blacklist_categories=("Cs",)), max_size=8)
values = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)


@given(data=st.dictionaries(words, values, max_size=4))
def test_what_is_written_reads_as_the_same_data(data):
    assert tomllib.loads(dumps(data)) == data


@pytest.mark.parametrize("value", [None, b"x", 2**63, "\udcff", [None]])
def test_what_toml_has_no_place_for_is_refused(value):
    with pytest.raises(ValueError):
        dumps({"x": value})
