"""Benchmark `embedded`: sampling speed of the embedded policy beside its matrix products, and size of the core.

Everything runs on one core, in processes that are bound to it before NumPy is loaded, so that BLAS uses one
thread.

Method:
- only sampled tokens count, although the prompt's are computed in the same time;
- figures are medians of alternating runs, so that a slower machine affects all of them;
- a request that lacks tokens fails the benchmark.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import Progress, Result

NAME = "embedded"
TOKENS = 256
MANY = 64
PROMPT = "What is 12 + 34?"


class Size(NamedTuple):
    """Numbers of repetitions of each measurement."""

    rounds: int
    imports: int


FULL = Size(rounds=9, imports=25)
QUICK = Size(rounds=3, imports=7)


def run(quick: bool, progress: Progress) -> list[Result]:
    size = QUICK if quick else FULL
    progress("one request and 64 requests, alternately")
    rates = _measure_rates(size.rounds)
    one, many = median(rates["one"]), median(rates["many"])
    progress("the floor: the matrix products alone")
    floor = rates["floor"]
    progress("import rookery")
    bare, ours = _import_times(size.imports)
    installed = install_mb()
    return [
        Result(
            name="tokens_per_s_1",
            unit="tokens/s",
            ours=one,
            target=">= 900",
            lower_is_better=False,
            note=f"one request on one core, {_spread(rates['one'])}",
        ),
        Result(
            name="tokens_per_s_64",
            unit="tokens/s",
            ours=many,
            peer="tokens_per_s_1",
            theirs=one,
            target=">= 8x",
            lower_is_better=False,
            note=f"{MANY} requests at once on that core, {_spread(rates['many'])}",
        ),
        Result(
            name="floor_tokens_per_s_64",
            unit="tokens/s",
            ours=floor[0],
            lower_is_better=False,
            note="matrix products of the weights alone: no attention, no sampling, no Python",
        ),
        Result(
            name="install_mb",
            unit="MB",
            ours=installed,
            target="<= 130",
            note="files of rookery and its dependencies, without pip",
        ),
        Result(
            name="import_ms",
            unit="ms",
            ours=ours,
            target="<= 100",
            note=f"start Python and import rookery; `python3 -I -S` alone takes {bare:.1f} ms",
        ),
    ]


def _spread(rates: list[float]) -> str:
    return f"from {min(rates):,.0f} to {max(rates):,.0f}"


# --------------------------------------------------------------------------------------- child processes


def _run_on_one_core(code: str, *args: str) -> bytes:
    # One core from the first instruction on: BLAS libraries count cores when they are loaded.
    cpu = str(min(os.sched_getaffinity(0)))
    pin = f"import os; os.sched_setaffinity(0, {{{cpu}}});"
    process = subprocess.run([sys.executable, "-c", pin + code, *args], stdout=subprocess.PIPE, check=True)
    return process.stdout


def _measure_rates(rounds: int) -> dict[str, list[float]]:
    code = "from benchmarks.embedded import child_main; child_main()"
    rates: dict[str, list[float]] = json.loads(_run_on_one_core(code, str(rounds)))
    return rates


def child_main() -> None:
    """Entry point of the child process: print the rates as JSON."""
    print(json.dumps(asyncio.run(_rates(int(sys.argv[1])))))


async def _rates(rounds: int) -> dict[str, list[float]]:
    from rookery.upstreams import UpstreamConfig, open_upstream

    upstream: Any = open_upstream(UpstreamConfig(urls=("embedded",)))
    try:
        await _sample_rate(upstream, MANY)
        one: list[float] = []
        many: list[float] = []
        for _ in range(rounds):
            one.append(await _sample_rate(upstream, 1))
            many.append(await _sample_rate(upstream, MANY))
        return {"one": one, "many": many, "floor": [_floor(upstream.service.llama)]}
    finally:
        await upstream.close()


async def _sample_rate(upstream: Any, count: int) -> float:
    """Return tokens per second of `count` concurrent requests."""
    from rookery.upstreams.embedded import chat
    from rookery.upstreams.embedded.batch import SamplingJob

    # Without stop tokens every request samples all of its tokens.
    prompt = [chat.BEGIN, chat.USER, *PROMPT.encode(), chat.END, chat.ASSISTANT]
    jobs = [SamplingJob(prompt, max_tokens=TOKENS, seed=seed) for seed in range(count)]
    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for job in jobs:
            group.create_task(upstream.service.run(job))
    seconds = time.perf_counter() - began
    if any(len(job.tokens) != TOKENS for job in jobs):
        raise RuntimeError("a request returned fewer tokens than asked for")
    return count * TOKENS / seconds


def _floor(llama: Any, steps: int = 50) -> float:
    """Measure the floor: tokens per second of the matrix products alone, 64 rows at a time."""
    import numpy as np

    matrices = [*(matrix for layer in llama._layers for matrix in layer), llama._head]
    rows = {len(matrix): np.ones((MANY, len(matrix)), dtype=np.float32) for matrix in matrices}
    best = float("inf")
    for _ in range(steps):
        began = time.perf_counter()
        for matrix in matrices:
            np.matmul(rows[len(matrix)], matrix)
        best = min(best, time.perf_counter() - began)
    return MANY / best


def _import_times(times: int) -> tuple[float, float]:
    """Return the median milliseconds of a bare `python3 -I -S` and of one that imports rookery, alternately."""
    bare: list[float] = []
    ours: list[float] = []
    for _ in range(times):
        for arguments, durations in ((["-I", "-S", "-c", "pass"], bare), (["-c", "import rookery"], ours)):
            began = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True)
            durations.append(1e3 * (time.perf_counter() - began))
    return median(bare), median(ours)


# ---------------------------------------------------------------------------------------------- size on disk


def install_mb() -> float:
    """Return the megabytes on disk of rookery and its required dependencies, including compiled files."""
    import rookery

    seen: set[str] = set()
    paths: set[Path] = {path for path in Path(rookery.__file__).parent.rglob("*") if path.is_file()}
    queue = ["rookery-rl"]
    while queue:
        name = queue.pop()
        if name in seen:
            continue
        seen.add(name)
        if name != "rookery-rl":  # in a checkout its files are not where its metadata says
            try:
                paths |= {Path(str(entry.locate())) for entry in distribution(name).files or ()}
            except PackageNotFoundError:
                continue
        queue += [_package_name(line) for line in requires(name) or () if "extra ==" not in line]
    return sum(path.stat().st_size for path in paths if path.is_file()) / 1e6


def _package_name(requirement: str) -> str:
    import re

    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")
