"""Gateway shard that runs in the test process over an upstream that the test controls.

    async with run_shard(folder, ScriptedUpstream()) as gateway:
        session = await gateway.register()
        response = await gateway.chat(session, "hello")

Nothing here sleeps: a stepwise reply continues when the test advances it.
"""

import asyncio
import inspect
import shutil
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, cast

import msgspec
import pytest
import uvloop

from rookery.gateway import shard as shard_module
from rookery.gateway.config import GatewayConfig, ShardSettings
from rookery.gateway.registry import SessionRegistry
from rookery.gateway.session import ModelRole, RecordMode
from rookery.gateway.shard import Shard
from rookery.upstreams import open_upstream
from rookery.upstreams.protocol import Upstream, UpstreamConfig
from tests.gateway.scripted_upstream import WAIT, CharRenderer

ADMIN_KEY: Final = "the-admin-key"


# ---- raw HTTP client


@dataclass
class HttpResponse:
    """HTTP response that was read to its end."""

    status: int
    headers: dict[str, str]
    body: bytes
    complete: bool = True
    """False if the body ended before its announced length or last chunk."""

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    @property
    def events(self) -> list[Any]:
        """Decoded data of the server-sent events; the final `[DONE]` stays a string."""
        parts = self.body.split(b"\n\n")
        assert parts.pop() == b"", "the stream ends inside an event"
        assert all(part.startswith(b"data: ") for part in parts)
        return ["[DONE]" if part == b"data: [DONE]" else msgspec.json.decode(part[6:]) for part in parts]

    @property
    def text(self) -> str:
        """Text of a streamed reply, or of the first choice of a whole response."""
        if not self.headers["content-type"].startswith("text/event-stream"):
            return str(self.json["choices"][0]["message"]["content"])
        choices = [choice for event in self.events if event != "[DONE]" for choice in event.get("choices", ())]
        return "".join(choice["delta"].get("content") or "" for choice in choices)


