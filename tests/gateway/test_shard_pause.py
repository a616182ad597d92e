"""A pause over HTTP: in every shard, over their deaths, undone where it fails, over at its deadline."""

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
    SECONDS,
    client,
    config,
    door,
    eventually,
    gateway,
    kill,
    owned_by,
    reborn,
    said,
)
from tests.servers import Answer, ModelServer


async def tell(served: Gateway, shard: int, path: str, body: Any = None) -> tuple[int, Any]:
    """One shard's answer, and what it says about itself alone."""
    connector = aiohttp.UnixConnector(str(door(served, shard)))
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=SECONDS)) as http:
        method = "GET" if path == "/state" else "POST"
        async with http.request(method, f"http://one{path}", json=body, headers=ADMIN) as answer:
            return answer.status, await answer.json()


async def states(served: Gateway) -> list[tuple[bool, int, int]]:
    """Of each shard: whether it is paused, its version, and how many calls wait there."""
    told = [(await tell(served, shard, "/state"))[1] for shard in range(served.config.shards)]
    return [(one["paused"], one["version"], one["calls_waiting"]) for one in told]


async def versions(served: Gateway, session: str) -> list[int]:
    return [turn.get("version", 0) for turn in (await served.trajectory(session))["turns"]]


async def test_a_pause_at_one_shard_holds_the_calls_of_all_and_a_resume_names_their_version() -> None:
    async with ModelServer() as server, gateway(server.url, shards=3) as served:
        names = [owned_by(shard, 3) for shard in range(3)]
        seats = [await served.register({"id": name}) for name in names]
        for number, entry in enumerate((1, 2), start=1):
            for _ in range(2):  # twice is once
                status, state = await tell(served, entry, "/pause", {"mode": "drain"})
                assert (status, state["paused"], state["mode"]) == (200, True, "drain")
            assert [paused for paused, *_ in await states(served)] == [True] * 3
            asked = len(server.requests)
            apis = [client(seat, retries=0) for seat in seats]
            calls = [asyncio.create_task(said(api, HI, stream=True)) for api in apis]

            async def all_wait() -> bool:
                return [waiting for *_, waiting in await states(served)] == [1, 1, 1]

            await eventually(all_wait)
            assert len(server.requests) == asked
            for _ in range(2):
                assert (await tell(served, 0, "/resume", {"version": number}))[0] == 200
            assert await asyncio.gather(*calls) == ["ok"] * 3
            assert await states(served) == [(False, number, 0)] * 3
            for api in apis:
                await api.close()
        for name in names:
            assert await versions(served, name) == [1, 2]


async def test_a_resume_without_a_pause_names_the_version_and_without_a_version_keeps_it() -> None:
    async with ModelServer() as server, gateway(server.url, shards=2) as served:
        for wish, version in (({"version": 5}, 5), ({}, 5), (None, 5), ({"version": 0}, 0)):
            assert (await tell(served, 1, "/resume", wish))[0] == 200
            assert await states(served) == [(False, version, 0)] * 2


WRONG: tuple[tuple[str, Any, str], ...] = (
    ("/pause", {"mode": "stop"}, "unknown pause mode 'stop'"),
    ("/pause", {"mode": 3}, "mode"),
    ("/pause", {"timeout": 0}, "must be above 0"),
    ("/pause", {"timeout": 1e9}, "must be above 0"),
    ("/pause", {"deadline": -1}, "must be above 0"),
    ("/pause", {"deadline": "soon"}, "deadline"),
    ("/pause", {"mood": "keep"}, "mood"),
    ("/pause", [], "array"),
    ("/resume", {"version": "new"}, "version"),
    ("/resume", {"version": 1.5}, "version"),
    ("/resume", {"versions": 1}, "versions"),
)


async def test_what_cannot_be_is_refused_in_words_and_changes_nothing() -> None:
    async with ModelServer() as server, gateway(server.url, shards=2) as served:
        for path, body, words in WRONG:
            status, told = await tell(served, 0, path, body)
            assert status == 400, body
            assert words in told["error"]["message"]
            assert await states(served) == [(False, 0, 0)] * 2


