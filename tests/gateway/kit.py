"""A gateway's shard inside of the test's process, over an upstream that does what the test says, when it says so.

    async with served(folder, Scripted()) as gateway:
        session = await gateway.register()
        answer = await gateway.chat(session, "hello")

Nothing here sleeps: an upstream that is held goes on when the test lets it.
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
from rookery.gateway.registry import Registry
from rookery.gateway.session import ModelRole, RecordMode
from rookery.gateway.shard import Shard
from rookery.upstreams import open_upstream
from rookery.upstreams.protocol import Upstream, UpstreamConfig
from tests.gateway.scripted import WAIT, Letters

KEY: Final = "the-admin-key"


# ---- a client that sees bytes


@dataclass
class Answered:
    """A response, whole."""

    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool = True
    """Whether it ended as its head said."""

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.json["error"]
        assert set(found) == {"message", "type", "param", "code"}
        return found

    @property
    def events(self) -> list[Any]:
        """The data of a stream's events; the last one's `[DONE]` as it stands."""
        parts = self.body.split(b"\n\n")
        assert parts.pop() == b"", "half an event"
        assert all(part.startswith(b"data: ") for part in parts)
        return ["[DONE]" if part == b"data: [DONE]" else msgspec.json.decode(part[6:]) for part in parts]

    @property
    def text(self) -> str:
        """What a stream said, or an answer's first choice."""
        if not self.headers["content-type"].startswith("text/event-stream"):
            return str(self.json["choices"][0]["message"]["content"])
        choices = [choice for event in self.events if event != "[DONE]" for choice in event.get("choices", ())]
        return "".join(choice["delta"].get("content") or "" for choice in choices)


class Wire:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def to(cls, port: int) -> Self:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def send(self, *data: bytes) -> None:
        self.writer.write(b"".join(data))

    async def answer(self, *, head_only: bool = False) -> Answered:
        """The next response."""
        async with asyncio.timeout(WAIT):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            status = int(head[0].split()[1])
            headers = {
                name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:-2])
            }
            if head_only or status == 100:
                return Answered(status, headers, b"")
            if "content-length" in headers:
                return Answered(status, headers, await self.reader.readexactly(int(headers["content-length"])))
            if "transfer-encoding" not in headers:
                return Answered(status, headers, await self.reader.read())
            body, whole = b"", False
            try:
                while size := int(await self.reader.readline(), 16):
                    body += await self.reader.readexactly(size)
                    assert await self.reader.readexactly(2) == b"\r\n"
                whole = await self.reader.readexactly(2) == b"\r\n"
            except (asyncio.IncompleteReadError, ValueError, ConnectionError):
                whole = False
            return Answered(status, headers, body, whole)

    async def rest(self) -> bytes:
        """Everything until the other end closes."""
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

    def cut(self) -> None:
        """Goes away without a word."""
        self.writer.transport.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def request(method: str, path: str, body: bytes | None = None, **headers: str) -> bytes:
    """A request's bytes; underscores in the names of headers stand for dashes."""
    lines = [f"{method} {path} HTTP/1.1", "Host: gateway.test"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + (body or b"")


# ---- the shard


class Registered(msgspec.Struct, frozen=True):
    """A session."""

    id: str
    base_url: str
    secret: str

    @property
    def path(self) -> str:
        return f"/v1/rollouts/{self.id}"


class Gateway:
    """A shard that serves on a loopback port."""

    def __init__(self, shard: Shard, port: int) -> None:
        self.shard = shard
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    async def wire(self) -> Wire:
        return await Wire.to(self.port)

    async def ask(
        self, method: str, path: str, body: Any = None, *, key: str | None = KEY, **headers: str
    ) -> Answered:
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        data = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
        async with await self.wire() as wire:
            wire.send(request(method, path, data, Connection="close", **headers))
            return await wire.answer(head_only=method == "HEAD")

    async def register(self, **registration: Any) -> Registered:
        answer = await self.ask("POST", "/rollouts", registration)
        assert answer.status == 201, answer.body
        return msgspec.convert(answer.json, Registered)

    def chat_request(
        self, session: Registered, messages: Any = "hello", *, retry: int = 0, **fields: Any
    ) -> bytes:
        """A chat completion's bytes."""
        headers = {"Authorization": f"Bearer {session.secret}"}
        headers |= fields.pop("headers", {})
        if retry:
            headers["x-stainless-retry-count"] = str(retry)
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        body = msgspec.json.encode({"model": "m", "messages": messages, **fields})
        return request("POST", f"{session.path}/chat/completions", body, **headers)

    async def chat(
        self, session: Registered, messages: Any = "hello", *, retry: int = 0, **fields: Any
    ) -> Answered:
        async with await self.wire() as wire:
            wire.send(self.chat_request(session, messages, retry=retry, **fields))
            return await wire.answer()

    async def trajectory(self, session: Registered) -> dict[str, Any]:
        answer = await self.ask("GET", f"/rollouts/{session.id}/trajectory")
        assert answer.status == 200, answer.body
        found: dict[str, Any] = answer.json
        return found

    async def turns(self, session: Registered) -> list[dict[str, Any]]:
        turns: list[dict[str, Any]] = (await self.trajectory(session))["turns"]
        return turns

    async def settled(self) -> None:
        """Returns when no call is under way."""
        seats = self.shard.registry.entries
        async with asyncio.timeout(WAIT):
            while any(seat.session is not None and seat.session.in_flight for seat in seats.values()):
                await asyncio.sleep(0)


@asynccontextmanager
async def served(
    folder: Path,
    policy: Upstream | None = None,
    *,
    record: RecordMode = "messages",
    models: Mapping[str, str] | None = None,
    **others: Upstream,
) -> AsyncIterator[Gateway]:
    """A shard over these upstreams, by role; without one the real embedded policy. Again on the same folder:
    as after a restart."""
    upstreams = {"policy": policy, **others}
    sockets = Path(tempfile.mkdtemp(prefix="rk-"))  # the names of sockets are short
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    names = {"policy": "m", "judge": "j"} | dict(models or {})
    real = UpstreamConfig(kind="embedded", urls=("embedded",))
    config = GatewayConfig(
        upstreams={
            name: real if one is None else UpstreamConfig(kind="embedded", urls=(name,), model=names[name])
            for name, one in upstreams.items()
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
                key=KEY,
                folder=str(folder),
                sockets=str(sockets),
                listener=listener.detach(),
            )
        )
    if record == "tokens":
        roles = cast("dict[str, Any]", shard.registry.roles)
        roles["policy"] = msgspec.structs.replace(roles["policy"], record="tokens", rendering=Letters())
    try:
        await shard.start()
        yield Gateway(shard, port)
    finally:
        await shard.close()
        shutil.rmtree(sockets)


# ---- what tests of calls share


async def busy(gateway: Gateway, count: int) -> None:
    """Returns when so many requests are being answered."""
    assert gateway.shard.server is not None
    async with asyncio.timeout(WAIT):
        while sum(one.task is not None for one in gateway.shard.server.connections) < count:
            await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)


