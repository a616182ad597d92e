"""Behaviour of the `subprocess` provider beyond the protocol."""

import asyncio
import errno
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rookery.core import SandboxError, SandboxSpec, UsageError
from rookery.sandbox_runtime import processes
from rookery.sandboxes import Command, ProviderHome, leases, open_provider, reap
from rookery.sandboxes.conformance.tools import DAEMONS, run_daemons, wait_for_file
from rookery.sandboxes.subprocess_provider import SubprocessProvider
from tests.sandboxes.conftest import find_marked_processes, find_orphans

SPEC = SandboxSpec(untrusted_ok=True, wall=30.0)


def wait_for_death(pids: list[int], seconds: float = 20.0) -> list[int]:
    """Wait until processes are gone; return those that are not."""
    end = time.monotonic() + seconds
    left = []
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if not select.select([handle], [], [], max(0.0, end - time.monotonic()))[0]:
                left.append(pid)
        finally:
            os.close(handle)
    return left


def test_provider_is_found_by_name(home: ProviderHome) -> None:
    provider = open_provider("subprocess", home)
    assert (provider.name, provider.isolated) == ("subprocess", False)
    with pytest.raises(UsageError, match="subprocess"):
        open_provider("no-such", home)
    assert not any(home.folder.iterdir())


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (SandboxSpec(image="debian"), "debian"),
        (SandboxSpec(network="model"), "network"),
        (SandboxSpec(network="allow", allow=("example.org",)), "network"),
        (SandboxSpec(cpus=1.0), "CPUs"),
        (SandboxSpec(user="nobody-else"), "nobody-else"),
        (SandboxSpec(workdir="/app"), "/app"),
        (SandboxSpec(workdir="../up"), "../up"),
    ],
)
async def test_unsupported_spec_is_reported_and_refused(home: ProviderHome, spec: SandboxSpec, named: str) -> None:
    provider = SubprocessProvider(home)
    (sentence,) = provider.check(spec)
    assert named in sentence
    with pytest.raises(SandboxError) as caught:
        await provider.create(spec, attempt="a")
    assert caught.value.code == "sandbox.refused"


def test_supported_specs_are_accepted(home: ProviderHome) -> None:
    for spec in (SandboxSpec(), SandboxSpec(network="all", disk=1 << 20, workdir="a/b", cpu_seconds=5.0)):
        assert SubprocessProvider(home).check(spec) == []


async def test_snapshots_are_refused(provider: SubprocessProvider) -> None:
    sandbox = await provider.create(SPEC, attempt="a")
    for call in (sandbox.snapshot(), sandbox.fork("x"), sandbox.diff("x")):
        with pytest.raises(SandboxError) as caught:
            await call
        assert caught.value.code == "sandbox.refused"


async def test_close_leaves_nothing(provider: SubprocessProvider) -> None:
    sandbox = await provider.create(SPEC, attempt="a")
    task = asyncio.create_task(run_daemons(sandbox, 60.0))
    await wait_for_file(sandbox, "ready")
    pids = [int(line) for line in (await sandbox.read("pids")).split()]
    assert len(pids) >= 5
    await sandbox.exec(
        Command(argv=("sh", "-c", "mkdir -p d/d; touch d/d/f; chmod 000 d/d d; ln -s /etc out; mkfifo p"))
    )
    await sandbox.close()
    assert (await task).status == "lost"
    assert wait_for_death(pids, 0) == []
    assert not sandbox.root.exists()


