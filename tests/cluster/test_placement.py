"""Placement: by free capacity, speed and labels, bounded per node."""

import os
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.cluster import build_pool
from rookery.cluster import node_resources
from rookery.cluster.node_pool import MAX_CANDIDATES
from rookery.cluster.node_resources import (
    ATTEMPTS_VARIABLE,
    LABELS_VARIABLE,
    CpuMeter,
    read_available_memory,
    read_cgroup_memory,
    read_resources,
)
from rookery.cluster.placement import MIN_MEMORY, NodeLoad, NodeResources, choose_node
from rookery.core import SandboxSpec, Task, UsageError
from rookery.engine.prewarm import PrewarmPlan
from rookery.engine.scheduler import NO_REQUIREMENTS, Requirements


def node(name: str, cpus: int = 2, *, seconds: float = 0.0, **resources: Any) -> NodeLoad:
    return NodeLoad(name, NodeResources(cpus, **resources), seconds=seconds)


def place(
    nodes: list[NodeLoad],
    number: int,
    *,
    concurrency: int,
    total_cpus: int | None = None,
    gpus: int = 0,
    labels: dict[str, str] | None = None,
) -> Counter[str]:
    total = total_cpus or sum(one.resources.cpus for one in nodes)
    required = Requirements(gpus, frozenset((labels or {}).items()))
    placed = Counter[str]()
    for _ in range(number):
        chosen = choose_node(nodes, concurrency=concurrency, total_cpus=total, required=required)
        if chosen is None:
            break
        placed[chosen.name] += 1
        chosen.running += 1
        chosen.gpus_used += gpus
    return placed


def test_attempts_are_spread_by_cpus() -> None:
    assert place([node("a", 2), node("b", 6)], 80, concurrency=80) == {"a": 20, "b": 60}


def test_slow_node_gets_less() -> None:
    nodes = [node("fast", 4, seconds=1.0), node("slow", 4, seconds=3.0)]
    assert place(nodes, 40, concurrency=40) == {"fast": 30, "slow": 10}


def test_node_that_is_busy_with_other_programs_gets_less() -> None:
    nodes = [node("idle", 4), node("busy", 4)]
    for _ in range(100):
        nodes[0].update(memory=1.0, cpu=1.0)
        nodes[1].update(memory=1.0, cpu=0.5)
    assert place(nodes, 30, concurrency=60) == {"idle": 20, "busy": 10}
    nodes = [node("idle", 4), node("busy", 4)]
    nodes[1].cpu = 0.0
    assert place(nodes, 30, concurrency=60) == {"idle": 24, "busy": 6}


def test_very_slow_node_still_gets_some() -> None:
    nodes = [node("fast", 4, seconds=1.0), node("slow", 4, seconds=1000.0)]
    assert place(nodes, 50, concurrency=50) == {"fast": 40, "slow": 10}


def test_last_node_does_not_get_everything() -> None:
    assert place([node("a", 2)], 100, concurrency=100, total_cpus=20) == {"a": 20}


def test_node_without_memory_and_draining_node_get_nothing() -> None:
    nodes = [node("full"), node("leaving"), node("ok")]
    nodes[0].update(MIN_MEMORY / 2, cpu=1.0)
    nodes[1].draining = True
    assert place(nodes, 4, concurrency=12) == {"ok": 4}
    assert choose_node(nodes[:2], concurrency=12, total_cpus=6) is None


def test_attempts_that_started_since_the_last_heartbeat_count_against_the_memory() -> None:
    small, large = node("small", 8), node("large", 8)
    for one in (small, large):
        one.running = 4
        one.memory_at_join = 0.9
    small.update(0.5, cpu=1.0)  # four attempts use 40% of its memory
    large.update(cpu=1.0, memory=0.86)
    assert place([small, large], 40, concurrency=48) == {"small": 4, "large": 36}
    small.update(0.5, cpu=1.0)  # they need less than was expected
    assert place([small], 40, concurrency=48, total_cpus=16)["small"] > 4


def test_limit_of_a_node_is_kept() -> None:
    assert place([node("a", 8, attempts=3), node("b", 8)], 40, concurrency=20) == {"a": 3, "b": 20}


def test_attempts_with_gpus_go_to_nodes_with_free_gpus() -> None:
    nodes = [node("none", 8), node("two", 2, gpus=2), node("eight", 2, gpus=8)]
    assert place(nodes, 40, concurrency=80, gpus=2) == {"two": 1, "eight": 4}
    assert place(nodes, 9, concurrency=80) == {"none": 8, "two": 1}  # attempts without GPUs do not wait for them


async def test_attempts_of_a_mixture_wait_only_for_the_gpus_of_their_own_environment() -> None:
    sandboxes = {"cuda": SandboxSpec(gpus=2), "plain": SandboxSpec()}
    plain, cuda = (Task(id=name, prompt=(), environment=name) for name in ("plain", "cuda"))
    nodes = build_pool({"small": NodeResources(4), "large": NodeResources(4, gpus=4)}, sandboxes)
    pool = nodes.runner_pool
    placed = Counter[str]()
    for number in range(12):
        task = cuda if number < 4 else plain
        runner = pool.find_free_runner(pool.requirements_of(task))
        if runner is not None:
            placed[f"{task.id} on {runner.node}"] += 1
            runner.running[str(number)] = SimpleNamespace(spec=SimpleNamespace(task=task))
    assert placed == {"cuda on large": 2, "plain on small": 5, "plain on large": 3}
    small, large = (nodes.nodes[name].find_shared_runner() for name in ("small", "large"))
    assert small is not None
    assert large is not None
    assert [pool.accepts(one, pool.requirements_of(cuda)) for one in (small, large)] == [False, False]
    assert pool.is_waiting_for_gpus(pool.requirements_of(cuda))
    assert not pool.is_waiting_for_gpus(Requirements(gpus=5))
    large.running.clear()
    assert pool.find_free_runner(pool.requirements_of(cuda)) is large


