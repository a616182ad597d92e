"""Benchmark `agents`: an agent program in a sandbox behind the gateway, beside the same program run bare.

Method:
- the same program with the same `python3 -I -S` sends the same requests to the same server, in a sandbox and bare,
  alternately, and each pair is compared, because the load of the machine varies;
- our side is a whole attempt: sandbox, session, program, recording of every token, scoring and removal;
- the concurrent agents are alive together: none starts before all have their sandbox and session;
- an attempt that did not complete or lacks a turn fails the benchmark.
"""

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from benchmarks import Progress, Result
from benchmarks.instant_model import MODEL, instant_model
from rookery.core import Completed, Limits, Rollout, SandboxSpec
from rookery.engine import Engine
from rookery.environments import Context
from rookery.environments.agent import AgentEnvironment
from rookery.environments.agent.process import AgentSession
from rookery.sandboxes.local import machine_checks
from rookery.sandboxes.protocol import Command, Sandbox
from rookery.upstreams import UpstreamConfig

NAME = "agents"
TURNS = 5
MANY = 200
ISOLATED = ("-I", "-S")
PROGRAM = f"""
import http.client, json, os, sys
from urllib.parse import urlsplit
url = urlsplit(os.environ["OPENAI_BASE_URL"])
connection = http.client.HTTPConnection(url.hostname, url.port, timeout=120)
headers = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}}
messages = [{{"role": "user", "content": sys.argv[1]}}]
for turn in range({TURNS}):
    body = json.dumps({{"model": os.environ["MODEL"], "messages": messages}})
    connection.request("POST", url.path + "/chat/completions", body, headers)
    response = connection.getresponse()
    completion = json.loads(response.read())
    assert response.status == 200, completion
    messages.append({{"role": "assistant", "content": completion["choices"][0]["message"]["content"]}})
    messages.append({{"role": "user", "content": "go on"}})
print(42)
"""
TASK = {"prompt": "six times seven?", "answer": 42}


class Size(NamedTuple):
    """Numbers of repetitions of each measurement."""

    rounds: int
    warm_up: int
    many: int


FULL = Size(rounds=60, warm_up=5, many=MANY)
QUICK = Size(rounds=15, warm_up=2, many=MANY)


class IsolatedAgentEnvironment(AgentEnvironment):
    """Runs the program with `python3 -I -S`, so that site packages do not count, once `count` agents are ready."""

    def __init__(self, *, script: Path, count: int = 1) -> None:
        super().__init__("program", script=script)
        self._ready = asyncio.Barrier(count)

    async def _make_command(self, ctx: Context, sandbox: Sandbox, session: AgentSession) -> Command:
        command = await super()._make_command(ctx, sandbox, session)
        python, *arguments = command.argv
        await self._ready.wait()
        return msgspec.structs.replace(command, argv=(python, *ISOLATED, *arguments))


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
            many = await _concurrent(size, script, model.tokens_url, Path(folder), progress)
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
    async with _engine(IsolatedAgentEnvironment(script=script), url, folder, 1) as engine:
        for turn in range(size.warm_up + size.rounds):
            progress(f"one agent of {TURNS} turns, {turn + 1} of {size.warm_up + size.rounds}")
            (rollout,) = [one async for group in engine.groups([TASK], name=f"r{turn}") for one in group.rollouts]
            _check_rollout(rollout)
            attempt = rollout.attempts[0]
            seconds = await _bare_seconds(script, url)
            if turn >= size.warm_up:
                ours.append(1e3 * (attempt.ended - attempt.started))
                bare.append(1e3 * seconds)
    return Result(
        name="agent_overhead_ms",
        unit="ms",
        ours=median(one - other for one, other in zip(ours, bare, strict=True)),
        target="<= 25",
        note=f"{median(ours):.1f} ms in its sandbox, {median(bare):.1f} ms bare, medians of {len(ours)}",
    )


async def _bare_seconds(script: Path, url: str) -> float:
    """Run the program without a sandbox and return seconds."""
    python = Path(sys.base_prefix) / "bin" / "python3"
    env = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none", "MODEL": MODEL, "PATH": os.environ["PATH"]}
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        python, *ISOLATED, script, str(TASK["prompt"]), env=env, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    seconds = time.perf_counter() - began
    if process.returncode or out.split() != [b"42"]:
        raise RuntimeError(f"the bare program exited with {process.returncode}: {out!r:.200}")
    return seconds


async def _concurrent(size: Size, script: Path, url: str, folder: Path, progress: Progress) -> Result:
    progress(f"{size.many} agents at once")
    began = time.perf_counter()
    async with _engine(IsolatedAgentEnvironment(script=script, count=size.many), url, folder, size.many) as engine:
        tasks = [TASK for _ in range(size.many)]
        rollouts = [one async for group in engine.groups(tasks) for one in group.rollouts]
    seconds = time.perf_counter() - began
    for one in rollouts:
        _check_rollout(one)
    return Result(
        name="concurrent_agents",
        unit="agents",
        ours=float(len(rollouts)),
        target=f">= {MANY}",
        lower_is_better=False,
        note=f"{TURNS} turns each, all alive together, {seconds:.1f} s in all",
    )


def _check_rollout(rollout: Rollout) -> None:
    whole = isinstance(rollout.outcome, Completed) and rollout.reward == 1.0 and rollout.usage.turns == TURNS
    if not whole or len(rollout.attempts) != 1:
        raise RuntimeError(f"an attempt did not complete as expected: {rollout.outcome} {rollout.info}"[:2000])
