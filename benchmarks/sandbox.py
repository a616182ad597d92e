"""The `sandbox` bench: what an isolated program costs, beside the same program without walls or behind others'.

Peers run in the same bench, by turns with our boxes: bare `python3`, bwrap, and where there is an engine, `docker
run` and an exec through Docker's API.

Promises:
- the same interpreter and the same words everywhere; where latency counts, a peer's program is started in the
  cheapest way there is, our boxes as users of the library start them;
- latencies are medians of turns in small blocks, with the keeper running and its next boxes ready, as in a run;
- what a box costs after its result (its end, the making of the next) is in the throughput, not in the latency;
- a command that did not end well fails the bench: no figure from a broken run.
"""

import asyncio
import contextlib
import resource
from collections.abc import Awaitable, Callable, Sequence
from statistics import median
from typing import NamedTuple

from benchmarks import Progress, Result
from benchmarks import docker_engine as docker
from benchmarks.sandbox_peers import (
    COMMAND,
    PYTHON,
    Contender,
    Found,
    bare_python,
    bwrap_python,
    bwrap_words,
    by_turns,
    forked_ms,
    per_second,
    python_path,
    spawned,
    subprocessed,
)
from benchmarks.sandbox_workloads import HAS_WARM_COMMANDS, Boxes, Thousand, boxes_of_our_own, python_command

NAME = "sandbox"
AT_ONCE = 8
BLOCK = 5
OURS, EXEC_START = "ours", "ours, started by exec"
HOST = "asyncio.create_subprocess_exec"
FLOOR = "posix_spawn"


class Size(NamedTuple):
    """How much is measured."""

    rounds: int
    idle: int
    docker_every: int
    seconds: float
    widths: tuple[int, ...]
    alive: int
    snapshots: int
    bombs: int


FULL = Size(
    rounds=30, idle=10, docker_every=3, seconds=4.0, widths=(4, 8, 16, 32), alive=1000, snapshots=50, bombs=20
)
QUICK = Size(rounds=10, idle=3, docker_every=5, seconds=1.5, widths=(8,), alive=1000, snapshots=10, bombs=5)


async def run(quick: bool, progress: Progress) -> list[Result]:
    size = QUICK if quick else FULL
    _more_descriptors()
    async with docker.engine() as engine, boxes_of_our_own() as boxes:
        if isinstance(engine, str):
            progress(engine)
        docker_run, docker_exec = docker.contenders(engine, every=size.docker_every)
        results = await _cold(boxes, size, docker_run, progress)
        results += await _live(boxes, size, docker_exec, progress)
        results += await _rates(boxes, size, progress)
        results += await _snapshots(boxes, size, progress)
        results += await _bombs(boxes, size, progress)
        progress(f"{size.alive:,} boxes alive at once")
        results += _thousand(await boxes.alive(size.alive), size)
    return results


