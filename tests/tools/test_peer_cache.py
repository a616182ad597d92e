"""Tests of the user cache for downloaded peers."""

import os
import subprocess
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
    for checkout in ("first", "second"):
        with cache_entry("engine", "1.0", tmp_path / checkout) as entry:
            assert (entry / "program").exists() == (checkout == "second")
            (entry / "program").touch()
        assert (tmp_path / checkout / "engine" / "program").exists()


def test_new_version_replaces_the_link_and_keeps_the_old_entry(tmp_path: Path) -> None:
    for version in ("1.0", "2.0"):
        with cache_entry("engine", version, tmp_path / "peers") as entry:
            (entry / version).touch()
        assert [file.name for file in (tmp_path / "peers" / "engine").iterdir()] == [version]
    assert len([*tmp_path.glob("cache/**/1.0")]) == 1


def test_link_exists_only_to_a_complete_entry(tmp_path: Path) -> None:
    link = tmp_path / "peers" / "engine"
    with pytest.raises(OSError), cache_entry("engine", "1.0", tmp_path / "peers"):
        raise OSError
    assert not link.is_symlink()
    with cache_entry("engine", "1.0", tmp_path / "peers") as entry:
        assert not link.is_symlink()
    entry.rmdir()  # the user emptied the cache
    with cache_entry("engine", "1.0", tmp_path / "peers"):
        assert not link.is_symlink()
    assert link.readlink() == entry


def test_second_process_waits_until_an_entry_is_complete(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from peer_cache import cache_entry
print("started", flush=True)
with cache_entry("engine", "1.0", Path(sys.argv[1])) as entry:
    print((entry / "program").exists())
"""
    with cache_entry("engine", "1.0", tmp_path / "first") as entry:
        command = [sys.executable, "-c", program, str(tmp_path / "second")]
        environment = os.environ | {"PYTHONPATH": str(ROOT / "tools")}
        second = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert second.stdout is not None
        assert second.stdout.readline() == "started\n"
        (entry / "program").touch()
    assert second.communicate(timeout=60) == ("True\n", None)
    assert second.returncode == 0


def test_files_of_an_older_layout_are_replaced_by_the_link(tmp_path: Path) -> None:
    (tmp_path / "peers" / "engine").mkdir(parents=True)
    with cache_entry("engine", "1.0", tmp_path / "peers") as entry:
        pass
    assert (tmp_path / "peers" / "engine").readlink() == entry
