"""The connection to a guard process: start it, send it requests, notice its death. Runs in the owner's process.

A guard is the process that starts, supervises and kills the commands of one sandbox. The owner is the process that
created the sandbox.

Guarantees:
- a guard that is our child is always waited for: no zombie and no descriptor is left on any path;
- when the guard dies, every pending command completes with None at once, not at its deadline;
- when the owner closes the connection, the guard kills the sandbox's processes and exits. A guard that `launch`
  started also removes the sandbox's directory and lease (the file that records that the sandbox exists).
"""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rookery.core import SandboxError
from rookery.sandbox_runtime import guard_protocol as protocol
from rookery.sandbox_runtime import launcher, processes
from rookery.sandboxes.capture import create_memory_file

LOG_FILE = "guard.log"
SEND_SECONDS = 10.0
CONNECTION_LOST = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF)


class CommandReport(NamedTuple):
    """The end of a command, as the guard reports it."""

    reason: int
    """One of the constants of `guard_protocol`, such as `EXITED` or `PROCESS_LIMIT`."""
    status: int
    """Wait status of the command's first process; an errno if the process could not be started."""
    cpu: float
    """CPU time in seconds."""
    peak: int
    """Peak memory in bytes."""
    wall: float
    """Elapsed time in seconds."""
    survivors: int
    """Number of processes of the command that could not be killed."""


