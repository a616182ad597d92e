"""Scale: a thousand sandboxes in parallel, hundreds in sequence, half of them cancelled; nothing is left."""

import asyncio
import os
import random
import resource
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rookery.sandboxes import Command, ProviderHome
from rookery.sandboxes.local.keeper_client import WARM_SANDBOXES, list_keeper_children
from rookery.sandboxes.local.provider import LocalProvider, LocalSandbox
from tests.sandboxes.hostile.inspection import inspect_sandbox
from tests.sandboxes.owner_process import SPEC, list_cgroup_processes, wait_while

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from soak_sandboxes import Soak  # type: ignore[import-not-found]

MANY = 1000
CYCLES = 500
REQUESTS = 500
SLEEP = Command(argv=("sleep", "600"))


@pytest.fixture(autouse=True)
def _descriptors() -> Iterator[None]:
    """Raise the limit of descriptors: a thousand sandboxes need several thousand, here and in the keeper."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 8 * MANY:
        pytest.skip(f"this machine allows a process no more than {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
async def soak(home: ProviderHome) -> AsyncIterator[Soak]:
    provider = LocalProvider(home)
    try:
        made = await Soak.open(provider, home.folder)
        await made.run_cycles(50, Command(argv=("true",)))  # caches and pools are filled
        await made.wait_until_idle()
        yield made
    finally:
        await provider.close()
    assert str(home.folder) not in Path("/proc/self/mounts").read_text()


async def create_many(soak: Soak, count: int) -> list[LocalSandbox]:
    return list(await asyncio.gather(*(soak.provider.create(SPEC, attempt=f"a{n}") for n in range(count))))


@pytest.mark.long
async def test_a_thousand_sandboxes_live_and_close(soak: Soak) -> None:
    before = soak.measure()
    sandboxes = await create_many(soak, MANY)
    await asyncio.gather(*(sandbox.start(SLEEP) for sandbox in sandboxes))
    results = await asyncio.gather(*(sandbox.exec(Command(argv=("cat", "/proc/1/comm"))) for sandbox in sandboxes))
    assert {result.stdout for result in results} == {b"sandbox\n"}
    known = [inspect_sandbox(sandbox) for sandbox in sandboxes]
    assert len({one.uid for one in known}) == MANY
    assert len({one.namespaces for one in known}) == MANY
    assert len(list_cgroup_processes([known[0].name.rpartition("-")[0]])) >= 2 * MANY
    await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))
    await soak.wait_until_idle()
    assert list_cgroup_processes([f"/{one.name}\n" for one in known]) == []
    assert soak.measure()._replace(keeper_mb=0, owner_mb=0).find_growth(before) == []


@pytest.mark.long
async def test_per_user_kernel_limits_apply_to_each_sandbox(soak: Soak) -> None:
    """The kernel limits inotify instances per user, and charges those of a namespace to its creator."""
    limit = int(Path("/proc/sys/fs/inotify/max_user_instances").read_text())
    if os.geteuid() != 0 or limit > 1024:
        pytest.skip("only root can give sandboxes their own users, and the limit must be reachable")
    program = (
        "import ctypes, time; libc = ctypes.CDLL(None); n = 0\n"
        "while n < 4000 and libc.inotify_init() >= 0: n += 1\n"
        "print(n, flush=True); time.sleep(600)"
    )
    sandboxes = await create_many(soak, 3)
    for sandbox in sandboxes:
        process = await sandbox.start(Command(argv=("python3", "-c", program)))
        async for _, chunk in process.output():
            assert int(chunk) == limit
            break
    own = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program.replace("4000", "1").replace("600", "0"), stdout=asyncio.subprocess.PIPE
    )
    assert (await own.communicate())[0] == b"1\n"
    await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))
    await soak.wait_until_idle()


@pytest.mark.long
async def test_cycles_leave_no_memory_descriptors_or_mounts(soak: Soak) -> None:
    command = Command(argv=("true",))
    before = soak.measure()
    await soak.run_cycles(CYCLES, command)
    await soak.wait_until_idle()
    assert soak.measure().find_growth(before) == []


@pytest.mark.long
async def test_cancelling_half_of_many_creations_leaves_nothing(home: ProviderHome, soak: Soak) -> None:
    before = soak.measure()
    generator = random.Random(4)
    tasks = [asyncio.create_task(soak.provider.create(SPEC, attempt=f"a{n}")) for n in range(REQUESTS)]
    cancelled = generator.sample(tasks, REQUESTS // 2)
    while cancelled:
        # After a few iterations of the event loop, so that creations are cancelled at every stage.
        for _ in range(generator.randrange(1, 30)):
            await asyncio.sleep(0)
        for task in (cancelled.pop() for _ in range(min(len(cancelled), generator.randrange(1, 8)))):
            task.cancel()
    made = []
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, BaseException):
            assert isinstance(result, asyncio.CancelledError), result
        else:
            made.append(result)
    assert len(made) >= REQUESTS // 2
    assert soak.provider.open_sandboxes == set(made)
    for result in await asyncio.gather(*(one.exec(Command(argv=("true",))) for one in made)):
        assert result.ok
    await wait_while(lambda: len(list_keeper_children(soak.keeper)) > len(made) + WARM_SANDBOXES)
    await asyncio.gather(*(one.close() for one in made))
    await soak.wait_until_idle()
    assert list((home.folder / "leases").glob("*")) == []
    assert soak.measure()._replace(keeper_mb=0, owner_mb=0).find_growth(before) == []
