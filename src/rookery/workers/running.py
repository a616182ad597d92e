"""A cell under way, on the host's side: its streams, its calls, and what ends the waiting for it.

Promises:
- what a callback or a function of the host's raises is kept for who runs the cell, who ends the cell first;
- a function that still runs when its cell is over is cancelled.
"""

import asyncio
import time
from typing import Any

from rookery.sandboxes import OnOutput
from rookery.sandboxes.capture import Capture
from rookery.workers import endings, functions
from rookery.workers.functions import HostFunction
from rookery.workers.inside import frames as f
from rookery.workers.limits import WorkerLimits
from rookery.workers.link import Link

GRACE = 15.0
"""Seconds past a deadline after which what has not answered counts as lost."""


class Run:
    """From its start to its last word."""

    def __init__(self, number: int, bounds: WorkerLimits, on_output: OnOutput | None) -> None:
        self.number = number
        self.bounds = bounds
        self.began = time.monotonic()
        self.outside = 0.0
        self.calling = False
        self.error: BaseException | None = None
        """What is raised to the caller, once the cell is ended."""
        self._waiter: asyncio.Future[None] | None = None
        self.done: asyncio.Future[endings.Ended] = asyncio.get_running_loop().create_future()
        self._on_output = on_output
        self._captures = (Capture(bounds.output), Capture(bounds.output))
        self._task: asyncio.Task[None] | None = None

    async def news(self, link: Link, timeout: float) -> None:
        """Waits until something happened, the link ended, or the time is over."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(timeout, self.wake)
        link.ended.add_done_callback(self.wake)
        try:
            await self._waiter
        finally:
            timer.cancel()
            link.ended.remove_done_callback(self.wake)

    def wake(self, _: object = None) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def output(self, payload: bytes) -> None:
        at, data = payload[0], payload[1:]
        self._captures[1 if at else 0].add(data)
        if self._on_output is not None and self.error is None:
            try:
                self._on_output("stderr" if at else "stdout", data)
            except Exception as error:  # noqa: BLE001  (raised again by who runs the cell)
                self.fail(error)

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.wake()

    def streams(self) -> dict[str, Any]:
        (out, out_dropped), (err, err_dropped) = (capture.result() for capture in self._captures)
        return {
            "stdout": out.decode("utf-8", "replace"),
            "stderr": err.decode("utf-8", "replace"),
            "stdout_dropped": out_dropped,
            "stderr_dropped": err_dropped,
        }

    def call(self, link: Link, declared: dict[str, HostFunction], asked: bytes) -> None:
        self.calling = True
        self._task = asyncio.get_running_loop().create_task(self._called(link, declared, asked))

    async def _called(self, link: Link, declared: dict[str, HostFunction], asked: bytes) -> None:
        began = time.monotonic()
        try:
            answer = await functions.answer(declared, asked)
        except Exception as error:  # noqa: BLE001  (raised again by who runs the cell)
            self.fail(error)
            return
        finally:
            self.outside += time.monotonic() - began
            self.calling = False
            self.wake()
        await link.send(f.ANSWER, f.SIZE.pack(self.number), answer)

    async def over(self) -> None:
        """A function that still runs is of no use to anybody."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=GRACE)
