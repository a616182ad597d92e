"""Run a chat renderer in worker threads, so that a long prompt does not block the event loop.

Guarantees:
- long inputs are processed in a worker thread; short inputs, which take less time than a switch to a thread, are
  processed on the event loop;
- at most `max_queued` jobs are queued or running; further callers wait until one of them ends;
- a caller that is cancelled stops waiting at once, and its job is skipped if it has not started; an exception in a
  job is raised in its caller;
- `close` stops the threads and ends all queued calls with an error.

`close` does not wait longer than 10 seconds for a running job: its thread is a daemon thread.
"""

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar

from rookery.core import Message, ToolSchema, UsageError
from rookery.gateway.chat_renderers.protocol import ChatRenderer, ReplyParser
from rookery.upstreams.protocol import Delta

T = TypeVar("T")

INLINE_LIMIT: Final = 1_000
"""Maximum number of characters or tokens that are processed on the event loop; this takes at most 0.3 ms."""
CLOSE_TIMEOUT: Final = 10.0
"""Maximum number of seconds that `close` waits for running jobs."""


class _Job(NamedTuple):
    future: "asyncio.Future[Any]"
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class ThreadedRenderer:
    """Asynchronous wrapper of a chat renderer that processes long inputs in worker threads.

    The threads start with the first long input. From then on, the object belongs to the event loop of that call.
    """

    def __init__(
        self, renderer: ChatRenderer, *, threads: int = 0, max_queued: int = 256, inline_limit: int = INLINE_LIMIT
    ) -> None:
        if threads < 0 or max_queued < 1 or inline_limit < 0:
            raise UsageError("max_queued must be at least 1, and threads and inline_limit must not be negative")
        self.renderer = renderer
        self._thread_count = threads or min(4, max(2, os.cpu_count() or 2))
        self._inline_limit = inline_limit
        self._queue_slots = asyncio.Semaphore(max_queued)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._threads_done = asyncio.Event()
        self._exited_threads = 0

    async def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], tool_choice: str | None
    ) -> bytes:
        size = _estimate_size(messages, self._inline_limit) + 200 * len(tools)
        return await self._call(size, self.renderer.render, messages, tools, tool_choice)

    async def extend(
        self,
        prompt_tail: bytes,
        sampled: bytes,
        new_messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        tool_choice: str | None,
    ) -> bytes | None:
        size = (
            _estimate_size(new_messages, self._inline_limit) + len(sampled) // 40
        )  # only the special tokens of a reply are examined
        return await self._call(size, self.renderer.extend, prompt_tail, sampled, new_messages, tools, tool_choice)

    async def parse(
        self, prompt_tail: bytes, sampled: bytes, tools: Sequence[ToolSchema], *, prompt_length: int = 0
    ) -> Message:
        def parse() -> Message:
            return self.renderer.parse(prompt_tail, sampled, tools, prompt_length=prompt_length)

        return await self._call(len(sampled) // 4, parse)

    async def encode(self, text: str) -> bytes:
        return await self._call(len(text), self.renderer.encode, text)

    async def finish(self, parser: ReplyParser, ids: int = INLINE_LIMIT + 1) -> tuple[Delta, Message]:
        """Finish a reply parser, in a thread if the reply is long.

        `ids` is the approximate number of tokens that the parser has parsed.
        """
        return await self._call(ids, parser.finish)

    async def _call(self, size: int, function: Callable[..., T], *arguments: Any) -> T:
        self._check_open()
        if size <= self._inline_limit:
            return function(*arguments)
        if not self._threads:
            self._start()
        await self._queue_slots.acquire()
        try:
            self._check_open()
            future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        except BaseException:
            self._queue_slots.release()
            raise
        self._jobs.put(_Job(future, function, arguments))
        return await future

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the chat renderer is closed")

    def _start(self) -> None:
        self._loop = asyncio.get_running_loop()
        for number in range(self._thread_count):
            thread = threading.Thread(target=self._run_jobs, name=f"chat-renderer-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run_jobs(self) -> None:
        loop = self._loop
        assert loop is not None
        # If the loop was closed, no caller waits any more.
        with suppress(RuntimeError):
            while (job := self._jobs.get()) is not None:
                if job.future.cancelled():
                    loop.call_soon_threadsafe(self._queue_slots.release)
                    continue
                try:
                    result = job.function(*job.arguments)
                except BaseException as error:  # noqa: BLE001  (raised in the caller)
                    loop.call_soon_threadsafe(self._resolve, job.future, None, error)
                else:
                    loop.call_soon_threadsafe(self._resolve, job.future, result, None)
            loop.call_soon_threadsafe(self._on_thread_exit)

    def _resolve(self, future: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
        self._queue_slots.release()
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def _on_thread_exit(self) -> None:
        self._exited_threads += 1
        if self._exited_threads == len(self._threads):
            self._threads_done.set()

    async def close(self) -> None:
        """Stop the threads after their running jobs.

        Calls that are still queued fail. Closing twice is allowed.
        """
        if not self._closed:
            self._closed = True
            with suppress(queue.Empty):
                while True:
                    job = self._jobs.get_nowait()
                    if job is not None:
                        self._resolve(job.future, None, UsageError("the chat renderer is closed"))
            for _ in self._threads:
                self._jobs.put(None)
        if self._threads:
            with suppress(TimeoutError):  # a hanging thread is a daemon thread and ends with the process
                async with asyncio.timeout(CLOSE_TIMEOUT):
                    await self._threads_done.wait()


def _estimate_size(messages: Sequence[Message], limit: int) -> int:
    """Estimate the number of characters in messages. Stops counting as soon as it exceeds `limit`."""
    size = 0
    for message in messages:
        content = message.content
        size += 40 + (len(content) if isinstance(content, str) else limit if content else 0)
        size += sum(len(call.arguments) for call in message.tool_calls) + len(message.reasoning or "")
        if size > limit:
            break
    return size
