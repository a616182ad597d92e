"""The `openai` upstream against real servers that fail: errors, retries, deadlines, slots."""

import asyncio
import itertools
from typing import Any

import pytest

from rookery.core import Truncation, UpstreamError
from rookery.upstreams import ModelRequest
from rookery.upstreams.replica import Replica
from tests.servers import Answer, ModelServer, raw_server, unreachable_url
from tests.upstreams.helpers import KEY, REQUEST, fails, overdue, upstream

# ------------------------------------------------------------------------------------------------- errors


async def test_refused_connection_is_unreachable():
    async with unreachable_url() as url, upstream(url, retries=1) as up:
        assert url in await fails(up, "upstream.unreachable")


async def test_unknown_host_is_unreachable():
    async with upstream("http://no-such-host.invalid:1", retries=0) as up:
        with pytest.raises(UpstreamError) as caught:
            await up.complete(REQUEST, timeout=60)
        assert caught.value.code == "upstream.unreachable"


@pytest.mark.parametrize(
    ("status", "cause", "tries"),
    [
        (400, "upstream.rejected", 1),
        (401, "upstream.auth", 1),
        (403, "upstream.auth", 1),
        (404, "upstream.rejected", 1),
        (408, "upstream.timeout", 1),
        (422, "upstream.rejected", 1),
        (429, "upstream.overloaded", 3),
        (500, "upstream.error", 1),
        (502, "upstream.error", 3),
        (503, "upstream.overloaded", 3),
        (504, "upstream.error", 1),
    ],
)
async def test_each_status_has_its_cause_and_number_of_tries(status, cause, tries):
    error = f"nothing for {KEY} here"
    async with ModelServer(Answer(status=status, error=error)) as server, upstream(server.url, retries=2) as up:
        message = await fails(up, cause)
        assert "nothing for *** here" in message
        assert str(status) in message
        assert len(server.requests) == tries


async def test_redirect_is_not_followed():
    headers = {"Location": "http://127.0.0.1:1/elsewhere"}
    async with ModelServer(Answer(status=307, headers=headers)) as server, upstream(server.url) as up:
        assert "elsewhere" in await fails(up, "upstream.protocol")
        assert len(server.requests) == 1


async def test_full_context_ends_the_rollout_as_truncated():
    message = "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens."
    async with ModelServer() as server, upstream(server.url) as up:
        server.then(Answer(status=400, error=message), Answer(status=400, code="context_length_exceeded"))
        for _ in range(2):
            with pytest.raises(Truncation) as caught:
                await up.complete(REQUEST, timeout=60)
            assert caught.value.reason == "context"


@pytest.mark.parametrize(
    "answer",
    [
        Answer(body=b"<html>garbage</html>"),
        Answer(body=b""),
        Answer(body={"choices": []}),
        Answer(body={"hello": "there"}),
        Answer(finish=None),
        Answer(ids=[1, 2], logprobs=[-1.0]),
        Answer(cut="half"),
        Answer(headers={"Content-Encoding": "gzip"}),
    ],
)
async def test_unparsable_reply_is_a_protocol_error_and_not_retried(answer):
    async with ModelServer(answer) as server, upstream(server.url) as up:
        await fails(up, "upstream.protocol")
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    "data",
    [b"\x00\xff garbage \r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 what\r\n\r\n"],
)
async def test_server_without_http_is_a_protocol_error(data):
    async with raw_server(data) as url, upstream(url) as up:
        await fails(up, "upstream.protocol")


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n{",
    ],
)
async def test_partial_reply_is_never_complete(data):
    async with raw_server(data) as url, upstream(url) as up:
        await fails(up, "upstream.protocol")


# ---------------------------------------------------------------------------------------------- trying again


@pytest.mark.parametrize("status", [429, 502, 503])
async def test_server_that_comes_back_is_retried(status):
    async with ModelServer("there") as server, upstream(server.url) as up:
        server.then(Answer(status=status), Answer(status=status, headers={"Retry-After": "0"}))
        assert (await up.complete(REQUEST, timeout=60)).message.text == "there"
        assert len(server.requests) == 3


async def test_retry_after_past_the_deadline_fails_at_once():
    async with (
        ModelServer(Answer(status=429, headers={"Retry-After": "500"})) as server,
        upstream(server.url) as up,
    ):
        await fails(up, "upstream.overloaded", timeout=60)
        assert len(server.requests) == 1


@pytest.mark.parametrize("cut", ["before", "head"])
async def test_connection_dropped_before_a_reply_is_retried_once(cut):
    async with ModelServer("there") as server, upstream(server.url) as up:
        server.then(Answer(cut=cut))
        assert (await up.complete(REQUEST, timeout=60)).message.text == "there"
        server.then(Answer(cut=cut), Answer(cut=cut), Answer(cut=cut))
        await fails(up, "upstream.unreachable")
        assert len(server.requests) == 4


async def test_calls_reach_a_restarted_server():
    async with ModelServer("there") as server, upstream(server.url) as up:
        await up.complete(REQUEST, timeout=60)
        await server.stop()
        async with server:
            assert (await up.complete(REQUEST, timeout=60)).message.text == "there"


