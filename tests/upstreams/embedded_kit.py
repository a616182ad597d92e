"""Run a real server of the embedded policy with small random weights on a loopback port."""

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from rookery.upstreams import UpstreamConfig
from rookery.upstreams.embedded import EmbeddedUpstream, Weights
from rookery.upstreams.embedded.server import EmbeddedServer, run_server
from rookery.upstreams.embedded.upstream import PreparedRequest
from rookery.upstreams.protocol import ModelRequest
from tests.upstreams.embedded_reference import SMALL
from tests.waiting import wait_until

CONTEXT = SMALL.max_position_embeddings


def random_weights(path: Path, *, seed: int = 1, version: int = 1) -> Path:
    Weights.random(SMALL, seed=seed, scale=0.2, version=version).save(path)
    return path


class LiveServer:
    """A running server and the requests that its model received."""

    def __init__(self, server: EmbeddedServer, url: str, http: aiohttp.ClientSession) -> None:
        self.embedded = server
        self.upstream = server.upstream
        self.url = url
        self.root = url.removesuffix("/v1")
        self.http = http
        self.prepared_requests: list[PreparedRequest] = []
        prepare = self.upstream.prepare

        def record_request(request: ModelRequest) -> PreparedRequest:
            self.prepared_requests.append(prepare(request))
            return self.prepared_requests[-1]

        self.upstream.prepare = record_request  # type: ignore[method-assign]

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        headers = {"Content-Type": "application/json", **headers}
        async with self.http.post(
            path if "://" in path else self.url + path, data=data, headers=headers
        ) as answer:
            return answer.status, orjson.loads(await answer.read()), answer.headers

    async def ask(self, **fields: Any) -> Any:
        """Request one chat completion, which must succeed."""
        status, body, _ = await self.post("/chat/completions", {"messages": HI, **fields})
        assert status == 200, body
        return body

    async def chunks(self, path: str = "/chat/completions", **fields: Any) -> list[Any]:
        """Return the events of a stream, which must end with [DONE]."""
        body = {"messages": HI, "stream": True, **fields}
        async with self.http.post(self.url + path, json=body) as answer:
            assert answer.status == 200, await answer.text()
            assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            text = (await answer.read()).decode()
        events = text.split("\n\n")
        assert all(event.startswith("data: ") for event in events[:-1])
        assert events[-2:] == ["data: [DONE]", ""]
        return [orjson.loads(event.removeprefix("data: ")) for event in events[:-2]]

    async def health(self) -> tuple[int, int]:
        async with self.http.get(f"{self.root}/health") as answer:
            body = orjson.loads(await answer.read())
        return body["running"], body["waiting"]

    async def until(self, running: int, waiting: int) -> None:
        async def reached() -> bool:
            return await self.health() == (running, waiting)

        await wait_until(reached)


HI: Any = [{"role": "user", "content": "What is 7 + 5?"}]


@asynccontextmanager
async def serving(
    weights: Path, *, slots: int = 64, host: str = "127.0.0.1", **options: Any
) -> AsyncIterator[LiveServer]:
    upstream = EmbeddedUpstream(UpstreamConfig(urls=(f"embedded:{weights}",), concurrency=slots))
    try:
        server = EmbeddedServer(upstream, **options)
        async with run_server(server, host) as url, aiohttp.ClientSession() as http:
            yield LiveServer(server, url, http)
    finally:
        await upstream.close()


class Gate:
    """Let the current batch run its steps one by one."""

    def __init__(self, upstream: EmbeddedUpstream) -> None:
        self._batch = upstream.service.batch
        self._steps = threading.Semaphore(0)
        self._open = False
        step = self._batch.step

        def gated() -> Any:
            if not self._open:
                self._steps.acquire()
            return step()

        self._batch.step = gated  # type: ignore[method-assign]

    def step(self) -> None:
        self._steps.release()

    def open(self) -> None:
        self._open = True
        self._steps.release()


@contextmanager
def gated(upstream: EmbeddedUpstream) -> Iterator[Gate]:
    gate = Gate(upstream)
    try:
        yield gate
    finally:
        gate.open()
