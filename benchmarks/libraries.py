"""Parts that Rookery wrote itself, beside the library that does the same, in one run.

The figure is CPU time, because both sides wait for the same network. Clients are measured in this process against
a server in another one; servers are measured in their own process, and this process sends the requests. Rounds of
the two sides alternate and the best round of each counts, so that a busy machine changes the ratio little.

`python -m benchmarks.libraries SERVER` runs one of the servers until its standard input ends.
"""

import asyncio
import os
import socket
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import aiohttp
import msgspec
import uvloop
from aiohttp import web

from benchmarks import Progress, Result
from benchmarks import docker_engine as docker
from benchmarks.instant_model import InstantProtocol, Replies, instant_model, token_reply
from benchmarks.library_functions import TARGET, compare_functions, load_library
from benchmarks.process_usage import cpu_ns
from rookery.gateway.http_messages import EVENT_STREAM, Request, ResponseWriter
from rookery.gateway.server import Server
from rookery.sandboxes.docker.client import EngineClient, api_path
from rookery.upstreams.http_client import Client, encode_headers

NAME = "libraries"
WHOLE: Final = "/v1/whole"
STREAM: Final = "/v1/stream"
PIECES: Final = 128
BODY: Final = msgspec.json.encode(
    {"model": "m", "messages": [{"role": "user", "content": "x" * 1000}], "logprobs": True}
)
REPLY: Final = msgspec.json.encode(token_reply())
PIECE: Final = (
    b"data: " + msgspec.json.encode({"choices": [{"delta": {"content": " the"}, "token_ids": [5]}]}) + b"\n\n"
)
JSON_HEADERS: Final = {"Accept": "application/json", "Content-Type": "application/json"}
SECONDS: Final = 60.0
LARGE_FILE: Final = "/large"
LARGE_BYTES: Final = 64 << 20

Send = Callable[[str], Awaitable[int]]
"""Send one request to a path and return the number of bytes of the response's body."""


# ---- servers


class _StreamProtocol(InstantProtocol):
    """Answer at once, or with one event in each iteration of the event loop."""

    def answer(self, transport: asyncio.Transport, head: bytes, body: bytes) -> bool:  # noqa: ARG002
        if STREAM.encode() not in head:
            transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(REPLY), REPLY))
            return True
        transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        self._write_pieces(transport, PIECES)
        return True

    def _write_pieces(self, transport: asyncio.Transport, left: int) -> None:
        if not left:
            transport.write(b"0\r\n\r\n")
        elif not transport.is_closing():
            transport.write(b"%x\r\n%b\r\n" % (len(PIECE), PIECE))
            asyncio.get_running_loop().call_soon(self._write_pieces, transport, left - 1)


async def _serve_protocol(listener: socket.socket) -> None:
    server = await asyncio.get_running_loop().create_server(partial(_StreamProtocol, Replies()), sock=listener)
    await server.serve_forever()


async def _serve_rookery(listener: socket.socket) -> None:
    async def handle(request: Request, response: ResponseWriter) -> None:
        if request.path == WHOLE:
            response.send(200, REPLY)
            return
        response.begin(200, EVENT_STREAM)
        for _ in range(PIECES):
            await response.write(PIECE)
            await asyncio.sleep(0)
        response.end()

    server = Server(
        handle, lambda _: 1 << 20, format_error=lambda _, text: text.encode(), internal_error=b"failed"
    )
    await server.listen(listener)
    await asyncio.Event().wait()