async def test_another_replica_is_tried_if_one_is_unreachable():
    async with (
        ModelServer("there") as server,
        unreachable_url() as unreachable,
        upstream(unreachable, server.url, retries=1) as up,
    ):
        for n in range(6):
            affine_request = ModelRequest(model="m", messages=REQUEST.messages, affinity=f"a{n}" if n % 2 else "")
            assert (await up.complete(affine_request, timeout=60)).message.text == "there"


# ------------------------------------------------------------------------------------- deadlines and slots


async def test_slow_reply_is_a_timeout_and_its_connection_is_closed():
    async with ModelServer(Answer(hold=asyncio.Event())) as server, upstream(server.url, concurrency=1) as up:
        failing = asyncio.create_task(fails(up, "upstream.timeout", timeout=60))
        await server.wait_for_requests(1)
        overdue(up)
        assert " 60 s" in await failing
        await server.wait_for_disconnects()
        server.default = Answer("free")
        assert (await up.complete(REQUEST, timeout=60)).message.text == "free"


async def test_cancelling_closes_the_connection_and_frees_the_slot():
    async with ModelServer(Answer(hold=asyncio.Event())) as server, upstream(server.url, concurrency=1) as up:
        call = asyncio.create_task(up.complete(REQUEST, timeout=60))
        await server.wait_for_requests(1)
        waiting = asyncio.create_task(up.complete(REQUEST, timeout=60))
        server.default = Answer("free")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await server.wait_for_disconnects()
        assert (await waiting).message.text == "free"
        assert up.replicas[0].load == 0


async def test_cancelling_a_call_that_waits_frees_its_turn():
    hold = asyncio.Event()
    async with ModelServer(Answer(hold=hold)) as server, upstream(server.url, concurrency=1) as up:
        calls = [asyncio.create_task(up.complete(REQUEST, timeout=60)) for _ in range(3)]
        await server.wait_for_requests(1)
        calls[1].cancel()
        hold.set()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(results[1], asyncio.CancelledError)
        assert len(server.requests) == 2
        assert up.replicas[0].load == 0


async def test_calls_in_flight_never_exceed_the_concurrency():
    async with ModelServer() as server, upstream(server.url, concurrency=3) as up:
        await asyncio.gather(*(up.complete(REQUEST, timeout=60) for _ in range(20)))
        assert len(server.requests) == 20
        assert server.peak <= 3
        assert server.connections <= 3


async def test_slots_are_granted_in_order_and_waiting_is_reported():
    hold = asyncio.Event()
    order: list[int] = []
    async with ModelServer() as server, upstream(server.url, concurrency=1) as up:

        async def call(n: int) -> float:
            reply = await up.complete(REQUEST, timeout=60)
            order.append(n)
            return reply.queued

        server.then(Answer(hold=hold))
        calls = [asyncio.create_task(call(n)) for n in range(4)]
        await server.wait_for_requests(1)
        while up.replicas[0].gate.waiting < 3:
            await asyncio.sleep(0)
        hold.set()
        queued = await asyncio.gather(*calls)
        assert order == [0, 1, 2, 3]
        assert queued[0] == 0
        assert all(seconds > 0 for seconds in queued[1:])


@pytest.fixture
def deadlines(monkeypatch):
    """The deadline of each exchange, in seconds."""
    recorded: list[float] = []
    exchange = Replica.exchange

    async def record_deadline(self: Replica, *args: Any, seconds: float, **options: Any) -> Any:
        recorded.append(seconds)
        return await exchange(self, *args, seconds=seconds, **options)

    monkeypatch.setattr(Replica, "exchange", record_deadline)
    return recorded


async def test_waiting_for_the_concurrency_gate_is_not_part_of_the_deadline(deadlines):
    hold = asyncio.Event()
    async with ModelServer() as server, upstream(server.url, concurrency=1) as up:
        server.then(Answer(hold=hold))
        calls = [asyncio.create_task(up.complete(REQUEST, timeout=60)) for _ in range(3)]
        await server.wait_for_requests(1)
        while up.replicas[0].gate.waiting < 2:
            await asyncio.sleep(0)
        hold.set()
        await asyncio.gather(*calls)
        assert deadlines == [60, 60, 60]


async def test_failed_tries_are_part_of_the_deadline(deadlines):
    async with ModelServer(Answer(status=503)) as server, upstream(server.url, retries=3) as up:
        await fails(up, "upstream.overloaded", timeout=60)
        assert deadlines[0] == 60
        assert all(later < sooner for sooner, later in itertools.pairwise(deadlines))


async def test_replicas_share_the_load_and_affinity_is_kept():
    async with ModelServer() as one, ModelServer() as two, upstream(one.url, two.url) as up:
        await asyncio.gather(*(up.complete(REQUEST, timeout=60) for _ in range(20)))
        assert len(one.requests) == len(two.requests) == 10
        homes = set()
        for _ in range(5):
            affine_request = ModelRequest(model="m", messages=REQUEST.messages, affinity="r1")
            homes.add((await up.complete(affine_request, timeout=60)).replica)
        assert len(homes) == 1


async def test_closing_ends_calls_in_flight():
    async with ModelServer(Answer(hold=asyncio.Event())) as server, upstream(server.url) as up:
        call = asyncio.create_task(up.complete(REQUEST, timeout=60))
        await server.wait_for_requests(1)
        await up.close()
        with pytest.raises(UpstreamError):
            await call
        await fails(up, "upstream.unreachable")
