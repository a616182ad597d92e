"""All rollouts that the user asks for have their model calls in flight at the server at the same time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rookery import Context, Engine, Environment, Limits
from rookery.upstreams.protocol import UpstreamConfig
from tests.cli.helpers import rookery

ROLLOUTS = 1024
BODY = (
    b'{"choices":[{"finish_reason":"stop","message":{"role":"assistant","content":"ok"}}],'
    b'"usage":{"prompt_tokens":1,"completion_tokens":1}}'
)
REPLY = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)
IN_PROCESS = f"""
from rookery import Context, environment

@environment(tasks=[{{"prompt": "hello"}}] * {ROLLOUTS})
async def one_call(ctx: Context) -> float:
    await ctx.policy.chat(ctx.task.prompt)
    return 1.0
"""
OVER_HTTP = f"""
import aiohttp
from rookery import Context, environment

@environment(tasks=[{{"prompt": "hello"}}] * {ROLLOUTS}, needs_gateway="the call over HTTP")
async def one_call(ctx: Context) -> float:
    async with ctx.gateway_session() as session, aiohttp.ClientSession() as http:
        body = {{"messages": [{{"role": "user", "content": "hello"}}]}}
        headers = {{"Authorization": f"Bearer {{session.key}}"}}
        timeout = aiohttp.ClientTimeout(None)
        async with http.post(
            f"{{session.openai_url}}/chat/completions", json=body, headers=headers, timeout=timeout
        ) as answer:
            return float(answer.status == 200)
"""


class OneCall(Environment):
    """Make one model call per rollout."""

    name = "one-call"

    async def run(self, ctx: Context) -> None:
        await ctx.policy.chat("hello")

    async def score(self, ctx: Context) -> float:
        return 1.0


class PatientServer:
    """Model server that answers no call before `ROLLOUTS` calls are in flight."""

    def __init__(self) -> None:
        self.url = ""
        self.peak = 0
        self._in_flight = 0
        self._all_arrived = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET"):
                    writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
                    continue
                length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(length))
                self._in_flight += 1
                self.peak = max(self.peak, self._in_flight)
                if self._in_flight == ROLLOUTS:
                    self._all_arrived.set()
                await self._all_arrived.wait()
                writer.write(REPLY)
                self._in_flight -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


@asynccontextmanager
async def patient_server() -> AsyncIterator[PatientServer]:
    model = PatientServer()
    server = await asyncio.start_server(model.serve, "127.0.0.1", 0, backlog=ROLLOUTS)
    async with server:
        model.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        yield model


@pytest.mark.long
async def test_1024_rollouts_have_1024_calls_in_flight_at_the_server(tmp_path: Path) -> None:
    async with (
        patient_server() as model,
        Engine(
            OneCall(),
            policy=UpstreamConfig(urls=(model.url,), model="m"),
            out=tmp_path / "runs",
            runners=0,
            concurrency=ROLLOUTS,
            record="plain",
            limits=Limits(run=300.0),
        ) as engine,
    ):
        tasks = [{"prompt": f"hello {number}"} for number in range(ROLLOUTS)]
        groups = [group async for group in engine.groups(tasks, k=1)]
    assert model.peak == ROLLOUTS
    assert len(groups) == ROLLOUTS


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("program", [IN_PROCESS, OVER_HTTP], ids=["in-process", "over-http"])
async def test_rookery_run_with_1024_rollouts_has_1024_calls_in_flight_at_the_server(
    program: str, tmp_path: Path
) -> None:
    (tmp_path / "one_call.py").write_text(program)
    async with patient_server() as model:
        options = ("--policy", model.url, "--model", "m", "--record", "plain", "-c", str(ROLLOUTS))
        done = await rookery("run", "one_call.py", *options, "--runners", "2", cwd=tmp_path, seconds=500)
    assert done.code == 0, done.err
    assert model.peak == ROLLOUTS
