"""Every shard serves the sessions of all shards by forwarding requests to the shard that owns the session."""

import asyncio
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from rookery.core import RookeryError
from rookery.core.errors import unwrap_group
from rookery.gateway import shard_peers, shards
from rookery.gateway.http_messages import Request
from tests.engine_standins import standin
from tests.gateway.shard_kit import (
    ADMIN,
    HI,
    TIMEOUT,
    chat_endpoint,
    chat_text,
    http_client,
    kill_shard,
    openai_client,
    run_gateway,
    session_id_for,
    shard_socket,
    wait_for_restart,
)
from tests.servers import Answer, ModelServer

N = 3


def client_of_shard(path: Path) -> aiohttp.ClientSession:
    """Open an HTTP client whose requests all go to one shard over one keep-alive connection."""
    return aiohttp.ClientSession(
        connector=aiohttp.UnixConnector(str(path), limit=1), timeout=aiohttp.ClientTimeout(total=TIMEOUT)
    )


async def read_json(response: aiohttp.ClientResponse, status: int = 200) -> Any:
    body = await response.json()
    assert response.status == status, body
    return body


async def test_every_shard_serves_the_sessions_of_all_shards() -> None:
    async with (
        standin("vllm") as server,
        run_gateway(server.url, shards=N, kind="vllm", record="messages") as gateway,
    ):
        session_ids = set()
        for entry in range(N):
            async with client_of_shard(shard_socket(gateway, entry)) as session:
                registrations = []
                for shard in range(N):
                    name = session_id_for(shard, N, stem=f"from{entry}-")
                    async with session.post("http://all/rollouts", json={"id": name}, headers=ADMIN) as response:
                        registrations.append(await read_json(response, 201))
                        assert response.headers["Cache-Control"] == "no-store"
                        assert registrations[-1]["base_url"] == f"http://all/v1/rollouts/{name}"
                    async with session.post("http://all/rollouts", json={"id": name}, headers=ADMIN) as response:
                        await read_json(response, 409)
                session_ids |= {registration["id"] for registration in registrations}
                for registration in registrations:
                    url, headers = chat_endpoint(registration)
                    body = {"messages": HI, "max_tokens": 5, "seed": 3}
                    async with session.post(url, json=body, headers=headers) as response:
                        text = (await read_json(response))["choices"][0]["message"]["content"]
                    async with session.post(url, json=body | {"stream": True}, headers=headers) as response:
                        assert response.content_type == "text/event-stream"
                        assert response.headers["Cache-Control"] == "no-cache"
                        assert (await response.read()).endswith(b"data: [DONE]\n\n")
                    async with session.post(
                        url, json=body, headers=chat_endpoint(registrations[0] | {"secret": "x"})[1]
                    ) as response:
                        await read_json(response, 401)
                        assert response.headers["WWW-Authenticate"] == "Bearer"
                    async with session.get(f"{registration['base_url']}/models", headers=headers) as response:
                        assert (await read_json(response))["data"]
                    where = f"http://all/rollouts/{registration['id']}"
                    async with session.get(f"{where}/trajectory", headers=ADMIN) as response:
                        turns = (await read_json(response))["turns"]
                        assert len(turns) == 2
                        assert turns[0]["response"]["content"] == text
                    async with session.post(f"{where}/cancel", headers=ADMIN) as response:
                        assert (await read_json(response))["status"] == "cancelled"
                    async with session.post(url, json=body, headers=headers) as response:
                        assert (await read_json(response, 410))["error"]["code"] == "rollout_gone"
                async with session.get("http://all/rollouts", headers=ADMIN) as response:
                    shown = (await read_json(response))["rollouts"]
                    assert {one["id"] for one in shown} == session_ids
                    assert [one["began"] for one in shown] == sorted(one["began"] for one in shown)
                async with session.get("http://all/metrics") as response:
                    text = await response.text()
                    for shard in range(N):
                        assert f'rookery_gateway_turns_total{{shard="{shard}"}} {2 * (entry + 1)}.0\n' in text
                    assert text.count("# HELP rookery_gateway_turns_total") == 1
        async with client_of_shard(shard_socket(gateway, 0)) as session:
            for name in session_ids:
                for _ in range(2):
                    async with session.delete(f"http://all/rollouts/{name}", headers=ADMIN) as response:
                        assert (await read_json(response))["status"] == "deleted"
            async with session.get("http://all/rollouts", headers=ADMIN) as response:
                assert (await read_json(response))["rollouts"] == []


async def test_many_sessions_share_one_keep_alive_connection() -> None:
    async with ModelServer() as server, run_gateway(server.url, shards=N) as gateway:
        server.default = lambda request: Answer(f"to {request.body['messages'][-1]['content']}")
        registrations = [await gateway.register({"id": f"many{n}"}) for n in range(30)]
        async with http_client() as session:
            for round_ in range(2):
                for registration in registrations:
                    url, headers = chat_endpoint(registration)
                    body = {"messages": [{"role": "user", "content": f"{registration['id']} {round_}"}]}
                    async with session.post(url, json=body, headers=headers) as response:
                        text = (await read_json(response))["choices"][0]["message"]["content"]
                    assert text == f"to {registration['id']} {round_}"
        for registration in registrations:
            turns = (await gateway.trajectory(registration["id"]))["turns"]
            assert [turn["response"]["content"] for turn in turns] == [
                f"to {registration['id']} {n}" for n in range(2)
            ]


