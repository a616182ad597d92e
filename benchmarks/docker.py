"""Benchmark `docker`: the cost of a command in a container, beside the same command through the engine's API.

Method:
- both use the same engine, image and command, alternately in one run; the engine is used as its clients use it: an
  exec is created, started, read to its end and inspected;
- a warm container comes from a pool that holds it ready; checking that it responds is part of the time;
- figures are medians; a command with an unexpected result fails the benchmark.
"""

import asyncio
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks import Progress, Result
from benchmarks import docker_engine as docker
from benchmarks.image_unpacking import unpack_rows
from benchmarks.sandbox_peers import COMMAND
from rookery.core import SandboxSpec
from rookery.sandboxes.docker.provider import DockerProvider
from rookery.sandboxes.pools import Pool, PoolBudget
from rookery.sandboxes.protocol import Command, ProviderHome, Sandbox, Shell

NAME = "docker"
CREATE = "Docker API create, start, remove"
OURS_PER_PEER = 5
"""Our execs per exec of the peer, which takes as long as many of ours."""


async def run(quick: bool, progress: Progress) -> list[Result]:
    rounds = 10 if quick else 40
    async with docker.open_engine() as engine:
        if isinstance(engine, str):
            progress(engine)
            return _missing(engine)
        with tempfile.TemporaryDirectory(prefix="rookery-bench-") as folder:
            home = ProviderHome(folder=Path(folder) / "sandboxes", run="bench")
            provider = DockerProvider(home, image=engine.image, engine=engine.socket)
            try:
                rows = await _measure_execs(provider, engine, rounds, progress)
                rows.append(await _measure_pool(provider, engine.image, 4 if quick else 12, progress))
            finally:
                await provider.close()
    return [*rows, *await asyncio.to_thread(unpack_rows, quick, progress)]


async def _measure_pool(provider: DockerProvider, image: str, count: int, progress: Progress) -> Result:
    spec = SandboxSpec(provider="docker", image=image, memory=256 << 20, pids=128)
    pool = Pool(provider, PoolBudget(max_warm=count))
    progress(f"{count} warm containers")
    pool.expect([(spec, count)])
    while pool.plan.get_entry(spec).ready < count:
        if not pool.plan.get_entry(spec).starting:
            raise RuntimeError("the pool could not create a warm container")
        await asyncio.sleep(0.01)
    times = []
    for at in range(count):
        began = time.perf_counter()
        sandbox = await pool.create(spec, attempt=f"{at}.0.1")
        times.append(1e3 * (time.perf_counter() - began))
        await _exec_ms(sandbox)
    if pool.misses:
        raise RuntimeError(f"{pool.misses} of {count} containers were not taken from the pool")
    return Result(name="pool_hit_ms", unit="ms", ours=median(times), target="<= 5")


async def _measure_execs(
    provider: DockerProvider, engine: docker.DockerEngine, rounds: int, progress: Progress
) -> list[Result]:
    spec = SandboxSpec(provider="docker", image=engine.image, memory=256 << 20, pids=128)
    progress("commands in a live container")
    sandbox = await provider.create(spec, attempt="bench")
    shell = await sandbox.shell()
    ours: list[float] = []
    shells: list[float] = []
    theirs: list[float] = []
    for _ in range(3):
        await _exec_ms(sandbox)
        await _shell_ms(shell)
        await engine.exec()
    for _ in range(rounds):
        ours += [await _exec_ms(sandbox) for _ in range(OURS_PER_PEER)]
        shells += [await _shell_ms(shell) for _ in range(OURS_PER_PEER)]
        theirs.append(await engine.exec())
    await sandbox.close()
    progress("containers")
    lives: list[float] = []
    peer_lives: list[float] = []
    for _ in range(max(3, rounds // 5)):
        began = time.perf_counter()
        await (await provider.create(spec, attempt="bench")).close()
        lives.append(1e3 * (time.perf_counter() - began))
        peer_lives.append(await engine.create_and_remove())
    mine, other = median(ours), median(theirs)
    command = " ".join(COMMAND)
    return [
        Result(
            name="exec_overhead",
            unit="x",
            ours=mine / other,
            target="<= 1.1",
            note=f"`{command}` through us ({mine:.2f} ms) over the same through the engine ({other:.1f} ms)",
        ),
        Result(name="exec_ms", unit="ms", ours=mine, peer=docker.EXEC, theirs=other),
        Result(
            name="shell_exec_ms", unit="ms", ours=median(shells), peer=docker.EXEC, theirs=other, target=">= 5x"
        ),
        Result(
            name="life_ms",
            unit="ms",
            ours=median(lives),
            peer=CREATE,
            theirs=median(peer_lives),
            target=">= 0.91x",
            note="create, start and remove a container; ours includes the guard, limits and lease",
        ),
    ]


async def _exec_ms(sandbox: Sandbox) -> float:
    began = time.perf_counter()
    result = await sandbox.exec(Command(argv=COMMAND))
    took = 1e3 * (time.perf_counter() - began)
    if not result.ok:
        raise RuntimeError(f"a command in our container failed: {result}")
    return took


async def _shell_ms(shell: Shell) -> float:
    began = time.perf_counter()
    result = await shell.run(" ".join(COMMAND), timeout=30.0)
    took = 1e3 * (time.perf_counter() - began)
    if not result.ok:
        raise RuntimeError(f"a script in our container failed: {result}")
    return took


def _missing(why: str) -> list[Result]:
    return [
        Result(name="exec_overhead", unit="x", ours=None, target="<= 1.1", note=why),
        Result(name="shell_exec_ms", unit="ms", ours=None, peer=docker.EXEC, target=">= 5x", note=why),
        Result(name="life_ms", unit="ms", ours=None, peer=CREATE, target=">= 0.91x", note=why),
    ]
