"""The engine for code without an event loop: the same, in a thread of its own.

Promises:
- the engine keeps running while the caller trains between two groups;
- leaving the `with` block ends everything and the thread.
"""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

from rookery.core import Group
from rookery.engine.engine import Engine
from rookery.engine.processes import new_event_loop

T = TypeVar("T")


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
            self._do(self._engine.__aenter__())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._do(self._engine.__aexit__(kind, error, trace))
        finally:
            self._end()

    def _turn(self) -> None:
        assert self._loop is not None
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _end(self) -> None:
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._loop = self._thread = None

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._loop is not None
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def groups(self, *args: Any, **kwargs: Any) -> Iterator[Group]:
        """As `Engine.groups`; leaving the loop early cancels what is still under way."""

        async def open_stream() -> Any:
            return self._engine.groups(*args, **kwargs)

        stream = self._do(open_stream())
        try:
            while True:
                try:
                    yield self._do(stream.__anext__())
                except StopAsyncIteration:
                    return
        finally:
            self._do(stream.aclose())

    @contextmanager
    def paused(self, timeout: float = 600.0) -> Iterator[None]:
        """As `Engine.paused`."""
        pause = self._engine.paused(timeout)
        self._do(pause.__aenter__())
        try:
            yield
        finally:
            self._do(pause.__aexit__(None, None, None))

    def state_dict(self) -> dict[str, Any]:
        """As `Engine.state_dict`."""

        async def read() -> dict[str, Any]:
            return self._engine.state_dict()

        return self._do(read())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As `Engine.load_state_dict`."""

        async def load() -> None:
            self._engine.load_state_dict(state)

        self._do(load())

    @property
    def folder(self) -> Any:
        return self._engine.folder
