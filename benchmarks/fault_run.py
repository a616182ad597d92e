"""The run of a fault campaign in its own process, which the campaign kills and resumes.

    python -m benchmarks.fault_run new|resume|repair|reference FOLDER URL ROLLOUTS SEED [CLUSTER]

`repair` also runs rollouts again whose tokens cannot be read, as `rookery resume --failed` does. `reference` is a
new run of the same tasks without faults. The process prints a line for each rollout that has finished. Its exit
status is `STOPPED` if the run was stopped, for example because its disk is full.
"""

import asyncio
import sys
from pathlib import Path

from benchmarks.fault_plan import NONE, build_tasks, plan_faults
from rookery import Engine
from rookery.cluster.launchers import LocalLauncher
from rookery.core import RookeryError
from rookery.engine import EngineConfig, RetryPolicy
from rookery.engine.processes import new_event_loop
from rookery.tasks import tasks_from
from rookery.upstreams.protocol import UpstreamConfig

NODES = 3
"""Number of nodes, or of runners on one machine, if the cluster does not name it."""
CONCURRENCY_PER_NODE = 8
STOPPED = 3
BLOCK_LIMIT = 6.0


def count_local_nodes(cluster: str) -> int:
    """Return the number of nodes of `local:N` or `local:NxC`, and 0 for another cluster."""
    return LocalLauncher(cluster.removeprefix("local:")).count if cluster.startswith("local:") else 0


async def main(what: str, folder: str, url: str, rollouts: str, seed: str, cluster: str = "") -> None:
    new = what in ("new", "reference")
    plan = plan_faults(int(rollouts), int(seed)) if what != "reference" else [NONE] * int(rollouts)
    tasks = tasks_from(build_tasks(plan), "campaign")
    if new:
        config = EngineConfig(
            environment="benchmarks.fault_environment:FaultCampaign",
            upstreams={"policy": UpstreamConfig(urls=(url,))},
            runners=1 if cluster else NODES,
            cluster=cluster,
            concurrency=CONCURRENCY_PER_NODE * max(NODES, count_local_nodes(cluster)),
            seed=int(seed),
            breaker=None,
            block_limit=BLOCK_LIMIT,
            # Every kill of a keeper ends attempts of many rollouts, some of them several times.
            retry=RetryPolicy(attempts=30, base=0.05, cap=2.0),
            stream={"k": 1},
        )
        engine = Engine("", config=config, out=folder)
    elif what == "repair":
        engine = Engine.resume(Path(folder) / "latest", failed=True, causes=("engine.tokens",))
    else:
        engine = Engine.resume(Path(folder) / "latest")
    async with engine:
        if new:
            engine.register(tasks)
        stream = engine.groups(tasks if new else None, k=1, load_tokens=False)
        async for _ in stream:
            print("finished", flush=True)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        try:
            runner.run(main(*sys.argv[1:]))
        except RookeryError as error:
            print(f"the run was stopped: {error}", file=sys.stderr)
            sys.exit(STOPPED)
