"""The `swe` bench: what a whole rollout in a box costs besides the model and the commands themselves.

Promises:
- a rollout is a whole one, by a real engine: box, files, 10 bash calls, 2 edits, submit, grading in a fresh box,
  and everything gone again; it must end with full reward, or the bench fails;
- its overhead is its wall time, less the model's (what its server took from a request's arrival to its answer) and
  less the commands' own (the same lines, run by one plain bash on this machine);
- the peer does the same things in the same order through the engine's API, with containers made and removed, files
  sent as archives, and one exec for each command, edit and test; both take turns;
- figures are medians.
"""

import asyncio
import tempfile
from pathlib import Path
from statistics import median

from benchmarks import Progress, Result
from benchmarks import docker_engine as docker
from benchmarks.swe_docker import DockerSequence
from benchmarks.swe_rollout import BASH, EDITS, Rollouts, commands_ms, upload_rows

NAME = "swe"
WARM = 2


async def run(quick: bool, progress: Progress) -> list[Result]:
    rounds = 10 if quick else 40
    walls: list[float] = []
    overheads: list[float] = []
    theirs: list[float] = []
    note = ""
    with tempfile.TemporaryDirectory(prefix="rookery-bench-") as name:
        folder = Path(name)
        own = await asyncio.to_thread(commands_ms, folder, 5)
        progress(f"rollouts: {BASH} bash calls, {EDITS} edits, submit, fresh grading")
        async with Rollouts(folder) as rollouts, docker.engine() as engine:
            for _ in range(WARM):
                await rollouts.one()
            if isinstance(engine, str):
                note = engine
                progress(note)
            sequence = None if isinstance(engine, str) else DockerSequence(engine.socket, engine.image)
            try:
                for turn in range(rounds):
                    wall, model = await rollouts.one()
                    walls.append(wall)
                    overheads.append(wall - model - own)
                    if sequence is not None and turn % 5 == 0:
                        theirs.append(await sequence.one())
            finally:
                if sequence is not None:
                    await sequence.close()
        progress("uploads of 500 files")
        uploads = await upload_rows(folder, 3 if quick else 10)
    ordered = sorted(overheads)
    spread = f"tenth {ordered[len(ordered) // 10]:.0f}, ninetieth {ordered[-1 - len(ordered) // 10]:.0f}"
    return [
        Result(
            name="rollout_overhead_ms",
            unit="ms",
            ours=median(overheads),
            target="<= 120",
            note=f"{rounds} rollouts, {spread}; the commands themselves take {own:.0f} ms and are not in it",
        ),
        Result(
            name="rollout_wall_ms",
            unit="ms",
            ours=median(walls),
            peer=docker.EXEC,
            theirs=median(theirs) if theirs else None,
            target=">= 10x",
            note=note or "the whole rollout, model and commands included; the peer has no model to wait for",
        ),
        *uploads,
    ]
