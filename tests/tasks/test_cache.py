"""The task cache: one process creates content, others wait; content is complete or absent."""

import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from rookery.core import UsageError
from rookery.tasks import load_tasks
from rookery.tasks.cache import TaskCache, make_key
from rookery.tasks.swe import get_swe_task
from tests.tasks import kit

MANY = """
import os, sys
from rookery.tasks import archives, load_tasks
import rookery.tasks.sources, rookery.tasks.formats, rookery.sandboxes.images.file_locks
archive, log, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
real = archives.unpack
def counted(*args, **more):
    with open(log, "ab") as file:
        file.write(b"x")
    return real(*args, **more)
archives.unpack = counted
gate, opened = os.pipe()
children = []
for _ in range(count):
    pid = os.fork()
    if pid == 0:
        os.close(opened)
        os.read(gate, 1)  # until all are there
        tasks = load_tasks(archive)
        os._exit(0 if len(tasks) == 3 and not any(task.invalid for task in tasks) else 3)
    children.append(pid)
os.close(opened)
print([os.waitpid(pid, 0)[1] for pid in children])
"""

ONE = "import sys; from rookery.tasks import load_tasks; load_tasks(sys.argv[1])"


def an_archive(path, tasks=3, files=5):
    with tarfile.open(path, "w:gz") as tar:
        for number in range(tasks):
            made = path.parent / "made" / f"t{number}"
            kit.open_instruct(made, files={f"environment/seeds/{n}": f"{n}" * 50 for n in range(files)})
            tar.add(made, f"t{number}")
    return path


def program(text, *args):
    return [sys.executable, "-c", text, *map(str, args)]


@pytest.mark.parametrize("count", [10, pytest.param(100, marks=pytest.mark.long)])
def test_processes_that_start_together_unpack_once(tmp_path, own_cache, count):
    archive, log = an_archive(tmp_path / "t.tar.gz"), tmp_path / "log"
    done = subprocess.run(
        program(MANY, archive, log, count), capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.strip() == str([0] * count), done.stderr[-2000:]
    assert log.read_bytes() == b"x"
    assert len(list((own_cache / "content").iterdir())) == 1
    assert not list((own_cache / "work").iterdir())


@pytest.mark.parametrize("blows", [(2, None), pytest.param((0, 1, 2, 3, 4) * 4 + (None,), marks=pytest.mark.long)])
def test_content_is_complete_or_absent_after_a_kill(tmp_path, own_cache, blows):
    archive = an_archive(tmp_path / "t.tar.gz", tasks=4, files=200)
    content, work = own_cache / "content", own_cache / "work"
    killed = 0
    for wanted in blows:  # number of task directories when the process is killed; None for the end
        child = subprocess.Popen(program(ONE, archive))
        try:
            end = time.monotonic() + 60
            while child.poll() is None and time.monotonic() < end:
                made = [path for half in _listed(work) for key in _listed(half) for path in _listed(key)]
                if wanted is not None and len(_listed(work)) > 0 and len(made) >= wanted:
                    break
            if wanted is not None and child.poll() is None:
                child.send_signal(signal.SIGKILL)
                killed += 1
            child.wait(60)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        for cached_path in _listed(content):
            assert sum(path.is_file() for path in cached_path.rglob("*")) == 4 * 203
    assert killed
    assert len(_listed(content)) == 1
    assert not _listed(work)
    assert all(not task.invalid for task in load_tasks(archive))


def _listed(folder):
    try:
        return list(Path(folder).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def test_failed_creation_leaves_nothing_and_is_repeated(own_cache):
    cache = TaskCache()

    def broken(folder):
        (folder / "half").write_text("x")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cache.get_or_create("k", broken, "it")
    assert not _listed(own_cache / "content")
    assert not _listed(own_cache / "work")
    cached_path = cache.get_or_create("k", lambda folder: (folder / "whole").write_text("x"), "it")
    assert os.listdir(cached_path) == ["whole"]
    assert cache.get_or_create("k", broken, "it") == cached_path


def test_wait_for_another_process_is_bounded(own_cache, monkeypatch):
    cache = TaskCache().open()
    monkeypatch.setattr("rookery.tasks.cache.WAIT_SECONDS", 0.05)
    with cache.lock_key("k", "it"), pytest.raises(UsageError, match="the thing"):
        cache.get_or_create("k", lambda _: None, "the thing")


def test_the_cache_is_not_readable_by_other_users(own_cache):
    TaskCache().open()
    assert own_cache.stat().st_mode & 0o077 == 0


def test_unwritable_cache_is_reported_with_its_variable(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROOKERY_TASK_CACHE", str(tmp_path / "file" / "x"))
    with pytest.raises(UsageError, match=r"\$ROOKERY_TASK_CACHE"):
        load_tasks(an_archive(tmp_path / "t.tar.gz"))


def test_different_values_give_different_keys():
    assert make_key("a", "bc") != make_key("ab", "c")
    assert make_key("\udcff")


def test_two_runs_use_the_same_cached_directories(tmp_path, own_cache):
    archive = an_archive(tmp_path / "t.tar.gz", tasks=1)
    assert get_swe_task(load_tasks(archive)[0]) == get_swe_task(load_tasks(archive)[0])
