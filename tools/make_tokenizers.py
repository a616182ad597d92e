# ruff: noqa: T201  (a program: its output is for people)
"""Build real tokenizers in `.peers/tokenizers/`, for the tests and the benchmarks (`make tokenizers`).

Vocabularies and chat templates come from one source archive of the package index: llama-cpp-python contains GGUF
files with vocabularies only, and for each of them example texts with the expected token IDs.

Guarantees:
- a tokenizer is a directory as in a model repository: tokenizer.json, tokenizer_config.json, chat_template.jinja;
- a tokenizer that encodes the examples of the archive differently is not written;
- a complete tokenizer is left unchanged without network access; an incomplete one is built again;
- a tokenizer that cannot be built is reported with the reason (exit code 1), and the others are still built.
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
"""Increased when this program builds something else from the same archive."""
SEPARATOR: Final = "\n__ggml_vocab_test__\n"

_WORD_PATTERN: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST_PATTERN: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTROL, _USER_DEFINED = 3, 4
"""GGUF token types: control tokens are special; user-defined ones are not special, or only padding."""


class Recipe(NamedTuple):
    """Describes how to build one tokenizer. `names` are texts of IDs that have none in the vocabulary file."""

    name: str
    model: str
    vocabulary: str
    template: str
    split: str
    """Pattern that splits text before it is encoded; empty: as SentencePiece does it."""
    normal: str
    eos: str
    bos: str
    names: dict[int, tuple[str, bool]]
    """Added tokens by ID: their text, and whether they are special."""
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
        split=_WORD_PATTERN + r"\p{N}" + _REST_PATTERN,
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
        split=_WORD_PATTERN + r"\p{N}{1,3}" + _REST_PATTERN,
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
    """Reads the metadata of a GGUF file, which contains the vocabulary."""

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


def build_tokenizer(recipe: Recipe, values: dict[str, Any]) -> Any:
    """Return a `tokenizers.Tokenizer` for a vocabulary."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    texts: list[str] = list(values["tokenizer.ggml.tokens"])
    types: list[int] = values["tokenizer.ggml.token_type"]
    merges = [tuple(_pair(merge)) for merge in values["tokenizer.ggml.merges"]]
    added = {
        at: (text, types[at] == _CONTROL)
        for at, text in enumerate(texts)
        if types[at] in (_CONTROL, _USER_DEFINED) and at >= recipe.first_added and not text.startswith("[PAD")
    }
    added.update(recipe.names)
    # In a byte-level vocabulary the added tokens follow it; padding entries are not tokens.
    base_texts = texts if not recipe.split else texts[: recipe.first_added]
    vocabulary = {text: at for at, text in enumerate(base_texts)}
    byte_level = bool(recipe.split)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges,
            byte_fallback=not byte_level,
            fuse_unk=not byte_level,
            unk_token=None if byte_level else "<unk>",
            ignore_merges=recipe.ignore_merges,
        )
    )
    if recipe.normal:
        tokenizer.normalizer = normalizers.NFC()
    if byte_level:
        split = pre_tokenizers.Split(Regex(recipe.split), "isolated", invert=False)
        byte_level_encoding = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level_encoding])
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
        raise ValueError(f"{merge!r} is not a merge of two tokens")
    return [left, right]


def find_difference(tokenizer: Any, examples: str, answers: str) -> str:
    """Return the first difference to the expected IDs of the archive, or an empty string."""
    texts = examples.split(SEPARATOR)
    expected = [[int(word) for word in line.split()] for line in answers.splitlines()]
    if len(texts) < len(expected):
        return f"{len(texts)} examples but {len(expected)} answers"
    for text, ids in zip(texts, expected, strict=False):
        encoded = tokenizer.encode(text, add_special_tokens=False).ids
        if encoded != ids:
            return f"{text!r} is {encoded}, not {ids}"
    return ""


# -------------------------------------------------------------------------------------------------- folders


