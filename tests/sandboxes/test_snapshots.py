"""Snapshots, forks and diffs of local sandboxes, compared with a reference that knows nothing of layers."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rookery.core import SandboxError
from rookery.sandbox_runtime import processes
from rookery.sandboxes import Command, ProviderHome
from rookery.sandboxes.local.provider import LocalProvider, LocalSandbox
from tests.processes import send_signal
from tests.sandboxes.hostile.inspection import get_keeper_pid
from tests.sandboxes.owner_process import SPEC, wait_while
from tests.waiting import wait_until

LIST = r"""
import hashlib, json, os, stat, sys
found = {}
for top in ("/work", "/tmp", "/var/tmp"):
    for above, folders, files in os.walk(top, followlinks=False):
        for name in folders + files:
            path = os.path.join(above, name)
            info = os.lstat(path)
            what = [info.st_mode, info.st_uid]
            if stat.S_ISLNK(info.st_mode):
                what.append(os.readlink(path))
            elif stat.S_ISREG(info.st_mode):
                with open(path, "rb") as file:
                    what.append(hashlib.sha256(file.read()).hexdigest())
                what.append(info.st_nlink)
            found[path] = what
print(json.dumps(found))
"""
"""Prints everything that programs wrote, as a program sees it."""


@pytest.fixture
async def local(home: ProviderHome) -> AsyncIterator[LocalProvider]:
    provider = LocalProvider(home)
    yield provider
    await provider.close()


async def list_files(sandbox: LocalSandbox) -> dict[str, list[object]]:
    result = await sandbox.exec(Command(argv=("python3", "-S", "-c", LIST)))
    assert result.ok, result
    found: dict[str, list[object]] = json.loads(result.stdout)
    return found


async def sh(sandbox: LocalSandbox, script: str) -> None:
    await sandbox.exec(Command(argv=("sh", "-c", script)))


NAMES = st.sampled_from(["a", "b", "c", "a/a", "a/b", "b/a", "b/b/c", "/tmp/a", "/tmp/a/b", "c d", "ü"])
STEPS = st.one_of(
    st.tuples(st.just("mkdir -p"), NAMES),
    st.tuples(st.just("put one"), NAMES),
    st.tuples(st.just("put two"), NAMES),
    st.tuples(st.just("add more"), NAMES),
    st.tuples(st.just("truncate -s 100000"), NAMES),
    st.tuples(st.just("rm -rf"), NAMES),
    st.tuples(st.just("chmod 700"), NAMES),
    st.tuples(st.just("mkfifo"), NAMES),
    st.tuples(st.just("touch"), NAMES),
    st.tuples(st.just("mv -T"), NAMES, NAMES),
    st.tuples(st.just("cp -a"), NAMES, NAMES),
    st.tuples(st.just("ln -s"), NAMES, NAMES),
    st.tuples(st.just("ln"), NAMES, NAMES),
)


SHELL_FUNCTIONS = """put() { [ -p "$2" ] || printf "$1" > "$2"; }
add() { [ -p "$2" ] || printf "$1" >> "$2"; }"""
"""Writing to a FIFO would wait for a reader for ever."""
Steps = list[tuple[str, ...]]


def script(steps: Steps) -> str:
    lines = (f"{step[0]} {' '.join(json.dumps(name) for name in step[1:])}" for step in steps)
    return "\n".join((SHELL_FUNCTIONS, *lines))


@pytest.mark.long
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example([("mkdir -p", "/tmp/a/b")], [("put one", "a")], [("rm -rf", "/tmp/a"), ("put one", "/tmp/a")])
@example([("mkdir -p", "b/b/c")], [("rm -rf", "b"), ("ln -s", "a", "b")], [("rm -rf", "b"), ("mkdir -p", "b/a")])
@given(before=st.lists(STEPS, max_size=15), after=st.lists(STEPS, max_size=15), late=st.lists(STEPS, max_size=10))
async def test_fork_and_diff_match_a_reference(
    local: LocalProvider, before: Steps, after: Steps, late: Steps
) -> None:
    async def check_diff(one: LocalSandbox, name: str, old: dict[str, list[object]]) -> dict[str, list[object]]:
        """Check `diff` against what a program sees now and saw then, except for the number of links."""
        new = await list_files(one)
        wanted = dict.fromkeys(new.keys() - old.keys(), "added")
        wanted |= dict.fromkeys(old.keys() - new.keys(), "removed")
        wanted |= {path: "changed" for path in new.keys() & old.keys() if new[path][:3] != old[path][:3]}
        reported = await one.diff(name)
        # Of a removed directory, the diff may report only the directory itself.
        removed = tuple(f"{path}/" for path, how in reported.items() if how == "removed")
        missing = {path for path in wanted.keys() - reported.keys() if not path.startswith(removed)}
        assert (missing, {path: how for path, how in reported.items() if wanted.get(path) != how}) == (set(), {})
        return new

    sandbox = await local.create(SPEC, attempt="property")
    try:
        await sh(sandbox, script(before))
        then = await list_files(sandbox)
        name = await sandbox.snapshot()
        await sh(sandbox, script(after))
        await check_diff(sandbox, name, then)
        fork = await sandbox.fork(name)
        try:
            assert await list_files(fork) == then
            await sh(fork, script(late))
            latest = await check_diff(fork, name, then)
            again = await fork.fork(await fork.snapshot())
            try:
                assert await list_files(again) == latest
            finally:
                await again.close()
        finally:
            await fork.close()
    finally:
        await sandbox.close()


async def test_sparse_files_stay_sparse(local: LocalProvider) -> None:
    sandbox = await local.create(SPEC, attempt="a")
    await sh(sandbox, "truncate -s 1T giant; printf end | dd of=giant bs=1 seek=500G conv=notrunc")
    name = await sandbox.snapshot()
    fork = await sandbox.fork(name)
    result = await fork.exec(Command(argv=("sh", "-c", "stat -c '%s' giant; dd if=giant bs=1 skip=500G count=3")))
    assert result.stdout.split() == [b"1099511627776", b"end"]
    assert await fork.diff(name) == {}


async def test_snapshot_is_removed_with_the_last_of_its_lineage(local: LocalProvider) -> None:
    sandbox = await local.create(SPEC, attempt="a")
    keeper = await get_keeper_pid(local)
    await sh(sandbox, "head -c 3000000 /dev/zero > x")
    name = await sandbox.snapshot()
    kept = Path(f"/proc/{keeper}/cwd/snapshots")
    assert len(list(kept.iterdir())) == 1
    fork = await sandbox.fork(name)
    await sandbox.close()
    assert len(list(kept.iterdir())) == 1
    assert (await fork.exec(Command(argv=("stat", "-c", "%s", "x")))).stdout == b"3000000\n"
    await fork.close()
    await wait_while(lambda: len(list(kept.iterdir())))


async def test_sandbox_is_frozen_during_a_snapshot(local: LocalProvider) -> None:
    """A program writes two files in turn: in no snapshot is the second newer than the first."""
    sandbox = await local.create(SPEC, attempt="a")
    program = """
