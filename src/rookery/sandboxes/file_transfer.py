"""Asynchronous file transfers of a sandbox. Runs in the process that owns the sandbox."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rookery.sandboxes import transfers

T = TypeVar("T")
STOP_SECONDS = 20.0


class FileTransfer(Protocol):
    """Copies files into and out of one sandbox. Each method raises `TimeoutError` after `timeout` seconds."""

    async def read(self, path: str, *, limit: int, timeout: float) -> bytes: ...

    async def write(self, path: str, data: bytes, *, mode: int, timeout: float) -> None: ...

    async def upload(self, source: Path, target: str, *, inside: Path | None, timeout: float) -> None: ...

    async def download(self, source: str, target: Path, *, limit: int, timeout: float) -> None: ...


class RunningTransfers:
    """The threads that copy files of one sandbox."""

    def __init__(self) -> None:
        self._clocks: dict[asyncio.Future[Any], transfers.TransferClock] = {}

    async def run(self, transfer: Callable[[transfers.TransferClock], T], timeout: float) -> T:
        """Call a function in a thread, and wait for it. If the caller is cancelled, the transfer is stopped."""
        clock = transfers.TransferClock(timeout)
        task = asyncio.get_running_loop().run_in_executor(None, transfer, clock)
        self._clocks[task] = clock
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            clock.stop.set()
            await asyncio.wait({task}, timeout=STOP_SECONDS)
            if task.done() and not task.cancelled():
                task.exception()  # retrieved, so that asyncio does not log it
            raise
        finally:
            del self._clocks[task]

    async def stop(self) -> None:
        """Stop all transfers, and wait until they have ended."""
        for clock in self._clocks.values():
            clock.stop.set()
        if self._clocks:
            await asyncio.wait(set(self._clocks), timeout=STOP_SECONDS)


class DirectTransfer:
    """Implements `FileTransfer` for a sandbox whose files are in a directory of the host."""

    def __init__(self, root: transfers.SandboxRoot, running: RunningTransfers) -> None:
        self._root = root
        self._running = running

    async def read(self, path: str, *, limit: int, timeout: float) -> bytes:
        return await self._running.run(partial(transfers.read, self._root, path, limit), timeout)

    async def write(self, path: str, data: bytes, *, mode: int, timeout: float) -> None:
        await self._running.run(partial(transfers.write, self._root, path, data, mode), timeout)

    async def upload(self, source: Path, target: str, *, inside: Path | None, timeout: float) -> None:
        await self._running.run(partial(transfers.upload, self._root, source, target, inside=inside), timeout)

    async def download(self, source: str, target: Path, *, limit: int, timeout: float) -> None:
        await self._running.run(partial(transfers.download, self._root, source, target, limit), timeout)
