"""Client of an engine in another process. Runs in the consumer's process, for example in a trainer.

- If the connection is lost, every waiting and every later call that needs the engine raises.
- Connecting fails with `UsageError` if the address does not respond like an engine within a few seconds.
"""

import asyncio
import itertools
import secrets
import weakref
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from rookery.core import Group, RookeryError, Task, UsageError
from rookery.core.errors import describe
from rookery.core.lifetimes import AsyncClosesOnExit, ClosableStream
from rookery.engine.control_server import SOCKET, ControlRequest, ControlResponse, responses, short_path
from rookery.engine.framing import MAX_FRAME, FramedConnection, encoder
from rookery.engine.group_transfer import GroupPart, join_group
from rookery.engine.upstream import EngineUpstream
from rookery.upstreams.protocol import PauseMode

CONNECT_SECONDS = 10.0


class RemoteEngine(AsyncClosesOnExit):
    """A connection to an engine in another process, created by `Engine.connect`.

    Closing the connection cancels its streams and ends its pauses.
    """

    def __init__(self) -> None:
        self._connection = FramedConnection(responses, self._on_response, self._on_lost)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._lost = ""
        """The reason why the connection was lost; empty while it is open."""
        self.run = ""
        self.version = 0
        """The policy version that the last `resume` with a version over this connection set."""

    @classmethod
    async def connect(cls, url: str) -> "RemoteEngine":
        engine = cls()
        loop = asyncio.get_running_loop()
        key = ""
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                if url.startswith("tcp://"):
                    parts = urlsplit(url)
                    key = parts.username or ""
                    await loop.create_connection(lambda: engine._connection, parts.hostname or "", parts.port or 0)
                else:
                    path = Path(url.removeprefix("unix:"))
                    async with short_path(path.parent if path.name == SOCKET else path) as short:
                        await loop.create_unix_connection(lambda: engine._connection, short)
                engine.run = (await engine.call("hello", key=key))["run"]
        except TimeoutError as error:
            raise UsageError(
                f"{_without_key(url)} did not respond like an engine within {CONNECT_SECONDS:g} seconds"
            ) from error
        except (OSError, ValueError) as error:
            raise UsageError(f"no engine answers at {_without_key(url)}: {error}") from error
        finally:
            if not engine.run:
                engine._connection.close()
        return engine

    def _on_response(self, response: ControlResponse) -> None:
        future = self._waiting.pop(response.id, None)
        if future is None or future.done():
            return
        if response.error:
            kind = UsageError if response.kind == "UsageError" else RookeryError
            future.set_exception(kind(response.error))
        else:
            future.set_result(response.value)

    def _on_lost(self, error: BaseException | None) -> None:
        why = f" ({describe(error)})" if error is not None else ""
        self._lost = self._lost or f"the engine's process has ended or closed the connection{why}"
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(RookeryError(self._lost))
        self._waiting.clear()

    @property
    def lost(self) -> bool:
        """True if the connection was lost or closed."""
        return bool(self._lost)

    def new_number(self) -> int:
        """Return a number that is unique among the requests and streams of this connection."""
        return next(self._numbers)

    async def call(self, op: str, **args: Any) -> Any:
        """Send a request and return the value of the response. If the response is an error, raise it."""
        return (await self.call_with_number(op, **args))[1]

    async def call_with_number(self, op: str, **args: Any) -> tuple[int, Any]:
        """Send a request as `call` does, and return the number of the request and the value."""
        if self._lost:
            raise RookeryError(self._lost)
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self._connection.send(ControlRequest(number, op, args), limit=MAX_FRAME)
            return number, await future
        finally:
            self._waiting.pop(number, None)

    def notify(self, op: str, **args: Any) -> None:
        """Send a request and ignore the response. Does nothing if the connection is lost."""
        if not self._lost:
            self._connection.send(ControlRequest(next(self._numbers), op, args), limit=MAX_FRAME)

    def groups(
        self, tasks: Iterable[Task | dict[str, Any] | str] | None = None, k: int = 1, **options: Any
    ) -> "RemoteStream":
        """Yield finished groups, as `Engine.groups` does.

        All tasks are sent at once, and `keep` must be the name of a filter.

        The stream is opened in the engine's process by the first `anext`.
        """
        try:
            plain = None if tasks is None else [msgspec.to_builtins(task) for task in tasks]
            encoder.encode(options)
        except TypeError as error:
            raise UsageError(f"tasks and options for another process must be plain data: {error}") from error
        return RemoteStream(self, {"tasks": plain, "k": k, **options})

    @property
    def upstream(self) -> EngineUpstream:
        """Control of the policy's upstream, as in `Engine.upstream`.

        A pause that it starts also ends when the connection is lost.
        """
        return EngineUpstream(lambda: self)

    async def pause(self, mode: PauseMode, *, timeout: float, deadline: float | None, holder: str = "") -> None:
        """Pause the run. Users call `upstream.pause` instead."""
        await self.call("pause", mode=mode, timeout=timeout, deadline=deadline, holder=holder)

    async def resume(self, version: int | None = None, holder: str = "") -> bool:
        """End the pause of `holder`. Return False if it had ended before. Users call `upstream.resume` instead."""
        if self._lost:
            if version is not None:
                raise RookeryError(f"the policy version could not be set to {version}: {self._lost}")
            return True
        had_pause = bool(await self.call("resume", version=version, holder=holder))
        if version is not None:
            self.version = version
        return had_pause

    @asynccontextmanager
    async def paused(self, timeout: float = 600.0) -> AsyncIterator[None]:
        """Pause the run in the block, as `Engine.paused` does. The pause also ends with the connection."""
        holder = secrets.token_hex(8)
        await self.pause("drain", timeout=timeout, deadline=None, holder=holder)
        try:
            yield
        finally:
            await self.resume(holder=holder)

    async def drain(self, node: str) -> None:
        """Take a node out of the run and wait until it has left, as `Engine.drain` does."""
        await self.call("drain", node=node)

    async def status(self) -> dict[str, Any]:
        status: dict[str, Any] = await self.call("status")
        return status

    async def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = await self.call("state_dict")
        return state

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        await self.call("load_state_dict", state=dict(state))

    async def close(self) -> None:
        self._lost = self._lost or "this connection to the engine was closed"
        self._connection.close()


