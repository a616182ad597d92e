"""The engine's control socket, through which other processes get groups, pause the run and get its state.

Runs in the supervisor's process; `RemoteEngine` is the client.

- When a client disconnects, its streams are cancelled and its pauses end.
- A group counts as taken when the client confirms it. If a stream is closed before that, the group is put back.
- If a rollout cannot be sent, that rollout alone fails; its group and its stream continue.
- Over TCP a client must send the key first, and only small frames are read before that. Only the user who owns the
  run can connect to the Unix socket.
- Closing waits until the clients' streams are cancelled and their pauses have ended.
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
from rookery.engine.framing import MAX_FRAME, FramedConnection
from rookery.engine.group_stream import choose_first
from rookery.engine.group_transfer import GroupPart, split_group

if TYPE_CHECKING:
    from rookery.engine.engine import Engine
    from rookery.engine.group_stream import GroupStream

SOCKET = "control.sock"
KEY = "control.key"
HELLO_BYTES = 4096
"""Maximum size in bytes of a frame that is accepted from a client before it sent the key."""


class ControlRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request of a client: the operation `op` with its arguments. The response has the same `id`."""

    id: int
    op: str
    args: dict[str, Any]


class ControlResponse(msgspec.Struct, frozen=True, array_like=True):
    """The engine's response: `value`, or the message (`error`) and class name (`kind`) of an exception."""

    id: int
    value: Any = None
    error: str = ""
    kind: str = ""


requests = msgspec.msgpack.Decoder(ControlRequest)
responses = msgspec.msgpack.Decoder(ControlResponse)


@asynccontextmanager
async def short_path(folder: Path) -> AsyncIterator[str]:
    """Yield a short path to the control socket in a run's directory.

    The path of a Unix socket is limited to 108 bytes, and the path of a run's directory may be longer.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}/{SOCKET}"
    finally:
        os.close(fd)


class ControlServer:
    """Accepts an engine's clients on a Unix socket in the run's directory and, with `listen`, on a TCP port."""

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
                self._servers.append(await loop.create_unix_server(lambda: self._client("").connection, path))
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
        server = await loop.create_server(lambda: self._client(key).connection, parts.hostname, parts.port)
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


class _SentGroup(msgspec.Struct):
    """A group that the client has not confirmed yet, with the encoded parts that it has not requested yet."""

    stream: int
    groups: list[Group]
    parts: deque[GroupPart]


class _Client:
    """The connection of one client, with its streams and pauses."""

    def __init__(self, engine: "Engine", key: str, on_disconnect: Any) -> None:
        self.connection = FramedConnection(requests, self._on_call, self._on_lost)
        self._engine = engine
        self._key = key
        self._known = not key
        if key:
            self.connection.limit = HELLO_BYTES
        self._on_disconnect = on_disconnect
        self._streams: dict[int, GroupStream] = {}
        """The client's open streams, by the number that the client chose."""
        self._sent: dict[int, _SentGroup] = {}
        """Groups that the client has not confirmed yet, by the ID of the request that they answer."""
        self._name = secrets.token_hex(8)
        self._pauses: list[str] = []
        """IDs of the pauses that this client started and has not ended."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Task[None] | None = None

    def _on_call(self, call: ControlRequest) -> None:
        task = asyncio.get_running_loop().create_task(self._respond(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_lost(self, _: BaseException | None) -> None:
        self._begin_closing()

    def _begin_closing(self) -> "asyncio.Task[None]":
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        return self._closing

    async def close(self) -> None:
        await self._begin_closing()

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            async with AsyncExitStack() as held:  # run all callbacks, even if one raises
                for holder in self._pauses:
                    held.push_async_callback(self._engine.supervisor.pool.pauses.resume, holder=holder)
                for number in list(self._streams):
                    held.push_async_callback(self._end_stream, number)
        finally:
            self._streams.clear()
            self._sent.clear()
            self._pauses.clear()
            self.connection.close()
            self._on_disconnect(self)

    async def _respond(self, call: ControlRequest) -> None:
        try:
            if not self._known:
                key = str(call.args.get("key", "")) if call.op == "hello" else ""
                if not hmac.compare_digest(key.encode(), self._key.encode()):
                    raise UsageError(
                        "the engine's key is wrong or missing: see control.key in the run's directory"
                    )
                self._known = True
                self.connection.limit = MAX_FRAME
            value = await self._do(call)
            self.connection.send(ControlResponse(call.id, value), limit=MAX_FRAME)
        except RookeryError as error:
            self.connection.send(ControlResponse(call.id, None, str(error), type(error).__name__))
        except Exception as error:  # noqa: BLE001  (the client gets it; the engine continues)
            self.connection.send(ControlResponse(call.id, None, describe(error), "RookeryError"))

    async def _next(self, number: int, call: int) -> GroupPart | None:
        stream = self._streams.get(number)
        if stream is None:
            raise UsageError("this stream of groups is closed: open a new one with `groups`")
        groups = await stream.take(choose_first)
        if not groups:
            return None
        parts = deque(split_group(groups[0], stream.record_failures))
        self._sent[call] = _SentGroup(number, groups, parts)
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

    async def _do(self, call: ControlRequest) -> Any:
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
                self._streams[sent.stream].mark_taken(sent.groups)
                return None
            case "close":
                return await self._end_stream(args["stream"])
            case "pause":
                holder = f"{self._name}.{args.pop('holder', '')}"  # a client can end only its own pauses
                await engine.upstream.hold(**args, holder=holder)
                self._pauses.append(holder)
                return None
            case "resume":
                holder = f"{self._name}.{args.get('holder', '')}"
                if holder in self._pauses:
                    self._pauses.remove(holder)
                return await engine.supervisor.pool.pauses.resume(args.get("version"), holder)
            case "drain":
                return await engine.drain(args["node"])
            case "state_dict":
                return engine.state_dict()
            case "load_state_dict":
                return engine.load_state_dict(args["state"])
        raise UsageError(f"the engine does not support the operation {call.op!r}: use the same version of Rookery")
