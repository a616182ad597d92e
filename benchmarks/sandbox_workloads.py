"""Workloads of the benchmark `sandbox`: single commands, snapshots, fork bombs and a thousand live sandboxes.

Method:
- a command with an unexpected result fails the benchmark;
- a sandbox counts as closed when its init process is gone, which the kernel reports after all others have ended.
"""

import asyncio
import contextlib
import os
import resource
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.process_usage import cpu_with_ended_children
from benchmarks.sandbox_peers import COMMAND, PYTHON
from rookery.core import ExecResult, SandboxError, SandboxSpec, UsageError
from rookery.sandbox_runtime import processes
from rookery.sandboxes import Command, ProviderHome
from rookery.sandboxes.local.keeper.daemon import FORKED_SPARES
from rookery.sandboxes.local.keeper_client import WARM_SANDBOXES, list_keeper_children
from rookery.sandboxes.local.provider import LocalProvider, LocalSandbox

SPEC = SandboxSpec(provider="local", memory=256 << 20, pids=128, disk=64 << 20, wall=60.0)
LARGE_SPEC = msgspec.structs.replace(SPEC, memory=4 << 30)
"""Sandbox for fork bombs, which must reach the time limit before the memory limit."""
FILES = 200
BOMB_SECONDS = 0.5
_WRITE_FILES = "import os\nfor n in range(%d):\n open(f'f{n}', 'w').write('x' * 512)" % FILES  # noqa: UP031
BOMB = """
import os, sys
if os.getpid() > 1000 or not open("/proc/1/cmdline").read().startswith("sandbox"):
    sys.exit("only in a sandbox")
reported = False
while True:
    try:
        os.fork()
    except OSError:
        if not reported:
            os.write(1, b"full\\n")
        reported = True
"""
"""Every process forks forever and reports its first failed fork."""


class ConcurrentSandboxes(NamedTuple):
    """Seconds to open, use and close many sandboxes, and memory for each of them."""

    seconds: float
    created: float
    closed: float
    pss_mb: float | None
    kernel_mb: float | None
    owner_mb: float


def python_command(*, warm: bool) -> Command:
    """Return the Python command, forked from the sandbox's warm interpreter or started by exec."""
    return Command(argv=("python3", "-c", "pass") if warm else PYTHON, warm=warm)


def require_success(result: ExecResult) -> None:
    if not result.ok:
        raise RuntimeError(
            f"a command in a sandbox ended as {result.status}: {result.stderr[-300:]!r} {result.detail}"
        )