def get_stamp(recipe: Recipe) -> str:
    return f"{ARCHIVE} {FORMAT} {recipe.name}\n"


def is_ready(folder: Path, recipe: Recipe) -> bool:
    stamp = folder / recipe.name / "rookery-made"
    return stamp.is_file() and stamp.read_text() == get_stamp(recipe)


def make_tokenizer(folder: Path, recipe: Recipe, parts: dict[str, bytes]) -> str:
    """Write the directory of a tokenizer. Returns an error message, or an empty string."""
    tokenizer = build_tokenizer(recipe, Gguf(parts[recipe.vocabulary]).values)
    examples, answers = (parts[f"{recipe.vocabulary}.{end}"].decode() for end in ("inp", "out"))
    if error := find_difference(tokenizer, examples, answers):
        return f"it encodes an example differently: {error}"
    target = folder / recipe.name
    staging = Path(tempfile.mkdtemp(prefix=f"{recipe.name}-", dir=folder))
    try:
        tokenizer.save(str(staging / "tokenizer.json"), pretty=False)
        (staging / "chat_template.jinja").write_bytes(parts[recipe.template])
        config = {"name_or_path": recipe.model, "eos_token": recipe.eos, "bos_token": recipe.bos or None}
        (staging / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
        (staging / "rookery-made").write_text(get_stamp(recipe))
        staging.chmod(0o755)
        shutil.rmtree(target, ignore_errors=True)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return ""


def required_files(recipes: list[Recipe]) -> set[str]:
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


def fetch_files(folder: Path, names: set[str]) -> dict[str, bytes]:
    """Download the archive and return its files of these names. The archive is not kept."""
    with tempfile.TemporaryDirectory(prefix="archive-", dir=folder) as folder_name:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-binary", ARCHIVE.partition("=")[0], "--dest", folder_name, ARCHIVE]
        process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
        archives = [*Path(folder_name).glob("*.tar.gz")]
        if process.returncode or not archives:
            raise OSError(
                f"pip could not download {ARCHIVE}: {process.stderr.strip()[-1_000:] or process.returncode}"
            )
        return dict(_members(archives[0], names))


def _members(archive: Path, names: set[str]) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(archive) as tar:
        for member in tar:
            name = member.name.partition(MODELS)[2]
            if name in names and (part := tar.extractfile(member)) is not None:
                yield name, part.read()


def main() -> int:
    parser = argparse.ArgumentParser(description="Build real tokenizers for tests and benchmarks.")
    parser.add_argument("names", nargs="*", help="names of tokenizers (default: all)")
    parser.add_argument("--folder", type=Path, help="where to write them (default: the user's cache)")
    args = parser.parse_args()
    known = {recipe.name: recipe for recipe in RECIPES}
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"no such tokenizer: {', '.join(unknown)} (known: {', '.join(known)})")
    recipes = [known[name] for name in args.names or known]
    if args.folder is not None:
        return make_all(args.folder, recipes)
    with cache_entry("tokenizers", "\n".join(get_stamp(recipe) for recipe in RECIPES)) as folder:
        return make_all(folder, recipes)


def make_all(folder: Path, recipes: list[Recipe]) -> int:
    """Build the tokenizers that are missing in `folder`. Returns the exit code."""
    missing = [recipe for recipe in recipes if not is_ready(folder, recipe)]
    if not missing:
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    print(f"building the tokenizers {', '.join(recipe.name for recipe in missing)}, once", flush=True)
    try:
        parts = fetch_files(folder, required_files(missing))
    except (OSError, subprocess.SubprocessError, tarfile.TarError) as error:
        print(f"no tokenizers: {error}", file=sys.stderr)
        return 1
    failed = 0
    for recipe in missing:
        if absent := required_files([recipe]) - parts.keys():
            error = f"the archive does not contain {', '.join(sorted(absent))}"
        else:
            error = make_tokenizer(folder, recipe, parts)
        if error:
            failed += 1
            print(f"{recipe.name}: not built: {error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