async def test_a_shard_that_is_born_during_a_pause_is_paused_and_records_with_the_version_of_the_resume() -> None:
    async with ModelServer() as server, gateway(server.url, shards=2) as served:
        name = owned_by(0, 2)
        seat = await served.register({"id": name})
        await served.request("POST", "/resume", {"version": 3})
        await served.request("POST", "/pause", {"mode": "abort"})
        pid = kill(served, 0)
        await reborn(served, pid, 0, name)
        assert await states(served) == [(True, 3, 0)] * 2
        async with client(seat, retries=0) as api:
            call = asyncio.create_task(said(api, HI, stream=False))

            async def waits() -> bool:
                return (await states(served))[0] == (True, 3, 1)

            await eventually(waits)
            assert not server.requests
            await tell(served, 1, "/resume", {"version": 4})
            assert await call == "ok"
        pid = kill(served, 0)
        await reborn(served, pid, 0, name)
        async with client(seat, retries=0) as api:
            assert await said(api, HI, stream=True) == "ok"
        assert await versions(served, name) == [4, 4]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_aborted_answer_goes_on_with_the_new_version_on_its_span(stream: bool) -> None:
    more: Any = {"kind": "vllm", "record": "tokens", "rendering": {"name": "embedded"}, "shards": 2}
    async with standin("vllm") as server, gateway(server.url, **more) as served:
        name = owned_by(0, 2)
        seat = await served.register({"id": name})
        async with client(seat, retries=0, through=door(served, 0)) as api:
            with server.freezing(9):
                call = asyncio.create_task(said(api, HI, stream=stream, max_tokens=30, temperature=0))
                await server.frozen(9)
            assert (await tell(served, 1, "/pause", {"mode": "abort", "timeout": 30}))[0] == 200
            kill(served, 1)  # a death elsewhere changes nothing
            await tell(served, 0, "/resume", {"version": 7})
            text = await call
        record = await served.trajectory(name)
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


async def test_a_pause_waits_for_calls_of_every_shard() -> None:
    go = asyncio.Event()
    async with ModelServer(Answer(hold=go)) as server, gateway(server.url, shards=2) as served:
        name = owned_by(1, 2)
        async with client(await served.register({"id": name}), retries=0) as api:
            call = asyncio.create_task(said(api, HI, stream=False))
            await server.wait_for_requests(1)
            pausing = asyncio.create_task(tell(served, 0, "/pause", {"mode": "drain", "timeout": 60}))

            async def settling() -> bool:
                return [paused for paused, *_ in await states(served)] == [True, True]

            await eventually(settling)
            await asyncio.wait({pausing}, timeout=0.2)
            assert not pausing.done()
            go.set()
            assert await call == "ok"
            assert (await pausing)[0] == 200
        assert [paused for paused, *_ in await states(served)] == [True, True]
        await served.request("POST", "/resume")


async def test_a_pause_whose_asker_goes_away_is_undone_in_every_shard() -> None:
    go = asyncio.Event()
    async with ModelServer(Answer(hold=go)) as server, gateway(server.url, shards=2) as served:
        name = owned_by(1, 2)
        async with client(await served.register({"id": name}), retries=0) as api:
            call = asyncio.create_task(said(api, HI, stream=False))
            await server.wait_for_requests(1)
            pausing = asyncio.create_task(tell(served, 0, "/pause", {"mode": "drain", "timeout": 60}))

            async def so(paused: bool) -> bool:
                return [one for one, *_ in await states(served)] == [paused, paused]

            await eventually(lambda: so(True))
            pausing.cancel()
            await eventually(lambda: so(False))
            go.set()
            assert await call == "ok"


async def test_a_pause_that_the_engine_refuses_is_an_error_and_undone_in_every_shard() -> None:
    async with standin("vllm") as server, gateway(server.url, kind="vllm", shards=2) as served:
        seat = await served.register({"id": "a", "budgets": {"deadline": 3600}})
        await server.fault(path="/pause", status=500, count=20)
        status, error = await tell(served, 0, "/pause", {"mode": "keep", "timeout": 2})
        assert (status, error["error"]["code"]) == (503, "upstream_unavailable")
        assert await states(served) == [(False, 0, 0)] * 2
        async with client(seat, retries=0) as api:
            await said(api, HI, stream=False, max_tokens=3)


@pytest.mark.long
async def test_a_pause_that_nobody_ends_is_over_at_its_deadline_and_an_error_for_who_waited() -> None:
    async with ModelServer() as server, gateway(server.url, shards=2) as served:
        seats = [await served.register({"id": owned_by(shard, 2)}) for shard in range(2)]
        apis = [client(seat, retries=0) for seat in seats]
        await tell(served, 0, "/pause", {"mode": "drain", "deadline": 4})
        calls = [asyncio.create_task(said(api, HI, stream=False)) for api in apis]
        for call in calls:
            with pytest.raises(openai.InternalServerError) as raised:
                await call
            assert raised.value.status_code == 503
            assert raised.value.code == "upstream_unavailable"
            assert "was paused for" in raised.value.message
            assert "not resumed" in raised.value.message
        assert await states(served) == [(False, 0, 0)] * 2
        for api in apis:
            assert await said(api, HI, stream=False) == "ok"
            await api.close()
        assert len(server.requests) == 2


