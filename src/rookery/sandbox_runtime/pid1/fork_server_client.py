"""Pid 1's side of the fork servers in its sandbox: warm Python interpreters that fork one child per command.

A fork server runs as the user of its commands and is not trusted:

- pid 1 never waits for one. If it is not ready, dead, stopped or slow, the command is started with posix_spawn;
- its statements about itself are not believed. The kernel tells which process sent a message, and that process is
  accepted as the command only if it is a child of pid 1, has the server's tag (an inherited resource limit; see
  `guard`), has the right user and is not yet a command.
"""

import _socket
import os
import resource
import select
import struct
import time

from rookery.sandbox_runtime import bundle, guard, processes
from rookery.sandbox_runtime.guard_protocol import FLAG_WARM
from rookery.sandbox_runtime.lightweight import _signal, send_message, suppress
from rookery.sandbox_runtime.pid1.spawn import Spawner

READY, START = b"ready", b"start"
MAX_SERVERS = 4
"""Maximum number of fork servers of one sandbox. Each combination of interpreter and user needs its own."""
RESPONSE_SECONDS = 0.5
BACKOFF_SECONDS = 5.0
"""Seconds after a failure before another fork server is started."""
_CREDENTIALS = struct.Struct("<iII")
_ENVIRONMENT = (b"HOME=/", b"LANG=C.UTF-8", b"PATH=/usr/local/bin:/usr/bin:/bin")
_PROGRAM_FILE = b"/proc/self/fd/4"
"""The fork server's source. It is passed as a file, not with `-c`, because newer versions of Python keep their
arguments in `sys.orig_argv`."""

Key = tuple[bytes, int, int]
"""Identifies a fork server: path of the interpreter, uid, gid."""


def build_program() -> bytes:
    """Return the source of the fork server."""
    return bundle.build_source("python", "fork_server", call="main(initial_modules)").encode()


class ForkServer:
    """A fork server of this sandbox: an interpreter that is already running."""

    __slots__ = ("key", "pid", "ready", "sock", "start_ticks", "tag")

    def __init__(self, key: Key, sock: _socket.socket, pid: int, tag: int) -> None:
        self.key = key
        self.sock = sock
        self.pid = pid
        self.tag = tag
        self.start_ticks = processes.now_ticks()
        self.ready = False


class PendingCommand:
    """A command that was requested from a fork server and has not started yet."""

    __slots__ = ("body", "command", "deadline", "fds", "request", "server", "sock", "user")

    def __init__(
        self, command: guard.RunningCommand, request: guard.CommandRequest, server: ForkServer, user: int
    ) -> None:
        self.command = command
        self.request = request
        self.server = server
        self.user = user
        self.sock: _socket.socket | None = None
        self.body = -1
        self.fds: list[int] = []
        self.deadline = time.monotonic() + RESPONSE_SECONDS

    def open(self) -> _socket.socket:
        """Open the file descriptors that are needed until the command starts.

        Return the end of the socket pair that the forked process gets.
        """
        self.sock, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        try:
            self.sock.setblocking(False)
            self.sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_PASSCRED, 1)
            self.body = os.memfd_create("command", os.MFD_CLOEXEC)
            for fd in self.request.fds[:4]:
                self.fds.append(os.dup(fd))
        except OSError:
            theirs.close()
            raise
        return theirs

    def close(self) -> None:
        if self.sock is not None:
            self.sock.close()
        for fd in (*self.fds, self.body):
            if fd >= 0:
                os.close(fd)
        self.fds, self.body = [], -1


