"""An engine in another process, as its consumers see it.

Promises:
- no wait is for a process that is gone: a lost connection ends every call with an error in words;
- connecting is bounded: what does not answer as an engine is an error, not a wait.
"""

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from rookery.core import Group, RookeryError, Task, UsageError
from rookery.core.closing import AsyncClosing
from rookery.core.errors import describe
from rookery.engine.control import SOCKET, Answer, Call, answers, short_path
from rookery.engine.upstream import EngineUpstream
from rookery.engine.wire import Wire, encoder
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
                engine.run = (await engine._call("hello", key=key))["run"]
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

    async def _call(self, op: str, **args: Any) -> Any:
        if self._lost:
            raise RookeryError(self._lost)
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self._wire.send(Call(number, op, args))
            return await future
        finally:
            self._waiting.pop(number, None)

    async def groups(
        self, tasks: Iterable[Task | dict[str, Any] | str] | None = None, k: int = 1, **options: Any
    ) -> AsyncIterator[Group]:
        """As `Engine.groups`; the tasks are sent at once, and `keep` must be a filter's name."""
        name = str(options.setdefault("name", "main"))
        try:
            plain = None if tasks is None else [msgspec.to_builtins(task) for task in tasks]
            encoder.encode(options)
        except TypeError as error:
            raise UsageError(f"what is sent to another process must be plain data: {error}") from error
        await self._call("open", tasks=plain, k=k, **options)
        try:
            while (value := await self._call("next", name=name)) is not None:
                yield msgspec.convert(value, Group)
        finally:
            if not self._lost:
                await self._call("close", name=name)

    @property
    def upstream(self) -> EngineUpstream:
        """As `Engine.upstream`; also a lost connection resumes."""
        return EngineUpstream(lambda: self)

    async def pause(self, mode: PauseMode, *, timeout: float, deadline: float | None, holder: str = "") -> None:
        """What `upstream.pause` asks of the engine."""
        await self._call("pause", mode=mode, timeout=timeout, deadline=deadline, holder=holder)

    async def resume(self, version: int | None = None, holder: str = "") -> bool:
        """What `upstream.resume` asks of the engine."""
        if self._lost:
            if version is not None:
                raise RookeryError(f"version {version} of the policy could not be named: {self._lost}")
            return True
        had = bool(await self._call("resume", version=version, holder=holder))
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
        status: dict[str, Any] = await self._call("status")
        return status

    async def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = await self._call("state_dict")
        return state

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        await self._call("load_state_dict", state=dict(state))

    async def close(self) -> None:
        self._lost = self._lost or "this connection to the engine was closed"
        self._wire.close()


def _without_key(url: str) -> str:
    return url if "@" not in url else f"tcp://{url.rpartition('@')[2]}"