@pytest.mark.long
async def test_a_pause_is_over_at_its_deadline_in_a_shard_that_was_born_during_it_whether_anybody_waits_or_not(
    tmp_path: Path,
) -> None:
    now = time.time()
    write_pause_record(tmp_path / "state.json", PauseRecord(version=4, mode="drain", until=now + 3, since=now))
    async with ModelServer() as server, gateway(server.url, tmp_path, shards=2) as served:

        async def over() -> bool:
            return await states(served) == [(False, 4, 0)] * 2

        await eventually(over)
        assert time.time() >= now + 3


@pytest.mark.long
async def test_a_sessions_deadline_does_not_run_during_a_pause_and_does_after_it() -> None:
    """With a deadline that any pause here is longer than."""
    async with ModelServer() as server, gateway(server.url) as served:
        await served.request("POST", "/pause", {"deadline": 60})
        seat = await served.register({"id": "a", "budgets": {"deadline": 1.0}})
        async with client(seat, retries=0) as api:
            call = asyncio.create_task(said(api, HI, stream=False))
            waited = time.monotonic()
            await eventually(lambda: time.monotonic() - waited > 1.5)
            assert not call.done()
            pid = kill(served, 0)  # the time that it stood still is known to the next shard
            with pytest.raises(openai.APIConnectionError):
                await call
            await reborn(served, pid, 0, "a")
            await served.request("POST", "/resume", {"version": 1})
            assert await said(api, HI, stream=False) == "ok"
            pid = kill(served, 0)
            await reborn(served, pid, 0, "a")
            assert await versions(served, "a") == [1]
        # A pause that ran out by itself is over for the sessions' clocks too.
        seat = await served.register({"id": "b", "budgets": {"deadline": 0.3}})
        await served.request("POST", "/pause", {"deadline": 0.2})

        async def truncated() -> bool:
            async with client(seat, retries=0) as api:
                try:
                    await said(api, HI, stream=False)
                except openai.BadRequestError as error:
                    return error.code == "rollout_truncated"
                except openai.InternalServerError:
                    return False
                return False

        await eventually(truncated)


def test_what_is_kept_is_read_back_whole(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    assert load_pause_state(path).mode is None
    assert read_pause_record(path) == PauseRecord()
    now = time.time()
    write_pause_record(path, PauseRecord(version=2, mode="keep", until=now + 100, since=now - 10, stood=5.0))
    state = load_pause_state(path)
    assert (state.mode, state.version) == ("keep", 2)
    assert 0 < state.left <= 100
    found = read_pause_record(path)
    assert found.paused_seconds(now) == pytest.approx(15.0)
    assert found.paused_seconds(now + 1000) == pytest.approx(115.0)  # it was over at its deadline
    write_pause_record(path, PauseRecord(version=2, mode="keep", until=now - 1, since=now - 10))
    assert (load_pause_state(path).mode, load_pause_state(path).version) == (None, 2)
    assert [one.name for one in tmp_path.iterdir()] == ["state.json"]
    path.write_bytes(b"")
    with pytest.raises(UsageError, match="pause file"):
        load_pause_state(path)


async def test_a_state_that_cannot_be_read_is_said_before_anything_is_served(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(RookeryError, match=r"pause file .*state\.json"):
        async with gateway("http://127.0.0.1:1", tmp_path):
            pytest.fail("it was served")


async def test_a_shard_does_what_was_asked_between_its_making_and_its_first_being_reached(tmp_path: Path) -> None:
    """Whoever pauses then finds nobody at its socket, and counts on what was written down."""

    def made(folder: str) -> Shard:
        (tmp_path / folder).mkdir(exist_ok=True)
        settings = ShardSettings(
            config=config("http://127.0.0.1:1"),
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
        shard = made(str(after.version))
        write_pause_record(path, msgspec.structs.replace(after, mode="drain") if after.mode else after)
        await shard.start()
        try:
            state = shard.pause.state()
            assert (state["paused"], state["version"]) == (after.mode is not None, after.version)
        finally:
            await shard.close()