class RemoteStream(ClosableStream[Group]):
    """Iterates over the groups of a stream in the engine's process. Closing or dropping it closes that stream.

    A group counts as taken when `anext` returns it: a cancelled `anext` loses no group.
    """

    def __init__(self, engine: RemoteEngine, options: dict[str, Any]) -> None:
        self._engine = engine
        self._options: dict[str, Any] | None = options
        """The options of the stream, or None after they were sent."""
        self._number = engine.new_number()
        self._one_at_a_time = asyncio.Lock()
        self._pending: asyncio.Task[tuple[int, Group] | None] | None = None
        self._closed = False
        self._dropped = weakref.finalize(self, _close_dropped, asyncio.get_running_loop(), engine, self._number)
        self._dropped.atexit = False

    async def __anext__(self) -> Group:
        async with self._one_at_a_time:
            if self._closed:
                raise StopAsyncIteration
            if self._pending is None:
                self._pending = asyncio.ensure_future(self._fetch())
                self._pending.add_done_callback(_retrieve_exception)
            pending = self._pending
            await asyncio.wait({pending})  # if this call is cancelled, the next `anext` gets the group
            self._pending = None
            found = pending.result()
            if found is None:
                await self.aclose()
                raise StopAsyncIteration
            self._engine.notify("took", call=found[0])
            return found[1]

    async def _fetch(self) -> tuple[int, Group] | None:
        engine = self._engine
        if self._options is not None:
            await engine.call("open", stream=self._number, **self._options)
            self._options = None
        call, value = await engine.call_with_number("next", stream=self._number)
        if value is None:
            return None
        parts = [msgspec.convert(value, GroupPart)]
        while parts[-1].more:
            parts.append(msgspec.convert(await engine.call("more", call=call), GroupPart))
        return call, join_group(parts)

    async def aclose(self) -> None:
        """Close the stream and wait until its running rollouts have ended as `Cancelled("user")`.

        A later stream of the same name continues where this one ended.
        """
        if self._closed:
            return
        self._closed = True
        self._dropped.detach()
        if self._pending is not None:
            self._pending.cancel()
        if not self._engine.lost:
            await self._engine.call("close", stream=self._number)


def _retrieve_exception(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled():
        task.exception()  # mark it as retrieved: the next `anext` raises it, and asyncio must not log it


def _close_dropped(loop: asyncio.AbstractEventLoop, engine: RemoteEngine, number: int) -> None:
    if loop.is_closed():
        return
    try:
        here = asyncio.get_running_loop() is loop
    except RuntimeError:
        here = False
    if here:  # at once, so that the name of the stream is free for the next call
        engine.notify("close", stream=number)
    else:
        loop.call_soon_threadsafe(partial(engine.notify, "close", stream=number))


def _without_key(url: str) -> str:
    return url if "@" not in url else f"tcp://{url.rpartition('@')[2]}"
