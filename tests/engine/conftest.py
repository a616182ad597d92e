"""A model server and an engine for tests; afterwards nothing of either is left."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rookery import Engine
from rookery.core import Group, Rollout
from rookery.engine.retry import RetryPolicy
from rookery.journal import RunReader
from tests.processes import descendants
from tests.servers import Answer, ModelServer, Request

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


def engine(model: ModelServer, tmp_path: Path, env: Any = ENV, **options: Any) -> Engine:
    options.setdefault("runners", 0)
    options.setdefault("retry", QUICK)
    return Engine(env, policy=model.url, out=tmp_path / "runs", **options)


async def gather(
    model: ModelServer,
    tmp_path: Path,
    tasks: list[Any],
    k: int = 1,
    stream: dict[str, Any] | None = None,
    **options: Any,
) -> list[Group]:
    """All groups, by index."""
    async with engine(model, tmp_path, **options) as made:
        groups = [group async for group in made.groups(tasks, k=k, **(stream or {}))]
    return sorted(groups, key=lambda group: group.index)


def records(tmp_path: Path) -> list[Rollout]:
    """Every terminal record of the newest run."""
    with RunReader(tmp_path / "runs" / "latest") as reader:
        return list(reader.each())


def events(tmp_path: Path, kind: str) -> list[dict[str, Any]]:
    with RunReader(tmp_path / "runs" / "latest") as reader:
        return [dict(event.payload) for event in reader.events(limit=100_000) if event.kind == kind]


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Any:
    before = set(descendants(os.getpid()))
    yield
    # What was there before, as an engine of containers that other tests share, goes on with its own.
    assert descendants(os.getpid(), without=before) == []
    for run in (tmp_path / "runs").glob("2*"):
        boxes = run / "sandboxes"
        assert not boxes.exists() or [path for path in boxes.rglob("*") if path.name != "leases"] == []
        assert not (run / "control.sock").exists()
