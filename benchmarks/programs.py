"""The `programs` bench: what `run_code` costs for each program, beside a bare `python3` for each.

Promises:
- every program is another text, reads its input and is checked by what it printed: a wrong answer fails the bench;
- ours and the peer's take turns in one run, as many at a time;
- the floor, a sandbox made, one warm Python in it and its end, without anything of `run_code`, is measured beside.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from statistics import median
from typing import NamedTuple

from benchmarks import Progress, Result
from benchmarks.sandbox_peers import ENV, python_path
from rookery.core import SandboxSpec, UsageError
from rookery.sandboxes import Command
from rookery.scoring.code_execution import run_code
from rookery.scoring.fresh_sandboxes import apply_limits
from rookery.scoring.program_runner import ProgramRunner
from rookery.scoring.programs import DEFAULT_PROGRAM_LIMITS, Case, Program

NAME = "programs"
SOURCE = "import sys\nnumbers = [int(word) for word in sys.stdin.read().split()]\nprint(sum(numbers) + {0})\n"


class Size(NamedTuple):
    """How much is measured."""

    programs: int
    peers: int
    rounds: int
    at_once: int


FULL = Size(programs=2000, peers=300, rounds=3, at_once=8)
QUICK = Size(programs=400, peers=60, rounds=2, at_once=8)


async def run(quick: bool, progress: Progress) -> list[Result]:
    return await program_rates(quick, progress)


async def program_rates(quick: bool, progress: Progress) -> list[Result]:
    """Rows of programs a second; for other benches too."""
    size = QUICK if quick else FULL
    ours: list[float] = []
    cased: list[float] = []
    floor: list[float] = []
    bare: list[float] = []
    python = python_path()
    await _ours(32, size.at_once)
    for at in range(size.rounds):
        progress(f"programs, round {at + 1} of {size.rounds}")
        ours.append(await _ours(size.programs, size.at_once))
        if python is not None:
            bare.append(await _bare(python, size.peers, size.at_once))
        floor.append(await _floor(size.programs // 2, size.at_once))
        cased.append(await _cased(size.programs // 4, size.at_once))
    note = (
        f"median of {size.rounds} rounds of {size.programs}, {size.at_once} at a time: "
        f"{', '.join(f'{rate:.0f}' for rate in ours)}"
    )
    theirs = median(bare) if bare else None
    return [
        _row("programs_per_s", median(ours), None, None, ">= 400", note),
        _row(
            "programs_per_s", median(ours), "bare python3", theirs, ">= 3x", "" if bare else "there is no python3"
        ),
        _row("cases_per_s", median(cased), None, None, None, "runs of programs with four cases each"),
        _row(
            "programs_floor_per_s",
            median(floor),
            None,
            None,
            None,
            "create, one warm Python, close, on the caller's own loop: what a program can cost at least",
        ),
    ]


def _row(name: str, ours: float, peer: str | None, theirs: float | None, target: str | None, note: str) -> Result:
    return Result(
        name=name, unit="1/s", ours=ours, peer=peer, theirs=theirs, target=target, lower_is_better=False, note=note
    )


async def _ours(count: int, at_once: int) -> float:
    programs = (Program(source=SOURCE.format(at), stdin=f"{at} 1 2") for at in range(count))
    began = time.perf_counter()
    results = await run_code(programs, concurrency=at_once)
    took = time.perf_counter() - began
    for at, result in enumerate(results):
        if result.stdout != f"{2 * at + 3}\n":
            raise UsageError(f"program {at} ended as {result.status} {result.detail} {result.stderr[-300:]}")
    return count / took


async def _cased(count: int, at_once: int) -> float:
    cases = tuple(Case(stdin=f"{n} 1", stdout=f"{n + 1 + 5}") for n in range(4))
    programs = (Program(source=SOURCE.format(5), cases=cases) for _ in range(count // 4))
    began = time.perf_counter()
    results = await run_code(programs, concurrency=at_once)
    took = time.perf_counter() - began
    if not all(result.passed for result in results):
        raise UsageError("a case that is right did not pass")
    return 4 * len(results) / took


async def _floor(count: int, at_once: int) -> float:
    async with ProgramRunner(concurrency=at_once) as programs:
        spec: SandboxSpec = apply_limits(programs.spec, DEFAULT_PROGRAM_LIMITS)

        async def once(_: int) -> None:
            box = await programs.create(spec)
            try:
                result = await box.exec(Command(argv=("python3", "-c", "pass"), warm=True))
            finally:
                await box.close()
            if not result.ok:
                raise UsageError(f"a program ended as {result.status} {result.detail}")

        for at in range(16):
            await once(at)
        return await _rate(once, count, at_once)


async def _bare(python: str, count: int, at_once: int) -> float:
    pipe = asyncio.subprocess.PIPE

    async def once(at: int) -> None:
        program = await asyncio.create_subprocess_exec(
            python, "-c", SOURCE.format(at), stdin=pipe, stdout=pipe, stderr=pipe, env=ENV
        )
        said, _ = await program.communicate(f"{at} 1 2".encode())
        if said != f"{2 * at + 3}\n".encode():
            raise UsageError(f"a bare python3 ended with {program.returncode}")

    return await _rate(once, count, at_once)


async def _rate(once: Callable[[int], Awaitable[None]], count: int, at_once: int) -> float:
    numbers = iter(range(count))

    async def worker() -> None:
        for at in numbers:
            await once(at)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(worker())
    return count / (time.perf_counter() - began)
