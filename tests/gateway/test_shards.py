"""Killed shards and gateways lose nothing that a client has seen and leave nothing behind."""

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
from rookery.gateway import shards
from rookery.gateway.shards import Gateway
from rookery.sandbox_runtime import processes
from rookery.sandboxes.reaper import lock_directory
from rookery.upstreams.listeners import bind_listener
from tests.engine_standins import StandinServer, standin
from tests.gateway.shard_kit import (
    HI,
    KEY,
    chat_endpoint,
    chat_text,
    gateway_config,
    http_client,
    is_alive,
    kill_shard,
    openai_client,
    retry_while_unavailable,
    run_gateway,
    session_id_for,
    shard_socket,
    wait_for_restart,
)
from tests.servers import Answer, ModelServer
from tests.waiting import wait_until

LONG: Any = {"max_tokens": 40, "temperature": 0}
"""Sampling for a reply that is long enough to be killed in the middle."""


def check_record(record: dict[str, Any], seen: list[str]) -> None:
    """Check that the record holds exactly what the clients saw, once and complete."""
    turns = record["turns"]
    assert [turn["response"]["content"] for turn in turns] == seen
    assert [turn["index"] for turn in turns] == list(range(len(turns)))
    for turn in turns:
        assert len(turn["sampled"]) == len(turn["logprobs"]) == turn["sampled_tokens"] > 0
    trained = [
        token for part in record["segments"] for token, on in zip(part["tokens"], part["mask"], strict=True) if on
    ]
    assert sorted(trained) == sorted(token for turn in turns for token in turn["sampled"])


async def add_turn(api: openai.AsyncOpenAI, history: list[Any], text: str, *, stream: bool) -> str:
    """Add one turn to a conversation and return its text."""
    history.append({"role": "user", "content": text})
    answer = await chat_text(api, history, stream=stream, **LONG)
    history.append({"role": "assistant", "content": answer})
    return answer


async def wait_for_chats(server: StandinServer, calls: int) -> None:
    """Wait until the engine has received `calls` chat requests."""

    async def reached() -> bool:
        return sum("chat" in request["path"] for request in await server.requests()) == calls

    await wait_until(reached)


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_killed_shard_is_restarted_and_its_sessions_continue_from_disk(stream: bool) -> None:
    async with (
        standin("vllm") as server,
        run_gateway(server.url, shards=2, kind="vllm", record="messages") as gateway,
    ):
        names = [session_id_for(shard, 2) for shard in range(2)]
        registrations = [await gateway.register({"id": name}) for name in names]
        async with (
            openai_client(registrations[0]) as first_api,
            openai_client(registrations[1], retries=0, through=shard_socket(gateway, 1)) as second_api,
        ):
            history: list[Any] = []
            second_history: list[Any] = []
            seen = [await add_turn(first_api, history, "one", stream=stream)]
            seen_there = [await add_turn(second_api, second_history, "one", stream=stream)]
            # No byte has been sent yet: the library retries both whole and streamed calls.
            await server.fault(after_bytes=0, then="stall")
            before = asyncio.create_task(add_turn(first_api, history, "two", stream=stream))
            await wait_for_chats(server, 3)
            with server.freezing(5):
                beside = asyncio.create_task(add_turn(second_api, second_history, "two", stream=stream))
                await server.frozen(5)
                pid = kill_shard(gateway, 0)
                await wait_for_restart(gateway, pid, 0, names[0])
                assert (await gateway.trajectory(names[0]))["turns_recorded"] == 1
                await wait_for_chats(server, 5)
            await server.post("/resume")
            seen += [await before]
            seen_there += [await beside]
            seen += [await add_turn(first_api, history, "three", stream=stream)]
        check_record(await gateway.trajectory(names[0]), seen)
        check_record(await gateway.trajectory(names[1]), seen_there)
        assert gateway.restarts == 1


