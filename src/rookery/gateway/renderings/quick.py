"""A quicker program for the same tokenizer: tiktoken, where it provably cuts text as its own library does.

It takes a quarter of the time. Both merge the pair of neighbours that comes first in a list, again and again;
tiktoken has for its list the ids of the results. That is the same list where merges stand in the order of their
results and no pair is missing that a run of merges can arrive at: where every token can be reached by merges (its
own bytes then end in a pair that is listed, and so does the same stretch inside of any text), or where the list
holds every way to cut every token in two. The expressions that cut text into words are run by two libraries, so
both are asked about every character in several places, and about long runs of one.

Promises:
- nothing else is encoded than by the tokenizer's own library: what is not proven, or not covered, is left to it;
- a proof is made once for a machine and a vocabulary, and again for other versions of the libraries.
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

from rookery.gateway.renderings.resolve import cache_folder

FORMAT: Final = b"1"
"""Of what is proven here."""
_LONE: Final = re.compile("[\ud800-\udfff]")
_CHARACTERS: Final = 0x20000
_RUNS: Final = (*range(2, 40), 63, 64, 65, 127, 128, 129)


class Quick:
    """Encodes as the library does; None for texts that it is not proven for."""

    def __init__(self, coder: Any, normal: bool) -> None:
        self._coder = coder
        self._normal = normal

    def __call__(self, text: str) -> list[int] | None:
        if not text.isascii():
            if self._normal and not unicodedata.is_normalized("NFC", text):
                return None
            if _LONE.search(text):
                return None
        try:
            ids: list[int] = self._coder.encode(text, allowed_special="all")
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of a text that its expressions cannot be run on
                raise
            return None
        return ids


def quick(path: Path, slow: Callable[[str], list[int]], model: Any, letters: dict[str, int]) -> Quick | None:
    """The quicker program of a tokenizer.json; None where it is not proven. `slow` is what the library encodes."""
    try:
        import tiktoken
        import tokenizers
    except ImportError:
        return None
    found = orjson.loads(path.read_bytes())
    pattern, normal = _pattern(found)
    if not pattern or not _plain_added(found["added_tokens"], normal):
        return None
    vocabulary: dict[str, int] = found["model"]["vocab"]
    try:
        ranks = {bytes([letters[letter] for letter in text]): at for text, at in vocabulary.items()}
    except KeyError:
        return None
    if len(ranks) != len(vocabulary) or any(bytes([byte]) not in ranks for byte in range(256)):
        return None
    marks = {token["content"]: token["id"] for token in found["added_tokens"]}
    try:
        coder = tiktoken.Encoding(path.parent.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=marks)
    except ValueError:  # an expression that the other library does not know
        return None
    made = Quick(coder, normal)
    core = orjson.dumps([found["model"], found["pre_tokenizer"], found["normalizer"]])
    versions = f"{tiktoken.__version__} {tokenizers.__version__}".encode()
    key = hashlib.blake2b(FORMAT + versions + core, digest_size=20).hexdigest()
    stamp = cache_folder() / "quick" / key
    if stamp.is_file():
        return made if stamp.read_bytes() == b"same\n" else None
    same = _same_merges(found["model"], model) and _same_texts(slow, made)
    _remember(stamp, b"same\n" if same else b"other\n")
    return made if same else None


def _pattern(found: dict[str, Any]) -> tuple[str, bool]:
    """The expression that cuts words, and whether text is normalised before; nothing where it is otherwise."""
    model, before, normal = found["model"], found["pre_tokenizer"], found["normalizer"]
    plain = (
        model["type"] == "BPE"
        and not any(model.get(name) for name in ("dropout", "byte_fallback", "unk_token"))
        and not any(model.get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix"))
        and (normal is None or normal["type"] == "NFC")
        and before is not None
        and before["type"] == "Sequence"
        and [part["type"] for part in before["pretokenizers"]] == ["Split", "ByteLevel"]
    )
    if not plain:
        return "", False
    split, spelled = before["pretokenizers"]
    if split["behavior"] != "Isolated" or split["invert"] or "Regex" not in split["pattern"]:
        return "", False
    if spelled["add_prefix_space"] or spelled["use_regex"]:
        return "", False
    return str(split["pattern"]["Regex"]), normal is not None


def _plain_added(added: list[dict[str, Any]], normal: bool) -> bool:
    """Whether marks are found in text by themselves alone, and none may be taken for the beginning of another."""
    if any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in added):
        return False
    if normal and any(token["normalized"] for token in added):
        return False
    texts = sorted(token["content"] for token in added)
    return not any(after.startswith(text) for text, after in pairwise(texts))


def _same_merges(state: dict[str, Any], model: Any) -> bool:
    vocabulary: dict[str, int] = state["vocab"]
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ", 1)) for merge in state["merges"]]
    results = [vocabulary.get(left + right, -1) for left, right in merges]
    if any(after < before for before, after in zip([0, *results], results, strict=False)):
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


def _same_texts(slow: Callable[[str], list[int]], made: Quick) -> bool:
    return all(made(text) == slow(text) for text in _texts())


def _texts() -> Iterator[str]:
    for first in range(0, _CHARACTERS, 256):
        if 0xD800 <= first < 0xE000:
            continue
        text = "".join(f"x{chr(at)}y{chr(at)} {chr(at)}1'{chr(at)}\n" for at in range(first, first + 256))
        yield unicodedata.normalize("NFC", text)
    for at in (*range(1, 0x180), 0x3042, 0x4E00, 0x1F642):
        yield unicodedata.normalize("NFC", ".".join(chr(at) * size for size in _RUNS))


def _remember(stamp: Path, verdict: bytes) -> None:
    """Where it cannot be kept, it is proven again next time."""
    try:
        stamp.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=stamp.parent, delete=False) as fresh:
            fresh.write(verdict)
        Path(fresh.name).replace(stamp)
    except OSError:
        return
