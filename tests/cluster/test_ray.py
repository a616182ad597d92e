"""A run on a Ray cluster of three nodes on this machine, with real SIGKILLs."""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fault_leftovers import RayMachines
from rookery import Engine
from rookery.cluster.agent import FOLDER_VARIABLE
from rookery.cluster.launchers import name_node
from rookery.core import Completed, Failed, Limits, UsageError
from rookery.engine.retry import RetryPolicy
from rookery.journal import RunReader
from tests.cluster.conftest import HeldModel
from tests.cluster.test_nodes import Launch, build_engine, collect, wait_for_nodes
from tests.engine.conftest import events, records
from tests.engine.crash_run import TASKS, K
from tests.engine.test_crash import start  # noqa: F401  (a fixture)
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
SECONDS = 240.0
"""A Ray node needs several processes, which start slowly on a busy machine."""


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    """A Ray cluster of three nodes. The nodes' directory of agents must be empty when it ends."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # short: Ray puts Unix sockets there
    settings = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_worker_niceness": "0",  # the default is 15, with which nothing starts on a busy machine
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
        limits=Limits(run=4 * SECONDS),
        listen="tcp://127.0.0.1:0",
    )
    async with engine:
        await wait_for_nodes(engine, 3, SECONDS)
        running = asyncio.create_task(collect(engine, [f"hold {n}" for n in range(18)]))
        await model.wait_for_requests(9)
        victim = ray_cluster.list_all_nodes()[-1]
        await asyncio.to_thread(ray_cluster.remove_node, victim, allow_graceful=False)
        await wait_for_nodes(engine, 2, SECONDS)
        ray_cluster.add_node(num_cpus=1)  # in the main thread, as Ray requires
        await wait_for_nodes(engine, 3, SECONDS)
        model.release.set()
        groups = await asyncio.wait_for(running, SECONDS)
        trainer = ray_cluster.list_all_nodes()[-1].node_id
        read = await asyncio.to_thread(run_on_another_node, ray_cluster, read_groups, engine.control_url)
    assert read == [(trainer, 1), (trainer, 1)]
    assert Counter(rollout.outcome for group in groups for rollout in group.rollouts) == {Completed(): 18}
    assert all(rollout.segments for group in groups for rollout in group.rollouts)
    failed = [a.outcome for r in records(tmp_path) for a in r.attempts if isinstance(a.outcome, Failed)]
    assert {outcome.cause for outcome in failed} == {"machine.lost"}
    assert len(events(tmp_path, "node.lost")) == 1
    assert len(events(tmp_path, "node.joined")) == 4


async def test_unreachable_ray_cluster_is_refused_and_ray_reports_no_usage(
    model: HeldModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")  # so that it is restored
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED")
    engine = Engine("arithmetic", policy=model.url, out=tmp_path / "runs", cluster="ray:127.0.0.1:9", runners=1)
    with pytest.raises(UsageError):
        async with engine:
            pass
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


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
    await wait_until(lambda: not list(Path(os.environ[FOLDER_VARIABLE]).glob("*")), SECONDS)


@pytest.fixture
async def separate_node(ray_cluster: Any) -> AsyncIterator[str]:
    """The name of a Ray node that is like another machine: it has its own processes, mounts and `/tmp`."""
    import ray

    if not ray.is_initialized():
        ray.init(address=ray_cluster.address, log_to_driver=False)

    def list_names() -> set[str]:
        return {name_node(node["NodeID"]) for node in ray.nodes() if node["Alive"]}

    before = list_names()
    namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    # The checkout stays visible, also if it is below /tmp.
    script = (
        'mount --bind "$0" /mnt && mount -t tmpfs rookery-test /tmp && mkdir -p "$0" && '
        'mount --move /mnt "$0" && exec "$@"'
    )
    command = [str(Path(sys.executable).with_name("ray")), "start", f"--address={ray_cluster.address}", "--block"]
    options = ["--num-cpus=1", "--dashboard-agent-listen-port=0", "--min-worker-port=0", "--max-worker-port=0"]
    with subprocess.Popen(
        [*namespaces, "sh", "-c", script, str(Path(sys.prefix).parent), *command, *options],
        stdout=subprocess.DEVNULL,
    ) as process:
        try:
            await wait_until(lambda: len(list_names() - before) == 1, SECONDS)
            yield (list_names() - before).pop()
        finally:
            process.kill()


@pytest.mark.needs("mount")
async def test_leftovers_are_found_on_a_node_with_its_own_processes_mounts_and_files(
    model: HeldModel, tmp_path: Path, ray_cluster: Any, separate_node: str
) -> None:
    machines = RayMachines(ray_cluster.address)
    env = "tests.engine.envs:WithSandbox"
    async with build_engine(model, tmp_path, env=env, cluster=f"ray:{ray_cluster.address}") as engine:
        await wait_until(
            lambda: separate_node in {one.node for one in engine.supervisor.pool.runners if one.ready}, SECONDS
        )
        tasks = [{"prompt": "hold", "node_labels": {"node": separate_node}}]
        running = asyncio.create_task(collect(engine, tasks))
        await model.wait_for_requests(1)
        assert engine.folder is not None
        run = engine.folder.name
        await asyncio.to_thread(machines.update_cgroups)
        found = await asyncio.to_thread(machines.find_leftovers, run)
        model.release.set()
        groups = await asyncio.wait_for(running, SECONDS)
    assert groups[0].rollouts[0].outcome == Completed()
    prefix = f"node {separate_node}: "
    left = [one.removeprefix(prefix) for one in found if one.startswith(prefix)]
    assert {one.split(" ")[0] for one in left} >= {"process", "cgroup"}
    files = [Path(one) for one in left if one.startswith("/")]
    assert files
    assert not any(path.exists() for path in files)  # they cannot be seen from here
    assert await asyncio.to_thread(machines.find_leftovers, run) == []
