"""A pause over HTTP applies to every shard, survives restarts, is undone on failure and ends at its deadline."""

import asyncio
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import pytest

from rookery.core import RookeryError, UsageError
from rookery.gateway.config import ShardSettings
from rookery.gateway.shard import Shard
from rookery.gateway.shards import Gateway
from rookery.upstreams.pause.shards import PauseRecord, load_pause_state, read_pause_record, write_pause_record
from tests.engine_standins import standin
from tests.gateway.shard_kit import (
    ADMIN,
    HI,
    TIMEOUT,
    chat_text,
    gateway_config,
    kill_shard,
    openai_client,
    run_gateway,
    session_id_for,
    shard_socket,
    wait_for_restart,
)
from tests.servers import Answer, ModelServer
from tests.waiting import wait_until


async def request_shard(gateway: Gateway, shard: int, path: str, body: Any = None) -> tuple[int, Any]:
    """Send a request to one shard; return status and body."""
    connector = aiohttp.UnixConnector(str(shard_socket(gateway, shard)))
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=TIMEOUT)) as http:
        method = "GET" if path == "/state" else "POST"
        async with http.request(method, f"http://one{path}", json=body, headers=ADMIN) as response:
            return response.status, await response.json()


async def states(gateway: Gateway) -> list[tuple[bool, int, int]]:
    """Return for each shard whether it is paused, its version, and its number of waiting calls."""
    response_body = [(await request_shard(gateway, shard, "/state"))[1] for shard in range(gateway.config.shards)]
    return [(one["paused"], one["version"], one["calls_waiting"]) for one in response_body]


async def versions(gateway: Gateway, session: str) -> list[int]:
    return [turn.get("version", 0) for turn in (await gateway.trajectory(session))["turns"]]


async def test_pause_at_one_shard_holds_calls_of_all_and_resume_sets_their_version() -> None:
    async with ModelServer() as server, run_gateway(server.url, shards=3) as gateway:
        names = [session_id_for(shard, 3) for shard in range(3)]
        registrations = [await gateway.register({"id": name}) for name in names]
        for number, entry in enumerate((1, 2), start=1):
            for _ in range(2):  # pausing is idempotent
                status, state = await request_shard(gateway, entry, "/pause", {"mode": "drain"})
                assert (status, state["paused"], state["mode"]) == (200, True, "drain")
            assert [paused for paused, *_ in await states(gateway)] == [True] * 3
            requests_before = len(server.requests)
            apis = [openai_client(registration, retries=0) for registration in registrations]
            calls = [asyncio.create_task(chat_text(api, HI, stream=True)) for api in apis]

            async def all_wait() -> bool:
                return [waiting for *_, waiting in await states(gateway)] == [1, 1, 1]

            await wait_until(all_wait)
            assert len(server.requests) == requests_before
            for _ in range(2):
                assert (await request_shard(gateway, 0, "/resume", {"version": number}))[0] == 200
            assert await asyncio.gather(*calls) == ["ok"] * 3
            assert await states(gateway) == [(False, number, 0)] * 3
            for api in apis:
                await api.close()
        for name in names:
            assert await versions(gateway, name) == [1, 2]


async def test_resume_without_a_pause_sets_the_version_or_keeps_it() -> None:
    async with ModelServer() as server, run_gateway(server.url, shards=2) as gateway:
        for body, version in (({"version": 5}, 5), ({}, 5), (None, 5), ({"version": 0}, 0)):
            assert (await request_shard(gateway, 1, "/resume", body))[0] == 200
            assert await states(gateway) == [(False, version, 0)] * 2


INVALID: tuple[tuple[str, Any, str], ...] = (
    ("/pause", {"mode": "stop"}, "stop"),
    ("/pause", {"mode": 3}, "mode"),
    ("/pause", {"timeout": 0}, "timeout"),
    ("/pause", {"timeout": 1e9}, "timeout"),
    ("/pause", {"deadline": -1}, "deadline"),
    ("/pause", {"deadline": "soon"}, "deadline"),
    ("/pause", {"mood": "keep"}, "mood"),
    ("/pause", [], "array"),
    ("/resume", {"version": "new"}, "version"),
    ("/resume", {"version": 1.5}, "version"),
    ("/resume", {"versions": 1}, "versions"),
)


async def test_invalid_pause_or_resume_is_rejected_and_changes_nothing() -> None:
    async with ModelServer() as server, run_gateway(server.url, shards=2) as gateway:
        for path, body, mentioned in INVALID:
            status, response_body = await request_shard(gateway, 0, path, body)
            assert status == 400, body
            assert mentioned in response_body["error"]["message"]
            assert await states(gateway) == [(False, 0, 0)] * 2


