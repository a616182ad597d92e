"""Pid 1 of a sandbox: starts commands as their users, reaps them and kills them.

Guarantees:
- a program has no capability and no file descriptor of pid 1, whoever it runs as;
- the arguments and environment of one command do not stay in memory that another command is forked from;
- directory and program of a command are opened with the rights of the command's user only;
- nothing that programs do to a warm interpreter (one that is already running and forks Python commands) keeps a
  command from starting.

If user IDs are mapped, pid 1 has its own user, `PID1_UID`. To start a command it changes only its real user,
and the new process takes that user over before it does anything else. So the settings that the kernel resets on
a change of credentials (parent-death signal, dumpable flag) stay in place.
"""

import _socket
import errno
import gc
import mmap
import os
import resource
import select
import struct
import sys
import time

from rookery.sandbox_runtime import guard, processes, syscalls
from rookery.sandbox_runtime import guard_protocol as protocol
from rookery.sandbox_runtime.lightweight import _signal, send_message, suppress
from rookery.sandbox_runtime.pid1.fork_server_client import ForkServerClient, build_program
from rookery.sandbox_runtime.pid1.netlink_gate import NetlinkGate
from rookery.sandbox_runtime.pid1.spawn import Spawner
from rookery.sandbox_runtime.python import warm_interpreter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from rookery.sandbox_runtime.pid1 import native_init

SPAWNER = Spawner()
PID1_UID = 65535
"""User and group of pid 1. No command can have them."""
with open("/proc/sys/fs/suid_dumpable") as _file:
    CAN_SWITCH_USERS = _file.read().strip() != "1"
