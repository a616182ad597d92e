"""`fast_encoder` is used only for vocabularies where it is proven to encode like the library."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.gateway.chat_renderers import fast_encoder
from rookery.gateway.chat_renderers.tokenizer import Tokenizer, open_tokenizer
from tests.conftest import TOKENIZERS
from tests.gateway.chat_renderers.kit import library_tokenizer

WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@pytest.fixture
def build_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tokenizer]:
    """Return a function that builds a small real tokenizer, optionally changed by the test."""
    monkeypatch.setenv("ROOKERY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fast_encoder, "_MAX_CHARACTER", 0x400)
    base = tokenizers.Tokenizer(tokenizers.models.BPE())
    base.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    base.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    base.train_from_iterator(["the other weather there, whether or not; aaaa aaaaaaaa"] * 50, trainer)

    def build(change: Callable[[dict[str, Any]], None] = lambda _: None) -> Tokenizer:
        state = json.loads(base.to_str())
        change(state)
        (tmp_path / "tokenizer.json").write_text(json.dumps(state))
        return Tokenizer(tmp_path)

    return build


def test_plain_vocabulary_is_proven_once_per_machine(
    build_tokenizer: Callable[..., Tokenizer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert build_tokenizer().fast_encoder is not None
    monkeypatch.setattr(fast_encoder, "merges_agree", None)
    assert build_tokenizer().fast_encoder is not None
    (stamp,) = (tmp_path / "cache" / "quick").iterdir()
    stamp.write_bytes(b"other\n")
    assert build_tokenizer().fast_encoder is None


def _swap_merges(state: dict[str, Any]) -> None:
    merges = state["model"]["merges"]
    merges[3], merges[20] = merges[20], merges[3]


def _remove_merge(state: dict[str, Any]) -> None:
    del state["model"]["merges"][5]


def _add_overlapping_tokens(state: dict[str, Any]) -> None:
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    state["added_tokens"] += [{**token, "id": 900, "content": "<a>"}, {**token, "id": 901, "content": "<a>b"}]


def _add_stripping_token(state: dict[str, Any]) -> None:
    token = {"single_word": False, "lstrip": True, "rstrip": False, "normalized": False, "special": True}
    state["added_tokens"] += [{**token, "id": 900, "content": "<a>"}]


def _add_lowercase_normalizer(state: dict[str, Any]) -> None:
    state["normalizer"] = {"type": "Lowercase"}


def _change_word_splitting(state: dict[str, Any]) -> None:
    state["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "Removed"


@pytest.mark.parametrize(
    "change",
    [
        _swap_merges,
        _remove_merge,
        _add_overlapping_tokens,
        _add_stripping_token,
        _add_lowercase_normalizer,
        _change_word_splitting,
    ],
)
def test_unproven_vocabulary_uses_the_library(
    build_tokenizer: Callable[..., Tokenizer], change: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    tokenizer, library = build_tokenizer(change), library_tokenizer(tmp_path)
    assert tokenizer.fast_encoder is None
    text = "The other weather <a>b there 12 aaaaa"
    assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids


def test_proof_is_repeated_if_it_cannot_be_cached(
    build_tokenizer: Callable[..., Tokenizer], tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("in the way")
    assert build_tokenizer().fast_encoder is not None


@pytest.mark.needs("tokenizers")
@pytest.mark.parametrize("name", ["qwen3", "llama-3"])
@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    text=st.text(min_size=65, max_size=400) | st.text("aeinrst THE\n\t .,'0123é語🙂", min_size=65, max_size=800)
)
def test_real_vocabularies_encode_like_the_library(name: str, text: str) -> None:
    tokenizer, library = open_tokenizer(str(TOKENIZERS / name)), library_tokenizer(TOKENIZERS / name)
    assert tokenizer.fast_encoder is not None
    assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids


@pytest.mark.needs("tokenizers")
@pytest.mark.parametrize("name", ["qwen3", "llama-3"])
def test_real_programs_encode_like_the_library(name: str) -> None:
    tokenizer, library = open_tokenizer(str(TOKENIZERS / name)), library_tokenizer(TOKENIZERS / name)
    for path in sorted(Path(fast_encoder.__file__).parent.glob("*.py")):
        text = path.read_text() + "<|im_start|>assistant\n<think>\n<|eot_id|>"
        assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids


@pytest.mark.needs("tokenizers")
def test_unnormalised_text_uses_the_library() -> None:
    tokenizer = open_tokenizer(str(TOKENIZERS / "qwen3"))
    assert tokenizer.fast_encoder is not None
    assert tokenizer.fast_encoder("e\u0301" * 50) is None
    assert tokenizer.fast_encoder("a\ud800") is None
