"""Shards that are killed, whole gateways that are: what was told stays told, and nothing is left behind."""

import asyncio
import contextlib
import itertools
import os
import re
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from rookery.core import RookeryError, UsageError
from rookery.gateway.shards import Gateway
from rookery.sandbox_runtime import processes
from rookery.upstreams.listeners import bound
from tests.engine_standins import StandinServer, standin
from tests.gateway.shard_kit import (
    HI,
    KEY,
    alive,
    chat,
    client,
    config,
    door,
    eventually,
    gateway,
    http,
    kill,
    owned_by,
    patient,
    reborn,
    said,
)
from tests.servers import Answer, ModelServer

LONG: Any = {"max_tokens": 40, "temperature": 0}
"""Long enough to be killed in the middle of."""


def checked(record: dict[str, Any], seen: list[str]) -> None:
    """What is recorded is what the clients saw, once, and whole to the last token."""
    turns = record["turns"]
    assert [turn["response"]["content"] for turn in turns] == seen
    assert [turn["index"] for turn in turns] == list(range(len(turns)))
    for turn in turns:
        assert len(turn["sampled"]) == len(turn["logprobs"]) == turn["sampled_tokens"] > 0
    trained = [
        token for part in record["segments"] for token, on in zip(part["tokens"], part["mask"], strict=True) if on
    ]
    assert sorted(trained) == sorted(token for turn in turns for token in turn["sampled"])


async def turn_with(api: openai.AsyncOpenAI, history: list[Any], text: str, *, stream: bool) -> str:
    """One more turn of a conversation."""
    history.append({"role": "user", "content": text})
    answer = await said(api, history, stream=stream, **LONG)
    history.append({"role": "assistant", "content": answer})
    return answer


async def chats(server: StandinServer, calls: int) -> None:
    """Waits until the engine was asked so many times."""

    async def so() -> bool:
        return sum("chat" in request["path"] for request in await server.requests()) == calls

    await eventually(so)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_killed_shard_is_restarted_and_its_sessions_go_on_from_the_disk(stream: bool) -> None:
    async with (
        standin("vllm") as server,
        gateway(server.url, shards=2, kind="vllm", record="messages") as served,
    ):
        names = [owned_by(shard, 2) for shard in range(2)]
        seats = [await served.register({"id": name}) for name in names]
        async with client(seats[0]) as mine, client(seats[1], retries=0, through=door(served, 1)) as other:
            history: list[Any] = []
            theirs: list[Any] = []
            seen = [await turn_with(mine, history, "one", stream=stream)]
            seen_there = [await turn_with(other, theirs, "one", stream=stream)]
            # Nothing has come back yet: the library tries again by itself, in both shapes.
            await server.fault(after_bytes=0, then="stall")
            before = asyncio.create_task(turn_with(mine, history, "two", stream=stream))
            await chats(server, 3)
            with server.freezing(5):
                beside = asyncio.create_task(turn_with(other, theirs, "two", stream=stream))
                await server.frozen(5)
                pid = kill(served, 0)
                await reborn(served, pid, 0, names[0])
                assert (await served.trajectory(names[0]))["turns_recorded"] == 1
                await chats(server, 5)
            await server.post("/resume")
            seen += [await before]
            seen_there += [await beside]
            seen += [await turn_with(mine, history, "three", stream=stream)]
        checked(await served.trajectory(names[0]), seen)
        checked(await served.trajectory(names[1]), seen_there)
        assert served.restarts == 1


async def test_a_stream_that_was_cut_is_no_turn_and_its_repetition_is_one() -> None:
    async with (
        standin("vllm") as server,
        gateway(server.url, shards=2, kind="vllm", record="messages") as served,
    ):
        name = owned_by(0, 2)
        seat = await served.register({"id": name})
        async with client(seat) as api:
            with server.freezing(12):
                stream = await api.chat.completions.create(model="policy", messages=HI, stream=True, **LONG)
                pieces = aiter(stream)
                await anext(pieces)
                await server.frozen(12)
                pid = kill(served, 0)
                with pytest.raises((openai.APIConnectionError, httpx.HTTPError)):
                    async for _ in pieces:
                        pass
                await reborn(served, pid, 0, name)
            assert (await served.trajectory(name))["turns"] == []
            await server.until(0)
            await server.post("/resume")
            again = await said(api, HI, stream=True, **LONG)
        checked(await served.trajectory(name), [again])