@pytest.mark.long
async def test_shard_started_during_a_pause_is_paused_and_records_the_resumed_version() -> None:
    async with ModelServer() as server, run_gateway(server.url, shards=2) as gateway:
        name = session_id_for(0, 2)
        registration = await gateway.register({"id": name})
        await gateway.request("POST", "/resume", {"version": 3})
        await gateway.request("POST", "/pause", {"mode": "abort"})
        pid = kill_shard(gateway, 0)
        await wait_for_restart(gateway, pid, 0, name)
        assert await states(gateway) == [(True, 3, 0)] * 2
        async with openai_client(registration, retries=0) as api:
            call = asyncio.create_task(chat_text(api, HI, stream=False))

            async def waits() -> bool:
                return (await states(gateway))[0] == (True, 3, 1)

            await wait_until(waits)
            assert not server.requests
            await request_shard(gateway, 1, "/resume", {"version": 4})
            assert await call == "ok"
        pid = kill_shard(gateway, 0)
        await wait_for_restart(gateway, pid, 0, name)
        async with openai_client(registration, retries=0) as api:
            assert await chat_text(api, HI, stream=True) == "ok"
        assert await versions(gateway, name) == [4, 4]


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_reply_aborted_by_a_pause_continues_in_a_span_of_the_new_version(stream: bool) -> None:
    more: Any = {"kind": "vllm", "record": "tokens", "rendering": {"name": "embedded"}, "shards": 2}
    async with standin("vllm") as server, run_gateway(server.url, **more) as gateway:
        name = session_id_for(0, 2)
        registration = await gateway.register({"id": name})
        async with openai_client(registration, retries=0, through=shard_socket(gateway, 0)) as api:
            with server.freezing(9):
                call = asyncio.create_task(chat_text(api, HI, stream=stream, max_tokens=30, temperature=0))
                await server.frozen(9)
            assert (await request_shard(gateway, 1, "/pause", {"mode": "abort", "timeout": 30}))[0] == 200
            kill_shard(gateway, 1)  # the death of another shard changes nothing
            await request_shard(gateway, 0, "/resume", {"version": 7})
            text = await call
        record = await gateway.trajectory(name)
        (turn,) = record["turns"]
        assert turn["response"]["content"] == text
        sampled = len(turn["sampled"])
        assert sampled == len(turn["logprobs"]) > 9
        spans = [tuple(span) for span in turn["spans"]]
        assert [version for *_, version in spans] == [0, 7]
        assert spans[0][0] == 0
        assert spans[0][1] == spans[1][0] == 9
        assert spans[1][1] == sampled
        (segment,) = record["segments"]
        assert [version for *_, version in segment["versions"]] == [0, 7]


async def test_pause_waits_for_calls_of_every_shard() -> None:
    go = asyncio.Event()
    async with ModelServer(Answer(hold=go)) as server, run_gateway(server.url, shards=2) as gateway:
        name = session_id_for(1, 2)
        async with openai_client(await gateway.register({"id": name}), retries=0) as api:
            call = asyncio.create_task(chat_text(api, HI, stream=False))
            await server.wait_for_requests(1)
            pausing = asyncio.create_task(request_shard(gateway, 0, "/pause", {"mode": "drain", "timeout": 60}))

            async def all_paused() -> bool:
                return [paused for paused, *_ in await states(gateway)] == [True, True]

            await wait_until(all_paused)
            await asyncio.wait({pausing}, timeout=0.2)
            assert not pausing.done()
            go.set()
            assert await call == "ok"
            assert (await pausing)[0] == 200
        assert [paused for paused, *_ in await states(gateway)] == [True, True]
        await gateway.request("POST", "/resume")


async def test_pause_is_undone_in_every_shard_if_its_client_disconnects() -> None:
    go = asyncio.Event()
    async with ModelServer(Answer(hold=go)) as server, run_gateway(server.url, shards=2) as gateway:
        name = session_id_for(1, 2)
        async with openai_client(await gateway.register({"id": name}), retries=0) as api:
            call = asyncio.create_task(chat_text(api, HI, stream=False))
            await server.wait_for_requests(1)
            pausing = asyncio.create_task(request_shard(gateway, 0, "/pause", {"mode": "drain", "timeout": 60}))

            async def all_paused(paused: bool) -> bool:
                return [one for one, *_ in await states(gateway)] == [paused, paused]

            await wait_until(lambda: all_paused(True))
            pausing.cancel()
            await wait_until(lambda: all_paused(False))
            go.set()
            assert await call == "ok"


async def test_pause_rejected_by_the_engine_is_undone_in_every_shard() -> None:
    async with standin("vllm") as server, run_gateway(server.url, kind="vllm", shards=2) as gateway:
        registration = await gateway.register({"id": "a", "budgets": {"deadline": 3600}})
        await server.fault(path="/pause", status=500, count=20)
        status, error = await request_shard(gateway, 0, "/pause", {"mode": "keep", "timeout": 2})
        assert (status, error["error"]["code"]) == (503, "upstream_unavailable")
        assert await states(gateway) == [(False, 0, 0)] * 2
        async with openai_client(registration, retries=0) as api:
            await chat_text(api, HI, stream=False, max_tokens=3)