async def test_cancelled_close_continues(provider: SubprocessProvider) -> None:
    sandbox = await provider.create(SPEC, attempt="a")
    closing = asyncio.create_task(sandbox.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    await provider.close()
    assert not sandbox.root.exists()


async def test_cancelled_creation_leaves_nothing(home: ProviderHome) -> None:
    provider = SubprocessProvider(home)
    for turns in range(6):
        task = asyncio.create_task(provider.create(SPEC, attempt="a"))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert find_marked_processes(home.run) == []


async def test_failed_creation_leaves_nothing(home: ProviderHome) -> None:
    provider = SubprocessProvider(home)
    with pytest.raises(SandboxError) as caught:
        await provider.create(SPEC, attempt="a", timeout=0.0001)
    assert caught.value.code == "sandbox.create"
    blocked = home.folder / "file"
    blocked.write_text("")
    with pytest.raises(SandboxError) as caught:
        await SubprocessProvider(ProviderHome(folder=blocked, run=home.run)).create(SPEC, attempt="a")
    assert caught.value.code == "sandbox.create"
    blocked.unlink()


OWNER = """
import asyncio, sys
from pathlib import Path
from rookery.core import SandboxSpec
from rookery.sandboxes import Command, ProviderHome, open_provider
from rookery.sandboxes.conformance.tools import wait_for_file, run_daemons

async def main():
    provider = open_provider("subprocess", ProviderHome(folder=Path(sys.argv[1]), run=sys.argv[2]))
    sandbox = await provider.create(SandboxSpec(wall=600), attempt="a")
    task = asyncio.create_task(run_daemons(sandbox, 600.0))
    await wait_for_file(sandbox, "ready")
    print((await sandbox.read("pids")).decode().replace("\\n", " "), sandbox.channel.pid, flush=True)
    if sys.argv[3] == "forked":
        import os
        if os.fork() == 0:  # inherits every descriptor of its parent, and outlives it
            sys.stdin.read()
            os._exit(0)
    await task

asyncio.run(main())
"""


def start_owner(home: ProviderHome, how: str) -> "tuple[subprocess.Popen[str], list[int]]":
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(home.folder), home.run, how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    return owner, [int(word) for word in owner.stdout.readline().split()]


def kill_owner(owner: "subprocess.Popen[str]") -> None:
    owner.kill()
    owner.wait()
    for stream in (owner.stdin, owner.stdout):
        assert stream is not None
        stream.close()


@pytest.mark.parametrize("how", ["plain", "forked"])
def test_death_of_the_owner_leaves_nothing(home: ProviderHome, how: str) -> None:
    owner, pids = start_owner(home, how)
    try:
        assert len(pids) >= 6
        owner.kill()
        owner.wait()
        assert wait_for_death(pids) == []
        assert [path for path in home.folder.rglob("*") if path != home.folder / "leases"] == []
    finally:
        kill_owner(owner)


def test_reaper_cleans_up_after_killed_owner_and_guard(home: ProviderHome) -> None:
    owner, pids = start_owner(home, "plain")
    try:
        assert reap(home.folder, now=time.time()) == []
        assert len(wait_for_death(pids, 0)) >= 5, "it touched sandboxes of a live owner"
        owner.send_signal(signal.SIGSTOP)  # so that it cannot clean up after its guard
        os.kill(pids[-1], signal.SIGKILL)
        owner.kill()
        owner.wait()
        (lease,) = leases.read_leases(home.folder)
        assert reap(home.folder, now=time.time()) == [lease.id]
        assert find_marked_processes(home.run) == []
    finally:
        kill_owner(owner)
    # A process that wiped its environment and lost its guard cannot be recognised.
    for pid in find_orphans(home.folder):
        os.kill(pid, signal.SIGKILL)
    wait_for_death(pids)
    assert reap(home.folder, now=time.time()) == []


async def test_reaper_removes_overdue_sandboxes(provider: SubprocessProvider, home: ProviderHome) -> None:
    sandbox = await provider.create(SPEC, attempt="a")
    task = asyncio.create_task(sandbox.exec(Command(argv=("sleep", "600"), wall=600)))
    await sandbox.exec(Command(argv=("true",)))
    assert await asyncio.to_thread(reap, home.folder, now=time.time()) == []
    assert await asyncio.to_thread(reap, home.folder, now=time.time() + 10 * 86400) == [sandbox.id]
    assert (await task).status == "lost"


async def test_death_of_the_guard_is_noticed(provider: SubprocessProvider, home: ProviderHome) -> None:
    sandbox = await provider.create(SPEC, attempt="a")
    process = await sandbox.start(Command(argv=("sleep", "600")))
    shell = await sandbox.shell()
    task = asyncio.create_task(sandbox.exec(Command(argv=("sleep", "600"), wall=600)))
    script = asyncio.create_task(shell.run("echo > here; sleep 600", timeout=600))
    await wait_for_file(sandbox, "here")
    result = await sandbox.exec(Command(argv=("sh", "-c", "kill -9 $PPID; sleep 600"), wall=600))
    assert result.status == "lost"
    assert (await task).status == "lost"
    assert (await script).status == "lost"
    assert (await process.wait(timeout=60)).status == "lost"
    with pytest.raises(SandboxError) as caught:
        await sandbox.exec(Command(argv=("true",)))
    assert caught.value.code == "sandbox.lost"
    with pytest.raises(SandboxError):
        await shell.run("true", timeout=60)
    await provider.close()
    assert find_marked_processes(home.run) == []


async def test_stopped_guard_counts_as_lost(provider: SubprocessProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rookery.sandboxes.jobs.GRACE_SECONDS", 0.3)
    sandbox = await provider.create(SPEC, attempt="a")
    result = await sandbox.exec(Command(argv=("sh", "-c", "kill -STOP $PPID; sleep 600"), wall=0.2))
    assert result.status == "lost"


async def test_too_many_processes_are_killed(provider: SubprocessProvider, home: ProviderHome) -> None:
    sandbox = await provider.create(SandboxSpec(untrusted_ok=True, pids=20, wall=60), attempt="a")
    result = await sandbox.exec(Command(argv=("sh", "-c", "for i in $(seq 60); do sleep 600 & done; wait")))
    assert result.status == "process_limit"
    assert len(find_marked_processes(home.run)) == 1  # the guard


async def test_fork_bomb_is_killed(provider: SubprocessProvider, home: ProviderHome) -> None:
    sandbox = await provider.create(SandboxSpec(untrusted_ok=True, pids=30, wall=20), attempt="a")
    bomb = "import os, time\nfor _ in range(6):\n    if os.fork() == 0 == os.fork(): os.setsid()\ntime.sleep(60)"
    result = await sandbox.exec(Command(argv=("python3", "-c", bomb)))
    assert result.status in ("process_limit", "time_limit", "exited"), result
    await sandbox.close()
    assert find_marked_processes(home.run) == []


async def test_file_over_the_limit_is_a_disk_limit(provider: SubprocessProvider) -> None:
    sandbox = await provider.create(SandboxSpec(untrusted_ok=True, disk=1 << 20), attempt="a")
    result = await sandbox.exec(Command(argv=("sh", "-c", "exec head -c 3000000 /dev/zero > big")))
    assert result.status == "disk_limit"


async def test_memory_limit_is_reported(provider: SubprocessProvider) -> None:
    sandbox = await provider.create(SPEC, attempt="a")
    grow = "x = []\nwhile True: x.append(bytearray(1 << 20))"
    result = await sandbox.exec(Command(argv=("python3", "-c", grow), memory=200 << 20))
    assert result.status == "memory_limit", result


async def test_programs_inherit_no_descriptors(provider: SubprocessProvider) -> None:
    leak = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(leak, True)
    try:
        sandbox = await provider.create(SPEC, attempt="a")
    finally:
        os.close(leak)
    listed = await sandbox.exec(Command(argv=("ls", "-l", "/proc/self/fd")))
    assert len(listed.stdout.decode().strip().splitlines()) == 1 + 4, (
        listed.stdout
    )  # 0, 1, 2 and the listed directory


@pytest.mark.long
async def test_deep_directory_tree_is_removed(provider: SubprocessProvider, home: ProviderHome) -> None:
    sandbox = await provider.create(SPEC, attempt="a")
    script = textwrap.dedent("""
        import os
        for n in range(3000):
            os.mkdir("d"); open("f", "w").close(); os.chdir("d")
    """)
    assert (await sandbox.exec(Command(argv=("python3", "-c", script)))).ok
    with pytest.raises(OSError) as refused:
        await sandbox.download("d", home.folder.parent / "got")
    assert refused.value.errno == errno.ELOOP
    await provider.close()
    assert not sandbox.root.exists()


async def test_long_arguments_and_environments_arrive(provider: SubprocessProvider) -> None:
    sandbox = await provider.create(SPEC, attempt="a")
    argv = ("sh", "-c", 'echo "$#" "${#BIG}"', *("x" * 1000 for _ in range(500)))
    result = await sandbox.exec(Command(argv=argv, env={"BIG": "y" * 100_000}))
    assert result.stdout == b"499 100000\n"
    assert (await sandbox.exec(Command(argv=("echo", "z" * 200_000)))).exit_code == 126


async def test_provider_works_on_uvloop(home: ProviderHome) -> None:
    uvloop = pytest.importorskip("uvloop")

    def elsewhere() -> None:
        async def main() -> None:
            provider = SubprocessProvider(home)
            sandbox = await provider.create(SPEC, attempt="a")
            result = await sandbox.exec(Command(argv=("cat",), stdin=b"hi"))
            assert result.stdout == b"hi"
            shell = await sandbox.shell()
            assert (await shell.run("sleep 60", timeout=0.2)).status == "time_limit"
            assert (await shell.run("echo on", timeout=60)).stdout == b"on\n"
            assert (await sandbox.exec(Command(argv=("python3", "-c", DAEMONS), wall=0.3))).status == "time_limit"
            await provider.close()

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())

    before = set(
        processes.list_children(os.getpid())
    )  # modules that other tests imported may have helper processes
    await asyncio.to_thread(elsewhere)
    assert set(processes.list_children(os.getpid())) <= before


def test_lease_with_a_path_as_name_is_ignored(home: ProviderHome, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    path = home.folder / "leases" / "x.json"
    path.parent.mkdir()
    path.write_text(
        '{"id":"../victim","run":"r","attempt":"a","owner_pid":1,"owner_started":0,"deadline":0,"provider":"p","folder":"/"}'
    )
    assert reap(home.folder, now=time.time()) == []
    assert victim.exists()
    path.unlink()
