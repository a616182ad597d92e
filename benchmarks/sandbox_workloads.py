"""What the `sandbox` bench does with boxes: one after another, many at a time, a thousand at once, bombs.

Promises:
- a command that did not end as it should fails the bench: no figure from a broken run;
- a box counts as gone when the kernel says so: its first process is gone, which is after all the others are.
"""

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.sandbox_peers import COMMAND, PYTHON
from rookery.core import ExecResult, SandboxError, SandboxSpec, UsageError
from rookery.sandbox_runtime import processes
from rookery.sandboxes import Command, ProviderHome
from rookery.sandboxes.local.keeper.daemon import FORKED_SPARES
from rookery.sandboxes.local.keeper_client import WARM_SANDBOXES
from rookery.sandboxes.local.provider import LocalProvider, LocalSandbox

SPEC = SandboxSpec(provider="local", memory=256 << 20, pids=128, disk=64 << 20, wall=60.0)
ROOMY = msgspec.structs.replace(SPEC, memory=4 << 30)
"""For bombs: they are to end for want of time, not of memory."""
HAS_WARM_COMMANDS = "warm" in Command.__struct_fields__
"""Whether a command can be forked from a box's warm interpreter."""
FILES = 200
BOMB_SECONDS = 0.5
_MOUNTAIN = "import os\nfor n in range(%d):\n open(f'f{n}', 'w').write('x' * 512)" % FILES  # noqa: UP031
BOMB = """
import os, sys
if os.getpid() > 1000 or not open("/proc/1/cmdline").read().startswith("sandbox"):
    sys.exit("only in a box")
told = False
while True:
    try:
        os.fork()
    except OSError:
        if not told:
            os.write(1, b"full\\n")
        told = True
"""
"""Every process of it forks for ever; each says when it was refused the first time."""


class Thousand(NamedTuple):
    """What it took to have that many alive, and what they take."""

    seconds: float
    created: float
    closed: float
    pss_mb: float | None
    kernel_mb: float | None
    owner_mb: float


def python_command(*, warm: bool) -> Command:
    fields: dict[str, Any] = {"warm": True} if warm and HAS_WARM_COMMANDS else {}
    return Command(argv=PYTHON, **fields)


def good(result: ExecResult) -> None:
    if not result.ok:
        raise RuntimeError(
            f"a command in a box ended as {result.status}: {result.stderr[-300:]!r} {result.detail}"
        )


