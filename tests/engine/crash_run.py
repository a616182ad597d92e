"""A run in its own process, for tests that kill it.

python -m tests.engine.crash_run new|resume FOLDER URL [CLUSTER]
"""

import asyncio
import sys
from pathlib import Path

from rookery import Engine, Limits
from rookery.engine import EngineConfig, RetryPolicy
from rookery.engine.processes import new_event_loop
from rookery.tasks import tasks_from
from rookery.upstreams.protocol import UpstreamConfig

TASKS, K = 30, 2


async def main(what: str, folder: str, url: str, cluster: str = "") -> None:
    if what == "new":
        config = EngineConfig(
            environment="tests.engine.envs:WithSandbox",
            upstreams={"policy": UpstreamConfig(urls=(url,))},
            runners=2,
            cluster=cluster,
            concurrency=8,
            breaker=None,
            limits=Limits(run=60),
            # The test kills sandboxes, which counts as infra, so rollouts need many attempts.
            retry=RetryPolicy(attempts=50, base=0.001),
            stream={"k": K},
        )
        engine = Engine("", config=config, out=folder)
        tasks = tasks_from([f"question {n}" for n in range(TASKS)], "crash")
    else:
        engine = Engine.resume(Path(folder) / "latest")
        tasks = None
    async with engine:
        if tasks is not None:
            engine.register(tasks)
        async for _ in engine.groups(tasks, k=K, load_tokens=False):
            pass
    print("finished", flush=True)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main(*sys.argv[1:]))
