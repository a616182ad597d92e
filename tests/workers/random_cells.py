"""Random sequences of good and failing cells, compared with a model of the worker's state.

`python -m tests.workers.random_cells --cells 1000 --seed 1 local subprocess` is the long form of the test.
"""

# ruff: noqa: E501  (a cell is read best as it is)

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

from rookery.sandboxes import ProviderHome, open_provider
from rookery.workers import CellLimits, Worker, sandbox_for
from tests.workers.conftest import LIMITS

SHORT_LIMITS = CellLimits(wall=0.1)
FAILING_CELLS: list[tuple[str, str, tuple[str, ...], CellLimits | None]] = [
    ("loop", "{set}\nwhile True: pass", ("time_limit",), SHORT_LIMITS),
    ("loop of children", "{set}\nimport os\nfor _ in range(3):\n    if os.fork() == 0:\n        os.setsid()\n        while True: pass\nwhile True: pass", ("time_limit",), SHORT_LIMITS),
    ("processor", "{set}\nwhile True: pass", ("time_limit",), CellLimits(cpu_seconds=0.05)),
    ("exit", "{set}\nimport os\nos._exit(7)", ("crash",), None),
    ("kill", "{set}\nimport os\nos.kill(os.getpid(), 9)", ("crash",), None),
    ("fault", "{set}\nimport ctypes\nctypes.string_at(0)", ("crash",), None),
    ("closed", "{set}\nimport os\nos.closerange(3, 4096)", ("crash",), None),
    ("memory", "{set}\nx = bytearray(300 << 20)", ("memory_limit",), None),
    ("flood", "{set}\nwhile True: print('x' * 5000)", ("output_limit",), None),
]  # fmt: skip
RAISING_CELLS: list[tuple[str, str]] = [
    ("1 / 0", "runtime"),
    ("undefined_name", "runtime"),
    ("exit(1)", "runtime"),
    ("raise KeyboardInterrupt", "runtime"),
    ("def broken(:", "syntax"),
    ("a b", "syntax"),
    ("input()", "runtime"),
]


class RandomCells:
    """Runs random cells in a worker and checks each result against a model of its state."""

    def __init__(self, worker: Worker, seed: int) -> None:
        self.worker = worker
        self.random = random.Random(seed)
        self.names: dict[str, int] = {}
        self.seen: Counter[str] = Counter()

    async def step(self) -> None:
        name = f"v{self.random.randrange(20)}"
        value = self.random.randrange(1000)
        setting = f"{name} = {value}"
        kind = self.random.choices(("set", "get", "print", "raise", "half", "bad"), (4, 4, 2, 2, 1, 4))[0]
        if kind == "set":
            cell = await self.worker.run(f"{setting}\n{name} + 1")
            self.names[name] = value
            assert (cell.status, cell.value) == ("ok", str(value + 1)), cell
        elif kind == "get":
            cell = await self.worker.run("{k: v for k, v in sorted(globals().items()) if k[0] == 'v'}")
            assert cell.value == repr(dict(sorted(self.names.items()))), cell
        elif kind == "print":
            cell = await self.worker.run(f"print({value})\nimport sys; print({value}, file=sys.stderr)")
            assert (cell.status, cell.stdout, cell.stderr) == ("ok", f"{value}\n", f"{value}\n"), cell
        elif kind == "raise":
            source, status = self.random.choice(RAISING_CELLS)
            cell = await self.worker.run(source)
            assert (cell.status, cell.recovered) == (status, "none"), cell
        elif kind == "half":  # what a cell did before it failed stays, as in any Python session
            cell = await self.worker.run(f"{setting}\n1 / 0")
            self.names[name] = value
            assert (cell.status, cell.recovered) == ("runtime", "none"), cell
        else:
            what, source, wanted, limits = self.random.choice(FAILING_CELLS)
            cell = await self.worker.run(source.format(set=setting), limits=limits)
            assert cell.status in wanted, (what, cell)
            assert cell.recovered == "kept", (what, cell)
        self.seen[cell.status] += 1


async def main(provider_name: str, cells: int, seed: int) -> None:
    with tempfile.TemporaryDirectory(prefix="rookery-cells-") as folder:
        provider = open_provider(provider_name, ProviderHome(folder=Path(folder), run=f"cells-{os.getpid()}"))
        try:
            sandbox = await provider.create(sandbox_for(LIMITS), attempt="cells")
            async with await Worker.open(sandbox, limits=LIMITS) as worker:
                cells_run = RandomCells(worker, seed)
                began = time.monotonic()
                for _ in range(cells):
                    await cells_run.step()
                print(
                    f"{provider_name}: {cells} cells in {time.monotonic() - began:.1f} s, {dict(cells_run.seen)}"
                )
        finally:
            await provider.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("providers", nargs="+")
    parser.add_argument("--cells", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for one in args.providers:
        asyncio.run(main(one, args.cells, args.seed))
