"""Tests of the user cache for downloaded peers."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from peer_cache import cache_entry  # noqa: E402


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_checkouts_share_the_entry_of_a_version(tmp_path: Path) -> None:
    with cache_entry("engine", "1.0", tmp_path / "first") as entry:
        (entry / "program").touch()
    with cache_entry("engine", "1.0", tmp_path / "second"):
        assert (tmp_path / "second" / "engine" / "program").exists()


def test_new_version_replaces_the_link_and_keeps_the_old_entry(tmp_path: Path) -> None:
    with cache_entry("engine", "1.0", tmp_path / "peers") as old:
        (old / "program").touch()
    with cache_entry("engine", "2.0", tmp_path / "peers") as new:
        assert new != old
        assert (tmp_path / "peers" / "engine").resolve() == new
    assert (old / "program").exists()


def test_files_of_an_older_layout_are_replaced_by_the_link(tmp_path: Path) -> None:
    (tmp_path / "peers" / "engine").mkdir(parents=True)
    with cache_entry("engine", "1.0", tmp_path / "peers") as entry:
        assert (tmp_path / "peers" / "engine").readlink() == entry
