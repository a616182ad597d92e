"""Commands that run in the background of a sandbox. Runs in the process that owns the sandbox.

Guarantees:
- unread output is bounded: a slow reader of `output()` blocks the program;
- a caller that only calls `wait` does not have to read the output: its head and its tail are kept for the result;
- after the end of the process or of the sandbox every call returns at once, and no descriptor stays open.
"""

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Callable

from rookery.core import ExecResult, SandboxError
from rookery.sandboxes.capture import PipeWriter
from rookery.sandboxes.jobs import Job
from rookery.sandboxes.protocol import Stream

MAX_UNREAD_BYTES = 256 << 10


class GuardedProcess:
    """A process started by `Sandbox.start`. It ends on its own, by `kill`, or with the sandbox."""

    def __init__(self, job: Job, stdin: PipeWriter, on_end: "Callable[[GuardedProcess], None]") -> None:
        self._job = job
        self._stdin = stdin
        self._unread: deque[tuple[Stream, bytes]] = deque()
        self._unread_bytes = 0
        self._changed = asyncio.Event()
        self._discarding = False
        self._has_reader = False
        self._result: ExecResult | SandboxError | None = None
        self._on_end = on_end
        job.on_output = self._on_output
        job.on_end = self._changed.set
        job.max_output = 0  # backpressure limits the output

    def _on_output(self, stream: Stream, data: bytes) -> None:
        if not self._discarding:
            self._unread.append((stream, data))
            self._unread_bytes += len(data)
            if self._unread_bytes >= MAX_UNREAD_BYTES:
                for reader in self._job.readers.values():
                    reader.pause()
        self._changed.set()

    def _resume_reading(self) -> None:
        for reader in self._job.readers.values():
            reader.resume()

    async def output(self) -> AsyncIterator[tuple[Stream, bytes]]:
        """Yield chunks of output until stdout and stderr are at their end or the command has ended."""
        self._has_reader = True
        while True:
            while self._unread:
                stream, data = self._unread.popleft()
                self._unread_bytes -= len(data)
                if self._unread_bytes < MAX_UNREAD_BYTES:
                    self._resume_reading()
                yield stream, data
            if self._result is not None or all(reader.ended for reader in self._job.readers.values()):
                return
            self._changed.clear()
            if self._job.ended.done():
                self.finish()  # its children may still hold the pipes, but the end of the command counts
                continue
            await self._changed.wait()  # also set when the process ends

    async def send(self, data: bytes, *, eof: bool = False) -> None:
        """Write to the program's standard input. Raise `BrokenPipeError` if the program has closed it."""
        await self._stdin.write(data)
        if eof:
            self._stdin.close()

    async def wait(self, *, timeout: float) -> ExecResult:
        if not self._has_reader:
            self._discarding = True
            self._resume_reading()
        done, _ = await asyncio.wait({self._job.ended}, timeout=timeout)
        if not done:
            raise TimeoutError(f"the process is still running after {timeout:g} s")
        result = self.finish()
        if isinstance(result, SandboxError):
            raise result
        return await self._job.explain_loss(result)

    async def kill(self) -> ExecResult:
        if self._result is None:
            await self._job.abort()
        return await self.wait(timeout=1.0)

    def finish(self) -> ExecResult | SandboxError:
        """Read what is left in the pipes, close them and return the result. The process must have ended."""
        if self._result is None:
            report = self._job.ended.result()
            try:
                self._result = self._job.collect(report)
            except SandboxError as error:
                self._result = error
            finally:
                self._job.release(leave_running=report is not None)
                self._stdin.close()
                self._changed.set()
                self._on_end(self)
        return self._result

    def detach(self) -> None:
        """Close the pipes without a wait for the process. Called when the sandbox closes."""
        self._job.release()
        self._stdin.close()
        self._changed.set()


async def start_process(job: Job, on_end: Callable[[GuardedProcess], None]) -> GuardedProcess:
    """Start a command in the background, with a pipe as its standard input. `on_end` is called when it ends."""
    child_end, our_end = os.pipe2(os.O_CLOEXEC)
    try:
        stdin = PipeWriter(asyncio.get_running_loop(), our_end)
        process = GuardedProcess(job, stdin, on_end)
        try:
            await job.begin(child_end)
        except BaseException:
            stdin.close()
            raise
        job.ended.add_done_callback(lambda _: process.finish())
        return process
    finally:
        os.close(child_end)
