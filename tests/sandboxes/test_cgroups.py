"""Cgroups: limits are set before a sandbox starts, kill reaches everything, and nothing is left."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rookery.sandbox_runtime import cgroups
from rookery.sandbox_runtime.cgroups import CPU, MEMORY, PIDS, CgroupLimits, CgroupManager
from tests.waiting import block_until

MB = 1 << 20


@pytest.fixture
def cgroup() -> Iterator[cgroups.SandboxCgroup]:
    manager = cgroups.find_cgroups()
    if manager.missing_controllers:
        manager.close()
        pytest.skip(f"[probed] cgroups cannot limit {manager.missing_controllers} here")
    cgroup = manager.acquire(f"test-{os.getpid()}-{os.urandom(4).hex()}")
    try:
        yield cgroup
    finally:
        cgroup.kill()
        block_until(cgroup.remove)  # dead processes stay in it until they are reaped
        manager.close()


def read_file(folder: str, name: str) -> str:
    return Path(folder, name).read_text().strip()


def start_in_cgroup(cgroup: cgroups.SandboxCgroup, script: str) -> "subprocess.Popen[str]":
    """Start a Python program that runs only after it has joined the cgroup."""
    program = subprocess.Popen(
        [sys.executable, "-c", "input()\n" + script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    for fd in cgroup.open_v1_tasks():
        os.write(fd, str(program.pid).encode())
        os.close(fd)
    if cgroup.unified:
        Path(cgroup.unified, "cgroup.procs").write_text(str(program.pid))
    assert program.stdin is not None
    program.stdin.write("\n")
    program.stdin.flush()
    return program


def test_missing_controllers_are_reported() -> None:
    assert CgroupManager().missing_controllers == [MEMORY, PIDS, CPU]
    assert CgroupManager("/x", frozenset({MEMORY}), {PIDS: "/y"}).missing_controllers == [CPU]
    assert CgroupManager("/x", frozenset({MEMORY, PIDS, CPU})).missing_controllers == []


def test_cgroup_without_hierarchy_limits_and_kills_nothing() -> None:
    cgroup = CgroupManager().acquire("x")
    cgroup.set_limits(CgroupLimits(memory=1, pids=1, cpus=1))
    assert cgroup.directories == []
    assert not cgroup.kill()
    assert cgroup.remove()


def test_limits_are_written_to_the_controllers_hierarchy(tmp_path: Path) -> None:
    """Runs on any machine: the files of v1 and v2 are in plain directories."""
    v2, v1 = tmp_path / "v2", tmp_path / "v1"
    for above, names in ((v2, ("memory.max", "memory.swap.max", "pids.max")), (v1, ("cpu.cfs_period_us",))):
        (above / "sandbox").mkdir(parents=True)
        for name in names:
            (above / "sandbox" / name).touch()
    (v1 / "sandbox" / "cpu.cfs_quota_us").touch()
    manager = CgroupManager(str(v2), frozenset({MEMORY, PIDS}), {CPU: str(v1)})
    cgroups.SandboxCgroup(manager, "sandbox", []).set_limits(CgroupLimits(memory=64 * MB, pids=32, cpus=0.5))
    assert read_file(f"{v2}/sandbox", "memory.max") == str(64 * MB)
    assert read_file(f"{v2}/sandbox", "memory.swap.max") == "0"
    assert read_file(f"{v2}/sandbox", "pids.max") == "32"
    assert (read_file(f"{v1}/sandbox", "cpu.cfs_period_us"), read_file(f"{v1}/sandbox", "cpu.cfs_quota_us")) == (
        "100000",
        "50000",
    )


def test_partial_creation_is_rolled_back(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b" / "sandbox").mkdir(parents=True)
    manager = CgroupManager("", frozenset(), {MEMORY: str(tmp_path / "a"), PIDS: str(tmp_path / "b")})
    with pytest.raises(FileExistsError):
        manager.acquire("sandbox")
    assert list((tmp_path / "a").iterdir()) == []


def test_parent_directories_are_removed_with_the_last_cgroup(tmp_path: Path) -> None:
    tops = [tmp_path / "a", tmp_path / "b"]
    for top in tops:
        top.mkdir()
    manager = CgroupManager(str(tops[0]), frozenset(), {PIDS: str(tops[1])})
    cgroup = manager.acquire("sandbox")
    manager.close()
    assert all(top.is_dir() for top in tops), "a cgroup still exists there"
    cgroup.remove()
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
    (tmp_path / name).touch()  # tells the version of the hierarchy
    (tmp_path / "sandbox").mkdir()
    (tmp_path / "sandbox" / name).write_text(content)
    assert cgroups.count_oom_kills(str(tmp_path / "sandbox")) == kills


def test_refused_forks_are_counted(tmp_path: Path) -> None:
    assert cgroups.count_refused_forks(str(tmp_path)) == 0
    (tmp_path / "pids.events").write_text("max 41\n")
    assert cgroups.count_refused_forks(str(tmp_path)) == 41


def test_limits_are_set_in_the_kernel(cgroup: cgroups.SandboxCgroup) -> None:
    cgroup.set_limits(CgroupLimits(memory=64 * MB, pids=5, cpus=0.5))
    memory, pids = cgroup.find_directory(MEMORY), cgroup.find_directory(PIDS)
    v2 = os.path.exists(f"{memory}/memory.max")
    assert int(read_file(memory, "memory.max" if v2 else "memory.limit_in_bytes")) == 64 * MB
    if not v2:  # a separate counter, by default without a limit
        assert int(read_file(memory, "memory.kmem.tcp.limit_in_bytes")) == 64 * MB // cgroups.SOCKET_BUFFER_DIVISOR
    assert read_file(pids, "pids.max") == "5"
    assert os.path.samefile(cgroups.find_pids_directory(memory), pids)


def test_forks_over_the_limit_are_refused_and_counted(cgroup: cgroups.SandboxCgroup) -> None:
    cgroup.set_limits(CgroupLimits(memory=512 * MB, pids=4))
    script = """
import os, time
forks = 0
try:
    while forks < 50:
        if os.fork() == 0:
            time.sleep(600)
        forks += 1
except BlockingIOError:
    print(forks, flush=True)
time.sleep(600)"""
    program = start_in_cgroup(cgroup, script)
    try:
        assert program.stdout is not None
        assert program.stdout.readline() == "3\n"
        assert cgroups.count_refused_forks(cgroup.find_directory(PIDS)) >= 1
        assert not cgroup.remove()  # it still has processes
        assert cgroup.kill()
        assert program.wait(timeout=60) == -9
        assert program.stdout.read() == ""  # every process that holds the pipe is dead
    finally:
        program.kill()
        program.communicate()


def test_memory_over_the_limit_is_an_oom_kill(cgroup: cgroups.SandboxCgroup) -> None:
    cgroup.set_limits(CgroupLimits(memory=32 * MB, pids=8))
    program = start_in_cgroup(cgroup, "x = bytearray(b'x') * (256 << 20)")
    try:
        assert program.wait(timeout=60) == -9
        assert cgroups.count_oom_kills(cgroup.find_directory(MEMORY)) == 1
    finally:
        program.kill()
        program.communicate()
