"""A rollout server in this process, and the segments of its journal."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from rookery.adapters.rollout_service import RolloutServer, RolloutService
from rookery.core import Segment, Task, UsageError
from rookery.engine import EngineConfig, RetryPolicy
from rookery.environments import load_environment
from rookery.journal import RunReader, load_segments
from rookery.tasks import tasks_from
from rookery.upstreams import UpstreamConfig
from tests.adapters.trl_kit import tiny

ENV = "tests.adapters.envs:TwoTurns"


def make_policy(folder: Path) -> str:
    """Return the URL of a policy that samples only ASCII, which survives a round trip through text."""
    path = folder / "policy.safetensors"
    tiny(path)
    return f"embedded:{path}"


def make_config(policy: str) -> EngineConfig:
    return EngineConfig(
        environment=ENV,
        upstreams={"policy": UpstreamConfig(urls=(policy,) if policy else ())},
        runners=0,
        retry=RetryPolicy(attempts=1),
        breaker=None,
    )


def get_tasks() -> dict[str, Task]:
    environment = load_environment(ENV)
    return {task.id: task for task in tasks_from(environment.tasks(), "two turns")}


def serving(
    server: RolloutServer, out: Path, policy: str
) -> AbstractAsyncContextManager[tuple[RolloutService, str]]:
    """Serve `ENV` in this process; yield the service and the URL."""
    return serving_config(server, out, make_config(policy))


@asynccontextmanager
async def serving_config(
    server: RolloutServer, out: Path, config: EngineConfig
) -> AsyncIterator[tuple[RolloutService, str]]:
    """Serve the environment of a configuration in this process; yield the service and the URL."""
    stop = asyncio.Event()
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with RolloutService(config, out=out) as service:
        serving = asyncio.create_task(server.serve(service, "127.0.0.1", 0, url.set_result, stop))
        try:
            done, _ = await asyncio.wait({serving, url}, timeout=60, return_when=asyncio.FIRST_COMPLETED)
            if serving in done:
                serving.result()
                raise UsageError("the server ended")
            yield service, url.result()
        finally:
            stop.set()
            await asyncio.wait_for(serving, 60)


def read_segments(run: str, rollout: str) -> list[Segment]:
    with RunReader(Path(run)) as reader:
        record = reader.rollout(rollout)
        assert record is not None
        return load_segments(record, reader.tokens).segments
