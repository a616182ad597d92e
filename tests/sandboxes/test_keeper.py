"""Keeper: sandboxes die with it or their owner, and failed or cancelled requests leave nothing."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from rookery.core import SandboxError
from rookery.sandbox_runtime import processes
from rookery.sandbox_runtime.cgroups import MAX_IDLE
from rookery.sandbox_runtime.network_namespaces import MAX_FREE
from rookery.sandboxes import Command, ProviderHome, reap
from rookery.sandboxes.local.keeper_client import (
    WARM_SANDBOXES,
    KeeperClient,
    SandboxRequest,
    list_keeper_children,
)
from rookery.sandboxes.local.provider import LocalProvider, LocalSandbox
from tests.processes import send_signal
from tests.sandboxes.hostile.inspection import get_keeper_pid, inspect_sandbox
from tests.sandboxes.owner_process import SPEC, list_cgroup_processes, start_busy_sandboxes, wait_while


@pytest.fixture
async def local(home: ProviderHome) -> AsyncIterator[LocalProvider]:
    provider = LocalProvider(home)
    yield provider
    await provider.close()
    assert str(home.folder) not in Path("/proc/self/mounts").read_text()


def list_leases(home: ProviderHome) -> list[str]:
    return [path.name for path in (home.folder / "leases").glob("*")]


def list_cgroups(prefix: str) -> list[str]:
    return [
        os.path.join(above, name)
        for above, names, _ in os.walk("/sys/fs/cgroup")  # ignores what is removed meanwhile
        for name in names
        if name.startswith(prefix)
    ]


def remove_leftovers(home: ProviderHome, prefix: str) -> list[str]:
    """Remove leftover cgroups and leases; return what they were."""
    left = [*list_cgroups(prefix), *list_leases(home)]
    for path in list_cgroups(prefix):
        os.rmdir(path)
    for name in list_leases(home):
        (home.folder / "leases" / name).unlink()
    return left


def find_parent(sandbox: LocalSandbox) -> int:
    stat = processes.read_stat(inspect_sandbox(sandbox).pid)
    assert stat is not None
    return stat[1]


async def wait_until_idle(keeper: int) -> None:
    """Wait until the keeper has its warm sandboxes and no others."""
    await wait_while(lambda: len(list_keeper_children(keeper)) != WARM_SANDBOXES)


async def get_cgroup_prefix(provider: LocalProvider) -> str:
    """Return the common prefix of the keeper's cgroup names."""
    sandbox = await provider.create(SPEC, attempt="name")
    name = inspect_sandbox(sandbox).name
    await sandbox.close()
    return name.rpartition("-")[0] + "-"


# --------------------------------------------------------------------------------------------------------- deaths


@asynccontextmanager
async def start_owner(home: ProviderHome) -> AsyncIterator[tuple[asyncio.subprocess.Process, int, list[str]]]:
    """Start a process that owns three sandboxes; yield it, its keeper, and prefixes of its cgroup names."""
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.sandboxes.owner_process", str(home.folder), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert program.stdout is not None
        report = json.loads(await asyncio.wait_for(program.stdout.readline(), 60))
        yield program, report["keeper"], [name.rpartition("-")[0] for name in report["names"]]
    finally:
        if program.returncode is None:
            program.kill()
        await program.wait()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
async def test_sandboxes_die_with_their_owner(home: ProviderHome, number: int) -> None:
    async with start_owner(home) as (program, keeper, names):
        assert len(list_cgroup_processes(names)) > 2 * 3
        program.send_signal(number)
        await program.wait()
        await wait_while(lambda: list_cgroup_processes(names))
        await wait_while(lambda: processes.read_stat(keeper))
    assert list_cgroups(names[0]) == []  # the keeper removed them
    reap(home.folder, now=time.time())  # removes the keeper's directory
    assert list_leases(home) == []


async def test_sandboxes_die_with_their_keeper_and_a_new_one_starts(
    home: ProviderHome, local: LocalProvider
) -> None:
    busy = await start_busy_sandboxes(local, 2)
    keeper = await get_keeper_pid(local)
    names = [footprint.name.rpartition("-")[0] for _, footprint in busy]
    os.kill(keeper, signal.SIGKILL)
    await wait_while(lambda: list_cgroup_processes(names))
    for sandbox, _ in busy:
        await wait_while(lambda sandbox=sandbox: not sandbox.channel.dead.done())  # type: ignore[misc]
        with pytest.raises(SandboxError) as caught:
            await sandbox.exec(Command(argv=("true",)))
        assert caught.value.code == "sandbox.lost"
    fresh = await local.create(SPEC, attempt="keeper")
    assert (await fresh.exec(Command(argv=("true",)))).ok
    assert await get_keeper_pid(local) != keeper
    await local.close()
    remove_leftovers(home, names[0])


