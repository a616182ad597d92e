"""`rookery serve-code` as a process, with real clients and signals."""

import asyncio
import json
import re
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rookery.cli.serve_code import KEY_ENV
from rookery.sandbox_runtime import processes
from tests.cli.helpers import rookery, start_command, wait_for_end
from tests.waiting import wait_until

SLEEPS = {"source": "import time; time.sleep(60)"}


@asynccontextmanager
async def serving(*args: str, cwd: Path, **env: str) -> AsyncIterator[tuple[Any, str]]:
    """Start the server; yield its process and its URL."""
    temp = cwd / "temp"
    temp.mkdir(exist_ok=True)
    async with start_command("serve-code", "--port", "0", *args, cwd=cwd, TMPDIR=str(temp), **env) as process:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            line = (await process.stdout.readline()).decode()
        found = re.search(r"(http://127\.0\.0\.1:\d+) .*\blocal\b", line)
        assert found, (line, await process.stderr.read() if not line else "")
        yield process, found[1]


async def wait_until_idle(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """Wait until no program runs; return the health report."""

    async def idle() -> dict[str, Any] | None:
        async with http.get(f"{url}/healthz") as answer:
            status: dict[str, Any] = await answer.json()
        return status if status["programs"] == 0 else None

    status: dict[str, Any] = await wait_until(idle)
    return status


async def test_results_are_in_order_and_invalid_fields_are_named(tmp_path: Path) -> None:
    async with serving("--concurrency", "2", "--queue", "8", cwd=tmp_path) as (process, url):
        async with aiohttp.ClientSession() as http:
            programs = [
                {"id": "a", "source": "import time; time.sleep(0.2); print(input())", "stdin": "é"},
                {"id": "b", "source": "echo b", "language": "bash"},
                {"id": "c", "source": "print(input())", "cases": [{"stdin": "1", "stdout": "1"}, {"stdout": "x"}]},
                {"id": "d", "source": {"base64": "cHJpbnQoNSk="}, "limits": {"wall": 5}},
            ]
            async with http.post(f"{url}/run_code", json={"programs": programs, "limits": {"wall": 9}}) as answer:
                assert (answer.status, answer.content_type) == (200, "application/x-ndjson")
                results = [json.loads(line) async for line in answer.content]
            assert [result["id"] for result in results] == ["a", "b", "c", "d"]
            assert [result["stdout"] for result in results[:2]] == ["é\n", "b\n"]
            assert [case["verdict"] for case in results[2]["cases"]] == ["passed", "crash"]
            assert (results[2]["passed"], results[3]["stdout"]) == (False, "5\n")
            whole = {"Accept": "application/json"}
            async with http.post(f"{url}/run_code", json={"programs": programs[1:2]}, headers=whole) as answer:
                assert [one["stdout"] for one in (await answer.json())["results"]] == ["b\n"]
            for body, status, named in [
                (b"{", 400, "JSON"),
                (b"[]", 422, "programs"),
                (b'{"programs": [{"source": 1}]}', 422, "programs[0].source"),
                (b'{"programs": [{"source": "x", "limits": {"wall": "a"}}]}', 422, "programs[0].limits.wall"),
                (b'{"programs": [], "limits": {"wall": 9999}}', 422, "limits.wall"),
                (b'{"programs": [], "more": 1}', 422, "more"),
                (json.dumps({"programs": [{"source": "x"}] * 9}).encode(), 422, " 8 "),
            ]:
                async with http.post(f"{url}/run_code", data=body) as answer:
                    assert answer.status == status, (body, await answer.text())
                    assert named in (await answer.json())["error"]["message"]
            async with http.get(f"{url}/run_code") as answer:
                assert (answer.status, answer.headers["Allow"]) == (405, "POST")
            async with http.get(f"{url}/metrics") as answer:
                text = await answer.text()
            assert 'rookery_code_programs_total{status="exited"} 5.0\n' in text
        process.send_signal(signal.SIGTERM)
        done = await wait_for_end(process)
    assert (done.code, done.out, done.err) == (0, "", "")
    assert list((tmp_path / "temp").iterdir()) == []


async def test_disconnected_client_ends_its_programs_and_full_queue_returns_retry_after(
    tmp_path: Path,
) -> None:
    async with (
        serving("--concurrency", "2", "--queue", "4", cwd=tmp_path) as (process, url),
        aiohttp.ClientSession() as http,
    ):
        quick = {"source": "print(1)"}
        async with http.post(f"{url}/run_code", json={"programs": [quick, *[SLEEPS] * 3]}) as mine:
            assert json.loads(await mine.content.readline())["stdout"] == "1\n"
            async with http.post(f"{url}/run_code", json={"programs": [quick] * 2}) as answer:
                assert answer.status == 429
                assert int(answer.headers["Retry-After"]) >= 1
            async with http.post(f"{url}/run_code", json={"programs": [quick]}) as answer:
                assert answer.status == 200
                mine.close()  # both slots are in use: the other program runs when these have ended
                assert json.loads(await answer.content.readline())["stdout"] == "1\n"
        assert (await wait_until_idle(http, url))["status"] == "ok"
        await wait_until_no_programs(process.pid)


async def wait_until_no_programs(pid: int) -> None:
    """Wait until the server has no child process of a program."""
    await wait_until(lambda: not any("time.sleep" in words for words in _commands(pid)))


def _commands(top: int) -> list[str]:
    found, todo = [], [top]
    while todo:
        pid = todo.pop()
        todo += processes.list_children(pid)
        try:
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace"))
        except OSError:
            continue
    return found


@pytest.mark.long
async def test_sigterm_drains_running_programs_and_leaves_nothing(tmp_path: Path) -> None:
    waits = {"source": "import os\nprint('begun', flush=True)\nwhile not os.path.exists('/tmp/never'): pass"}
    async with (
        serving("--drain", "1", "--concurrency", "2", cwd=tmp_path) as (process, url),
        aiohttp.ClientSession() as http,
    ):
        async with http.post(f"{url}/run_code", json={"programs": [{"source": "print(1)"}, waits]}) as answer:
            assert json.loads(await answer.content.readline())["stdout"] == "1\n"
            below = list(processes.list_children(process.pid))
            assert below
            process.send_signal(signal.SIGTERM)
            with pytest.raises(aiohttp.ClientPayloadError):  # the response is cut off, and the client notices
                await answer.content.readline()
        done = await wait_for_end(process)
    assert (done.code, done.err) == (0, "")
    await wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below))
    assert list((tmp_path / "temp").iterdir()) == []


