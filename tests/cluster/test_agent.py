"""The directory of an agent on its node: it is private, and what dead agents left is removed."""

from pathlib import Path

import pytest

from rookery.cluster.agent import LOCK, NodeFolder, remove_leftovers


def test_leftovers_of_dead_agents_are_removed_and_live_agents_are_kept(tmp_path: Path) -> None:
    base = tmp_path / "nodes"
    alive = NodeFolder(base, "run-node-1")
    (base / "run-node-2-77" / "tokens").mkdir(parents=True)
    (base / f"run-node-2-77{LOCK}").touch()
    assert remove_leftovers(base) == ["run-node-2-77"]
    assert {path.name for path in base.iterdir()} == {alive.path.name, f"{alive.path.name}{LOCK}"}
    alive.remove()
    assert list(base.iterdir()) == []
    assert remove_leftovers(base) == []


def test_directory_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    base = tmp_path / "nodes"
    base.mkdir()
    base.chmod(0o777)
    with pytest.raises(OSError):
        NodeFolder(base, "run-node-1")
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(OSError):
        NodeFolder(tmp_path / "link", "run-node-1")
    assert list(base.iterdir()) == []
