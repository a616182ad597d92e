"""The engine for code without an event loop: the same, in a thread of its own.

Promises:
- the engine keeps running while the caller trains between two groups;
- leaving the `with` block, in whichever way, ends everything and the thread;
- used outside of its `with` block it says so.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from rookery.core import Group, UsageError
from rookery.engine.engine import Engine
from rookery.engine.group_stream import GroupStream
from rookery.engine.processes import new_event_loop
from rookery.engine.steps import Step, StepStream
from rookery.engine.upstream import DEADLINE
from rookery.upstreams.protocol import PauseMode

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class _Stream(Protocol[T_co]):
    async def __anext__(self) -> T_co: ...

    async def aclose(self) -> None: ...


class SyncEngine:
    """`with SyncEngine(env, policy=…) as engine: for group in engine.groups(tasks, k=8): …`"""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As `Engine`."""
        self._engine = Engine(*args, **kwargs)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=self._turn, name="rookery-engine", daemon=True)
        self._thread.start()
        try:
            self._do(self._engine.__aenter__)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._do(lambda: self._engine.__aexit__(kind, error, trace))
        finally:
            self._end()

    def _open(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise UsageError("the engine is not open: use `with SyncEngine(…) as engine`")
        return self._loop

    def _turn(self) -> None:
        assert self._loop is not None
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _end(self) -> None:
        loop, thread = self._open(), self._thread
        assert thread is not None
        try:
            asyncio.run_coroutine_threadsafe(_wind_up(loop), loop).result()
        finally:
            self._loop = self._thread = None
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    def _do(self, make: Callable[[], Awaitable[T]]) -> T:
        loop = self._open()

        async def work() -> T:
            return await make()

        future = asyncio.run_coroutine_threadsafe(work(), loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C came to us; what we waited for must hear of it
            raise

    def groups(self, *args: Any, **kwargs: Any) -> Iterator[Group]:
        """As `Engine.groups`; leaving the loop early cancels what is still under way."""

        async def open_stream() -> GroupStream:
            return self._engine.groups(*args, **kwargs)

        return self._iterate(self._do(open_stream))

    def steps(self, *args: Any, **kwargs: Any) -> Iterator[Step]:
        """As `Engine.steps`; leaving the loop early cancels what is still under way."""

        async def open_stream() -> StepStream:
            return self._engine.steps(*args, **kwargs)

        return self._iterate(self._do(open_stream))

    def _iterate(self, stream: _Stream[T]) -> Iterator[T]:
        try:
            while True:
                try:
                    one = self._do(stream.__anext__)
                except StopAsyncIteration:
                    return
                yield one
        finally:
            if self._loop is not None:  # else leaving the `with` block has closed it already
                self._do(stream.aclose)

    @contextmanager
    def paused(self, timeout: float = 600.0) -> Iterator[None]:
        """As `Engine.paused`."""
        pause = self._engine.paused(timeout)
        self._do(pause.__aenter__)
        try:
            yield
        finally:
            if self._loop is not None:
                self._do(lambda: pause.__aexit__(None, None, None))

    @contextmanager
    def sync(
        self,
        version: int,
        load: Callable[[], object] | None = None,
        *,
        mode: PauseMode = "abort",
        timeout: float = 60.0,
        deadline: float | None = DEADLINE,
    ) -> Iterator[None]:
        """As `Engine.upstream.sync`; `load` is called in the caller's own thread."""
        sync = self._engine.upstream.sync(version, mode=mode, timeout=timeout, deadline=deadline)
        self._do(sync.__aenter__)
        try:
            if load is not None:
                load()
            yield
        except BaseException as error:
            if self._loop is not None:
                leave = partial(sync.__aexit__, type(error), error, None)
                self._do(leave)
            raise
        else:
            if self._loop is not None:
                self._do(lambda: sync.__aexit__(None, None, None))

    def resume(self, version: int | None = None) -> None:
        """As `Engine.upstream.resume`: without a pause of ours it only says which version the policy is now."""
        self._do(lambda: self._engine.upstream.resume(version))

    def status(self) -> dict[str, Any]:
        """As `Engine.status`."""
        return self._do(self._engine.status)

    def state_dict(self) -> dict[str, Any]:
        """As `Engine.state_dict`."""

        async def read() -> dict[str, Any]:
            return self._engine.state_dict()

        return self._do(read)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `Engine.load_state_dict`."""

        async def load() -> None:
            self._engine.load_state_dict(state)

        self._do(load)

    @property
    def folder(self) -> Path | None:
        return self._engine.folder


async def _wind_up(loop: asyncio.AbstractEventLoop) -> None:
    """What `asyncio.run` does at its end: nothing of ours is left half done when the loop stops."""
    left = [task for task in asyncio.all_tasks(loop) if task is not asyncio.current_task()]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()