async def _serve_aiohttp(listener: socket.socket) -> None:
    async def whole(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=REPLY, content_type="application/json")

    async def stream(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": EVENT_STREAM.decode()})
        await response.prepare(request)
        for _ in range(PIECES):
            await response.write(PIECE)
            await asyncio.sleep(0)
        await response.write_eof()
        return response

    app = web.Application()
    app.add_routes([web.post(WHOLE, whole), web.post(STREAM, stream)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.SockSite(runner, listener, backlog=4096).start()
    await asyncio.Event().wait()


async def _serve_uvicorn(listener: socket.socket) -> None:
    from starlette.applications import Starlette
    from starlette.requests import Request as StarletteRequest
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route
    from uvicorn import Config
    from uvicorn import Server as UvicornServer

    async def whole(request: StarletteRequest) -> Response:
        await request.body()
        return Response(REPLY, media_type="application/json")

    async def stream(request: StarletteRequest) -> StreamingResponse:
        await request.body()

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(PIECES):
                yield PIECE
                await asyncio.sleep(0)

        return StreamingResponse(pieces(), media_type="text/event-stream")

    app = Starlette(routes=[Route(WHOLE, whole, methods=["POST"]), Route(STREAM, stream, methods=["POST"])])
    config = Config(app, http="httptools", loop="uvloop", log_level="error", access_log=False)
    await UvicornServer(config).serve(sockets=[listener])


SERVERS: Final = {
    "protocol": _serve_protocol,
    "rookery": _serve_rookery,
    "aiohttp.web": _serve_aiohttp,
    "Starlette, uvicorn": _serve_uvicorn,
}


def main(name: str) -> None:
    """Serve until standard input ends; print the port first."""

    def exit_at_end_of_input() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=exit_at_end_of_input, daemon=True).start()
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    print(listener.getsockname()[1], flush=True)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(SERVERS[name](listener))


# ---- clients


@asynccontextmanager
async def _rookery_client(port: int) -> AsyncIterator[Send]:
    headers = encode_headers(JSON_HEADERS)
    async with Client("127.0.0.1", port) as client:

        async def send(path: str) -> int:
            async with asyncio.timeout(SECONDS):
                response = await client.send("POST", path, headers, BODY)
                if path == WHOLE:
                    return len(await response.read(1 << 28))
                size = 0
                while data := await response.chunk():
                    size += len(data)
                return size

        yield send


@asynccontextmanager
async def _aiohttp_client(port: int) -> AsyncIterator[Send]:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        f"http://127.0.0.1:{port}", connector=connector, headers=JSON_HEADERS, timeout=timeout
    ) as session:

        async def send(path: str) -> int:
            async with asyncio.timeout(SECONDS), session.post(path, data=BODY) as response:
                if path == WHOLE:
                    return len(await response.read())
                size = 0
                async for data in response.content.iter_any():
                    size += len(data)
                return size

        yield send


async def _send_many(send: Send, path: str, count: int, in_flight: int) -> None:
    """Send `count` requests with `in_flight` at a time, and check that every reply is complete."""
    expected = len(REPLY) if path == WHOLE else PIECES * len(PIECE)
    left = count

    async def send_in_turn() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            if (size := await send(path)) != expected:
                raise RuntimeError(f"{path}: {size} bytes instead of {expected}")

    async with asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(send_in_turn())


# ---- measurements

CASES: Final = (("1 in flight", WHOLE, 1), ("64 in flight", WHOLE, 64), (f"stream of {PIECES}", STREAM, 16))


async def _measure(send: Send, path: str, count: int, in_flight: int, pid: int) -> float:
    """Return the CPU microseconds of process `pid` per request."""
    await _send_many(send, path, in_flight, in_flight)
    begun = cpu_ns(pid)
    await _send_many(send, path, count, in_flight)
    return (cpu_ns(pid) - begun) / count / 1e3


async def _compare_clients(rounds: int, count: int) -> list[Result]:
    results = []
    async with (
        instant_model("benchmarks.libraries", "protocol") as server,
        _rookery_client(server.port) as own,
        _aiohttp_client(server.port) as library,
    ):
        for name, path, in_flight in CASES:
            ours, theirs = [], []
            number = count if path == WHOLE else count // 4
            for _ in range(rounds):
                ours.append(await _measure(own, path, number, in_flight, os.getpid()))
                theirs.append(await _measure(library, path, number, in_flight, os.getpid()))
            results.append(
                Result(
                    name=f"HTTP client, {name}",
                    unit="CPU us",
                    ours=min(ours),
                    peer=f"aiohttp {aiohttp.__version__}",
                    theirs=min(theirs),
                    target=TARGET,
                )
            )
    return results


async def _compare_servers(rounds: int, count: int) -> list[Result]:
    best: dict[tuple[str, str], float] = {}
    for _ in range(rounds):
        for kind in ("rookery", "aiohttp.web", "Starlette, uvicorn"):
            async with instant_model("benchmarks.libraries", kind) as server, _rookery_client(server.port) as send:
                for name, path, in_flight in CASES:
                    number = count if path == WHOLE else count // 4
                    cost = await _measure(send, path, number, in_flight, server.pid)
                    best[kind, name] = min(cost, best.get((kind, name), cost))
    return [
        Result(
            name=f"HTTP server, {name}",
            unit="CPU us",
            ours=best["rookery", name],
            peer=kind,
            theirs=best[kind, name],
            target=TARGET,
        )
        for name, _, _ in CASES
        for kind in ("aiohttp.web", "Starlette, uvicorn")
    ]


async def _compare_engine_clients(rounds: int, count: int, progress: Progress) -> list[Result]:
    """The client of container engines beside aiodocker: one call, and one large file copied out of a container."""
    library = load_library("aiodocker")
    async with docker.open_engine() as engine:
        if isinstance(engine, str) or library is None:
            progress(engine if isinstance(engine, str) else "aiodocker is not installed")
            return []
        own = EngineClient(engine.socket)
        theirs = library.Docker(url=f"unix://{engine.socket}")
        path = api_path("containers", engine.container, "archive", path=LARGE_FILE)

        async def call_own() -> object:
            return await own.call("GET", api_path("containers", engine.container, "json"))

        async def call_theirs() -> object:
            return await theirs.containers.container(engine.container).show()

        async def copy_own() -> None:
            with tempfile.TemporaryFile() as file:
                async with own.stream("GET", path) as body:
                    while block := await body.read(1 << 18):
                        file.write(block)

        async def copy_theirs() -> None:
            (await theirs.containers.container(engine.container).get_archive(LARGE_FILE)).close()

        try:
            await engine.exec("sh", "-c", f"head -c {LARGE_BYTES} /dev/zero > {LARGE_FILE}")
            costs: tuple[list[float], list[float]] = ([], [])
            for _ in range(rounds):
                for call, cost in zip((call_own, call_theirs), costs, strict=True):
                    await call()
                    begun = time.process_time()
                    for _ in range(count):
                        await call()
                    cost.append((time.process_time() - begun) / count * 1e6)
            memory = await _measure_peak_mb(copy_own), await _measure_peak_mb(copy_theirs)
        finally:
            await own.close()
            await theirs.close()
    peer = f"aiodocker {library.__version__}"
    figures = (
        ("container engine, inspect", "CPU us", min(costs[0]), min(costs[1])),
        ("container engine, copy 64 MiB", "MB", memory[0], memory[1]),
    )
    return [
        Result(name=name, unit=unit, ours=own_figure, peer=peer, theirs=their_figure, target=TARGET)
        for name, unit, own_figure, their_figure in figures
    ]


async def _measure_peak_mb(run: Callable[[], Awaitable[None]]) -> float:
    """Return the largest memory that Python objects had while `run` ran, in MB."""
    tracemalloc.start()
    try:
        await run()
        return tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()


def run(quick: bool, progress: Progress) -> list[Result]:
    rounds, count = (3, 1000) if quick else (8, 4000)
    results: list[Result] = []
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        progress("HTTP clients")
        results += runner.run(_compare_clients(rounds, count))
        progress("HTTP servers")
        results += runner.run(_compare_servers(rounds, count))
        progress("clients of container engines")
        results += runner.run(_compare_engine_clients(rounds, count // 20, progress))
    return results + compare_functions(rounds, 10 * count, progress)


if __name__ == "__main__":
    main(sys.argv[1])