@pytest.mark.long
async def test_stream_cut_by_a_kill_is_not_recorded_and_its_repetition_is() -> None:
    async with (
        standin("vllm") as server,
        run_gateway(server.url, shards=2, kind="vllm", record="messages") as gateway,
    ):
        name = session_id_for(0, 2)
        registration = await gateway.register({"id": name})
        async with openai_client(registration) as api:
            with server.freezing(12):
                stream = await api.chat.completions.create(model="policy", messages=HI, stream=True, **LONG)
                pieces = aiter(stream)
                await anext(pieces)
                await server.frozen(12)
                pid = kill_shard(gateway, 0)
                with pytest.raises((openai.APIConnectionError, httpx.HTTPError)):
                    async for _ in pieces:
                        pass
                await wait_for_restart(gateway, pid, 0, name)
            assert (await gateway.trajectory(name))["turns"] == []
            await server.until(0)
            await server.post("/resume")
            again = await chat_text(api, HI, stream=True, **LONG)
        check_record(await gateway.trajectory(name), [again])


async def post_without_reading(
    registration: dict[str, str], body: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Post a chat request and leave the response unread beyond a small buffer."""
    host, _, path = registration["base_url"].removeprefix("http://").partition("/")
    address, _, port = host.partition(":")
    reader, writer = await asyncio.open_connection(address, int(port), limit=1)
    head = f"POST /{path}/chat/completions HTTP/1.1\r\nHost: {host}\r\n"
    head += f"Authorization: Bearer {registration['secret']}\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    return reader, writer


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_recorded_but_undelivered_reply_is_replayed_to_a_retry(stream: bool) -> None:
    text = "x" * (24 << 20)  # more than the socket buffers hold
    async with ModelServer(Answer(text)) as server, run_gateway(server.url) as gateway:
        registration = await gateway.register({"id": "a"})
        reader, writer = await post_without_reading(
            registration, b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
        )

        async def recorded() -> bool:
            return bool((await gateway.request("GET", "/rollouts/a"))["turns_recorded"])

        await wait_until(recorded)
        pid = kill_shard(gateway, 0)
        received = 0
        with contextlib.suppress(ConnectionError):  # or the response ends before its announced length
            while data := await reader.read(1 << 20):
                received += len(data)
        assert received < len(text)
        writer.close()
        await wait_for_restart(gateway, pid, 0, "a")
        async with openai_client(registration) as api:
            again = await chat_text(api, HI, stream=stream, extra_headers={"x-stainless-retry-count": "1"})
        assert again == text
        record = await gateway.trajectory("a")
        assert [turn["response"]["content"] for turn in record["turns"]] == [text]
        assert len(server.requests) == 1


@pytest.mark.long
async def test_repeated_kills_lose_and_duplicate_no_turn() -> None:
    async with (
        standin("vllm") as server,
        run_gateway(server.url, shards=2, kind="vllm", record="messages") as gateway,
    ):
        names = [f"many{n}" for n in range(8)]
        registrations = [await gateway.register({"id": name}) for name in names]
        over = asyncio.Event()
        seen: dict[str, list[str]] = {name: [] for name in names}
        kills = 0

        async def converse(number: int) -> None:
            history: list[Any] = []
            asking = itertools.count()  # keeps requests distinct, because a retry of an equal one is replayed
            async with openai_client(registrations[number], retries=30) as api:
                while not over.is_set() or len(seen[names[number]]) < 3:
                    try:
                        answer = await add_turn(api, history, f"go on {next(asking)}", stream=number % 2 == 0)
                    except (openai.APIConnectionError, httpx.HTTPError):  # the stream was cut off
                        history.pop()
                        continue
                    if len(history) > 6:
                        del history[:]
                    seen[names[number]].append(answer)

        async with asyncio.TaskGroup() as group:
            for number in range(len(registrations)):
                group.create_task(converse(number))
            for at in range(4):
                shard, turns = at % 2, sum(map(len, seen.values()))
                await wait_until(lambda turns=turns: sum(map(len, seen.values())) > turns)  # type: ignore[misc]
                pid = kill_shard(gateway, shard)
                kills += 1
                await wait_for_restart(gateway, pid, shard, next(n for n in names if shard_of(n) == shard))
            over.set()
        assert gateway.restarts == kills
        for name in names:
            record = await gateway.trajectory(name)
            recorded = [turn["response"]["content"] for turn in record["turns"]]
            # A turn whose response was lost is recorded too; what a client saw is there in order.
            left = iter(recorded)
            assert all(text in left for text in seen[name])
            assert len(recorded) - len(seen[name]) <= kills
            for turn in record["turns"]:
                assert len(turn["sampled"]) == len(turn["logprobs"]) == turn["sampled_tokens"] > 0


def shard_of(session: str) -> int:
    from rookery.gateway.registry import owning_shard

    return owning_shard(session, 2)


# ---- whole gateways


@pytest.mark.long
async def test_sessions_survive_a_restart_with_another_number_of_shards(tmp_path: Path) -> None:
    names = [f"kept{n}" for n in range(6)]
    async with ModelServer() as server:
        server.default = lambda request: Answer(f"to {request.body['messages'][-1]['content']}")
        registrations: dict[str, dict[str, str]] = {}
        for life, shards in enumerate((3, 1, 2, 3)):
            async with run_gateway(server.url, tmp_path / "kept", shards=shards) as gateway:
                if not registrations:
                    registrations = {name: await gateway.register({"id": name}) for name in names}
                    cancelled = await gateway.register({"id": "cancelled"})
                    deleted = await gateway.register({"id": "deleted"})
                    await gateway.request("POST", "/rollouts/cancelled/cancel")
                    await gateway.request("DELETE", "/rollouts/deleted")
                async with http_client() as session:
                    for name in names:
                        _, headers = chat_endpoint(registrations[name])
                        body = {"messages": [{"role": "user", "content": f"{name} {life}"}]}
                        url = f"{gateway.url}/v1/rollouts/{name}/chat/completions"
                        async with session.post(url, json=body, headers=headers) as answer:
                            assert answer.status == 200
                    for past in (cancelled, deleted):
                        url = f"{gateway.url}/v1/rollouts/{past['id']}/chat/completions"
                        async with session.post(
                            url, json={"messages": HI}, headers=chat_endpoint(past)[1]
                        ) as answer:
                            assert answer.status == 410
                for name in names:
                    turns = (await gateway.trajectory(name))["turns"]
                    assert [turn["response"]["content"] for turn in turns] == [
                        f"to {name} {n}" for n in range(life + 1)
                    ]
                    assert [turn["index"] for turn in turns] == list(range(life + 1))
                with pytest.raises(RookeryError, match="409"):
                    await gateway.register({"id": names[0]})


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """Create a temporary directory whose path is short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


async def test_shards_read_their_keys_from_standard_input_only() -> None:
    async with ModelServer("ok") as model, run_gateway(model.url, shards=1) as gateway:
        (pid,) = gateway.pids()
        for name in ("cmdline", "environ"):
            assert KEY.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()
        sockets = Path(shard_socket(gateway, 0)).parent
        assert sockets.stat().st_mode & 0o077 == 0  # only this user can send listeners to the shards


async def test_gateway_without_a_folder_leaves_nothing_behind(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_directory))
    before = len(os.listdir("/proc/self/fd"))
    async with ModelServer() as server:
        async with run_gateway(server.url, shards=2) as gateway:
            pids = gateway.pids()
            async with openai_client(await gateway.register({"id": "a"})) as api:
                await chat_text(api, HI, stream=False)
            await gateway.attach_listener("a", bind_listener("127.0.0.1", 0))
            assert list(short_directory.iterdir())
            assert all(map(is_alive, pids))
        await gateway.close()  # closing is idempotent
        assert list(short_directory.iterdir()) == []
        assert not any(map(is_alive, pids))
    assert len(os.listdir("/proc/self/fd")) <= before + 3


