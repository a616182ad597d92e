"""Injected faults happen where they are configured, and nowhere else."""

import asyncio
import os
from typing import Any

import aiohttp
import orjson
import pytest

from tests.engine_standins import StandinServer, standin, standin_process

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "seed": 1, "ignore_eos": True}
PATH = "/v1/chat/completions"


async def raw(server: StandinServer, body: Any = CHAT, **more: Any) -> bytes:
    """Return all bytes of a response, until the server closes the connection or the response is complete."""
    host, port = server.root.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = orjson.dumps(body | more)
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
    try:
        async with asyncio.timeout(60):
            return await reader.read()
    finally:
        writer.close()


def plain(data: bytes) -> bytes:
    """Remove the fields that differ between two equal requests."""
    fields = b"id", b"created"
    for field in fields:
        at = data.find(b'"' + field + b'":')
        while at >= 0:
            end = data.find(b",", at)
            data = data[:at] + data[end + 1 :]
            at = data.find(b'"' + field + b'":', at)
    return b"\n".join(line for line in data.split(b"\r\n") if not line.startswith(b"Date:"))


async def test_reply_is_cut_at_any_byte() -> None:
    async with standin("vllm") as server:
        for stream in (False, True):
            whole = await raw(server, stream=stream)
            for cut in (0, 1, 17, 100, 400, len(whole) - 1):
                await server.fault(after_bytes=cut)
                part = await raw(server, stream=stream)
                assert len(part) == cut
            assert plain(await raw(server, stream=stream)) == plain(whole)


async def test_fault_affects_the_configured_number_of_requests() -> None:
    async with standin("vllm") as server:
        await server.fault(count=2, skip=1, status=503, headers={"Retry-After": "1"})
        assert [(await server.post(PATH, CHAT))[0] for _ in range(5)] == [200, 503, 503, 200, 200]
        assert (await server.get("/standin/faults"))[1] == {"faults": [], "happened": 2}
        await server.fault(status=500, path="/health")
        assert (await server.post(PATH, CHAT))[0] == 200
        assert (await server.get("/health"))[0] == 500
        await server.fault(count=9, status=500)
        async with server.http.delete(f"{server.root}/standin/faults") as answer:
            assert answer.status == 200
        assert (await server.post(PATH, CHAT))[0] == 200


async def test_refused_connection_is_reset() -> None:
    async with standin("sglang") as server:
        await server.fault(refuse=True)
        with pytest.raises(aiohttp.ClientError):
            await server.post(PATH, CHAT)
        assert (await server.post(PATH, CHAT))[0] == 200


@pytest.mark.parametrize("then", ["half_event", "garbage", "end"])
async def test_early_end_of_a_stream_is_valid_http(then: str) -> None:
    async with standin("vllm") as server:
        await server.fault(after_events=3, then=then)
        async with server.http.post(server.root + PATH, json=CHAT | {"stream": True}) as answer:
            body = await answer.read()
        assert b"[DONE]" not in body
        pieces = body.split(b"\n\n")
        assert [piece.startswith(b"data: {") for piece in pieces[:3]] == [True] * 3
        rest = b"\n\n".join(pieces[3:])
        if then == "end":
            assert rest == b""
        else:
            assert rest
            with pytest.raises(orjson.JSONDecodeError):
                orjson.loads(rest.removeprefix(b"data: "))
        assert (await server.events(PATH, CHAT | {"stream": True}))[-1] == "[DONE]"


@pytest.mark.parametrize("then", ["die", "reset"])
async def test_aborted_stream_is_incomplete(then: str) -> None:
    async with standin("vllm") as server:
        await server.fault(after_events=3, then=then)
        with pytest.raises(aiohttp.ClientError):
            async with server.http.post(server.root + PATH, json=CHAT | {"stream": True}) as answer:
                await answer.read()


@pytest.mark.long
@pytest.mark.parametrize("where", [{"after_events": 2}, {"after_bytes": 300}])
async def test_stalled_stream_frees_its_slots_when_its_reader_disconnects(
    where: Any,
) -> None:
    async with standin("vllm") as server:
        await server.fault(then="stall", **where)
        async with server.http.post(server.root + PATH, json=CHAT | {"stream": True}) as got:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await got.read()
        await server.until(0)
        assert (await server.post(PATH, CHAT))[0] == 200


async def test_process_of_a_test_is_never_killed() -> None:
    async with standin("vllm") as server:
        status, reply = await server.post("/standin/faults", {"then": "kill", "after_events": 1})
        assert status == 400
        assert "process" in reply["error"]["message"]
    wrong: list[Any] = [{"then": "end", "after_bytes": 3}, {"after_bytes": 1, "after_events": 1}, {"nope": 1}, []]
    for broken in wrong:
        async with standin("vllm") as server:
            assert (await server.post("/standin/faults", broken))[0] == 400


async def test_standin_process_can_die_in_the_middle_of_an_event_and_logs_requests() -> None:
    async with standin_process("sglang") as server:
        assert server.pid != os.getpid()
        assert (await server.post(PATH, CHAT))[0] == 200
        assert server.log is not None
        entries = [orjson.loads(line) for line in server.log.read_bytes().splitlines()]
        assert [(entry["path"], entry["body"]) for entry in entries] == [(PATH, CHAT)]
        await server.fault(then="kill", after_bytes=500)
        with pytest.raises(aiohttp.ClientError):
            async with server.http.post(server.root + PATH, json=CHAT | {"stream": True}) as answer:
                await answer.read()
        with pytest.raises(aiohttp.ClientConnectionError):
            await server.get("/health")


async def test_client_that_disconnects_ends_its_sampling() -> None:
    async with standin("sglang") as server:
        body = {"text": "hi", "stream": True, "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True}}
        with server.freezing(3):
            async with server.http.post(f"{server.root}/generate", json=body) as answer:
                await answer.content.readline()
                await server.frozen(3)
                assert await server.running() == (1, 0)
            await server.until(0)
