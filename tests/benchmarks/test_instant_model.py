"""Tests of the instant model over real sockets."""

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from benchmarks.engine import floor_cpu_ms
from benchmarks.instant_model import MAX_BODY, MAX_HEAD, TOKENS, InstantModel, body_length, instant_model


async def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.post(f"{url}/chat/completions", json=body) as reply:
        assert reply.status == 200
        answer: dict[str, Any] = await reply.json()
        return answer


def address(model: InstantModel) -> tuple[str, int]:
    return "127.0.0.1", int(model.origin.rsplit(":", 1)[1])


async def test_reply_is_a_valid_chat_completion_with_tokens() -> None:
    async with instant_model() as model:
        answer = await ask(model.tokens_url, {"model": "m", "messages": [{"role": "user", "content": "é" * 9000}]})
    (choice,) = answer["choices"]
    assert answer["object"] == "chat.completion"
    assert choice["finish_reason"] == "stop"
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"] == TOKENS
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    entries = choice["logprobs"]["content"]
    assert len(entries) == TOKENS
    assert all(entry["logprob"] <= 0 and entry["top_logprobs"] == [] for entry in entries)
    assert "".join(bytes(entry["bytes"]).decode() for entry in entries) == choice["message"]["content"]


async def test_plain_endpoint_returns_the_same_text_without_tokens() -> None:
    async with instant_model() as model:
        full = await ask(model.tokens_url, {})
        plain = await ask(model.plain_url, {})
    assert plain["choices"][0]["message"] == full["choices"][0]["message"]
    assert plain["choices"][0]["logprobs"] is None
    assert "token_ids" not in plain["choices"][0]


async def test_tools_endpoint_calls_a_tool_twice_and_then_answers() -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    finishes = []
    async with instant_model() as model:
        for _ in range(3):
            choice = (await ask(model.tools_url, {"messages": messages}))["choices"][0]
            finishes.append(choice["finish_reason"])
            messages.append(choice["message"])
            calls = choice["message"].get("tool_calls", ())
            messages.extend({"role": "tool", "tool_call_id": call["id"], "content": "hi"} for call in calls)
    assert finishes == ["tool_calls", "tool_calls", "stop"]


async def test_models_are_listed_and_other_paths_are_not_found() -> None:
    async with instant_model() as model, aiohttp.ClientSession() as session:
        async with session.get(f"{model.tokens_url}/models") as reply:
            assert (await reply.json())["data"][0]["object"] == "model"
        async with session.get(f"{model.origin}/elsewhere") as reply:
            assert reply.status == 404


async def test_requests_may_arrive_in_pieces_or_pipelined() -> None:
    request = b"POST /plain/v1/chat/completions HTTP/1.1\r\nHost: x\r\ncontent-LENGTH: 2\r\n\r\n{}"
    async with instant_model() as model, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection(*address(model))
        for at in range(len(request)):
            writer.write(request[at : at + 1])
            await writer.drain()
        writer.write(request * 3)
        for _ in range(4):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK")
            await reader.readexactly(body_length(head) or 0)
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (MAX_BODY + 1),
        b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: many\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"x" * (MAX_HEAD + 1),
    ],
)
async def test_oversized_or_malformed_request_is_refused_and_closed(sent: bytes) -> None:
    async with instant_model() as model, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection(*address(model))
        writer.write(sent)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 400 ")
        writer.close()
        await writer.wait_closed()


async def test_server_is_stopped_after_its_block() -> None:
    async with instant_model() as model:
        server = address(model)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(server)


def test_server_exits_when_its_parent_is_killed(tmp_path: Path) -> None:
    ports = tmp_path / "port"
    parent = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-m', 'benchmarks.instant_model', '--port-file', sys.argv[1]],"
        " stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); print(child.pid, flush=True); child.wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent, str(ports)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        # A pidfd becomes readable when the process ends: no polling.
        descriptor = os.pidfd_open(child)
        try:
            process.send_signal(signal.SIGKILL)
            assert select.select([descriptor], [], [], 30)[0]
        finally:
            os.close(descriptor)


async def test_floor_has_a_cost_for_each_repeat() -> None:
    async with instant_model() as model:
        costs = await floor_cpu_ms(model.tokens_url, n=64, repeats=2, concurrency=8)
    assert len(costs) == 2
    assert all(cost > 0 for cost in costs)
