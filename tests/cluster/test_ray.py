"""A run on a Ray cluster of three nodes on this machine, with real SIGKILLs."""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rookery import Engine
from rookery.cluster.agent import FOLDER_VARIABLE
from rookery.core import Completed, Failed, Limits, UsageError
from rookery.engine.retry import RetryPolicy
from rookery.journal import RunReader
from tests.cluster.conftest import HeldModel
from tests.cluster.test_nodes import Launch, collect, wait_for_nodes
from tests.engine.conftest import events, records
from tests.engine.crash_run import TASKS, K
from tests.engine.test_crash import start  # noqa: F401  (a fixture)
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    """A Ray cluster of three nodes. The nodes' directory of agents must be empty when it ends."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # short: Ray puts Unix sockets there
    settings = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_TMPDIR": str(folder),
        "PYTHONPATH": os.getcwd(),
        FOLDER_VARIABLE: str(folder / "nodes"),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        import ray
        from ray.cluster_utils import Cluster

        try:
            cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
            try:
                for _ in range(2):
                    cluster.add_node(num_cpus=1)
                yield cluster
            finally:
                ray.shutdown()
                cluster.shutdown()
            left = list((folder / "nodes").glob("*"))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    assert left == []


def run_on_another_node(cluster: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a Ray task on a node that is not the head."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if not ray.is_initialized():
        ray.init(address=cluster.address, log_to_driver=False)
    node = cluster.list_all_nodes()[-1].node_id
    affinity = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.get(ray.remote(num_cpus=0)(function).options(scheduling_strategy=affinity).remote(*arguments))


def read_groups(url: str) -> list[tuple[str, int]]:
    """Get groups as a trainer does. Return the node of this process and the number of segments of each group."""

    async def read() -> list[int]:
        async with await Engine.connect(url) as engine:
            return [len(group.rollouts[0].segments) async for group in engine.groups(["a", "b"], k=1)]

    import ray

    return [(ray.get_runtime_context().get_node_id(), count) for count in asyncio.run(read())]


def resume(folder: str, url: str) -> int:
    command = [sys.executable, "-m", "tests.engine.crash_run", "resume", folder, url]
    return subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode


async def test_killed_node_is_replaced_and_a_new_node_joins(
    model: HeldModel, tmp_path: Path, ray_cluster: Any
) -> None:
    engine = Engine(
        "tests.engine.envs:Misbehaving",
        policy=model.url,
        out=tmp_path / "runs",
        cluster=f"ray:{ray_cluster.address}",
        runners=1,
        concurrency=9,
        retry=RetryPolicy(base=0.001),
        limits=Limits(run=200.0),
        listen="tcp://127.0.0.1:0",
    )
    async with engine:
        await wait_for_nodes(engine, 3)
        running = asyncio.create_task(collect(engine, [f"hold {n}" for n in range(18)]))
        await model.wait_for_requests(9)
        victim = ray_cluster.list_all_nodes()[-1]
        await asyncio.to_thread(ray_cluster.remove_node, victim, allow_graceful=False)
        await wait_for_nodes(engine, 2)
        ray_cluster.add_node(num_cpus=1)  # in the main thread, as Ray requires
        await wait_for_nodes(engine, 3)
        model.release.set()
        groups = await asyncio.wait_for(running, 90)
        trainer = ray_cluster.list_all_nodes()[-1].node_id
        read = await asyncio.to_thread(run_on_another_node, ray_cluster, read_groups, engine.control_url)
    assert read == [(trainer, 1), (trainer, 1)]
    assert Counter(rollout.outcome for group in groups for rollout in group.rollouts) == {Completed(): 18}
    assert all(rollout.segments for group in groups for rollout in group.rollouts)
    failed = [a.outcome for r in records(tmp_path) for a in r.attempts if isinstance(a.outcome, Failed)]
    assert {outcome.cause for outcome in failed} == {"machine.lost"}
    assert len(events(tmp_path, "node.lost")) == 1
    assert len(events(tmp_path, "node.joined")) == 4


async def test_unreachable_ray_cluster_is_refused(model: HeldModel, tmp_path: Path) -> None:
    engine = Engine("arithmetic", policy=model.url, out=tmp_path / "runs", cluster="ray:127.0.0.1:9", runners=1)
    with pytest.raises(UsageError):
        async with engine:
            pass


async def test_run_on_ray_is_resumed_on_another_node_after_its_supervisor_was_killed(
    model: HeldModel,
    tmp_path: Path,
    ray_cluster: Any,
    start: Launch,  # noqa: F811
) -> None:
    folder = tmp_path / "runs"
    run = await start("new", folder, model.url, f"ray:{ray_cluster.address}")
    await model.wait_for_requests(10)
    run.kill()
    await run.wait()
    code = await asyncio.to_thread(run_on_another_node, ray_cluster, resume, str(folder), model.url)
    assert code == 0
    with RunReader(folder / "latest") as reader:
        written = list(reader.iter_rollouts())
        assert Counter(record.id for record in written) == {f"{g}.{m}": 1 for g in range(TASKS) for m in range(K)}
        assert all(record.outcome == Completed() and len(reader.turns(record)) == 1 for record in written)
    await wait_until(lambda: not list(Path(os.environ[FOLDER_VARIABLE]).glob("*")))
