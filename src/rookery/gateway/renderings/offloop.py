"""Rendering and tokenising beside the event loop, so that a long prompt never makes others wait.

Promises:
- work that takes longer than a hop to a thread happens in one; what is shorter happens where it is asked for;
- no more than `waiting` jobs wait for a thread at once: who comes after waits to be one of them;
- a cancelled caller is free at once, and its job is not begun any more; what it raised, it raises at the caller;
- after `close` no thread is left, and nobody waits for one.
"""

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar

from rookery.core import Message, ToolSchema, UsageError
from rookery.gateway.renderings.protocol import Reader, Rendering
from rookery.upstreams.protocol import Delta

T = TypeVar("T")

SHORT: Final = 1_000
"""Characters, or ids, that are worked on where they are: 0.3 ms at most."""
ENDING: Final = 10.0
"""Seconds that `close` waits for work under way."""


class _Job(NamedTuple):
    future: "asyncio.Future[Any]"
    work: Callable[..., Any]
    arguments: tuple[Any, ...]


class Offloop:
    """A rendering for one event loop. The first call binds it to the loop that it is made on."""

    def __init__(self, rendering: Rendering, *, threads: int = 0, waiting: int = 256, short: int = SHORT) -> None:
        if threads < 0 or waiting < 1 or short < 0:
            raise UsageError("rendering needs a place to wait in, and no negative number of anything")
        self.rendering = rendering
        self._count = threads or min(4, max(2, os.cpu_count() or 2))
        self._short = short
        self._places = asyncio.Semaphore(waiting)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._gone = asyncio.Event()
        self._left = 0

    # ---------------------------------------------------------------------------------------------- calls

    async def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], tool_choice: str | None
    ) -> bytes:
        size = _size(messages, self._short) + 200 * len(tools)
        return await self._call(size, self.rendering.render, messages, tools, tool_choice)

    async def extend(
        self,
        tail: bytes,
        sampled: bytes,
        new: Sequence[Message],
        tools: Sequence[ToolSchema],
        tool_choice: str | None,
    ) -> bytes | None:
        size = _size(new, self._short) + len(sampled) // 40  # of an answer only the marks are looked at
        return await self._call(size, self.rendering.extend, tail, sampled, new, tools, tool_choice)

    async def parse(self, tail: bytes, sampled: bytes, tools: Sequence[ToolSchema], *, at: int = 0) -> Message:
        def parse() -> Message:
            return self.rendering.parse(tail, sampled, tools, at=at)

        return await self._call(len(sampled) // 4, parse)

    async def encode(self, text: str) -> bytes:
        return await self._call(len(text), self.rendering.encode, text)

    async def end(self, reader: Reader, ids: int = SHORT + 1) -> tuple[Delta, Message]:
        """The end of a reader that has read about so many ids."""
        return await self._call(ids, reader.end)

    # -------------------------------------------------------------------------------------------- threads

    async def _call(self, size: int, work: Callable[..., T], *arguments: Any) -> T:
        self._check()
        if size <= self._short:
            return work(*arguments)
        if not self._threads:
            self._start()
        await self._places.acquire()
        try:
            self._check()
            future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        except BaseException:
            self._places.release()
            raise
        self._jobs.put(_Job(future, work, arguments))
        return await future

    def _check(self) -> None:
        if self._closed:
            raise UsageError("this rendering is closed")

    def _start(self) -> None:
        self._loop = asyncio.get_running_loop()
        for number in range(self._count):
            thread = threading.Thread(target=self._work, name=f"rendering-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        loop = self._loop
        assert loop is not None
        # A loop that was closed under us has nobody left who waits.
        with suppress(RuntimeError):
            while (job := self._jobs.get()) is not None:
                if job.future.cancelled():
                    loop.call_soon_threadsafe(self._places.release)
                    continue
                try:
                    found = job.work(*job.arguments)
                except BaseException as error:  # noqa: BLE001  (it is the caller's, whatever it is)
                    loop.call_soon_threadsafe(self._settle, job.future, None, error)
                else:
                    loop.call_soon_threadsafe(self._settle, job.future, found, None)
            loop.call_soon_threadsafe(self._leave)

    def _settle(self, future: "asyncio.Future[Any]", found: Any, error: BaseException | None) -> None:
        self._places.release()
        if future.done():
            return
        if error is None:
            future.set_result(found)
        else:
            future.set_exception(error)

    def _leave(self) -> None:
        self._left += 1
        if self._left == len(self._threads):
            self._gone.set()

    async def close(self) -> None:
        """Ends the threads. Who still waits is told so. Closing twice is fine."""
        if not self._closed:
            self._closed = True
            with suppress(queue.Empty):
                while True:
                    job = self._jobs.get_nowait()
                    if job is not None:
                        self._settle(job.future, None, UsageError("this rendering is closed"))
            for _ in self._threads:
                self._jobs.put(None)
        if self._threads:
            with suppress(TimeoutError):  # one that hangs is a daemon: it ends with the process
                async with asyncio.timeout(ENDING):
                    await self._gone.wait()


def _size(messages: Sequence[Message], enough: int) -> int:
    """About how many characters there are to render; counted as far as it matters."""
    size = 0
    for message in messages:
        content = message.content
        size += 40 + (len(content) if isinstance(content, str) else enough if content else 0)
        size += sum(len(call.arguments) for call in message.tool_calls) + len(message.reasoning or "")
        if size > enough:
            break
    return size
