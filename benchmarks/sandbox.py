"""Benchmark `sandbox`: the cost of an isolated program, beside a bare interpreter, bwrap and Docker.

All run alternately in one run: our sandboxes, `python3 -I -S` without isolation, bwrap, and, if there is an
engine, `docker run` and an exec through Docker's API.

Method:
- all use the same interpreter with the same arguments; for latencies the programs of peers are started in the
  cheapest way, and our sandboxes as users of the library start them;
- latencies are medians of alternating small blocks, with a running keeper and prepared sandboxes, as in a run;
- work after a result (closing the sandbox, preparing the next) counts for throughput, not for latency;
- a command with an unexpected result fails the benchmark.
"""

import asyncio
import contextlib
import resource
from collections.abc import Awaitable, Callable, Sequence
from statistics import median
from typing import NamedTuple

from benchmarks import Progress, Result, percentiles
from benchmarks import docker_engine as docker
from benchmarks.sandbox_peers import (
    BARE,
    COMMAND,
    NO_PYTHON,
    PYTHON,
    TimedOperation,
    Timings,
    bare_python,
    bwrap_command,
    bwrap_python,
    fork_floor_ms,
    measure_alternately,
    per_second,
    python_path,
    spawn_ms,
    subprocess_ms,
)
from benchmarks.sandbox_workloads import ConcurrentSandboxes, SandboxWorkloads, open_workloads, python_command

NAME = "sandbox"
AT_ONCE = 8
CPU_RUNS = 80
BLOCK = 5
OURS, EXEC_START = "ours", "ours, started by exec"
HOST = "asyncio.create_subprocess_exec"
FLOOR = "posix_spawn"


class Size(NamedTuple):
    """Amount of work to measure."""

    rounds: int
    idle: int
    docker_every: int
    seconds: float
    cpu_rounds: int
    widths: tuple[int, ...]
    peer_widths: tuple[int, ...]
    alive: int
    snapshots: int
    bombs: int


FULL = Size(
    rounds=30,
    idle=10,
    docker_every=3,
    seconds=4.0,
    cpu_rounds=10,
    widths=(4, 8, 16, 32),
    peer_widths=(2, 8, 32),
    alive=1000,
    snapshots=50,
    bombs=20,
)
QUICK = Size(
    rounds=10,
    idle=3,
    docker_every=5,
    seconds=1.5,
    cpu_rounds=3,
    widths=(4, 8),
    peer_widths=(2, 8),
    alive=1000,
    snapshots=10,
    bombs=5,
)


async def run(quick: bool, progress: Progress) -> list[Result]:
    size = QUICK if quick else FULL
    _raise_descriptor_limit()
    async with docker.open_engine() as engine, open_workloads() as workloads:
        if isinstance(engine, str):
            progress(engine)
        docker_run, docker_exec = docker.timed_operations(engine, every=size.docker_every)
        results = await _cold(workloads, size, docker_run, progress)
        results += await _live(workloads, size, docker_exec, progress)
        results += await _rates(workloads, size, progress)
        results += await _snapshots(workloads, size, progress)
        results += await _bombs(workloads, size, progress)
        progress(f"{size.alive:,} live sandboxes")
        results += _many_rows(await workloads.open_many(size.alive), size)
    return results


