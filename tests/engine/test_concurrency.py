"""All rollouts that the user asks for have their model calls in flight at the server at the same time."""

import asyncio
from pathlib import Path

import pytest

from rookery import Context, Engine, Environment, Limits
from rookery.upstreams.protocol import UpstreamConfig

ROLLOUTS = 1024
BODY = (
    b'{"choices":[{"finish_reason":"stop","message":{"role":"assistant","content":"ok"}}],'
    b'"usage":{"prompt_tokens":1,"completion_tokens":1}}'
)
REPLY = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)


class OneCall(Environment):
    """Make one model call per rollout."""

    name = "one-call"

    async def run(self, ctx: Context) -> None:
        await ctx.policy.chat("hello")

    async def score(self, ctx: Context) -> float:
        return 1.0


@pytest.mark.long
async def test_1024_rollouts_have_1024_calls_in_flight_at_the_server(tmp_path: Path) -> None:
    in_flight = peak = 0
    all_arrived = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal in_flight, peak
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET"):
                    writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
                    continue
                length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(length))
                in_flight += 1
                peak = max(peak, in_flight)
                if in_flight == ROLLOUTS:
                    all_arrived.set()
                await all_arrived.wait()
                writer.write(REPLY)
                in_flight -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=ROLLOUTS)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    async with (
        server,
        Engine(
            OneCall(),
            policy=UpstreamConfig(urls=(url,), model="m"),
            out=tmp_path / "runs",
            runners=0,
            concurrency=ROLLOUTS,
            record="plain",
            limits=Limits(run=300.0),
        ) as engine,
    ):
        tasks = [{"prompt": f"hello {number}"} for number in range(ROLLOUTS)]
        groups = [group async for group in engine.groups(tasks, k=1)]
    assert peak == ROLLOUTS
    assert len(groups) == ROLLOUTS
