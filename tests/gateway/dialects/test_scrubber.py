"""`Scrubber` keeps the structure of recorded requests and none of their prose."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gateway.dialects.recordings import OWN, RECORDINGS, list_clients, load_conversations, pack, unpack
from tests.gateway.dialects.scrubber import FILLER, Scrubber, find_foreign_text, find_surviving_runs, iter_texts

OWN_TEXTS = ("6 * 7?", "it is done")
# No word is a part of the filler: such a word could be replaced by itself.
WORDS = st.sampled_from(
    ["always", "be", "Careful", "with", "these", "user's", "files", "42", "naïve", "—", "`ls`", "/home/ann", "un"]
)
SENTENCES = st.lists(WORDS, min_size=2, max_size=30).map(" ".join)
TEXTS = st.one_of(
    SENTENCES,
    st.builds("{}\n\n{}".format, SENTENCES, st.sampled_from(OWN_TEXTS)),
    # A word with letters, because the marks are kept and would else follow each other.
    st.builds("<system-reminder>\nCareful {}\n</system-reminder>".format, SENTENCES),
    st.builds(lambda one: json.dumps({"said": one, "n": 1}, ensure_ascii=False), SENTENCES),
    st.sampled_from(OWN_TEXTS),
    st.sampled_from(["object", "tool_use", "exec_command", "claude-code-20250219"]),
)
KEYS = st.sampled_from(["text", "description", "type", "name", "properties", "content", "enum"])
VALUES = st.recursive(
    st.one_of(TEXTS, st.integers(0, 9), st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=20,
)


@settings(max_examples=40)
@given(VALUES)
def test_no_run_of_foreign_words_survives(value: Any) -> None:
    after = Scrubber(OWN_TEXTS).body(value)
    assert find_surviving_runs(value, after, OWN_TEXTS, most=1) == []
    assert find_foreign_text(after, OWN_TEXTS, most=1) == []


@settings(max_examples=40)
@given(VALUES)
def test_structure_is_kept(value: Any) -> None:
    assert shape(Scrubber(OWN_TEXTS).body(value)) == shape(value)


def shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: shape(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [shape(inner) for inner in value]
    return re.sub(r"[^\W_]", "x", value) if isinstance(value, str) else value


@settings(max_examples=40)
@given(VALUES)
def test_equal_texts_stay_equal_and_own_texts_are_kept(value: Any) -> None:
    scrubber = Scrubber(OWN_TEXTS)
    first = scrubber.body(value)
    assert scrubber.body(value) == first
    for before, after in zip(iter_texts(value), iter_texts(first), strict=True):
        for text in OWN_TEXTS:
            assert before.count(text) <= after.count(text)


def test_identifying_data_is_removed() -> None:
    one, other = "6f0c1f1e-1111-4222-8333-944444444444", "0123456789abcdef0123"
    body = {
        "metadata": {"user_id": json.dumps({"device": other, "session": one})},
        "cwd": "/home/ann/work",
        "at": 1_794_787_739_181,
        "thread": f"{one}:0",
        "version": "Linux 6.1",
        "id": f"rs_{other}_0",
    }
    scrubbed = Scrubber().body(body)
    text = json.dumps(scrubbed)
    assert not any(secret in text for secret in (one, other, "ann", "1794787739181", "6.1"))
    inner = json.loads(scrubbed["metadata"]["user_id"])
    assert scrubbed["thread"] == f"{inner['session']}:0"
    assert scrubbed["id"] == f"rs_{inner['device']}_0"
    assert len(scrubbed["cwd"]) == len(body["cwd"])  # type: ignore[arg-type]
    headers = Scrubber().headers(
        {
            "Host": "127.0.0.1:1",
            "Authorization": "Bearer sk-1",
            "X-Stainless-OS": "Linux",
            "X-Id": one,
            "x-app": "cli",
        }
    )
    assert headers == {
        "Authorization": "", "X-Stainless-OS": "", "X-Id": "00000000-0000-4000-8000-000000000001", "x-app": "cli",
    }  # fmt: skip


def test_remaining_foreign_text_is_found() -> None:
    for text in ("Always be careful with files.", "The other person ate rooks.", "Rook nest wing soar twig"):
        assert find_foreign_text([text], ()) == [text]
    assert find_foreign_text(json.dumps({"a": ["Always be careful with files."]}), ())
    assert not find_foreign_text(["6 * 7? Rook eryn estp erch."], OWN_TEXTS)
    assert find_surviving_runs("Never do that at home.", ["xx never, do that (at) home"], ())
    assert re.fullmatch("[a-z]+", FILLER)


@settings(max_examples=40)
@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_packing_round_trips_and_stores_repeated_parts_once(value: Any) -> None:
    twice = {"one": value, "two": value, "three": ["x" * 200, {"text": "x" * 200}]}
    assert unpack(pack(twice)) == twice
    assert json.dumps(pack(twice)).count("x" * 200) == 1


@pytest.mark.parametrize("client", list_clients())
def test_recordings_contain_no_foreign_text(client: str) -> None:
    text = (RECORDINGS / f"{client}.json").read_text(encoding="utf-8")
    whole = [(one.body, one.answer) for turns in load_conversations(client).values() for one in turns]
    assert find_foreign_text([list(one) for one in whole], OWN) == []
    assert not re.search(r"/(?:home|root|tmp|work|usr|opt)/|Bearer", text)
    assert len(text) < 250_000
