"""`rookery gateway` as a process: sessions, signals and invalid input."""

import asyncio
import os
import re
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import click
import openai
import pytest

from rookery.cli.gateway import KEY_ENV
from rookery.cli.gateway import gateway as command
from rookery.sandbox_runtime import processes
from tests.cli.helpers import rookery, start_command, wait_for_end
from tests.servers import Answer, ModelServer

ROOT = Path(__file__).parents[2]
HI: Any = [{"role": "user", "content": "hi"}]
OWN_KEY = "an-admin-key-of-our-own"


@asynccontextmanager
async def serving(*args: str | Path, cwd: Path, **env: str) -> AsyncIterator[tuple[Any, str, str]]:
    """Start the gateway; yield its process, its URL and its generated admin key, if any."""
    temp = cwd / "temp"
    temp.mkdir(exist_ok=True)
    async with start_command("gateway", *args, "--port", "0", cwd=cwd, TMPDIR=str(temp), **env) as process:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            line = (await process.stdout.readline()).decode()
            found = re.search(r"(http://127\.0\.0\.1:\d+)\b", line)
            assert found, line
            key = ""
            if KEY_ENV not in env:
                line = (await process.stdout.readline()).decode()
                match = re.search(rf"\s(\S{{32}})\s.*\b{KEY_ENV}\b", line)
                assert match, line
                key = match[1]
        yield process, found[1], key


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def create_session(url: str, key: str, **wish: Any) -> dict[str, str]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/rollouts", json=wish, headers={"Authorization": f"Bearer {key}"}) as answer,
    ):
        assert answer.status == 201, await answer.text()
        found: dict[str, str] = await answer.json()
        return found


def open_client(session: dict[str, str]) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=session["base_url"], api_key=session["secret"], max_retries=0)