async def test_key_is_required_and_not_printed(tmp_path: Path) -> None:
    key = "a-key-that-nobody-may-see"
    async with serving(cwd=tmp_path, **{KEY_ENV: key}) as (process, url), aiohttp.ClientSession() as http:
        body = {"programs": [{"source": "import os; print(os.environ)"}]}
        for headers, status in [
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            ({"Authorization": f"Bearer {key}"}, 200),
            ({"X-Api-Key": key}, 200),
        ]:
            async with http.post(f"{url}/run_code", json=body, headers=headers) as answer:
                assert answer.status == status
                assert key not in await answer.text()
        async with http.get(f"{url}/metrics") as answer:
            assert answer.status == 401
        async with http.get(f"{url}/healthz") as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGINT)
        done = await wait_for_end(process)
    assert (done.code, key in done.out + done.err) == (0, False)


async def test_invalid_serve_code_options_are_one_sentence(tmp_path: Path) -> None:
    (await rookery("serve-code", "--host", "0.0.0.0", cwd=tmp_path)).assert_refused(KEY_ENV)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        (await rookery("serve-code", "--port", port, cwd=tmp_path)).assert_refused(port)


FOREIGN = [
    {"Host": "evil.example"},
    {"Host": "evil.example:8700"},
    {"Host": "127.0.0.1.evil.example"},
    {"Host": "localhost.evil.example:8700"},
    {"Host": "0.0.0.0:8700"},
    {"Host": "user@127.0.0.1"},
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1.evil.example"},
    {"Host": "localhost:8700", "Origin": "http://evil.example:8700"},
]


@pytest.mark.long
async def test_requests_of_web_pages_are_refused_without_a_key(tmp_path: Path) -> None:
    body = json.dumps({"programs": [{"source": "print(1)"}]}).encode()
    async with serving(cwd=tmp_path) as (_, url), aiohttp.ClientSession() as http:
        for headers in FOREIGN:
            for path in ("/run_code", "/", "/healthz", "/metrics"):
                method = "POST" if path == "/run_code" else "GET"
                async with http.request(method, f"{url}{path}", data=body, headers=headers) as answer:
                    assert answer.status == 403, (headers, path)
        for own in ({}, {"Host": "localhost:1"}, {"Host": "[::1]"}, {"Origin": "http://localhost:3000"}):
            async with http.post(f"{url}/run_code", data=body, headers=own) as answer:
                assert answer.status == 200, own
                await answer.read()
    async with serving(cwd=tmp_path, **{KEY_ENV: "secret"}) as (_, url), aiohttp.ClientSession() as http:
        keyed = {"Authorization": "Bearer secret", "Host": "code.example"}
        async with http.post(f"{url}/run_code", data=body, headers=keyed) as answer:
            assert answer.status == 200
            await answer.read()