class Boxes:
    """A provider with a keeper of its own, and the things that are measured on it."""

    def __init__(self, provider: LocalProvider, keeper: int) -> None:
        self.provider = provider
        self.keeper = keeper

    async def create(self, spec: SandboxSpec = SPEC) -> LocalSandbox:
        return await self.provider.create(spec, attempt="bench")

    async def cold(self, command: Command) -> float:
        """From asking for a box to the end of a command in it; milliseconds. Its close is off the clock."""
        began = time.perf_counter()
        box = await self.create()
        try:
            result = await box.exec(command)
            took = time.perf_counter() - began
        finally:
            await box.close()
        good(result)
        return 1e3 * took

    async def rest(self, seconds: float = 5.0) -> None:
        """Until the keeper has those that it keeps ready and those that are open, and had a moment for them."""
        ready = WARM_SANDBOXES + FORKED_SPARES
        await _until(
            lambda: len(processes.list_children(self.keeper)) <= ready + len(self.provider._open), seconds
        )
        await asyncio.sleep(0.01)

    async def live(self, box: LocalSandbox) -> float:
        began = time.perf_counter()
        result = await box.exec(Command(argv=COMMAND))
        took = time.perf_counter() - began
        good(result)
        return 1e3 * took

    # ----------------------------------------------------------------------------------------- snapshots

    async def snapshots(self, times: int) -> tuple[list[float], list[float], str]:
        """Milliseconds of each snapshot and of each fork from one, with a layer of 200 files; or why none."""
        taken: list[float] = []
        forked: list[float] = []
        box = await self.create()
        try:
            good(await box.exec(Command(argv=("python3", "-c", _MOUNTAIN))))
            for _ in range(times):
                began = time.perf_counter()
                name = await box.snapshot()
                taken.append(1e3 * (time.perf_counter() - began))
                began = time.perf_counter()
                twin = await box.fork(name)
                forked.append(1e3 * (time.perf_counter() - began))
                try:
                    good(await twin.exec(Command(argv=("test", "-s", f"f{FILES - 1}"))))
                finally:
                    await twin.close()
                await self.rest()
        except SandboxError as error:
            if error.code != "sandbox.refused":
                raise
            return [], [], str(error)
        finally:
            await box.close()
        return taken, forked, ""

    # --------------------------------------------------------------------------------------- many at once

    async def alive(self, count: int) -> Thousand:
        """That many at once, each of which has answered a command."""
        before, own = pss_mb(self.keeper), memory_mb(os.getpid())
        began = time.perf_counter()
        boxes: list[LocalSandbox] = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.create()) for _ in range(count)]
            boxes = [task.result() for task in tasks]
            created = time.perf_counter() - began
            for result in await asyncio.gather(*(box.exec(Command(argv=COMMAND)) for box in boxes)):
                good(result)
            seconds = time.perf_counter() - began
            after = pss_mb(self.keeper)
            grown = None if before is None or after is None else (after - before) / count
            kernel = [kernel_mb(box) for box in boxes[:: max(1, count // 100)]]
            known = [one for one in kernel if one is not None]
            owner = (memory_mb(os.getpid()) - own) / count
        finally:
            began = time.perf_counter()
            await asyncio.gather(*(box.close() for box in boxes))
            closed = time.perf_counter() - began
        return Thousand(seconds, created, closed, grown, sum(known) / len(known) if known else None, owner)

    # --------------------------------------------------------------------------------------------- bombs

    async def bomb_closed(self) -> float:
        """Milliseconds from closing a box with a fork bomb at its limit to everything gone."""
        box = await self.create(ROOMY)
        try:
            process = await box.start(Command(argv=("python3", "-c", BOMB)))
            async with asyncio.timeout(30):
                async for _, chunk in process.output():
                    if b"full" in chunk:
                        break
        except BaseException:
            await box.close()
            raise
        began = time.perf_counter()
        await box.close()
        return 1e3 * (time.perf_counter() - began)

    async def bomb_limited(self) -> float:
        """Milliseconds from a fork bomb's time limit to its result, when its whole tree is dead."""
        box = await self.create(ROOMY)
        try:
            began = time.perf_counter()
            result = await box.exec(Command(argv=("python3", "-c", BOMB), wall=BOMB_SECONDS))
            took = time.perf_counter() - began
            left = processes.list_children(pid_of(box))
        finally:
            await box.close()
        if result.status != "time_limit" or left:
            raise RuntimeError(
                f"a fork bomb ended as {result.status} with {len(left)} left: {result.stderr[-300:]!r}"
            )
        return 1e3 * (took - BOMB_SECONDS)


@contextlib.asynccontextmanager
async def boxes_of_our_own() -> AsyncIterator[Boxes]:
    """A keeper for this bench alone, with its warm boxes ready."""
    with tempfile.TemporaryDirectory(prefix="rookery-bench-") as folder:
        provider = LocalProvider(ProviderHome(folder=Path(folder), run=f"bench-{os.getpid()}"))
        if problems := provider.check(SPEC):
            raise UsageError(f"there is nothing to measure: {' '.join(problems)}")
        try:
            keeper = int((await (await provider.keeper()).status())["pid"])
            await _until(lambda: len(processes.list_children(keeper)) >= WARM_SANDBOXES, 20)
            yield Boxes(provider, keeper)
        finally:
            await provider.close()


async def _until(done: Callable[[], bool], seconds: float) -> None:
    """Nothing tells us of another process's children: we look."""
    end = time.monotonic() + seconds
    for _ in iter(lambda: not done() and time.monotonic() < end, False):
        await asyncio.sleep(0.001)


def pid_of(box: LocalSandbox) -> int:
    """Of its first process, as the host counts."""
    assert box._handle is not None
    return box._handle.pid


def pss_mb(top: int) -> float | None:
    """Megabytes of a process and of all that descend from it, shared pages divided; None where we may not know."""
    total, todo = 0, [top]
    while todo:
        pid = todo.pop()
        todo += processes.list_children(pid)
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        except OSError:
            return None
        found = text.partition(b"\nPss:")[2].split(None, 1)
        total += int(found[0]) if found else 0
    return total / 1024


def memory_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def kernel_mb(box: LocalSandbox) -> float | None:
    """What the kernel itself holds for a box, where its group tells."""
    folder = box._handle.memory_cgroup if box._handle is not None else ""
    with contextlib.suppress(OSError, ValueError):
        if (v1 := Path(folder, "memory.kmem.usage_in_bytes")).exists():
            return int(v1.read_text()) / 2**20
        for line in Path(folder, "memory.stat").read_text().splitlines():
            if line.startswith("kernel "):
                return int(line.split()[1]) / 2**20
    return None
