"""Control groups: limits are there before the box, killing reaches everything, nothing is left."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rookery.sandbox_runtime import cgroups
from rookery.sandbox_runtime.cgroups import CPU, MEMORY, PIDS, CgroupLimits, CgroupManager

MB = 1 << 20


@pytest.fixture
def group() -> Iterator[cgroups.SandboxCgroup]:
    manager = cgroups.find_cgroups()
    if manager.missing_controllers:
        manager.close()
        pytest.skip(f"[probed] no group of ours can limit {manager.missing_controllers} here")
    made = manager.acquire(f"test-{os.getpid()}-{os.urandom(4).hex()}")
    try:
        yield made
    finally:
        made.kill()
        end = time.monotonic() + 20
        while not made.remove():  # the dead are in it until they are gone for good
            assert time.monotonic() < end
            time.sleep(0.005)
        manager.close()


def text(folder: str, name: str) -> str:
    return Path(folder, name).read_text().strip()


def started(group: cgroups.SandboxCgroup, script: str) -> "subprocess.Popen[str]":
    """A Python program that begins when it is in the group."""
    program = subprocess.Popen(
        [sys.executable, "-c", "input()\n" + script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    for fd in group.open_v1_tasks():
        os.write(fd, str(program.pid).encode())
        os.close(fd)
    if group.unified:
        Path(group.unified, "cgroup.procs").write_text(str(program.pid))
    assert program.stdin is not None
    program.stdin.write("\n")
    program.stdin.flush()
    return program


def test_missing_controllers_are_reported() -> None:
    assert CgroupManager().missing_controllers == [MEMORY, PIDS, CPU]
    assert CgroupManager("/x", frozenset({MEMORY}), {PIDS: "/y"}).missing_controllers == [CPU]
    assert CgroupManager("/x", frozenset({MEMORY, PIDS, CPU})).missing_controllers == []


def test_cgroup_without_hierarchy_limits_and_kills_nothing() -> None:
    made = CgroupManager().acquire("x")
    made.set_limits(CgroupLimits(memory=1, pids=1, cpus=1))
    assert made.directories == []
    assert not made.kill()
    assert made.remove()


def test_limits_are_written_to_the_controllers_hierarchy(tmp_path: Path) -> None:
    """On any machine: the files of v1 and v2, written to plain folders."""
    two, one = tmp_path / "two", tmp_path / "one"
    for above, names in ((two, ("memory.max", "memory.swap.max", "pids.max")), (one, ("cpu.cfs_period_us",))):
        (above / "box").mkdir(parents=True)
        for name in names:
            (above / "box" / name).touch()
    (one / "box" / "cpu.cfs_quota_us").touch()
    manager = CgroupManager(str(two), frozenset({MEMORY, PIDS}), {CPU: str(one)})
    cgroups.SandboxCgroup(manager, "box", []).set_limits(CgroupLimits(memory=64 * MB, pids=32, cpus=0.5))
    assert text(f"{two}/box", "memory.max") == str(64 * MB)
    assert text(f"{two}/box", "memory.swap.max") == "0"
    assert text(f"{two}/box", "pids.max") == "32"
    assert (text(f"{one}/box", "cpu.cfs_period_us"), text(f"{one}/box", "cpu.cfs_quota_us")) == ("100000", "50000")


def test_partial_creation_is_rolled_back(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b" / "box").mkdir(parents=True)
    manager = CgroupManager("", frozenset(), {MEMORY: str(tmp_path / "a"), PIDS: str(tmp_path / "b")})
    with pytest.raises(FileExistsError):
        manager.acquire("box")
    assert list((tmp_path / "a").iterdir()) == []


def test_parent_directories_are_removed_with_the_last_cgroup(tmp_path: Path) -> None:
    tops = [tmp_path / "a", tmp_path / "b"]
    for top in tops:
        top.mkdir()
    manager = CgroupManager(str(tops[0]), frozenset(), {PIDS: str(tops[1])})
    group = manager.acquire("box")
    manager.close()
    assert all(top.is_dir() for top in tops), "somebody still has a group there"
    group.remove()
    manager.close()
    assert not any(top.exists() for top in tops)


@pytest.mark.parametrize(
    ("name", "content", "kills"),
    [
        ("memory.events", "low 0\nhigh 0\nmax 9\noom 3\noom_kill 2\noom_group_kill 0\n", 2),
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n", 5),
        ("memory.events", "nonsense\n\noom_kill x\n", 0),
        ("other", "", 0),
    ],
)
def test_oom_kills_are_counted(tmp_path: Path, name: str, content: str, kills: int) -> None:
    (tmp_path / name).touch()  # by it the version of the tree is known
    (tmp_path / "box").mkdir()
    (tmp_path / "box" / name).write_text(content)
    assert cgroups.count_oom_kills(str(tmp_path / "box")) == kills


def test_refused_forks_are_counted(tmp_path: Path) -> None:
    assert cgroups.count_refused_forks(str(tmp_path)) == 0
    (tmp_path / "pids.events").write_text("max 41\n")
    assert cgroups.count_refused_forks(str(tmp_path)) == 41


def test_limits_are_set_in_the_kernel(group: cgroups.SandboxCgroup) -> None:
    group.set_limits(CgroupLimits(memory=64 * MB, pids=5, cpus=0.5))
    memory, pids = group.find_directory(MEMORY), group.find_directory(PIDS)
    two = os.path.exists(f"{memory}/memory.max")
    assert int(text(memory, "memory.max" if two else "memory.limit_in_bytes")) == 64 * MB
    if not two:  # counted apart, and by default without a limit
        assert int(text(memory, "memory.kmem.tcp.limit_in_bytes")) == 64 * MB // cgroups.SOCKET_BUFFER_DIVISOR
    assert text(pids, "pids.max") == "5"
    assert os.path.samefile(cgroups.find_pids_directory(memory), pids)


def test_forks_over_the_limit_are_refused_and_counted(group: cgroups.SandboxCgroup) -> None:
    group.set_limits(CgroupLimits(memory=512 * MB, pids=4))
    script = """
import os, time
made = 0
try:
    while made < 50:
        if os.fork() == 0:
            time.sleep(600)
        made += 1
except BlockingIOError:
    print(made, flush=True)
time.sleep(600)"""
    program = started(group, script)
    try:
        assert program.stdout is not None
        assert program.stdout.readline() == "3\n"
        assert cgroups.count_refused_forks(group.find_directory(PIDS)) >= 1
        assert not group.remove()  # what has a process in it stays
        assert group.kill()
        assert program.wait(timeout=30) == -9
        assert program.stdout.read() == ""  # every holder of the pipe is gone
    finally:
        program.kill()
        program.communicate()


def test_memory_over_the_limit_is_an_oom_kill(group: cgroups.SandboxCgroup) -> None:
    group.set_limits(CgroupLimits(memory=32 * MB, pids=8))
    program = started(group, "x = bytearray(b'x') * (256 << 20)")
    try:
        assert program.wait(timeout=30) == -9
        assert cgroups.count_oom_kills(group.find_directory(MEMORY)) == 1
    finally:
        program.kill()
        program.communicate()