async def test_sandboxes_are_prepared_where_attempts_would_run() -> None:
    resources = {
        "small": NodeResources(2, attempts=1),
        "large": NodeResources(6),
        "labelled": NodeResources(1, labels={"zone": "b"}),
    }
    nodes = build_pool(resources, {}, warm=8)
    pool = nodes.runner_pool
    tasks = [Task(id="plain", prompt=()), Task(id="in zone b", prompt=(), node_labels={"zone": "b"})]
    plan = PrewarmPlan(8, pool.find_runner_to_prewarm)
    assigned = plan.assign([(tasks[0], 6), (tasks[1], 2)])
    planned = {runner.node: {task.id: count for task, count in has} for runner, has in assigned.items()}
    assert planned == {"small": {"plain": 1}, "large": {"plain": 4}, "labelled": {"plain": 1, "in zone b": 2}}
    small = pool.runners[0]
    assert pool.find_free_runner(preferred=small) is small
    small.running["1"] = SimpleNamespace(spec=SimpleNamespace(task=tasks[0]))  # type: ignore[assignment]
    elsewhere = pool.find_free_runner(preferred=small)  # its node has as many attempts as it may have
    assert elsewhere is not None
    assert elsewhere is not small


async def test_attempts_are_spread_over_more_nodes_than_are_compared_for_one() -> None:
    number = 3 * MAX_CANDIDATES
    nodes = build_pool({f"node-{at}": NodeResources(4) for at in range(number)}, {}, concurrency=8 * number)
    for at in range(8 * number):
        runner = nodes.find_free_runner(NO_REQUIREMENTS)
        assert runner is not None
        runner.running[str(at)] = None
    counts = [node.count_running() for node in nodes.nodes.values()]
    assert max(counts) <= 10
    for runner in nodes.runner_pool.runners[1:]:
        runner.retiring = True
    assert nodes.find_free_runner(NO_REQUIREMENTS) is nodes.runner_pool.runners[0]  # the last one is found


def test_labelled_task_runs_only_on_nodes_with_all_its_labels() -> None:
    nodes = [node("plain"), node("zone", labels={"zone": "b"}), node("both", labels={"zone": "b", "disk": "fast"})]
    assert place(nodes, 6, concurrency=60, labels={"zone": "b"}) == {"zone": 3, "both": 3}
    assert place(nodes, 2, concurrency=60, labels={"zone": "b", "disk": "fast"}) == {"both": 2}
    assert place(nodes, 2, concurrency=60, labels={"zone": "c"}) == {}


def test_speed_is_a_decayed_mean() -> None:
    one = node("a", 1)
    for _ in range(200):
        one.observe(4.0)
    for _ in range(200):
        one.observe(1.0)
    assert 1.0 <= one.seconds < 1.01


def test_labels_and_limit_of_a_node_are_read_from_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LABELS_VARIABLE, "zone=b, disk=")
    monkeypatch.setenv(ATTEMPTS_VARIABLE, "7")
    found = read_resources("n", NodeResources(3, 2, labels={"zone": "a", "rack": "1"}))
    assert (found.labels, found.attempts) == ({"node": "n", "zone": "b", "disk": "", "rack": "1"}, 7)
    assert (found.cpus, found.gpus) == (3, 2)
    assert read_resources("n").cpus == len(os.sched_getaffinity(0))
    for name, value in ((LABELS_VARIABLE, "zone"), (LABELS_VARIABLE, "=b"), (ATTEMPTS_VARIABLE, "many")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(UsageError):
                read_resources("n")


@pytest.mark.parametrize(
    ("limit", "usage", "cache"),
    [
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_memory_limit_of_a_container_bounds_the_available_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, usage: str, cache: str
) -> None:
    folders = tmp_path, tmp_path / "memory"  # of cgroup v2, and of v1
    folders[1].mkdir()

    def write(name: str, text: str) -> None:
        for folder in folders:
            (folder / name).write_text(f"{text}\n")

    write(usage, "800")
    write("memory.stat", f"anon 500\n{cache} 300")
    for text, available in (("1000", 0.5), ("400", 0.0), ("max", 1.0)):
        write(limit, text)
        assert read_cgroup_memory(tmp_path) == available
    assert read_cgroup_memory(tmp_path / "none") == 1.0
    assert 0.0 < read_available_memory() < 1.0
    write(limit, "501")
    monkeypatch.setattr(node_resources, "CGROUPS", tmp_path)
    assert read_available_memory() < 0.01


def test_free_cpu_time_is_measured() -> None:
    meter = CpuMeter()
    end = time.monotonic() + 60
    while (free := meter.read_free()) == 1.0:  # this loop keeps one core busy
        assert time.monotonic() < end
    assert 0.0 <= free < 1.0
