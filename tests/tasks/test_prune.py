"""Pruning the task cache: least recently used first, never content in use."""

import os
import select
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.tasks import cache_users, load_tasks
from rookery.tasks.cache import CacheEntry, TaskCache, is_registered, register_use
from rookery.tasks.swe import get_swe_task
from tests.tasks import kit
from tests.tasks.test_cache import an_archive

LOAD_AND_WAIT = """
import os, sys
from rookery.tasks import load_tasks
load_tasks(sys.argv[1])
if len(sys.argv) > 2 and os.fork():  # the parent exits: its registrations belong to the child now
    os._exit(0)
print(os.getpid(), flush=True)
sys.stdin.read()
"""


@contextmanager
def process_using(source, *more):
    """Run a process that has loaded tasks, and yield its PID."""
    words = [sys.executable, "-c", LOAD_AND_WAIT, str(source), *more]
    child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert select.select([child.stdout], [], [], 60)[0], "the process did not start"
        yield int(child.stdout.readline())
    finally:
        child.stdin.close()
        child.stdout.read()  # end of file when all descendants have exited
        child.stdout.close()
        child.wait(60)


def create_entry(cache, key, size, used):
    """Create an entry as a process would that has ended."""
    entry = cache.content / key
    entry.mkdir(parents=True)
    (entry / "file").write_bytes(b"x" * size)
    os.utime(entry, (used, used))


@given(
    entries=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 50), st.sampled_from("-uk")), max_size=6),
    budget=st.none() | st.integers(0, 120),
    older=st.integers(0, 60),
)
def test_least_recently_used_entries_are_removed_up_to_the_budget(tmp_path_factory, entries, budget, older):
    cache = TaskCache(tmp_path_factory.mktemp("cache")).open()
    block = 4096
    for number, (size, used, _) in enumerate(entries):
        create_entry(cache, f"k{number}", size * block, 1_000 + used)
    marked = {mark: {f"k{n}" for n, entry in enumerate(entries) if entry[2] == mark} for mark in "uk"}
    before = {one.key: one for one in cache.list_entries()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_users, "find_users", lambda _: {key: {1} for key in marked["u"]})
        done = cache.prune(
            budget=None if budget is None else budget * block, older=1_000.0 + older, keep=marked["k"]
        )
    removed = {one.key for one in done.removed}
    left = {path.name for path in cache.content.iterdir()}
    assert removed | left == set(before)
    assert not removed & left
    assert not removed & (marked["u"] | marked["k"])
    assert done.remaining == sum(before[key].bytes for key in left)
    assert done.bytes == sum(before[key].bytes for key in removed)
    free = [one for one in before.values() if one.key not in marked["u"] | marked["k"]]
    old = {one.key for one in free if one.used < 1_000 + older}
    assert old <= removed
    if budget is None:
        assert removed == old
        return
    for one in free:  # entries removed for space: all remaining ones were used later, or at the same time
        if one.key in removed - old:
            assert all(other.used >= one.used for other in free if other.key in left)
    if removed - old:  # and removing the last of them was necessary
        newest = max(before[key].used for key in removed - old)
        last = [before[key].bytes for key in removed - old if before[key].used == newest]
        assert done.remaining + max(last) > budget * block
    if done.remaining > budget * block:
        assert left <= marked["u"] | marked["k"]


@pytest.mark.parametrize("more", [(), ("fork",)])
def test_entries_loaded_by_a_live_process_stay(tmp_path, own_cache, more):
    archive = an_archive(tmp_path / "t.tar.gz", tasks=1)
    cache = TaskCache()
    with process_using(archive, *more) as pid:
        (one,) = cache.list_entries()
        assert more or one.used_by == (pid,)
        assert one.used_by
        done = cache.prune(budget=0)
        assert (done.removed, done.kept_in_use) == ((), 1)
    done = cache.prune(budget=0)
    (removed,) = done.removed
    assert removed.what.endswith(str(archive))
    assert not list(cache.content.iterdir())
    assert not list((own_cache / "about").iterdir())
    assert not list((own_cache / "work").iterdir())
    assert not list((own_cache / "locks").glob("use-*"))


def test_removed_entry_is_created_again_and_registered(tmp_path, own_cache):
    archive = an_archive(tmp_path / "t.tar.gz", tasks=1)
    with process_using(archive):
        pass
    assert len(TaskCache().prune(budget=0).removed) == 1
    (task,) = load_tasks(archive)
    folder = get_swe_task(task).folder
    assert is_registered(folder)
    assert TaskCache().prune(budget=0).kept_in_use == 1
    assert not task.invalid


def test_task_of_a_resumed_run_is_registered_by_its_attempt(tmp_path, own_cache):
    """A resumed run loads nothing: its tasks refer to their directories."""
    rows = kit.jsonl(tmp_path / "r.jsonl", {"id": "a", "instruction": "Do.", "tests": "exit 0"})
    with process_using(rows):
        pass
    cache = TaskCache()
    (one,) = cache.list_entries()
    assert (one.what, one.used_by) == ("", ())
    folder = str(cache.content / one.key)
    assert not is_registered(folder)
    assert register_use(folder)
    assert is_registered(folder)
    assert cache.prune(budget=0).kept_in_use == 1
    assert is_registered("/elsewhere")
    assert not register_use(str(cache.content / "gone"))


@pytest.mark.long
def test_loading_during_a_prune_sees_complete_content(tmp_path, own_cache):
    """Prune repeatedly while eight threads load; none sees missing or incomplete content."""
    archive = an_archive(tmp_path / "t.tar.gz", tasks=1)
    load = (
        "import sys\nfrom pathlib import Path\nfrom rookery.tasks import load_tasks\n"
        "from rookery.tasks.swe import get_swe_task\n"
        "(task,) = load_tasks(sys.argv[1])\nassert not task.invalid, task.invalid\n"
        "top = Path(get_swe_task(task).folder)\n"
        "for _ in range(20):\n    assert (top / 'tests' / 'test.sh').read_text()\n"
    )
    removed = 0
    stop = threading.Event()

    def prune():
        nonlocal removed
        while not stop.is_set():
            removed += len(TaskCache(own_cache).prune(budget=0).removed)

    pruner = threading.Thread(target=prune)
    pruner.start()
    try:
        for _ in range(2):
            words = [sys.executable, "-c", load, str(archive)]
            children = [subprocess.Popen(words, stderr=subprocess.PIPE, text=True) for _ in range(4)]
            for child in children:
                _, output = child.communicate(timeout=100)
                assert child.returncode == 0, output
    finally:
        stop.set()
        pruner.join()
    removed += len(TaskCache(own_cache).prune(budget=0).removed)
    assert removed >= 1


def test_only_leftovers_are_removed_automatically(own_cache):
    cache = TaskCache().open()
    create_entry(cache, "k", 10, 1)
    (own_cache / "work" / "1-dead").mkdir()
    done = cache.prune()
    assert (done.removed, done.leftovers) == ((), 1)
    assert (cache.content / "k").is_dir()


def test_deleted_cache_is_created_again(tmp_path, own_cache):
    from rookery.sandbox_runtime import processes

    archive = an_archive(tmp_path / "t.tar.gz", tasks=1)
    load_tasks(archive)
    processes.remove_tree(str(own_cache))
    assert not load_tasks(archive)[0].invalid
    assert TaskCache().prune(budget=0).kept_in_use == 1
    assert isinstance(TaskCache().list_entries()[0], CacheEntry)