@pytest.mark.long
async def test_gateway_closes_with_calls_in_flight() -> None:
    never = asyncio.Event()
    async with ModelServer(Answer(hold=never)) as server, run_gateway(server.url) as gateway:
        async with openai_client(await gateway.register({"id": "a"}), retries=0) as api:
            call = asyncio.create_task(chat_text(api, HI, stream=True))
            await server.wait_for_requests(1)
            pids = gateway.pids()
            await gateway.close()
            with pytest.raises(openai.APIError):
                await call
        await server.wait_for_disconnects(1)
        assert not any(map(is_alive, pids))


async def test_failed_start_raises_an_error_and_leaves_nothing_behind(
    tmp_path: Path, short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_directory))
    wrong = gateway_config("http://127.0.0.1:1", shards=2, record="tokens", rendering={"name": "qwen3"})
    with pytest.raises(RookeryError, match="tokenizer"):
        async with Gateway(wrong, key=KEY):
            pytest.fail("the gateway started")
    assert list(short_directory.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=re.escape(str(tmp_path / "file"))):
        async with Gateway(gateway_config("http://127.0.0.1:1"), tmp_path / "file" / "below", key=KEY):
            pytest.fail("the gateway started")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


async def test_shard_ended_by_sigterm_is_restarted() -> None:
    async with ModelServer() as server, run_gateway(server.url) as gateway:
        registration = await gateway.register({"id": "a"})
        pid = gateway.pids()[0]
        os.kill(pid, signal.SIGTERM)
        await wait_for_restart(gateway, pid, 0, "a")
        async with openai_client(registration) as api:
            assert await chat_text(api, HI, stream=False) == "ok"


