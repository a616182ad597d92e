# ruff: noqa: T201  (a program: its output is for people)
"""Create, use and close sandboxes for a long time, and check that nothing grows (`--cycles 20000`).

Each cycle creates a sandbox, runs a command that must succeed, and closes the sandbox. Measurements are taken
while no sandbox is open and the keeper's warm ones are ready. Ctrl-C ends the program with the measurements so
far. Exit code 0: nothing grew; 1: something grew; 2: this machine cannot run sandboxes.

Columns: memory of keeper and owner (RSS, MB), descriptors of both, mounts that the keeper sees, and the number of
leases, cgroups and namespaces. The rate of the last measurements must not fall below 0.7 of the first ones.

With `--alive 1000`, the time to create a sandbox and run the command is measured first with no other sandbox and
then, at the same concurrency of one, beside that many idle sandboxes. It must not exceed 1.3 times the former.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rookery.core import SandboxSpec
from rookery.sandbox_runtime import processes
from rookery.sandbox_runtime.cgroups import MAX_IDLE
from rookery.sandbox_runtime.network_namespaces import MAX_FREE
from rookery.sandboxes import Command, ProviderHome
from rookery.sandboxes.local.keeper_client import WARM_SANDBOXES, list_keeper_children
from rookery.sandboxes.local.provider import LocalProvider

SPEC = SandboxSpec(provider="local", memory=64 << 20, pids=32, disk=16 << 20, wall=60.0)
PARALLEL = 8
WARM_UP = 200
TOLERANCE = 3
"""Number of descriptors that may vary."""
MEMORY_MB = 4.0
MIN_RATE, MAX_SLOWDOWN = 0.7, 1.3
SAMPLES = 40


class Figures(NamedTuple):
    """Measurements that must not grow."""

    keeper_mb: float
    owner_mb: float
    keeper_fds: int
    owner_fds: int
    mounts: int
    leases: int
    groups: int
    namespaces: int

    def find_growth(self, before: "Figures") -> list[str]:
        """Return the values that exceed those of `before` by more than their tolerance."""
        # A keeper keeps some network namespaces and cgroups for reuse, up to a limit.
        allowed = {
            "keeper_mb": MEMORY_MB,
            "owner_mb": MEMORY_MB,
            "keeper_fds": TOLERANCE + MAX_FREE,
            "owner_fds": TOLERANCE,
            "groups": MAX_IDLE * 4,
        }
        return [
            f"{name} {was:g} → {now:g}"
            for name, was, now in zip(self._fields, before, self, strict=True)
            if now > was + allowed.get(name, 0)
        ]


class Soak:
    """Runs cycles with a provider and measures it and its keeper."""

    def __init__(self, provider: LocalProvider, folder: Path, keeper: int, about: dict[str, object]) -> None:
        self.provider = provider
        self.folder = folder
        self.keeper = keeper
        v1 = about["v1"]
        assert isinstance(v1, dict)
        self._cgroup_roots = {Path(str(top)) for top in (about["unified"], *v1.values()) if top}
        self._prefix = f"{os.getpid()}-"

    @classmethod
    async def open(cls, provider: LocalProvider, folder: Path) -> "Soak":
        about = await (await provider.keeper()).status()
        return cls(provider, folder, int(about["pid"]), about)

    async def run_cycle(self, command: Command) -> None:
        sandbox = await self.provider.create(SPEC, attempt="soak")
        try:
            result = await sandbox.exec(command)
        finally:
            await sandbox.close()
        if not result.ok:
            raise RuntimeError(f"a command ended as {result.status}: {result.stderr[-300:]!r} {result.detail}")

    async def median_cycle_ms(self, command: Command) -> float:
        times = []
        for _ in range(SAMPLES):
            began = time.perf_counter()
            await self.run_cycle(command)
            times.append(1e3 * (time.perf_counter() - began))
        return median(times)

    async def find_slowdown(self, alive: int, command: Command) -> float:
        """Return how many times longer a cycle takes beside `alive` idle sandboxes than alone."""
        before = await self.median_cycle_ms(command)
        sandboxes = []
        try:
            for _ in range(alive):
                sandboxes.append(await self.provider.create(SPEC, attempt="soak"))  # noqa: PERF401
            beside = await self.median_cycle_ms(command)
        finally:
            await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))
        after = await self.median_cycle_ms(command)
        print(
            f"a cycle alone {before:.1f} ms, beside {alive:,} sandboxes {beside:.1f} ms, then alone {after:.1f} ms"
        )
        return 2 * beside / (before + after)

    async def run_cycles(self, count: int, command: Command, *, parallel: int = PARALLEL) -> None:
        left = iter(range(count))

        async def worker() -> None:
            for _ in left:
                await self.run_cycle(command)

        async with asyncio.TaskGroup() as group:
            for _ in range(parallel):
                group.create_task(worker())

    async def wait_until_idle(self, *, seconds: float = 60.0) -> None:
        """Wait until the keeper has its warm sandboxes and nothing is left of others."""
        await wait_until(
            lambda: len(list_keeper_children(self.keeper)) == WARM_SANDBOXES and not self._count_leases(),
            seconds,
        )

    def measure(self) -> Figures:
        return Figures(
            keeper_mb=_memory_mb(self.keeper),
            owner_mb=_memory_mb(os.getpid()),
            keeper_fds=len(os.listdir(f"/proc/{self.keeper}/fd")),  # noqa: PTH208
            owner_fds=len(os.listdir("/proc/self/fd")),  # noqa: PTH208
            mounts=Path(f"/proc/{self.keeper}/mountinfo").read_text().count("\n"),
            leases=self._count_leases(),
            groups=sum(1 for top in self._cgroup_roots for _ in top.glob(f"{self._prefix}*")),
            namespaces=_count_namespaces(self.keeper),
        )

    def _count_leases(self) -> int:
        return sum(1 for _ in (self.folder / "leases").glob("*"))


async def wait_until(done: Callable[[], bool], seconds: float) -> None:
    """Poll until a condition holds: the children of another process cause no event here."""
    async with asyncio.timeout(seconds):
        for _ in iter(done, True):
            await asyncio.sleep(0.005)


def _memory_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _count_namespaces(keeper: int) -> int:
    """Return the number of mount namespaces of the keeper's children."""
    found = set()
    for pid in processes.list_children(keeper):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/{pid}/ns/mnt"))  # noqa: PTH115
    return len(found)