async def unread(seat: dict[str, str], body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Asks, and takes nothing of the answer beyond what a small buffer holds."""
    host, _, path = seat["base_url"].removeprefix("http://").partition("/")
    address, _, port = host.partition(":")
    reader, writer = await asyncio.open_connection(address, int(port), limit=1)
    head = f"POST /{path}/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {seat['secret']}\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_turn_that_was_recorded_but_not_told_is_told_to_its_retry_and_not_made_again(stream: bool) -> None:
    text = "x" * (24 << 20)  # more than the kernel takes from the shard before anybody reads
    async with ModelServer(Answer(text)) as server, gateway(server.url) as served:
        seat = await served.register({"id": "a"})
        reader, writer = await unread(seat, b'{"model":"m","messages":[{"role":"user","content":"hi"}]}')

        async def recorded() -> bool:
            return bool((await served.request("GET", "/rollouts/a"))["turns_recorded"])

        await eventually(recorded)
        pid = kill(served, 0)
        received = 0
        with contextlib.suppress(ConnectionError):  # or an end before the length that was announced
            while data := await reader.read(1 << 20):
                received += len(data)
        assert received < len(text)
        writer.close()
        await reborn(served, pid, 0, "a")
        async with client(seat) as api:
            again = await said(api, HI, stream=stream, extra_headers={"x-stainless-retry-count": "1"})
        assert again == text
        record = await served.trajectory("a")
        assert [turn["response"]["content"] for turn in record["turns"]] == [text]
        assert len(server.requests) == 1


@pytest.mark.long
async def test_shards_that_are_killed_again_and_again_lose_nothing_and_double_nothing() -> None:
    async with (
        standin("vllm") as server,
        gateway(server.url, shards=2, kind="vllm", record="messages") as served,
    ):
        names = [f"many{n}" for n in range(8)]
        seats = [await served.register({"id": name}) for name in names]
        over = asyncio.Event()
        seen: dict[str, list[str]] = {name: [] for name in names}
        kills = 0

        async def converse(number: int) -> None:
            history: list[Any] = []
            asking = itertools.count()  # a retry of an equal request would be told the first one's answer
            async with client(seats[number], retries=30) as api:
                while not over.is_set() or len(seen[names[number]]) < 3:
                    try:
                        answer = await turn_with(api, history, f"go on {next(asking)}", stream=number % 2 == 0)
                    except (openai.APIConnectionError, httpx.HTTPError):  # cut in the middle of a stream
                        history.pop()
                        continue
                    if len(history) > 6:
                        del history[:]
                    seen[names[number]].append(answer)

        async with asyncio.TaskGroup() as group:
            for number in range(len(seats)):
                group.create_task(converse(number))
            for at in range(4):
                shard, turns = at % 2, sum(map(len, seen.values()))
                await eventually(lambda turns=turns: sum(map(len, seen.values())) > turns)  # type: ignore[misc]
                pid = kill(served, shard)
                kills += 1
                await reborn(served, pid, shard, next(n for n in names if owned(n) == shard))
            over.set()
        assert served.restarts == kills
        for name in names:
            record = await served.trajectory(name)
            told = [turn["response"]["content"] for turn in record["turns"]]
            # A turn whose end was lost on the way to its client is recorded; what a client saw is there in order.
            left = iter(told)
            assert all(text in left for text in seen[name])
            assert len(told) - len(seen[name]) <= kills
            for turn in record["turns"]:
                assert len(turn["sampled"]) == len(turn["logprobs"]) == turn["sampled_tokens"] > 0


def owned(session: str) -> int:
    from rookery.gateway.registry import owning_shard

    return owning_shard(session, 2)


# ------------------------------------------------------------------------------------------------ whole gateways


async def test_a_session_survives_a_restart_of_the_whole_gateway_with_any_number_of_shards(tmp_path: Path) -> None:
    names = [f"kept{n}" for n in range(6)]
    async with ModelServer() as server:
        server.default = lambda request: Answer(f"to {request.body['messages'][-1]['content']}")
        seats: dict[str, dict[str, str]] = {}
        for life, shards in enumerate((3, 1, 2, 3)):
            async with gateway(server.url, tmp_path / "kept", shards=shards) as served:
                if not seats:
                    seats = {name: await served.register({"id": name}) for name in names}
                    cancelled = await served.register({"id": "cancelled"})
                    deleted = await served.register({"id": "deleted"})
                    await served.request("POST", "/rollouts/cancelled/cancel")
                    await served.request("DELETE", "/rollouts/deleted")
                async with http() as session:
                    for name in names:
                        _, headers = chat(seats[name])
                        body = {"messages": [{"role": "user", "content": f"{name} {life}"}]}
                        url = f"{served.url}/v1/rollouts/{name}/chat/completions"
                        async with session.post(url, json=body, headers=headers) as answer:
                            assert answer.status == 200
                    for past in (cancelled, deleted):
                        url = f"{served.url}/v1/rollouts/{past['id']}/chat/completions"
                        async with session.post(url, json={"messages": HI}, headers=chat(past)[1]) as answer:
                            assert answer.status == 410
                for name in names:
                    turns = (await served.trajectory(name))["turns"]
                    assert [turn["response"]["content"] for turn in turns] == [
                        f"to {name} {n}" for n in range(life + 1)
                    ]
                    assert [turn["index"] for turn in turns] == list(range(life + 1))
                with pytest.raises(RookeryError, match="409"):
                    await served.register({"id": names[0]})


@pytest.fixture
def shallow() -> Iterator[Path]:
    """A temporary folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


async def test_without_a_folder_nothing_is_left_behind(shallow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(shallow))
    before = len(os.listdir("/proc/self/fd"))
    async with ModelServer() as server:
        async with gateway(server.url, shards=2) as served:
            pids = served.pids()
            async with client(await served.register({"id": "a"})) as api:
                await said(api, HI, stream=False)
            await served.attach_listener("a", bound("127.0.0.1", 0))
            assert list(shallow.iterdir())
            assert all(map(alive, pids))
        await served.close()  # twice is fine
        assert list(shallow.iterdir()) == []
        assert not any(map(alive, pids))
    assert len(os.listdir("/proc/self/fd")) <= before + 3


@pytest.mark.long
async def test_calls_under_way_do_not_keep_a_gateway_from_closing() -> None:
    never = asyncio.Event()
    async with ModelServer(Answer(hold=never)) as server, gateway(server.url) as served:
        async with client(await served.register({"id": "a"}), retries=0) as api:
            call = asyncio.create_task(said(api, HI, stream=True))
            await server.wait_for_requests(1)
            pids = served.pids()
            await served.close()
            with pytest.raises(openai.APIError):
                await call
        await server.wait_for_disconnects(1)
        assert not any(map(alive, pids))


async def test_a_shard_that_cannot_start_is_an_error_in_words_and_leaves_nothing(
    tmp_path: Path, shallow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(shallow))
    wrong = config("http://127.0.0.1:1", shards=2, record="tokens", rendering={"name": "qwen3"})
    with pytest.raises(RookeryError, match="no tokenizer"):
        async with Gateway(wrong, key=KEY):
            pytest.fail("it was served")
    assert list(shallow.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=re.escape(str(tmp_path / "file"))):
        async with Gateway(config("http://127.0.0.1:1"), tmp_path / "file" / "below", key=KEY):
            pytest.fail("it was served")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


async def test_a_shard_that_is_asked_to_end_by_itself_is_started_again() -> None:
    async with ModelServer() as server, gateway(server.url) as served:
        seat = await served.register({"id": "a"})
        pid = served.pids()[0]
        os.kill(pid, signal.SIGTERM)
        await reborn(served, pid, 0, "a")
        async with client(seat) as api:
            assert await said(api, HI, stream=False) == "ok"


@pytest.mark.parametrize("kept", [False, True], ids=["nothing kept", "kept"])
async def test_shards_end_with_a_killed_gateway_and_the_last_one_clears_up(
    kept: bool, tmp_path: Path, shallow: Path
) -> None:
    from tests.cli.helpers import start_command

    folder = tmp_path / "kept"
    temp = shallow
    more = ("--folder", folder) if kept else ()
    options = ("--port", "0", "--shards", "3", *more)
    async with (
        ModelServer() as server,
        start_command("gateway", "--upstream", server.url, *options, cwd=tmp_path, TMPDIR=str(temp)) as process,
    ):
        assert process.stdout is not None
        async with asyncio.timeout(60):
            assert (await process.stdout.readline()).startswith(b"serving at ")
        shards = processes.list_children(process.pid)
        assert len(shards) == 3
        assert len(list(temp.iterdir())) == 1
        os.kill(shards[0], signal.SIGKILL)  # one of them is not there to clear up
        process.kill()
        await process.wait()
        await eventually(lambda: not any(map(alive, shards)))
        assert list(temp.iterdir()) == []
        assert folder.exists() == kept
        assert not kept or (folder / "sessions").is_dir()


async def test_clients_of_the_only_shard_wait_for_its_next_life() -> None:
    async with ModelServer() as server, gateway(server.url) as served:
        seat = await served.register({"id": "a"})
        kill(served, 0)
        url, headers = chat(seat)
        async with http() as session, session.post(url, json={"messages": HI}, headers=headers) as answer:
            assert answer.status == 200  # the door is open: the kernel keeps who knocks
        assert (await patient(lambda: served.trajectory("a")))["turns_recorded"] == 1
