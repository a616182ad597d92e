"""Runs over a server whose weights change, and a judge of what they sampled.

The vLLM stand-in really changes its weights. The oracle is a plain model of both: every sampled token must have
the chance that the weights of its version gave it.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rookery import Engine
from rookery.core import Group, Sampling, Segment, label
from rookery.upstreams import UpstreamConfig
from rookery.upstreams.embedded import Weights
from rookery.upstreams.protocol import PauseMode
from tests.engine.conftest import QUICK
from tests.engine_standins import StandinServer, small_weights
from tests.upstreams.embedded_reference import logprobs

TALKING = "tests.engine.envs:Talking"
LONG = Sampling(max_tokens=400, extra={"ignore_eos": True})
NEW = 7
"""The version of the second weights. The first have none: the server does not say."""


def weights(version: int) -> Path:
    return small_weights(2, 2) if version == NEW else small_weights()


async def push(server: StandinServer, version: int = NEW) -> None:
    status, said = await server.post("/update_weights", {"update_info": {"path": str(weights(version))}})
    assert status == 200, said


def engine(server: StandinServer, tmp_path: Path, env: str = TALKING, **options: Any) -> Engine:
    policy = UpstreamConfig(kind="vllm", urls=(server.root,))
    settings: dict[str, Any] = {
        "runners": 0,
        "retry": QUICK,
        "record": "tokens",
        "rendering": {"name": "embedded"},
        "concurrency": 6,
        "sampling": Sampling(max_tokens=40, extra={"ignore_eos": True}),
    }
    return Engine(env, policy=policy, out=tmp_path / "runs", **{**settings, **options})


def talks(count: int, **data: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"question {number}", **data} for number in range(count)]


@asynccontextmanager
async def taken(
    made: Engine, server: StandinServer, tasks: list[dict[str, Any]], freeze: int = 0
) -> AsyncIterator[list[Group]]:
    """A consumer, which must come to its own end within the block. With `freeze`, the engine stands still before
    the block, at an answer with so many tokens; else calls are under way."""
    groups: list[Group] = []

    async def take() -> None:
        groups.extend([group async for group in stream])

    async with asyncio.timeout(60):
        while not all(link.ready for link in made.supervisor.pool.runners):  # so that all of them get work
            await asyncio.sleep(0.005)
    with server.freezing(freeze):
        stream = made.groups(tasks)
        task = asyncio.create_task(take())
        try:
            if freeze:
                await server.frozen(freeze)
            else:
                async with asyncio.timeout(60):
                    while not (await server.running())[0]:
                        await asyncio.sleep(0.001)
        except BaseException:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise
    try:
        yield groups
        async with asyncio.timeout(90):
            await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def judged(groups: list[Group], count: int, mode: PauseMode = "abort") -> list[Segment]:
    """Nothing failed or ran twice; every token trains once, with the chance that its version's weights gave it."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert [label(rollout.outcome) for rollout in rollouts] == ["completed"] * count
    assert {len(rollout.attempts) for rollout in rollouts} == {1}
    found = [segment for rollout in rollouts for segment in rollout.segments]
    for rollout in rollouts:
        assert sum(segment.trained for segment in rollout.segments) == rollout.usage.sampled_tokens
        assert sorted(turn for segment in rollout.segments for turn in segment.turns) == list(
            range(rollout.usage.turns)
        )
    for segment in found:
        matches(segment, mode)
    return found


def matches(segment: Segment, mode: PauseMode) -> None:
    ids = np.frombuffer(segment.tokens, "<i4")
    given = np.frombuffer(segment.logprobs, "<f4")
    chances = {
        version: logprobs(Weights.load(weights(version)), ids.tolist())[np.arange(len(ids) - 1), ids[1:]]
        for version in (0, NEW)
    }
    for span in segment.versions:
        assert span.version in chances
        for at in range(span.start, span.end):
            near = {version: abs(each[at - 1] - given[at]) < 1e-3 for version, each in chances.items()}
            # Kept, and not told when which token came: the older version may be said, never a newer one.
            assert near[span.version] or (mode == "keep" and span.version == 0 and near[NEW]), (span, at)


def versions(segments: list[Segment]) -> set[int]:
    return {span.version for segment in segments for span in segment.versions}


def mixed_turns(segments: list[Segment]) -> int:
    """Turns that two versions sampled: two spans that touch."""
    return sum(
        left.end == right.start
        for segment in segments
        for left, right in zip(segment.versions, segment.versions[1:], strict=False)
    )
