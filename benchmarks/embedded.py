"""The `embedded` bench: how fast the policy that comes along samples, and how light the core is.

Everything is measured on one core, in processes of their own that are bound to it before numpy is loaded: the
BLAS then has one thread, and one request and 64 of them are measured on the same machine.

Promises:
- sampled tokens only: the prompt's are computed in the same time and not counted;
- every figure is a median of runs that take turns, so that a machine which slows down slows all of them;
- a request that did not bring all of its tokens fails the bench: no figure from a broken run.
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
    """How often each thing is measured."""

    rounds: int
    imports: int


FULL = Size(rounds=9, imports=25)
QUICK = Size(rounds=3, imports=7)


def run(quick: bool, progress: Progress) -> list[Result]:
    size = QUICK if quick else FULL
    progress("one request, and 64 of them, by turns")
    rates = _measured(size.rounds)
    one, many = median(rates["one"]), median(rates["many"])
    progress("the floor: the products of the weights alone")
    floor = rates["floor"]
    progress("import rookery")
    bare, ours = _imports(size.imports)
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
            note="what the products of the weights alone would allow: no attention, no sampling, no Python",
        ),
        Result(
            name="install_mb",
            unit="MB",
            ours=installed,
            target="<= 130",
            note="rookery and what it depends on, as files on disk, without pip",
        ),
        Result(
            name="import_ms",
            unit="ms",
            ours=ours,
            target="<= 100",
            note=f"a Python that imports rookery and ends; {bare:.1f} ms of them are a Python that does nothing",
        ),
    ]


def _spread(rates: list[float]) -> str:
    return f"from {min(rates):,.0f} to {max(rates):,.0f}"


# ------------------------------------------------------------------------------------------ in processes


def _child(code: str, *args: str) -> bytes:
    # One core from the first instruction on: BLAS libraries count cores when they are loaded.
    cpu = str(min(os.sched_getaffinity(0)))
    begin = f"import os; os.sched_setaffinity(0, {{{cpu}}});"
    done = subprocess.run([sys.executable, "-c", begin + code, *args], stdout=subprocess.PIPE, check=True)
    return done.stdout


def _measured(rounds: int) -> dict[str, list[float]]:
    code = "from benchmarks.embedded import child; child()"
    found: dict[str, list[float]] = json.loads(_child(code, str(rounds)))
    return found


def child() -> None:
    """In a process of its own: the rates, as JSON on stdout."""
    print(json.dumps(asyncio.run(_rates(int(sys.argv[1])))))


async def _rates(rounds: int) -> dict[str, list[float]]:
    from rookery.upstreams import UpstreamConfig, open_upstream

    upstream: Any = open_upstream(UpstreamConfig(urls=("embedded",)))
    try:
        await _together(upstream, MANY)
        one: list[float] = []
        many: list[float] = []
        for _ in range(rounds):
            one.append(await _together(upstream, 1))
            many.append(await _together(upstream, MANY))
        return {"one": one, "many": many, "floor": [_floor(upstream.service.llama)]}
    finally:
        await upstream.close()


async def _together(upstream: Any, count: int) -> float:
    """Tokens a second of `count` requests at once, from asking to the last answer."""
    from rookery.upstreams.embedded import chat
    from rookery.upstreams.embedded.batch import SamplingJob

    # No end ids: every request samples all of its tokens.
    prompt = [chat.BEGIN, chat.USER, *PROMPT.encode(), chat.END, chat.ASSISTANT]
    jobs = [SamplingJob(prompt, most=TOKENS, seed=seed) for seed in range(count)]
    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for job in jobs:
            group.create_task(upstream.service.run(job))
    seconds = time.perf_counter() - began
    if any(len(job.tokens) != TOKENS for job in jobs):
        raise RuntimeError("a request did not bring all of its tokens")
    return count * TOKENS / seconds


def _floor(llama: Any, steps: int = 50) -> float:
    """Tokens a second that the products of the weights would allow by themselves, 64 rows at a time."""
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


def _imports(times: int) -> tuple[float, float]:
    """Milliseconds that a Python takes that does nothing, and one that imports us; medians of turns."""
    bare: list[float] = []
    ours: list[float] = []
    for _ in range(times):
        for code, found in (("pass", bare), ("import rookery", ours)):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            found.append(1e3 * (time.perf_counter() - began))
    return median(bare), median(ours)


# ---------------------------------------------------------------------------------------------- the size


def install_mb() -> float:
    """Megabytes on disk of rookery and of everything its core depends on, compiled files included."""
    import rookery

    seen: set[str] = set()
    paths: set[Path] = {path for path in Path(rookery.__file__).parent.rglob("*") if path.is_file()}
    todo = ["rookery-rl"]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        if name != "rookery-rl":  # from a checkout it is not where its records say
            try:
                paths |= {Path(str(entry.locate())) for entry in distribution(name).files or ()}
            except PackageNotFoundError:
                continue
        todo += [_bare(line) for line in requires(name) or () if "extra ==" not in line]
    return sum(path.stat().st_size for path in paths if path.is_file()) / 1e6


def _bare(requirement: str) -> str:
    import re

    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")