@pytest.mark.long
@pytest.mark.parametrize("kept", [False, True], ids=["nothing kept", "kept"])
async def test_shards_of_a_killed_gateway_end_and_remove_its_files(
    kept: bool, tmp_path: Path, short_directory: Path
) -> None:
    from tests.cli.helpers import start_command

    folder = tmp_path / "kept"
    temp = short_directory
    more = ("--folder", folder) if kept else ()
    options = ("--port", "0", "--shards", "3", *more)
    async with (
        ModelServer() as server,
        start_command("gateway", "--upstream", server.url, *options, cwd=tmp_path, TMPDIR=str(temp)) as process,
    ):
        assert process.stdout is not None
        async with asyncio.timeout(60):
            assert b"http://127.0.0.1:" in await process.stdout.readline()
        shards = processes.list_children(process.pid)
        assert len(shards) == 3
        assert len(list(temp.iterdir())) == 1
        os.kill(shards[0], signal.SIGKILL)  # one shard cannot clean up
        process.kill()
        await process.wait()
        await wait_until(lambda: not any(map(is_alive, shards)))
        assert list(temp.iterdir()) == []
        assert folder.exists() == kept
        assert not kept or (folder / "sessions").is_dir()


def test_files_of_a_gateway_that_was_killed_with_its_shards_are_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "socket_directory_parent", lambda: str(tmp_path))
    stale, live = (tmp_path / f"{shards.SOCKETS_PREFIX}{name}" for name in ("stale", "live"))
    for folder in (stale, live):
        folder.mkdir()
        (folder / "fds-0.sock").touch()
    lock = lock_directory(live)
    assert lock is not None
    shards.remove_stale_sockets()
    assert set(tmp_path.iterdir()) == {live}
    os.close(lock)
    shards.remove_stale_sockets()
    assert not list(tmp_path.iterdir())


async def test_clients_wait_while_the_only_shard_restarts() -> None:
    async with ModelServer() as server, run_gateway(server.url) as gateway:
        registration = await gateway.register({"id": "a"})
        kill_shard(gateway, 0)
        url, headers = chat_endpoint(registration)
        async with http_client() as session, session.post(url, json={"messages": HI}, headers=headers) as answer:
            assert answer.status == 200  # the listener stays open: the kernel queues the connection
        assert (await retry_while_unavailable(lambda: gateway.trajectory("a")))["turns_recorded"] == 1