class GuardChannel:
    """The connection to one guard process. Bound to the event loop on which it was created."""

    def __init__(self, pid: int, sock: socket.socket, folder: Path | None, pidfd: int = -1) -> None:
        """Connect to the guard with PID `pid` over `sock`.

        With a `pidfd`, the guard is not our child and is ready for commands. Without one, it is our child and
        still has to be configured.
        """
        self._loop = asyncio.get_running_loop()
        self.pid = pid
        self._sock = sock
        self._folder = folder
        self._is_child = pidfd < 0
        self._pending: dict[int, asyncio.Future[CommandReport | None]] = {}
        self._interrupted: dict[int, asyncio.Future[None]] = {}
        self._kill_requests: dict[int, asyncio.Future[int]] = {}
        self._last = 0
        self.started = 0
        """Number of commands that were started."""
        self.ended_cpu = 0.0
        """CPU seconds of the commands that have ended."""
        self.peak_memory = 0
        """Peak memory in bytes of the largest command that has ended."""
        self._write_lock = asyncio.Lock()
        self._ready: asyncio.Future[bool] = self._loop.create_future()
        self.dead: asyncio.Future[str] = self._loop.create_future()
        """Completes when the guard has ended, with a description of its end."""
        self._pidfd = os.pidfd_open(pid) if self._is_child else pidfd
        self._loop.add_reader(self._pidfd, self._on_exit)
        self._loop.add_reader(sock.fileno(), self._receive)

    @classmethod
    def launch(cls, folder: Path, marker: str) -> "GuardChannel":
        """Start a guard as a child process.

        Not a coroutine: no cancellation can happen between the start of the process and the return of its channel.
        """
        pid, ours = launcher.start_program(
            "rookery.sandbox_runtime.guard", {processes.SANDBOX_VARIABLE: marker}, folder / LOG_FILE
        )
        try:
            return cls(pid, ours, folder)
        except BaseException:
            ours.close()
            os.waitpid(pid, 0)  # it exits at once, because the socket is closed
            raise

    async def configure(self, parts: Sequence[str]) -> None:
        """Send the guard its settings; return when it is ready to start commands."""
        await self._send(_pack_request(protocol.HELLO), b"\0".join(map(os.fsencode, parts)), ())
        if not await self._ready:
            raise SandboxError(f"the guard exited during its start: {await self.dead}", cause="sandbox.create")

    def reserve_number(self) -> int:
        """Return an unused number, by which the guard identifies the next command."""
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
    ) -> "asyncio.Future[CommandReport | None]":
        """Start a command; return a future for its report, whose result is None if the guard dies first.

        `parts` is the working directory, then `argc` arguments, then the environment variables. `user` is a user
        and a group ID; -1 means the sandbox's default.
        """
        flags = protocol.FLAG_WARM if warm else 0
        head = protocol.REQUEST.pack(protocol.SPAWN, number, wall, cpu, memory, argc, *user, flags)
        future: asyncio.Future[CommandReport | None] = self._loop.create_future()
        self._pending[number] = future
        self.started += 1
        if self.dead.done():
            self._pending.pop(number).set_result(None)
            return future
        try:
            await self._send(head, b"\0".join(parts), fds)
        except BaseException:
            self._pending.pop(number, None)
            raise
        return future

    async def kill(self, number: int) -> None:
        await self._send(_pack_request(protocol.KILL, number), b"", ())

    async def interrupt(self, number: int, mark: str, ticks: int) -> None:
        """Kill the processes that a script in a shell started, then signal the shell; return when both are done.

        `number` is the shell's command number. The script's processes are those with `mark` in their environment,
        and those of the shell that started after `ticks` (clock ticks since boot).
        """
        done = self._interrupted.setdefault(number, self._loop.create_future())
        if not self.dead.done():
            await self._send(_pack_request(protocol.INTERRUPT, number, amount=ticks), mark.encode(), ())
            either: set[asyncio.Future[Any]] = {done, self.dead}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        self._interrupted.pop(number, None)

    async def kill_all(self, user: int = -1) -> int:
        """Kill the sandbox's processes of one user, or of all users (-1), but not the guard.

        Return how many processes were still alive when the guard gave up.
        Returns 0 if the guard dies, because all processes of the sandbox die with it.
        """
        number = self.reserve_number()
        done = self._kill_requests[number] = self._loop.create_future()
        try:
            if not self.dead.done():
                await self._send(_pack_request(protocol.KILL_ALL, number, user=user), b"", ())
                either: set[asyncio.Future[Any]] = {done, self.dead}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return done.result() if done.done() else 0
        finally:
            self._kill_requests.pop(number, None)

    def delegate_pipe(self, fd: int) -> None:
        """Pass a pipe to the guard, which discards what processes still write to it. Closes our copy, `fd`."""
        try:
            with contextlib.suppress(OSError):  # on failure the writer gets SIGPIPE, which is acceptable
                socket.send_fds(self._sock, [_pack_request(protocol.DISCARD)], [fd])
        finally:
            os.close(fd)

    async def _send(self, head: bytes, body: bytes, fds: Sequence[int]) -> None:
        if len(body) > protocol.MAX_MESSAGE:
            body_file = create_memory_file(body + b"\0")
            try:
                *fields, flags = protocol.REQUEST.unpack(head)
                await self._send(
                    protocol.REQUEST.pack(*fields, flags | protocol.FLAG_BODY_IN_FILE), b"", (*fds, body_file)
                )
            finally:
                os.close(body_file)
            return
        end = time.monotonic() + SEND_SECONDS
        while True:
            try:
                socket.send_fds(self._sock, [head, body], list(fds))
            except BlockingIOError:
                await self._wait_writable()
            except OSError as error:
                if error.errno in CONNECTION_LOST:  # pending commands complete when the guard's death is noticed
                    return
                if error.errno != errno.ETOOMANYREFS or time.monotonic() > end:
                    raise SandboxError(f"cannot send a request to the sandbox's guard: {error}") from error
                # Too many descriptors of this user are in flight, and there is no notification when there are
                # fewer.
                await asyncio.sleep(0.005)
            else:
                return

    async def _wait_writable(self) -> None:
        async with self._write_lock:
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
                self._loop.remove_reader(self._sock.fileno())  # the guard's death is detected through its pidfd
                return
            try:
                kind, number, *rest = protocol.REPORT.unpack(data)
            except struct.error:  # not a message of a guard
                self.kill_guard()
                return
            if kind == protocol.READY:
                if not self._ready.done():
                    self._ready.set_result(True)
                continue
            if kind == protocol.ALL_KILLED:
                request = self._kill_requests.pop(number, None)
                if request is not None and not request.done():
                    request.set_result(rest[-1])
                continue
            if kind == protocol.INTERRUPTED:
                done = self._interrupted.pop(number, None)
                if done is not None and not done.done():
                    done.set_result(None)
                continue
            reason, status, cpu, peak, wall, survivors = rest
            self.ended_cpu += cpu
            self.peak_memory = max(self.peak_memory, peak)
            future = self._pending.pop(number, None)
            if future is not None and not future.done():
                future.set_result(CommandReport(reason, status, cpu, peak, wall, survivors))

    def _on_exit(self) -> None:
        self._close_socket()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self.dead.set_result(self._describe_exit())
        if not self._ready.done():
            self._ready.set_result(False)
        for future in self._pending.values():
            if not future.done():
                future.set_result(None)
        self._pending.clear()

    def _describe_exit(self) -> str:
        if not self._is_child:
            return "it exited"
        try:
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            description = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        except ChildProcessError:
            description = "already reaped by other code"
        if self._folder is not None:
            with contextlib.suppress(OSError), open(self._folder / LOG_FILE, "rb") as file:  # noqa: PTH123
                description = f"{description}; {file.read(4000).decode('utf-8', 'replace').strip()}".rstrip("; ")
        return description

    def _close_socket(self) -> None:
        if self._sock.fileno() >= 0:
            self._receive()
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
            self._sock.close()

    def hang_up(self) -> None:
        """Shut the connection down, which makes the guard kill its sandbox's processes and exit.

        Works even if a forked process holds a copy of the socket.
        """
        if self._sock.fileno() >= 0:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    async def wait_closed(self, *, timeout: float) -> bool:
        """Wait for the guard to exit, and kill it after `timeout` seconds. Return False if it had to be killed."""
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


def _pack_request(op: int, number: int = 0, *, amount: int = 0, user: int = -1) -> bytes:
    return protocol.REQUEST.pack(op, number, 0, 0, amount, 0, user, -1, 0)
