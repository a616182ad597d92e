"""The server of the embedded policy: streams, disconnects, queues and weight updates."""

import asyncio
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
import pytest

from rookery.core import UpstreamError
from rookery.upstreams.embedded import LlamaShape, Weights
from rookery.upstreams.embedded import http_server as serving_module
from rookery.upstreams.embedded import server as server_module
from rookery.upstreams.embedded.batch import SamplingJob
from rookery.upstreams.embedded.http_server import is_loopback_client
from rookery.upstreams.embedded.openai_responses import to_chunk_deltas
from rookery.upstreams.embedded.streaming import DecodedCall, DecodedDelta
from tests.upstreams.embedded_kit import HI, LiveServer, gated, random_weights, serving
from tests.upstreams.embedded_reference import SMALL
from tests.waiting import wait_until

TOOLS = [{"type": "function", "function": {"name": "python", "parameters": {"properties": {"code": {}}}}}]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return random_weights(tmp_path / "small.safetensors")


def joined(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """Join the chunks of a choice to the form of the unstreamed response."""
    message: dict[str, Any] = {"role": None, "content": None, "refusal": None}
    whole: dict[str, Any] = {"index": index, "message": message, "finish_reason": None}
    ids: list[int] = []
    logprobs: list[Any] = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            assert whole["finish_reason"] is None, "no chunk follows the finish reason"
            delta = choice["delta"]
            message["role"] = delta.get("role", message["role"])
            if delta.get("content") is not None:
                message["content"] = (message["content"] or "") + delta["content"]
            for piece in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if "id" in piece:
                    assert piece["index"] == len(calls)
                    calls.append({name: piece[name] for name in ("id", "type", "function")})
                else:
                    calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
            ids += choice.get("token_ids", ())
            logprobs += (choice["logprobs"] or {}).get("content", ())
            whole["finish_reason"] = choice["finish_reason"]
    return {**whole, "token_ids": ids, "logprobs": {"content": logprobs, "refusal": None}}


@pytest.mark.long
@pytest.mark.parametrize("more", [{}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "required"}], ids=str)
@pytest.mark.parametrize("n", [1, 6])
async def test_joined_stream_is_the_unstreamed_reply(weights: Path, more: dict[str, Any], n: int) -> None:
    async with serving(weights) as server:
        for seed, stop in ((1, []), (2, ["a", "e", " "]), (3, ["\u00e9", "12"])):
            options: dict[str, Any] = {"seed": seed, "n": n, "stop": stop, "max_tokens": 90, **more}
            options |= {"return_token_ids": True, "logprobs": True}
            whole = await server.ask(**options)
            chunks = await server.chunks(**options, stream_options={"include_usage": True})
            assert [joined(chunks, number) for number in range(n)] == whole["choices"]
            assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
            assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
            assert {chunk["weight_version"] for chunk in chunks} == {1}
            assert len({chunk["id"] for chunk in chunks}) == 1
            assert all(chunk["usage"] is None for chunk in chunks[:-1])
            assert chunks[-1]["choices"] == []
            # The second request finds more of the prompt in the cache; only that may differ.
            for usage in (chunks[-1]["usage"], whole["usage"]):
                usage.pop("prompt_tokens_details")
            assert chunks[-1]["usage"] == whole["usage"]


async def test_stream_without_ids_has_no_empty_chunks(weights: Path) -> None:
    async with serving(weights) as server:
        chunks = await server.chunks(seed=4, max_tokens=90)
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")
        assert all(chunk["choices"][0]["delta"] for chunk in chunks[:-1])
        assert not any("usage" in chunk or "token_ids" in chunk["choices"][0] for chunk in chunks)


