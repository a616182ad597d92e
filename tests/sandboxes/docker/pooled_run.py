"""Program that runs with warm containers until it is killed. Arguments: FOLDER URL; needs DOCKER_HOST."""

import asyncio
import sys
from pathlib import Path
from typing import ClassVar

from rookery import Context, Engine, Environment
from rookery.core import SandboxSpec, Task
from rookery.engine import EngineConfig, RetryPolicy
from rookery.engine.processes import new_event_loop
from rookery.sandboxes import Command, leases
from rookery.tasks import tasks_from
from rookery.upstreams.protocol import UpstreamConfig
from tests.sandboxes.docker.engine import IMAGE

SECOND_IMAGE = "rookery-second:latest"
SPEC = SandboxSpec(provider="docker", image=IMAGE, memory=64 << 20, pids=32)
ENV = "tests.sandboxes.docker.pooled_run:ReportingEnvironment"


class ReportingEnvironment(Environment):
    """Environment that reports its sandbox and its lease."""

    name = "reporting"
    sandbox = SPEC
    home: ClassVar[Path | None] = None

    def sandbox_for(self, task: Task, spec: SandboxSpec) -> SandboxSpec:
        from msgspec.structs import replace

        return replace(spec, pids=40)

    async def run(self, ctx: Context) -> None:
        sandbox = await ctx.sandbox()
        found = await sandbox.exec(Command(argv=("ls", "-A", "/work")))
        await sandbox.write("mine", b"x")
        ctx.info |= {
            "files": found.stdout.decode(),
            "sandbox": sandbox.id,
            "image": sandbox.spec.image,
            "pids": sandbox.spec.pids,
        }
        if ReportingEnvironment.home is not None:
            held = {
                lease.id: lease.attempt for lease in leases.read_leases(ReportingEnvironment.home / "sandboxes")
            }
            ctx.info["leased"] = held[sandbox.id]
        await ctx.policy.chat(ctx.task.prompt)

    async def score(self, ctx: Context) -> float:
        return 1.0


async def main(folder: str, url: str) -> None:
    config = EngineConfig(
        environment=ENV,
        upstreams={"policy": UpstreamConfig(urls=(url,))},
        runners=1,
        concurrency=1,
        warm=2,
        retry=RetryPolicy(attempts=5, base=0.01),
        stream={"k": 1},
    )
    engine = Engine("", config=config, out=folder)
    tasks = tasks_from([f"question {n}" for n in range(4)], "killed")
    async with engine:
        engine.register(tasks)
        async for _ in engine.groups(tasks, k=1, load_tokens=False):
            pass


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main(*sys.argv[1:3]))
