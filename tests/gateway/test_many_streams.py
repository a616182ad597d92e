"""5,000 concurrent streams through one shard are complete and recorded in bounded memory despite slow readers."""

import asyncio
import json
import resource
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rookery.gateway.config import GatewayConfig
from rookery.gateway.shards import Gateway
from rookery.upstreams.protocol import UpstreamConfig
from tests.gateway.shard_kit import KEY
from tests.waiting import wait_until

STREAMS = 5_000
SLOW, LATE = 40, 2
"""Clients that stop reading for a while; the last LATE of them read on afterwards, the others disconnect."""
SMALL, LARGE = 100, 24 << 20
SESSIONS = 100
MOST = 500 << 20
"""Limit on the memory of the shard: about half of what it would need to buffer for the slow readers."""


@pytest.fixture
def descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * STREAMS + 500:
        pytest.skip(f"[probed] a process may have {hard} descriptors here; the shard needs two for each stream")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, STREAMS + 500), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@asynccontextmanager
async def run_barrier_upstream() -> AsyncIterator[str]:
    program = Path(__file__).with_name("barrier_upstream.py")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(program), str(STREAMS)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(await process.stdout.readline())}"
    finally:
        process.stdin.close()
        await process.wait()


def memory(pid: int, what: str) -> int:
    """Return a memory figure of a process in bytes: `VmRSS` is the current one, `VmHWM` the peak."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what))


class Client(asyncio.Protocol):
    """Client of one stream that keeps everything it receives."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._kept: list[bytes] = []
        self._size = 0
        self._tail = b""
        self.transport: asyncio.Transport | None = None
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = loop.create_future()
        self.done: asyncio.Future[bytes] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._kept.append(data)
        self._tail = (self._tail + data)[-64:]
        if not self.begun.done():
            self.begun.set_result(None)
        if self._tail.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and not self.done.done():
            self.done.set_result(b"".join(self._kept))

    def connection_lost(self, error: Exception | None) -> None:
        for waiting in (self.begun, self.done):
            if not waiting.done():
                waiting.set_exception(error or ConnectionResetError("the stream was cut"))


def text_of(answer: bytes) -> str:
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), head
    assert b"text/event-stream" in head
    body = bytearray()
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    events = body.removesuffix(b"\n\n").split(b"\n\n")
    assert events.pop() == b"data: [DONE]"
    choices = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events]
    assert [choice["finish_reason"] for choice in choices][-1] == "stop"
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@pytest.mark.long
@pytest.mark.usefixtures("descriptors")
async def test_5000_concurrent_streams_are_complete_despite_slow_readers() -> None:
    loop = asyncio.get_running_loop()
    async with run_barrier_upstream() as url:
        policy = UpstreamConfig(kind="openai", urls=(url,), model="m", concurrency=STREAMS + 100)
        config = GatewayConfig(upstreams={"policy": policy}, record="plain")
        async with Gateway(config, key=KEY) as gateway:
            host, _, port = gateway.url.removeprefix("http://").partition(":")
            registrations = [await gateway.register({"id": f"s{n}"}) for n in range(SESSIONS)]
            opening = asyncio.Semaphore(256)

            async def open_stream(number: int) -> Client:
                registration = registrations[number % SESSIONS]
                size = LARGE if number < SLOW else SMALL
                messages = [{"role": "user", "content": f"{number} {size}"}]
                body = json.dumps({"model": "m", "stream": True, "messages": messages}).encode()
                head = (
                    f"POST /v1/rollouts/{registration['id']}/chat/completions HTTP/1.1\r\nHost: {host}\r\n"
                    f"Authorization: Bearer {registration['secret']}\r\nContent-Length: {len(body)}\r\n\r\n"
                )
                async with opening:
                    sock = socket.socket()
                    sock.setblocking(False)
                    if number < SLOW:
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
                    await loop.sock_connect(sock, (host, int(port)))
                    _, client = await loop.create_connection(lambda: Client(head.encode() + body), sock=sock)
                    if number < SLOW:
                        # Read the first chunk and nothing after it.
                        await client.begun
                        assert client.transport is not None
                        client.transport.pause_reading()
                return client

            before = memory(gateway.pids()[0], "VmRSS")
            clients = await asyncio.gather(*map(open_stream, range(STREAMS)))
            fast = await asyncio.gather(*(client.done for client in clients[SLOW:]))
            for number, answer in enumerate(fast, start=SLOW):
                assert text_of(answer) == f"{number}:" + "x" * SMALL
            stuck = [client for client in clients[:SLOW] if not client.done.done()]
            assert len(stuck) == SLOW
            peak = memory(gateway.pids()[0], "VmHWM")
            for client in stuck[:-LATE]:
                assert client.transport is not None
                client.transport.abort()
            for client in stuck[-LATE:]:
                assert client.transport is not None
                client.transport.resume_reading()
            late = await asyncio.gather(*(client.done for client in stuck[-LATE:]))
            for number, answer in enumerate(late, start=SLOW - LATE):
                assert text_of(answer) == f"{number}:" + "x" * LARGE
            for client in stuck[:-LATE]:
                with pytest.raises(ConnectionError):
                    await client.done
            for client in clients:
                assert client.transport is not None
                client.transport.abort()

            # A disconnected stream becomes a partial turn once the gateway has noticed.
            async def count_turns() -> int:
                shown = (await gateway.request("GET", "/rollouts"))["rollouts"]
                recorded = sum(one["turns_recorded"] for one in shown)
                return recorded if recorded >= STREAMS else 0

            assert await wait_until(count_turns) == STREAMS
            assert gateway.restarts == 0
            print(f"the shard: {before >> 20} MiB before, {peak >> 20} MiB at its highest")
            assert peak - before < MOST