"""True if commands can run as different users. With `fs.suid_dumpable=1`, a process that changes its user is not
protected from that user, and programs could read the memory that the new process shares with pid 1."""
_CHDIR_CHECK_SECONDS = 1.0
_REAP_SECONDS = 0.002
_FILE_ERRORS = (errno.ENOENT, errno.EACCES, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
_COMMAND_PREFIX = b"\0%s=" % processes.COMMAND_VARIABLE.encode()
_MAX_ENVIRON = 1 << 20
_WARMUP_RUNS = 20
_ERROR_SLOT = struct.Struct("<i")
_ERROR_SLOTS = 1024
_INTERPRETER = os.stat("/proc/self/exe")
_PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class Init(guard.Guard):
    """Pid 1: starts, reaps and kills commands until the owner closes the connection."""

    warm: "warm_interpreter.Warm | None" = None
    """State of a new interpreter, preloaded in the keeper; None if there is none. Commands that start the same
    Python are forked from this process."""
    fork_server_program = b""
    oom_score_fd = -1
    """File descriptor of /proc/self/oom_score_adj; -1 if the score cannot be changed."""
    oom_score = b"0"
    stopped_before: set[int] | None = None
    """Processes that were already stopped when `stop_all` stopped the others; None if `stop_all` is not in
    effect."""
    user = -1
    """Default user of commands; -1 if all commands run as pid 1's user."""
    fork_servers: ForkServerClient | None = None
    netlink: NetlinkGate | None = None
    environ_page: mmap.mmap | None = None
    error_slots: mmap.mmap | None = None
    """Shared memory in which a forked interpreter stores the errno of a failed start."""

    def watch_owner(self) -> int:
        return -1

    def watch_netlink(self, listener: int) -> None:
        """Respond to seccomp notifications about netlink sockets from now on.

        `listener` is their file descriptor; -1 means that the kernel sends none.
        """
        if listener >= 0:
            self.netlink = NetlinkGate(listener)
            self.poller.register(listener, select.POLLIN)

    def prefer_for_oom(self, on: bool) -> None:
        # Page cache and socket buffers make the kernel kill the largest process, which would be this one.
        if self.oom_score_fd >= 0:
            os.pwrite(self.oom_score_fd, b"1000" if on else self.oom_score, 0)

    # ---- starting commands

    def start(self, command: guard.RunningCommand, request: guard.CommandRequest) -> tuple[int, int] | None:
        buffer, start, end = request.buffer, request.start, request.end
        offsets = [start]
        while (nul := buffer.find(b"\0", offsets[-1], end)) >= 0:
            offsets.append(nul + 1)
        offsets.append(end + 1)
        directory = bytes(buffer[start : offsets[1] - 1])
        name = bytes(buffer[offsets[1] : offsets[2] - 1])
        user = request.user if request.user >= 0 else self.user
        group = request.group if request.group >= 0 else user
        if self.user < 0 and user >= 0:
            return protocol.NOT_STARTED, errno.EPERM
        if PID1_UID in (user, group):
            return protocol.NOT_STARTED, errno.EPERM
        path_at = buffer.rfind(b"\0PATH=", offsets[request.argc + 1] - 1, end)
        path = bytes(buffer[path_at + 6 : _find_end(buffer, path_at + 6, end)]) if path_at >= 0 else b""
        if user >= 0:
            os.setresgid(group, -1, -1)
            os.setresuid(user, -1, -1)
        try:
            programs = _find_programs(name, path, directory)
            return self._start_as(command, request, offsets, directory, programs, (user, group))
        finally:
            if user >= 0:
                os.setresuid(PID1_UID, -1, -1)
                os.setresgid(PID1_UID, -1, -1)
                syscalls.set_dumpable(False)  # the child that shared our memory changed its user

    def _start_as(
        self,
        command: guard.RunningCommand,
        request: guard.CommandRequest,
        offsets: list[int],
        directory: bytes,
        programs: list[bytes],
        ids: tuple[int, int],
    ) -> tuple[int, int] | None:
        if request.flags & protocol.FLAG_WARM and programs and _is_python(programs[0]):
            # If sandboxes have the host's user, their programs must not be able to write to our interpreter's
            # state.
            if self.user >= 0 and self.warm is not None and _is_own_interpreter(programs[0]):
                self._fork_interpreter(command, request, offsets, directory, programs[0], ids)
                return None
            self.fork_servers = self.fork_servers or ForkServerClient(self, self.fork_server_program)
            with suppress(OSError):  # a resource is exhausted: posix_spawn reports which
                if self.fork_servers.request(command, request, programs[0], ids, SPAWNER):
                    return None
        command.pid, problem = SPAWNER.spawn(programs, request.buffer, offsets, request.argc, request.fds[:4])
        if not problem:
            return None
        # A missing directory and a missing program give the same error.
        directory_error = self._check_directory(directory, ids) if problem in _FILE_ERRORS else 0
        return (protocol.NO_DIRECTORY, directory_error) if directory_error else (protocol.NOT_STARTED, problem)

    def _check_directory(self, directory: bytes, ids: tuple[int, int]) -> int:
        """Return the errno with which a user fails to change to a directory, or 0. A forked process tries it."""
        try:
            pid = os.fork()
        except OSError:
            return 0
        if pid == 0:
            code = 0
            try:
                _become_user(*ids)
                os.chdir(directory)
            except OSError as error:
                code = error.errno or errno.EPERM
            finally:
                os._exit(code)
        handle = os.pidfd_open(pid)
        try:
            # Programs of the same user could stop it.
            if not select.select([handle], [], [], _CHDIR_CHECK_SECONDS)[0]:
                os.kill(pid, _signal.SIGKILL)
        finally:
            os.close(handle)
        return max(0, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    def _fork_interpreter(
        self,
        command: guard.RunningCommand,
        request: guard.CommandRequest,
        offsets: list[int],
        directory: bytes,
        program: bytes,
        ids: tuple[int, int],
    ) -> None:
        """Start a Python command as a fork of this process, which runs on the same interpreter."""
        self.error_slots = self.error_slots or mmap.mmap(-1, _ERROR_SLOTS * _ERROR_SLOT.size)
        slot = find_error_slot(command.tag)
        self.error_slots[slot : slot + _ERROR_SLOT.size] = bytes(_ERROR_SLOT.size)
        try:
            command.pid = syscalls.fork()
        except OSError as error:
            self.report(command, protocol.NOT_STARTED, error.errno or 0)
            return
        if command.pid == 0:
            self._become_command(request, offsets, directory, program, ids, slot)
        command.error_slot = slot

    def _become_command(
        self,
        request: guard.CommandRequest,
        offsets: list[int],
        directory: bytes,
        program: bytes,
        ids: tuple[int, int],
        slot: int,
    ) -> "NoReturn":
        """Turn a forked child of pid 1 into the requested Python command.

        It gives up the session, file descriptors and user of pid 1, and runs the command in the same interpreter,
        without exec.
        """
        try:
            assert self.error_slots is not None
            assert self.warm is not None
            _signal.set_wakeup_fd(-1)
            os.setsid()
            count = len(request.fds[:4])
            for target, fd in enumerate(request.fds[:4]):
                os.dup2(fd, target)
                os.set_inheritable(target, True)  # dup2 does not do it if both are the same
            syscalls.close_range(count)
            try:
                _become_user(*ids)
                os.chdir(directory)
            except OSError as error:
                _ERROR_SLOT.pack_into(self.error_slots, slot, error.errno or errno.EPERM)
                os._exit(1)
            syscalls.set_dumpable(True)
            self.error_slots.close()
            buffer = request.buffer
            strings = [bytes(buffer[offsets[n] : offsets[n + 1] - 1]) for n in range(1, len(offsets) - 1)]
            buffer[request.start : request.end] = bytes(request.end - request.start)
            warm_interpreter.become_command(
                self.warm, os.fsdecode(program), strings[: request.argc], strings[request.argc :]
            )
        finally:
            os._exit(1)

    def report_failed_start(self, command: guard.RunningCommand) -> bool:
        if command.error_slot < 0 or self.error_slots is None:
            return False
        (problem,) = _ERROR_SLOT.unpack_from(self.error_slots, command.error_slot)
        if problem:
            self.report(command, protocol.NO_DIRECTORY, problem)
        return bool(problem)

    def track(self, command: guard.RunningCommand, request: guard.CommandRequest) -> None:
        super().track(command, request)
        if self.fork_servers is not None and self.fork_servers.servers:  # fork servers can be started again
            children = set(processes.list_children(self.pid))
            command.started_alone = children <= self.fork_servers.pids() | {command.pid}

    # ---- fork servers

    def find_commands(self, number: int) -> list[guard.RunningCommand]:
        pending = self.fork_servers.pending.values() if self.fork_servers is not None else ()
        return super().find_commands(number) + [one.command for one in pending if one.command.number == number]

    def kill_command(self, command: guard.RunningCommand, reason: int) -> None:
        if self.fork_servers is not None and self.fork_servers.cancel(command):
            self.report(command, reason, _signal.SIGKILL)
        else:
            super().kill_command(command, reason)

    def on_readable(self, fd: int) -> None:
        if self.netlink is not None and fd == self.netlink.listener:
            self.netlink.respond()
        elif self.fork_servers is not None:
            self.fork_servers.on_readable(fd)

    def on_child_reaped(self, pid: int) -> None:
        if self.fork_servers is not None:
            self.fork_servers.on_child_reaped(pid)

    def timer_deadlines(self) -> list[float]:
        return self.fork_servers.timer_deadlines() if self.fork_servers is not None else []

    def run_timers(self, now: float) -> None:
        if self.fork_servers is not None:
            self.fork_servers.run_timers(now)

    # ---- killing

    def read_claim(self, pid: int) -> str:
        # The environment may hold secrets of another command: it is read into a page that is discarded afterwards.
        page = self.environ_page = self.environ_page or mmap.mmap(
            -1, _MAX_ENVIRON, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        try:
            with syscalls.raised_capability(syscalls.CAP_DAC_READ_SEARCH) if self.user >= 0 else suppress():
                fd = os.open(f"/proc/{pid}/environ", os.O_RDONLY | os.O_CLOEXEC)
            try:
                size = os.readv(fd, [page])
            finally:
                os.close(fd)
            start = len(_COMMAND_PREFIX) - 1
            if page[:start] != _COMMAND_PREFIX[1:]:
                found = page.find(_COMMAND_PREFIX, 0, size)
                if found < 0:
                    return ""
                start = found + len(_COMMAND_PREFIX)
            return page[start : min(_find_end(page, start, size), start + 64)].decode("utf-8", "replace")
        except OSError:
            return ""
        finally:
            page.madvise(mmap.MADV_DONTNEED)

    def kill_namespace(self, within: float = guard.KILL_SECONDS) -> bool:
        if self.pid != 1:  # outside of a pid namespace, kill(-1) would reach the whole machine
            return False
        end = time.monotonic() + within
        with suppress(ProcessLookupError):
            os.kill(-1, _signal.SIGKILL)
        self.reap()
        if not self.childless:
            select.select([self.wakeup_reader], [], [], 0.05)
            self.reap()
        while not self.childless and time.monotonic() < end:
            # Not at every SIGCHLD: waking up for each of a hundred processes would delay their end.
            time.sleep(_REAP_SECONDS)
            self.reap()
        self.drain_wakeups()
        return self.childless

    def kill_everything(self) -> int:
        if self.pid != 1:  # outside of a pid namespace, kill(-1) would reach the whole machine
            return super().kill_everything()
        end = time.monotonic() + 2 * guard.KILL_SECONDS
        while not self.childless and time.monotonic() < end:
            # Repeatedly, each time for all processes at once: forks cannot outrun it.
            self.kill_namespace(within=0.5)
        return 0 if self.childless else len(_list_other_pids())

    def kill_user(self, user: int) -> int:
        if self.pid != 1 or self.user < 0:
            return self.kill_everything()
        end = time.monotonic() + 2 * guard.KILL_SECONDS
        found = [1]
        try:
            while found and time.monotonic() < end:
                self.stop_all(kill=False)  # forks could outrun us
                found = [pid for pid in _list_other_pids() if _belongs_to(pid, user)]
                for pid in found:
                    with suppress(ProcessLookupError):
                        os.kill(pid, _signal.SIGKILL)
                self.reap()
                if found:
                    select.select([self.wakeup_reader], [], [], 0.01)
                    self.drain_wakeups()
                    self.reap()
        finally:
            self.resume_stopped()
        return len(found)

    def stop_all(self, *, kill: bool) -> None:
        if self.pid != 1:
            return
        if self.stopped_before is None:
            self.stopped_before = {
                pid for pid in _list_other_pids() if (processes.read_stat(pid) or "?")[0] == "T"
            }
        with suppress(ProcessLookupError):
            # One call for all processes also reaches those that are just being forked.
            os.kill(-1, _signal.SIGKILL if kill else _signal.SIGSTOP)

    def resume_stopped(self) -> None:
        if self.stopped_before is not None:
            for pid in set(_list_other_pids()) - self.stopped_before:
                with suppress(ProcessLookupError):
                    os.kill(pid, _signal.SIGCONT)
            self.stopped_before = None

    def shut_down(self) -> None:
        os._exit(0)


def find_error_slot(tag: int) -> int:
    """Return the offset in `Init.error_slots` for the command with this tag."""
    return tag % _ERROR_SLOTS * _ERROR_SLOT.size


def run_forked_command(native: "native_init.NativeInit") -> "NoReturn":
    """Run the Python command whose process the library has prepared as a fork of pid 1."""
    try:
        assert Init.warm is not None
        program, argv, pairs = native.read_command()
        warm_interpreter.become_prepared_command(
            Init.warm, program.decode("utf-8", "surrogateescape"), argv, pairs, piped=native.is_piped()
        )
    finally:
        os._exit(1)


def load_programs(*, preload: bool) -> None:
    """Read the source of the fork server, while Rookery's own files can still be opened.

    With `preload`, also create the state of a new interpreter, if that works on this machine.
    """
    Init.fork_server_program = build_program()
    if preload and warm_interpreter.can_preload():
        Init.warm = warm_interpreter.preload()


def prepare_to_fork() -> None:
    """Make the keeper, after all its imports, cheap to fork and similar to a new interpreter."""
    _warm_up()
    if Init.warm is not None:
        warm_interpreter.reset_modules(Init.warm)
    for directory in [path for path in sys.path_importer_cache if path.startswith(_PACKAGE_ROOT)]:
        del sys.path_importer_cache[directory]
    # `os.wait4` imports it on every call: without this, from the sandbox's files, which may be an image's.
    sys.modules["resource"] = resource
    gc.collect()
    gc.freeze()  # the garbage collector of a sandbox would otherwise copy every shared page


def prepare_zygote() -> None:
    """Do in the zygote what every Python command does that the library forks."""
    _signal.set_wakeup_fd(-1)
    if Init.warm is not None:
        warm_interpreter.open_piped_streams()
        warm_interpreter.prepare_commands(Init.warm)


def _warm_up() -> None:
    """Start a few programs as pid 1 does, so that lazily created state is shared by all sandboxes."""
    handler, wakeup = _signal.getsignal(_signal.SIGCHLD), _signal.set_wakeup_fd(-1)
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    init = Init(theirs)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        body = b"\0".join((b"/", b"true", b"PATH=/usr/bin:/bin"))
        for number in range(_WARMUP_RUNS):
            head = protocol.REQUEST.pack(protocol.SPAWN, number + 1, 0, 0, 0, 1, -1, -1, 0)
            send_message(ours, head + body, [null] * 3)
            init.receive_requests()
            while not init.reports:
                init.poller.poll()
                init.drain_wakeups()
                init.reap()
            init.flush_reports()
            ours.recv(4096)
    finally:
        _signal.set_wakeup_fd(-1)
        _signal.signal(_signal.SIGCHLD, handler)
        _signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        for fd in (null, init.wakeup_reader, init.wakeup_writer):
            os.close(fd)
        for sock in (ours, theirs):
            sock.close()


def _list_other_pids() -> list[int]:
    """Return the pids of all visible processes but pid 1."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]


def _belongs_to(pid: int, user: int) -> bool:
    """Return whether a living process has this real user."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            fields = dict(line.split(b":", 1) for line in file.read().split(b"\n") if b":" in line)
    except OSError:
        return False
    return fields[b"State"].split()[0] not in (b"Z", b"X") and int(fields[b"Uid"].split()[0]) == user


def _become_user(user: int, group: int) -> None:
    """Become this user irrevocably, without any capability."""
    if user >= 0:
        os.setresgid(group, group, group)
        os.setresuid(user, user, user)
    syscalls.drop_capabilities()


def _find_end(buffer: "guard.Buffer", start: int, end: int) -> int:
    """Return the offset of the next NUL, or `end`."""
    nul = buffer.find(b"\0", start, end)
    return end if nul < 0 else nul


def _find_programs(name: bytes, path: bytes, directory: bytes) -> list[bytes]:
    """Return the executables that `name` can refer to for this process's real user.

    Relative entries of `path` are relative to `directory`.
    """
    if b"/" in name or not name:
        return [name]
    absolute = b":".join(os.path.join(directory, entry) for entry in path.split(b":"))
    return processes.find_programs(name, absolute)


def _is_python(program: bytes) -> bool:
    version = os.path.basename(program).removeprefix(b"python")
    return program[:1] == b"/" and version != os.path.basename(program) and not version.strip(b"0123456789.")


def _is_own_interpreter(program: bytes) -> bool:
    """Return whether a file is the interpreter that this process runs on, outside of any virtual environment."""
    try:
        info = os.stat(program)
    except OSError:
        return False
    if (info.st_dev, info.st_ino) != (_INTERPRETER.st_dev, _INTERPRETER.st_ino):
        return False
    directory = os.path.dirname(program)
    return not any(
        os.path.exists(os.path.join(parent, b"pyvenv.cfg")) for parent in (directory, os.path.dirname(directory))
    )
