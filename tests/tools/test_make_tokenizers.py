"""Tests of the tokenizer builder: reading GGUF files, checking encodings, and no needless downloads."""

import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import TOKENIZERS

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import make_tokenizers  # noqa: E402


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def gguf(*pairs: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + b"".join(pairs)


def test_vocabulary_is_read_from_a_gguf_file() -> None:
    data = gguf(
        text("a.name") + struct.pack("<I", 8) + text("naïve"),
        text("a.number") + struct.pack("<If", 6, 0.5),
        text("a.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("x") + text("é"),
        text("a.types") + struct.pack("<IIQ3i", 9, 5, 3, 1, 3, -4),
        text("a.flag") + struct.pack("<I?", 7, True),
    )
    assert make_tokenizers.Gguf(data).values == {
        "a.name": "naïve",
        "a.number": 0.5,
        "a.tokens": ["x", "é"],
        "a.types": [1, 3, -4],
        "a.flag": True,
    }


@pytest.mark.parametrize("data", [b"nope", b"GGUF" + struct.pack("<IQQ", 9, 0, 0)])
def test_file_that_is_not_gguf_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="GGUF"):
        make_tokenizers.Gguf(data)


class Letters:
    def encode(self, text: str, add_special_tokens: bool) -> "Letters":
        self.ids = [ord(letter) for letter in text]
        return self


def test_tokenizer_that_encodes_differently_is_detected() -> None:
    between = make_tokenizers.SEPARATOR
    assert make_tokenizers.find_difference(Letters(), f"ab{between}c", " 97 98\n 99\n") == ""
    difference = make_tokenizers.find_difference(Letters(), f"ab{between}c", " 97 98\n 98\n")
    assert re.search(r"'c'.*\[99\].*\[98\]", difference)
    assert re.search(r"\b1\b.*\b2\b", make_tokenizers.find_difference(Letters(), "ab", " 97 98\n 98\n"))


@pytest.mark.needs("tokenizers")
def test_existing_tokenizers_need_no_network() -> None:
    before = {path: path.stat().st_mtime_ns for path in sorted(TOKENIZERS.glob("*/*"))}
    program = (
        "import runpy, subprocess, sys\n"
        "def refused(*a, **k): raise AssertionError('a program was started')\n"
        "subprocess.Popen = refused\n"
        "sys.argv = ['make_tokenizers']\n"
        f"sys.path.insert(0, {str(ROOT / 'tools')!r})\n"
        f"runpy.run_path({str(ROOT / 'tools' / 'make_tokenizers.py')!r}, run_name='__main__')\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    assert before == {path: path.stat().st_mtime_ns for path in sorted(TOKENIZERS.glob("*/*"))}


@pytest.mark.needs("tokenizers")
def test_special_tokens_of_qwen3_have_their_ids() -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="[probed] tokenizers is not installed")
    made = tokenizers.Tokenizer.from_file(str(TOKENIZERS / "qwen3" / "tokenizer.json"))
    marks = {
        "<|endoftext|>": 151643,
        "<|im_end|>": 151645,
        "<tool_call>": 151657,
        "<think>": 151667,
        "</think>": 151668,
    }
    assert {mark: made.token_to_id(mark) for mark in marks} == marks
    assert made.encode("<think>", add_special_tokens=False).ids == [151667]
