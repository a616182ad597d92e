"""Encode text with tiktoken instead of the tokenizers library, if both were shown to give the same tokens.

tiktoken takes a quarter of the time. Both libraries repeatedly merge the pair of neighbours with the best rank;
tiktoken ranks a pair by the ID of the merged token. The rankings agree if the merges are listed in the order of
their results and no reachable pair is missing. That holds if every token can be built by merges, or if the list
contains every split of every token into two tokens. The regular expressions that split text into words run in two
different engines, so they are compared on every character in several contexts and on long runs of one character.

Guarantees:
- the fast encoder is used only for a vocabulary that passed these checks (the "proof"). It returns None for a text
  that they do not cover; the caller then encodes that text with the tokenizers library;
- the proof is made once per cache directory, vocabulary and versions of the libraries; its result is cached.
"""

import hashlib
import re
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import orjson

from rookery.gateway.chat_renderers.tokenizer_cache import get_cache_directory

PROOF_VERSION: Final = b"1"
"""Version of the checks in this module, part of the cache key of their result. Raise it if a check changes."""
_LONE_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_MAX_CHARACTER: Final = 0x20000
_RUN_LENGTHS: Final = (*range(2, 40), 63, 64, 65, 127, 128, 129)


class FastEncoder:
    """Encodes text with tiktoken.

    Returns None for a text for which tiktoken is not known to give the same tokens as the tokenizers library.
    """

    def __init__(self, encoding: Any, needs_nfc: bool) -> None:
        self._encoding = encoding
        self._needs_nfc = needs_nfc

    def __call__(self, text: str) -> list[int] | None:
        if not text.isascii():
            if self._needs_nfc and not unicodedata.is_normalized("NFC", text):
                return None
            if _LONE_SURROGATE.search(text):
                return None
        try:
            ids: list[int] = self._encoding.encode(text, allowed_special="all")
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # the regular expression engine gave up on this text
                raise
            return None
        return ids


def build_fast_encoder(
    path: Path, reference_encode: Callable[[str], list[int]], model: Any, byte_by_letter: dict[str, int]
) -> FastEncoder | None:
    """Build the fast encoder for the tokenizer.json at `path`.

    Returns None if tiktoken is not installed, or if it may give other tokens than `reference_encode`, the
    tokenizers library. The check takes time at the first call; its result is cached on disk.
    """
    try:
        import tiktoken
        import tokenizers
    except ImportError:
        return None
    tokenizer_json = orjson.loads(path.read_bytes())
    pattern, needs_nfc = _get_split_pattern(tokenizer_json)
    if not pattern or not _has_simple_added_tokens(tokenizer_json["added_tokens"], needs_nfc):
        return None
    vocabulary: dict[str, int] = tokenizer_json["model"]["vocab"]
    try:
        ranks = {bytes([byte_by_letter[letter] for letter in text]): at for text, at in vocabulary.items()}
    except KeyError:
        return None
    if len(ranks) != len(vocabulary) or any(bytes([byte]) not in ranks for byte in range(256)):
        return None
    special_tokens = {token["content"]: token["id"] for token in tokenizer_json["added_tokens"]}
    try:
        encoding = tiktoken.Encoding(
            path.parent.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_tokens
        )
    except ValueError:  # tiktoken does not support the regular expression
        return None
    encoder = FastEncoder(encoding, needs_nfc)
    definition = orjson.dumps(
        [tokenizer_json["model"], tokenizer_json["pre_tokenizer"], tokenizer_json["normalizer"]]
    )
    versions = f"{tiktoken.__version__} {tokenizers.__version__}".encode()
    key = hashlib.blake2b(PROOF_VERSION + versions + definition, digest_size=20).hexdigest()
    verdict_file = get_cache_directory() / "quick" / key
    if verdict_file.is_file():
        return encoder if verdict_file.read_bytes() == b"same\n" else None
    agrees = merges_agree(tokenizer_json["model"], model) and _texts_agree(reference_encode, encoder)
    _store_verdict(verdict_file, b"same\n" if agrees else b"other\n")
    return encoder if agrees else None


def _get_split_pattern(tokenizer_json: dict[str, Any]) -> tuple[str, bool]:
    """Return the regular expression that splits text into words, and whether text is normalised to NFC.

    The expression is empty if tiktoken cannot replace this kind of tokenizer.
    """
    model, pre_tokenizer, needs_nfc = (
        tokenizer_json["model"],
        tokenizer_json["pre_tokenizer"],
        tokenizer_json["normalizer"],
    )
    plain = (
        model["type"] == "BPE"
        and not any(model.get(name) for name in ("dropout", "byte_fallback", "unk_token"))
        and not any(model.get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix"))
        and (needs_nfc is None or needs_nfc["type"] == "NFC")
        and pre_tokenizer is not None
        and pre_tokenizer["type"] == "Sequence"
        and [part["type"] for part in pre_tokenizer["pretokenizers"]] == ["Split", "ByteLevel"]
    )
    if not plain:
        return "", False
    split, byte_level = pre_tokenizer["pretokenizers"]
    if split["behavior"] != "Isolated" or split["invert"] or "Regex" not in split["pattern"]:
        return "", False
    if byte_level["add_prefix_space"] or byte_level["use_regex"]:
        return "", False
    return str(split["pattern"]["Regex"]), needs_nfc is not None


def _has_simple_added_tokens(added: list[dict[str, Any]], needs_nfc: bool) -> bool:
    """Return whether each added token matches exactly its own text, and no added token is a prefix of another."""
    if any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in added):
        return False
    if needs_nfc and any(token["normalized"] for token in added):
        return False
    texts = sorted(token["content"] for token in added)
    return not any(after.startswith(text) for text, after in pairwise(texts))


def merges_agree(state: dict[str, Any], model: Any) -> bool:
    vocabulary: dict[str, int] = state["vocab"]
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ", 1)) for merge in state["merges"]]
    merged = [vocabulary.get(left + right, -1) for left, right in merges]
    if any(after < before for before, after in zip([0, *merged], merged, strict=False)):
        return False
    if state.get("ignore_merges"):
        listed = set(merges)
        return all(
            (text[:at], text[at:]) in listed
            for text in vocabulary
            for at in range(1, len(text))
            if text[:at] in vocabulary and text[at:] in vocabulary
        )
    return all(len(model.tokenize(text)) == 1 for text in vocabulary)


def _texts_agree(reference_encode: Callable[[str], list[int]], encoder: FastEncoder) -> bool:
    return all(encoder(text) == reference_encode(text) for text in _generate_test_texts())


def _generate_test_texts() -> Iterator[str]:
    for first in range(0, _MAX_CHARACTER, 256):
        if 0xD800 <= first < 0xE000:
            continue
        text = "".join(f"x{chr(at)}y{chr(at)} {chr(at)}1'{chr(at)}\n" for at in range(first, first + 256))
        yield unicodedata.normalize("NFC", text)
    for at in (*range(1, 0x180), 0x3042, 0x4E00, 0x1F642):
        yield unicodedata.normalize("NFC", ".".join(chr(at) * size for size in _RUN_LENGTHS))


def _store_verdict(verdict_file: Path, verdict: bytes) -> None:
    """Write the result of the checks to the cache. If the cache is not writable, they are repeated next time."""
    try:
        verdict_file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=verdict_file.parent, delete=False) as temporary:
            temporary.write(verdict)
        Path(temporary.name).replace(verdict_file)
    except OSError:
        return