@pytest.mark.long
async def test_pause_ends_at_its_deadline_and_fails_waiting_calls() -> None:
    async with ModelServer() as server, run_gateway(server.url, shards=2) as gateway:
        registrations = [await gateway.register({"id": session_id_for(shard, 2)}) for shard in range(2)]
        apis = [openai_client(registration, retries=0) for registration in registrations]
        await request_shard(gateway, 0, "/pause", {"mode": "drain", "deadline": 4})
        calls = [asyncio.create_task(chat_text(api, HI, stream=False)) for api in apis]
        for call in calls:
            with pytest.raises(openai.InternalServerError) as raised:
                await call
            assert raised.value.status_code == 503
            assert raised.value.code == "upstream_unavailable"
        assert await states(gateway) == [(False, 0, 0)] * 2
        for api in apis:
            assert await chat_text(api, HI, stream=False) == "ok"
            await api.close()
        assert len(server.requests) == 2


@pytest.mark.long
async def test_pause_ends_at_its_deadline_in_a_shard_started_during_it(
    tmp_path: Path,
) -> None:
    now = time.time()
    write_pause_record(tmp_path / "state.json", PauseRecord(version=4, mode="drain", until=now + 3, since=now))
    async with ModelServer() as server, run_gateway(server.url, tmp_path, shards=2) as gateway:

        async def over() -> bool:
            return await states(gateway) == [(False, 4, 0)] * 2

        await wait_until(over)
        assert time.time() >= now + 3


@pytest.mark.long
async def test_session_deadline_excludes_pauses() -> None:
    """Use a deadline that is shorter than every pause here."""
    async with ModelServer() as server, run_gateway(server.url) as gateway:
        await gateway.request("POST", "/pause", {"deadline": 60})
        registration = await gateway.register({"id": "a", "budgets": {"deadline": 1.0}})
        async with openai_client(registration, retries=0) as api:
            call = asyncio.create_task(chat_text(api, HI, stream=False))
            waited = time.monotonic()
            await wait_until(lambda: time.monotonic() - waited > 1.5)
            assert not call.done()
            pid = kill_shard(gateway, 0)  # the restarted shard knows the paused time
            with pytest.raises(openai.APIConnectionError):
                await call
            await wait_for_restart(gateway, pid, 0, "a")
            await gateway.request("POST", "/resume", {"version": 1})
            assert await chat_text(api, HI, stream=False) == "ok"
            pid = kill_shard(gateway, 0)
            await wait_for_restart(gateway, pid, 0, "a")
            assert await versions(gateway, "a") == [1]
        # A pause that reached its deadline no longer stops the clocks of sessions.
        registration = await gateway.register({"id": "b", "budgets": {"deadline": 0.3}})
        await gateway.request("POST", "/pause", {"deadline": 0.2})

        async def truncated() -> bool:
            async with openai_client(registration, retries=0) as api:
                try:
                    await chat_text(api, HI, stream=False)
                except openai.BadRequestError as error:
                    return error.code == "rollout_truncated"
                except openai.InternalServerError:
                    return False
                return False

        await wait_until(truncated)


def test_pause_record_round_trips_through_its_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    assert load_pause_state(path).mode is None
    assert read_pause_record(path) == PauseRecord()
    now = time.time()
    write_pause_record(
        path, PauseRecord(version=2, mode="keep", until=now + 100, since=now - 10, earlier_seconds=5.0)
    )
    state = load_pause_state(path)
    assert (state.mode, state.version) == ("keep", 2)
    assert 0 < state.left <= 100
    record = read_pause_record(path)
    assert record.paused_seconds(now) == pytest.approx(15.0)
    assert record.paused_seconds(now + 1000) == pytest.approx(115.0)  # the pause ended at its deadline
    write_pause_record(path, PauseRecord(version=2, mode="keep", until=now - 1, since=now - 10))
    assert (load_pause_state(path).mode, load_pause_state(path).version) == (None, 2)
    assert [one.name for one in tmp_path.iterdir()] == ["state.json"]
    path.write_bytes(b"")
    with pytest.raises(UsageError, match=r"state\.json"):
        load_pause_state(path)


async def test_unreadable_pause_file_fails_the_start(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(RookeryError, match=r"state\.json"):
        async with run_gateway("http://127.0.0.1:1", tmp_path):
            pytest.fail("the gateway started")


async def test_shard_applies_a_pause_record_written_before_it_listens(tmp_path: Path) -> None:
    """A pause at that moment cannot reach the shard's socket and relies on the record."""

    def build_shard(folder: str) -> Shard:
        (tmp_path / folder).mkdir(exist_ok=True)
        settings = ShardSettings(
            config=gateway_config("http://127.0.0.1:1"),
            index=0,
            key="k",
            folder=str(tmp_path / folder),
            sockets=str(tmp_path / folder),
            listener=-1,
        )
        return Shard(settings)

    now = time.time()
    paused = PauseRecord(version=3, mode="keep", until=now + 600, since=now)
    for before, after in ((PauseRecord(), paused), (paused, PauseRecord(version=4))):
        path = tmp_path / str(after.version) / "state.json"
        path.parent.mkdir()
        write_pause_record(path, before)
        shard = build_shard(str(after.version))
        write_pause_record(path, msgspec.structs.replace(after, mode="drain") if after.mode else after)
        await shard.start()
        try:
            state = shard.pause.state()
            assert (state["paused"], state["version"]) == (after.mode is not None, after.version)
        finally:
            await shard.close()
