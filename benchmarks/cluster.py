"""Benchmark `cluster`: what a rollout costs the processes that exist once per cluster.

The supervisor, the journal and the collector are on one machine, however many nodes a run has. Their CPU time per
rollout and per megabyte of tokens limits the size of a cluster. Rollouts have one turn of 256 tokens with IDs and
log probabilities, on two nodes of this machine (`--cluster local:2`). The wall-clock rate depends on this
machine's cores, which also run the nodes and the model, so most figures are CPU times. Heartbeats and the journal
are also measured alone: the messages that the supervisor can answer, and the records that it can commit. So is the
choice of a node for an attempt, on a cluster of 1,000 nodes.
"""

import asyncio
import os
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgspec

from benchmarks import Progress, Result
from benchmarks.engine import bench_env
from benchmarks.fault_leftovers import read_command
from benchmarks.faults import MODULES
from benchmarks.instant_model import instant_model
from benchmarks.process_usage import cpu_ns, process_tree
from rookery import Engine
from rookery.cluster.launchers import LocalLauncher
from rookery.cluster.messages import NodeBeat
from rookery.cluster.node_pool import Node, NodePool
from rookery.cluster.placement import NodeResources
from rookery.cluster.remote_runner import RemoteRunner
from rookery.core import Completed, Extent, Message, Rollout, SandboxSpec, Task
from rookery.engine.config import DEFAULT_WARM
from rookery.engine.group_channel import GroupChannel, PlannedGroup
from rookery.engine.prewarm import Prewarmer, iter_upcoming
from rookery.engine.runner_handle import RunnerHandle
from rookery.engine.runner_pool import RunnerPool
from rookery.engine.scheduler import NO_REQUIREMENTS, GroupScheduler
from rookery.journal import Journal

if TYPE_CHECKING:
    from rookery.engine.runner_pool import PoolOwner
    from rookery.engine.runner_protocol import RunSettings
    from rookery.environments import Environment

NAME = "cluster"
NODES = 2
IN_FLIGHT = 128
WARM_UP = 500
MANY_NODES = 1_000
FLUSH_EVERY = 1_000
"""The journal is flushed after this many records, because its queue is bounded."""


