"""The supervisor's control socket: groups, pause and state for other processes.

Promises:
- a client that goes away takes its streams with it, and a pause it held ends;
- a group counts as taken when the client says that it has it; one that did not arrive is put back;
- a rollout that cannot be sent fails alone; its group and its stream go on;
- over TCP nothing is answered before the key was shown, and nothing large is read; the Unix socket is the user's
  alone;
- closing waits for what clients held: streams are cancelled, pauses end.
"""

import asyncio
import hmac
import os
import secrets
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from rookery.core import Group, RookeryError, UsageError
from rookery.core.errors import describe
from rookery.engine.group_transfer import GroupPart, split_group
from rookery.engine.streams import first_group
from rookery.engine.wire import MAX_FRAME, Wire

if TYPE_CHECKING:
    from rookery.engine.engine import Engine
    from rookery.engine.streams import GroupStream

SOCKET = "control.sock"
KEY = "control.key"
HELLO_BYTES = 4096
"""The longest frame from a client that has not shown the key."""


class Call(msgspec.Struct, frozen=True, array_like=True):
    """A client asks."""

    id: int
    op: str
    args: dict[str, Any]


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The engine answers: a value, or an error with its kind."""

    id: int
    value: Any = None
    error: str = ""
    kind: str = ""


calls = msgspec.msgpack.Decoder(Call)
answers = msgspec.msgpack.Decoder(Answer)


@asynccontextmanager
async def short_path(folder: Path) -> AsyncIterator[str]:
    """A path of bounded length to the socket in a folder: socket addresses end at 108 bytes, folders do not."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}/{SOCKET}"
    finally:
        os.close(fd)


class Control:
    """Listens for the life of an engine."""

    def __init__(self, engine: "Engine", folder: Path, listen: str) -> None:
        self._engine = engine
        self._folder = folder
        self._listen = listen
        self._servers: list[asyncio.AbstractServer] = []
        self._clients: set[_Client] = set()
        self.url = ""

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        (self._folder / SOCKET).unlink(missing_ok=True)
        mask = os.umask(0o177)
        try:
            async with short_path(self._folder) as path:
                self._servers.append(await loop.create_unix_server(lambda: self._client("").wire, path))
        finally:
            os.umask(mask)
        if not self._listen:
            return
        parts = urlsplit(self._listen)
        if parts.scheme != "tcp" or parts.hostname is None or parts.port is None:
            raise UsageError(f"listen must be tcp://HOST:PORT, got {self._listen!r}")
        key = secrets.token_urlsafe(24)
        fd = os.open(self._folder / KEY, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(key)
        server = await loop.create_server(lambda: self._client(key).wire, parts.hostname, parts.port)
        self._servers.append(server)
        self.url = f"tcp://{key}@{parts.hostname}:{server.sockets[0].getsockname()[1]}"

    def _client(self, key: str) -> "_Client":
        client = _Client(self._engine, key, self._clients.discard)
        self._clients.add(client)
        return client

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for client in list(self._clients):
            await client.close()
        for name in (SOCKET, KEY):
            (self._folder / name).unlink(missing_ok=True)


class _Sent(msgspec.Struct):
    """A group on its way to a client, and the parts of it that were not asked for yet."""

    stream: int
    groups: list[Group]
    parts: deque[GroupPart]


class _Client:
    """One connection."""

    def __init__(self, engine: "Engine", key: str, gone: Any) -> None:
        self.wire = Wire(calls, self._on_call, self._on_lost)
        self._engine = engine
        self._key = key
        self._known = not key
        if key:
            self.wire.limit = HELLO_BYTES
        self._gone = gone
        self._streams: dict[int, GroupStream] = {}
        """By the number that the client gave it."""
        self._sent: dict[int, _Sent] = {}
        """By the number of the call that asked for it: groups that the client has not confirmed yet."""
        self._name = secrets.token_hex(8)
        self._pauses: list[str] = []
        """The holders of this process's pauses."""
        self._work: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Task[None] | None = None

    def _on_call(self, call: Call) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(call))
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    def _on_lost(self, _: BaseException | None) -> None:
        self._begin_closing()

    def _begin_closing(self) -> "asyncio.Task[None]":
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        return self._closing

    async def close(self) -> None:
        await self._begin_closing()

    async def _close(self) -> None:
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        try:
            async with AsyncExitStack() as held:  # each of them, whatever another of them raises
                for holder in self._pauses:
                    held.push_async_callback(self._engine.supervisor.fleet.pauses.resume, holder=holder)
                for number in list(self._streams):
                    held.push_async_callback(self._end_stream, number)
        finally:
            self._streams.clear()
            self._sent.clear()
            self._pauses.clear()
            self.wire.close()
            self._gone(self)

    async def _answer(self, call: Call) -> None:
        try:
            if not self._known:
                given = str(call.args.get("key", "")) if call.op == "hello" else ""
                if not hmac.compare_digest(given.encode(), self._key.encode()):
                    raise UsageError("the engine's key is wrong or missing")
                self._known = True
                self.wire.limit = MAX_FRAME
            value = await self._do(call)
            self.wire.send(Answer(call.id, value), limit=MAX_FRAME)
        except RookeryError as error:
            self.wire.send(Answer(call.id, None, str(error), type(error).__name__))
        except Exception as error:  # noqa: BLE001  (the client gets it; the engine goes on)
            self.wire.send(Answer(call.id, None, describe(error), "RookeryError"))

    async def _next(self, number: int, call: int) -> GroupPart | None:
        stream = self._streams.get(number)
        if stream is None:
            raise UsageError("this stream of groups is closed")
        groups = await stream.take(first_group)
        if not groups:
            return None
        parts = deque(split_group(groups[0], stream.failed))
        self._sent[call] = _Sent(number, groups, parts)
        return parts.popleft()

    async def _end_stream(self, number: int) -> None:
        stream = self._streams.pop(number, None)
        if stream is None:
            return
        for call, sent in list(self._sent.items()):
            if sent.stream == number:
                stream.put_back(sent.groups)
                del self._sent[call]
        await stream.aclose()

    async def _do(self, call: Call) -> Any:
        engine, args = self._engine, call.args
        match call.op:
            case "hello":
                return {"run": str(engine.folder)}
            case "status":
                return await engine.status()
            case "open":
                number = int(args.pop("stream"))
                self._streams[number] = engine.groups(**args)
                return None
            case "next":
                return await self._next(args["stream"], call.id)
            case "more":
                return self._sent[args["call"]].parts.popleft()
            case "took":
                sent = self._sent.pop(args["call"])
                self._streams[sent.stream].count(sent.groups)
                return None
            case "close":
                return await self._end_stream(args["stream"])
            case "pause":
                holder = f"{self._name}.{args.pop('holder', '')}"  # nobody ends the pause of another
                await engine.upstream.hold(**args, holder=holder)
                self._pauses.append(holder)
                return None
            case "resume":
                holder = f"{self._name}.{args.get('holder', '')}"
                if holder in self._pauses:
                    self._pauses.remove(holder)
                return await engine.supervisor.fleet.pauses.resume(args.get("version"), holder)
            case "state_dict":
                return engine.state_dict()
            case "load_state_dict":
                return engine.load_state_dict(args["state"])
        raise UsageError(f"the engine does not know {call.op!r}")
