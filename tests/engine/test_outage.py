"""A model server that goes away is waited for, where the run says so."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rookery import Context, Engine, Environment
from rookery.core import Completed, Failed, Group, RookeryError, UsageError
from rookery.engine.config import EngineConfig
from tests.engine.conftest import QUICK, events
from tests.gateway.chat_renderers.kit import TOKENIZERS
from tests.servers import Answer, ModelServer, closed_port


class Asks(Environment):
    """Asks the policy twice."""

    name = "asks"

    async def run(self, ctx: Context) -> None:
        for number in range(2):
            await ctx.policy.chat(f"{ctx.task.prompt} {number}")

    async def score(self, ctx: Context) -> float:
        return 1.0


def engine(url: str, tmp_path: Path, **options: Any) -> Engine:
    options = {"runners": 0, "retry": QUICK, **options}
    return Engine(
        "tests.engine.test_outage:Asks", policy=url, model="test-model", out=tmp_path / "runs", **options
    )


async def until(engine: Engine, kind: str, seen: list[str]) -> None:
    async with asyncio.timeout(60):
        while kind not in seen:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("runners", [0, 2])
async def test_a_server_that_goes_away_and_comes_back_costs_no_retry(tmp_path: Path, runners: int) -> None:
    hold = asyncio.Event()
    seen: list[str] = []
    async with ModelServer(Answer("ok", hold=hold)) as server:
        made = engine(server.url, tmp_path, wait_for_upstream=120.0, runners=runners, concurrency=4, breaker=0.1)
        made.on_event = lambda kind, payload: seen.append(kind)
        async with made:

            async def consume() -> list[Group]:
                return [group async for group in made.groups([{"prompt": str(n)} for n in range(4)], k=8)]

            consuming = asyncio.create_task(consume())
            async with asyncio.timeout(60):
                await server.wait_for_requests(4)
            await server.stop()
            await until(made, "upstream.waiting", seen)
            assert (await made.status())["waiting_for_upstream"] is not None
            hold.set()
            await server.__aenter__()
            async with asyncio.timeout(120):
                groups = await consuming
            assert (await made.status())["waiting_for_upstream"] is None
            assert (await made.status())["retries"] == 0
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert [rollout.outcome for rollout in rollouts] == [Completed()] * 32
    assert seen.count("upstream.waiting") == seen.count("upstream.back") == 1
    assert any(len(rollout.attempts) > 1 for rollout in rollouts)
    assert events(tmp_path, "upstream.back")


async def test_a_server_that_does_not_come_back_stops_the_run_at_the_limit(tmp_path: Path) -> None:
    async with ModelServer("ok") as server:
        made = engine(server.url, tmp_path, wait_for_upstream=1.0)
        async with made:
            await server.stop()
            with pytest.raises(RookeryError, match="did not come back within 1 seconds"):
                await asyncio.wait_for(anext(made.groups([{"prompt": "a"}], k=2)), 60)


async def test_failures_of_a_server_that_answers_are_charged(tmp_path: Path) -> None:
    async with (
        ModelServer(Answer(status=500)) as server,
        engine(server.url, tmp_path, wait_for_upstream=60.0, breaker=None) as made,
    ):
        async with asyncio.timeout(60):
            (group,) = [group async for group in made.groups([{"prompt": "a"}])]
    (rollout,) = group.rollouts
    assert isinstance(rollout.outcome, Failed)
    assert (rollout.outcome.cause, len(rollout.attempts)) == ("upstream.error", 3)
    assert not events(tmp_path, "upstream.waiting")


async def test_a_stream_that_is_closed_while_an_outage_is_looked_for_is_cancelled(tmp_path: Path) -> None:
    async with (
        ModelServer(Answer(status=500)) as server,
        engine(server.url, tmp_path, wait_for_upstream=60.0, breaker=None) as made,
    ):
        server.models = Answer(status=503)
        seen: list[str] = []
        made.on_event = lambda kind, payload: seen.append(kind)
        stream = made.groups([{"prompt": "a"}], k=2)
        taking = asyncio.ensure_future(anext(stream))
        await until(made, "upstream.waiting", seen)
        taking.cancel()
        await asyncio.wait({taking})
        await stream.aclose()
        server.models = ("test-model",)
        server.default = Answer("ok")
        async with asyncio.timeout(60):
            (group,) = [group async for group in made.groups([{"prompt": "b"}], k=2, name="second")]
    assert [rollout.outcome for rollout in group.rollouts] == [Completed()] * 2


async def test_a_server_that_is_not_there_yet_is_waited_for_at_the_start(tmp_path: Path) -> None:
    server = ModelServer("ok")
    with closed_port() as port:
        server.port = port
    starting = asyncio.create_task(
        engine(f"http://127.0.0.1:{server.port}", tmp_path, wait_for_upstream=60.0).__aenter__()
    )
    try:
        done, _ = await asyncio.wait({starting}, timeout=0.5)
        assert not done
        async with server:
            async with asyncio.timeout(60):
                made = await starting
            groups = [group async for group in made.groups([{"prompt": "a"}])]
            await made.__aexit__(None, None, None)
    finally:
        starting.cancel()
    assert groups[0].rollouts[0].outcome == Completed()


async def test_a_replica_gets_no_more_calls_at_once_than_it_may(tmp_path: Path) -> None:
    async with ModelServer("ok") as server:
        options: dict[str, Any] = {"replica_concurrency": 3, "concurrency": 32}
        async with engine(server.url, tmp_path, runners=2, **options) as made:
            groups = [group async for group in made.groups([{"prompt": "a"}] * 8, k=8)]
        assert server.peak <= 3
    assert len(groups) == 8


def test_options_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for wrong in (
        {"replica_concurrency": 0},
        {"wait_for_upstream": -1.0},
        {"wait_for_upstream": float("inf")},
        {"tool_parser": "qwen3"},  # without a tokenizer
        {"tool_parser": "qwen3", "record": "messages"},
        {"tool_parser": "qwen3", "rendering": {"tokenizer": "x", "tool_parser": "glm"}},
    ):
        with pytest.raises(UsageError):
            engine("http://127.0.0.1:1", tmp_path, **wrong)
    assert EngineConfig(environment="x").wait_for_upstream == 0.0


def test_a_parser_of_tool_calls_reaches_the_chat_format(tmp_path: Path) -> None:
    rendering = {"tokenizer": str(TOKENIZERS / "qwen3"), "name": "default"}
    made = engine("http://127.0.0.1:1", tmp_path, tool_parser="qwen3", rendering=rendering)
    assert made.config.rendering["tool_parser"] == "qwen3"
    with pytest.raises(UsageError, match="tool_parser 'x'"):
        engine("http://127.0.0.1:1", tmp_path, tool_parser="x", rendering=rendering)
