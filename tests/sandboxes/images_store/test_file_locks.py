"""File locks between processes, and staging directories that they protect."""

import os
import threading
from pathlib import Path

import pytest

from rookery.core import SandboxError
from rookery.sandboxes.images.file_locks import acquire_lock, list_holders, try_lock
from rookery.sandboxes.images.staging import StagingArea


@pytest.mark.parametrize("cancelled", [False, True])
def test_wait_for_a_lock_has_a_time_limit_and_can_be_cancelled(tmp_path: Path, cancelled: bool) -> None:
    path = tmp_path / "lock"
    with acquire_lock(path, exclusive=True, seconds=0, what="it"):
        assert try_lock(path, exclusive=False) is None
        with pytest.raises(SandboxError) as caught:
            acquire_lock(
                path,
                exclusive=False,
                seconds=60 if cancelled else 0.05,
                what="it",
                is_cancelled=lambda: cancelled,
            )
        assert caught.value.code == "sandbox.image"


def test_waiter_locks_a_new_file_after_the_holder_removed_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = acquire_lock(path, exclusive=True, seconds=0, what="it")
    inode = os.fstat(holder.fd).st_ino
    acquired: list[int] = []

    def wait() -> None:
        with acquire_lock(path, exclusive=True, seconds=60, what="it") as lock:
            acquired.append(os.fstat(lock.fd).st_ino)

    waiter = threading.Thread(target=wait)
    with open(path) as keep_inode:  # so that the new file cannot get the inode of the old one
        waiter.start()
        holder.remove()
        waiter.join(60)
        assert os.fstat(keep_inode.fileno()).st_ino == inode
    assert acquired
    assert acquired != [inode]


def test_holders_of_a_lock_are_listed_by_pid(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with acquire_lock(path, exclusive=True, seconds=0, what="it"):
        inode = path.stat().st_ino
        holders = [pid for (_, number), pids in list_holders().items() if number == inode for pid in pids]
        assert os.getpid() in holders


def test_detached_directory_disappears_from_its_path_before_it_is_removed(tmp_path: Path) -> None:
    for name in ("work", "locks"):
        (tmp_path / name).mkdir()
    (tmp_path / "layer").mkdir()
    (tmp_path / "layer" / "file").write_text("x")
    area = StagingArea(tmp_path)
    detached = area.detach(tmp_path / "layer")
    assert not (tmp_path / "layer").exists()
    assert area.remove_leftovers() == 0  # the lock protects it
    (moved,) = (tmp_path / "work").iterdir()
    assert (moved / "file").read_text() == "x"
    detached.remove()
    assert not list((tmp_path / "work").iterdir()) + list((tmp_path / "locks").iterdir())