async def run(quick: bool, progress: Progress) -> list[Result]:
    rollouts = 3_000 if quick else 20_000
    progress(f"{rollouts:,} rollouts on {NODES} nodes of this machine")
    with tempfile.TemporaryDirectory(prefix="rookery-cluster-") as folder:
        async with (
            instant_model() as model,
            Engine(
                bench_env,
                policy=model.tokens_url,
                out=folder,
                cluster=f"local:{NODES}",
                runners=1,
                concurrency=IN_FLIGHT,
            ) as engine,
        ):
            async for _ in engine.groups(_tasks(WARM_UP), name="warm-up", load_tokens=False):
                pass
            collector = _find_process("collector")
            before, began = (cpu_ns(os.getpid()), cpu_ns(collector)), time.perf_counter()
            size = _token_bytes(Path(folder))
            async for group in engine.groups(_tasks(rollouts), load_tokens=False):
                if group.rollouts[0].outcome != Completed():
                    raise RuntimeError(f"rollout {group.rollouts[0].id} ended as {group.rollouts[0].outcome}")
            seconds = time.perf_counter() - began
            supervisor_ms = (cpu_ns(os.getpid()) - before[0]) / 1e6
            collector_ms = (cpu_ns(collector) - before[1]) / 1e6
            megabytes = (_token_bytes(Path(folder)) - size) / 1e6
    progress("heartbeats and journal alone")
    numbers = 50_000 if quick else 500_000
    beats = await measure_heartbeats(numbers)
    placements = await measure_placement(numbers // 10)
    warm_placements = await measure_prewarming(numbers // 50)
    return [
        Result(name="supervisor and journal, per rollout", unit="CPU-ms", ours=supervisor_ms / rollouts),
        Result(name="rollouts per second of its core", unit="1/s", ours=1e3 * rollouts / supervisor_ms),
        Result(name="collector, per MB of tokens", unit="CPU-ms", ours=collector_ms / megabytes),
        Result(name="tokens per second of its core", unit="MB/s", ours=1e3 * megabytes / collector_ms),
        Result(name="tokens of a rollout of 256 tokens", unit="kB", ours=1e3 * megabytes / rollouts),
        Result(name="rollouts per second on this machine", unit="1/s", ours=rollouts / seconds),
        Result(name="heartbeats answered per second of a core", unit="1/s", ours=beats),
        Result(name=f"attempts placed on {MANY_NODES:,} nodes per second", unit="1/s", ours=placements),
        Result(name="the same, with sandboxes created in advance", unit="1/s", ours=warm_placements),
        *measure_journal(numbers // 5),
    ]


def build_pool(
    resources: Mapping[str, NodeResources],
    sandboxes: Mapping[str, SandboxSpec],
    concurrency: int = 12,
    runners: int = 1,
    warm: int = 0,
) -> NodePool:
    """Return the nodes of a run with their runners, without starting anything.

    `sandboxes` are the sandbox specs of the environments of a mixture, and `runners` is their number on each node.
    """
    none = SandboxSpec()
    settings = SimpleNamespace(
        sandbox=none, sandboxes=sandboxes, sandbox_of=lambda name: sandboxes.get(name, none), warm=warm
    )
    nodes = NodePool(LocalLauncher("1"))
    pool = RunnerPool(
        cast("PoolOwner", None),
        cast("RunSettings", settings),
        cast("Environment", None),
        size=runners,
        capacity=concurrency,
        block_limit=1.0,
        cluster=nodes,
    )
    nodes.attach(pool, concurrency)
    for name, has in resources.items():
        node = nodes.nodes[name] = Node(nodes, name, 1)
        node.load.resources, node.settings = has, pool.settings
        for number in range(runners):
            runner = nodes.create_runner(f"runner-{name}-{number}", name, NO_REQUIREMENTS)
            assert isinstance(runner, RemoteRunner)
            node.runners[runner.name] = runner
            runner.ready = True
            pool.runners.append(runner)
    nodes.count_cpus()
    return nodes


async def measure_placement(number: int) -> float:
    """Return how many attempts a core places per second on a cluster of `MANY_NODES` nodes that are half full."""
    resources = {f"node-{at}": NodeResources(16) for at in range(MANY_NODES)}
    nodes = build_pool(resources, {}, concurrency=64 * MANY_NODES, runners=16)
    placed: deque[tuple[RunnerHandle, str]] = deque()
    total = 32 * MANY_NODES + number
    began = 0.0
    attempt: Any = None  # the placement only counts attempts
    for at in range(total):
        if at == total - number:
            began = time.process_time()
        runner = nodes.find_free_runner(NO_REQUIREMENTS)
        assert runner is not None
        runner.running[str(at)] = attempt
        placed.append((runner, str(at)))
        if len(placed) > 32 * MANY_NODES:
            oldest, name = placed.popleft()
            del oldest.running[name]
    return number / (time.process_time() - began)


async def measure_prewarming(number: int) -> float:
    """Return how many attempts a core places per second on these nodes if sandboxes are created in advance."""
    resources = {f"node-{at}": NodeResources(16) for at in range(MANY_NODES)}
    nodes = build_pool(resources, {}, concurrency=64 * MANY_NODES, runners=16, warm=DEFAULT_WARM)
    prewarmer = Prewarmer(nodes.runner_pool, DEFAULT_WARM)
    tasks = _tasks(number)
    groups = (PlannedGroup(at, at, task) for at, task in enumerate(tasks))
    channel = GroupChannel("main", GroupScheduler(k=1), groups, None)
    channel.upcoming = lambda: iter_upcoming(tasks, 1, channel)
    attempt: Any = None  # the placement only counts attempts
    began = time.process_time()
    for at in range(number):
        prewarmer.update([channel])
        runner = nodes.runner_pool.find_free_runner(preferred=prewarmer.find_runner(tasks[at].id))
        assert runner is not None
        runner.running[str(at)] = attempt
        channel.next_group()
    return number / (time.process_time() - began)


class Discard(asyncio.Transport):
    """A transport that discards what is written."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def is_closing(self) -> bool:
        return False


async def measure_heartbeats(number: int) -> float:
    """Return how many heartbeats of nodes a core receives and answers per second, without the socket calls."""
    node = Node(NodePool(LocalLauncher("1")), "node-1", 1)
    node.connection.connection_made(Discard())
    frame = msgspec.msgpack.encode(NodeBeat(0.5, 0.5))
    data = len(frame).to_bytes(4, "little") + frame
    began = time.process_time()
    for _ in range(number):  # each arrives alone: a node sends one per second
        node.connection.data_received(data)
        node.connection.flush()
    return number / (time.process_time() - began)


def measure_journal(number: int) -> list[Result]:
    """Measure how many records the journal commits per second, by CPU time and by wall-clock time."""
    with (
        tempfile.TemporaryDirectory(prefix="rookery-journal-") as folder,
        Journal.create(Path(folder), {}) as journal,
    ):
        journal.add_tasks(_tasks(1))
        cpu, began = time.process_time(), time.perf_counter()
        for index in range(number):
            journal.add_group(index, stream="", position=index, task=0, k=1)
            extents = (Extent("runner-1.abc-0.rtk", 7_000 * index, 7_000, index),)
            journal.add_rollout(
                Rollout(
                    id=f"{index}.0",
                    group=index,
                    member=0,
                    task="t-0",
                    outcome=Completed(),
                    reward=1.0,
                    tokens=extents,
                )
            )
            if index % FLUSH_EVERY == 0:
                journal.flush()
        journal.flush()
        cpu, seconds = time.process_time() - cpu, time.perf_counter() - began
    return [
        Result(name="records committed per second of a core", unit="1/s", ours=number / cpu),
        Result(name="records committed per second on this disk", unit="1/s", ours=number / seconds),
    ]


def _tasks(number: int) -> list[Task]:
    prompt = (Message("user", "What is six times seven?"),)
    return [Task(id=f"t-{position}", prompt=prompt) for position in range(number)]


def _find_process(kind: str) -> int:
    return next(pid for pid in process_tree([os.getpid()]) if MODULES[kind] in read_command(pid))


def _token_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*/tokens/*.rtk"))