def _more_descriptors() -> None:
    """A thousand boxes are some thousand descriptors of ours."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# ------------------------------------------------------------------------------------------------- latencies


async def _cold(boxes: Boxes, size: Size, docker_run: Contender, progress: Progress) -> list[Result]:
    progress("cold: a new box, Python in it, to its end")
    warm, plain = python_command(warm=True), python_command(warm=False)
    exec_start = Contender(EXEC_START, lambda: boxes.cold(plain), BLOCK)
    ours = (
        Contender(OURS, lambda: boxes.cold(warm), BLOCK) if HAS_WARM_COMMANDS else exec_start._replace(name=OURS)
    )
    for _ in range(5):
        await boxes.cold(warm)
    turns = [ours, exec_start, bare_python(), bare_python("-I", "-S"), bwrap_python(), docker_run]
    found = await by_turns(turns, size.rounds, boxes.rest, progress)
    idle = []
    for _ in range(size.idle):
        await asyncio.sleep(1.0)
        idle.append(await boxes.cold(warm))
    note = f"{_spread(found[OURS])}; after an idle second {median(idle):.2f}; 4 ms is the stretch"
    if not HAS_WARM_COMMANDS:
        note += "; there is no warm interpreter yet: this is the ordinary start"
    return [
        *_beside(
            "cold_python_ms",
            found,
            OURS,
            {"bare python3": ">= 2x", "bare python3 -I -S": None, "bwrap": None, docker.RUN: ">= 50x"},
            note,
        ),
        *_beside(
            "cold_python_exec_ms",
            found,
            EXEC_START,
            {"bare python3": None, "bwrap": None},
            f"{_spread(found[EXEC_START])}; Python started anew in a new box, as any other program is",
        ),
        Result(
            name="floor_fork_ms",
            unit="ms",
            ours=await forked_ms(100),
            note="a fork of a small Python that is there already, without any wall, to its end",
        ),
    ]


async def _live(boxes: Boxes, size: Size, docker_exec: Contender, progress: Progress) -> list[Result]:
    progress("live: a command in a box that is there")
    box = await boxes.create()
    try:
        turns = [
            Contender(OURS, lambda: boxes.live(box), 2 * BLOCK),
            Contender(HOST, lambda: subprocessed(COMMAND), 2 * BLOCK),
            Contender(FLOOR, lambda: spawned(COMMAND), 2 * BLOCK),
            docker_exec,
        ]
        found = await by_turns(turns, size.rounds, boxes.rest, progress)
        idle = []
        for _ in range(size.idle):
            await asyncio.sleep(1.0)
            idle.append(await boxes.live(box))
    finally:
        await box.close()
    note = f"`{' '.join(COMMAND)}`, {_spread(found[OURS])}; after an idle second {median(idle):.2f}"
    return _beside("live_exec_ms", found, OURS, {HOST: ">= 1x", FLOOR: None, docker.EXEC: ">= 30x"}, note)


def _beside(
    name: str, found: dict[str, Found], ours: str, peers: dict[str, str | None], note: str
) -> list[Result]:
    figure = median(found[ours].times)
    return [
        Result(
            name=name,
            unit="ms",
            ours=figure,
            peer=peer,
            theirs=median(found[peer].times) if found[peer].times else None,
            target=target,
            note=found[peer].note or (note if at == 0 else ""),
        )
        for at, (peer, target) in enumerate(peers.items())
    ]


def _spread(found: Found) -> str:
    times = sorted(found.times)
    return f"{len(times)} times, tenth {times[len(times) // 10]:.2f}, ninetieth {times[-1 - len(times) // 10]:.2f}"


# -------------------------------------------------------------------------------------------------- throughput


async def _rates(boxes: Boxes, size: Size, progress: Progress) -> list[Result]:
    progress("throughput: whole runs, create to close")
    warm, plain = python_command(warm=True), python_command(warm=False)
    rates = {width: await per_second(lambda: boxes.cold(warm), width, size.seconds) for width in size.widths}
    started = (
        await per_second(lambda: boxes.cold(plain), AT_ONCE, size.seconds) if HAS_WARM_COMMANDS else rates[AT_ONCE]
    )
    await boxes.rest()
    python, bwrap = python_path(), bwrap_words()
    bare = await _peer_rate((python, *PYTHON[1:]) if python else None, size)
    walled = await _peer_rate(
        (*bwrap, python, *PYTHON[1:]) if python and not isinstance(bwrap, str) else None, size
    )
    progress("throughput: commands in live boxes")
    held = [await boxes.create() for _ in range(AT_ONCE)]
    try:
        free = list(held)

        async def one() -> None:
            box = free.pop()
            try:
                await boxes.live(box)
            finally:
                free.append(box)

        execs = await per_second(one, AT_ONCE, size.seconds)
    finally:
        await asyncio.gather(*(box.close() for box in held))
    await boxes.rest()
    host = await per_second(lambda: subprocessed(COMMAND), AT_ONCE, size.seconds)
    best = max(rates, key=lambda width: rates[width])
    note = ", ".join(f"{width} at a time {rate:.0f}" for width, rate in rates.items())
    rates_of = (
        (None, None, f"{note}; create, Python, close"),
        ("bare python3", bare, "" if python else "there is no python3"),
        ("bwrap", walled, bwrap if isinstance(bwrap, str) else ""),
    )
    return [
        *(_rate("runs_per_s", rates[best], peer, rate, why) for peer, rate, why in rates_of),
        _rate("runs_exec_per_s", started, None, None, f"Python started anew, {AT_ONCE} at a time"),
        _rate("execs_per_s", execs, HOST, host, f"{AT_ONCE} at a time, in as many boxes"),
    ]


def _rate(name: str, ours: float, peer: str | None, theirs: float | None, note: str) -> Result:
    target = ">= 400" if name == "runs_per_s" and peer is None else None
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


async def _peer_rate(words: Sequence[str] | None, size: Size) -> float | None:
    if words is None:
        return None
    rate = None
    with contextlib.suppress(ExceptionGroup):  # a peer that cannot be had is missing, not an end
        rate = await per_second(lambda: subprocessed(words), AT_ONCE, size.seconds)
    return rate


# ------------------------------------------------------------------------------------- snapshots, bombs, many


async def _snapshots(boxes: Boxes, size: Size, progress: Progress) -> list[Result]:
    progress("snapshots, and boxes from them")
    taken, forked, missing = await boxes.snapshots(size.snapshots)
    note = missing or "a layer of 200 files"
    return [
        Result(name="snapshot_ms", unit="ms", ours=median(taken) if taken else None, note=note),
        Result(name="fork_ms", unit="ms", ours=median(forked) if forked else None, target="<= 5", note=note),
    ]


async def _bombs(boxes: Boxes, size: Size, progress: Progress) -> list[Result]:
    progress("fork bombs")
    results = []
    ways: tuple[tuple[str, Callable[[], Awaitable[float]], str], ...] = (
        ("kill_bomb_ms", boxes.bomb_closed, "from close() to everything gone"),
        ("kill_bomb_wall_ms", boxes.bomb_limited, "from the time limit to everything gone, the box stays"),
    )
    for name, once, what in ways:
        times = [await once() for _ in range(size.bombs)]
        results.append(
            Result(
                name=name,
                unit="ms",
                ours=median(times),
                target="<= 50",
                note=f"{what}; the worst of {len(times)} took {max(times):.1f}",
            )
        )
    return results


def _thousand(found: Thousand, size: Size) -> list[Result]:
    kernel = f"{found.kernel_mb:.2f} MB more each of the kernel's own" if found.kernel_mb is not None else ""
    owner = f"{1024 * found.owner_mb:.0f} kB each in the owner"
    return [
        Result(
            name="thousand_s",
            unit="s",
            ours=found.seconds,
            note=f"{size.alive:,} boxes, each has answered a command; "
            f"{found.created:.2f} s until all were made, {found.closed:.2f} s until all were gone",
        ),
        Result(
            name="idle_pss_mb",
            unit="MB",
            ours=found.pss_mb,
            target="<= 1.5",
            note="; ".join(filter(None, ("each of them, with the keeper's growth", kernel, owner)))
            if found.pss_mb is not None
            else "we may not read what a box's processes use",
        ),
    ]
