"""Stand-ins for vLLM and SGLang, for tests: in this process, or as one of its own that can be killed.

    async with standin("vllm") as server:
        ... server.url, server.root, server.requests
        await server.fault(after_bytes=1000)             # the next request's answer ends after so many bytes
        await server.post("/pause?mode=keep")
        with server.freezing(10): ...                    # freeze exactly there, to pause without a race

    async with standin_process("sglang") as server:      # a process: server.pid, server.kill()
        ...

Weights: by default small random ones, made once per test process, that answer at length; `weights=None` takes the
policy that comes along, which answers in words.
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
from rookery.upstreams.embedded.batch import Job
from rookery.upstreams.embedded.serving import listening
from rookery.upstreams.embedded.standins import SPEAKS, Standin
from rookery.upstreams.embedded.weights import LlamaShape

Speaks = Literal["vllm", "sglang"]
SRC = Path(__file__).resolve().parent.parent / "src"
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


@cache
def small_weights(seed: int = 1, version: int = 1) -> Path:
    """A file of random weights, the same for the same seed. It goes with the test process."""
    folder = _folder()
    path = Path(folder.name) / f"random-{seed}-{version}.safetensors"
    Weights.random(SHAPE, seed=seed, scale=0.2, version=version).save(path)
    return path


@cache
def _folder() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="standin-weights-")


class StandinServer:
    """A stand-in under way."""

    def __init__(
        self, speaks: Speaks, root: str, http: aiohttp.ClientSession, *, inside: Standin | None, pid: int
    ):
        self.speaks = speaks
        self.root = root
        """`http://127.0.0.1:PORT`."""
        self.url = f"{root}/v1"
        self.http = http
        self.standin = inside
        """The server itself, where it is in this process: its `engine`, `faults`, `requests`."""
        self.pid = pid
        self.log: Path | None = None

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(self.root + path) as answer:
            return answer.status, _read(await answer.read())

    async def post(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Status and body; bytes are sent as they are."""
        data = body if isinstance(body, bytes) else None if body is None else orjson.dumps(body)
        headers = {"Content-Type": "application/json", **headers}
        async with self.http.post(self.root + path, data=data, headers=headers) as answer:
            return answer.status, _read(await answer.read())

    async def events(self, path: str, body: Any, **headers: str) -> list[Any]:
        """The events of a stream that must be whole; the last is `"[DONE]"`."""
        async with self.http.post(self.root + path, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            pieces = (await answer.read()).split(b"\n\n")
        assert pieces.pop() == b""
        assert all(piece.startswith(b"data: ") for piece in pieces)
        found = [piece.removeprefix(b"data: ") for piece in pieces]
        assert found[-1] == b"[DONE]"
        return [*(orjson.loads(piece) for piece in found[:-1]), "[DONE]"]

    async def fault(self, **fields: Any) -> None:
        """As `Fault` of the stand-ins: count, path, status, refuse, after_bytes, after_events, then, …"""
        status, said = await self.post("/standin/faults", fields)
        assert status == 200, said

    async def requests(self) -> list[dict[str, Any]]:
        """What was asked so far: method, path, query, headers, body."""
        return list((await self.get("/standin/requests"))[1]["requests"])

    async def running(self) -> tuple[int, int]:
        """Sequences under way, and those that wait."""
        names = {
            "vllm": ("vllm:num_requests_running", "vllm:num_requests_waiting"),
            "sglang": ("sglang:num_running_reqs", "sglang:num_queue_reqs"),
        }[self.speaks]
        _, text = await self.get("/metrics")
        found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        figures = {name.partition("{")[0]: int(float(value)) for name, value in found.items()}
        return figures[names[0]], figures[names[1]]

    async def until(self, running: int, waiting: int = 0) -> None:
        """Waits for so many."""
        async with asyncio.timeout(60):
            while await self.running() != (running, waiting):
                await asyncio.sleep(0.005)

    @contextmanager
    def freezing(self, tokens: int) -> Iterator[None]:
        """In this process: the engine freezes by itself when a sequence has so many tokens, as a `keep` does, so
        that no test races with it. `frozen` waits for that; a resume ends it."""
        assert self.standin is not None
        batch = self.standin.engine.service._batch
        step = batch.step

        def stepped() -> list[Job]:
            jobs = step()
            if any(len(job.tokens) == tokens for job in jobs):
                batch.gate = "frozen"
            return jobs

        batch.step = stepped  # type: ignore[method-assign]
        try:
            yield
        finally:
            batch.step = step  # type: ignore[method-assign]

    async def frozen(self, tokens: int) -> None:
        """Waits until a sequence has so many tokens."""
        assert self.standin is not None
        engine = self.standin.engine
        try:
            async with asyncio.timeout(60):
                while not any(job.told == tokens for jobs in engine.live.values() for job in jobs):
                    await asyncio.sleep(0.002)
        except TimeoutError:
            held = {
                name: [(job.told, len(job.tokens), job.finish) for job in jobs]
                for name, jobs in engine.live.items()
            }
            raise AssertionError(
                f"no sequence of {tokens} tokens; gate {engine.service._batch.gate}, {held}"
            ) from None

    def kill(self) -> None:
        """SIGKILL, for a process of its own."""
        assert self.pid != os.getpid(), "this stand-in is in the test's own process"
        os.kill(self.pid, signal.SIGKILL)


def _read(data: bytes) -> Any:
    try:
        return orjson.loads(data) if data else None
    except orjson.JSONDecodeError:
        return data.decode("utf-8", "replace")


def _default(weights: Path | str | None) -> str:
    path = small_weights() if weights == "small" else weights
    return f"embedded:{path}" if path is not None else "embedded"


@asynccontextmanager
async def standin(
    speaks: Speaks, *, weights: Path | str | None = "small", places: int = 64, **options: Any
) -> AsyncIterator[StandinServer]:
    """In this process, on a free port."""
    upstream = EmbeddedUpstream(UpstreamConfig(kind="embedded", urls=(_default(weights),), concurrency=places))
    try:
        inside = SPEAKS[speaks](upstream, **options)
        async with listening(inside, grace=0.1) as url, aiohttp.ClientSession() as http:
            yield StandinServer(speaks, url.removesuffix("/v1"), http, inside=inside, pid=os.getpid())
    finally:
        await upstream.close()


@asynccontextmanager
async def standin_process(
    speaks: Speaks, *, weights: Path | str | None = "small", places: int = 64, port: int = 0
) -> AsyncIterator[StandinServer]:
    """As a process of its own, which may be killed; its log of requests is at `log`."""
    path = small_weights() if weights == "small" else weights
    with tempfile.TemporaryDirectory(prefix="standin-") as folder:
        log = Path(folder) / "requests.jsonl"
        command = [sys.executable, "-m", "rookery.cli", "serve-embedded", "--speak", speaks, "--port", str(port)]
        command += ["--places", str(places), "--log-requests", str(log)]
        command += ["--weights", str(path)] if path is not None else []
        env = os.environ | {"PYTHONPATH": f"{SRC}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        process = await asyncio.create_subprocess_exec(*command, env=env, stdout=asyncio.subprocess.PIPE)
        try:
            assert process.stdout is not None
            async with asyncio.timeout(60):
                line = (await process.stdout.readline()).decode()
            assert " at http://" in line, line
            root = line.rsplit(" at ", 1)[1].strip().removesuffix("/v1")
            async with aiohttp.ClientSession() as http:
                server = StandinServer(speaks, root, http, inside=None, pid=process.pid)
                server.log = log
                yield server
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
