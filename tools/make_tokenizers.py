# ruff: noqa: T201  (a program: its output is for people)
"""Build real tokenizers in `.peers/tokenizers/`, for the tests and the benchmarks (`make tokenizers`).

The vocabularies and the chat templates come out of one source archive of the package registry: llama-cpp-python
carries GGUF files that hold nothing but a vocabulary, and beside them what each one must answer.

Promises:
- a tokenizer is what a model's folder holds: tokenizer.json, tokenizer_config.json, chat_template.jinja;
- one that does not encode the archive's own examples to the archive's own ids is not made;
- a folder that is already right is left alone, without a call to the network; half a one is made again;
- what cannot be made is named, with the reason (exit 1); the others are still made.
"""

import argparse
import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from peer_cache import cache_entry

ARCHIVE: Final = "llama-cpp-python==0.3.36"
MODELS: Final = "/vendor/llama.cpp/models/"
FORMAT: Final = "1"
"""Raised when this program makes something else of the same archive."""
BETWEEN: Final = "\n__ggml_vocab_test__\n"

_WORDS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_OTHERS: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTROL, _OWN = 3, 4
"""GGUF token types: control tokens are the special ones; those of the user's own are not, or only pad."""


class Recipe(NamedTuple):
    """What one tokenizer is made of. `names` gives ids their text, where the vocabulary file has none for them."""

    name: str
    model: str
    vocabulary: str
    template: str
    split: str
    """The pattern that text is cut by before it is encoded; empty: as SentencePiece does it."""
    normal: str
    eos: str
    bos: str
    names: dict[int, tuple[str, bool]]
    """Added tokens by id: their text, and whether they are special."""
    first_added: int
    ignore_merges: bool = False


_QWEN3: Final = {
    151643 + at: (text, at < 14)
    for at, text in enumerate(
        (
            *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
            *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>"),
            *("<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>"),
            *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>"),
            *("<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
        )
    )
}
_LLAMA3: Final = {
    128004: ("<|finetune_right_pad_id|>", True),
    128008: ("<|eom_id|>", True),
    128010: ("<|python_tag|>", True),
}

RECIPES: Final = (
    Recipe(
        name="qwen3",
        model="Qwen/Qwen3-0.6B",
        vocabulary="ggml-vocab-qwen2.gguf",
        template="templates/Qwen-Qwen3-0.6B.jinja",
        split=_WORDS + r"\p{N}" + _OTHERS,
        normal="NFC",
        eos="<|im_end|>",
        bos="",
        names=_QWEN3,
        first_added=151643,
    ),
    Recipe(
        name="llama-3",
        model="meta-llama/Llama-3.2-3B-Instruct",
        vocabulary="ggml-vocab-llama-bpe.gguf",
        template="templates/meta-llama-Llama-3.2-3B-Instruct.jinja",
        split=_WORDS + r"\p{N}{1,3}" + _OTHERS,
        normal="",
        eos="<|eot_id|>",
        bos="<|begin_of_text|>",
        names=_LLAMA3,
        first_added=128000,
        ignore_merges=True,
    ),
    Recipe(
        name="gemma4",
        model="google/gemma-4-31B-it",
        vocabulary="ggml-vocab-gemma-4.gguf",
        template="templates/google-gemma-4-31B-it.jinja",
        split="",
        normal="",
        eos="<eos>",
        bos="<bos>",
        names={},
        first_added=0,
    ),
)


# ---------------------------------------------------------------------------------------------------- GGUF

_NUMBERS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9


class Gguf:
    """Reads the key-value part of a GGUF file, which is where a vocabulary is."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 4
        if data[:4] != b"GGUF":
            raise ValueError("not a GGUF file")
        version, _tensors, count = self._number("I"), self._number("Q"), self._number("Q")
        if version not in (2, 3):
            raise ValueError(f"GGUF version {version} is not known")
        self.values: dict[str, Any] = {}
        for _ in range(count):
            key = self._text()
            self.values[key] = self._value(self._number("I"))

    def _number(self, kind: str) -> Any:
        (value,) = struct.unpack_from(f"<{kind}", self._data, self._at)
        self._at += struct.calcsize(f"<{kind}")
        return value

    def _text(self) -> str:
        size = self._number("Q")
        self._at += size
        return self._data[self._at - size : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind != _LIST:
            return self._number(_NUMBERS[kind])
        inner, size = self._number("I"), self._number("Q")
        if inner in (_TEXT, _LIST):
            return [self._value(inner) for _ in range(size)]
        values = struct.unpack_from(f"<{size}{_NUMBERS[inner]}", self._data, self._at)
        self._at += struct.calcsize(f"<{size}{_NUMBERS[inner]}")
        return list(values)


# ----------------------------------------------------------------------------------------------- tokenizers


def tokenizer_of(recipe: Recipe, values: dict[str, Any]) -> Any:
    """A `tokenizers.Tokenizer` of a vocabulary."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    texts: list[str] = list(values["tokenizer.ggml.tokens"])
    types: list[int] = values["tokenizer.ggml.token_type"]
    merges = [tuple(_pair(merge)) for merge in values["tokenizer.ggml.merges"]]
    added = {
        at: (text, types[at] == _CONTROL)
        for at, text in enumerate(texts)
        if types[at] in (_CONTROL, _OWN) and at >= recipe.first_added and not text.startswith("[PAD")
    }
    added.update(recipe.names)
    # Of a byte-level vocabulary the added tokens lie behind it; what pads it out is no token at all.
    kept = texts if not recipe.split else texts[: recipe.first_added]
    vocabulary = {text: at for at, text in enumerate(kept)}
    bytewise = bool(recipe.split)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges,
            byte_fallback=not bytewise,
            fuse_unk=not bytewise,
            unk_token=None if bytewise else "<unk>",
            ignore_merges=recipe.ignore_merges,
        )
    )
    if recipe.normal:
        tokenizer.normalizer = normalizers.NFC()
    if bytewise:
        cut = pre_tokenizers.Split(Regex(recipe.split), "isolated", invert=False)
        spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, spelled])
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "\N{LOWER ONE EIGHTH BLOCK}")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous", invert=False)
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    for at in sorted(added):
        text, special = added[at]
        token = AddedToken(text, normalized=False, special=special)
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([token])
        if tokenizer.token_to_id(text) != at:
            raise ValueError(f"{text!r} became id {tokenizer.token_to_id(text)}, not {at}")
    return tokenizer