class SandboxWorkloads:
    """A local provider with its own keeper, and the operations to measure on it."""

    def __init__(self, provider: LocalProvider, keeper: int) -> None:
        self.provider = provider
        self.keeper = keeper

    async def create(self, spec: SandboxSpec = SPEC) -> LocalSandbox:
        return await self.provider.create(spec, attempt="bench")

    async def cold_start_ms(self, command: Command) -> float:
        """Measure milliseconds from `create` to the end of a command. `close` is not included."""
        began = time.perf_counter()
        sandbox = await self.create()
        try:
            result = await sandbox.exec(command)
            took = time.perf_counter() - began
        finally:
            await sandbox.close()
        require_success(result)
        return 1e3 * took

    def cpu_ms(self) -> float:
        """Return the CPU milliseconds of this process, its ended children and the keepers with their sandboxes."""
        keepers = sum(cpu_with_ended_children(pid) for pid in self.provider.keepers.pids)
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return 1e3 * (keepers + time.process_time() + children.ru_utime + children.ru_stime)

    async def wait_idle(self, seconds: float = 5.0) -> None:
        """Wait until the keepers have no other children than their prepared and open sandboxes."""

        def idle() -> bool:
            pids = self.provider.keepers.pids
            children = sum(len(list_keeper_children(pid)) for pid in pids)
            return children <= len(pids) * (WARM_SANDBOXES + FORKED_SPARES) + len(self.provider.open_sandboxes)

        await _wait_until(idle, seconds)
        await asyncio.sleep(0.01)

    async def exec_ms(self, sandbox: LocalSandbox) -> float:
        began = time.perf_counter()
        result = await sandbox.exec(Command(argv=COMMAND))
        took = time.perf_counter() - began
        require_success(result)
        return 1e3 * took

    # ----------------------------------------------------------------------------------------- snapshots

    async def snapshots(self, times: int) -> tuple[list[float], list[float], str]:
        """Measure milliseconds of snapshots with 200 files, and of forks from them, or say why there are none."""
        taken: list[float] = []
        forked: list[float] = []
        sandbox = await self.create()
        try:
            require_success(await sandbox.exec(Command(argv=("python3", "-c", _WRITE_FILES))))
            for _ in range(times):
                began = time.perf_counter()
                name = await sandbox.snapshot()
                taken.append(1e3 * (time.perf_counter() - began))
                began = time.perf_counter()
                fork = await sandbox.fork(name)
                forked.append(1e3 * (time.perf_counter() - began))
                try:
                    require_success(await fork.exec(Command(argv=("test", "-s", f"f{FILES - 1}"))))
                finally:
                    await fork.close()
                await self.wait_idle()
        except SandboxError as error:
            if error.code != "sandbox.refused":
                raise
            return [], [], str(error)
        finally:
            await sandbox.close()
        return taken, forked, ""

    # --------------------------------------------------------------------------------------- many at once

    async def open_many(self, count: int) -> ConcurrentSandboxes:
        """Open `count` sandboxes and run a command in each."""
        before, own = self._keepers_pss_mb(), memory_mb(os.getpid())
        began = time.perf_counter()
        sandboxes: list[LocalSandbox] = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.create()) for _ in range(count)]
            sandboxes = [task.result() for task in tasks]
            created = time.perf_counter() - began
            for result in await asyncio.gather(*(sandbox.exec(Command(argv=COMMAND)) for sandbox in sandboxes)):
                require_success(result)
            seconds = time.perf_counter() - began
            after = self._keepers_pss_mb()
            grown = None if before is None or after is None else (after - before) / count
            kernel = [kernel_mb(sandbox) for sandbox in sandboxes[:: max(1, count // 100)]]
            known_sizes = [one for one in kernel if one is not None]
            owner = (memory_mb(os.getpid()) - own) / count
        finally:
            began = time.perf_counter()
            await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))
            closed = time.perf_counter() - began
        return ConcurrentSandboxes(
            seconds, created, closed, grown, sum(known_sizes) / len(known_sizes) if known_sizes else None, owner
        )

    def _keepers_pss_mb(self) -> float | None:
        sizes = [pss_mb(pid) for pid in self.provider.keepers.pids]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    # --------------------------------------------------------------------------------------------- bombs

    async def close_bomb_ms(self) -> float:
        """Measure milliseconds from closing a sandbox with a fork bomb until all its processes are gone."""
        sandbox = await self.create(LARGE_SPEC)
        try:
            process = await sandbox.start(Command(argv=("python3", "-c", BOMB)))
            async with asyncio.timeout(30):
                async for _, chunk in process.output():
                    if b"full" in chunk:
                        break
        except BaseException:
            await sandbox.close()
            raise
        began = time.perf_counter()
        await sandbox.close()
        return 1e3 * (time.perf_counter() - began)

    async def stop_bomb_ms(self) -> float:
        """Measure milliseconds from the time limit of a fork bomb until its process tree is dead."""
        sandbox = await self.create(LARGE_SPEC)
        try:
            began = time.perf_counter()
            result = await sandbox.exec(Command(argv=("python3", "-c", BOMB), wall=BOMB_SECONDS))
            took = time.perf_counter() - began
            survivors = processes.list_children(sandbox_pid(sandbox))
        finally:
            await sandbox.close()
        if result.status != "time_limit" or survivors:
            raise RuntimeError(
                f"a fork bomb ended as {result.status} with {len(survivors)} survivors: {result.stderr[-300:]!r}"
            )
        return 1e3 * (took - BOMB_SECONDS)


@contextlib.asynccontextmanager
async def open_workloads() -> AsyncIterator[SandboxWorkloads]:
    """Start a keeper for this benchmark and wait until its warm sandboxes are ready."""
    with tempfile.TemporaryDirectory(prefix="rookery-bench-") as folder:
        provider = LocalProvider(ProviderHome(folder=Path(folder), run=f"bench-{os.getpid()}"))
        if problems := provider.check(SPEC):
            raise UsageError(f"local sandboxes cannot run here: {' '.join(problems)}")
        try:
            keeper = int((await (await provider.keeper()).status())["pid"])
            await _wait_until(lambda: len(list_keeper_children(keeper)) >= WARM_SANDBOXES, 20)
            yield SandboxWorkloads(provider, keeper)
        finally:
            await provider.close()


async def _wait_until(done: Callable[[], bool], seconds: float) -> None:
    """Wait for a condition by polling: the kernel does not notify about children of other processes."""
    end = time.monotonic() + seconds
    for _ in iter(lambda: not done() and time.monotonic() < end, False):
        await asyncio.sleep(0.001)


def sandbox_pid(sandbox: LocalSandbox) -> int:
    """Return the host PID of the sandbox's init process."""
    assert sandbox.handle is not None
    return sandbox.handle.pid


def pss_mb(top: int) -> float | None:
    """Return the PSS of a process tree in megabytes, or None if it cannot be read."""
    total, queue = 0, [top]
    while queue:
        pid = queue.pop()
        queue += processes.list_children(pid)
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        except OSError:
            return None
        fields = text.partition(b"\nPss:")[2].split(None, 1)
        total += int(fields[0]) if fields else 0
    return total / 1024


def memory_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def kernel_mb(sandbox: LocalSandbox) -> float | None:
    """Return the kernel memory of a sandbox in megabytes, if its cgroup reports it."""
    folder = sandbox.handle.memory_cgroup if sandbox.handle is not None else ""
    with contextlib.suppress(OSError, ValueError):
        if (v1 := Path(folder, "memory.kmem.usage_in_bytes")).exists():
            return int(v1.read_text()) / 2**20
        for line in Path(folder, "memory.stat").read_text().splitlines():
            if line.startswith("kernel "):
                return int(line.split()[1]) / 2**20
    return None