class RawConnection:
    """TCP connection that sends raw bytes and parses HTTP responses."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, port: int) -> Self:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def send(self, *data: bytes) -> None:
        self.writer.write(b"".join(data))

    async def read_response(self, *, head_only: bool = False) -> HttpResponse:
        """Read the next response."""
        async with asyncio.timeout(WAIT):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            status = int(head[0].split()[1])
            headers = {
                name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:-2])
            }
            if head_only or status == 100:
                return HttpResponse(status, headers, b"")
            if "content-length" in headers:
                return HttpResponse(status, headers, await self.reader.readexactly(int(headers["content-length"])))
            if "transfer-encoding" not in headers:
                return HttpResponse(status, headers, await self.reader.read())
            body, complete = b"", False
            try:
                while size := int(await self.reader.readline(), 16):
                    body += await self.reader.readexactly(size)
                    assert await self.reader.readexactly(2) == b"\r\n"
                complete = await self.reader.readexactly(2) == b"\r\n"
            except (asyncio.IncompleteReadError, ValueError, ConnectionError):
                complete = False
            return HttpResponse(status, headers, body, complete)

    async def read_to_end(self) -> bytes:
        """Read everything until the server closes the connection."""
        async with asyncio.timeout(WAIT):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except ConnectionError:
            return

    def abort(self) -> None:
        """Reset the connection."""
        self.writer.transport.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def request(method: str, path: str, body: bytes | None = None, **headers: str) -> bytes:
    """Encode an HTTP/1.1 request. Underscores in header names become dashes."""
    lines = [f"{method} {path} HTTP/1.1", "Host: gateway.test"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + (body or b"")


# ---- the shard


class RegisteredSession(msgspec.Struct, frozen=True):
    """Response to the registration of a session."""

    id: str
    base_url: str
    secret: str

    @property
    def path(self) -> str:
        return f"/v1/rollouts/{self.id}"


class InProcessGateway:
    """Shard that listens on a loopback port, with a client for its HTTP API."""

    def __init__(self, shard: Shard, port: int) -> None:
        self.shard = shard
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    async def connect(self) -> RawConnection:
        return await RawConnection.open(self.port)

    async def request(
        self, method: str, path: str, body: Any = None, *, key: str | None = ADMIN_KEY, **headers: str
    ) -> HttpResponse:
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        data = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
        async with await self.connect() as connection:
            connection.send(request(method, path, data, Connection="close", **headers))
            return await connection.read_response(head_only=method == "HEAD")

    async def register(self, **registration: Any) -> RegisteredSession:
        answer = await self.request("POST", "/rollouts", registration)
        assert answer.status == 201, answer.body
        return msgspec.convert(answer.json, RegisteredSession)

    def chat_request(
        self, session: RegisteredSession, messages: Any = "hello", *, retry: int = 0, **fields: Any
    ) -> bytes:
        """Encode a chat completion request. `retry` sets the retry count that the openai library sends."""
        headers = {"Authorization": f"Bearer {session.secret}"}
        headers |= fields.pop("headers", {})
        if retry:
            headers["x-stainless-retry-count"] = str(retry)
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        body = msgspec.json.encode({"model": "m", "messages": messages, **fields})
        return request("POST", f"{session.path}/chat/completions", body, **headers)

    async def chat(
        self, session: RegisteredSession, messages: Any = "hello", *, retry: int = 0, **fields: Any
    ) -> HttpResponse:
        async with await self.connect() as connection:
            connection.send(self.chat_request(session, messages, retry=retry, **fields))
            return await connection.read_response()

    async def trajectory(self, session: RegisteredSession) -> dict[str, Any]:
        answer = await self.request("GET", f"/rollouts/{session.id}/trajectory")
        assert answer.status == 200, answer.body
        trajectory: dict[str, Any] = answer.json
        return trajectory

    async def turns(self, session: RegisteredSession) -> list[dict[str, Any]]:
        turns: list[dict[str, Any]] = (await self.trajectory(session))["turns"]
        return turns

    async def count(self, name: str, **labels: str) -> int:
        """Return a counter of the page `/metrics`.

        All gateways of a process add to the same counters, so a test compares with an earlier value.
        """
        shown = ",".join(f'{label}="{value}"' for label, value in {"shard": "0", **labels}.items())
        start = f"rookery_gateway_{name}_total{{{shown}}} "
        lines = (await self.request("GET", "/metrics")).body.decode().splitlines()
        return next((int(float(line.removeprefix(start))) for line in lines if line.startswith(start)), 0)

    async def wait_until_idle(self) -> None:
        """Wait until no model call is in flight."""
        entries = self.shard.registry.entries
        async with asyncio.timeout(WAIT):
            while any(entry.session is not None and entry.session.in_flight for entry in entries.values()):
                await asyncio.sleep(0)


@asynccontextmanager
async def run_shard(
    folder: Path,
    policy: Upstream | None = None,
    *,
    record: RecordMode = "messages",
    models: Mapping[str, str] | None = None,
    **others: Upstream,
) -> AsyncIterator[InProcessGateway]:
    """Run a shard over the given upstreams, by role. Without a policy upstream it uses the embedded policy.

    Running it again on the same folder is like a restart of the shard.
    """
    upstreams = {"policy": policy, **others}
    sockets = Path(tempfile.mkdtemp(prefix="rk-"))  # the path of a Unix socket must be short
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    names = {"policy": "m", "judge": "j"} | dict(models or {})
    real = UpstreamConfig(kind="embedded", urls=("embedded",))
    config = GatewayConfig(
        upstreams={
            name: real if each is None else UpstreamConfig(kind="embedded", urls=(name,), model=names[name])
            for name, each in upstreams.items()
        },
        record="messages" if record == "tokens" else record,
    )

    def opened(config: UpstreamConfig, key: str | None = None) -> Upstream:
        return upstreams.get(config.urls[0]) or open_upstream(config, key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_module, "open_upstream", opened)
        shard = Shard(
            ShardSettings(
                config=config,
                index=0,
                key=ADMIN_KEY,
                folder=str(folder),
                sockets=str(sockets),
                listener=listener.detach(),
            )
        )
    if record == "tokens":
        roles = cast("dict[str, Any]", shard.registry.roles)
        roles["policy"] = msgspec.structs.replace(roles["policy"], record="tokens", rendering=CharRenderer())
    try:
        await shard.start()
        yield InProcessGateway(shard, port)
    finally:
        await shard.close()
        shutil.rmtree(sockets)


# ---- helpers for tests of model calls


async def wait_until_busy(gateway: InProcessGateway, count: int) -> None:
    """Wait until the shard is handling `count` requests."""
    assert gateway.shard.server is not None
    async with asyncio.timeout(WAIT):
        while sum(each.task is not None for each in gateway.shard.server.connections) < count:
            await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)


def content_of(answer: HttpResponse) -> Any:
    """Return the content of a response without the fields that differ in every response."""
    if answer.headers["content-type"] == "application/json":
        return [(each["message"], each["finish_reason"], each.get("token_ids")) for each in answer.json["choices"]]
    choices: dict[int, Any] = {}
    for event in answer.events[:-1]:
        for choice in event["choices"]:
            each = choices.setdefault(
                choice["index"], {"content": "", "token_ids": [], "finish": None, "calls": {}}
            )
            each["content"] += choice["delta"].get("content") or ""
            each["token_ids"] += choice.get("token_ids", [])
            each["finish"] = choice["finish_reason"] or each["finish"]
            for call in choice["delta"].get("tool_calls", ()):
                kept = each["calls"].setdefault(call["index"], {"id": "", "name": "", "arguments": ""})
                kept["id"] += call.get("id", "")
                kept["name"] += call["function"].get("name", "")
                kept["arguments"] += call["function"]["arguments"]
    assert answer.events[-1] == "[DONE]"
    return [choices[index] for index in sorted(choices)]


@contextmanager
def run_shard_in_thread(folder: Path, upstream: Callable[[], Upstream]) -> Iterator[InProcessGateway]:
    """Run a shard with its own event loop in a thread, for clients that block."""
    ready: Future[InProcessGateway] = Future()
    finished: Future[None] = Future()

    async def serve() -> None:
        async with run_shard(folder, upstream()) as gateway:
            ready.set_result(gateway)
            await asyncio.wrap_future(finished)

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield ready.result(WAIT)
    finally:
        finished.set_result(None)
        thread.join(WAIT)


def open_registry(
    folder: Path, upstream: Upstream, is_local: Callable[[str], bool] = lambda _: True, **more: Any
) -> SessionRegistry:
    """Open the session registry of a shard without the shard."""
    role = ModelRole(name="policy", upstream=upstream, model="m")
    return SessionRegistry(folder, "shard0", {"policy": role}, is_local, **more)


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on asyncio's event loop and on uvloop, which shards use: their transports differ."""

    def run_test(loop: str, **arguments: Any) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop if loop == "uvloop" else None) as runner:
            runner.run(test(**arguments))

    parameters = inspect.signature(test).parameters.values()
    loop = inspect.Parameter("loop", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run_test.__signature__ = inspect.Signature([loop, *parameters])  # type: ignore[attr-defined]
    run_test.__name__, run_test.__doc__ = test.__name__, test.__doc__
    run_test.pytestmark = [
        *getattr(test, "pytestmark", []),
        pytest.mark.parametrize("loop", ["asyncio", "uvloop"]).mark,
    ]  # type: ignore[attr-defined]
    return run_test