async def test_long_response_is_forwarded_in_chunks() -> None:
    text = "long " * shard_peers.MAX_BUFFERED
    async with ModelServer(Answer(text)) as server, run_gateway(server.url, shards=2) as gateway:
        name = session_id_for(1, 2)
        registration = await gateway.register({"id": name})
        async with openai_client(registration, through=shard_socket(gateway, 0)) as api:
            assert await chat_text(api, HI, stream=False) == text
        async with client_of_shard(shard_socket(gateway, 0)) as session:
            where = f"http://all/rollouts/{name}/trajectory"
            async with session.get(where, headers=ADMIN) as response:
                assert "Content-Length" not in response.headers
                assert (await read_json(response))["turns"][0]["response"]["content"] == text
            async with session.get(where, headers=ADMIN) as response:  # the connection can be reused
                assert response.status == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_client_disconnect_cancels_a_forwarded_call(stream: bool) -> None:
    async with (
        standin("vllm") as server,
        run_gateway(server.url, shards=2, kind="vllm", record="messages") as gateway,
    ):
        name = session_id_for(1, 2)
        url, headers = chat_endpoint(await gateway.register({"id": name}))
        body = {"messages": HI, "max_tokens": 50, "temperature": 0, "stream": stream}
        with server.freezing(6):
            async with client_of_shard(shard_socket(gateway, 0)) as session:
                call = asyncio.create_task(session.post(url, json=body, headers=headers))
                await server.frozen(6)
                if stream:
                    assert await (await call).content.readline()
                else:
                    call.cancel()
            await server.until(0)
        record = await gateway.trajectory(name)
        assert [turn["partial"] for turn in record["turns"]] == [True] * stream
        assert record["calls_under_way"] == 0
        await server.post("/resume")


@pytest.mark.long
async def test_dead_owner_is_a_retryable_error_until_it_restarts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    again = asyncio.Event()
    begin = shards._Process.launch

    async def delayed_launch(process: shards._Process) -> None:
        if process._process is not None:
            await again.wait()
        await begin(process)

    monkeypatch.setattr(shards._Process, "launch", delayed_launch)
    async with ModelServer() as server, run_gateway(server.url, shards=2) as gateway:
        name, other = session_id_for(1, 2), session_id_for(0, 2)
        registration, other_registration = (
            await gateway.register({"id": name}),
            await gateway.register({"id": other}),
        )
        pid = kill_shard(gateway, 1)
        async with client_of_shard(shard_socket(gateway, 0)) as session:
            for _ in range(2):
                for body in ({"messages": HI}, {"messages": HI, "stream": True}):
                    url, headers = chat_endpoint(registration)
                    async with session.post(url, json=body, headers=headers) as response:
                        error = (await read_json(response, 503))["error"]
                        assert response.headers["Retry-After"] == "1"
                    assert error["code"] == "upstream_unavailable"
            async with session.get(f"http://all/rollouts/{name}/trajectory", headers=ADMIN) as response:
                await read_json(response, 503)
            url, headers = chat_endpoint(other_registration)
            async with session.post(url, json={"messages": HI}, headers=headers) as response:
                await read_json(response)
            # Lists the sessions of live shards.
            async with session.get("http://all/rollouts", headers=ADMIN) as response:
                assert [one["id"] for one in (await read_json(response))["rollouts"]] == [other]
        async with openai_client(registration, through=shard_socket(gateway, 0), retries=20) as api:
            call = asyncio.create_task(chat_text(api, HI, stream=True))
            again.set()
            assert await call == "ok"
        await wait_for_restart(gateway, pid, 1, name)
        assert (await gateway.trajectory(name))["turns_recorded"] == 1


async def test_response_cut_off_at_the_owner_is_cut_off_at_the_client() -> None:
    async with (
        standin("vllm") as server,
        run_gateway(server.url, shards=2, kind="vllm", record="messages") as gateway,
    ):
        name = session_id_for(1, 2)
        url, headers = chat_endpoint(await gateway.register({"id": name}))
        body = {"messages": HI, "max_tokens": 50, "temperature": 0, "stream": True}
        with server.freezing(6):
            async with (
                client_of_shard(shard_socket(gateway, 0)) as session,
                session.post(url, json=body, headers=headers) as response,
            ):
                assert await response.content.readline()
                pid = kill_shard(gateway, 1)
                with pytest.raises(aiohttp.ClientPayloadError):
                    await response.read()
            await wait_for_restart(gateway, pid, 1, name)
        await server.post("/resume")


async def test_broadcast_waits_for_live_shards_and_fails_if_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_peers, "COLLECT_SECONDS", 0.01)  # not for pauses
    go = asyncio.Event()
    status = 200

    async def response(request: web.Request) -> web.Response:
        await go.wait()
        return web.json_response({"error": {"message": "the engine is gone"}}, status=status)

    request = Request("POST", "/pause", "", {}, b"{}", "")
    peers = shard_peers.ShardPeers(tmp_path, 0, 2)
    try:
        await peers.broadcast(request, 5.0)  # the other shard is down and will read the record
        app = web.Application()
        app.router.add_post("/pause", response)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.UnixSite(runner, str(shard_peers.shard_socket_path(tmp_path, 1))).start()
        try:
            broadcast = asyncio.create_task(peers.broadcast(request, TIMEOUT))
            await asyncio.wait({broadcast}, timeout=0.1)
            assert not broadcast.done()
            go.set()
            await broadcast
            status = 503
            with pytest.raises(BaseExceptionGroup) as raised:
                await peers.broadcast(request, TIMEOUT)
            error = unwrap_group(raised.value)
            assert isinstance(error, RookeryError)
            assert re.search(r"\b1\b", str(error))
            assert "the engine is gone" in str(error)
            go.clear()
            with pytest.raises(BaseExceptionGroup) as raised:
                await peers.broadcast(request, 0.05)
            assert re.search(r"\b1\b", str(unwrap_group(raised.value)))
        finally:
            go.set()
            await runner.cleanup()
    finally:
        await peers.close()
