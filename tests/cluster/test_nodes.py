"""A run on several nodes of this machine, with real SIGKILLs and SIGSTOPs of everything that can die."""

import asyncio
import os
import random
import signal
import subprocess
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rookery import Engine
from rookery.cluster import messages, node_pool
from rookery.cluster.agent import FOLDER_VARIABLE
from rookery.cluster.node_resources import list_cores
from rookery.cluster.token_sender import SharedTokens
from rookery.core import Completed, Failed, Group, Limits, UsageError
from rookery.engine.retry import RetryPolicy
from rookery.journal import RunReader
from rookery.telemetry import REGISTRY, catalogue
from tests.cluster.conftest import HeldModel
from tests.engine.conftest import events, records
from tests.engine.crash_run import TASKS, K
from tests.engine.test_crash import start  # noqa: F401  (a fixture)
from tests.processes import cmdline, descendants, send_signal
from tests.waiting import wait_until

pytestmark = pytest.mark.long
Launch = Callable[..., Awaitable[asyncio.subprocess.Process]]


def build_engine(model: HeldModel, tmp_path: Path, **options: Any) -> Engine:
    defaults: dict[str, Any] = {
        "env": "tests.engine.envs:Misbehaving",
        "cluster": "local:2",
        "runners": 1,
        "concurrency": 8,
        "retry": RetryPolicy(base=0.001),
        "limits": Limits(setup=120.0, run=120.0, score=120.0),  # tests hold rollouts, on a slow machine for long
    }
    return Engine(policy=model.url, out=tmp_path / "runs", **defaults | options)


def name_of_agent(pid: int, nodes: Path) -> str:
    """Return the name of the node that an agent manages, from the name of its directory."""
    (folder,) = (path.name for path in nodes.glob(f"*-{pid}") if path.is_dir())
    return "-".join(folder.split("-")[-3:-1])


def find_processes(module: str) -> list[int]:
    return [pid for pid in descendants(os.getpid()) if module.encode() in cmdline(pid)]


async def collect(engine: Engine, tasks: list[Any], k: int = 1) -> list[Group]:
    return [group async for group in engine.groups(tasks, k=k)]


def count_nodes(engine: Engine) -> int:
    """Return the number of nodes that have a runner which accepts attempts."""
    return len({runner.node for runner in engine.supervisor.pool.runners if runner.is_shared})


async def wait_for_nodes(engine: Engine, number: int, seconds: float = 60.0) -> None:
    await wait_until(lambda: count_nodes(engine) == number, seconds)


async def test_every_node_takes_part_and_all_tokens_are_collected(
    model: HeldModel, tmp_path: Path, nodes: Path
) -> None:
    cores = list_cores()
    per_node = len(cores) // 2
    cluster = f"local:2x{per_node}" if per_node else "local:2"
    async with build_engine(model, tmp_path, cluster=cluster) as engine:
        await wait_for_nodes(engine, 2)
        groups = await collect(engine, [f"question {n}" for n in range(30)], k=2)
        status = await engine.status()
        bound = [os.sched_getaffinity(pid) for pid in find_processes("rookery.engine.runner")]
    assert {node["node"] for node in status["nodes"]} == {"node-1", "node-2"}
    expected = [cores[:per_node], cores[per_node : 2 * per_node]] if per_node else [cores, cores]
    assert sorted(map(sorted, bound)) == sorted(map(sorted, expected))
    assert [node["cpus"] for node in status["nodes"]] == [per_node or 1] * 2
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert len(rollouts) == 60
    assert all(rollout.outcome == Completed() and len(rollout.segments) == 1 for rollout in rollouts)
    assert len({rollout.attempts[-1].runner for rollout in rollouts}) == 2
    assert len(list((tmp_path / "runs" / "latest" / "tokens").glob("*.rtk"))) == 2
    assert len(list((tmp_path / "runs" / "latest" / "logs").glob("runner-*.log"))) == 2


