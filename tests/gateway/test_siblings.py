"""Any shard answers for all: what belongs to another is passed on, byte for byte, as long as somebody reads."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from rookery.core.errors import unwrap_group
from rookery.gateway import shard_peers, shards
from rookery.gateway.http import Request
from tests.engine_standins import standin
from tests.gateway.shard_kit import (
    ADMIN,
    HI,
    SECONDS,
    chat,
    client,
    door,
    gateway,
    http,
    kill,
    owned_by,
    reborn,
    said,
)
from tests.servers import Answer, ModelServer

N = 3


def through(path: Path) -> aiohttp.ClientSession:
    """All requests come to one shard, over one kept connection."""
    return aiohttp.ClientSession(
        connector=aiohttp.UnixConnector(str(path), limit=1), timeout=aiohttp.ClientTimeout(total=SECONDS)
    )


async def whole(answer: aiohttp.ClientResponse, status: int = 200) -> Any:
    body = await answer.json()
    assert answer.status == status, body
    return body


async def test_any_shard_registers_answers_shows_cancels_and_deletes_for_all() -> None:
    async with standin("vllm") as server, gateway(server.url, shards=N, kind="vllm", record="messages") as served:
        everyone = set()
        for entry in range(N):
            async with through(door(served, entry)) as session:
                seats = []
                for shard in range(N):
                    name = owned_by(shard, N, stem=f"from{entry}-")
                    async with session.post("http://all/rollouts", json={"id": name}, headers=ADMIN) as answer:
                        seats.append(await whole(answer, 201))
                        assert answer.headers["Cache-Control"] == "no-store"
                        assert seats[-1]["base_url"] == f"http://all/v1/rollouts/{name}"
                    async with session.post("http://all/rollouts", json={"id": name}, headers=ADMIN) as answer:
                        await whole(answer, 409)
                everyone |= {seat["id"] for seat in seats}
                for seat in seats:
                    url, headers = chat(seat)
                    body = {"messages": HI, "max_tokens": 5, "seed": 3}
                    async with session.post(url, json=body, headers=headers) as answer:
                        text = (await whole(answer))["choices"][0]["message"]["content"]
                    async with session.post(url, json=body | {"stream": True}, headers=headers) as answer:
                        assert answer.content_type == "text/event-stream"
                        assert answer.headers["Cache-Control"] == "no-cache"
                        assert (await answer.read()).endswith(b"data: [DONE]\n\n")
                    async with session.post(url, json=body, headers=chat(seats[0] | {"secret": "x"})[1]) as answer:
                        await whole(answer, 401)
                        assert answer.headers["WWW-Authenticate"] == "Bearer"
                    async with session.get(f"{seat['base_url']}/models", headers=headers) as answer:
                        assert (await whole(answer))["data"]
                    where = f"http://all/rollouts/{seat['id']}"
                    async with session.get(f"{where}/trajectory", headers=ADMIN) as answer:
                        turns = (await whole(answer))["turns"]
                        assert len(turns) == 2
                        assert turns[0]["response"]["content"] == text
                    async with session.post(f"{where}/cancel", headers=ADMIN) as answer:
                        assert (await whole(answer))["status"] == "cancelled"
                    async with session.post(url, json=body, headers=headers) as answer:
                        assert (await whole(answer, 410))["error"]["code"] == "rollout_gone"
                async with session.get("http://all/rollouts", headers=ADMIN) as answer:
                    shown = (await whole(answer))["rollouts"]
                    assert {one["id"] for one in shown} == everyone
                    assert [one["began"] for one in shown] == sorted(one["began"] for one in shown)
                async with session.get("http://all/metrics") as answer:
                    text = await answer.text()
                    for shard in range(N):
                        assert f'rookery_gateway_turns_total{{shard="{shard}"}} {2 * (entry + 1)}\n' in text
                    assert text.count("# HELP rookery_gateway_turns_total") == 1
        async with through(door(served, 0)) as session:
            for name in everyone:
                for _ in range(2):
                    async with session.delete(f"http://all/rollouts/{name}", headers=ADMIN) as answer:
                        assert (await whole(answer))["status"] == "deleted"
            async with session.get("http://all/rollouts", headers=ADMIN) as answer:
                assert (await whole(answer))["rollouts"] == []


async def test_many_sessions_go_over_one_kept_connection_of_the_open_door() -> None:
    async with ModelServer() as server, gateway(server.url, shards=N) as served:
        server.default = lambda request: Answer(f"to {request.body['messages'][-1]['content']}")
        seats = [await served.register({"id": f"many{n}"}) for n in range(30)]
        async with http() as session:
            for round_ in range(2):
                for seat in seats:
                    url, headers = chat(seat)
                    body = {"messages": [{"role": "user", "content": f"{seat['id']} {round_}"}]}
                    async with session.post(url, json=body, headers=headers) as answer:
                        found = (await whole(answer))["choices"][0]["message"]["content"]
                    assert found == f"to {seat['id']} {round_}"
        for seat in seats:
            turns = (await served.trajectory(seat["id"]))["turns"]
            assert [turn["response"]["content"] for turn in turns] == [f"to {seat['id']} {n}" for n in range(2)]


async def test_a_long_answer_is_passed_on_piece_by_piece() -> None:
    text = "long " * shard_peers.MAX_BUFFERED
    async with ModelServer(Answer(text)) as server, gateway(server.url, shards=2) as served:
        name = owned_by(1, 2)
        seat = await served.register({"id": name})
        async with client(seat, through=door(served, 0)) as api:
            assert await said(api, HI, stream=False) == text
        async with through(door(served, 0)) as session:
            where = f"http://all/rollouts/{name}/trajectory"
            async with session.get(where, headers=ADMIN) as answer:
                assert "Content-Length" not in answer.headers
                assert (await whole(answer))["turns"][0]["response"]["content"] == text
            async with session.get(where, headers=ADMIN) as answer:  # the connection is good for the next
                assert answer.status == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_that_goes_away_takes_a_passed_on_call_with_it_up_to_the_engine(stream: bool) -> None:
    async with standin("vllm") as server, gateway(server.url, shards=2, kind="vllm", record="messages") as served:
        name = owned_by(1, 2)
        url, headers = chat(await served.register({"id": name}))
        body = {"messages": HI, "max_tokens": 50, "temperature": 0, "stream": stream}
        with server.freezing(6):
            async with through(door(served, 0)) as session:
                call = asyncio.create_task(session.post(url, json=body, headers=headers))
                await server.frozen(6)
                if stream:
                    assert await (await call).content.readline()
                else:
                    call.cancel()
            await server.until(0)
        record = await served.trajectory(name)
        assert [turn["partial"] for turn in record["turns"]] == [True] * stream
        assert record["calls_under_way"] == 0
        await server.post("/resume")


async def test_an_owner_that_is_dead_is_a_retryable_error_at_once_and_then_there_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    again = asyncio.Event()
    begin = shards._Process._launch

    async def held(process: shards._Process) -> None:
        if process._process is not None:
            await again.wait()
        await begin(process)

    monkeypatch.setattr(shards._Process, "_launch", held)
    async with ModelServer() as server, gateway(server.url, shards=2) as served:
        name, other = owned_by(1, 2), owned_by(0, 2)
        seat, theirs = await served.register({"id": name}), await served.register({"id": other})
        pid = kill(served, 1)
        async with through(door(served, 0)) as session:
            for _ in range(2):
                for body in ({"messages": HI}, {"messages": HI, "stream": True}):
                    url, headers = chat(seat)
                    async with session.post(url, json=body, headers=headers) as answer:
                        error = (await whole(answer, 503))["error"]
                        assert answer.headers["Retry-After"] == "1"
                    assert error["code"] == "upstream_unavailable"
                    assert "it is being restarted: try again" in error["message"]
            async with session.get(f"http://all/rollouts/{name}/trajectory", headers=ADMIN) as answer:
                await whole(answer, 503)
            url, headers = chat(theirs)
            async with session.post(url, json={"messages": HI}, headers=headers) as answer:
                await whole(answer)
            async with session.get("http://all/rollouts", headers=ADMIN) as answer:  # what can be shown is
                assert [one["id"] for one in (await whole(answer))["rollouts"]] == [other]
        async with client(seat, through=door(served, 0), retries=20) as api:
            call = asyncio.create_task(said(api, HI, stream=True))
            again.set()
            assert await call == "ok"
        await reborn(served, pid, 1, name)
        assert (await served.trajectory(name))["turns_recorded"] == 1


async def test_an_answer_that_is_cut_off_at_its_owner_is_cut_off_at_the_client() -> None:
    async with standin("vllm") as server, gateway(server.url, shards=2, kind="vllm", record="messages") as served:
        name = owned_by(1, 2)
        url, headers = chat(await served.register({"id": name}))
        body = {"messages": HI, "max_tokens": 50, "temperature": 0, "stream": True}
        with server.freezing(6):
            async with (
                through(door(served, 0)) as session,
                session.post(url, json=body, headers=headers) as answer,
            ):
                assert await answer.content.readline()
                pid = kill(served, 1)
                with pytest.raises(aiohttp.ClientPayloadError):
                    await answer.read()
            await reborn(served, pid, 1, name)
        await server.post("/resume")


async def test_what_all_are_told_is_waited_for_and_an_error_where_one_that_lives_does_not_do_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_peers, "COLLECT_SECONDS", 0.01)  # not for pauses
    go = asyncio.Event()
    status = 200

    async def answer(request: web.Request) -> web.Response:
        await go.wait()
        return web.json_response({"error": {"message": "the engine is gone"}}, status=status)

    request = Request("POST", "/pause", "", {}, b"{}", "")
    me = shard_peers.ShardPeers(tmp_path, 0, 2)
    try:
        await me.broadcast(request, 5.0)  # nobody is there: it will read what was written
        app = web.Application()
        app.router.add_post("/pause", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.UnixSite(runner, str(shard_peers.shard_socket_path(tmp_path, 1))).start()
        try:
            telling = asyncio.create_task(me.broadcast(request, SECONDS))
            await asyncio.wait({telling}, timeout=0.1)
            assert not telling.done()
            go.set()
            await telling
            status = 503
            with pytest.raises(BaseExceptionGroup) as raised:
                await me.broadcast(request, SECONDS)
            assert "shard 1: the engine is gone" in str(unwrap_group(raised.value))
            go.clear()
            with pytest.raises(BaseExceptionGroup) as raised:
                await me.broadcast(request, 0.05)
            assert "shard 1 did not respond within 0.05 seconds" in str(unwrap_group(raised.value))
        finally:
            go.set()
            await runner.cleanup()
    finally:
        await me.close()
