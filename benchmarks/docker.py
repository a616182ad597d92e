"""The `docker` bench: what a command in a container costs through us, beside the same command through the engine.

Promises:
- the same engine, the same image, the same command, by turns in one run; the engine is asked as its users ask it:
  an exec is made, started, read to its end, and asked how it ended;
- a warm container is handed out by a pool that holds it ready; that it answers is a part of the time;
- figures are medians; what did not end well fails the bench.
"""

import asyncio
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks import Progress, Result
from benchmarks import docker_engine as docker
from benchmarks.docker_images import unpack_rows
from benchmarks.sandbox_peers import COMMAND
from rookery.core import SandboxSpec
from rookery.sandboxes.docker.provider import DockerProvider
from rookery.sandboxes.pools import Pool, PoolBudget
from rookery.sandboxes.protocol import Command, ProviderHome, Sandbox, Shell

NAME = "docker"
CREATE = "Docker API create, start, remove"
EACH = 5
"""Of ours for one of the engine's, which takes as long as many of them."""


async def run(quick: bool, progress: Progress) -> list[Result]:
    rounds = 10 if quick else 40
    async with docker.engine() as engine:
        if isinstance(engine, str):
            progress(engine)
            return _missing(engine)
        with tempfile.TemporaryDirectory(prefix="rookery-bench-") as folder:
            home = ProviderHome(folder=Path(folder) / "sandboxes", run="bench")
            provider = DockerProvider(home, image=engine.image, engine=engine.socket)
            try:
                rows = await _measured(provider, engine, rounds, progress)
                rows.append(await _pooled(provider, engine.image, 4 if quick else 12, progress))
            finally:
                await provider.close()
    return [*rows, *await asyncio.to_thread(unpack_rows, quick, progress)]


async def _pooled(provider: DockerProvider, image: str, count: int, progress: Progress) -> Result:
    spec = SandboxSpec(provider="docker", image=image, memory=256 << 20, pids=128)
    pool = Pool(provider, PoolBudget(max_warm=count))
    progress(f"{count} warm containers")
    pool.expect([(spec, count)])
    while pool.plan.get_entry(spec).ready < count:
        if not pool.plan.get_entry(spec).starting:
            raise RuntimeError("a warm container could not be made")
        await asyncio.sleep(0.01)
    times = []
    for at in range(count):
        began = time.perf_counter()
        sandbox = await pool.create(spec, attempt=f"{at}.0.1")
        times.append(1e3 * (time.perf_counter() - began))
        await _exec(sandbox)
    if pool.misses:
        raise RuntimeError(f"{pool.misses} of {count} warm containers were not there")
    return Result(name="pool_hit_ms", unit="ms", ours=median(times), target="<= 5")


async def _measured(
    provider: DockerProvider, engine: docker.Engine, rounds: int, progress: Progress
) -> list[Result]:
    spec = SandboxSpec(provider="docker", image=engine.image, memory=256 << 20, pids=128)
    progress("commands in a live container")
    sandbox = await provider.create(spec, attempt="bench")
    shell = await sandbox.shell()
    ours: list[float] = []
    shells: list[float] = []
    theirs: list[float] = []
    for _ in range(3):
        await _exec(sandbox)
        await _script(shell)
        await engine.exec()
    for _ in range(rounds):
        ours += [await _exec(sandbox) for _ in range(EACH)]
        shells += [await _script(shell) for _ in range(EACH)]
        theirs.append(await engine.exec())
    await sandbox.close()
    progress("containers")
    made: list[float] = []
    raw: list[float] = []
    for _ in range(max(3, rounds // 5)):
        began = time.perf_counter()
        await (await provider.create(spec, attempt="bench")).close()
        made.append(1e3 * (time.perf_counter() - began))
        raw.append(await engine.life())
    mine, other = median(ours), median(theirs)
    words = " ".join(COMMAND)
    return [
        Result(
            name="exec_overhead",
            unit="x",
            ours=mine / other,
            target="<= 1.1",
            note=f"`{words}` through us ({mine:.2f} ms) over the same through the engine ({other:.1f} ms)",
        ),
        Result(name="exec_ms", unit="ms", ours=mine, peer=docker.EXEC, theirs=other),
        Result(
            name="shell_exec_ms", unit="ms", ours=median(shells), peer=docker.EXEC, theirs=other, target=">= 5x"
        ),
        Result(
            name="life_ms",
            unit="ms",
            ours=median(made),
            peer=CREATE,
            theirs=median(raw),
            note="a container, from nothing to ready and gone; ours with its guard, its limits and its lease",
        ),
    ]


async def _exec(sandbox: Sandbox) -> float:
    began = time.perf_counter()
    result = await sandbox.exec(Command(argv=COMMAND))
    took = 1e3 * (time.perf_counter() - began)
    if not result.ok:
        raise RuntimeError(f"a command in a container of ours ended badly: {result}")
    return took


async def _script(shell: Shell) -> float:
    began = time.perf_counter()
    result = await shell.run(" ".join(COMMAND), timeout=30.0)
    took = 1e3 * (time.perf_counter() - began)
    if not result.ok:
        raise RuntimeError(f"a script in a container of ours ended badly: {result}")
    return took


def _missing(why: str) -> list[Result]:
    return [
        Result(name="exec_overhead", unit="x", ours=None, target="<= 1.1", note=why),
        Result(name="shell_exec_ms", unit="ms", ours=None, peer=docker.EXEC, target=">= 5x", note=why),
    ]