def _raise_descriptor_limit() -> None:
    """Raise the limit of open files: a thousand sandboxes need some thousand descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# ------------------------------------------------------------------------------------------------- latencies


async def _cold(
    workloads: SandboxWorkloads, size: Size, docker_run: TimedOperation, progress: Progress
) -> list[Result]:
    progress("cold start: create a sandbox and run Python")
    warm, plain = python_command(warm=True), python_command(warm=False)
    for _ in range(5):
        await workloads.cold_start_ms(warm)
    operations = [
        TimedOperation(OURS, lambda: workloads.cold_start_ms(warm), BLOCK),
        TimedOperation(EXEC_START, lambda: workloads.cold_start_ms(plain), BLOCK),
        bare_python(),
        bwrap_python(),
        docker_run,
    ]
    timings = await measure_alternately(operations, size.rounds, workloads.wait_idle, progress)
    idle = []
    for _ in range(size.idle):
        await asyncio.sleep(1.0)
        idle.append(await workloads.cold_start_ms(warm))
    note = f"{percentiles(timings[OURS].times)}; after an idle second {median(idle):.2f}"
    return [
        *_compare(
            "cold_python_ms",
            timings,
            OURS,
            {BARE: ">= 2x", "bwrap": None, docker.RUN: ">= 50x"},
            note,
        ),
        *_compare(
            "cold_python_exec_ms",
            timings,
            EXEC_START,
            {BARE: None, "bwrap": None},
            f"{percentiles(timings[EXEC_START].times)}; Python started by exec in a new sandbox",
        ),
        Result(
            name="floor_fork_ms",
            unit="ms",
            ours=await fork_floor_ms(100),
            note="fork of a running Python and its exit, without isolation",
        ),
    ]


async def _live(
    workloads: SandboxWorkloads, size: Size, docker_exec: TimedOperation, progress: Progress
) -> list[Result]:
    progress("a command in a live sandbox")
    sandbox = await workloads.create()
    try:
        operations = [
            TimedOperation(OURS, lambda: workloads.exec_ms(sandbox), 2 * BLOCK),
            TimedOperation(HOST, lambda: subprocess_ms(COMMAND), 2 * BLOCK),
            TimedOperation(FLOOR, lambda: spawn_ms(COMMAND), 2 * BLOCK),
            docker_exec,
        ]
        timings = await measure_alternately(operations, size.rounds, workloads.wait_idle, progress)
        idle, floor = [], []
        for _ in range(size.idle):
            await asyncio.sleep(1.0)
            idle.append(await workloads.exec_ms(sandbox))
            await asyncio.sleep(1.0)
            floor.append(await spawn_ms(COMMAND))
    finally:
        await sandbox.close()
    note = f"`{' '.join(COMMAND)}`, {percentiles(timings[OURS].times)}"
    busy = median(timings[OURS].times)
    return [
        *_compare("live_exec_ms", timings, OURS, {HOST: ">= 1x", FLOOR: None, docker.EXEC: ">= 30x"}, note),
        Result(
            name="idle_exec_ratio",
            unit="x",
            ours=median(idle) / busy,
            target="<= 1.5",
            note=f"a command after an idle second, {median(idle):.2f} ms, over one right after another; "
            f"with {FLOOR} {median(floor) / median(timings[FLOOR].times):.2f}",
        ),
    ]


def _compare(
    name: str, timings: dict[str, Timings], ours: str, peers: dict[str, str | None], note: str
) -> list[Result]:
    figure = median(timings[ours].times)
    return [
        Result(
            name=name,
            unit="ms",
            ours=figure,
            peer=peer,
            theirs=median(timings[peer].times) if timings[peer].times else None,
            target=target,
            note=timings[peer].note or (note if at == 0 else ""),
        )
        for at, (peer, target) in enumerate(peers.items())
    ]


# -------------------------------------------------------------------------------------------------- throughput


async def _rates(workloads: SandboxWorkloads, size: Size, progress: Progress) -> list[Result]:
    progress("throughput: whole runs, create to close")
    warm, plain = python_command(warm=True), python_command(warm=False)
    rates = {
        width: await per_second(lambda: workloads.cold_start_ms(warm), width, size.seconds)
        for width in size.widths
    }
    exec_rate = await per_second(lambda: workloads.cold_start_ms(plain), AT_ONCE, size.seconds)
    await workloads.wait_idle()
    python, bwrap = python_path(), bwrap_command()
    bare_rate = await _best_peer_rate((python, *PYTHON[1:]) if python else None, size)
    bwrap_rate = await _best_peer_rate(
        (*bwrap, python, *PYTHON[1:]) if python and not isinstance(bwrap, str) else None, size
    )
    cpu = await _run_cpu_ms(workloads, python, size)
    progress("throughput: commands in live sandboxes")
    sandboxes = [await workloads.create() for _ in range(AT_ONCE)]
    try:
        free = list(sandboxes)

        async def one() -> None:
            sandbox = free.pop()
            try:
                await workloads.exec_ms(sandbox)
            finally:
                free.append(sandbox)

        execs = await per_second(one, AT_ONCE, size.seconds)
    finally:
        await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))
    await workloads.wait_idle()
    host = await per_second(lambda: subprocess_ms(COMMAND), AT_ONCE, size.seconds)
    best_width = max(rates, key=lambda width: rates[width])
    note = ", ".join(f"{width} at a time {rate:.0f}" for width, rate in rates.items())
    rates_of = (
        (None, None, f"{note}; create, Python, close"),
        (BARE, bare_rate, "" if python else NO_PYTHON),
        ("bwrap", bwrap_rate, bwrap if isinstance(bwrap, str) else ""),
    )
    return [
        *(_rate("runs_per_s", rates[best_width], peer, rate, why) for peer, rate, why in rates_of),
        cpu,
        _rate("runs_exec_per_s", exec_rate, None, None, f"Python started by exec, {AT_ONCE} at a time"),
        _rate("execs_per_s", execs, HOST, host, f"{AT_ONCE} at a time, in as many sandboxes"),
    ]


async def _run_cpu_ms(workloads: SandboxWorkloads, python: str | None, size: Size) -> Result:
    """Measure the CPU time of a run, which other programs of the machine change less than its rate."""
    runs: list[Callable[[], Awaitable[object]]] = [lambda: workloads.cold_start_ms(python_command(warm=True))]
    if python:
        runs.append(lambda: subprocess_ms((python, *PYTHON[1:])))
    figures: list[list[float]] = [[] for _ in runs]
    for _ in range(size.cpu_rounds):
        for once, found in zip(runs, figures, strict=True):
            before = workloads.cpu_ms()
            for _ in range(CPU_RUNS // AT_ONCE):
                await asyncio.gather(*(once() for _ in range(AT_ONCE)))
            await workloads.wait_idle()
            found.append((workloads.cpu_ms() - before) / CPU_RUNS)
    ours, *theirs = map(median, figures)
    note = f"{percentiles(figures[0])}; all processes together, {AT_ONCE} at a time"
    return Result(
        name="run_cpu_ms", unit="ms", ours=ours, peer=BARE, theirs=theirs[0] if theirs else None, note=note
    )


def _rate(name: str, ours: float, peer: str | None, theirs: float | None, note: str) -> Result:
    target = {("runs_per_s", None): ">= 400", ("runs_per_s", BARE): ">= 3x"}.get((name, peer))
    return Result(
        name=name,
        unit="1/s",
        ours=ours,
        peer=peer,
        theirs=theirs,
        target=target,
        lower_is_better=False,
        note=note,
    )


async def _best_peer_rate(words: Sequence[str] | None, size: Size) -> float | None:
    """Return the runs per second of a peer at its best concurrency; None if it is missing or fails."""
    if words is None:
        return None
    rates = []
    with contextlib.suppress(ExceptionGroup):  # a peer that fails is reported as missing
        for width in size.peer_widths:
            rates.append(await per_second(lambda: subprocess_ms(words), width, size.seconds))  # noqa: PERF401
    return max(rates, default=None)


# ------------------------------------------------------------------------------------- snapshots, bombs, many


async def _snapshots(workloads: SandboxWorkloads, size: Size, progress: Progress) -> list[Result]:
    progress("snapshots and forks")
    taken, forked, missing = await workloads.snapshots(size.snapshots)
    note = missing or "a layer of 200 files"
    return [
        Result(name="snapshot_ms", unit="ms", ours=median(taken) if taken else None, note=note),
        Result(name="fork_ms", unit="ms", ours=median(forked) if forked else None, target="<= 5", note=note),
    ]


async def _bombs(workloads: SandboxWorkloads, size: Size, progress: Progress) -> list[Result]:
    progress("fork bombs")
    results = []
    ways: tuple[tuple[str, Callable[[], Awaitable[float]], str], ...] = (
        ("kill_bomb_ms", workloads.close_bomb_ms, "from close() to everything gone"),
        ("kill_bomb_wall_ms", workloads.stop_bomb_ms, "from the time limit to everything gone, the sandbox stays"),
    )
    for name, once, what in ways:
        times = [await once() for _ in range(size.bombs)]
        results.append(
            Result(
                name=name,
                unit="ms",
                ours=median(times),
                target="<= 50",
                note=f"{what}; worst of {len(times)}: {max(times):.1f}",
            )
        )
    return results


def _many_rows(many: ConcurrentSandboxes, size: Size) -> list[Result]:
    kernel = f"{many.kernel_mb:.2f} MB of kernel memory each" if many.kernel_mb is not None else ""
    owner = f"{1024 * many.owner_mb:.0f} kB each in the owner"
    return [
        Result(
            name="thousand_s",
            unit="s",
            ours=many.seconds,
            note=f"{size.alive:,} sandboxes, each has run a command; "
            f"{many.created:.2f} s to create them, {many.closed:.2f} s to close them",
        ),
        Result(
            name="idle_pss_mb",
            unit="MB",
            ours=many.pss_mb,
            target="<= 1.5",
            note="; ".join(filter(None, ("per sandbox, with the growth of the keeper", kernel, owner)))
            if many.pss_mb is not None
            else "the memory of the sandbox's processes cannot be read",
        ),
    ]
