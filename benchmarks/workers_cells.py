"""What the `workers` bench does with a worker, and with the peer that runs the same cells.

Promises:
- a cell that does not say what it should fails the bench: no figure from a broken run;
- a savepoint that could not be made fails it too: every cell that is timed has one behind it.
"""

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from benchmarks.peers import run_peer
from rookery.core import SandboxSpec, UsageError
from rookery.sandboxes import ProviderHome
from rookery.sandboxes.local.provider import LocalProvider
from rookery.workers import Cell, CellLimits, Worker, WorkerLimits, sandbox_for

CELL = "y = {n}\nprint(y)\ny * 2"
PAUSE = 0.01
"""Seconds between cells, for both: a model takes longer."""
LIMITS = WorkerLimits(wall=60.0, memory=1 << 30)
SPIN_SECONDS = 0.05
TREE = """
import os
for _ in range({count}):
    if os.fork() == 0:
        os.setsid()
        while True: pass
while True: pass
"""
PEER_SECONDS = 120.0


def heap_of(megabytes: int) -> str:
    return f"heap = [bytes(1000) for _ in range({megabytes} * 1000)]\nkept = 42"


class Cells:
    """A worker, and what is timed on it; all figures are milliseconds."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.count = 0

    async def cells(self, count: int) -> tuple[list[float], list[float]]:
        """Each cell, and the savepoint behind it."""
        times, saves = [], []
        for _ in range(count):
            saves.append(await self._saved())
            self.count += 1
            source = CELL.replace("{n}", str(self.count))
            began = time.perf_counter()
            cell = await self.worker.run(source)
            times.append(1e3 * (time.perf_counter() - began))
            _expect(cell, cell.value == str(2 * self.count) and cell.stdout == f"{self.count}\n")
        return times, saves

    async def recover_ms(self, children: int) -> float:
        """From the limit of a cell that spins, with children that do, to its result; and the next cell, on top."""
        await self._saved()
        began = time.perf_counter()
        cell = await self.worker.run(TREE.format(count=children), limits=CellLimits(wall=SPIN_SECONDS))
        took = time.perf_counter() - began - SPIN_SECONDS
        await self._saved()
        began = time.perf_counter()
        found = await self.worker.run("kept")
        took += time.perf_counter() - began
        _expect(cell, cell.status == "time_limit" and cell.recovered == "kept")
        _expect(found, found.value == "42")
        return 1e3 * took

    async def notice_ms(self) -> float:
        await self._saved()
        cell = await self.worker.run("import os, time\nprint(time.time(), flush=True)\nos._exit(1)")
        took = time.time() - float(cell.stdout)
        _expect(cell, cell.status == "crash" and cell.recovered == "kept")
        return 1e3 * took

    async def _saved(self) -> float:
        saved = await self.worker.savepoint()
        if not saved.made:
            raise RuntimeError(f"there is no savepoint: {saved.reason}")
        await asyncio.sleep(PAUSE)
        return 1e3 * saved.seconds


def _expect(cell: Cell, good: bool) -> None:
    if not good:
        raise RuntimeError(f"a cell ended as {cell}")


@contextlib.asynccontextmanager
async def cells_of_our_own(heap: int) -> AsyncIterator[Cells]:
    """A worker in a local box, with a heap of this many megabytes."""
    spec = sandbox_for(LIMITS, SandboxSpec(provider="local"))
    with tempfile.TemporaryDirectory(prefix="rookery-bench-") as folder:
        provider = LocalProvider(ProviderHome(folder=Path(folder), run=f"bench-{os.getpid()}"))
        if problems := provider.check(spec):
            raise UsageError(f"there is nothing to measure: {' '.join(problems)}")
        try:
            sandbox = await provider.create(spec, attempt="bench")
            async with await Worker.open(sandbox, limits=LIMITS) as worker:
                _expect(cell := await worker.run(heap_of(heap)), cell.ok)
                made = Cells(worker)
                await made.cells(5)  # the first ones are slower
                yield made
        finally:
            await provider.close()


async def ipykernel_ms(heap: int, count: int) -> list[float] | str:
    """The same cells in ipykernel, or why there are none."""
    args = ["--cells", str(count), "--setup", heap_of(heap), "--cell", CELL, "--pause", str(PAUSE)]
    answer = await run_peer("ipykernel", "ipykernel_cells.py", args, timeout=PEER_SECONDS)
    return answer if isinstance(answer, str) else [float(one) for one in answer["cells"]]
