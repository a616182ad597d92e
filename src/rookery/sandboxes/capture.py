"""Read and write a program's pipes through the event loop, with bounded memory.

Guarantees:
- at most `limit` bytes of a stream are kept, its head and its tail; the bytes between are dropped and counted;
- `drain` reads what is in the pipe at that moment and does not wait for other processes that hold the pipe open.

One iteration of the event loop reads at most one pipe buffer, so that a flood does not starve other tasks.
"""

import asyncio
import fcntl
import os
import struct
import termios
from collections.abc import Callable, Coroutine
from typing import Any

CHUNK_BYTES = 64 << 10


async def wait_for_first(
    awaitable: Coroutine[Any, Any, Any], end: "asyncio.Future[Any]", *, timeout: float | None = None
) -> None:
    """Wait until `awaitable` or `end` completes, or until `timeout`; then cancel `awaitable`, but not `end`."""
    task = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait({task, end}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()


def create_memory_file(data: bytes) -> int:
    """Return a descriptor of an in-memory file with this content, positioned at its start."""
    fd = os.memfd_create("input", os.MFD_CLOEXEC)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
    except BaseException:
        os.close(fd)
        raise
    return fd


class Capture:
    """Keeps the first and the last bytes of a stream, at most `limit` bytes together."""

    __slots__ = ("_head", "_head_limit", "_tail", "_tail_limit", "total")

    def __init__(self, limit: int) -> None:
        self._head_limit = (limit + 1) // 2
        self._tail_limit = limit - self._head_limit
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        space = self._head_limit - len(self._head)
        if space > 0:
            self._head += data[:space]
            data = data[space:]
        if data:
            self._tail += data
            if (
                len(self._tail) > 2 * self._tail_limit + CHUNK_BYTES
            ):  # trimmed rarely, so that each byte is moved once
                del self._tail[: len(self._tail) - self._tail_limit]

    def result(self) -> tuple[bytes, int]:
        """Return the kept bytes (head and tail), and how many bytes between head and tail were dropped."""
        tail = self._tail[max(0, len(self._tail) - self._tail_limit) :]
        return bytes(self._head + tail), self.total - len(self._head) - len(tail)


class PipeReader:
    """Reads a pipe through the event loop and passes the data to a callback. Closes the descriptor `fd` itself."""

    __slots__ = ("_fd", "_loop", "_on_data", "_reading")

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int, on_data: Callable[[bytes], None]) -> None:
        self._loop = loop
        self._fd = fd
        self._on_data = on_data
        self._reading = False
        os.set_blocking(fd, False)
        self.resume()

    @property
    def ended(self) -> bool:
        return self._fd < 0

    def resume(self) -> None:
        if self._fd >= 0 and not self._reading:
            self._reading = True
            self._loop.add_reader(self._fd, self._on_readable)

    def pause(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def _on_readable(self, size: int = CHUNK_BYTES) -> None:
        try:
            data = os.read(self._fd, size)
        except BlockingIOError:
            return
        if not data:
            self.close()
        self._on_data(data)

    def drain(self) -> None:
        """Read what is in the pipe at this moment and pass it to the callback. Does not wait for more data."""
        if self._fd < 0:
            return
        available: int = struct.unpack("i", fcntl.ioctl(self._fd, termios.FIONREAD, b"\0" * 4))[0]
        self._on_readable(max(available, 1))

    def detach(self) -> int:
        """Stop reading. Return the pipe's descriptor, which the caller must close; -1 if the stream has ended."""
        self.pause()
        fd, self._fd = self._fd, -1
        return fd

    def close(self) -> None:
        fd = self.detach()
        if fd >= 0:
            os.close(fd)


class PipeWriter:
    """Writes to a pipe without blocking the event loop. Owns the descriptor `fd`: `close` closes it."""

    __slots__ = ("_blocked", "_fd", "_lock", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int) -> None:
        self._loop = loop
        self._fd = fd
        self._lock = asyncio.Lock()
        self._blocked: asyncio.Event | None = None
        os.set_blocking(fd, False)

    async def write(self, data: bytes) -> None:
        """Write all data, and wait while the pipe is full. Raise `BrokenPipeError` if its reader is gone."""
        view = memoryview(data)
        async with self._lock:
            while view:
                if self._fd < 0:
                    raise BrokenPipeError("the program's standard input is closed")
                try:
                    view = view[os.write(self._fd, view) :]
                except BlockingIOError:
                    await self._wait_writable()

    async def _wait_writable(self) -> None:
        ready = self._blocked = asyncio.Event()
        fd = self._fd
        self._loop.add_writer(fd, ready.set)
        try:
            await ready.wait()
        finally:
            if self._fd == fd:
                self._loop.remove_writer(fd)

    def close(self) -> None:
        """Close the pipe. A pending write raises `BrokenPipeError`."""
        if self._fd >= 0:
            self._loop.remove_writer(self._fd)
            os.close(self._fd)
            self._fd = -1
            if self._blocked:
                self._blocked.set()
