"""Benchmark `workers`: the cost of a cell with a savepoint, of returning to a savepoint, and of whole programs.

Promises:
- every timed cell has a savepoint behind it, made before its clock starts; what that took is a row of its own;
- the peer runs the same cells, with the same heap, by turns with ours;
- going back counts from the moment of the limit to the result, and a next cell on top, which finds the state.
"""

from statistics import median
from typing import NamedTuple

from benchmarks import Progress, Result
from benchmarks.programs import program_rates
from benchmarks.workers_cells import cells_of_our_own, ipykernel_ms

NAME = "workers"
PEER = "ipykernel"
TREE = 8


class Size(NamedTuple):
    """How often each thing is done."""

    rounds: int
    cells: int
    ends: int


FULL = Size(rounds=5, cells=100, ends=60)
QUICK = Size(rounds=2, cells=40, ends=15)


async def run(quick: bool, progress: Progress) -> list[Result]:
    size = QUICK if quick else FULL
    return [
        *await _cells(size, progress),
        *await _ends(size, progress),
        *await program_rates(quick, progress),
    ]


async def _cells(size: Size, progress: Progress) -> list[Result]:
    results = []
    for heap in (10, 400):
        ours: list[float] = []
        saved: list[float] = []
        theirs: list[float] = []
        note = ""
        async with cells_of_our_own(heap) as worker:
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
        word = "" if heap == 10 else f"_{heap}mb"
        results += [
            Result(
                name=f"cell{word}_ms",
                unit="ms",
                ours=median(ours),
                peer=PEER,
                theirs=median(theirs) if theirs else None,
                target="<= 1.2",
                note=note or _spread(ours),
            ),
            Result(
                name=f"savepoint{word}_ms",
                unit="ms",
                ours=median(saved),
                note=f"{_spread(saved)}; made while nobody waits",
            ),
        ]
    return results


async def _ends(size: Size, progress: Progress) -> list[Result]:
    async with cells_of_our_own(10) as worker:
        progress(f"going back from a spinning cell with {TREE} children")
        recovered = [await worker.recover_ms(TREE) for _ in range(size.ends)]
        progress("noticing a crash")
        noticed = [await worker.notice_ms() for _ in range(size.ends)]
    return [
        Result(
            name="recover_ms",
            unit="ms",
            ours=median(recovered),
            target="<= 15",
            note=f"from the limit to the result, and the next cell, {TREE} children; {_spread(recovered)}",
        ),
        Result(
            name="notice_crash_ms",
            unit="ms",
            ours=median(noticed),
            target="<= 5",
            note=f"from os._exit to the cell's result, back at its savepoint; {_spread(noticed)}",
        ),
    ]


def _spread(times: list[float]) -> str:
    ordered = sorted(times)
    tenth = len(ordered) // 10
    return f"{len(ordered)} times, tenth {ordered[tenth]:.2f}, ninetieth {ordered[-1 - tenth]:.2f}"
