"""`SyncEngine`: the engine for programs without an event loop. It uses a thread of the caller's process.

- The engine keeps running while the caller trains between two groups.
- Leaving the `with` block, also by an exception, cancels all rollouts and ends the thread.
- A call of a method outside the `with` block raises `UsageError`.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from rookery.core import Group, UsageError
from rookery.engine.config import EngineConfig
from rookery.engine.engine import Engine
from rookery.engine.group_stream import GroupStream
from rookery.engine.processes import new_event_loop
from rookery.engine.steps import Step, StepStream
from rookery.engine.upstream import DEADLINE
from rookery.environments import Environment
from rookery.upstreams.protocol import PauseMode

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class _Stream(Protocol[T_co]):
    async def __anext__(self) -> T_co: ...

    async def aclose(self) -> None: ...


class SyncEngine:
    """Synchronous version of `Engine`.

    with SyncEngine(env, policy="http://localhost:8000/v1") as engine:
        for group in engine.groups(tasks, k=8):
            ...
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Create the engine. The arguments are those of `Engine`."""
        self._engine = Engine(*args, **kwargs)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="rookery-engine", daemon=True)
        self._thread.start()
        try:
            self._call(self._engine.__aenter__)
        except BaseException:
            self._stop_loop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._call(lambda: self._engine.__aexit__(kind, error, trace))
        finally:
            self._stop_loop()

    def _require_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise UsageError("the engine is not open: use `with SyncEngine(…) as engine`")
        return self._loop

    def _run_loop(self) -> None:
        assert self._loop is not None
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _stop_loop(self) -> None:
        loop, thread = self._require_loop(), self._thread
        assert thread is not None
        try:
            asyncio.run_coroutine_threadsafe(_cancel_all_tasks(loop), loop).result()
        finally:
            self._loop = self._thread = None
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    def _call(self, make: Callable[[], Awaitable[T]]) -> T:
        loop = self._require_loop()

        async def work() -> T:
            return await make()

        future = asyncio.run_coroutine_threadsafe(work(), loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # for example after Ctrl-C, which is raised in this thread
            raise

    @property
    def metrics_url(self) -> str:
        """The URL at which Prometheus scrapes this engine; empty if it serves no metrics."""
        return self._engine.metrics_url

    def submit(self, make: Callable[[Engine], Coroutine[Any, Any, T]]) -> "Future[T]":
        """Run the coroutine `make(engine)` in the engine's thread and return a future of its result.

        May be called from any thread. Cancelling the future cancels the coroutine.
        """
        return asyncio.run_coroutine_threadsafe(make(self._engine), self._require_loop())

    def groups(self, *args: Any, **kwargs: Any) -> Generator[Group, None, None]:
        """Yield finished groups, as `Engine.groups` does. Leaving the loop early cancels running rollouts."""

        async def open_stream() -> GroupStream:
            return self._engine.groups(*args, **kwargs)

        return self._iterate(self._call(open_stream))

    def steps(self, *args: Any, **kwargs: Any) -> Generator[Step, None, None]:
        """Yield training steps, as `Engine.steps` does. Leaving the loop early cancels running rollouts."""

        async def open_stream() -> StepStream:
            return self._engine.steps(*args, **kwargs)

        return self._iterate(self._call(open_stream))

    def _iterate(self, stream: _Stream[T]) -> Generator[T, None, None]:
        try:
            while True:
                try:
                    one = self._call(stream.__anext__)
                except StopAsyncIteration:
                    return
                yield one
        finally:
            if self._loop is not None:  # None: leaving the `with` block has closed the stream
                self._call(stream.aclose)

    @contextmanager
    def paused(self, timeout: float = 600.0) -> Iterator[None]:
        """Pause the run inside the `with` block, as `Engine.paused` does."""
        pause = self._engine.paused(timeout)
        self._call(pause.__aenter__)
        try:
            yield
        finally:
            if self._loop is not None:
                self._call(lambda: pause.__aexit__(None, None, None))

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
        """Pause model calls, call `load` to update the weights, and resume with `version` after the `with` block.

        This is the blocking version of `Engine.upstream.sync`. `load` is called in the caller's thread. If `load`
        or the block raises, model calls resume with the previous policy version. `mode` says what happens to model
        calls in progress; with `drain`, those that are not done after `timeout` seconds are aborted. After
        `deadline` seconds, model calls resume even if the block has not ended, and leaving the block raises
        `RookeryError`.
        """
        sync = self._engine.upstream.sync(version, mode=mode, timeout=timeout, deadline=deadline)
        self._call(sync.__aenter__)
        try:
            if load is not None:
                load()
            yield
        except BaseException as error:
            if self._loop is not None:
                leave = partial(sync.__aexit__, type(error), error, None)
                self._call(leave)
            raise
        else:
            if self._loop is not None:
                self._call(lambda: sync.__aexit__(None, None, None))

    def resume(self, version: int | None = None) -> None:
        """End a pause, as `Engine.upstream.resume` does. Without a pause, only the policy version is set."""
        self._call(lambda: self._engine.upstream.resume(version))

    def status(self) -> dict[str, Any]:
        """Return the current state of the run as plain data, as `Engine.status` does."""
        return self._call(self._engine.status)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of every stream as plain data, as `Engine.state_dict` does."""

        async def read() -> dict[str, Any]:
            return self._engine.state_dict()

        return self._call(read)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the positions that `state_dict` returned, as `Engine.load_state_dict` does."""

        async def load() -> None:
            self._engine.load_state_dict(state)

        self._call(load)

    @property
    def config(self) -> EngineConfig:
        return self._engine.config

    @property
    def environment(self) -> Environment:
        return self._engine.environment

    @property
    def folder(self) -> Path | None:
        return self._engine.folder


async def _cancel_all_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel all tasks and shut down generators and threads, as `asyncio.run` does before it returns."""
    left = [task for task in asyncio.all_tasks(loop) if task is not asyncio.current_task()]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()
