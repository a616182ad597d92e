"""Benchmark `cluster-scaling`: rollouts per second on 1, 2, 4 and 8 nodes of two cores each, on one machine.

Two kinds of rollouts are measured. `python` rollouts make four model calls of 256 tokens and are scored by a few
milliseconds of Python in the runner. `sandbox` rollouts make one model call, execute a command in a sandbox and
are graded in another one; their nodes also share the kernel's locks, which nodes on several machines do not.

Method:
- each node (`--cluster local:NxC`) is bound to two cores of its own, with its runners, keeper and sandboxes;
- a run on N nodes may use 2N cores and no others, so that at every size the rate includes all costs. The
  supervisor, the journal and the collector may use any of these cores. Each node's cores also run one replica of
  the instant model, and the rollouts of all nodes use all replicas;
- rates are measured while all nodes are fully loaded: the warm-up and the end of a run do not count;
- sizes are measured in turn, each in a process of its own, and the median of the rounds counts.

`of linear` is the rate divided by N times the rate of one node. The CPU time of the supervisor, the collector and
the model is reported per rollout, at the largest size.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median

import msgspec

from benchmarks import CHECKOUT, Progress, Result
from benchmarks.fault_leftovers import read_command
from benchmarks.faults import MODULES
from benchmarks.instant_model import MODEL, instant_model
from benchmarks.process_usage import cpu_ns, process_tree
from rookery import Context, Engine, Environment
from rookery.cluster.node_resources import list_cores, read_core_ticks
from rookery.core import Completed, Message, SandboxError, SandboxSpec, Task
from rookery.engine import EngineConfig
from rookery.sandboxes.protocol import Command
from rookery.upstreams.protocol import UpstreamConfig

NAME = "cluster-scaling"
SIZES = (1, 2, 4, 8)
CORES_PER_NODE = 2
IN_FLIGHT = {"python": 32, "sandbox": 12}
"""Number of rollouts in flight on each node."""
GROUP = 8
TASKS = 8_000
START_SECONDS = 60.0


class PythonRollout(Environment):
    """Makes four model calls, and is scored by Python code that takes a few milliseconds."""

    async def run(self, ctx: Context) -> None:
        for _ in range(4):
            await ctx.policy.chat(ctx.task.prompt)

    async def score(self, ctx: Context) -> float:  # noqa: ARG002
        return float(sum(number * number % 7 for number in range(60_000)) > 0)


class SandboxRollout(Environment):
    """Makes a model call and a tool call in a sandbox, and is graded in another sandbox."""

    sandbox = SandboxSpec(wall=20.0)

    async def run(self, ctx: Context) -> None:
        await ctx.policy.chat(ctx.task.prompt)
        ctx.state["answer"] = await self._execute(ctx, "echo $((6 * 7))")

    async def score(self, ctx: Context) -> float:
        return float(await self._execute(ctx, f"test {ctx.state['answer']} -eq 42 && echo 1"))

    async def _execute(self, ctx: Context, command: str) -> str:
        sandbox = await ctx.sandbox(SandboxSpec(wall=20.0))
        result = await sandbox.exec(Command(argv=("sh", "-c", command)))
        if not result.ok:
            raise SandboxError(f"a command ended as {result.status}")
        return result.stdout.decode().strip()


ENVIRONMENTS = {"python": PythonRollout, "sandbox": SandboxRollout}


class Measurement(msgspec.Struct, frozen=True):
    """The rate of one run, the CPU milliseconds per rollout outside the nodes, and how busy the cores were."""

    rate: float
    supervisor_ms: float
    collector_ms: float
    model_ms: float
    busy: float


async def run(quick: bool, progress: Progress) -> list[Result]:
    cores = len(list_cores())
    sizes = [size for size in SIZES if CORES_PER_NODE * size <= cores]
    seconds, rounds = (5.0, 1) if quick else (8.0, 2)
    results: list[Result] = []
    for kind in ENVIRONMENTS:
        measured: dict[int, list[Measurement]] = {size: [] for size in sizes}
        for at in range(rounds):
            for size in sizes:
                one = await _measure_in_process(kind, size, seconds)
                progress(f"{kind}, round {at + 1}, {size} nodes: {one.rate:.0f} rollouts/s, {one.busy:.0%} busy")
                measured[size].append(one)
        results += _build_rows(kind, measured, cores)
    return results


def _build_rows(kind: str, measured: dict[int, list[Measurement]], cores: int) -> list[Result]:
    rows, first = [], 0.0
    for size in SIZES:
        name = f"{kind}: {size} node{'s' if size > 1 else ''}"
        if size not in measured:
            note = f"this machine has {cores} cores, and {CORES_PER_NODE * size} are needed"
            rows.append(Result(name=name, unit="1/s", ours=None, note=note))
            continue
        rate = median(one.rate for one in measured[size])
        busy = median(one.busy for one in measured[size])
        first = first or rate
        note = f"its cores were {busy:.0%} busy"
        rows.append(Result(name=name, unit="1/s", ours=rate, lower_is_better=False, note=note))
        if size > 1:
            linear = rate / (size * first)
            rows.append(Result(name=f"{name}, of linear", unit="ratio", ours=linear, target=">= 0.85"))
    largest = measured[max(measured)]
    for part in ("supervisor", "collector", "model"):
        cost = median(getattr(one, f"{part}_ms") for one in largest)
        rows.append(Result(name=f"{kind}: {part}, per rollout", unit="CPU-ms", ours=cost))
    return rows


async def _measure_in_process(kind: str, size: int, seconds: float) -> Measurement:
    """Measure one run in a process of its own."""
    arguments = json.dumps([kind, size, seconds])
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.cluster_scaling", arguments),
        stdout=asyncio.subprocess.PIPE,
        cwd=CHECKOUT,
    )
    output, _ = await program.communicate()
    if program.returncode:
        raise RuntimeError(f"a measuring process exited with {program.returncode}")
    return msgspec.json.decode(output, type=Measurement)


async def measure(kind: str, size: int, seconds: float) -> Measurement:
    """Run rollouts on `size` nodes for a while, and measure their rate when all nodes are fully loaded."""
    cores = list_cores()[: CORES_PER_NODE * size]
    os.sched_setaffinity(0, cores)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rookery-scaling-")))
        os.environ["ROOKERY_NODE_DIR"] = str(folder / "nodes" / "{node}")
        models = [await stack.enter_async_context(instant_model()) for _ in range(size)]
        for position, model in enumerate(models):
            os.sched_setaffinity(model.pid, cores[CORES_PER_NODE * position : CORES_PER_NODE * (position + 1)])
        config = EngineConfig(
            environment=f"benchmarks.cluster_scaling:{ENVIRONMENTS[kind].__name__}",
            upstreams={"policy": UpstreamConfig(urls=tuple(one.tokens_url for one in models), model=MODEL)},
            runners=CORES_PER_NODE,
            cluster=f"local:{size}x{CORES_PER_NODE}",
            concurrency=IN_FLIGHT[kind] * size,
        )
        engine = await stack.enter_async_context(Engine("", config=config, out=folder / "runs"))
        await _wait_for_runners(engine, size)
        collector = next(pid for pid in process_tree([os.getpid()]) if MODULES["collector"] in read_command(pid))
        groups = [os.getpid()], [collector], [model.pid for model in models]
        return await _count(engine, IN_FLIGHT[kind] * size, seconds, groups, cores)


async def _wait_for_runners(engine: Engine, size: int) -> None:
    async with asyncio.timeout(START_SECONDS):
        runners = engine.supervisor.pool.runners
        while sum(one.is_shared for one in runners) < size * CORES_PER_NODE:  # noqa: ASYNC110  (nodes start them)
            await asyncio.sleep(0.1)


async def _count(
    engine: Engine, in_flight: int, seconds: float, groups: tuple[list[int], ...], cores: list[int]
) -> Measurement:
    """Return the rate of an engine and the CPU time of the processes of each group, after a warm-up."""

    def read() -> tuple[float, list[float], tuple[int, int]]:
        return time.perf_counter(), [sum(map(cpu_ns, pids)) / 1e6 for pids in groups], read_core_ticks(cores)

    prompt = (Message("user", "What is six times seven?"),)
    tasks = [Task(id=f"t-{number}", prompt=prompt) for number in range(TASKS)]
    seen, start, began = 0, 0, read()
    warm = time.perf_counter() + seconds / 4
    async for group in engine.groups(tasks, k=GROUP, load_tokens=False):
        if any(one.outcome != Completed() for one in group.rollouts):
            raise RuntimeError(
                f"a group of task {group.task.id} ended as {[one.outcome for one in group.rollouts]}"
            )
        seen += len(group.rollouts)
        if not start and seen >= 2 * in_flight and time.perf_counter() >= warm:
            start, began = seen, read()
        if start and time.perf_counter() - began[0] >= seconds:
            break
    else:
        raise RuntimeError(f"{TASKS * GROUP:,} rollouts are too few for {seconds:g} seconds on this machine")
    ended = read()
    count = seen - start
    supervisor, collector, model = (
        (after - before) / count for before, after in zip(began[1], ended[1], strict=True)
    )
    busy, ticks = (after - before for before, after in zip(began[2], ended[2], strict=True))
    return Measurement(count / (ended[0] - began[0]), supervisor, collector, model, busy / max(1, ticks))


def main() -> None:
    import uvloop

    print(msgspec.json.encode(uvloop.run(measure(*json.loads(sys.argv[1])))).decode())


if __name__ == "__main__":
    main()