async def test_killed_keeper_leaves_nothing_after_reaping(home: ProviderHome, local: LocalProvider) -> None:
    ((_, footprint),) = await start_busy_sandboxes(local, 1)
    name = footprint.name.rpartition("-")[0]
    os.kill(await get_keeper_pid(local), signal.SIGKILL)
    await wait_while(lambda: list_cgroup_processes([name]))
    await local.close()
    reap(home.folder, now=time.time())
    assert remove_leftovers(home, name) == []


async def test_sandbox_dies_with_its_pid1_and_others_live(local: LocalProvider) -> None:
    (first, footprint), (second, _) = await start_busy_sandboxes(local, 2)
    running = asyncio.create_task(first.exec(Command(argv=("sleep", "600"))))
    assert (await first.exec(Command(argv=("true",)))).ok
    os.kill(footprint.pid, signal.SIGKILL)
    assert (await running).status == "lost"
    with pytest.raises(SandboxError) as caught:
        await first.exec(Command(argv=("true",)))
    assert caught.value.code == "sandbox.lost"
    await first.close()
    await wait_while(footprint.find_leftovers)
    assert (await second.exec(Command(argv=("true",)))).ok


async def test_sandbox_with_stopped_programs_can_be_closed(local: LocalProvider) -> None:
    ((sandbox, footprint),) = await start_busy_sandboxes(local, 1)
    send_signal(set(footprint.list_processes()) - {footprint.pid}, signal.SIGSTOP)
    await sandbox.close()
    await wait_while(footprint.find_leftovers)


# ----------------------------------------------------------------------------------------------- failed creations


async def test_cancelled_creation_leaves_nothing(home: ProviderHome, local: LocalProvider) -> None:
    prefix = await get_cgroup_prefix(local)
    keeper = await get_keeper_pid(local)
    for turns in (0, 1, 2, 3, 5, 8, 13, 21, 34, 55):
        tasks = [asyncio.create_task(local.create(SPEC, attempt="cancelled")) for _ in range(6)]
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(result, BaseException):
                await result.close()
            else:
                assert isinstance(result, asyncio.CancelledError)
    assert local.open_sandboxes == set()
    await wait_while(lambda: list_leases(home))
    # Sandboxes that were started for a cancelled request may be kept warm.
    await wait_while(lambda: len({Path(path).name for path in list_cgroups(prefix)}) > WARM_SANDBOXES + MAX_IDLE)
    await wait_while(lambda: len(list_keeper_children(keeper)) > WARM_SANDBOXES)


async def test_timed_out_creation_leaves_nothing(home: ProviderHome, local: LocalProvider) -> None:
    await get_cgroup_prefix(local)
    keeper = await get_keeper_pid(local)
    os.kill(keeper, signal.SIGSTOP)
    try:
        with pytest.raises(SandboxError):
            await local.create(SPEC, attempt="late", timeout=0.05)
    finally:
        os.kill(keeper, signal.SIGCONT)
    await wait_until_idle(keeper)
    await wait_while(lambda: list_leases(home))


async def test_failed_creation_leaves_nothing(home: ProviderHome, local: LocalProvider) -> None:
    prefix = await get_cgroup_prefix(local)
    keeper = await get_keeper_pid(local)
    spec = msgspec.structs.replace(SPEC, workdir="/proc/none")
    for _ in range(3):
        with pytest.raises(SandboxError):
            await local.create(spec, attempt="failed")
    await wait_until_idle(keeper)
    await wait_while(lambda: list_leases(home))
    await wait_while(lambda: len({Path(path).name for path in list_cgroups(prefix)}) > WARM_SANDBOXES + MAX_IDLE)


