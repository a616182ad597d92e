"""Fixtures and helpers for engine tests. After each test no process and no sandbox may be left."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rookery import Context, Engine, Environment
from rookery.core import Group, Rollout
from rookery.engine.retry import RetryPolicy
from rookery.journal import RunReader
from tests.processes import descendants
from tests.servers import Answer, ModelServer, Request
from tests.waiting import wait_until

ENV = "tests.engine.envs:Misbehaving"
QUICK = RetryPolicy(attempts=3, base=0.001)


@pytest.fixture
async def model() -> AsyncIterator[ModelServer]:
    never = asyncio.Event()

    def play(request: Request) -> Answer:
        last = request.body["messages"][-1]["content"]
        if last == "hang":
            return Answer("late", hold=never)
        return Answer("ok", prompt_ids=[1, 2, 3], ids=[4, 5], logprobs=[-0.5, -0.25])

    async with ModelServer(play) as server:
        yield server


def build_engine(model: ModelServer, tmp_path: Path, env: Any = ENV, **options: Any) -> Engine:
    options.setdefault("runners", 0)
    options.setdefault("retry", QUICK)
    return Engine(env, policy=model.url, out=tmp_path / "runs", **options)


async def run_groups(
    model: ModelServer,
    tmp_path: Path,
    tasks: list[Any],
    k: int = 1,
    stream: dict[str, Any] | None = None,
    **options: Any,
) -> list[Group]:
    """Run these tasks and return all groups in the order of their index."""
    async with build_engine(model, tmp_path, **options) as engine:
        groups = [group async for group in engine.groups(tasks, k=k, **(stream or {}))]
    return sorted(groups, key=lambda group: group.index)


def records(tmp_path: Path) -> list[Rollout]:
    """Return all final records of the newest run."""
    with RunReader(tmp_path / "runs" / "latest") as reader:
        return list(reader.iter_rollouts())


def events(tmp_path: Path, kind: str) -> list[dict[str, Any]]:
    with RunReader(tmp_path / "runs" / "latest") as reader:
        return [dict(event.payload) for event in reader.events(limit=100_000) if event.kind == kind]


async def wait_for_heartbeats(engine: Engine) -> None:
    """Wait until every runner has sent two messages. The second proves that its event loop ran since this call."""
    for _ in range(2):
        start = asyncio.get_running_loop().time()
        await wait_until(lambda: all(runner.last_message > start for runner in engine.supervisor.pool.runners))  # noqa: B023


class GatedEnvironment(Environment):
    """Calls the policy once, then waits until the gate of its question is open."""

    name = "gated"

    def __init__(self) -> None:
        self.gates: dict[str, asyncio.Event] = {}

    def close(self, *questions: int) -> None:
        self.gates = {f"question {n}": asyncio.Event() for n in questions}

    def open(self, question: int) -> None:
        self.gates.pop(f"question {question}").set()

    async def run(self, ctx: Context) -> None:
        await ctx.policy.chat(ctx.task.prompt)
        if (gate := self.gates.get(ctx.task.text)) is not None:
            await gate.wait()

    async def score(self, ctx: Context) -> float:
        return 1.0


@pytest.fixture(autouse=True)
def check_leftovers(tmp_path: Path) -> Any:
    before = set(descendants(os.getpid()))
    yield
    # Processes that existed before the test, such as a shared container engine, are not checked.
    assert descendants(os.getpid(), without=before) == []
    for run in (tmp_path / "runs").glob("2*"):
        sandboxes = run / "sandboxes"
        assert not sandboxes.exists() or [path for path in sandboxes.rglob("*") if path.name != "leases"] == []
        assert not (run / "control.sock").exists()
