"""Helpers for weight-sync tests: an engine with the vLLM stand-in, and checks of the sampled tokens.

The stand-in really changes its weights. The checks compute both models again: every sampled token must have the
log probability that the weights of its version assign to it.
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
from tests.waiting import wait_until

TALKING = "tests.engine.envs:Talking"
LONG = Sampling(max_tokens=400, extra={"ignore_eos": True})
NEW = 7
"""Version of the second weights. The server reports no version for the first ones, which counts as 0."""


def weights(version: int) -> Path:
    return small_weights(2, 2) if version == NEW else small_weights()


async def load_new_weights(server: StandinServer, version: int = NEW) -> None:
    status, reply = await server.post("/update_weights", {"update_info": {"path": str(weights(version))}})
    assert status == 200, reply


def build_engine(server: StandinServer, tmp_path: Path, env: str = TALKING, **options: Any) -> Engine:
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


def conversations(count: int, **data: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"question {number}", **data} for number in range(count)]


@asynccontextmanager
async def consuming(
    engine: Engine, server: StandinServer, tasks: list[dict[str, Any]], freeze: int = 0
) -> AsyncIterator[list[Group]]:
    """Consume all groups in a task, which must end within the block; yield the list of groups.

    With `freeze` the server is frozen at a reply of that many tokens when the block starts; otherwise calls run.
    """
    groups: list[Group] = []

    async def take() -> None:
        groups.extend([group async for group in stream])

    # Every runner must get rollouts.
    await wait_until(lambda: all(link.ready for link in engine.supervisor.pool.runners))
    with server.freezing(freeze):
        stream = engine.groups(tasks)
        task = asyncio.create_task(take())
        try:
            if freeze:
                await server.frozen(freeze)
            else:
                await server.until_busy()
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


def check_segments(groups: list[Group], count: int, mode: PauseMode = "abort") -> list[Segment]:
    """Check that nothing failed or was retried, and that every token trains once with the right logprob."""
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
        check_logprobs(segment, mode)
    return found


def check_logprobs(segment: Segment, mode: PauseMode) -> None:
    ids = np.frombuffer(segment.tokens, "<i4")
    recorded = np.frombuffer(segment.logprobs, "<f4")
    expected = {
        version: logprobs(Weights.load(weights(version)), ids.tolist())[np.arange(len(ids) - 1), ids[1:]]
        for version in (0, NEW)
    }
    for span in segment.versions:
        assert span.version in expected
        for at in range(span.start, span.end):
            near = {version: abs(each[at - 1] - recorded[at]) < 1e-3 for version, each in expected.items()}
            # In mode keep without streaming the old version may be recorded for tokens of the new one.
            assert near[span.version] or (mode == "keep" and span.version == 0 and near[NEW]), (span, at)


def versions(segments: list[Segment]) -> set[int]:
    return {span.version for segment in segments for span in segment.versions}


def mixed_turns(segments: list[Segment]) -> int:
    """Count the turns sampled by two versions: adjacent spans."""
    return sum(
        left.end == right.start
        for segment in segments
        for left, right in zip(segment.versions, segment.versions[1:], strict=False)
    )
