"""Benchmark `agents`: the cost of running a command-line agent in a sandbox behind the gateway.

Promises:
- the same program, with the same Python, asks the same server the same questions, in a box and bare, by turns,
  and each pair is compared: the machine may be busier in one minute than in the next;
- ours is all of an attempt: the box, the door, the program, the record of every token, scoring, the end of it all;
- the many are alive together: none begins before all have their boxes and doors;
- an attempt that did not complete, or lacks a turn, fails the bench: no figure from a broken run.
"""

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks import Progress, Result
from benchmarks.instant_model import MODEL, instant_model
from rookery.core import Completed, Limits, Rollout, SandboxSpec
from rookery.engine import Engine
from rookery.environments import Context
from rookery.environments.agent import AgentEnvironment
from rookery.gateway.gateway_session import GatewaySession
from rookery.sandboxes.local import machine_checks
from rookery.sandboxes.protocol import Command, Sandbox
from rookery.upstreams import UpstreamConfig

NAME = "agents"
TURNS = 5
MANY = 200
PROGRAM = f"""
import http.client, json, os, sys
from urllib.parse import urlsplit
where = urlsplit(os.environ["OPENAI_BASE_URL"])
line = http.client.HTTPConnection(where.hostname, where.port, timeout=120)
headers = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}}
messages = [{{"role": "user", "content": sys.argv[1]}}]
for turn in range({TURNS}):
    body = json.dumps({{"model": os.environ["MODEL"], "messages": messages}})
    line.request("POST", where.path + "/chat/completions", body, headers)
    answer = line.getresponse()
    said = json.loads(answer.read())
    assert answer.status == 200, said
    messages.append({{"role": "assistant", "content": said["choices"][0]["message"]["content"]}})
    messages.append({{"role": "user", "content": "go on"}})
print(42)
"""
TASK = {"prompt": "six times seven?", "answer": 42}


class Size(NamedTuple):
    """How often each thing is done."""

    rounds: int
    warm_up: int
    many: int


FULL = Size(rounds=60, warm_up=5, many=MANY)
QUICK = Size(rounds=15, warm_up=2, many=MANY)


class Together(AgentEnvironment):
    """Starts no agent before all can be started."""

    def __init__(self, launcher: str, *, script: Path, count: int) -> None:
        super().__init__(launcher, script=script)
        self._all = asyncio.Barrier(count)

    async def _command(self, ctx: Context, box: Sandbox, door: GatewaySession) -> Command:
        command = await super()._command(ctx, box, door)
        await self._all.wait()
        return command


async def run(quick: bool, progress: Progress) -> list[Result]:
    size = QUICK if quick else FULL
    if why := await asyncio.to_thread(machine_checks.find_problem):
        return [
            Result(name="agent_overhead_ms", unit="ms", ours=None, target="<= 25", note=why),
            Result(name="concurrent_agents", unit="agents", ours=None, target=f">= {MANY}", note=why),
        ]
    with tempfile.TemporaryDirectory(prefix="bench-agents-") as folder:
        script = Path(folder) / "agent.py"
        script.write_text(PROGRAM, encoding="utf-8")
        async with instant_model() as model:
            overhead = await _overhead(size, script, model.tokens_url, Path(folder), progress)
            many = await _many(size, script, model.tokens_url, Path(folder), progress)
    return [overhead, many]


def _engine(env: AgentEnvironment, url: str, folder: Path, concurrency: int) -> Engine:
    return Engine(
        env,
        policy=UpstreamConfig(urls=(url,), model=MODEL, concurrency=1024),
        sandbox=SandboxSpec(provider="local", network="model", memory=256 << 20),
        limits=Limits(run=600.0),
        record="messages",
        runners=0,
        concurrency=concurrency,
        breaker=None,
        out=folder / "runs",
    )


async def _overhead(size: Size, script: Path, url: str, folder: Path, progress: Progress) -> Result:
    ours, bare = [], []
    async with _engine(AgentEnvironment("program", script=script), url, folder, 1) as engine:
        for turn in range(size.warm_up + size.rounds):
            progress(f"one agent of {TURNS} turns, {turn + 1} of {size.warm_up + size.rounds}")
            (rollout,) = [one async for group in engine.groups([TASK], name=f"r{turn}") for one in group.rollouts]
            _complete(rollout)
            attempt = rollout.attempts[0]
            seconds = await _bare(script, url)
            if turn >= size.warm_up:
                ours.append(1e3 * (attempt.ended - attempt.started))
                bare.append(1e3 * seconds)
    return Result(
        name="agent_overhead_ms",
        unit="ms",
        ours=median(one - other for one, other in zip(ours, bare, strict=True)),
        target="<= 25",
        note=f"{median(ours):.1f} ms in its box, {median(bare):.1f} ms bare, medians of {len(ours)}",
    )


async def _bare(script: Path, url: str) -> float:
    """The program as anybody would start it."""
    python = Path(sys.base_prefix) / "bin" / "python3"
    env = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none", "MODEL": MODEL, "PATH": os.environ["PATH"]}
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        python, script, str(TASK["prompt"]), env=env, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    seconds = time.perf_counter() - began
    if process.returncode or out.split() != [b"42"]:
        raise RuntimeError(f"the bare program ended with {process.returncode}: {out!r:.200}")
    return seconds


async def _many(size: Size, script: Path, url: str, folder: Path, progress: Progress) -> Result:
    progress(f"{size.many} agents at once")
    began = time.perf_counter()
    async with _engine(Together("program", script=script, count=size.many), url, folder, size.many) as engine:
        rows = [TASK for _ in range(size.many)]
        found = [one async for group in engine.groups(rows) for one in group.rollouts]
    seconds = time.perf_counter() - began
    for one in found:
        _complete(one)
    return Result(
        name="concurrent_agents",
        unit="agents",
        ours=float(len(found)),
        target=f">= {MANY}",
        lower_is_better=False,
        note=f"{TURNS} turns each, all alive together, {seconds:.1f} s from the first box to the end of the last",
    )


def _complete(rollout: Rollout) -> None:
    whole = isinstance(rollout.outcome, Completed) and rollout.reward == 1.0 and rollout.usage.turns == TURNS
    if not whole or len(rollout.attempts) != 1:
        raise RuntimeError(f"an attempt of the bench went wrong: {rollout.outcome} {rollout.info}"[:2000])