def _pair(merge: str) -> list[str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise ValueError(f"{merge!r} is no merge of two tokens")
    return [left, right]


def wrong(tokenizer: Any, examples: str, answers: str) -> str:
    """Where the tokenizer differs from what the archive says of it; empty where it does not."""
    texts = examples.split(BETWEEN)
    expected = [[int(word) for word in line.split()] for line in answers.splitlines()]
    if len(texts) < len(expected):
        return f"{len(texts)} examples but {len(expected)} answers"
    for text, ids in zip(texts, expected, strict=False):
        found = tokenizer.encode(text, add_special_tokens=False).ids
        if found != ids:
            return f"{text!r} is {found}, not {ids}"
    return ""


# -------------------------------------------------------------------------------------------------- folders


def stamp_of(recipe: Recipe) -> str:
    return f"{ARCHIVE} {FORMAT} {recipe.name}\n"


def ready(folder: Path, recipe: Recipe) -> bool:
    stamp = folder / recipe.name / "rookery-made"
    return stamp.is_file() and stamp.read_text() == stamp_of(recipe)


def make(folder: Path, recipe: Recipe, parts: dict[str, bytes]) -> str:
    """One tokenizer's folder; returns what went wrong, or nothing."""
    tokenizer = tokenizer_of(recipe, Gguf(parts[recipe.vocabulary]).values)
    examples, answers = (parts[f"{recipe.vocabulary}.{end}"].decode() for end in ("inp", "out"))
    if trouble := wrong(tokenizer, examples, answers):
        return f"it does not encode as it should: {trouble}"
    target = folder / recipe.name
    fresh = Path(tempfile.mkdtemp(prefix=f"{recipe.name}-", dir=folder))
    try:
        tokenizer.save(str(fresh / "tokenizer.json"), pretty=False)
        (fresh / "chat_template.jinja").write_bytes(parts[recipe.template])
        config = {"name_or_path": recipe.model, "eos_token": recipe.eos, "bos_token": recipe.bos or None}
        (fresh / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
        (fresh / "rookery-made").write_text(stamp_of(recipe))
        fresh.chmod(0o755)
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return ""


def wanted(recipes: list[Recipe]) -> set[str]:
    return {
        name
        for recipe in recipes
        for name in (
            recipe.vocabulary,
            f"{recipe.vocabulary}.inp",
            f"{recipe.vocabulary}.out",
            recipe.template,
        )
    }


def fetched(folder: Path, names: set[str]) -> dict[str, bytes]:
    """The archive's files of these names; the archive itself is not kept."""
    with tempfile.TemporaryDirectory(prefix="archive-", dir=folder) as place:
        words = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        words += ["--no-binary", ARCHIVE.partition("=")[0], "--dest", place, ARCHIVE]
        ran = subprocess.run(words, capture_output=True, text=True, check=False, timeout=900)
        archives = [*Path(place).glob("*.tar.gz")]
        if ran.returncode or not archives:
            raise OSError(f"pip could not fetch {ARCHIVE}: {ran.stderr.strip()[-1_000:] or ran.returncode}")
        return dict(_members(archives[0], names))


def _members(archive: Path, names: set[str]) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(archive) as tar:
        for member in tar:
            name = member.name.partition(MODELS)[2]
            if name in names and (part := tar.extractfile(member)) is not None:
                yield name, part.read()


def main() -> int:
    parser = argparse.ArgumentParser(description="Make real tokenizers for tests and measurements.")
    parser.add_argument("names", nargs="*", help="only these (default: all)")
    parser.add_argument("--folder", type=Path, help="where to write them (default: the user's cache)")
    args = parser.parse_args()
    known = {recipe.name: recipe for recipe in RECIPES}
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"no such tokenizer: {', '.join(unknown)} (known: {', '.join(known)})")
    recipes = [known[name] for name in args.names or known]
    if args.folder is not None:
        return make_all(args.folder, recipes)
    with cache_entry("tokenizers", "\n".join(stamp_of(recipe) for recipe in RECIPES)) as folder:
        return make_all(folder, recipes)


def make_all(folder: Path, recipes: list[Recipe]) -> int:
    """Build the tokenizers that are missing in `folder`. Returns the exit code."""
    missing = [recipe for recipe in recipes if not ready(folder, recipe)]
    if not missing:
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    print(f"making the tokenizers {', '.join(recipe.name for recipe in missing)}, once", flush=True)
    try:
        parts = fetched(folder, wanted(missing))
    except (OSError, subprocess.SubprocessError, tarfile.TarError) as error:
        print(f"no tokenizers: {error}", file=sys.stderr)
        return 1
    failed = 0
    for recipe in missing:
        if absent := wanted([recipe]) - parts.keys():
            trouble = f"the archive has no {', '.join(sorted(absent))}"
        else:
            trouble = make(folder, recipe, parts)
        if trouble:
            failed += 1
            print(f"{recipe.name}: not made: {trouble}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