async def test_streamed_completion_is_the_unstreamed_text(weights: Path) -> None:
    async with serving(weights) as server:
        options = {"prompt": ["7 + 5", "abc"], "n": 2, "seed": 9, "max_tokens": 50, "return_token_ids": True}
        options |= {"logprobs": 1}
        _, whole, _ = await server.post("/completions", options)
        chunks = await server.chunks("/completions", **options)
        for number, choice in enumerate(whole["choices"]):
            mine = [part for chunk in chunks for part in chunk["choices"] if part["index"] == number]
            assert "".join(part["text"] for part in mine) == choice["text"]
            assert [token for part in mine for token in part["token_ids"]] == choice["token_ids"]
            assert mine[0]["prompt_token_ids"] == choice["prompt_token_ids"]
            assert mine[-1]["finish_reason"] == choice["finish_reason"]
            values = [value for part in mine for value in part["logprobs"]["token_logprobs"]]
            assert values == choice["logprobs"]["token_logprobs"]


# -------------------------------------------------------------------------------------- clients that go away


@pytest.mark.parametrize("stream", [True, False])
async def test_disconnected_client_ends_its_sampling_and_frees_its_slots(weights: Path, stream: bool) -> None:
    async with serving(weights, slots=1) as server:
        with gated(server.upstream) as gate:
            body = {"messages": HI, "stream": stream, "n": 3, "temperature": 0, "return_token_ids": True}
            gate.step()
            async with aiohttp.ClientSession() as other:
                call = asyncio.create_task(other.post(f"{server.url}/chat/completions", json=body))
                await server.until(1, 2)
                if stream:
                    answer = await call
                    assert (await answer.content.readline()).startswith(b"data: ")
                    answer.close()
                else:
                    call.cancel()
                    await asyncio.wait({call})
                await server.until(0, 0)
        await server.ask(max_tokens=1)
        assert [prepared.job.finish for prepared in server.prepared_requests[:3]] == ["", "", ""]
        assert not server.upstream.service.sequences


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the socket buffers small, so that a reader that waits blocks the server."""

    def bind_small_buffer(host: str, port: int) -> socket.socket:
        sock = bind_listener(host, port)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        return sock

    bind_listener = serving_module.bind_listener
    monkeypatch.setattr(serving_module, "bind_listener", bind_small_buffer)


MUCH = {"messages": HI, "stream": True, "n": 8, "temperature": 0, "logprobs": True, "max_tokens": 200}
"""Request a stream of half a megabyte of chunks."""


@pytest.mark.usefixtures("small_buffers")
async def test_slow_reader_gets_its_whole_reply_and_holds_no_slot(weights: Path) -> None:
    async with serving(weights, slots=8) as server:
        with _slow(server, MUCH) as sock:
            await _wait_until_sampled(server, 8)
            assert server.embedded._admitted_count == 8, "the slow reader has not received everything"
            assert (await server.ask(max_tokens=1))["choices"], "other clients are served meanwhile"
            sock.setblocking(False)
            loop = asyncio.get_running_loop()
            data = b""
            while not data.endswith(b"0\r\n\r\n"):
                data += await asyncio.wait_for(loop.sock_recv(sock, 1 << 20), 60)
        assert data.count(b'"finish_reason":"') == 8
        assert b"data: [DONE]" in data


@pytest.mark.usefixtures("small_buffers")
async def test_client_that_never_reads_is_disconnected(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_module, "WRITE_SECONDS", 0.05)
    async with serving(weights) as server:
        with _slow(server, MUCH):
            await _wait_until_sampled(server, 8)
            await server.until(0, 0)


def _slow(server: LiveServer, body: dict[str, Any]) -> socket.socket:
    """Send a request on a connection whose response nobody reads."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    where = urlsplit(server.url)
    sock.connect((where.hostname, where.port))
    data = orjson.dumps(body)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    return sock


async def _wait_until_sampled(server: LiveServer, count: int) -> None:
    await wait_until(lambda: len(server.prepared_requests) >= count and not server.embedded._running)


# -------------------------------------------------------------------------------------------------- queues


async def test_waiting_requests_are_ordered_and_bounded(weights: Path) -> None:
    async with serving(weights, slots=1, waiting=2) as server:
        ended: list[int] = []

        async def ask(number: int) -> None:
            await server.ask(max_tokens=3, seed=number)
            ended.append(number)

        with gated(server.upstream) as gate:
            tasks = []
            for number in range(3):
                tasks.append(asyncio.create_task(ask(number)))
                await server.until(1, number)
            status, body, headers = await server.post("/chat/completions", {"messages": HI, "stream": True})
            assert (status, body["error"]["type"], headers["Retry-After"]) == (429, "rate_limit_error", "1")
            gate.open()
            await asyncio.gather(*tasks)
        assert ended == [0, 1, 2]
        assert (await server.ask(max_tokens=1, n=3))["choices"], "three slots are requested, one is enough"


