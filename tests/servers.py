"""Real model servers for tests: HTTP on a loopback port, every answer scripted.

`ModelServer` speaks the OpenAI protocol and plays its script in order, then its default answer for ever.
`raw_server` writes whatever bytes it is told, for answers that are no HTTP at all.

    async with ModelServer("hello") as server:
        server.then(Answer(status=503), Answer("second"))
        ... server.url, server.requests, server.connections
"""

import asyncio
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import orjson
from aiohttp import web

Cut = Literal["", "before", "half", "head"]


@dataclass
class Answer:
    """One scripted answer. `body` replaces the whole JSON body, as an object or as bytes."""

    text: str | None = "ok"
    calls: Sequence[tuple[str, str]] = ()
    """Tool calls as (name, arguments)."""
    ids: Sequence[int] | None = None
    logprobs: Sequence[float] | None = None
    prompt_ids: Sequence[int] | None = None
    finish: str | None = "stop"
    status: int = 200
    error: str = ""
    """The message of an error answer (with `status`)."""
    code: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    body: Any = None
    extra: dict[str, Any] = field(default_factory=dict)
    """More top-level fields of the answer."""
    chunked: bool = False
    hold: asyncio.Event | None = None
    """The answer waits until this is set."""
    cut: Cut = ""
    """Close the connection: before anything is sent, after the head, in the middle of the body."""

    def payload(self, *, chat: bool) -> bytes:
        if isinstance(self.body, bytes):
            return self.body
        if self.body is not None:
            return orjson.dumps(self.body)
        if self.status >= 300:
            return orjson.dumps({"error": {"message": self.error or f"status {self.status}", "code": self.code}})
        return orjson.dumps(self.completion(chat=chat))

    def completion(self, *, chat: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": self.finish}
        if chat:
            message: dict[str, Any] = {"role": "assistant", "content": self.text}
            if self.calls:
                message["tool_calls"] = [
                    {"id": f"call_{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
                    for n, (name, arguments) in enumerate(self.calls)
                ]
            choice["message"] = message
        else:
            choice["text"] = self.text
        if self.logprobs is not None:
            entries = [{"token": "t", "logprob": p, "bytes": [116], "top_logprobs": []} for p in self.logprobs]
            choice["logprobs"] = {"content": entries} if chat else {"token_logprobs": list(self.logprobs)}
        if self.ids is not None:
            choice["token_ids"] = list(self.ids)
        n_prompt, n_sampled = len(self.prompt_ids or ()) or 5, len(self.ids or ()) or 1
        answer = {
            "id": "chatcmpl-1",
            "object": "chat.completion" if chat else "text_completion",
            "created": 1,
            "model": "test-model",
            "choices": [choice],
            "usage": {"prompt_tokens": n_prompt, "completion_tokens": n_sampled},
        }
        if self.prompt_ids is not None and chat:
            answer["prompt_token_ids"] = list(self.prompt_ids)
        elif self.prompt_ids is not None:
            choice["prompt_token_ids"] = list(self.prompt_ids)
        return answer | self.extra


@dataclass
class Request:
    """What the server was sent."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


Play = Answer | Callable[[Request], Answer]


class ModelServer:
    """A scripted OpenAI-compatible server. Counts what a test may want to know."""

    def __init__(self, default: Play | str = "ok", *, models: Sequence[str] | None = ("test-model",)) -> None:
        self.default: Play = Answer(default) if isinstance(default, str) else default
        self.models: Any = models
        """Names to list; None for a server without a list; anything else an `Answer`."""
        self.refuses: set[str] = set()
        """Fields of a request that are answered with 400."""
        self.requests: deque[Request] = deque(maxlen=10_000)
        self.in_flight = 0
        self.peak = 0
        self.connections = 0
        self.disconnects = 0
        self.arrived = asyncio.Condition()
        self._script: deque[Play] = deque()
        self._seen: set[Any] = set()
        self._runner: web.AppRunner | None = None
        self.port = 0

    def then(self, *answers: Play) -> None:
        """More answers, each for one call, before the default one."""
        self._script.extend(answers)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def requested(self, count: int) -> None:
        """Returns when so many calls have come in."""
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.requests) >= count)

    async def disconnected(self, count: int = 1) -> None:
        """Returns when so many calls were given up by their caller."""
        async with self.arrived:
            await self.arrived.wait_for(lambda: self.disconnects >= count)

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, backlog=1024)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Goes away, connections and all; entering again brings it back on the same port."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _handle(self, http: web.Request) -> web.StreamResponse:
        transport = http.transport
        assert transport is not None
        if transport not in self._seen:
            self._seen.add(transport)
            self.connections += 1
        data = await http.read()
        request = Request(http.method, http.path_qs, dict(http.headers), orjson.loads(data) if data else None)
        if http.path.endswith("/models"):
            return self._listed()
        self.requests.append(request)
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        await self._tell()
        try:
            return await self._answer(http, request)
        except asyncio.CancelledError:
            self.disconnects += 1
            await self._tell()
            raise
        finally:
            self.in_flight -= 1

    async def _tell(self) -> None:
        async with self.arrived:
            self.arrived.notify_all()

    def _listed(self) -> web.Response:
        if isinstance(self.models, Answer):
            return web.Response(
                status=self.models.status, body=self.models.payload(chat=True), headers=self.models.headers
            )
        if self.models is None:
            return web.Response(status=404)
        data = [{"id": name, "object": "model", "max_model_len": 4096} for name in self.models]
        return web.json_response({"object": "list", "data": data})

    async def _answer(self, http: web.Request, request: Request) -> web.StreamResponse:
        for name in sorted(self.refuses & set(request.body)):
            body = {"error": {"message": f"Unrecognized request argument supplied: {name}"}}
            return web.json_response(body, status=400)
        play = self._script.popleft() if self._script else self.default
        answer = play(request) if callable(play) else play
        if answer.hold is not None:
            await answer.hold.wait()
        transport = http.transport
        payload = answer.payload(chat="chat" in http.path)
        if answer.cut and transport is not None:
            if answer.cut != "before":
                head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n"
                half = head.encode() + b"\r\n" + payload[: len(payload) // 2]
                transport.write(half if answer.cut == "half" else head.encode()[:20])
            transport.close()
            return web.Response()
        headers = {"Content-Type": "application/json"} | answer.headers
        if not answer.chunked:
            return web.Response(status=answer.status, body=payload, headers=headers)
        stream = web.StreamResponse(status=answer.status, headers=headers)
        stream.enable_chunked_encoding()
        await stream.prepare(http)
        for at in range(0, len(payload), 64 << 10):
            await stream.write(payload[at : at + (64 << 10)])
        await stream.write_eof()
        return stream


@asynccontextmanager
async def raw_server(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]] | bytes,
) -> AsyncIterator[str]:
    """A TCP server at the URL; bytes are written to whoever sends a request, then the connection ends."""

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if callable(serve):
                await serve(reader, writer)
            else:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(serve)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()

    server = await asyncio.start_server(play, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def nobody() -> AsyncIterator[str]:
    """The URL of a port that refuses connections."""
    with closed_port() as port:
        yield f"http://127.0.0.1:{port}"


@contextmanager
def closed_port() -> Iterator[int]:
    """A port that refuses connections: held, so that nobody else is given it meanwhile, and never listened at."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
