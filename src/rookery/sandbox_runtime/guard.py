"""The guard: the process that starts, watches and kills all processes of one sandbox.

It runs on the host, as a child of the process that owns a `subprocess` sandbox. Its class is also the base class
of pid 1 in `local` and `docker` sandboxes. It imports only modules that load fast.

Guarantees:
- every process of the sandbox is a descendant of the guard, which is a child subreaper: no process escapes;
- a killed command is reported only after its whole process tree is dead;
- when the owner dies or closes the connection, the guard kills all processes, removes the sandbox's directory and
  lease (the file that records that the sandbox exists), and exits.

Reports that the owner does not read are queued: the guard never blocks on sending them.

How a process is assigned to a command: a descendant of the command's first process belongs to that command. An
orphan belongs to the command that its resource limits name: every command gets its own hard limit (a tag) of a
resource that no kernel enforces any more, always lower than the last one. A program can lower its limits but
not raise them, so it can claim to belong to a later command but never to an earlier one. If a process has no
tag, its environment variable `ROOKERY_COMMAND` counts. If that cannot be read either, the process belongs to the
command being killed unless it started earlier.
"""

from __future__ import annotations

import _socket
import errno
import mmap
import os
import resource
import select
import struct
import time

from rookery.sandbox_runtime import guard_protocol as protocol
from rookery.sandbox_runtime import processes
from rookery.sandbox_runtime.lightweight import _signal, suppress

TYPE_CHECKING = False  # importing `typing` would take as long as everything else
if TYPE_CHECKING:
    from collections.abc import Iterator

    Buffer = bytearray | mmap.mmap

MAX_DISCARDED_PIPES = 64
MAX_TAG = 1 << 40
TAG_LIMIT = 10
"""The resource whose hard limit is the tag: RLIMIT_LOCKS, which no kernel since Linux 2.4 enforces."""
MIN_GUARD_MEMORY = 64 << 20
"""Bytes that the guard itself needs. The sandbox's memory limit applies to the guard too, so that every command
inherits it."""
KILL_SECONDS = 5.0
SCANS_BEFORE_STOP = 3
"""After this many scans that still find processes, all of them are stopped, because the process tree may grow
faster than it is killed."""


class CommandRequest:
    """A command that the owner wants started.

    From `start` to `end`, `buffer` holds the working directory, the arguments and the environment, separated by
    NUL.
    """

    __slots__ = ("argc", "buffer", "cpu", "end", "fds", "flags", "group", "memory", "start", "user")

    def __init__(self, fields: tuple[int, ...], cpu: float, body: tuple[Buffer, int, int], fds: list[int]) -> None:
        self.memory, self.argc, self.user, self.group, self.flags = fields
        self.cpu = cpu
        self.buffer, self.start, self.end = body
        self.fds = fds


class RunningCommand:
    """A command whose first process is alive, or whose process tree is being killed."""

    def __init__(self, number: int, wall: float) -> None:
        self.number = number
        self.pid = self.tag = 0
        self.error_slot = -1
        """Offset in shared memory where a forked interpreter stores the errno of a failed start."""
        self.started_alone = False
        """True if the sandbox had no other process when the command started."""
        self.reason = protocol.EXITED
        self.result: tuple[int, float, int] | None = None
        self.start_ticks = processes.now_ticks()
        self.started = time.monotonic()
        self.deadline = self.started + wall if wall > 0 else 0.0


