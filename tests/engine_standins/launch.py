"""Start a stand-in engine in the test's process or in a process that can be killed.

By default a stand-in loads small random weights, created once per test process, which generate long replies;
`weights=None` loads the bundled policy, which generates readable text.
"""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal

import aiohttp
import orjson

from rookery.upstreams import UpstreamConfig
from rookery.upstreams.embedded import EmbeddedUpstream, Weights
from rookery.upstreams.embedded.batch import SamplingJob
from rookery.upstreams.embedded.http_server import run_server
from rookery.upstreams.embedded.weights import LlamaShape
from tests.engine_standins.base import Standin
from tests.engine_standins.batch import StandinThread
from tests.engine_standins.sglang import SGLangStandin
from tests.engine_standins.vllm import VLLMStandin
from tests.waiting import wait_until

EngineName = Literal["vllm", "sglang"]
ENGINES: dict[str, type[Standin]] = {"vllm": VLLMStandin, "sglang": SGLangStandin}
ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
SHAPE = LlamaShape(
    vocab_size=272,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=1024,
)


def open_policy(weights: Path | str | None, slots: int) -> EmbeddedUpstream:
    url = f"embedded:{weights}" if weights is not None else "embedded"
    upstream = EmbeddedUpstream(UpstreamConfig(kind="embedded", urls=(url,), concurrency=slots))
    upstream.service = StandinThread(upstream.service.llama, slots=upstream.slots)
    return upstream


@cache
def small_weights(seed: int = 1, version: int = 1) -> Path:
    """Return a file of random weights, determined by the seed and deleted when the test process exits."""
    folder = _folder()
    path = Path(folder.name) / f"random-{seed}-{version}.safetensors"
    Weights.random(SHAPE, seed=seed, scale=0.2, version=version).save(path)
    return path


@cache
def _folder() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="standin-weights-")


class StandinServer:
    """A running stand-in and an HTTP client for it."""

    def __init__(
        self, engine: EngineName, root: str, http: aiohttp.ClientSession, *, inside: Standin | None, pid: int
    ):
        self.engine_name = engine
        self.root = root
        """Base URL of the server, `http://127.0.0.1:PORT`."""
        self.url = f"{root}/v1"
        self.http = http
        self.standin = inside
        """The server object if it runs in this process, with `engine`, `faults` and `requests`; else None."""
        self.pid = pid
        self.log: Path | None = None

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(self.root + path) as response:
            return response.status, _read(await response.read())

    async def post(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Return status and decoded body. A `bytes` body is sent unchanged."""
        data = body if isinstance(body, bytes) else None if body is None else orjson.dumps(body)
        headers = {"Content-Type": "application/json", **headers}
        async with self.http.post(self.root + path, data=data, headers=headers) as response:
            return response.status, _read(await response.read())

    async def events(self, path: str, body: Any, **headers: str) -> list[Any]:
        """Return the events of a stream, which must be complete; the last is `"[DONE]"`."""
        async with self.http.post(self.root + path, json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            pieces = (await response.read()).split(b"\n\n")
        assert pieces.pop() == b""
        assert all(piece.startswith(b"data: ") for piece in pieces)
        found = [piece.removeprefix(b"data: ") for piece in pieces]
        assert found[-1] == b"[DONE]"
        return [*(orjson.loads(piece) for piece in found[:-1]), "[DONE]"]

    async def fault(self, **fields: Any) -> None:
        """Inject a fault; the fields are those of `Fault`."""
        status, body = await self.post("/standin/faults", fields)
        assert status == 200, body

    async def requests(self) -> list[dict[str, Any]]:
        """Return path and body of the last requests."""
        return list((await self.get("/standin/requests"))[1]["requests"])

    async def running(self) -> tuple[int, int]:
        """Return the number of running and of queued sequences, from the engine's metrics."""
        running, waiting, *_ = ENGINES[self.engine_name].metrics
        _, text = await self.get("/metrics")
        found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        figures = {name.partition("{")[0]: int(float(value)) for name, value in found.items()}
        return figures[running], figures[waiting]

    async def until(self, running: int, waiting: int = 0) -> None:
        """Wait until the engine reports these numbers of running and queued sequences."""

        async def reached() -> bool:
            return await self.running() == (running, waiting)

        await wait_until(reached)

    async def until_busy(self) -> None:
        """Wait until the engine reports a running sequence."""

        async def busy() -> bool:
            return (await self.running())[0] > 0

        await wait_until(busy)

    @contextmanager
    def freezing(self, tokens: int) -> Iterator[None]:
        """Freeze the engine, as a pause in mode `keep` does, when a sequence has exactly `tokens` tokens.

        Only for a stand-in in the test's own process. `frozen` waits for it; a resume request ends it.
        """
        assert self.standin is not None
        batch = self.standin.engine.service.standin_batch
        step = batch.step

        def step_and_freeze() -> list[SamplingJob]:
            jobs = step()
            if any(len(job.tokens) == tokens for job in jobs):
                batch.gate = "frozen"
            return jobs

        batch.step = step_and_freeze  # type: ignore[method-assign]
        try:
            yield
        finally:
            batch.step = step  # type: ignore[method-assign]

    async def frozen(self, tokens: int) -> None:
        """Wait until a sequence has `tokens` tokens."""
        assert self.standin is not None
        live = self.standin.engine.live
        await wait_until(lambda: any(job.reported == tokens for jobs in live.values() for job in jobs))

    def kill(self) -> None:
        """Send SIGKILL to the stand-in's process."""
        assert self.pid != os.getpid(), "this stand-in runs in the test's own process"
        os.kill(self.pid, signal.SIGKILL)


def _read(data: bytes) -> Any:
    try:
        return orjson.loads(data) if data else None
    except orjson.JSONDecodeError:
        return data.decode("utf-8", "replace")


@asynccontextmanager
async def standin(
    engine: EngineName, *, weights: Path | str | None = "small", slots: int = 64, **options: Any
) -> AsyncIterator[StandinServer]:
    """Start a stand-in in this process, on a free port."""
    path = small_weights() if weights == "small" else weights
    upstream = open_policy(path, slots)
    try:
        inside = ENGINES[engine](upstream, **options)
        async with run_server(inside, grace=0.1) as url, aiohttp.ClientSession() as http:
            yield StandinServer(engine, url.removesuffix("/v1"), http, inside=inside, pid=os.getpid())
    finally:
        await upstream.close()


@asynccontextmanager
async def standin_process(
    engine: EngineName, *, weights: Path | str | None = "small", slots: int = 64, port: int = 0
) -> AsyncIterator[StandinServer]:
    """Start a stand-in in a subprocess. It logs its requests to the file `server.log`."""
    path = small_weights() if weights == "small" else weights
    with tempfile.TemporaryDirectory(prefix="standin-") as folder:
        log = Path(folder) / "requests.jsonl"
        command = [sys.executable, "-m", "tests.engine_standins", engine, "--port", str(port)]
        command += ["--slots", str(slots), "--log-requests", str(log)]
        command += ["--weights", str(path)] if path is not None else []
        env = os.environ | {"PYTHONPATH": f"{SRC}{os.pathsep}{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        process = await asyncio.create_subprocess_exec(*command, env=env, stdout=asyncio.subprocess.PIPE)
        try:
            assert process.stdout is not None
            async with asyncio.timeout(60):
                line = (await process.stdout.readline()).decode()
            assert " at http://" in line, line
            root = line.rsplit(" at ", 1)[1].strip().removesuffix("/v1")
            async with aiohttp.ClientSession() as http:
                server = StandinServer(engine, root, http, inside=None, pid=process.pid)
                server.log = log
                yield server
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