import os
number = 0
while True:
    number += 1
    for name in ("first", "second"):
        with open(name + ".new", "w") as file:
            file.write(str(number))
        os.rename(name + ".new", name)
    if number == 1:
        print("up", flush=True)
"""
    process = await sandbox.start(Command(argv=("python3", "-c", program)))
    async for _, chunk in process.output():
        if b"up" in chunk:
            break
    last = 0
    for _ in range(5):
        fork = await sandbox.fork(await sandbox.snapshot())
        first, second = int(await fork.read("first")), int(await fork.read("second"))
        assert first - second in (0, 1)
        assert last < first <= int(await sandbox.read("first"))
        last = first
        await fork.close()
        # The program continues: the next number appears.
        await sandbox.exec(Command(argv=("sh", "-c", f"while [ $(cat second) -le {first} ]; do sleep 0.01; done")))
    await process.kill()


async def test_cancelled_or_late_snapshot_leaves_nothing(
    local: LocalProvider,
) -> None:
    sandbox = await local.create(SPEC, attempt="a")
    keeper = await get_keeper_pid(local)
    await sh(sandbox, "mkdir d; cd d; for i in $(seq 3000); do echo $i > $i; done")
    task, done = await stop_snapshot_midway(sandbox, keeper)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await wait_while(lambda: len(list(Path(f"/proc/{keeper}/cwd/snapshots").iterdir())) > done)
    with pytest.raises(SandboxError) as caught:
        await sandbox.snapshot(timeout=0.0)
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert (await sandbox.exec(Command(argv=("echo", "on")))).stdout == b"on\n"
    name = await sandbox.snapshot()
    assert await sandbox.diff(name) == {}


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped or has ended."""
    return (processes.read_stat(pid) or ("X",))[0] in "TXZ"


async def stop_snapshot_midway(sandbox: LocalSandbox, keeper: int) -> "tuple[asyncio.Task[str], int]":
    """Start a snapshot and stop its worker process; return the task and the number of snapshots that finished."""
    for tried in range(50):
        before = set(processes.list_children(keeper))
        task = asyncio.create_task(sandbox.snapshot())
        new: set[int] = set()
        while not task.done() and not new:
            await asyncio.sleep(0)
            new = set(processes.list_children(keeper)) - before
        send_signal(new, signal.SIGSTOP)
        await wait_until(lambda task=task, new=new: task.done() or all(map(is_stopped, new)))
        await asyncio.wait({task}, timeout=1.0)  # it may have been stopped just after the end
        if not task.done():
            return task, tried
        send_signal(new, signal.SIGCONT)
    raise AssertionError("every snapshot finished before it could be stopped")


async def test_disconnect_during_a_snapshot_leaves_nothing(local: LocalProvider, home: ProviderHome) -> None:
    """The provider disconnects; the fixture `home` checks that nothing is left."""
    sandbox = await local.create(SPEC, attempt="a")
    await sh(sandbox, "mkdir d; cd d; for i in $(seq 3000); do echo $i > $i; done")
    keeper = await get_keeper_pid(local)
    task, _ = await stop_snapshot_midway(sandbox, keeper)
    await local.close()
    with pytest.raises(SandboxError):
        await task
    assert processes.read_stat(keeper) is None


async def test_number_of_snapshots_is_limited(local: LocalProvider) -> None:
    sandbox = await local.create(SPEC, attempt="a")
    for _ in range(64):
        await sandbox.snapshot()
    with pytest.raises(SandboxError, match=r"\b64\b"):
        await sandbox.snapshot()
