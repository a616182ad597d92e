"""Cells of the benchmark `workers`: timed on a worker in a local sandbox, and in ipykernel as the peer.

Method:
- a cell with an unexpected result fails the benchmark;
- a savepoint that could not be made fails it too.
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
"""Seconds between cells, for both sides: a model takes longer."""
LIMITS = WorkerLimits(wall=60.0, memory=1 << 30)
SPIN_SECONDS = 0.05
SPIN_WITH_CHILDREN = """
import os
for _ in range({count}):
    if os.fork() == 0:
        os.setsid()
        while True: pass
while True: pass
"""
PEER_SECONDS = 120.0


def heap_source(megabytes: int) -> str:
    return f"heap = [bytes(1000) for _ in range({megabytes} * 1000)]\nkept = 42"


class CellTimer:
    """Measures milliseconds of cells on a worker."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.count = 0

    async def cells(self, count: int) -> tuple[list[float], list[float]]:
        """Run cells and return the times of the cells and of their savepoints."""
        times, savepoints = [], []
        for _ in range(count):
            savepoints.append(await self._make_savepoint())
            self.count += 1
            source = CELL.replace("{n}", str(self.count))
            began = time.perf_counter()
            cell = await self.worker.run(source)
            times.append(1e3 * (time.perf_counter() - began))
            _expect(cell, cell.value == str(2 * self.count) and cell.stdout == f"{self.count}\n")
        return times, savepoints

    async def recover_ms(self, children: int) -> float:
        """Measure a cell that spins with children from its time limit to its result, plus the next cell."""
        await self._make_savepoint()
        began = time.perf_counter()
        cell = await self.worker.run(
            SPIN_WITH_CHILDREN.format(count=children), limits=CellLimits(wall=SPIN_SECONDS)
        )
        took = time.perf_counter() - began - SPIN_SECONDS
        await self._make_savepoint()
        began = time.perf_counter()
        after = await self.worker.run("kept")
        took += time.perf_counter() - began
        _expect(cell, cell.status == "time_limit" and cell.recovered == "kept")
        _expect(after, after.value == "42")
        return 1e3 * took

    async def crash_ms(self) -> float:
        await self._make_savepoint()
        cell = await self.worker.run("import os, time\nprint(time.time(), flush=True)\nos._exit(1)")
        took = time.time() - float(cell.stdout)
        _expect(cell, cell.status == "crash" and cell.recovered == "kept")
        return 1e3 * took

    async def _make_savepoint(self) -> float:
        savepoint = await self.worker.savepoint()
        if not savepoint.made:
            raise RuntimeError(f"the savepoint was not made: {savepoint.reason}")
        await asyncio.sleep(PAUSE)
        return 1e3 * savepoint.seconds


def _expect(cell: Cell, expected: bool) -> None:
    if not expected:
        raise RuntimeError(f"unexpected result of a cell: {cell}")


@contextlib.asynccontextmanager
async def open_cell_timer(heap: int) -> AsyncIterator[CellTimer]:
    """Open a worker in a local sandbox with a heap of this many megabytes."""
    spec = sandbox_for(LIMITS, SandboxSpec(provider="local"))
    with tempfile.TemporaryDirectory(prefix="rookery-bench-") as folder:
        provider = LocalProvider(ProviderHome(folder=Path(folder), run=f"bench-{os.getpid()}"))
        if problems := provider.check(spec):
            raise UsageError(f"local sandboxes cannot run here: {' '.join(problems)}")
        try:
            sandbox = await provider.create(spec, attempt="bench")
            async with await Worker.open(sandbox, limits=LIMITS) as worker:
                _expect(cell := await worker.run(heap_source(heap)), cell.ok)
                timer = CellTimer(worker)
                await timer.cells(5)  # the first ones are slower
                yield timer
        finally:
            await provider.close()


async def ipykernel_ms(heap: int, count: int) -> list[float] | str:
    """Run the same cells in ipykernel and return their times, or why there are none."""
    args = ["--cells", str(count), "--setup", heap_source(heap), "--cell", CELL, "--pause", str(PAUSE)]
    answer = await run_peer("ipykernel", "ipykernel_cells.py", args, timeout=PEER_SECONDS)
    return answer if isinstance(answer, str) else [float(one) for one in answer["cells"]]
