"""Reading a program's output without ever holding more than was asked for.

Promises:
- at most `limit` bytes of a stream are kept, its head and its tail; what fell out between is counted;
- one turn of the loop reads at most one pipe's worth, so a flood never starves the others;
- draining at the end takes what is there and waits for nobody who still holds the pipe.
"""

import asyncio
import fcntl
import os
import struct
import termios
from collections.abc import Callable, Coroutine
from typing import Any

CHUNK = 64 << 10


async def first_of(
    news: Coroutine[Any, Any, Any], end: "asyncio.Future[Any]", *, timeout: float | None = None
) -> None:
    """Waits for news or for the end, whichever comes first; `end` is left as it is."""
    task = asyncio.ensure_future(news)
    try:
        await asyncio.wait({task, end}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()


def memory_file(data: bytes) -> int:
    """A descriptor of a file in memory with this content, to be read from its start. The caller owns it."""
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
    """The head and the tail of a stream."""

    __slots__ = ("_head", "_head_limit", "_tail", "_tail_limit", "total")

    def __init__(self, limit: int) -> None:
        self._head_limit = (limit + 1) // 2
        self._tail_limit = limit - self._head_limit
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data
            if len(self._tail) > 2 * self._tail_limit + CHUNK:  # rarely, so that each byte is moved once
                del self._tail[: len(self._tail) - self._tail_limit]

    def result(self) -> tuple[bytes, int]:
        """What was kept, and how many bytes are missing in its middle."""
        tail = self._tail[max(0, len(self._tail) - self._tail_limit) :]
        return bytes(self._head + tail), self.total - len(self._head) - len(tail)


class Pump:
    """Reads one pipe through the loop and hands on what it reads. Owns the descriptor."""

    __slots__ = ("_fd", "_loop", "_reading", "_sink")

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int, sink: Callable[[bytes], None]) -> None:
        self._loop = loop
        self._fd = fd
        self._sink = sink
        self._reading = False
        os.set_blocking(fd, False)
        self.resume()

    @property
    def ended(self) -> bool:
        return self._fd < 0

    def resume(self) -> None:
        if self._fd >= 0 and not self._reading:
            self._reading = True
            self._loop.add_reader(self._fd, self._ready)

    def pause(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def _ready(self, size: int = CHUNK) -> None:
        try:
            data = os.read(self._fd, size)
        except BlockingIOError:
            return
        if not data:
            self.close()
        self._sink(data)

    def drain(self) -> None:
        """Takes what is in the pipe at this moment."""
        if self._fd < 0:
            return
        waiting: int = struct.unpack("i", fcntl.ioctl(self._fd, termios.FIONREAD, b"\0" * 4))[0]
        self._ready(max(waiting, 1))

    def detach(self) -> int:
        """The descriptor, which the caller now owns; -1 when the stream has ended."""
        self.pause()
        fd, self._fd = self._fd, -1
        return fd

    def close(self) -> None:
        fd = self.detach()
        if fd >= 0:
            os.close(fd)


class Feeder:
    """Writes to a pipe through the loop. Owns the descriptor."""

    __slots__ = ("_blocked", "_fd", "_lock", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int) -> None:
        self._loop = loop
        self._fd = fd
        self._lock = asyncio.Lock()
        self._blocked: asyncio.Event | None = None
        os.set_blocking(fd, False)

    async def write(self, data: bytes) -> None:
        """Raises BrokenPipeError when nobody reads any more."""
        view = memoryview(data)
        async with self._lock:
            while view:
                if self._fd < 0:
                    raise BrokenPipeError("the program's input is closed")
                try:
                    view = view[os.write(self._fd, view) :]
                except BlockingIOError:
                    await self._writable()

    async def _writable(self) -> None:
        ready = self._blocked = asyncio.Event()
        fd = self._fd
        self._loop.add_writer(fd, ready.set)
        try:
            await ready.wait()
        finally:
            if self._fd == fd:
                self._loop.remove_writer(fd)

    def close(self) -> None:
        """A write under way ends with BrokenPipeError."""
        if self._fd >= 0:
            self._loop.remove_writer(self._fd)
            os.close(self._fd)
            self._fd = -1
            if self._blocked:
                self._blocked.set()
