"""Benchmark `swe`: the overhead of a whole rollout in a sandbox, beside the same sequence through Docker's API.

Method:
- the rollout runs in a real engine: sandbox, files, 10 bash calls, 2 edits, submission, grading in a fresh sandbox
  and removal; it must end with full reward, or the benchmark fails;
- the overhead is the wall time, less the model's time (from the arrival of a request to its answer) and less the
  commands' own time (the same commands in one bash on this machine);
- the peer does the same in the same order: containers are created and removed, files sent as archives, and every
  command, edit and test is an exec; both alternate;
- figures are medians.
"""

import asyncio
import tempfile
from pathlib import Path
from statistics import median

from benchmarks import Progress, Result
from benchmarks import docker_engine as docker
from benchmarks.swe_docker_peer import DockerSequence
from benchmarks.swe_rollout import BASH, EDITS, Rollouts, commands_ms, upload_rows

NAME = "swe"
WARM_UP = 2


async def run(quick: bool, progress: Progress) -> list[Result]:
    rounds = 10 if quick else 40
    walls: list[float] = []
    overheads: list[float] = []
    theirs: list[float] = []
    note = ""
    with tempfile.TemporaryDirectory(prefix="rookery-bench-") as name:
        folder = Path(name)
        command_time = await asyncio.to_thread(commands_ms, folder, 5)
        progress(f"rollouts: {BASH} bash calls, {EDITS} edits, submit, fresh grading")
        async with Rollouts(folder) as rollouts, docker.open_engine() as engine:
            for _ in range(WARM_UP):
                await rollouts.one()
            if isinstance(engine, str):
                note = engine
                progress(note)
            sequence = None if isinstance(engine, str) else DockerSequence(engine.socket, engine.image)
            try:
                for turn in range(rounds):
                    wall, model = await rollouts.one()
                    walls.append(wall)
                    overheads.append(wall - model - command_time)
                    if sequence is not None and turn % 5 == 0:
                        theirs.append(await sequence.one())
            finally:
                if sequence is not None:
                    await sequence.close()
        progress("uploads of 500 files")
        uploads = await upload_rows(folder, 3 if quick else 10)
    ordered = sorted(overheads)
    spread = f"p10 {ordered[len(ordered) // 10]:.0f}, p90 {ordered[-1 - len(ordered) // 10]:.0f}"
    return [
        Result(
            name="rollout_overhead_ms",
            unit="ms",
            ours=median(overheads),
            target="<= 75",
            note=f"{rounds} rollouts, {spread}; without {command_time:.0f} ms of the commands themselves",
        ),
        Result(
            name="rollout_wall_ms",
            unit="ms",
            ours=median(walls),
            peer=docker.EXEC,
            theirs=median(theirs) if theirs else None,
            target=">= 10x",
            note=note or "whole rollout including model and commands; the peer does not call a model",
        ),
        *uploads,
    ]
