"""Benchmark `core-scaling`: isolated Python runs per second on all cores, compared with two of them.

Method: the same runs (create, warm Python, close) on two cores and on 16, alternately. As in a run, one process
starts the keepers, and several others, one for every two cores, create sandboxes through them.
"""

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks import CHECKOUT, Progress, Result
from benchmarks.sandbox_peers import per_second
from benchmarks.sandbox_workloads import SPEC, python_command, require_success
from rookery.sandboxes import ProviderHome
from rookery.sandboxes.local.provider import LocalProvider

NAME = "core-scaling"
FEW, MANY = 2, 16
CORES_PER_OWNER = 2
WIDTH = 8
"""Number of runs in progress in each owner."""


async def run(quick: bool, progress: Progress) -> list[Result]:
    cores = sorted(os.sched_getaffinity(0))
    rates: dict[int, list[float]] = {FEW: [], MANY: []}
    if len(cores) >= MANY:
        for at in range(1 if quick else 3):
            for count, measured in rates.items():
                progress(f"round {at + 1}: {count} cores")
                measured.append(await _measure_in_process(cores[:count], 2.0 if quick else 5.0))
    return [
        Result(
            name="runs_16_cores",
            unit="1/s",
            ours=median(rates[MANY]) if rates[MANY] else None,
            peer=f"{FEW} cores",
            theirs=median(rates[FEW]) if rates[FEW] else None,
            target=">= 6x",
            lower_is_better=False,
            note="" if rates[MANY] else f"this machine has {len(cores)} cores, and {MANY} are needed",
        )
    ]


async def _measure_in_process(cores: list[int], seconds: float) -> float:
    """Return the rate of a run with these cores, in processes of its own."""
    return float((await _start_python("run", cores, seconds))[0])


async def _start_python(*arguments: object) -> list[str]:
    """Run this module as a program and return what it prints."""
    program = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.core_scaling",
        json.dumps(arguments),
        stdout=asyncio.subprocess.PIPE,
        cwd=CHECKOUT,
    )
    output, _ = await program.communicate()
    if program.returncode:
        raise RuntimeError(f"a measuring process exited with {program.returncode}")
    return output.decode().split()


async def _run_owners(cores: list[int], seconds: float) -> float:
    """Start the keepers, and return the runs per second of all owners together."""
    os.sched_setaffinity(0, cores)
    with tempfile.TemporaryDirectory(prefix="rookery-bench-") as folder:
        provider = LocalProvider(ProviderHome(folder=Path(folder), run=f"bench-{os.getpid()}"))
        try:
            await provider.start_keeper()
            owners = max(1, len(cores) // CORES_PER_OWNER)
            rates = await asyncio.gather(*(_start_python("own", folder, seconds) for _ in range(owners)))
        finally:
            await provider.close()
    return sum(float(rate[0]) for rate in rates)


async def _own_sandboxes(folder: str, seconds: float) -> float:
    provider = LocalProvider(ProviderHome(folder=Path(folder), run=f"bench-{os.getpid()}"))
    command = python_command(warm=True)

    async def once() -> None:
        sandbox = await provider.create(SPEC, attempt="bench")
        try:
            require_success(await sandbox.exec(command))
        finally:
            await sandbox.close()

    try:
        await per_second(once, WIDTH, seconds / 4)
        return await per_second(once, WIDTH, seconds)
    finally:
        await provider.close()


def main() -> None:
    import uvloop

    role, where, seconds = json.loads(sys.argv[1])
    print(uvloop.run((_run_owners if role == "run" else _own_sandboxes)(where, seconds)))


if __name__ == "__main__":
    main()
