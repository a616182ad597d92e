"""The tokenizer of a folder, and where a folder comes from."""

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
from rookery.gateway.renderings import resolve
from rookery.gateway.renderings import tokenizer as tokenizing
from rookery.gateway.renderings.tokenizer import Tokenizer, open_tokenizer
from tests.conftest import TOKENIZERS

needs = pytest.mark.needs("tokenizers")
NAMES = ("qwen3", "llama-3", "gemma4")


@needs
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_ids_are_decoded_as_the_library_does_it(name: str, data: st.DataObject) -> None:
    found = open_tokenizer(str(TOKENIZERS / name))
    ids = data.draw(st.lists(st.integers(0, len(found.pieces) + 5), max_size=12))
    assert found.decode(ids) == found._tokenizer.decode(ids, skip_special_tokens=False)
    assert found.decode(ids, skip_special_tokens=True) == found._tokenizer.decode(ids, skip_special_tokens=True)


@needs
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(text=st.text(max_size=80) | st.text("aA 1\n'🙂é<|im_end>", max_size=300))
def test_text_is_encoded_as_the_library_does_it(name: str, text: str) -> None:
    found = open_tokenizer(str(TOKENIZERS / name))
    ids = found.encode(text)
    assert ids == found._tokenizer.encode(text, add_special_tokens=False).ids
    if name == "llama-3":  # the only one of them that does not normalise
        assert found.spell(ids).decode() == text


@needs
def test_ids_outside_of_the_vocabulary_are_nothing() -> None:
    found = open_tokenizer(str(TOKENIZERS / "qwen3"))
    assert found.decode([-1, 2**31 - 1]) == ""
    assert found.spell([-1, *found.encode("a"), 2**31 - 1]) == b"a"


@needs
def test_a_lone_surrogate_becomes_a_question_mark() -> None:
    found = open_tokenizer(str(TOKENIZERS / "qwen3"))
    assert found.decode(found.encode("a\ud800b")) == "a?b"
    assert found.decode(found.encode("a\ud800b" * 100)) == "a?b" * 100


@needs
def test_a_folder_is_loaded_once_whichever_threads_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Tokenizer] = []

    class Counted(Tokenizer):
        def __init__(self, *arguments: object) -> None:
            loaded.append(self)
            super().__init__(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(tokenizing, "Tokenizer", Counted)
    monkeypatch.setattr(tokenizing, "_loaded", {})
    found: list[Tokenizer] = []
    threads = [
        threading.Thread(target=lambda: found.append(open_tokenizer(str(TOKENIZERS / "qwen3")))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loaded) == 1
    assert found == loaded * 4


@needs
def test_no_call_touches_the_network_and_none_imports_transformers() -> None:
    program = f"""
import socket, sys
def refused(*a, **k): raise AssertionError("the network")
socket.socket.connect = refused
socket.getaddrinfo = refused
from rookery.core import Message
from rookery.gateway.renderings import open_rendering
for name in ("auto", "default", "qwen3"):
    found = open_rendering(name, {str(TOKENIZERS / "qwen3")!r})
    tail = found.render([Message("user", "Hi.")], (), None)
    found.reader(tail, ()).feed(tail)
    found.parse(tail, tail, ())
assert "transformers" not in sys.modules and "torch" not in sys.modules
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 0, ran.stderr


# -------------------------------------------------------------------------------------------------- folders


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROOKERY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _fetching(name: str, revision: str, folder: Path) -> None:
    with (Path(os.environ["ROOKERY_CACHE"]).parent / "fetched").open("a") as log:
        log.write(f"{name} {revision}\n")
    (folder / "tokenizer.json").write_text("{}")


def _ask(_: int) -> str:
    return resolve.settled("org/model", _fetching)


def test_a_name_is_fetched_once_for_a_machine(cache: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        folders = set(pool.map(_ask, range(12)))
    assert len(folders) == 1
    assert (cache.parent / "fetched").read_text() == "org/model main\n"
    assert resolve.origin(Path(folders.pop())) == "org/model"
    assert [entry for entry in (cache / "tokenizers").iterdir() if entry.name.startswith(".")] == []


def test_a_revision_is_another_folder(cache: Path) -> None:
    first = resolve.settled("org/model", _fetching)
    second = resolve.settled("org/model@v2", _fetching)
    assert first != second
    assert (cache.parent / "fetched").read_text() == "org/model main\norg/model v2\n"


def test_a_fetch_that_fails_leaves_nothing_and_says_so(cache: Path) -> None:
    def broken(name: str, revision: str, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("half")
        raise ConnectionError("no route")

    with pytest.raises(UsageError, match=r"'org/model' is not on this machine.*no route"):
        resolve.settled("org/model", broken)
    assert [entry.name for entry in (cache / "tokenizers").iterdir()] == ["org--model@main.lock"]
    assert resolve.settled("org/model", _fetching)


def test_a_name_without_a_tokenizer_is_said(cache: Path) -> None:
    with pytest.raises(UsageError, match=r"has no tokenizer\.json"):
        resolve.settled("org/model", lambda *_: None)


def test_a_hub_that_cannot_be_reached_is_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "from rookery.gateway.renderings.resolve import settled; settled('org/model')"
    env = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60, env=env
    )
    assert "the tokenizer 'org/model' is not on this machine and could not be fetched" in ran.stderr


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("", "no tokenizer is named"),
        ("/no/such/folder", "neither a folder"),
        ("just-a-word", "neither a folder"),
        ("{folder}", r"no tokenizer\.json in .*; there is: other\.txt"),
    ],
)
def test_what_is_not_there_is_said_in_words(tmp_path: Path, path: str, said: str) -> None:
    (tmp_path / "other.txt").write_text("")
    with pytest.raises(UsageError, match=said):
        resolve.settled(path.format(folder=tmp_path))


def test_a_folder_and_its_file_are_the_same_place(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    assert resolve.settled(str(tmp_path)) == resolve.settled(str(tmp_path / "tokenizer.json")) == str(tmp_path)


def test_a_file_that_is_no_tokenizer_is_said(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match="cannot be loaded"):
        open_tokenizer(str(tmp_path))
