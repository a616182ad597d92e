"""An engine in another process, as its consumers see it.

Promises:
- no wait is for a process that is gone: a lost connection ends every call with an error in words;
- connecting is bounded: what does not answer as an engine is an error, not a wait.
"""

import asyncio
import itertools
import secrets
import weakref
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec

from rookery.core import Group, RookeryError, Task, UsageError
from rookery.core.closing import AsyncClosing
from rookery.core.errors import describe
from rookery.engine.control import SOCKET, Answer, Call, answers, short_path
from rookery.engine.group_transfer import GroupPart, join_group
from rookery.engine.upstream import EngineUpstream
from rookery.engine.wire import MAX_FRAME, Wire, encoder
from rookery.upstreams.protocol import PauseMode

CONNECT_SECONDS = 10.0


class RemoteEngine(AsyncClosing):
    """What `Engine.connect` returns. Closing it cancels the streams it opened."""

    def __init__(self) -> None:
        self._wire = Wire(answers, self._on_answer, self._on_lost)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._lost = ""
        """Why there is no connection any more, in words."""
        self.run = ""
        self.version = 0
        """Of the policy, as of the last resume from here that said one."""

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
                    await loop.create_connection(lambda: engine._wire, parts.hostname or "", parts.port or 0)
                else:
                    path = Path(url.removeprefix("unix:"))
                    async with short_path(path.parent if path.name == SOCKET else path) as short:
                        await loop.create_unix_connection(lambda: engine._wire, short)
                engine.run = (await engine.call("hello", key=key))["run"]
        except TimeoutError as error:
            raise UsageError(
                f"nothing at {_without_key(url)} answers as an engine within {CONNECT_SECONDS:g} seconds"
            ) from error
        except (OSError, ValueError) as error:
            raise UsageError(f"no engine answers at {_without_key(url)}: {error}") from error
        finally:
            if not engine.run:
                engine._wire.close()
        return engine

    def _on_answer(self, answer: Answer) -> None:
        future = self._waiting.pop(answer.id, None)
        if future is None or future.done():
            return
        if answer.error:
            kind = UsageError if answer.kind == "UsageError" else RookeryError
            future.set_exception(kind(answer.error))
        else:
            future.set_result(answer.value)

    def _on_lost(self, error: BaseException | None) -> None:
        why = f" ({describe(error)})" if error is not None else ""
        self._lost = self._lost or f"the engine's process is gone, or closed the connection{why}"
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(RookeryError(self._lost))
        self._waiting.clear()

    @property
    def lost(self) -> bool:
        """Whether the connection is gone."""
        return bool(self._lost)

    def new_number(self) -> int:
        """A number that no other call or stream of this connection has."""
        return next(self._numbers)

    async def call(self, op: str, **args: Any) -> Any:
        """Ask the engine and wait for its answer."""
        return (await self.numbered_call(op, **args))[1]

    async def numbered_call(self, op: str, **args: Any) -> tuple[int, Any]:
        """As `call`; also returns the number of the call."""
        if self._lost:
            raise RookeryError(self._lost)
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self._wire.send(Call(number, op, args), limit=MAX_FRAME)
            return number, await future
        finally:
            self._waiting.pop(number, None)

    def tell(self, op: str, **args: Any) -> None:
        """Send a call whose answer nobody waits for; does nothing on a lost connection."""
        if not self._lost:
            self._wire.send(Call(next(self._numbers), op, args), limit=MAX_FRAME)

    def groups(
        self, tasks: Iterable[Task | dict[str, Any] | str] | None = None, k: int = 1, **options: Any
    ) -> "RemoteStream":
        """As `Engine.groups`; the tasks are sent at once, and `keep` must be a filter's name."""
        try:
            plain = None if tasks is None else [msgspec.to_builtins(task) for task in tasks]
            encoder.encode(options)
        except TypeError as error:
            raise UsageError(f"what is sent to another process must be plain data: {error}") from error
        return RemoteStream(self, {"tasks": plain, "k": k, **options})

    @property
    def upstream(self) -> EngineUpstream:
        """As `Engine.upstream`; also a lost connection resumes."""
        return EngineUpstream(lambda: self)

    async def pause(self, mode: PauseMode, *, timeout: float, deadline: float | None, holder: str = "") -> None:
        """What `upstream.pause` asks of the engine."""
        await self.call("pause", mode=mode, timeout=timeout, deadline=deadline, holder=holder)

    async def resume(self, version: int | None = None, holder: str = "") -> bool:
        """What `upstream.resume` asks of the engine."""
        if self._lost:
            if version is not None:
                raise RookeryError(f"version {version} of the policy could not be named: {self._lost}")
            return True
        had = bool(await self.call("resume", version=version, holder=holder))
        if version is not None:
            self.version = version
        return had

    @asynccontextmanager
    async def paused(self, timeout: float = 600.0) -> AsyncIterator[None]:
        """As `Engine.paused`; also a lost connection resumes."""
        holder = secrets.token_hex(8)
        await self.pause("drain", timeout=timeout, deadline=None, holder=holder)
        try:
            yield
        finally:
            await self.resume(holder=holder)

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
        self._wire.close()


class RemoteStream(AsyncIterator[Group]):
    """The groups of a stream in another process. Closing it, or dropping it, closes the stream there.

    A group counts as taken when `anext` returns it: a cancelled `anext` loses none.
    """

    def __init__(self, engine: RemoteEngine, options: dict[str, Any]) -> None:
        self._engine = engine
        self._options: dict[str, Any] | None = options
        """What to open the stream with; None once that was sent."""
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
                self._pending.add_done_callback(_retrieved)
            pending = self._pending
            await asyncio.wait({pending})  # cancelling us leaves it: the next `anext` gets what it fetched
            self._pending = None
            found = pending.result()
            if found is None:
                await self.aclose()
                raise StopAsyncIteration
            self._engine.tell("took", call=found[0])
            return found[1]

    async def _fetch(self) -> tuple[int, Group] | None:
        engine = self._engine
        if self._options is not None:
            await engine.call("open", stream=self._number, **self._options)
            self._options = None
        call, value = await engine.numbered_call("next", stream=self._number)
        if value is None:
            return None
        parts = [msgspec.convert(value, GroupPart)]
        while parts[-1].more:
            parts.append(msgspec.convert(await engine.call("more", call=call), GroupPart))
        return call, join_group(parts)

    async def aclose(self) -> None:
        """Close the stream. Rollouts under way end as Cancelled(user); the next stream of its name goes on."""
        if self._closed:
            return
        self._closed = True
        self._dropped.detach()
        if self._pending is not None:
            self._pending.cancel()
        if not self._engine.lost:
            await self._engine.call("close", stream=self._number)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _retrieved(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled():
        task.exception()  # whoever asks next gets it; nobody asking is no reason for a warning


def _close_dropped(loop: asyncio.AbstractEventLoop, engine: RemoteEngine, number: int) -> None:
    if loop.is_closed():
        return
    try:
        here = asyncio.get_running_loop() is loop
    except RuntimeError:
        here = False
    if here:  # before any later call of this client, so that the stream's name is free for it
        engine.tell("close", stream=number)
    else:
        loop.call_soon_threadsafe(partial(engine.tell, "close", stream=number))


def _without_key(url: str) -> str:
    return url if "@" not in url else f"tcp://{url.rpartition('@')[2]}"