@pytest.mark.parametrize("victim", ["agent", "runner", "collector", "frozen collector"])
async def test_death_of_a_process_of_the_cluster_loses_nothing(
    model: HeldModel, tmp_path: Path, nodes: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    if victim == "frozen collector":
        monkeypatch.setattr(node_pool, "COLLECTOR_LOST_SECONDS", 5.0)
    async with build_engine(model, tmp_path) as engine:
        await wait_for_nodes(engine, 2)
        running = asyncio.create_task(collect(engine, [f"hold {n}" for n in range(12)]))
        await model.wait_for_requests(8)
        module = {"agent": "rookery.cluster.agent", "runner": "rookery.engine.runner"}.get(victim)
        died = {"agent": "node.lost", "runner": "runner.died"}.get(victim, "collector.died")
        sent = signal.SIGSTOP if victim == "frozen collector" else signal.SIGKILL
        os.kill(find_processes(module or "rookery.cluster.collector")[0], sent)
        seen = asyncio.Event()
        engine.on_event = lambda kind, _: seen.set() if kind == died else None
        await asyncio.wait_for(seen.wait(), 60)
        model.release.set()
        groups = await asyncio.wait_for(running, 90)
        if victim == "agent":  # its launcher starts it again, and it joins as a new node
            await wait_for_nodes(engine, 2)
    assert Counter(rollout.outcome for group in groups for rollout in group.rollouts) == {Completed(): 12}
    assert sorted(record.id for record in records(tmp_path)) == sorted(f"{n}.0" for n in range(12))
    causes = {
        attempt.outcome.cause
        for record in records(tmp_path)
        for attempt in record.attempts
        if isinstance(attempt.outcome, Failed)
    }
    assert causes == {"agent": {"machine.lost"}, "runner": {"runner.lost"}}.get(victim, set())
    assert all(
        attempt.charged for r in records(tmp_path) for attempt in r.attempts if attempt.outcome == Completed()
    )


async def test_frozen_node_is_fenced_and_counts_nothing_when_it_comes_back(
    model: HeldModel, tmp_path: Path, nodes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that cannot be reached: its processes are stopped, so that its connections stay open and silent."""
    monkeypatch.setattr(messages, "LOST_SECONDS", 4.0)
    async with build_engine(model, tmp_path) as engine:
        await wait_for_nodes(engine, 2)
        running = asyncio.create_task(collect(engine, [f"hold {n}" for n in range(8)]))
        await model.wait_for_requests(8)
        agent = find_processes("rookery.cluster.agent")[0]
        name, frozen = name_of_agent(agent, nodes), [agent, *descendants(agent)]
        send_signal(frozen, signal.SIGSTOP)
        try:
            await wait_for_nodes(engine, 1)
            model.release.set()
            groups = await asyncio.wait_for(running, 60)
        finally:
            send_signal(frozen, signal.SIGCONT)  # the agent, which comes first, may already kill the others
        await wait_for_nodes(engine, 2)  # it joins again, with nothing left of what it did
    assert Counter(rollout.outcome for group in groups for rollout in group.rollouts) == {Completed(): 8}
    assert Counter(record.id for record in records(tmp_path)) == {f"{n}.0": 1 for n in range(8)}
    lost = [r for r in records(tmp_path) if any(isinstance(a.outcome, Failed) for a in r.attempts)]
    assert lost
    # On a busy machine, the other node may be silent for as long.
    assert name in {event["node"] for event in events(tmp_path, "node.lost")}


async def test_node_whose_token_files_were_removed_is_lost_and_its_attempts_run_again(
    model: HeldModel, tmp_path: Path, nodes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_pool, "UNCOLLECTED_SECONDS", 15.0)
    async with build_engine(model, tmp_path) as engine:
        await wait_for_nodes(engine, 2)
        groups = await collect(engine, [f"question {n}" for n in range(8)])
        running = asyncio.create_task(collect(engine, [f"hold {n}" for n in range(8)]))
        await model.wait_for_requests(16)
        for file in nodes.glob("*-node-1-*/tokens/*.rtk"):
            file.unlink()
        model.release.set()
        groups += await asyncio.wait_for(running, 90)
    assert Counter(rollout.outcome for group in groups for rollout in group.rollouts) == {Completed(): 16}
    assert all(rollout.segments for group in groups for rollout in group.rollouts)
    failed = [a.outcome for r in records(tmp_path) for a in r.attempts if isinstance(a.outcome, Failed)]
    assert {outcome.cause for outcome in failed} == {"machine.lost"}
    assert "node-1" in {event["node"] for event in events(tmp_path, "node.lost")}


def fill(folder: Path) -> Path:
    """Write a file until the file system is full, and return it."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(64 << 10))
    return path


@pytest.mark.needs("mount")
async def test_node_with_a_full_disk_is_fenced_and_joins_again_when_there_is_space(
    model: HeldModel, tmp_path: Path, nodes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory of one node is on a small file system of its own."""
    disk = tmp_path / "disks" / "node-1"
    disk.mkdir(parents=True, mode=0o700)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "disks" / "{node}"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m,mode=700", "rookery-test", disk], check=True)
    try:
        async with build_engine(model, tmp_path) as engine:
            await wait_for_nodes(engine, 2)
            filler = fill(disk)
            groups = await asyncio.wait_for(collect(engine, [f"question {n}" for n in range(12)]), 120)
            lost = {event["node"] for event in events(tmp_path, "node.lost")}
            filler.unlink()
            await wait_for_nodes(engine, 2)
            groups += await asyncio.wait_for(collect(engine, [f"again {n}" for n in range(12)]), 120)
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", disk], check=True)
    assert lost == {"node-1"}
    assert Counter(rollout.outcome for group in groups for rollout in group.rollouts) == {Completed(): 24}
    failed = [a.outcome for r in records(tmp_path) for a in r.attempts if isinstance(a.outcome, Failed)]
    assert {outcome.cause for outcome in failed} == {"machine.lost"}


async def test_labelled_tasks_run_on_their_node_and_delay_no_others(
    model: HeldModel, tmp_path: Path, nodes: Path
) -> None:
    options = {"retry": RetryPolicy(attempts=1), "limits": Limits(queue=20.0), "concurrency": 4}
    tasks = [{"prompt": "none", "node_labels": {"zone": "nowhere"}} for _ in range(3)]
    tasks += [{"prompt": f"question {n}", "node_labels": {"node": "node-2"}} for n in range(9)]
    tasks += [{"prompt": f"question {n}"} for n in range(9)]
    async with build_engine(model, tmp_path, **options) as engine:
        await wait_for_nodes(engine, 2)
        places = {runner.name: runner.node for runner in engine.supervisor.pool.runners}
        groups = sorted(await asyncio.wait_for(collect(engine, tasks), 90), key=lambda group: group.index)
    rollouts = [group.rollouts[0] for group in groups]
    assert [one.outcome.cause for one in rollouts[:3] if isinstance(one.outcome, Failed)] == ["engine.queue"] * 3
    assert {one.outcome for one in rollouts[3:]} == {Completed()}
    assert {places[one.attempts[-1].runner] for one in rollouts[3:12]} == {"node-2"}


async def test_nodes_that_share_the_run_directory_write_tokens_there(
    model: HeldModel, tmp_path: Path, nodes: Path
) -> None:
    async with build_engine(model, tmp_path, shared_files=True) as engine:
        await wait_for_nodes(engine, 2)
        running = asyncio.create_task(collect(engine, [f"hold {n}" for n in range(12)], k=2))
        await model.wait_for_requests(8)
        os.kill(find_processes("rookery.engine.runner")[0], signal.SIGKILL)
        model.release.set()
        groups = await asyncio.wait_for(running, 90)
        links = [path for path in nodes.glob("*/tokens") if path.is_symlink()]
    assert len(links) == 2
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert Counter(rollout.outcome for rollout in rollouts) == {Completed(): 24}
    assert all(len(rollout.segments) == 1 for rollout in rollouts)
    tokens = tmp_path / "runs" / "latest" / "tokens"
    assert {extent.file for rollout in rollouts for extent in rollout.tokens} <= set(os.listdir(tokens))
    assert all(path.suffix == ".rtk" for path in tokens.iterdir())


async def test_node_that_does_not_share_the_run_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    with pytest.raises(UsageError):
        SharedTokens(tmp_path, tmp_path / "elsewhere" / ".shared-1")
    with pytest.raises(UsageError):
        Engine("arithmetic", policy="http://127.0.0.1:9", out=tmp_path, shared_files=True)


async def test_drained_node_finishes_its_attempts_and_leaves(
    model: HeldModel, tmp_path: Path, nodes: Path
) -> None:
    async with build_engine(model, tmp_path) as engine:
        await wait_for_nodes(engine, 2)
        running = asyncio.create_task(collect(engine, [f"hold {n}" for n in range(20)]))
        await model.wait_for_requests(8)
        with pytest.raises(UsageError):
            await engine.drain("node-9")
        assert engine.folder is not None
        async with await Engine.connect(engine.folder) as operator:
            draining = asyncio.create_task(operator.drain("node-1"))
            await wait_for_nodes(engine, 1)
            assert not draining.done()
            model.release.set()
            await asyncio.wait_for(draining, 60)
        groups = await asyncio.wait_for(running, 60)
        assert [node["node"] for node in (await engine.status())["nodes"]] == ["node-2"]
    assert all(len(rollout.attempts) == 1 for group in groups for rollout in group.rollouts)
    assert len(events(tmp_path, "node.left")) == 2  # the other one at the end of the run


async def test_pause_reaches_every_node_and_a_node_that_misses_it_is_fenced(
    model: HeldModel, tmp_path: Path, nodes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with build_engine(model, tmp_path) as engine:
        await wait_for_nodes(engine, 2)
        pauses = engine.supervisor.pool.pauses
        await pauses.pause("abort", timeout=30.0, deadline=None)
        await pauses.resume(1)
        assert count_nodes(engine) == 2
        monkeypatch.setattr(node_pool, "PAUSE_SLACK_SECONDS", 8.0)
        runner = find_processes("rookery.engine.runner")[0]
        os.kill(runner, signal.SIGSTOP)
        await asyncio.wait_for(pauses.pause("abort", timeout=0.5, deadline=None), 60)
        await pauses.resume(2)
        await wait_for_nodes(engine, 2)
        groups = await collect(engine, [f"question {n}" for n in range(4)])
    assert len(events(tmp_path, "node.lost")) == 1
    assert {span.version for g in groups for r in g.rollouts for s in r.segments for span in s.versions} == {2}


def sum_metric(name: str) -> float:
    return sum(values[0] for values in REGISTRY.read().get(name, {}).values())


async def test_each_node_has_a_gateway_that_is_paused_with_the_run(
    model: HeldModel, tmp_path: Path, nodes: Path
) -> None:
    env = "tests.engine.gateway_envs:RemoteProgram"
    options: dict[str, Any] = {"cluster": "local:2", "runners": 1, "concurrency": 4, "metrics": "127.0.0.1:0"}
    engine = Engine(env, policy=model.url, out=tmp_path / "runs", **options)
    turns = catalogue.GATEWAY_COUNTS["turns"].name
    before = sum_metric(turns)
    async with engine:
        await wait_for_nodes(engine, 2)
        pauses = engine.supervisor.pool.pauses
        await asyncio.wait_for(pauses.pause("drain", timeout=10.0, deadline=None), 60)
        await pauses.resume(7)
        groups = await collect(engine, [f"question {n}" for n in range(8)])
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        recorded = sum(rollout.usage.turns for rollout in rollouts)
        await wait_until(lambda: sum_metric(turns) - before == recorded)
    assert all(rollout.reward == 1.0 for rollout in rollouts)
    assert {span.version for r in rollouts for segment in r.segments for span in segment.versions} == {7}
    assert len({str(rollout.info["url"]).partition("/v1")[0] for rollout in rollouts}) == 2


async def test_killed_supervisor_can_be_resumed_and_nodes_are_cleaned(
    model: HeldModel,
    tmp_path: Path,
    nodes: Path,
    start: Launch,  # noqa: F811
) -> None:
    rng = random.Random(0)
    folder = tmp_path / "runs"
    run = await start("new", folder, model.url, "local:2")
    for _ in range(2):
        await model.wait_for_requests(len(model.requests) + rng.randrange(5, 15))
        pids = descendants(run.pid)
        run.kill()
        await run.wait()
        await wait_until(lambda: not any(b"rookery" in cmdline(pid) for pid in pids))  # noqa: B023
        run = await start("resume", folder, model.url)
    assert await asyncio.wait_for(run.wait(), 120) == 0
    with RunReader(folder / "latest") as reader:
        written = list(reader.iter_rollouts())
        assert Counter(record.id for record in written) == {f"{g}.{m}": 1 for g in range(TASKS) for m in range(K)}
        for record in written:
            assert record.outcome == Completed(), record
            assert len(reader.turns(record)) == 1


@pytest.mark.parametrize(
    "cluster", ["nowhere", "local:none", "local:0", "local:2x0", "local:2x", "local:1x999999"]
)
def test_wrong_cluster_is_refused_at_construction(tmp_path: Path, cluster: str) -> None:
    with pytest.raises(UsageError):
        Engine("arithmetic", policy="http://127.0.0.1:9", out=tmp_path, cluster=cluster)
    with pytest.raises(UsageError):
        Engine("arithmetic", policy="http://127.0.0.1:9", out=tmp_path, cluster="local:1", runners=0)