# ---- serving


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
async def test_printed_admin_key_works_and_a_signal_ends_the_gateway(
    number: signal.Signals, server: ModelServer, tmp_path: Path
) -> None:
    args = ("--upstream", server.url, "--model", "m", "--record", "plain", "--shards", "2")
    async with serving(*args, cwd=tmp_path) as (process, url, key):
        session = await create_session(url, key, id="a")
        async with open_client(session) as api:
            answer = await api.chat.completions.create(model="m", messages=HI)
            assert answer.choices[0].message.content == "42"
        shards = processes.list_children(process.pid)
        assert len(shards) == 2
        for pid in shards:  # neither arguments nor environment contain the admin key
            assert key.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
            assert key.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
        process.send_signal(number)
        done = await wait_for_end(process)
        assert (done.code, done.out, done.err) == (0, "", "")
        assert not any(map(alive, shards))
    assert list((tmp_path / "temp").iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["temp"]


@pytest.mark.long
async def test_signal_ends_the_gateway_during_hanging_calls(server: ModelServer, tmp_path: Path) -> None:
    server.default = Answer(hold=asyncio.Event())
    async with serving("--upstream", server.url, "--record", "plain", cwd=tmp_path) as (process, url, key):
        async with open_client(await create_session(url, key)) as api:
            call = asyncio.create_task(api.chat.completions.create(model="m", messages=HI, stream=True))
            await server.wait_for_requests(1)
            began = asyncio.get_running_loop().time()
            process.send_signal(signal.SIGTERM)
            done = await wait_for_end(process)
            with pytest.raises(openai.APIError):
                await call
        assert asyncio.get_running_loop().time() - began < 30
        assert (done.code, done.out) == (0, "")
        assert "Traceback" not in done.err
    await server.wait_for_disconnects(1)


@pytest.mark.long
async def test_admin_key_from_the_environment_is_not_printed(server: ModelServer, tmp_path: Path) -> None:
    args = ("--upstream", server.url, "--record", "plain")
    async with serving(*args, cwd=tmp_path, ROOKERY_GATEWAY_KEY=OWN_KEY) as (process, url, _):
        session = await create_session(url, OWN_KEY)
        async with aiohttp.ClientSession() as http:
            for key in ("", "wrong", session["secret"]):
                headers = {"Authorization": f"Bearer {key}"}
                async with http.get(f"{url}/rollouts", headers=headers) as answer:
                    assert answer.status == 401
                    assert OWN_KEY not in await answer.text()
        process.send_signal(signal.SIGTERM)
        done = await wait_for_end(process)
    assert (done.code, done.out) == (0, "")
    assert OWN_KEY not in done.err


@pytest.mark.long
async def test_sessions_in_a_directory_survive_a_restart(server: ModelServer, tmp_path: Path) -> None:
    args = ("--upstream", server.url, "--record", "plain", "--folder", tmp_path / "kept")
    session: dict[str, str] = {}
    for life in range(2):
        more = ("--shards", str(1 + life))
        async with serving(*args, *more, cwd=tmp_path, ROOKERY_GATEWAY_KEY=OWN_KEY) as (process, url, _):
            session = session or await create_session(url, OWN_KEY, id="a")
            async with open_client(session | {"base_url": f"{url}/v1/rollouts/a"}) as api:
                await api.chat.completions.create(model="m", messages=HI)
            headers = {"Authorization": f"Bearer {OWN_KEY}"}
            async with aiohttp.ClientSession() as http, http.get(f"{url}/rollouts/a", headers=headers) as answer:
                assert (await answer.json())["turns_recorded"] == life + 1
            process.send_signal(signal.SIGTERM)
            assert (await wait_for_end(process)).code == 0


@pytest.mark.long
async def test_gateway_records_tokens_of_the_embedded_policy(tmp_path: Path) -> None:
    args = (
        "--upstream",
        "embedded",
        "--record",
        "tokens",
        "--renderer",
        "embedded",
        "--public-url",
        "http://there/",
    )
    async with serving(*args, cwd=tmp_path) as (process, url, key):
        session = await create_session(url, key, id="a")
        assert session["base_url"] == "http://there/v1/rollouts/a"
        async with open_client(session | {"base_url": f"{url}/v1/rollouts/a"}) as api:
            await api.chat.completions.create(model="policy", messages=HI, max_tokens=4)
        headers = {"Authorization": f"Bearer {key}"}
        where = f"{url}/rollouts/a/trajectory"
        async with aiohttp.ClientSession() as http, http.get(where, headers=headers) as answer:
            (turn,) = (await answer.json())["turns"]
        assert len(turn["sampled"]) == len(turn["logprobs"]) > 0
        assert turn["prompt"]
        process.send_signal(signal.SIGINT)
        assert (await wait_for_end(process)).code == 0


@pytest.mark.long
async def test_each_role_has_its_own_model(server: ModelServer, tmp_path: Path) -> None:
    async with ModelServer("I judge") as judge:
        args = ("--upstream", server.url, "--record", "plain", "--role", f"judge={judge.url}")
        async with serving(*args, cwd=tmp_path) as (process, url, key):
            async with open_client(await create_session(url, key)) as api:
                for model, text in (("judge", "I judge"), ("policy", "42")):
                    answer = await api.chat.completions.create(model=model, messages=HI)
                    assert answer.choices[0].message.content == text
            process.send_signal(signal.SIGINT)
            assert (await wait_for_end(process)).code == 0


# ---- invalid input

URL = ("--upstream", "http://127.0.0.1:1")


@pytest.mark.long
@pytest.mark.parametrize(
    ("args", "named"),
    [
        ((), "'--upstream'"),
        ((*URL, "--kind", "tgi"), "'tgi'"),
        (("--upstream", "localhost:8000"), "localhost:8000"),
        (("--upstream", "ftp://x"), "ftp://x"),
        (("--upstream", "embedded", "--kind", "vllm"), "http://"),
        (("--upstream", "embedded:nowhere"), "nowhere"),
        ((*URL, "--port", "70000"), "65535"),
        ((*URL, "--shards", "0"), "256"),
        ((*URL, "--shards", "many"), "'many'"),
        ((*URL, "--concurrency", "0"), "--concurrency"),
        ((*URL, "--host", "no such host"), "no such host"),
        ((*URL, "--record", "all"), "'all'"),
        ((*URL, "--record", "tokens"), "--tokenizer"),
        ((*URL, "--record", "tokens", "--renderer", "nope"), "'nope'"),
        ((*URL, "--record", "tokens", "--renderer", "qwen3"), "tokenizer"),
        ((*URL, "--record", "tokens", "--tokenizer", "nowhere"), "'nowhere'"),
        ((*URL, "--record", "tokens", "--tool-parser", "hermes"), "tokenizer"),
        ((*URL, "--tokenizer", "x"), "--tokenizer"),
        ((*URL, "--renderer", "embedded"), "--renderer"),
        ((*URL, "--tool-parser", "hermes"), "--tool-parser"),
        ((*URL, "--reasoning-parser", "x"), "--reasoning-parser"),
        ((*URL, "--role", "judge"), "NAME=URL"),
        ((*URL, "--role", "=http://x"), "NAME=URL"),
        ((*URL, "--role", "judge="), "NAME=URL"),
        ((*URL, "--role", "policy=http://x"), "NAME=URL"),
        ((*URL, "--role", "a=http://x", "--role", "a=http://y"), "NAME=URL"),
        ((*URL, "--role", "judge=x"), "http://"),
        ((*URL, "--public-url", "there"), "http://"),
        ((*URL, "extra"), "extra"),
    ],
)
async def test_invalid_server_options_are_one_sentence_and_exit_code_2(
    args: tuple[str, ...], named: str, tmp_path: Path
) -> None:
    port = () if "--port" in args else ("--port", "0")
    done = await rookery("gateway", *args, *port, cwd=tmp_path, TMPDIR=str(tmp_path))
    done.assert_refused(named)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
async def test_port_in_use_and_invalid_directory_are_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = await rookery("gateway", *URL, "--port", port, cwd=tmp_path, TMPDIR=str(tmp_path))
        done.assert_refused("127.0.0.1", port)
    (tmp_path / "file").touch()
    done = await rookery("gateway", *URL, "--port", "0", "--folder", "file", cwd=tmp_path, TMPDIR=str(tmp_path))
    done.assert_refused(" file")
    assert os.listdir(tmp_path) == ["file"]


# ---- help and docs


async def test_help_names_every_option_and_variable(tmp_path: Path) -> None:
    done = await rookery("gateway", "--help", cwd=tmp_path)
    for parameter in command.params:
        assert isinstance(parameter, click.Option)
        assert parameter.opts[0] in done.out
        assert parameter.help, parameter.opts
    for name in (KEY_ENV, "ROOKERY_API_KEY", "OPENAI_API_KEY", "POST /rollouts"):
        assert name in done.out


def test_docs_list_every_option_of_the_gateway() -> None:
    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    (section,) = re.findall(r"^## rookery gateway\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    rows = "\n".join(line for line in section.splitlines() if line.startswith("|"))
    match = set(re.findall(r"`(--[a-z-]+)", rows))
    assert match == {option for parameter in command.params for option in parameter.opts}
    assert f"`{KEY_ENV}`" in section
