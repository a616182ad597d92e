"""A run with `wait_for_upstream` waits for an inference engine that went away."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rookery import Context, Engine, Environment
from rookery.core import Completed, Failed, Group, RookeryError, UsageError
from rookery.engine.config import EngineConfig
from tests.engine.conftest import QUICK, events
from tests.gateway.chat_renderers.kit import TOKENIZERS
from tests.servers import Answer, ModelServer, free_port
from tests.waiting import wait_until


class TwoCalls(Environment):
    """Calls the policy twice."""

    name = "asks"

    async def run(self, ctx: Context) -> None:
        for number in range(2):
            await ctx.policy.chat(f"{ctx.task.prompt} {number}")

    async def score(self, ctx: Context) -> float:
        return 1.0


def build_engine(url: str, tmp_path: Path, **options: Any) -> Engine:
    options = {"runners": 0, "retry": QUICK, **options}
    return Engine(
        "tests.engine.test_outage:TwoCalls", policy=url, model="test-model", out=tmp_path / "runs", **options
    )


async def wait_for_event(engine: Engine, kind: str, seen: list[str]) -> None:
    await wait_until(lambda: kind in seen)


@pytest.mark.long
@pytest.mark.parametrize("runners", [0, 2])
async def test_outage_of_the_server_costs_no_attempt(tmp_path: Path, runners: int) -> None:
    hold = asyncio.Event()
    seen: list[str] = []
    async with ModelServer(Answer("ok", hold=hold)) as server:
        engine = build_engine(
            server.url, tmp_path, wait_for_upstream=120.0, runners=runners, concurrency=4, breaker=0.1
        )
        engine.on_event = lambda kind, payload: seen.append(kind)
        async with engine:

            async def consume() -> list[Group]:
                return [group async for group in engine.groups([{"prompt": str(n)} for n in range(4)], k=8)]

            consuming = asyncio.create_task(consume())
            async with asyncio.timeout(60):
                await server.wait_for_requests(4)
            await server.stop()
            await wait_for_event(engine, "upstream.waiting", seen)
            assert (await engine.status())["waiting_for_upstream"] is not None
            hold.set()
            await server.__aenter__()
            async with asyncio.timeout(120):
                groups = await consuming
            assert (await engine.status())["waiting_for_upstream"] is None
            assert (await engine.status())["retries"] == 0
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert [rollout.outcome for rollout in rollouts] == [Completed()] * 32
    assert seen.count("upstream.waiting") == seen.count("upstream.back") == 1
    assert any(len(rollout.attempts) > 1 for rollout in rollouts)
    assert events(tmp_path, "upstream.back")


@pytest.mark.long
async def test_run_stops_if_the_server_does_not_come_back_in_time(tmp_path: Path) -> None:
    async with ModelServer("ok") as server:
        engine = build_engine(server.url, tmp_path, wait_for_upstream=1.0)
        async with engine:
            await server.stop()
            with pytest.raises(RookeryError, match=r"\b1\b.*`rookery resume`"):
                await asyncio.wait_for(anext(engine.groups([{"prompt": "a"}], k=2)), 60)


async def test_failures_of_a_reachable_server_are_charged(tmp_path: Path) -> None:
    async with (
        ModelServer(Answer(status=500)) as server,
        build_engine(server.url, tmp_path, wait_for_upstream=60.0, breaker=None) as engine,
    ):
        async with asyncio.timeout(60):
            (group,) = [group async for group in engine.groups([{"prompt": "a"}])]
    (rollout,) = group.rollouts
    assert isinstance(rollout.outcome, Failed)
    assert (rollout.outcome.cause, len(rollout.attempts)) == ("upstream.error", 3)
    assert not events(tmp_path, "upstream.waiting")


async def test_stream_closed_during_an_outage_check_is_cancelled(tmp_path: Path) -> None:
    async with (
        ModelServer(Answer(status=500)) as server,
        build_engine(server.url, tmp_path, wait_for_upstream=60.0, breaker=None) as engine,
    ):
        server.models = Answer(status=503)
        seen: list[str] = []
        engine.on_event = lambda kind, payload: seen.append(kind)
        stream = engine.groups([{"prompt": "a"}], k=2)
        taking = asyncio.ensure_future(anext(stream))
        await wait_for_event(engine, "upstream.waiting", seen)
        taking.cancel()
        await asyncio.wait({taking})
        await stream.aclose()
        server.models = ("test-model",)
        server.default = Answer("ok")
        async with asyncio.timeout(60):
            (group,) = [group async for group in engine.groups([{"prompt": "b"}], k=2, name="second")]
    assert [rollout.outcome for rollout in group.rollouts] == [Completed()] * 2


@pytest.mark.long
async def test_run_waits_at_the_start_for_a_server_that_is_not_ready(tmp_path: Path) -> None:
    server = ModelServer("ok")
    server.port = free_port()
    starting = asyncio.create_task(
        build_engine(f"http://127.0.0.1:{server.port}", tmp_path, wait_for_upstream=60.0).__aenter__()
    )
    try:
        done, _ = await asyncio.wait({starting}, timeout=0.5)
        assert not done
        async with server:
            async with asyncio.timeout(60):
                engine = await starting
            groups = [group async for group in engine.groups([{"prompt": "a"}])]
            await engine.__aexit__(None, None, None)
    finally:
        starting.cancel()
    assert groups[0].rollouts[0].outcome == Completed()


@pytest.mark.long
async def test_replica_concurrency_bounds_the_calls_in_flight(tmp_path: Path) -> None:
    async with ModelServer("ok") as server:
        options: dict[str, Any] = {"replica_concurrency": 3, "concurrency": 32}
        async with build_engine(server.url, tmp_path, runners=2, **options) as engine:
            groups = [group async for group in engine.groups([{"prompt": "a"}] * 8, k=8)]
        assert server.peak <= 3
    assert len(groups) == 8


def test_invalid_upstream_options_are_refused(tmp_path: Path) -> None:
    for wrong in (
        {"replica_concurrency": 0},
        {"wait_for_upstream": -1.0},
        {"wait_for_upstream": float("inf")},
        {"tool_parser": "qwen3"},  # without a tokenizer
        {"tool_parser": "qwen3", "record": "messages"},
        {"tool_parser": "qwen3", "rendering": {"tokenizer": "x", "tool_parser": "glm"}},
    ):
        with pytest.raises(UsageError):
            build_engine("http://127.0.0.1:1", tmp_path, **wrong)
    assert EngineConfig(environment="x").wait_for_upstream == 0.0


def test_tool_parser_is_passed_to_the_chat_format(tmp_path: Path) -> None:
    rendering = {"tokenizer": str(TOKENIZERS / "qwen3"), "name": "default"}
    engine = build_engine("http://127.0.0.1:1", tmp_path, tool_parser="qwen3", rendering=rendering)
    assert engine.config.rendering["tool_parser"] == "qwen3"
    with pytest.raises(UsageError, match=r"'x'"):
        build_engine("http://127.0.0.1:1", tmp_path, tool_parser="x", rendering=rendering)
