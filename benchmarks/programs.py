"""Benchmark `programs`: programs per second through `run_code`, beside a bare `python3 -I -S` for each program.

Method:
- every program has a different source, reads its input and is checked by its output; a wrong output fails the
  benchmark;
- ours and the peer's alternate in one run at the same concurrency;
- the floor is measured beside them: create a sandbox, run a warm Python, close it, without `run_code`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from statistics import median
from typing import NamedTuple

from benchmarks import Progress, Result
from benchmarks.sandbox_peers import BARE, ENV, NO_PYTHON, python_path
from rookery.core import SandboxSpec, UsageError
from rookery.sandboxes import Command
from rookery.scoring.code_execution import run_code
from rookery.scoring.fresh_sandboxes import apply_limits
from rookery.scoring.program_runner import ProgramRunner
from rookery.scoring.programs import DEFAULT_PROGRAM_LIMITS, Case, Program

NAME = "programs"
SOURCE = "import sys\nnumbers = [int(word) for word in sys.stdin.read().split()]\nprint(sum(numbers) + {0})\n"


class Size(NamedTuple):
    """Amount of work to measure."""

    programs: int
    bare_programs: int
    rounds: int
    concurrency: int


FULL = Size(programs=2000, bare_programs=300, rounds=3, concurrency=8)
QUICK = Size(programs=400, bare_programs=60, rounds=2, concurrency=8)


async def run(quick: bool, progress: Progress) -> list[Result]:
    return await program_rates(quick, progress)


async def program_rates(quick: bool, progress: Progress) -> list[Result]:
    """Return the rows of this benchmark, which `workers` includes as well."""
    size = QUICK if quick else FULL
    ours: list[float] = []
    cases: list[float] = []
    floor: list[float] = []
    bare: list[float] = []
    python = python_path()
    await _run_code_rate(32, size.concurrency)
    for at in range(size.rounds):
        progress(f"programs, round {at + 1} of {size.rounds}")
        ours.append(await _run_code_rate(size.programs, size.concurrency))
        if python is not None:
            bare.append(await _bare_rate(python, size.bare_programs, size.concurrency))
        floor.append(await _floor_rate(size.programs // 2, size.concurrency))
        cases.append(await _case_rate(size.programs // 4, size.concurrency))
    note = (
        f"median of {size.rounds} rounds of {size.programs}, {size.concurrency} at a time: "
        f"{', '.join(f'{rate:.0f}' for rate in ours)}"
    )
    theirs = median(bare) if bare else None
    return [
        _row("programs_per_s", median(ours), None, None, ">= 400", note),
        _row("programs_per_s", median(ours), BARE, theirs, ">= 2x", "" if bare else NO_PYTHON),
        _row("cases_per_s", median(cases), None, None, None, "runs of programs with four cases each"),
        _row(
            "programs_floor_per_s",
            median(floor),
            None,
            None,
            None,
            "create, one warm Python, close, on the caller's event loop: the minimal cost of a program",
        ),
    ]


def _row(name: str, ours: float, peer: str | None, theirs: float | None, target: str | None, note: str) -> Result:
    return Result(
        name=name, unit="1/s", ours=ours, peer=peer, theirs=theirs, target=target, lower_is_better=False, note=note
    )


async def _run_code_rate(count: int, concurrency: int) -> float:
    programs = (Program(source=SOURCE.format(at), stdin=f"{at} 1 2") for at in range(count))
    began = time.perf_counter()
    results = await run_code(programs, concurrency=concurrency)
    took = time.perf_counter() - began
    for at, result in enumerate(results):
        if result.stdout != f"{2 * at + 3}\n":
            raise UsageError(f"program {at} ended as {result.status} {result.detail} {result.stderr[-300:]}")
    return count / took


async def _case_rate(count: int, concurrency: int) -> float:
    cases = tuple(Case(stdin=f"{n} 1", stdout=f"{n + 1 + 5}") for n in range(4))
    programs = (Program(source=SOURCE.format(5), cases=cases) for _ in range(count // 4))
    began = time.perf_counter()
    results = await run_code(programs, concurrency=concurrency)
    took = time.perf_counter() - began
    if not all(result.passed for result in results):
        raise UsageError("a correct case did not pass")
    return 4 * len(results) / took


async def _floor_rate(count: int, concurrency: int) -> float:
    async with ProgramRunner(concurrency=concurrency) as programs:
        spec: SandboxSpec = apply_limits(programs.spec, DEFAULT_PROGRAM_LIMITS)

        async def once(_: int) -> None:
            sandbox = await programs.create(spec)
            try:
                result = await sandbox.exec(Command(argv=("python3", "-c", "pass"), warm=True))
            finally:
                await sandbox.close()
            if not result.ok:
                raise UsageError(f"a program ended as {result.status} {result.detail}")

        for at in range(16):
            await once(at)
        return await _rate(once, count, concurrency)


async def _bare_rate(python: str, count: int, concurrency: int) -> float:
    pipe = asyncio.subprocess.PIPE

    async def once(at: int) -> None:
        program = await asyncio.create_subprocess_exec(
            python, "-I", "-S", "-c", SOURCE.format(at), stdin=pipe, stdout=pipe, stderr=pipe, env=ENV
        )
        output, _ = await program.communicate(f"{at} 1 2".encode())
        if output != f"{2 * at + 3}\n".encode():
            raise UsageError(f"a bare python3 exited with {program.returncode}")

    return await _rate(once, count, concurrency)


async def _rate(once: Callable[[int], Awaitable[None]], count: int, concurrency: int) -> float:
    numbers = iter(range(count))

    async def worker() -> None:
        for at in numbers:
            await once(at)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
    return count / (time.perf_counter() - began)
