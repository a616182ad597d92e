"""Take savepoints of a worker, which is a persistent Python interpreter in a sandbox.

A savepoint is a frozen fork of the interpreter. If a cell (a piece of code to execute) crashes or is killed, the
savepoint becomes the interpreter and continues from the state before that cell. This module runs in the monitor,
the parent process of the interpreter and its savepoint.

The monitor starts to take a savepoint after every cell; a cell that arrives meanwhile waits until it is taken. No
savepoint is taken of a process with several threads, or if the sandbox's memory could not hold the process twice;
the host is then told the reason.
"""

from __future__ import annotations

import _socket
import os
import struct
import time

from rookery.sandbox_runtime.worker import linux
from rookery.sandbox_runtime.worker import protocol as p
from rookery.sandbox_runtime.worker.processes import Child, WorkerProcesses

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

MEMORY_SLACK = 32 << 20
_THREAD_RETRIES = (0.001, 0.002, 0.004, 0.008)
"""Seconds between the first attempts if the interpreter has several threads: a thread that was joined may need a
moment to end."""


class Savepoints:
    """Takes savepoints of the interpreter and replaces the old one by the new one."""

    def __init__(
        self, processes: WorkerProcesses, host: p.FrameConnection, on_decided: Callable[[], None]
    ) -> None:
        """`on_decided` is called when it is known whether there is a savepoint of the current state."""
        self.processes = processes
        self.host = host
        self.on_decided = on_decided
        self.memory = self.sandbox_memory = 0
        """Memory limit of each process, and memory of the whole sandbox, in bytes; 0 if unknown."""
        self.last_cell = 0
        """Number of the last cell that ended."""
        self.missing_reason = ""
        """The reason why there is no savepoint."""
        self.began = 0.0
        """Time at which the savepoint that is being taken was requested; 0 if none is being taken."""
        self.new_fd = -1
        """The monitor's end of the connection to the savepoint that is being taken."""
        self.retry_at = 0.0
        """Time at which to try again to take a savepoint; 0 if no attempt is scheduled."""
        self.retries = 0
        self.deaths = 0
        """Number of savepoints of the current state that were killed."""
        self.undecided_reason = ""
        """The reason why there is no savepoint of the current state so far; empty once the savepoint was taken or
        given up."""

    def drop(self, reason: str) -> None:
        """Discard the savepoint. `reason` is reported when the worker has to start with an empty state."""
        self.missing_reason = reason
        if self.processes.savepoint is not None:
            savepoint, self.processes.savepoint = self.processes.savepoint, None
            self.processes.discard(savepoint)

    def start(self) -> None:
        """Begin to take a savepoint of the current state."""
        self.retries = 0
        self.undecided_reason = "there was no time to take one"
        self.try_save()

    def try_save(self) -> None:
        """Ask the interpreter to fork a savepoint; report the reason to the host if it cannot be taken."""
        self.retry_at = 0.0
        processes = self.processes
        if processes.interpreter is None or self.began or processes.cell is not None:
            return
        stat = linux.read_stat(processes.interpreter.pid)
        if stat is None or stat.state in "ZX":
            return  # dead, which is noticed next
        reason = ""
        if not linux.can_clone():
            reason = "this architecture is not supported"
        elif stat.threads > 1:
            # Tried again and again, because the threads may end while nobody waits.
            retries = self.retries
            delay = (
                _THREAD_RETRIES[retries] if retries < len(_THREAD_RETRIES) else min(1.0, 0.01 * 2 ** (retries - 4))
            )
            self.retry_at = time.monotonic() + delay
            self.retries += 1
            self.undecided_reason = f"it had {stat.threads} threads"
            if self.retries != len(_THREAD_RETRIES) + 1:
                return
            reason = self.undecided_reason
        elif self.sandbox_memory and stat.rss + (self.memory or stat.rss) + MEMORY_SLACK > self.sandbox_memory:
            reason = f"with {stat.rss >> 20} MB it is too large for the sandbox's memory to hold it twice"
        if reason:
            self.decide(False, reason)
            return
        ours, theirs = _socket.socketpair()
        self.began = time.monotonic()
        self.new_fd = ours.detach()
        connection = processes.interpreter.connection
        try:
            connection.flush()
            if connection.unsent:
                raise BlockingIOError
            sock = _socket.socket(fileno=os.dup(connection.write_fd))
            try:
                rights = struct.pack("i", theirs.fileno())
                sock.sendmsg([p.HEAD.pack(0, p.SAVE)], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
            finally:
                sock.close()
        except OSError:
            os.close(self.new_fd)
            self.decide(False, "it could not be reached")
        finally:
            theirs.close()

    def on_copied(self, pid: int, error: bytes) -> None:
        """Handle the interpreter's message that it has forked a savepoint, or why it could not."""
        processes = self.processes
        stat = linux.read_stat(pid) if pid else None
        is_interpreter = processes.interpreter is not None and pid == processes.interpreter.pid
        if stat is None or stat.parent != processes.pid or is_interpreter:
            os.close(self.new_fd)
            self.decide(False, "it could not be copied: " + error.decode("utf-8", "replace"))
        else:
            processes.new_savepoint = Child(pid, self.new_fd)

    def receive(self) -> None:
        """Read a message of the savepoint that is being taken.

        If it says that the savepoint is frozen (it waits and changes nothing any more), the savepoint replaces the
        previous one. After any other message, or if the connection is closed, the new savepoint is discarded.
        """
        processes = self.processes
        assert processes.new_savepoint is not None
        connection = processes.new_savepoint.connection
        connected = connection.receive()
        try:
            kind = next(connection.frames(), (0, b""))[0]
        except p.MalformedFrame:
            kind = -1
        if kind == p.FROZEN:
            savepoint, processes.new_savepoint = processes.new_savepoint, None
            self.drop("")
            processes.savepoint = savepoint
            self.decide(True, "", time.monotonic() - self.began)
        elif kind or not connected:
            self.drop_new()

    def drop_new(self) -> None:
        """Give up the savepoint that is being taken, if it was forked already."""
        if self.processes.new_savepoint is not None:
            savepoint, self.processes.new_savepoint = self.processes.new_savepoint, None
            self.processes.discard(savepoint)
            self.decide(False, "its savepoint was killed")

    def decide(self, saved: bool, reason: str, seconds: float = 0.0) -> None:
        """Tell the host whether there is a savepoint of the current state, then call `on_decided`.

        `reason` says why there is none. `seconds` is the time that it took.
        """
        self.undecided_reason, self.began = "", 0.0
        if not saved:
            self.drop(reason)
        self.host.send(p.SAVED, p.SAVED_HEAD.pack(self.last_cell, saved, seconds), reason.encode())
        self.on_decided()
