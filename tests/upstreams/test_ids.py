"""Conversion of token IDs between JSON and bytes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.core import ints
from rookery.upstreams import token_ids
from rookery.upstreams.token_ids import PromptCache, encode_ids, extract_prompt_ids, pack_ids, parse_ids

token = st.integers(0, 2**31 - 1) | st.integers(0, 200_000)
few = st.lists(token, max_size=20)
many = st.builds(lambda some, times: some * times, st.lists(token, min_size=1, max_size=40), st.integers(100, 400))


@given(few | many, st.sampled_from([(",", ":"), (", ", ": "), (" ,  ", ":")]))
def test_parsing_returns_the_encoded_ids(ids, separators):
    assert parse_ids(json.dumps(ids, separators=separators).encode()) == ints(ids)
    assert json.loads(bytes(encode_ids(ints(ids)))) == ids
    assert pack_ids(ids) == ints(ids)


@pytest.mark.parametrize("wrong", [-1, 2**31, 2**63, 10**30, 1.5, "1", None, [1], True])
@pytest.mark.parametrize("others", [0, 3, 5_000])
def test_invalid_id_is_refused(wrong, others):
    for listed in ([*([7] * others), wrong], [wrong, *([7] * others)]):
        with pytest.raises(ValueError, match=r"-1\b|\b\d{10}|`int`"):
            parse_ids(json.dumps(listed).encode())


@pytest.mark.parametrize(
    "text", [b"", b"[", b"]", b"null", b"{}", b"[1 2]", b"[1,,2]", b"[,1]", b"[1,]", b"[1, ]"]
)
@pytest.mark.parametrize("others", [0, 5_000])
def test_text_that_is_not_a_list_of_ids_is_refused(text, others):
    for whole in (text, text.replace(b"1", b"7," * others + b"1")):
        with pytest.raises(ValueError, match=r"."):
            assert parse_ids(whole) == b"null"


def test_garbage_causes_no_warning(recwarn):
    for text in (b"[" + b"1 2," * 3_000 + b"3]", b"[" + b"1," * 3_000 + b"x]", b"[" + b"1 ,2," * 3_000 + b"3]"):
        try:
            parse_ids(text)
        except ValueError:
            continue
    assert not recwarn.list


@given(many, st.text(max_size=40))
def test_extracting_the_prompt_does_not_change_a_long_reply(ids, text):
    ids = ids * 50
    answer = {
        "text": text + '"prompt_token_ids":[1]',
        "prompt_token_ids": ids,
        "after": {"x": [1, 2]},
        "pad": "x" * 70_000,
    }
    lean, found = extract_prompt_ids(json.dumps(answer, separators=(",", ":")).encode())
    assert found == ints(ids)
    assert json.loads(lean) == {**answer, "prompt_token_ids": None}


@given(st.text(max_size=40))
def test_reply_that_mentions_ids_in_text_is_unchanged(text):
    answer = {"text": text + '{"prompt_token_ids":[1,2]}' + "x" * 70_000}
    data = json.dumps(answer, separators=(",", ":")).encode()
    assert extract_prompt_ids(data) == (data, b"")


def test_prompt_cache_converts_only_the_new_part_of_an_extended_prompt(monkeypatch):
    first, more = [7] * 50_000, [8, 9]
    cache = PromptCache()
    text = json.dumps(first, separators=(",", ":")).encode()
    assert cache.read(text) == ints(first)
    parsed: list[bytes] = []
    encoded: list[bytes] = []
    monkeypatch.setattr(token_ids, "parse_ids", lambda text: parsed.append(text) or parse_ids(text))
    monkeypatch.setattr(token_ids, "encode_ids", lambda ids: encoded.append(ids) or encode_ids(ids))
    assert cache.read(text) == ints(first)
    assert cache.read(text[:-1] + b",8,9]") == ints(first + more)
    assert json.loads(bytes(cache.write(ints([*first, *more, 1])))) == [*first, *more, 1]
    assert parsed == [b"[8,9]"]
    assert encoded == [ints([1])]


@pytest.mark.parametrize(
    ("following", "new"),
    [
        (b",8,91,5]", b"[5]"),
        (b",8,912,5]", b"[8,912,5]"),  # 91 is only the start of a number
        (b", 8, 91, 5]", b"[ 8, 91, 5]"),
    ],
)
def test_prompt_cache_converts_sampled_ids_once(monkeypatch, following, new):
    text = json.dumps([7] * 5_000, separators=(",", ":")).encode()
    cache = PromptCache()
    cache.read(text)
    cache.add_reply(ints([8, 91]), b"[8,91]")
    parsed: list[bytes] = []
    monkeypatch.setattr(token_ids, "parse_ids", lambda text: parsed.append(text) or parse_ids(text))
    assert cache.read(text[:-1] + following) == ints(json.loads(text[:-1] + following))
    assert parsed == [new]
