"""Replicas for tests: real HTTP on a loopback port with scripted answers. They run in the test process.

`ModelServer` speaks the OpenAI protocol. It returns the answers of its script in order, then its default answer.
`raw_server` writes arbitrary bytes, for answers that are not valid HTTP.

    async with ModelServer("hello") as server:
        server.then(Answer(status=503), Answer("second"))
        ... server.url, server.requests, server.connections
"""

import asyncio
import secrets
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import orjson
from aiohttp import web

Cut = Literal["", "before", "half", "head"]


@dataclass
class Answer:
    """One scripted HTTP response. `body` replaces the whole JSON body, as an object or as bytes."""

    text: str | None = "ok"
    calls: Sequence[tuple[str, str]] = ()
    """Tool calls as (name, arguments)."""
    ids: Sequence[int] | None = None
    logprobs: Sequence[float] | None = None
    prompt_ids: Sequence[int] | None = None
    finish: str | None = "stop"
    status: int = 200
    error: str = ""
    """Message of the error body; used together with `status`."""
    code: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    body: Any = None
    extra: dict[str, Any] = field(default_factory=dict)
    """Additional top-level fields of the body."""
    chunked: bool = False
    hold: asyncio.Event | None = None
    """Delays the answer until this event is set."""
    cut: Cut = ""
    """The point at which to close the connection: before anything is sent, inside the head, or in the middle of
    the body."""

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
    """One HTTP request that the server received."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


ScriptedAnswer = Answer | Callable[[Request], Answer]


class ModelServer:
    """Scripted OpenAI-compatible server that counts its requests and connections."""

    def __init__(
        self, default: ScriptedAnswer | str = "ok", *, models: Sequence[str] | None = ("test-model",)
    ) -> None:
        self.default: ScriptedAnswer = Answer(default) if isinstance(default, str) else default
        self.models: Any = models
        """Model names to list, None for a server without a model list, or an `Answer`."""
        self.unsupported_fields: set[str] = set()
        """Request fields that the server rejects with status 400."""
        self.requests: deque[Request] = deque(maxlen=10_000)
        self.in_flight = 0
        self.peak = 0
        self.connections = 0
        self.disconnects = 0
        self._changed = asyncio.Condition()
        self._script: deque[ScriptedAnswer] = deque()
        self._transports: set[Any] = set()
        self._runner: web.AppRunner | None = None
        self.host = "127.0.0.1"
        self.port = 0

    def then(self, *answers: ScriptedAnswer) -> None:
        """Append answers to the script; each is used for one call before the default answer applies."""
        self._script.extend(answers)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def wait_for_requests(self, count: int) -> None:
        """Wait until `count` calls have been received."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.requests) >= count)

    async def wait_for_disconnects(self, count: int = 1) -> None:
        """Wait until the caller has closed the connection of `count` calls in flight."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.disconnects >= count)

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port, backlog=1024)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Close the listener and all connections. Entering the context again reuses the same port."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _handle(self, http: web.Request) -> web.StreamResponse:
        transport = http.transport
        assert transport is not None
        if transport not in self._transports:
            self._transports.add(transport)
            self.connections += 1
        data = await http.read()
        request = Request(http.method, http.path_qs, dict(http.headers), orjson.loads(data) if data else None)
        if http.path.endswith("/models"):
            return self._list_models()
        if http.method == "GET":  # the detection of the kind of server
            return web.Response(status=404)
        self.requests.append(request)
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        await self._notify()
        try:
            return await self._answer(http, request)
        except asyncio.CancelledError:
            self.disconnects += 1
            await self._notify()
            raise
        finally:
            self.in_flight -= 1

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _list_models(self) -> web.Response:
        if isinstance(self.models, Answer):
            return web.Response(
                status=self.models.status, body=self.models.payload(chat=True), headers=self.models.headers
            )
        if self.models is None:
            return web.Response(status=404)
        data = [{"id": name, "object": "model", "max_model_len": 4096} for name in self.models]
        return web.json_response({"object": "list", "data": data})

    async def _answer(self, http: web.Request, request: Request) -> web.StreamResponse:
        for name in sorted(self.unsupported_fields & set(request.body)):
            body = {"error": {"message": f"Unrecognized request argument supplied: {name}"}}
            return web.json_response(body, status=400)
        entry = self._script.popleft() if self._script else self.default
        answer = entry(request) if callable(entry) else entry
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
    """Run a TCP server and yield its URL. It answers each request with the bytes and closes the connection."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def unreachable_url() -> AsyncIterator[str]:
    """Yield the URL of a port that refuses connections."""
    with closed_port() as port:
        yield f"http://127.0.0.1:{port}"


def free_port() -> int:
    """Return a port on which nothing listens, for a program that is told its port.

    It is below the range from which the system takes the ports of connections and of listeners without a port, so
    that none of these takes it before the program listens.
    """
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = end // 2 + secrets.randbelow(end // 2)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextmanager
def closed_port() -> Iterator[int]:
    """Yield a port that refuses connections. It is bound, so that no other process gets it, but not listening."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]