def said(answer: Answered) -> Any:
    """What an answer says, without what is new in every answer."""
    if answer.headers["content-type"] == "application/json":
        return [(one["message"], one["finish_reason"], one.get("token_ids")) for one in answer.json["choices"]]
    found: dict[int, Any] = {}
    for event in answer.events[:-1]:
        for choice in event["choices"]:
            one = found.setdefault(choice["index"], {"content": "", "token_ids": [], "finish": None, "calls": {}})
            one["content"] += choice["delta"].get("content") or ""
            one["token_ids"] += choice.get("token_ids", [])
            one["finish"] = choice["finish_reason"] or one["finish"]
            for call in choice["delta"].get("tool_calls", ()):
                kept = one["calls"].setdefault(call["index"], {"id": "", "name": "", "arguments": ""})
                kept["id"] += call.get("id", "")
                kept["name"] += call["function"].get("name", "")
                kept["arguments"] += call["function"]["arguments"]
    assert answer.events[-1] == "[DONE]"
    return [found[index] for index in sorted(found)]


@contextmanager
def served_beside(folder: Path, upstream: Callable[[], Upstream]) -> Iterator[Gateway]:
    """A shard on a loop of its own, for clients that block."""
    ready: Future[Gateway] = Future()
    over: Future[None] = Future()

    async def play() -> None:
        async with served(folder, upstream()) as gateway:
            ready.set_result(gateway)
            await asyncio.wrap_future(over)

    def run() -> None:
        try:
            asyncio.run(play())
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield ready.result(WAIT)
    finally:
        over.set_result(None)
        thread.join(WAIT)


def registry_over(
    folder: Path, upstream: Upstream, is_local: Callable[[str], bool] = lambda _: True, **more: Any
) -> Registry:
    """The sessions of a shard alone."""
    role = ModelRole(name="policy", upstream=upstream, model="m")
    return Registry(folder, "shard0", {"policy": role}, is_local, **more)


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Plays a test on asyncio's own loop and on uvloop's, which shards run on: their transports differ."""

    def played(loop: str, **given: Any) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop if loop == "uvloop" else None) as runner:
            runner.run(test(**given))

    own = inspect.signature(test).parameters.values()
    loop = inspect.Parameter("loop", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    played.__signature__ = inspect.Signature([loop, *own])  # type: ignore[attr-defined]
    played.__name__, played.__doc__ = test.__name__, test.__doc__
    played.pytestmark = [
        *getattr(test, "pytestmark", []),
        pytest.mark.parametrize("loop", ["asyncio", "uvloop"]).mark,
    ]  # type: ignore[attr-defined]
    return played