async def test_health_is_bad_while_sequences_hang(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(weights) as server:
        with gated(server.upstream) as gate:
            call = asyncio.create_task(server.ask(max_tokens=3))
            await server.until(1, 0)
            monkeypatch.setattr(server_module, "STUCK_SECONDS", 0.0)
            async with server.http.get(f"{server.root}/health") as answer:
                assert answer.status == 503
                assert orjson.loads(await answer.read())["status"] != "ok"
            monkeypatch.undo()
            gate.open()
            await call
        assert await server.health() == (0, 0)


async def test_failed_step_is_reported_in_the_stream_and_the_server_continues(weights: Path) -> None:
    async with serving(weights) as server:
        with gated(server.upstream) as gate:
            body = {"messages": HI, "stream": True, "temperature": 0}
            gate.step()
            async with server.http.post(f"{server.url}/chat/completions", json=body) as answer:
                assert answer.status == 200
                server.upstream.service.llama.rows = None  # type: ignore[assignment, method-assign]
                gate.open()
                events = (await answer.read()).decode().split("\n\n")
            failure = orjson.loads(events[-2].removeprefix("data: "))
            assert "TypeError" in failure["error"]["message"]
            assert "[DONE]" not in "".join(events)
        del server.upstream.service.llama.rows
        assert (await server.ask(max_tokens=1))["choices"]


# -------------------------------------------------------------------------------------------------- weights


async def test_swap_does_not_change_a_stream_in_flight(weights: Path, tmp_path: Path) -> None:
    async with serving(weights, slots=2) as server:
        options = {"seed": 3, "n": 4, "max_tokens": 40, "return_token_ids": True}
        before = await server.ask(**options)
        new = random_weights(tmp_path / "new", seed=2, version=0)
        with gated(server.upstream) as gate:
            gate.step()
            body = {"messages": HI, "stream": True, **options}
            async with server.http.post(f"{server.url}/chat/completions", json=body) as answer:
                assert answer.headers["X-Weight-Version"] == "1"
                status, reply, _ = await server.post(f"{server.root}/update_weights", {"path": str(new)})
                assert (status, reply["weight_version"]) == (200, 2), (
                    "the version is one more than before, because the file has version 0"
                )
                gate.open()
                events = (await answer.read()).decode().split("\n\n")[:-2]
        chunks = [orjson.loads(event.removeprefix("data: ")) for event in events]
        assert {chunk["weight_version"] for chunk in chunks} == {1}
        for number, choice in enumerate(before["choices"]):  # two of them began after the swap
            assert joined(chunks, number)["token_ids"] == choice["token_ids"]
        after = await server.ask(**options)
        assert after["weight_version"] == 2
        assert after["choices"] != before["choices"]
        async with server.http.get(f"{server.url}/models") as answer:
            assert orjson.loads(await answer.read())["data"][0]["weight_version"] == 2
        reply = await server.post(f"{server.root}/update_weights", {"path": str(weights), "version": 70})
        assert reply[1]["weight_version"] == 70
        again = await server.ask(**options)
        assert (again["weight_version"], again["choices"]) == (70, before["choices"])


async def test_request_that_waits_and_does_not_fit_the_new_weights_gets_the_old_ones(
    weights: Path, tmp_path: Path
) -> None:
    short = LlamaShape(
        **{name: getattr(SMALL, name) for name in SMALL.__struct_fields__} | {"max_position_embeddings": 16}
    )
    Weights.random(short, version=2).save(tmp_path / "short")
    async with serving(weights, slots=1) as server:
        with gated(server.upstream) as gate:
            first = asyncio.create_task(server.ask(max_tokens=2))
            await server.until(1, 0)
            second = asyncio.create_task(server.ask(max_tokens=2))
            await server.until(1, 1)
            where = {"path": str(tmp_path / "short")}
            assert (await server.post(f"{server.root}/update_weights", where))[0] == 200
            gate.open()
            assert [(await task)["weight_version"] for task in (first, second)] == [1, 1]
        status, body, _ = await server.post("/chat/completions", {"messages": HI})
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        status, body, _ = await server.post("/completions", {"prompt": "7 + 5"})
        assert (status, body["weight_version"]) == (200, 2)


async def test_invalid_sequence_fails_alone(weights: Path) -> None:
    async with serving(weights) as server:
        job = SamplingJob([999], max_tokens=1, seed=0)
        with pytest.raises(UpstreamError, match=r"\b0\b.*\b271\b"):
            await server.upstream.service.run(job)
        assert (await server.ask(max_tokens=1))["choices"]


async def test_weights_file_is_watched(weights: Path) -> None:
    async with serving(weights) as server:
        assert (await server.ask(max_tokens=1))["weight_version"] == 1
        random_weights(weights, seed=5, version=9)
        assert (await server.ask(max_tokens=1))["weight_version"] == 9
        weights.write_bytes(b"broken")
        status, body, _ = await server.post("/chat/completions", {"messages": HI})
        assert (status, body["error"]["type"]) == (500, "server_error")
        assert str(weights) in body["error"]["message"]


async def test_broken_weights_are_refused_and_the_old_ones_stay(weights: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.safetensors").write_bytes(b"broken")
    few = LlamaShape(**{name: getattr(SMALL, name) for name in SMALL.__struct_fields__} | {"vocab_size": 100})
    Weights.random(few).save(tmp_path / "few.safetensors")
    async with serving(weights) as server:
        for where, named in (
            (str(tmp_path / "broken.safetensors"), "broken.safetensors"),
            (str(tmp_path / "few.safetensors"), "100"),
            (str(tmp_path / "nothing"), "No such file"),
            (str(tmp_path), "No such file"),
            ("/dev/zero", "/dev/zero"),
            ("a\0b", "a"),
            ("", ">= 1"),
        ):
            status, body, _ = await server.post(f"{server.root}/update_weights", {"path": where})
            assert (status, named in body["error"]["message"]) == (400, True), body
        for body in ({}, {"path": 3}, {"path": "x", "version": "2"}, {"path": "x", "version": -1}):
            assert (await server.post(f"{server.root}/update_weights", body))[0] == 400
        good = {"path": str(weights)}
        status, _, _ = await server.post(f"{server.root}/update_weights", good, **{"Content-Type": "text/plain"})
        assert status == 415, "a web page can send this to any address"
        assert (await server.ask(max_tokens=1))["weight_version"] == 1


async def test_weights_are_replaced_only_from_this_machine_unless_updates_are_allowed(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [is_loopback_client(where) for where in ("127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1")] == [
        True
    ] * 4
    assert not any(map(is_loopback_client, ("10.0.0.1", "::ffff:10.0.0.1", "", None, "localhost", "8.8.8.8")))
    monkeypatch.setattr(server_module, "is_loopback_client", lambda _: False)
    for allowed, expected in ((False, 403), (True, 200)):
        async with serving(weights, allow_updates=allowed) as server:
            status, body, _ = await server.post(f"{server.root}/update_weights", {"path": str(weights)})
            assert status == expected
            assert allowed or "--allow-updates" in body["error"]["message"]


def test_chunk_has_at_most_one_tool_call_entry() -> None:
    calls = [
        DecodedCall(0, "call_0", "look", "{}"),
        DecodedCall(1, "call_1", "stop"),
        DecodedCall(1, arguments="{}"),
    ]
    deltas = to_chunk_deltas(DecodedDelta("so:", calls))
    assert [list(one) for one in deltas] == [["content"], *[["tool_calls"]] * 3]
    assert [len(one.get("tool_calls", ())) for one in deltas] == [0, 1, 1, 1]
    assert [one["tool_calls"][0]["index"] for one in deltas[1:]] == [0, 1, 1]
