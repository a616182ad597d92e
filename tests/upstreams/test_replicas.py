"""Several replicas: a call moves to another one, and failing replicas are excluded until they answer."""

import asyncio
from typing import Any

import pytest

from rookery.core import UpstreamError
from rookery.upstreams import ModelRequest
from rookery.upstreams.health import SHORTEST
from rookery.upstreams.replica import Replica
from tests.servers import Answer, ModelServer
from tests.upstreams.engines import Engine, Play
from tests.upstreams.helpers import REQUEST, of_kind, upstream
from tests.upstreams.test_streaming import CHAT, STREAM

WHOLE = {"choices": [{"message": {"content": "there"}, "finish_reason": "stop"}]}


def later(up, seconds):
    """Pretend that some seconds have passed since the failures."""
    for replica in up.replicas:
        if replica.health.until is not None:
            replica.health.until -= seconds


@pytest.mark.parametrize(
    "first",
    [
        Play(WHOLE, cut=0),
        Play(WHOLE, cut=10),
        Play({"error": {"message": "EngineDeadError"}}, status=500),
        Play({"error": {"message": "restarting"}}, status=502),
        Play({"error": {"message": "busy"}}, status=503),
    ],
)
@pytest.mark.parametrize("affinity", ["", "r1"])
async def test_another_replica_answers_when_nothing_was_delivered(first, affinity):
    affine_request = ModelRequest(model="m", messages=REQUEST.messages, affinity=affinity)
    async with Engine() as one, Engine() as two, of_kind("openai", one.url, two.url, retries=1) as up:
        one.on(CHAT, first)
        two.on(CHAT, Play(WHOLE))
        for _ in range(4):
            reply = await up.complete(affine_request, timeout=60)
            assert (reply.message.text, reply.replica) == ("there", f"{two.url}/v1")


@pytest.mark.parametrize("status", [400, 401, 404, 504])
async def test_rejected_request_is_not_sent_to_another_replica(status):
    async with Engine() as one, Engine() as two, of_kind("openai", one.url, two.url) as up:
        for engine in (one, two):
            engine.on(CHAT, Play({"error": {"message": "no"}}, status=status))
        with pytest.raises(UpstreamError):
            await up.complete(REQUEST, timeout=60)
        assert len(one.requests) + len(two.requests) == 1


async def test_request_that_fails_its_server_is_not_sent_to_every_replica():
    async with (
        Engine() as one,
        Engine() as two,
        Engine() as three,
        of_kind("openai", one.url, two.url, three.url, retries=5) as up,
    ):
        for engine in (one, two, three):
            engine.on(CHAT, Play({"error": {"message": "crash"}}, status=500))
        with pytest.raises(UpstreamError):
            await up.complete(REQUEST, timeout=60)
        assert len(one.requests) + len(two.requests) + len(three.requests) == 2


async def test_unreachable_replica_is_excluded_with_a_reason_until_it_responds(caplog):
    async with ModelServer("one") as one, ModelServer("two") as two, upstream(one.url, two.url, retries=1) as up:
        await one.stop()
        for _ in range(6):
            assert (await up.complete(REQUEST, timeout=60)).message.text == "two"
        states = {state.name: state for state in up.states()}
        excluded = states[f"{one.url}/v1"]
        assert not excluded.healthy
        assert one.url in excluded.reason
        assert states[f"{two.url}/v1"].healthy
        assert len([r for r in caplog.records if r.levelname == "WARNING" and one.url in r.message]) == 1
        async with one:
            assert (await up.complete(REQUEST, timeout=60)).message.text == "two", (
                "no probe before the exclusion ends"
            )
            later(up, SHORTEST)
            await up.complete(REQUEST, timeout=60)
            await asyncio.gather(*up.maintenance.tasks)
            assert all(state.healthy and not state.reason for state in up.states())
            assert {(await up.complete(REQUEST, timeout=60)).message.text for _ in range(4)} == {"one", "two"}


async def test_failed_probe_extends_the_exclusion():
    async with ModelServer("one") as one, ModelServer("two") as two, upstream(one.url, two.url, retries=1) as up:
        await one.stop()
        for _ in range(2):
            await up.complete(REQUEST, timeout=60)
        health = up.replicas[0].health
        for factor in (2, 4, 8):
            later(up, 100)
            await up.complete(REQUEST, timeout=60)
            await asyncio.gather(*up.maintenance.tasks)
            left = health.until - asyncio.get_running_loop().time()
            assert SHORTEST * factor / 2 < left <= SHORTEST * factor


async def test_calls_are_still_tried_if_all_replicas_are_excluded():
    async with ModelServer("one") as one, ModelServer("two") as two, upstream(one.url, two.url, retries=1) as up:
        await one.stop()
        await two.stop()
        with pytest.raises(UpstreamError):
            await up.complete(REQUEST, timeout=60)
        assert not any(state.healthy for state in up.states())
        async with two:
            assert (await up.complete(REQUEST, timeout=60)).message.text == "two"


async def test_replica_is_excluded_only_after_several_timeouts(monkeypatch):
    exchange = Replica.exchange

    async def exchange_with_short_timeout(self: Replica, *args: Any, seconds: float, **options: Any) -> Any:
        return await exchange(self, *args, seconds=0.1 if self is up.replicas[0] else seconds, **options)

    monkeypatch.setattr(Replica, "exchange", exchange_with_short_timeout)
    async with (
        ModelServer("two") as two,
        ModelServer(Answer(hold=asyncio.Event())) as one,
        upstream(one.url, two.url, retries=0) as up,
    ):
        results = []
        for _ in range(8):
            results += await asyncio.gather(up.complete(REQUEST, timeout=60), return_exceptions=True)
        timeouts = [result for result in results if isinstance(result, UpstreamError)]
        assert [error.code for error in timeouts] == ["upstream.timeout"] * 3
        assert not up.states()[0].healthy


async def test_larger_limit_admits_waiting_calls():
    hold = asyncio.Event()
    async with ModelServer(Answer(hold=hold)) as server, upstream(server.url, concurrency=1) as up:
        waits: list[bool] = []
        calls = [asyncio.create_task(up.complete(REQUEST, timeout=60, on_wait=waits.append)) for _ in range(3)]
        await server.wait_for_requests(1)
        assert up.replicas[0].gate.waiting == 2
        up.replicas[0].gate.resize(3)
        await server.wait_for_requests(3)
        assert waits == [True, True, False, False]
        hold.set()
        assert all(reply.queued >= 0 for reply in await asyncio.gather(*calls))
        assert up.replicas[0].gate.in_use == 0


async def test_streams_are_retried_at_another_replica():
    async with Engine() as one, Engine() as two, of_kind("openai", one.url, two.url, retries=1) as up:
        one.on(CHAT, Play(events=STREAM, cut=60))
        two.on(CHAT, Play(events=STREAM))
        for _ in range(4):
            pieces = []

            async def on_delta(delta, pieces=pieces):
                pieces.append(delta.content)

            reply = await up.complete(REQUEST, timeout=60, on_delta=on_delta)
            assert "".join(pieces) == reply.message.text == "héllo world"
