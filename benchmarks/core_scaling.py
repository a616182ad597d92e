"""Benchmark `core-scaling`: isolated Python runs per second on all cores, compared with two of them.

Method: the same runs (create, warm Python, close) in a process that is restricted to two cores, together with its
keeper, and in one that may use all cores, alternately, each at its best concurrency.
"""

import asyncio
import json
import os
import sys
from statistics import median

from benchmarks import CHECKOUT, Progress, Result
from benchmarks.sandbox_peers import per_second
from benchmarks.sandbox_workloads import open_workloads, python_command

NAME = "core-scaling"
FEW, MANY = 2, 16
WIDTHS = (4, 8, 16, 32, 64)


async def run(quick: bool, progress: Progress) -> list[Result]:
    cores = sorted(os.sched_getaffinity(0))
    rates: dict[int, list[float]] = {FEW: [], MANY: []}
    if len(cores) >= MANY:
        for at in range(1 if quick else 3):
            for count, measured in rates.items():
                progress(f"round {at + 1}: {count} cores")
                measured.append(await _measure_in_process(cores[:count], 1.0 if quick else 3.0))
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
    """Return the best rate of another process that may only use these cores."""
    program = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.core_scaling",
        json.dumps([cores, seconds]),
        stdout=asyncio.subprocess.PIPE,
        cwd=CHECKOUT,
    )
    output, _ = await program.communicate()
    if program.returncode:
        raise RuntimeError(f"the measuring process exited with {program.returncode}")
    return float(output)


async def _best_rate(seconds: float) -> float:
    command = python_command(warm=True)
    async with open_workloads() as workloads:
        return max([await per_second(lambda: workloads.cold_start_ms(command), w, seconds) for w in WIDTHS])


def main() -> None:
    import uvloop

    cores, seconds = json.loads(sys.argv[1])
    os.sched_setaffinity(0, cores)
    print(uvloop.run(_best_rate(seconds)))


if __name__ == "__main__":
    main()
