"""A background command.

Promises:
- its output is bounded: when a reader of `output()` is slow the program blocks, and nothing piles up here;
- who only waits needs not read: the output is then kept as a command's is, head and tail;
- after its end, or the sandbox's, every call returns at once, and nothing of it stays open.
"""

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Callable

from rookery.core import ExecResult, SandboxError
from rookery.sandboxes.capture import Feeder
from rookery.sandboxes.jobs import Job
from rookery.sandboxes.protocol import Stream

MAX_UNREAD = 256 << 10


class GuardedProcess:
    """Started by `Sandbox.start`; ends by itself, by `kill`, or with the sandbox."""

    def __init__(self, job: Job, feeder: Feeder, on_end: "Callable[[GuardedProcess], None]") -> None:
        self._job = job
        self._feeder = feeder
        self._unread: deque[tuple[Stream, bytes]] = deque()
        self._size = 0
        self._news = asyncio.Event()
        self._discarding = False
        self._read = False
        self._result: ExecResult | SandboxError | None = None
        self._on_end = on_end
        job.on_output = self._take
        job.on_end = self._news.set
        job.ceiling = 0  # backpressure bounds it

    @property
    def number(self) -> int:
        return self._job.number

    def _take(self, stream: Stream, data: bytes) -> None:
        if not self._discarding:
            self._unread.append((stream, data))
            self._size += len(data)
            if self._size >= MAX_UNREAD:
                for pump in self._job.pumps.values():
                    pump.pause()
        self._news.set()

    def _flow(self) -> None:
        for pump in self._job.pumps.values():
            pump.resume()

    async def output(self) -> AsyncIterator[tuple[Stream, bytes]]:
        """Chunks as they come, until both streams end (whoever holds them) or the command is gone."""
        self._read = True
        while True:
            while self._unread:
                stream, data = self._unread.popleft()
                self._size -= len(data)
                if self._size < MAX_UNREAD:
                    self._flow()
                yield stream, data
            if self._result is not None or all(pump.ended for pump in self._job.pumps.values()):
                return
            self._news.clear()
            if self._job.promise.done():
                self.settle()  # what it left running may hold the pipes: its own end counts
                continue
            await self._news.wait()  # its end is news too: `settle` is called then

    async def send(self, data: bytes, *, eof: bool = False) -> None:
        """Raises BrokenPipeError when the program reads no more."""
        await self._feeder.write(data)
        if eof:
            self._feeder.close()

    async def wait(self, *, timeout: float) -> ExecResult:
        if not self._read:
            self._discarding = True
            self._flow()
        done, _ = await asyncio.wait({self._job.promise}, timeout=timeout)
        if not done:
            raise TimeoutError(f"the process still runs after {timeout:g} s")
        result = self.settle()
        if isinstance(result, SandboxError):
            raise result
        return await self._job.explained(result)

    async def kill(self) -> ExecResult:
        if self._result is None:
            await self._job.abort()
        return await self.wait(timeout=1.0)

    def settle(self) -> ExecResult | SandboxError:
        """After the end: takes what is left in the pipes and closes them, whether anybody waits or not."""
        if self._result is None:
            report = self._job.promise.result()
            try:
                self._result = self._job.collect(report)
            except SandboxError as error:
                self._result = error
            finally:
                self._job.release(leave_running=report is not None)
                self._feeder.close()
                self._news.set()
                self._on_end(self)
        return self._result

    def drop(self) -> None:
        """Closes our ends, when the sandbox closes."""
        self._job.release()
        self._feeder.close()
        self._news.set()


async def start_process(job: Job, on_end: Callable[[GuardedProcess], None]) -> GuardedProcess:
    """Begins a job whose input stays open."""
    theirs, ours = os.pipe2(os.O_CLOEXEC)
    try:
        feeder = Feeder(asyncio.get_running_loop(), ours)
        process = GuardedProcess(job, feeder, on_end)
        try:
            await job.begin(theirs)
        except BaseException:
            feeder.close()
            raise
        job.promise.add_done_callback(lambda _: process.settle())
        return process
    finally:
        os.close(theirs)
