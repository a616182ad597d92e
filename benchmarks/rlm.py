"""Benchmark `rlm`: the cost of a sub-call from the REPL to the upstream and back, and the speed-up of batches.

Method:
- the code in the REPL takes the times, in a rollout of a real engine with a real sandbox and a server in its own
  process; every call is recorded with token IDs;
- a rollout with an unexpected end fails the benchmark;
- a batch is compared with the time of as many waves of calls as its concurrency makes.
"""

import math
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import Progress, Result, percentiles
from benchmarks.instant_model import instant_model
from benchmarks.rlm_upstream import CELL, WAIT, WAIT_SECONDS
from rookery.core import Completed
from rookery.engine import Engine
from rookery.environments import Context
from rookery.environments.rlm import RlmEnvironment

NAME = "rlm"
BATCH = 64
CONTEXT = 50_000_000
LLM = """import time
llm("warm"); times = []
for at in range({count}):
    began = time.perf_counter()
    llm(f"question {{at}}")
    times.append(1e3 * (time.perf_counter() - began))
answer(times)"""
HOST_CALL = LLM.replace('llm(f"question {{at}}")', "budget()")
BATCHES = """import time
llm_batch(["{wait}, warm"] * {c}); times = []
for at in range({rounds}):
    began = time.perf_counter()
    found = llm_batch([f"{wait}, {{at}} {{one}}" for one in range({batch})])
    times.append(1e3 * (time.perf_counter() - began))
    assert None not in found
answer(times)"""
BASH = """times=
for at in $(seq {count}); do
  began=$EPOCHREALTIME; llm "question $at" > /dev/null; ended=$EPOCHREALTIME
  times="$times$(( ${{ended/./}} - ${{began/./}} )),"
done
answer "[${{times%,}}]"
"""


class Size(NamedTuple):
    """Numbers of repetitions of each measurement."""

    calls: int
    rounds: int
    attempts: int


FULL = Size(calls=300, rounds=3, attempts=3)
QUICK = Size(calls=100, rounds=1, attempts=1)


class _AnswerRecorder(RlmEnvironment):
    """Stores the answer, which contains the times."""

    async def score(self, ctx: Context) -> float:
        ctx.info["answer"] = self.answer(ctx)
        return 1.0


async def run(quick: bool, progress: Progress) -> list[Result]:
    size = QUICK if quick else FULL
    async with instant_model("benchmarks.rlm_upstream") as model:
        progress("sub-calls one by one")
        calls, _ = await run_cell(model.tokens_url, LLM.format(count=size.calls), size.attempts)
        host, _ = await run_cell(model.tokens_url, HOST_CALL.format(count=size.calls), 1)
        results = [
            Result(
                name="subcall_overhead_ms",
                unit="ms",
                ours=median(calls),
                target="<= 3",
                note=f"llm() with an instant server, including HTTP; {percentiles(calls)}; "
                f"{median(host):.2f} of it from the worker to the host and back",
            )
        ]
        for width in (4, 16, 64):
            progress(f"a batch of {BATCH}, {width} at once")
            cell = BATCHES.format(c=width, rounds=size.rounds, wait=WAIT, batch=BATCH)
            times, _ = await run_cell(model.tokens_url, cell, size.attempts, concurrency=width)
            waves = math.ceil(BATCH / width)
            results.append(
                Result(
                    name=f"batch_speedup_c{width}",
                    unit="x of waves",
                    ours=median(times) / (1e3 * WAIT_SECONDS * waves),
                    target="<= 1.3",
                    note=f"{BATCH} sub-calls of 100 ms, {width} at once: {median(times):.0f} ms for {waves} waves",
                )
            )
        progress("sub-calls from bash")
        shell, _ = await run_cell(
            model.tokens_url, BASH.format(count=size.calls // 4), 1, repl="bash", cell_seconds=600.0
        )
        results.append(
            Result(
                name="subcall_bash_ms",
                unit="ms",
                ours=median(shell) / 1e3,
                note=f"the command `llm`, one process per call; {percentiles([one / 1e3 for one in shell])}",
            )
        )
        progress("a context of 50 MB")
        _, setups = await run_cell(
            model.tokens_url,
            "answer([len(context)])",
            size.attempts,
            recipe={"kind": "aggregate", "seed": 1, "size": CONTEXT},
        )
        results.append(
            Result(
                name="context_50mb_ms",
                unit="ms",
                ours=median(setups),
                note="created, written to a new sandbox and loaded into a new Python before the first turn",
            )
        )
    return results


async def run_cell(
    url: str, cell: str, attempts: int, *, recipe: dict[str, Any] | None = None, **options: Any
) -> tuple[list[float], list[float]]:
    """Run a cell and return the times in its answer and the set-up times, in milliseconds."""
    times: list[float] = []
    setups: list[float] = []
    task = {"prompt": f"{CELL}{cell}", "answer": "any", **({"recipe": recipe} if recipe else {})}
    env = _AnswerRecorder(max_calls=1_000_000, sub_max_tokens=64, **options)
    with tempfile.TemporaryDirectory(prefix="rookery-bench-") as folder:
        async with Engine(env, policy=url, out=Path(folder), runners=0) as engine:
            for at in range(attempts):  # one after another, so that they do not disturb each other
                (group,) = [one async for one in engine.groups([{**task, "id": str(at)}], name=str(at))]
                (rollout,) = group.rollouts
                answer = str(rollout.info.get("answer"))
                if rollout.outcome != Completed() or not answer.startswith("["):
                    raise RuntimeError(f"a rollout ended as {rollout.outcome}: {answer[:500]}")
                times += [float(one) for one in answer.strip("[]").split(",")]
                setups.append(1e3 * rollout.timing.setup)
    return times, setups