class Guard:
    """Starts, reaps and kills the commands of a sandbox until the owner closes the connection or dies."""

    def __init__(self, channel: _socket.socket) -> None:
        self.channel = channel
        self.pid = os.getpid()
        self.directory = self.lease = ""
        self.memory_limit = self.process_limit = 0
        """Memory limit of each process in bytes, and limit of the number of processes. 0 means that the guard does
        not enforce the limit."""
        self.last_number = self.last_tag = 0
        hard = resource.getrlimit(TAG_LIMIT)[1]
        self.tag_base = MAX_TAG if hard == resource.RLIM_INFINITY else hard if hard > 1 << 33 else 0
        self.running: dict[int, RunningCommand] = {}
        """Commands by the pid of their first process."""
        self.reports: list[bytes] = []
        self.discarded_pipes: list[int] = []
        self.childless = True
        self.count_interval = 0.1
        self.next_count = 0.0
        self.next_discard = 0.0
        self.buffer = mmap.mmap(-1, protocol.MAX_MESSAGE + 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.wakeup_reader, self.wakeup_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        _signal.set_wakeup_fd(self.wakeup_writer, warn_on_full_buffer=False)
        self.poller = select.poll()
        self.poller.register(self.wakeup_reader, select.POLLIN)
        self.poller.register(channel.fileno(), select.POLLIN)
        self.owner_pidfd = self.watch_owner()

    def watch_owner(self) -> int:
        """Watch the owner's process, because a fork of it may keep the connection open after its death.

        Return a pidfd, or -1 if the owner is not watched.
        """
        owner = os.pidfd_open(os.getppid())
        self.poller.register(owner, select.POLLIN)
        return owner

    def run(self) -> None:
        """Serve requests until the owner closes the connection or dies."""
        channel_fd = self.channel.fileno()
        while True:
            for fd, _ in self.poller.poll(self.poll_timeout()):
                if fd == self.owner_pidfd or (fd == channel_fd and not self.receive_requests()):
                    return
                if fd not in (channel_fd, self.wakeup_reader):
                    self.on_readable(fd)
            self.drain_wakeups()
            self.reap()
            now = time.monotonic()
            for command in [c for c in self.running.values() if c.deadline and c.deadline <= now]:
                self.kill_command(command, protocol.TIME_LIMIT)
            if self.process_limit and not self.childless and now >= self.next_count:
                self.enforce_process_limit(now)
            self.run_timers(now)
            self.drain_discarded_pipes(now)
            self.flush_reports()

    def poll_timeout(self) -> float | None:
        """Return the milliseconds until the next deadline; None if there is none."""
        times = [c.deadline for c in self.running.values() if c.deadline] + self.timer_deadlines()
        if self.process_limit and not self.childless:
            times.append(self.next_count)
        if self.discarded_pipes:
            times.append(self.next_discard)
        return max(0.0, (min(times) - time.monotonic()) * 1000 + 0.5) if times else None

    def drain_wakeups(self) -> None:
        with suppress(BlockingIOError):
            os.read(self.wakeup_reader, 4096)

    # ---- requests

    def receive_requests(self) -> bool:
        """Handle all waiting requests. Return False if the owner has closed the connection."""
        while True:
            try:
                size, ancillary, _, _ = self.channel.recvmsg_into(
                    [self.buffer], _socket.CMSG_SPACE(8 * 4), _socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return True
            except ConnectionError:
                return False
            if not size:
                return False
            fds = [
                fd for level, _, raw in ancillary for fd in struct.unpack(f"{len(raw) // 4}i", raw) if level == 1
            ]
            self.handle_received(size, fds)

    def handle_received(self, size: int, fds: list[int]) -> None:
        """Handle the request in `buffer`, then clear it and close its file descriptors."""
        try:
            self.handle_request(size, fds)
        finally:
            self.buffer[:size] = bytes(size)  # arguments of one command must not be visible to another
            for fd in fds:
                os.close(fd)

    def handle_request(self, size: int, fds: list[int]) -> None:
        op, number, wall, cpu, amount, argc, user, group, flags = protocol.REQUEST.unpack_from(self.buffer)
        if op == protocol.SPAWN:
            in_file = flags & protocol.FLAG_BODY_IN_FILE
            body = self.map_body_file(fds.pop()) if in_file else (self.buffer, protocol.REQUEST.size, size)
            request = CommandRequest((amount, argc, user, group, flags), cpu, body, fds)
            self.spawn(RunningCommand(number, wall), request)
            return
        text = bytes(self.buffer[protocol.REQUEST.size : size])
        if op == protocol.HELLO:
            self.configure([os.fsdecode(part) for part in text.split(b"\0")])
        elif op == protocol.KILL_ALL:
            left = self.kill_everything() if user < 0 else self.kill_user(user)
            self.reports.append(protocol.REPORT.pack(protocol.ALL_KILLED, number, 0, 0, 0, 0, 0, left))
        elif op == protocol.DISCARD:
            if len(self.discarded_pipes) < MAX_DISCARDED_PIPES:
                self.discarded_pipes.append(fds.pop())
        else:
            for command in self.find_commands(number):
                if op == protocol.KILL:
                    self.kill_command(command, protocol.KILLED)
                else:
                    self.interrupt_script(command, text.decode(), amount)
            if op == protocol.INTERRUPT:
                self.reports.append(protocol.REPORT.pack(protocol.INTERRUPTED, number, 0, 0, 0, 0, 0, 0))

    def find_commands(self, number: int) -> list[RunningCommand]:
        return [c for c in self.running.values() if c.number == number]

    def map_body_file(self, fd: int) -> tuple[Buffer, int, int]:
        """Map the file with the text of a request that did not fit into a message, and close the file.

        Return the mapping, and the start and end of the text without the NUL at its end.
        """
        try:
            size = os.fstat(fd).st_size
            return mmap.mmap(fd, size, mmap.MAP_PRIVATE), 0, size - 1
        finally:
            os.close(fd)

    def configure(self, parts: list[str]) -> None:
        """Apply the owner's first message: directory, lease, and limits of memory, file size and processes."""
        self.directory, self.lease = parts[0], parts[1]
        self.memory_limit, file_size, self.process_limit = (int(part) for part in parts[2:5])
        processes.lower_limit(resource.RLIMIT_CORE, 0)
        processes.lower_limit(resource.RLIMIT_NOFILE, 65536, 4096)
        if self.memory_limit:
            processes.lower_limit(resource.RLIMIT_DATA, max(self.memory_limit, MIN_GUARD_MEMORY))
        if file_size:
            processes.lower_limit(resource.RLIMIT_FSIZE, file_size)
        self.reports.append(protocol.REPORT.pack(protocol.READY, 0, 0, 0, 0, 0, 0, 0))

    # ---- starting commands

    def spawn(self, command: RunningCommand, request: CommandRequest) -> None:
        self.last_number = max(self.last_number, command.number)
        command.tag = self.next_tag()
        self.prefer_for_oom(True)
        try:
            problem = self.start(command, request)
        finally:
            self.prefer_for_oom(False)
        if command.pid:
            self.track(command, request)
        elif problem is not None:
            self.report(command, *problem)

    def next_tag(self) -> int:
        """Tag all processes that are started from now on with a new number, and return the number.

        The tag is an inherited resource limit.
        """
        self.last_tag += 1
        if self.tag_base:
            resource.setrlimit(TAG_LIMIT, (self.tag_base - self.last_tag,) * 2)
        return self.last_tag

    def start(self, command: RunningCommand, request: CommandRequest) -> tuple[int, int] | None:
        """Start the command and set its pid. If that fails, return the reason and errno instead."""
        parts = bytes(request.buffer[request.start : request.end]).split(b"\0")
        argv, pairs = parts[1 : request.argc + 1], parts[request.argc + 1 :]
        env = dict(pair.split(b"=", 1) for pair in pairs)
        try:
            os.chdir(parts[0])
        except OSError as error:
            return protocol.NO_DIRECTORY, error.errno or 0
        actions = [(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in enumerate(request.fds[:4])]
        problem = errno.ENOENT
        for program in processes.find_programs(argv[0], env.get(b"PATH", b"")):
            try:
                # posix_spawn uses vfork: unlike fork, its cost does not grow with our heap.
                command.pid = os.posix_spawn(
                    program,
                    argv,
                    env,
                    file_actions=actions,
                    setsid=True,
                    setsigmask=(),
                    setsigdef=processes.RESET_SIGNALS,
                )
                break
            except OSError as error:
                problem = error.errno or problem
            except ValueError:  # an argument or variable that the system does not accept
                problem = errno.EINVAL
        os.chdir("/")
        return protocol.NOT_STARTED, problem

    def track(self, command: RunningCommand, request: CommandRequest) -> None:
        """Supervise a command that has just been started, until it ends. Lower its memory and CPU limits.

        `request` is the request that started the command. It has the command's own limits, which may be lower than
        those of the sandbox.
        """
        self.running[command.pid] = command
        command.started_alone, self.childless = self.childless, False
        self.count_interval = 0.1
        self.next_count = time.monotonic() + self.count_interval
        # The sandbox's limits are inherited. Lower limits of the command apply a moment after its start.
        memory = request.memory
        if memory and (not self.memory_limit or memory < self.memory_limit or memory < MIN_GUARD_MEMORY):
            processes.lower_limit(resource.RLIMIT_DATA, memory, pid=command.pid)
        if request.cpu > 0:
            seconds = max(1, int(-(-request.cpu // 1)))
            processes.lower_limit(resource.RLIMIT_CPU, seconds + 1, seconds, pid=command.pid)

    # ---- hooks for pid 1

    def prefer_for_oom(self, on: bool) -> None:
        """Choose whether the OOM killer prefers processes that are started from now on. The base class cannot."""

    def on_readable(self, fd: int) -> None:
        """Handle input on a file descriptor that a subclass registered with the poller."""

    def on_child_reaped(self, pid: int) -> None:
        """Handle the end of a child that is not the first process of a command."""

    def timer_deadlines(self) -> list[float]:
        """Return the times at which `run_timers` must be called."""
        return []

    def run_timers(self, now: float) -> None:
        """Do the work whose time in `timer_deadlines` has come."""

    def report_failed_start(self, command: RunningCommand) -> bool:  # noqa: ARG002
        """Report a command whose process ended before it executed its program.

        Return False, without a report, if the command did start.
        """
        return False

    # ---- reports

    def report(
        self, command: RunningCommand, reason: int, status: int, cpu: float = 0, peak: int = 0, left: int = 0
    ) -> None:
        wall = time.monotonic() - command.started
        self.reports.append(
            protocol.REPORT.pack(protocol.ENDED, command.number, reason, status, cpu, peak, wall, left)
        )

    def reap(self) -> None:
        while not self.childless:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                self.childless = True
                return
            if not pid:
                return
            command = self.running.pop(pid, None)
            if command is None:
                self.on_child_reaped(pid)
                continue
            command.result = (status, usage.ru_utime + usage.ru_stime, usage.ru_maxrss << 10)
            if command.reason == protocol.EXITED and not self.report_failed_start(command):
                self.report(command, protocol.EXITED, *command.result)

    def drain_discarded_pipes(self, now: float) -> None:
        """Discard the output of processes that outlive their command, so that full pipes do not block them."""
        if not self.discarded_pipes or now < self.next_discard:
            return
        self.next_discard = now + 0.05
        for fd in list(self.discarded_pipes):
            try:
                if os.read(fd, 1 << 16):
                    continue
            except BlockingIOError:
                continue
            self.discarded_pipes.remove(fd)
            os.close(fd)

    def flush_reports(self) -> None:
        while self.reports:
            try:
                self.channel.send(self.reports[0])
            except BlockingIOError:
                self.poller.modify(self.channel.fileno(), select.POLLIN | select.POLLOUT)
                return
            except OSError:
                self.reports.clear()  # the owner is gone; the loop notices next
                return
            self.reports.pop(0)
        self.poller.modify(self.channel.fileno(), select.POLLIN)

    # ---- killing

    def kill_namespace(self) -> bool:
        """Kill all processes with one signal, if that reaches no process outside the sandbox.

        Return whether all are gone. The base class cannot do it.
        """
        return False

    def stop_all(self, *, kill: bool) -> None:
        """Stop all processes of the sandbox, so that they cannot fork; with `kill`, kill them instead.

        Do nothing if the signal would reach processes outside the sandbox, as in the base class.
        """

    def resume_stopped(self) -> None:
        """Continue the processes that `stop_all` stopped and that are still alive."""

    def kill_command(self, command: RunningCommand, reason: int) -> None:
        """Kill a command with its process tree, and report its end with this reason."""
        command.reason = reason
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(command.pid, _signal.SIGKILL)  # reaches the whole group at once: forks cannot outrun it
        left = 0
        if not (command.started_alone and command.tag == self.last_tag and self.kill_namespace()):
            left = self.kill_tree(command, str(command.number), command.start_ticks, whole=True)
        if command.result is None:  # blocked in the kernel: give up instead of waiting for ever
            self.running.pop(command.pid, None)
        self.report(command, reason, *(command.result or (_signal.SIGKILL, 0.0, 0)), left)

    def interrupt_script(self, command: RunningCommand, mark: str, since_ticks: int) -> None:
        """Kill what the current script of a persistent shell started, then make the shell abandon the script.

        `mark` identifies the script in environment variables, and `since_ticks` is its start time.
        """
        with suppress(ProcessLookupError):
            os.kill(command.pid, _signal.SIGSTOP)
            self.kill_tree(command, mark, since_ticks, whole=False)
            os.kill(command.pid, protocol.INTERRUPT_SIGNAL)
            os.kill(command.pid, _signal.SIGCONT)

    def kill_tree(self, command: RunningCommand, mark: str, since_ticks: int, *, whole: bool) -> int:
        """Kill the processes of a command, or of one script in it, until two scans in a row find none.

        Return how many are left after `KILL_SECONDS`. The arguments are those of `find_members`.
        """
        try:
            return self._kill_until_gone(command, mark, since_ticks, whole=whole)
        finally:
            self.resume_stopped()

    def _kill_until_gone(self, command: RunningCommand, mark: str, since_ticks: int, *, whole: bool) -> int:
        end = time.monotonic() + KILL_SECONDS
        empty_scans = scans = 0
        while True:
            if scans >= SCANS_BEFORE_STOP:
                self.stop_all(kill=time.monotonic() > end - KILL_SECONDS / 2)
            victims = list(self.find_members(command, mark, since_ticks, whole=whole))
            for pid in victims:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, _signal.SIGKILL)
            self.reap()
            scans += bool(victims)
            empty_scans = 0 if victims else empty_scans + 1
            # A list of children that is read while one of them ends may miss another: hence the second scan.
            if (empty_scans > 1 and not (whole and command.pid in self.running)) or time.monotonic() > end:
                return len(victims)
            if victims or empty_scans > 1:
                select.select([self.wakeup_reader], [], [], 0.01)
                self.drain_wakeups()

    def find_members(self, command: RunningCommand, mark: str, since_ticks: int, *, whole: bool) -> Iterator[int]:
        """Yield the living processes of a command or, unless `whole`, of one script that its shell executes.

        `mark` is the value of `ROOKERY_COMMAND` in these processes, and `since_ticks` the earliest start time of a
        process that hides this variable.
        """
        todo: list[tuple[int, bool | None]] = [(pid, None) for pid in processes.list_children(self.pid)]
        while todo:
            pid, belongs = todo.pop()
            if pid == command.pid:
                belongs = True if whole else None
                todo += [(child, belongs) for child in processes.list_children(pid)]
                if whole and (processes.read_stat(pid) or "Z")[0] not in "ZX":
                    yield pid
                continue
            stat = processes.read_stat(pid)
            if pid in self.running or stat is None or stat[0] in "ZX":
                continue
            tag = self.read_tag(pid) if whole and not belongs else None
            if tag is not None:  # a tag that was never assigned is a lie: then only the process's age counts
                belongs = tag == command.tag if 0 < tag <= self.last_tag else stat[2] >= since_ticks
            elif not (whole and belongs):
                claimed = self.check_claim(self.read_claim(pid), mark, whole=whole)
                belongs = (
                    claimed if claimed is not None else stat[2] >= since_ticks if belongs is None else belongs
                )
            todo += [(child, belongs) for child in processes.list_children(pid)]
            if belongs:
                yield pid

    def read_claim(self, pid: int) -> str:
        """Return the value of `ROOKERY_COMMAND` in a process's environment; empty if it cannot be read."""
        return processes.read_variable(pid, processes.COMMAND_VARIABLE) or ""

    def read_tag(self, pid: int) -> int | None:
        """Return the tag of the command that started a process; None if the process has no tag."""
        with suppress(OSError, ValueError):
            hard = resource.prlimit(pid, TAG_LIMIT)[1]
            return self.tag_base - hard if self.tag_base and hard != resource.RLIM_INFINITY else None
        return None

    def check_claim(self, claim: str, mark: str, *, whole: bool) -> bool | None:
        """Return whether a process with `claim` as its `ROOKERY_COMMAND` belongs to the command or script `mark`.

        Return None if the claim does not tell.
        """
        number, _, script = claim.partition(".")
        if not number.isdecimal() or not 0 < int(number[:9]) <= self.last_number:
            return None
        if whole:
            return number == mark
        if number == mark.partition(".")[0] and not script:
            return None  # a fork of the shell itself shows the shell's environment
        return claim == mark

    def enforce_process_limit(self, now: float) -> None:
        """Count all processes. If they exceed the limit, kill the command that has most of them."""
        self.count_interval = min(1.0, self.count_interval * 2)
        self.next_count = now + self.count_interval
        total, todo = 0, processes.list_children(self.pid)
        while todo and total <= self.process_limit:
            total += 1
            todo += processes.list_children(todo.pop())
        if total <= self.process_limit:
            return
        sizes = {
            c: sum(1 for _ in self.find_members(c, str(c.number), c.start_ticks, whole=True))
            for c in self.running.values()
        }
        if sizes:
            self.kill_command(max(sizes, key=lambda c: sizes[c]), protocol.PROCESS_LIMIT)
        else:
            self.kill_descendants()

    def kill_descendants(self) -> None:
        end = time.monotonic() + 2 * KILL_SECONDS
        while not self.childless and time.monotonic() < end:
            todo = processes.list_children(self.pid)
            for pid in list(self.running):
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, _signal.SIGKILL)
            while todo:
                pid = todo.pop()
                todo += processes.list_children(pid)
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, _signal.SIGKILL)
            self.reap()
            if not self.childless:
                select.select([self.wakeup_reader], [], [], 0.01)
                self.drain_wakeups()

    def kill_everything(self) -> int:
        """Kill all processes of the sandbox. Return how many are left."""
        self.kill_descendants()
        return 0 if self.childless else len(processes.list_children(self.pid))

    def kill_user(self, user: int) -> int:  # noqa: ARG002
        """Kill all processes of one user. Return how many are left.

        In a guard all processes have the same user, so all are killed.
        """
        return self.kill_everything()

    def shut_down(self) -> None:
        """Kill all processes of the sandbox. If none is left, remove the sandbox's directory and lease."""
        self.kill_descendants()
        if self.directory and self.childless:
            processes.remove_tree(self.directory)
            with suppress(FileNotFoundError):
                os.unlink(self.lease)


def main() -> None:
    import ctypes

    for name in os.listdir("/proc/self/fd"):
        if int(name) > protocol.CHANNEL_FD:
            with suppress(OSError):
                os.close(int(name))
    os.set_inheritable(protocol.CHANNEL_FD, False)
    os.chdir("/")
    os.umask(0o022)
    pr_set_child_subreaper = 36
    if ctypes.CDLL(None, use_errno=True).prctl(pr_set_child_subreaper, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    channel = _socket.socket(fileno=protocol.CHANNEL_FD)
    channel.setblocking(False)
    guard = Guard(channel)
    try:
        guard.run()
    except BaseException:
        guard.kill_descendants()  # the directory stays: the owner reads the traceback in it, then removes it
        raise
    guard.shut_down()
