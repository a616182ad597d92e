"""`Tokenizer` encodes like the tokenizers library; `tokenizer_cache` finds or downloads its directory."""

import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.core import UsageError
from rookery.gateway.chat_renderers import tokenizer as tokenizer_module
from rookery.gateway.chat_renderers import tokenizer_cache
from rookery.gateway.chat_renderers.tokenizer import Tokenizer, open_tokenizer
from tests.conftest import TOKENIZERS
from tests.gateway.chat_renderers.kit import library_tokenizer

needs_tokenizers = pytest.mark.needs("tokenizers")
NAMES = ("qwen3", "llama-3", "gemma4")


@pytest.mark.long
@needs_tokenizers
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_ids_decode_like_the_library(name: str, data: st.DataObject) -> None:
    tokenizer, library = open_tokenizer(str(TOKENIZERS / name)), library_tokenizer(TOKENIZERS / name)
    ids = data.draw(st.lists(st.integers(0, len(tokenizer.token_bytes) + 5), max_size=12))
    assert tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == library.decode(ids, skip_special_tokens=True)


@needs_tokenizers
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(text=st.text(max_size=80) | st.text("aA 1\n'🙂é<|im_end>", max_size=300))
def test_text_encodes_like_the_library(name: str, text: str) -> None:
    tokenizer, library = open_tokenizer(str(TOKENIZERS / name)), library_tokenizer(TOKENIZERS / name)
    ids = tokenizer.encode(text)
    assert ids == library.encode(text, add_special_tokens=False).ids
    if name == "llama-3":  # the only one of these that does not normalise its text
        assert tokenizer.decode_bytes(ids).decode() == text


@needs_tokenizers
def test_unknown_ids_decode_to_nothing() -> None:
    tokenizer = open_tokenizer(str(TOKENIZERS / "qwen3"))
    assert tokenizer.decode([-1, 2**31 - 1]) == ""
    assert tokenizer.decode_bytes([-1, *tokenizer.encode("a"), 2**31 - 1]) == b"a"


@needs_tokenizers
def test_lone_surrogate_becomes_a_question_mark() -> None:
    tokenizer = open_tokenizer(str(TOKENIZERS / "qwen3"))
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"
    assert tokenizer.decode(tokenizer.encode("a\ud800b" * 100)) == "a?b" * 100


@pytest.mark.long
@needs_tokenizers
def test_directory_is_loaded_once_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Tokenizer] = []

    class CountedTokenizer(Tokenizer):
        def __init__(self, *arguments: object) -> None:
            loaded.append(self)
            super().__init__(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(tokenizer_module, "Tokenizer", CountedTokenizer)
    monkeypatch.setattr(tokenizer_module, "_tokenizers", {})
    opened: list[Tokenizer] = []
    threads = [
        threading.Thread(target=lambda: opened.append(open_tokenizer(str(TOKENIZERS / "qwen3")))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loaded) == 1
    assert opened == loaded * 4


@pytest.mark.long
@needs_tokenizers
def test_opening_and_rendering_use_no_network_and_do_not_import_transformers() -> None:
    program = f"""
import socket, sys
def refused(*a, **k): raise AssertionError("the network")
socket.socket.connect = refused
socket.getaddrinfo = refused
from rookery.core import Message
from rookery.gateway.chat_renderers import open_renderer
for name in ("auto", "default", "qwen3"):
    found = open_renderer(name, {str(TOKENIZERS / "qwen3")!r})
    tail = found.render([Message("user", "Hi.")], (), None)
    found.new_reply_parser(tail, ()).feed(tail)
    found.parse(tail, tail, ())
assert "transformers" not in sys.modules and "torch" not in sys.modules
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 0, result.stderr


# ---- directories


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROOKERY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _download(name: str, revision: str, folder: Path) -> None:
    with (Path(os.environ["ROOKERY_CACHE"]).parent / "fetched").open("a") as log:
        log.write(f"{name} {revision}\n")
    (folder / "tokenizer.json").write_text("{}")


def _resolve(_: int) -> str:
    return tokenizer_cache.resolve_tokenizer("org/model", _download)


@pytest.mark.long
def test_tokenizer_is_downloaded_once_per_machine(cache: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        folders = set(pool.map(_resolve, range(12)))
    assert len(folders) == 1
    assert (cache.parent / "fetched").read_text() == "org/model main\n"
    assert tokenizer_cache.read_origin(Path(folders.pop())) == "org/model"
    assert [entry for entry in (cache / "tokenizers").iterdir() if entry.name.startswith(".")] == []


def test_each_revision_has_its_own_directory(cache: Path) -> None:
    first = tokenizer_cache.resolve_tokenizer("org/model", _download)
    second = tokenizer_cache.resolve_tokenizer("org/model@v2", _download)
    assert first != second
    assert (cache.parent / "fetched").read_text() == "org/model main\norg/model v2\n"


def test_failed_download_leaves_no_files(cache: Path) -> None:
    def fail_to_download(name: str, revision: str, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("half")
        raise ConnectionError("no route")

    with pytest.raises(UsageError) as caught:
        tokenizer_cache.resolve_tokenizer("org/model", fail_to_download)
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert "org/model" in str(caught.value)
    assert [entry.name for entry in (cache / "tokenizers").iterdir()] == ["org--model@main.lock"]
    assert tokenizer_cache.resolve_tokenizer("org/model", _download)


def test_repository_without_tokenizer_is_rejected(cache: Path) -> None:
    with pytest.raises(UsageError, match=r"tokenizer\.json"):
        tokenizer_cache.resolve_tokenizer("org/model", lambda *_: None)


def test_unreachable_hub_is_a_usage_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "rookery.gateway.chat_renderers.tokenizer_cache"
    program = f"from {module} import resolve_tokenizer; resolve_tokenizer('org/model')"
    env = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60, env=env
    )
    assert result.returncode != 0
    last = result.stderr.splitlines()[-1]
    assert "UsageError" in last
    assert "org/model" in last


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("", "tokenizer"),
        ("/no/such/dir", "/no/such/dir"),
        ("just-a-word", "just-a-word"),
        ("{folder}", r"other\.txt"),
    ],
)
def test_missing_tokenizer_is_a_usage_error_that_names_the_path(tmp_path: Path, path: str, named: str) -> None:
    (tmp_path / "other.txt").write_text("")
    with pytest.raises(UsageError, match=named):
        tokenizer_cache.resolve_tokenizer(path.format(folder=tmp_path))


def test_directory_and_its_tokenizer_file_are_equivalent(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    assert (
        tokenizer_cache.resolve_tokenizer(str(tmp_path))
        == tokenizer_cache.resolve_tokenizer(str(tmp_path / "tokenizer.json"))
        == str(tmp_path)
    )


def test_invalid_tokenizer_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError) as caught:
        open_tokenizer(str(tmp_path))
    assert str(tmp_path) in str(caught.value)
