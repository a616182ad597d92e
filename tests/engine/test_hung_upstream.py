"""A hung inference engine is infra and retried elsewhere; a policy that generates for too long is truncated."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rookery import Context, Engine, Environment, Limits
from rookery.core import Completed, Failed, Rollout, Truncated
from rookery.upstreams import hang_detector
from rookery.upstreams.protocol import Delta, UpstreamConfig
from tests.engine.conftest import QUICK
from tests.engine_standins import standin
from tests.servers import Answer, ModelServer, Request, raw_server


class OneCall(Environment):
    """Calls the policy once, streamed if the task requests it."""

    name = "asks"

    async def run(self, ctx: Context) -> None:
        async def on_delta(delta: Delta) -> None: ...

        await ctx.policy.chat(ctx.task.prompt, on_delta=on_delta if ctx.task.data.get("stream") else None)

    async def score(self, ctx: Context) -> float:
        return 1.0


@pytest.fixture(autouse=True)
def quick_examination(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examine silent calls soon, but give servers much time to respond, as a busy machine requires."""
    for name, seconds in (("HEALTH_SECONDS", 60.0), ("SAMPLE_SECONDS", 60.0), ("STALL_SECONDS", 1.0)):
        monkeypatch.setattr(hang_detector, name, seconds)
    monkeypatch.setattr(hang_detector, "METRICS_GAP_SECONDS", 0.2)
    monkeypatch.setattr(hang_detector, "RECENT_SECONDS", 0.2)


@asynccontextmanager
async def hung_server() -> AsyncIterator[str]:
    """A server that lists its models once, for the check at the start, then accepts calls and never responds."""
    listed = False

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal listed
        await reader.readuntil(b"\r\n\r\n")
        if not listed:
            listed = True
            body = b'{"data": [{"id": "test-model"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await reader.read()

    async with raw_server(serve) as url:
        yield url


async def run_rollouts(
    tmp_path: Path, *urls: str, stream: bool = False, kind: str = "openai", **options: Any
) -> Rollout:
    policy = UpstreamConfig(kind=kind, urls=urls)
    options = {"runners": 0, "retry": QUICK, "breaker": None, "limits": Limits(run=1.0), **options}
    async with Engine(OneCall(), policy=policy, out=tmp_path / "runs", **options) as engine:
        task = {"prompt": "write", "data": {"stream": stream}}
        (group,) = [group async for group in engine.groups([task], k=1)]
    return group.rollouts[0]


def causes(rollout: Rollout) -> list[str]:
    return [one.outcome.cause if isinstance(one.outcome, Failed) else "" for one in rollout.attempts]


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
async def test_run_deadline_at_a_hung_server_is_infra_with_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(hang_detector, "HEALTH_SECONDS", 1.0)
    async with hung_server() as url:
        rollout = await run_rollouts(tmp_path, url, stream=stream)
    assert isinstance(rollout.outcome, Failed)
    assert (rollout.outcome.fault, rollout.outcome.cause) == ("infra", "upstream.hung")
    assert causes(rollout) == ["upstream.hung"] * 3
    assert rollout.reward is None
    for attempt in rollout.attempts:
        (seen,) = attempt.evidence["upstream"]
        assert (seen["verdict"], seen["streamed"]) == ("hung", stream)
        assert seen["report"]["health"] != "ok"


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
async def test_hung_replica_costs_one_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(hang_detector, "HEALTH_SECONDS", 5.0)
    async with ModelServer("ok") as good:
        async with hung_server() as bad:
            rollout = await run_rollouts(tmp_path, bad, good.url, stream=stream, limits=Limits(run=10.0))
        assert rollout.outcome == Completed()
        assert causes(rollout) in ([""], ["upstream.hung", ""])  # prefix affinity chooses the first replica


@pytest.mark.long
async def test_policy_that_generates_for_too_long_is_truncated_with_evidence(tmp_path: Path) -> None:
    never = asyncio.Event()

    def play(request: Request) -> Answer:
        long = request.body["messages"][-1]["content"] == "write"
        return Answer("long", hold=never) if long else Answer("ok")

    async with ModelServer(play) as server:
        rollout = await run_rollouts(tmp_path, server.url)
    assert rollout.outcome == Truncated("time")
    assert rollout.reward == 1.0
    (seen,) = rollout.attempts[0].evidence["upstream"]
    assert seen["verdict"] == "working"


@pytest.fixture
def repeated_examination(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examine silent calls repeatedly, so that the test does not depend on the machine's speed."""
    monkeypatch.setattr(hang_detector, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(hang_detector, "CHECK_SECONDS", 0.1)


@pytest.mark.long
async def test_stream_that_stops_is_hung_and_retried(tmp_path: Path, repeated_examination: None) -> None:
    async with standin("vllm") as server:
        await server.fault(after_events=3, then="stall")
        rollout = await run_rollouts(tmp_path, server.url, stream=True, kind="vllm", limits=Limits(run=300.0))
    assert causes(rollout)[0] == "upstream.hung"
    assert rollout.attempts[0].evidence["upstream"][0]["bytes"] > 0


async def test_missing_reply_of_an_idle_server_is_hung_and_retried(
    tmp_path: Path, repeated_examination: None
) -> None:
    async with standin("sglang", weights=None) as server:
        await server.fault(after_bytes=0, then="stall")
        rollout = await run_rollouts(tmp_path, server.url, kind="sglang", limits=Limits(run=300.0))
    assert causes(rollout)[0] == "upstream.hung"
    assert rollout.attempts[0].evidence["upstream"][0]["reason"] == "request_lost"
    assert isinstance(rollout.outcome, Completed | Truncated)