async def test_cancelled_request_creates_no_sandbox(home: ProviderHome) -> None:
    client = await KeeperClient.launch(home.folder.resolve(), warm=0)
    try:
        keeper = int((await client.status())["pid"])
        request = SandboxRequest()
        tasks = [asyncio.create_task(client.create(request)) for _ in range(30)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        kept = await client.create(request)  # served after all earlier requests
        try:
            await wait_while(lambda: [p for p in list_keeper_children(keeper) if p != kept.pid])
        finally:
            kept.close()
    finally:
        await client.close()


@pytest.mark.long
async def test_two_hundred_sandboxes_in_parallel(home: ProviderHome, local: LocalProvider) -> None:
    prefix = await get_cgroup_prefix(local)
    made = await asyncio.gather(*(local.create(SPEC, attempt=f"a{n}") for n in range(200)))
    results = await asyncio.gather(*(one.exec(Command(argv=("true",))) for one in made))
    assert all(result.ok for result in results)
    assert len({inspect_sandbox(one).uid for one in made}) == 200
    keeper = await get_keeper_pid(local)
    await asyncio.gather(*(one.close() for one in made))
    await wait_until_idle(keeper)
    await wait_while(lambda: list_leases(home))
    await wait_while(lambda: len({Path(path).name for path in list_cgroups(prefix)}) > WARM_SANDBOXES + MAX_IDLE)


# ---------------------------------------------------------------------------------------- lifetime of a keeper


@pytest.mark.long
async def test_slow_client_loses_no_sandboxes(home: ProviderHome) -> None:
    """The keeper has more responses than fit into the socket while the client does not read."""
    client = await KeeperClient.launch(home.folder.resolve(), warm=2)
    try:
        keeper = (await client.status())["pid"]
        loop = asyncio.get_running_loop()
        loop.remove_reader(client._sock.fileno())
        tasks = [asyncio.create_task(client.create(SandboxRequest())) for _ in range(400)]
        await wait_while(lambda: len(list_keeper_children(keeper)) < 400 + WARM_SANDBOXES)
        loop.add_reader(client._sock.fileno(), client._receive)
        handles = await asyncio.gather(*tasks)
        assert len({one.name for one in handles}) == 400
        for one in handles:
            one.close()
        await wait_while(lambda: len(list_keeper_children(keeper)) > WARM_SANDBOXES)
    finally:
        await client.close()


async def test_sandboxes_end_with_their_clients_connection(home: ProviderHome) -> None:
    ours = await KeeperClient.launch(home.folder.resolve(), warm=0, listen=True)
    try:
        theirs = await KeeperClient.open(home.folder.resolve())
        request = SandboxRequest()
        mine, other, more = await ours.create(request), await theirs.create(request), await theirs.create(request)
        keeper = int((await ours.status())["pid"])
        assert set(list_keeper_children(keeper)) == {mine.pid, other.pid, more.pid}
        await theirs.close()
        await wait_while(lambda: list_keeper_children(keeper) != [mine.pid])
        for handle in (mine, other, more):
            handle.close()
    finally:
        await ours.close()


async def test_keeper_replaces_used_warm_sandboxes(local: LocalProvider) -> None:
    made = [await local.create(SPEC, attempt="warm") for _ in range(5)]
    keeper = await get_keeper_pid(local)
    await wait_while(lambda: len(list_keeper_children(keeper)) != 5 + WARM_SANDBOXES)
    for one in made:
        await one.close()
    await wait_until_idle(keeper)


@pytest.mark.long
async def test_keeper_does_not_grow(home: ProviderHome, local: LocalProvider) -> None:
    async def cycle(count: int) -> None:
        for at in range(0, count, 10):
            made = await asyncio.gather(*(local.create(SPEC, attempt=f"a{at}") for _ in range(10)))
            for result in await asyncio.gather(*(one.exec(Command(argv=("true",))) for one in made)):
                assert result.ok
            await asyncio.gather(*(one.close() for one in made))

    def size() -> dict[str, int]:
        status = Path(f"/proc/{keeper}/status").read_text()
        return {
            "memory": int(status.partition("VmRSS:")[2].split()[0]),
            "descriptors": len(os.listdir(f"/proc/{keeper}/fd")),
            "mounts": Path(f"/proc/{keeper}/mounts").read_text().count("\n"),
            "ours": len(os.listdir("/proc/self/fd")),
            "leases": len(list_leases(home)),
            "groups": len({Path(path).name for path in list_cgroups(prefix)}),
        }

    prefix = await get_cgroup_prefix(local)
    keeper = await get_keeper_pid(local)
    await cycle(60)
    await wait_until_idle(keeper)
    await wait_while(lambda: list_leases(home))
    before = size()
    # Idle cgroups and namespaces are kept for reuse, up to a limit.
    before["descriptors"] += MAX_FREE
    before["groups"] = WARM_SANDBOXES + MAX_IDLE
    await cycle(300)
    await wait_until_idle(keeper)
    await wait_while(lambda: {k: v for k, v in size().items() if k != "memory" and v > before[k]})
    assert size()["memory"] < before["memory"] + 2048


async def test_busy_provider_uses_several_keepers(home: ProviderHome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rookery.sandboxes.local.keeper_group.count_keepers", lambda: 2)
    provider = LocalProvider(home)
    try:
        made = []
        async with asyncio.timeout(60):
            while len(provider.keepers.pids) < 2:
                made += await asyncio.gather(*(provider.create(SPEC, attempt="a") for _ in range(10)))
                for one in made[:-10]:
                    await one.close()
                made = made[-10:]
        made += [await provider.create(SPEC, attempt="b") for _ in range(2)]
        assert {find_parent(one) for one in made[-2:]} == set(provider.keepers.pids)
        for one in made[-2:]:
            await one.write("mine", b"1")
            fork = await one.fork(await one.snapshot())
            assert await fork.read("mine") == b"1"
        users = [inspect_sandbox(one).uid for one in made]
        assert len(set(users)) in (len(users), 1)  # 1: all have the user who runs the keepers
        pids = provider.keepers.pids
    finally:
        await provider.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert list_leases(home) == []


async def test_processes_of_a_run_share_its_keepers(home: ProviderHome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rookery.sandboxes.local.keeper_group.count_keepers", lambda: 2)
    first, other = LocalProvider(home), LocalProvider(home)
    try:
        await first.start_keeper()
        assert len(first.keepers.pids) == 2
        sandbox = await other.create(SPEC, attempt="a")
        assert other.keepers.pids == []
        assert find_parent(sandbox) in first.keepers.pids
    finally:
        await other.close()
        await first.close()
