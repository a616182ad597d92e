"""The owner's end of a guard: starts it, talks to it, notices its death.

Promises:
- a started guard is always waited for: no zombie, no descriptor is left, on any path;
- when the guard dies, every command it held is answered with None at once, not at its deadline;
- closing is a hang-up: the guard then kills what it holds, removes folder and lease, and ends.
"""

import asyncio
import contextlib
import errno
import importlib.util
import os
import signal
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rookery.core import SandboxError
from rookery.sandboxes import guard as stub
from rookery.sandboxes import procs, stubs
from rookery.sandboxes.capture import memory_file

LOG = "guard.log"
SEND_SECONDS = 10.0
HUNG_UP = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF)


class Report(NamedTuple):
    """How a command ended, as the guard saw it."""

    reason: int
    status: int
    cpu: float
    peak: int
    wall: float
    survivors: int


class Channel:
    """One guard process. Bound to the loop it was started on."""

    def __init__(self, pid: int, sock: socket.socket, folder: Path | None, pidfd: int = -1) -> None:
        """With a `pidfd` the guard is somebody else's child, ready for commands; without, it is ours."""
        self._loop = asyncio.get_running_loop()
        self.pid = pid
        self._sock = sock
        self._folder = folder
        self._ours = pidfd < 0
        self._waiting: dict[int, asyncio.Future[Report | None]] = {}
        self._interrupted: dict[int, asyncio.Future[None]] = {}
        self._sweeping: dict[int, asyncio.Future[int]] = {}
        self._last = 0
        self._room = asyncio.Lock()
        self._ready: asyncio.Future[bool] = self._loop.create_future()
        self.dead: asyncio.Future[str] = self._loop.create_future()
        """Done when the guard has ended, with what it said about it."""
        self._pidfd = os.pidfd_open(pid) if self._ours else pidfd
        self._loop.add_reader(self._pidfd, self._ended)
        self._loop.add_reader(sock.fileno(), self._receive)

    @classmethod
    def launch(cls, folder: Path, marker: str) -> "Channel":
        """Starts the program; never suspends, so that no cancellation can fall between start and ownership."""
        pid, ours = stubs.launch(_program(), {procs.MARKER: marker}, folder / LOG)
        try:
            return cls(pid, ours, folder)
        except BaseException:
            ours.close()
            os.waitpid(pid, 0)  # it ends at once: we hung up before it began
            raise

    async def hello(self, parts: Sequence[str]) -> None:
        """Tells the guard what it holds; returns when it is ready to start commands."""
        await self._send(_request(stub.HELLO), b"\0".join(map(os.fsencode, parts)), ())
        if not await self._ready:
            raise SandboxError(f"the guard ended while it started: {await self.dead}", cause="sandbox.create")

    def reserve(self) -> int:
        """A number for the next command."""
        self._last += 1
        return self._last

    async def start(
        self,
        number: int,
        parts: Sequence[bytes],
        argc: int,
        fds: Sequence[int],
        wall: float,
        cpu: float,
        memory: int,
        user: tuple[int, int] = (-1, -1),
        *,
        warm: bool = False,
    ) -> "asyncio.Future[Report | None]":
        """Asks for a command (`parts`: folder, arguments, environment; `user` and group, -1 for the
        sandbox's own); the promise of its report."""
        flags = stub.FLAG_WARM if warm else 0
        head = stub.REQUEST.pack(stub.SPAWN, number, wall, cpu, memory, argc, *user, flags)
        promise: asyncio.Future[Report | None] = self._loop.create_future()
        self._waiting[number] = promise
        if self.dead.done():
            self._waiting.pop(number).set_result(None)
            return promise
        try:
            await self._send(head, b"\0".join(parts), fds)
        except BaseException:
            self._waiting.pop(number, None)
            raise
        return promise

    async def kill(self, number: int) -> None:
        await self._send(_request(stub.KILL, number), b"", ())

    async def interrupt(self, number: int, mark: str, ticks: int) -> None:
        """Kills what a shell's script started and signals the shell; returns when both are done."""
        done = self._interrupted.setdefault(number, self._loop.create_future())
        if not self.dead.done():
            await self._send(_request(stub.INTERRUPT, number, amount=ticks), mark.encode(), ())
            either: set[asyncio.Future[Any]] = {done, self.dead}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        self._interrupted.pop(number, None)

    async def kill_all(self, user: int = -1) -> int:
        """Kill the processes of a user, or all but the guard; return how many are left when it gave up.

        It also returns, with 0, when the guard dies: its processes die with it."""
        number = self.reserve()
        done = self._sweeping[number] = self._loop.create_future()
        try:
            if not self.dead.done():
                await self._send(_request(stub.KILL_ALL, number, user=user), b"", ())
                either: set[asyncio.Future[Any]] = {done, self.dead}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return done.result() if done.done() else 0
        finally:
            self._sweeping.pop(number, None)

    def discard(self, fd: int) -> None:
        """Hands over a pipe that somebody left behind still writes to. Closes ours."""
        try:
            with contextlib.suppress(OSError):  # full or gone: then the writer meets a closed pipe, no worse
                socket.send_fds(self._sock, [_request(stub.DISCARD)], [fd])
        finally:
            os.close(fd)

    async def _send(self, head: bytes, body: bytes, fds: Sequence[int]) -> None:
        if len(body) > stub.MAX_MESSAGE:
            box = memory_file(body + b"\0")
            try:
                *fields, flags = stub.REQUEST.unpack(head)
                await self._send(stub.REQUEST.pack(*fields, flags | stub.FLAG_BODY_IN_FILE), b"", (*fds, box))
            finally:
                os.close(box)
            return
        end = time.monotonic() + SEND_SECONDS
        while True:
            try:
                socket.send_fds(self._sock, [head, body], list(fds))
            except BlockingIOError:
                await self._writable()
            except OSError as error:
                if error.errno in HUNG_UP:  # the death of the guard answers whoever waits
                    return
                if error.errno != errno.ETOOMANYREFS or time.monotonic() > end:
                    raise SandboxError(f"the sandbox's guard cannot be reached: {error}") from error
                # Too many descriptors of this user are under way; nothing tells when there are fewer.
                await asyncio.sleep(0.005)
            else:
                return

    async def _writable(self) -> None:
        async with self._room:
            ready = asyncio.Event()
            self._loop.add_writer(self._sock.fileno(), ready.set)
            self.dead.add_done_callback(lambda _: ready.set())
            try:
                await ready.wait()
            finally:
                if self._sock.fileno() >= 0:
                    self._loop.remove_writer(self._sock.fileno())

    def _receive(self) -> None:
        while True:
            try:
                data = self._sock.recv(4096)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._loop.remove_reader(self._sock.fileno())  # the end of the process is what counts
                return
            try:
                kind, number, *rest = stub.REPORT.unpack(data)
            except struct.error:  # no guard of ours speaks so
                self.kill_guard()
                return
            if kind == stub.READY:
                if not self._ready.done():
                    self._ready.set_result(True)
                continue
            if kind == stub.ALL_KILLED:
                gone = self._sweeping.pop(number, None)
                if gone is not None and not gone.done():
                    gone.set_result(rest[-1])
                continue
            if kind == stub.INTERRUPTED:
                done = self._interrupted.pop(number, None)
                if done is not None and not done.done():
                    done.set_result(None)
                continue
            reason, status, cpu, peak, wall, survivors = rest
            promise = self._waiting.pop(number, None)
            if promise is not None and not promise.done():
                promise.set_result(Report(reason, status, cpu, peak, wall, survivors))

    def _ended(self) -> None:
        self._receive_rest()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self.dead.set_result(self._last_words())
        if not self._ready.done():
            self._ready.set_result(False)
        for promise in self._waiting.values():
            if not promise.done():
                promise.set_result(None)
        self._waiting.clear()

    def _last_words(self) -> str:
        if not self._ours:
            return "it ended"
        try:
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            said = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        except ChildProcessError:
            said = "waited for by somebody else"
        if self._folder is not None:
            with contextlib.suppress(OSError), open(self._folder / LOG, "rb") as file:  # noqa: PTH123
                said = f"{said}; {file.read(4000).decode('utf-8', 'replace').strip()}".rstrip("; ")
        return said

    def _receive_rest(self) -> None:
        if self._sock.fileno() >= 0:
            self._receive()
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
            self._sock.close()

    def hang_up(self) -> None:
        """Asks the guard to end; a fork that holds the socket too does not keep it alive."""
        if self._sock.fileno() >= 0:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    async def gone(self, *, timeout: float) -> bool:
        """Waits for the end of the guard; when it takes too long, makes it end. False: it had to be killed."""
        done, _ = await asyncio.wait({self.dead}, timeout=timeout)
        if done:
            return True
        self.kill_guard()
        await asyncio.wait({self.dead}, timeout=timeout)
        return False

    def kill_guard(self) -> None:
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


def _request(op: int, number: int = 0, *, amount: int = 0, user: int = -1) -> bytes:
    return stub.REQUEST.pack(op, number, 0, 0, amount, 0, user, -1, 0)


def _program() -> tuple[str, str]:
    """The stub's compiled form where there is one: compiling it anew would double its start time."""
    source = Path(stub.__file__)
    compiled = Path(importlib.util.cache_from_source(str(source)))
    return str(compiled if compiled.exists() else source), str(source.parent)
