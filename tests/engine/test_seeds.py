"""Seeds of model calls are derived from the run's seed: one per call, equal in runs with the same seed."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rookery import Context, Engine, Environment, Sampling
from rookery.core import Completed
from rookery.upstreams import UpstreamConfig
from tests.engine_standins import EngineName, standin
from tests.servers import ModelServer


class TwoTurns(Environment):
    """Calls the policy twice."""

    name = "two-turns"

    async def run(self, ctx: Context) -> None:
        for number in range(2):
            await ctx.policy.chat(f"{ctx.task.prompt}, turn {number}, {ctx.attempt.rpartition('.')[0]}")

    async def score(self, ctx: Context) -> float:
        return 1.0


@pytest.fixture
async def server() -> AsyncIterator[ModelServer]:
    async with ModelServer("ok") as running:
        yield running


async def seeds(server: ModelServer, out: Path, **options: Any) -> dict[str, int | None]:
    """Run two tasks with three rollouts of two turns each; return the seeds of the calls by prompt."""
    server.requests.clear()
    async with Engine(TwoTurns(), policy=server.url, out=out, runners=0, **options) as engine:
        groups = [group async for group in engine.groups([{"prompt": "a"}, {"prompt": "b"}], k=3)]
    assert all(rollout.outcome == Completed() for group in groups for rollout in group.rollouts)
    return {one.body["messages"][-1]["content"]: one.body.get("seed") for one in server.requests}


async def test_each_call_has_its_own_seed_and_equal_runs_have_equal_seeds(
    server: ModelServer, tmp_path: Path
) -> None:
    found = await seeds(server, tmp_path, seed=7)
    assert len(found) == len(set(found.values())) == 12
    assert all(isinstance(seed, int) and 0 <= seed < 2**31 for seed in found.values())
    assert await seeds(server, tmp_path, seed=7) == found
    assert not set((await seeds(server, tmp_path, seed=8)).values()) & set(found.values())
    assert (await seeds(server, tmp_path, seed=0)).keys() == found.keys()


async def test_run_without_a_seed_sends_no_seeds(server: ModelServer, tmp_path: Path) -> None:
    assert set((await seeds(server, tmp_path)).values()) == {None}


async def test_seed_in_the_sampling_parameters_overrides_the_run(server: ModelServer, tmp_path: Path) -> None:
    assert set((await seeds(server, tmp_path, seed=7, sampling=Sampling(seed=3))).values()) == {3}


async def test_server_that_rejects_seeds_is_called_without(server: ModelServer, tmp_path: Path) -> None:
    server.unsupported_fields = {"seed"}
    await seeds(server, tmp_path, seed=7, concurrency=1)
    assert sum("seed" in one.body for one in server.requests) == 1


@pytest.mark.long
@pytest.mark.parametrize("speaks", ["vllm", "sglang"])
async def test_engines_sample_the_same_with_the_same_seed(speaks: EngineName, tmp_path: Path) -> None:
    async def answers(seed: int, out: Path) -> dict[str, bytes]:
        policy = UpstreamConfig(kind=speaks, urls=(server.url,))
        sampling = Sampling(temperature=1.0, max_tokens=12)
        options: dict[str, Any] = {"seed": seed, "sampling": sampling, "runners": 0}
        async with Engine(TwoTurns(), policy=policy, out=out, **options) as engine:
            groups = [group async for group in engine.groups([{"prompt": "a"}], k=3)]
        return {one.id: b"".join(part.tokens for part in one.segments) for one in groups[0].rollouts}

    async with standin(speaks) as server:
        found = await answers(7, tmp_path / "a")
        assert len(set(found.values())) == 3
        assert await answers(7, tmp_path / "b") == found
        assert await answers(8, tmp_path / "c") != found