class ForkServerClient:
    """Starts the fork servers of one sandbox and requests commands from them."""

    def __init__(self, init: guard.Guard, program: bytes) -> None:
        self.init = init
        self.program = program
        self.servers: dict[Key, ForkServer] = {}
        self.pending: dict[int, PendingCommand] = {}
        """Commands by the file descriptor of their socket."""
        self.next_start = 0.0

    def pids(self) -> set[int]:
        return {server.pid for server in self.servers.values()}

    def request(
        self,
        command: guard.RunningCommand,
        request: guard.CommandRequest,
        interpreter: bytes,
        ids: tuple[int, int],
        spawner: Spawner,
    ) -> bool:
        """Ask the fork server for this interpreter and user to fork a command.

        Return False if it is not ready. If there is none, one is started for later commands.
        """
        key = (interpreter, *ids)
        server = self.servers.get(key)
        if server is None:
            if len(self.servers) < MAX_SERVERS and time.monotonic() >= self.next_start:
                self.start_server(key, spawner)
                command.tag = self.init.next_tag()
            return False
        if not server.ready:
            return False
        pending = PendingCommand(command, request, server, ids[0] if ids[0] >= 0 else os.getuid())
        try:
            theirs = pending.open()
            try:
                with memoryview(request.buffer) as view, view[request.start : request.end] as body:
                    os.writev(pending.body, [body, b"\0"])
                fds = [theirs.fileno(), pending.body, *request.fds[:4]]
                send_message(server.sock, b"%d %s" % (request.argc, interpreter), fds)
            finally:
                theirs.close()
        except OSError:
            pending.close()
            self.drop(server)
            return False
        assert pending.sock is not None
        self.pending[pending.sock.fileno()] = pending
        self.init.poller.register(pending.sock.fileno(), select.POLLIN)
        return True

    def start_server(self, key: Key, spawner: Spawner) -> None:
        """Start a fork server as the real user of this process, which the caller has set to the command's user."""
        self.next_start = time.monotonic() + BACKOFF_SECONDS
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        tag = self.init.next_tag()
        program = -1
        problem = 1
        try:
            program = os.memfd_create("fork_server", os.MFD_CLOEXEC)
            os.write(program, self.program)
            strings = (b"/", key[0], _PROGRAM_FILE, *_ENVIRONMENT)
            buffer = bytearray(b"\0".join(strings) + b"\0")
            offsets = [0]
            for string in strings:
                offsets.append(offsets[-1] + len(string) + 1)
            pid, problem = spawner.spawn([key[0]], buffer, offsets, 2, (0, 1, 2, theirs.fileno(), program))
        finally:
            theirs.close()
            if program >= 0:
                os.close(program)
            if problem:
                ours.close()
        if problem:
            return
        self.next_start = 0.0
        ours.setblocking(False)
        self.init.childless = False
        self.servers[key] = ForkServer(key, ours, pid, tag)
        self.init.poller.register(ours.fileno(), select.POLLIN)

    def on_readable(self, fd: int) -> None:
        """Handle a message from a fork server or from a forked command."""
        pending = self.pending.get(fd)
        if pending is not None:
            self.on_forked(pending)
            return
        for server in list(self.servers.values()):
            if server.sock.fileno() == fd:
                try:
                    message = server.sock.recv(16)
                except BlockingIOError:
                    return
                except OSError:
                    message = b""
                if message == READY and not server.ready:
                    server.ready = True
                else:
                    self.drop(server)

    def on_forked(self, pending: PendingCommand) -> None:
        """Let the forked process become the command. If it fails the checks, use posix_spawn instead."""
        assert pending.sock is not None
        try:
            data, ancillary, _, _ = pending.sock.recvmsg(16, _socket.CMSG_SPACE(_CREDENTIALS.size))
        except BlockingIOError:
            return
        except OSError:
            data, ancillary = b"", []
        pid = -1
        for level, kind, raw in ancillary:
            if level == _socket.SOL_SOCKET and kind == _socket.SCM_CREDENTIALS:
                pid = _CREDENTIALS.unpack(raw)[0]
        if data != READY or not self.is_credible(pending, pid):
            self.spawn_instead(pending)
            return
        init, command = self.init, pending.command
        self.forget(pending)
        try:
            if init.tag_base:
                resource.prlimit(pid, guard.TAG_LIMIT, (init.tag_base - command.tag,) * 2)
            pending.sock.send(START)
        except OSError:
            self.spawn(pending)
            return
        command.pid = pid
        init.track(command, pending.request)
        pending.close()

    def is_credible(self, pending: PendingCommand, pid: int) -> bool:
        """Return whether a process can be the one that the fork server forked for the command."""
        stat = processes.read_stat(pid) if pid > 1 else None
        if stat is None or pid in self.init.running or pid in self.pids():
            return False
        if stat[0] in "ZX" or stat[1] != self.init.pid or stat[2] < pending.server.start_ticks - 1:
            return False
        try:
            owner = os.stat(f"/proc/{pid}").st_uid
        except OSError:
            return False
        tag = self.init.read_tag(pid)
        return owner == pending.user and (tag is None or tag == pending.server.tag)

    def spawn_instead(self, pending: PendingCommand) -> None:
        self.forget(pending)
        self.spawn(pending)

    def spawn(self, pending: PendingCommand) -> None:
        request = pending.request
        request.flags &= ~FLAG_WARM
        request.fds = pending.fds
        request.buffer, request.start, request.end = self.init.map_body_file(os.dup(pending.body))
        try:
            self.init.spawn(pending.command, request)
        finally:
            pending.close()

    def cancel(self, command: guard.RunningCommand) -> bool:
        """Cancel a command that a fork server has not started yet. Return False if there is no such command."""
        for pending in [one for one in self.pending.values() if one.command is command]:
            self.forget(pending)
            pending.close()
            return True
        return False

    def forget(self, pending: PendingCommand) -> None:
        assert pending.sock is not None
        self.init.poller.unregister(pending.sock.fileno())
        del self.pending[pending.sock.fileno()]

    def drop(self, server: ForkServer) -> None:
        """Kill a fork server. Its pending commands are started with posix_spawn when their deadline passes."""
        if self.servers.pop(server.key, None) is not server:
            return
        self.next_start = time.monotonic() + BACKOFF_SECONDS
        self.init.poller.unregister(server.sock.fileno())
        server.sock.close()
        with suppress(ProcessLookupError, PermissionError):
            os.kill(server.pid, _signal.SIGKILL)

    def on_child_reaped(self, pid: int) -> None:
        """Forget a fork server that ended: its pid may be reused."""
        for server in [one for one in self.servers.values() if one.pid == pid]:
            server.pid = -1
            self.servers.pop(server.key)
            self.init.poller.unregister(server.sock.fileno())
            server.sock.close()

    def timer_deadlines(self) -> list[float]:
        return [pending.deadline for pending in self.pending.values()]

    def run_timers(self, now: float) -> None:
        for pending in [one for one in self.pending.values() if one.deadline <= now]:
            self.drop(pending.server)
            self.spawn_instead(pending)
