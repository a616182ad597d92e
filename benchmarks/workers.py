"""Benchmark `workers`: the cost of cells with savepoints beside ipykernel, of recovery, and of whole programs.

Method:
- every timed cell has a savepoint, made before its clock starts; the time of savepoints is a separate row;
- the peer runs the same cells with the same heap, alternately with ours;
- recovery counts from the time limit to the result, plus the next cell, which must find the restored state.
"""

from statistics import median
from typing import NamedTuple

from benchmarks import Progress, Result, percentiles
from benchmarks.programs import program_rates
from benchmarks.worker_cells import ipykernel_ms, open_cell_timer

NAME = "workers"
PEER = "ipykernel"
CHILDREN = 8


class Size(NamedTuple):
    """Numbers of repetitions of each measurement."""

    rounds: int
    cells: int
    recoveries: int


FULL = Size(rounds=5, cells=100, recoveries=60)
QUICK = Size(rounds=2, cells=40, recoveries=15)


async def run(quick: bool, progress: Progress) -> list[Result]:
    size = QUICK if quick else FULL
    return [
        *await _cell_rows(size, progress),
        *await _recovery_rows(size, progress),
        *await program_rates(quick, progress),
    ]


async def _cell_rows(size: Size, progress: Progress) -> list[Result]:
    results = []
    for heap in (10, 400):
        ours: list[float] = []
        saved: list[float] = []
        theirs: list[float] = []
        note = ""
        async with open_cell_timer(heap) as worker:
            for turn in range(size.rounds):
                progress(f"cells with {heap} MB of heap, turn {turn + 1} of {size.rounds}")
                times, saves = await worker.cells(size.cells)
                ours += times
                saved += saves
                answer = await ipykernel_ms(heap, size.cells)
                if isinstance(answer, str):
                    note = answer
                else:
                    theirs += answer
        suffix = "" if heap == 10 else f"_{heap}mb"
        results += [
            Result(
                name=f"cell{suffix}_ms",
                unit="ms",
                ours=median(ours),
                peer=PEER,
                theirs=median(theirs) if theirs else None,
                target="<= 1.2",
                note=note or percentiles(ours),
            ),
            Result(
                name=f"savepoint{suffix}_ms",
                unit="ms",
                ours=median(saved),
                note=f"{percentiles(saved)}; made between the timed cells",
            ),
        ]
    return results


async def _recovery_rows(size: Size, progress: Progress) -> list[Result]:
    async with open_cell_timer(10) as worker:
        progress(f"recovery from a spinning cell with {CHILDREN} children")
        recovered = [await worker.recover_ms(CHILDREN) for _ in range(size.recoveries)]
        progress("detection of a crash")
        noticed = [await worker.crash_ms() for _ in range(size.recoveries)]
    return [
        Result(
            name="recover_ms",
            unit="ms",
            ours=median(recovered),
            target="<= 15",
            note=f"time limit to result, and the next cell, {CHILDREN} children; {percentiles(recovered)}",
        ),
        Result(
            name="notice_crash_ms",
            unit="ms",
            ours=median(noticed),
            target="<= 5",
            note=f"from os._exit to the cell's result, restored to its savepoint; {percentiles(noticed)}",
        ),
    ]