async def soak(cycles: int, command: Command, every: int, alive: int) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with tempfile.TemporaryDirectory(prefix="rookery-soak-") as name:
        provider = LocalProvider(ProviderHome(folder=Path(name), run=f"soak-{os.getpid()}"))
        if problems := provider.check(SPEC):
            print(" ".join(problems), file=sys.stderr)
            return 2
        try:
            monitor = await Soak.open(provider, Path(name))
            await monitor.run_cycles(WARM_UP, command)
            await monitor.wait_until_idle()
            slowdown = await monitor.find_slowdown(alive, command) if alive else 1.0
            await monitor.wait_until_idle()
            rates: list[float] = []
            first = last = monitor.measure()
            print(f"{'cycles':>8} {'1/s':>6} " + " ".join(f"{field:>10}" for field in Figures._fields))
            _show(0, 0.0, first)
            done = 0
            while done < cycles and not stop.is_set():
                now = min(every, cycles - done)
                began = time.perf_counter()
                await monitor.run_cycles(now, command)
                rate = now / (time.perf_counter() - began)
                rates.append(rate)
                await monitor.wait_until_idle()
                done += now
                last = monitor.measure()
                _show(done, rate, last)
        finally:
            await provider.close()
    grown = last.find_growth(first)
    tenth = max(1, len(rates) // 10)
    if rates and median(rates[-tenth:]) < MIN_RATE * median(rates[:tenth]):
        grown.append(f"rate {median(rates[:tenth]):.0f} → {median(rates[-tenth:]):.0f}")
    if slowdown > MAX_SLOWDOWN:
        grown.append(f"time beside {alive:,} sandboxes: {slowdown:.2f}x")
    print(f"{done:,} cycles: {'flat' if not grown else 'grew: ' + ', '.join(grown)}")
    return 1 if grown else 0


def _show(done: int, rate: float, figures: Figures) -> None:
    print(
        f"{done:>8,} {rate:>6.0f} "
        + " ".join(f"{figure:>10.1f}" if isinstance(figure, float) else f"{figure:>10}" for figure in figures),
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Create, use and close sandboxes; nothing may grow.")
    parser.add_argument("--cycles", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=1_000, help="cycles between two measurements")
    parser.add_argument("--alive", type=int, default=0, help="measure beside this many idle sandboxes first")
    parser.add_argument(
        "command", nargs="*", default=["true"], help="command that each sandbox runs (default: true)"
    )
    args = parser.parse_args()
    return asyncio.run(soak(args.cycles, Command(argv=tuple(args.command)), max(1, args.every), args.alive))


if __name__ == "__main__":
    sys.exit(main())
