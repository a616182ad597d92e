"""`rookery serve-embedded` as a process, with real signals."""

import asyncio
import os
import re
import signal
import socket
from pathlib import Path

import aiohttp
import openai
import pytest

from tests.cli.helpers import rookery, start_command, wait_for_end
from tests.upstreams.embedded_kit import HI, random_weights


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return random_weights(tmp_path / "small", version=4)


async def wait_until_ready(process: asyncio.subprocess.Process) -> tuple[str, list[str]]:
    """Wait until the server is ready; return its URL and its output."""
    assert process.stdout is not None
    async with asyncio.timeout(60):
        lines = [(await process.stdout.readline()).decode() for _ in range(2)]
    found = re.search(r" (http://\S+/v1)$", lines[0].strip())
    assert found, lines
    return found[1], lines


async def test_server_prints_its_url_and_an_example(tmp_path: Path) -> None:
    async with start_command("serve-embedded", "--port", "0", cwd=tmp_path) as process:
        url, lines = await wait_until_ready(process)
        assert re.search(r"\bembedded\b.*\b0\.\d\d M\b.*\b\d+\b.*http://127\.0\.0\.1:\d+/v1\n", lines[0])
        assert lines[1].endswith(f"rookery run arithmetic --policy {url} -n 20 -k 4\n")
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            answer = await client.chat.completions.create(
                model="embedded", messages=[{"role": "user", "content": "What is 2 + 3?"}], max_tokens=5
            )
        assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")
        process.send_signal(signal.SIGINT)
        done = await wait_for_end(process)
    assert (done.code, done.out, done.err) == (0, "", "")


@pytest.mark.long
async def test_sigterm_ends_the_server_during_streams(weights: Path, tmp_path: Path) -> None:
    command = ("serve-embedded", "--port", "0", "--weights", weights, "--concurrency", "1", "--verbose")
    async with start_command(*command, cwd=tmp_path) as process, aiohttp.ClientSession() as http:
        url, _ = await wait_until_ready(process)
        # With 64 long replies and a concurrency of 1, some run and some wait when the signal arrives.
        body = {"messages": HI, "stream": True, "n": 64, "temperature": 0, "logprobs": True}
        async with http.post(f"{url}/chat/completions", json=body) as answer:
            assert answer.headers["X-Weight-Version"] == "4"
            await answer.content.readline()
            process.send_signal(signal.SIGTERM)
            done = await wait_for_end(process)
        assert done.code == 0
        assert done.out == ""
        assert "Traceback" not in done.err
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)
        with pytest.raises(aiohttp.ClientConnectorError):
            await http.get(f"{url}/models")


async def test_verbose_logs_every_request(weights: Path, tmp_path: Path) -> None:
    async with start_command(
        "serve-embedded", "--port", "0", "--weights", weights, "--verbose", cwd=tmp_path
    ) as process:
        url, lines = await wait_until_ready(process)
        assert " small " in lines[0]
        async with aiohttp.ClientSession() as http, http.get(f"{url}/models") as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGTERM)
        done = await wait_for_end(process)
    assert re.fullmatch(r'127\.0\.0\.1 "GET /v1/models HTTP/1\.1" 200, \d+ bytes, [0-9.]+ s\n', done.err)


@pytest.mark.long
async def test_invalid_server_options_are_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = await rookery("serve-embedded", "--port", port, cwd=tmp_path)
        done.assert_refused("127.0.0.1", port)
    for args, named in (
        (["--port", "70000"], "65535"),
        (["--concurrency", "0"], "64"),
        (["--weights", "nothing"], " nothing "),
        (["--host", "no such host", "--port", "0"], "no such host"),
    ):
        (await rookery("serve-embedded", *args, cwd=tmp_path)).assert_refused(named)


async def test_requests_of_web_pages_are_rejected(tmp_path: Path, weights: Path) -> None:
    async with (
        start_command("serve-embedded", "--port", "0", cwd=tmp_path) as process,
        aiohttp.ClientSession() as http,
    ):
        url, _ = await wait_until_ready(process)
        root = url.removesuffix("/v1")
        for headers in ({"Host": "evil.example:80"}, {"Origin": "https://evil.example"}, {"Origin": "null"}):
            for path in ("/v1/models", "/health", "/version"):
                async with http.get(f"{root}{path}", headers=headers) as answer:
                    assert answer.status == 403, (headers, path)
            for path in ("/v1/chat/completions", "/update_weights", "/pause"):
                async with http.post(f"{root}{path}", json={"path": str(weights)}, headers=headers) as answer:
                    assert answer.status == 403, (headers, path)
        async with http.get(f"{url}/models", headers={"Origin": "http://localhost:3000"}) as answer:
            assert answer.status == 200


async def test_web_page_cannot_replace_the_weights_of_a_public_server(tmp_path: Path, weights: Path) -> None:
    async with start_command("serve-embedded", "--host", "0.0.0.0", "--port", "0", cwd=tmp_path) as process:
        url, _ = await wait_until_ready(process)
        root = url.removesuffix("/v1").replace("0.0.0.0", "127.0.0.1")
        async with aiohttp.ClientSession() as http:
            for headers, status in (({"Host": "evil.example"}, 403), ({}, 200)):
                async with http.get(f"{root}/v1/models", headers=headers) as answer:
                    assert answer.status == 200
                async with http.post(
                    f"{root}/update_weights", json={"path": str(weights)}, headers=headers
                ) as answer:
                    assert answer.status == status
