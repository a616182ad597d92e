"""State of a running cell: its output, its calls of host functions, and the wait for its end.

Runs in the process that called `Worker.run`, outside of the sandbox. An exception raised by the output callback,
and an exception of a host function that ends the attempt, is stored here; `Worker.run` first ends the cell and
then raises it. A host function that still runs when its cell has ended is cancelled.
"""

import asyncio
import time
from typing import Any

from rookery.sandbox_runtime.worker import protocol as p
from rookery.sandboxes import OnOutput
from rookery.sandboxes.capture import Capture
from rookery.workers.cell_report import CellReport
from rookery.workers.host_functions import HostFunction, call_function
from rookery.workers.limits import WorkerLimits
from rookery.workers.worker_process import WorkerProcess

GRACE_SECONDS = 15.0
"""Seconds after a cell's deadline before the monitor, the worker's process in the sandbox, counts as lost."""


class CellRun:
    """One execution of a cell, from its start until the monitor in the sandbox reports its end."""

    def __init__(self, number: int, limits: WorkerLimits, on_output: OnOutput | None) -> None:
        self.number = number
        self.limits = limits
        self.began = time.monotonic()
        self.call_seconds = 0.0
        self.calling = False
        self.error: BaseException | None = None
        """Exception that `Worker.run` raises after it has ended the cell."""
        self._waiter: asyncio.Future[None] | None = None
        self.done: asyncio.Future[CellReport] = asyncio.get_running_loop().create_future()
        self._on_output = on_output
        self._captures = (Capture(limits.output), Capture(limits.output))
        self._task: asyncio.Task[None] | None = None

    async def wait_for_event(self, process: WorkerProcess, timeout: float) -> None:
        """Wait until `wake` is called, `process` ends, or `timeout` seconds have passed."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(timeout, self.wake)
        process.ended.add_done_callback(self.wake)
        try:
            await self._waiter
        finally:
            timer.cancel()
            process.ended.remove_done_callback(self.wake)

    def wake(self, _: object = None) -> None:
        """End a `wait_for_event` that is in progress."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def add_output(self, payload: bytes) -> None:
        """Store output of the cell and pass it to the callback. The first byte of `payload` is 0 for stdout."""
        stream, data = payload[0], payload[1:]
        self._captures[1 if stream else 0].add(data)
        if self._on_output is not None and self.error is None:
            try:
                self._on_output("stderr" if stream else "stdout", data)
            except Exception as error:  # noqa: BLE001  (raised to the caller of the cell)
                self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Store an exception for `Worker.run` to raise, and wake its wait."""
        self.error = error
        self.wake()

    def output_fields(self) -> dict[str, Any]:
        """Return the captured output as the fields `stdout`, `stderr` and `*_dropped` of a `Cell`."""
        (out, out_dropped), (err, err_dropped) = (capture.result() for capture in self._captures)
        return {
            "stdout": out.decode("utf-8", "replace"),
            "stderr": err.decode("utf-8", "replace"),
            "stdout_dropped": out_dropped,
            "stderr_dropped": err_dropped,
        }

    def start_call(self, process: WorkerProcess, functions: dict[str, HostFunction], request: bytes) -> None:
        """Start a host function in a task. Its result is sent to the cell."""
        self.calling = True
        self._task = asyncio.get_running_loop().create_task(self._call(process, functions, request))

    async def _call(self, process: WorkerProcess, functions: dict[str, HostFunction], request: bytes) -> None:
        began = time.monotonic()
        try:
            result = await call_function(functions, request)
        except Exception as error:  # noqa: BLE001  (raised to the caller of the cell)
            self.fail(error)
            return
        finally:
            self.call_seconds += time.monotonic() - began
            self.calling = False
            self.wake()
        await process.send(p.RESULT, p.SIZE.pack(self.number), result)

    async def close(self) -> None:
        """Cancel a host function that still runs, and wait up to `GRACE_SECONDS` for its end."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=GRACE_SECONDS)
