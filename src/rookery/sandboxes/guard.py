"""The stub program that holds one sandbox's processes; stand-alone, and also a module of shared functions.

Promises:
- every process of the sandbox is its descendant, orphans included (it is their subreaper), so none gets away;
- a killed command is reported only when its whole tree is dead;
- when its owner dies or hangs up it kills everything it holds, removes folder and lease, and ends;
- it never blocks on its reports.

Whose tree a process belongs to, and how a tree is ended, is in `trees`.

It imports only what starts fast, and speaks structs and NUL-separated text: no JSON, no pickle.
"""

# pathlib is slow to import
# ruff: noqa: PTH108, PTH208

import _socket
import errno
import mmap
import os
import resource
import select
import struct
import sys
import time

TYPE_CHECKING = False  # importing typing would cost as much as all the rest
if TYPE_CHECKING:
    Room = bytearray | mmap.mmap
if TYPE_CHECKING or "rookery.sandboxes" in sys.modules:
    from rookery.sandboxes import procs
    from rookery.sandboxes.small import _signal, suppress
    from rookery.sandboxes.trees import ASKED, NATURAL, NO_FOLDER, NOT_STARTED, TAG, TIME, Running, Trees
else:  # stand-alone: only these imports may see the folder, whose subprocess.py would hide the real one
    sys.path.insert(0, sys.argv[1])
    import procs
    from small import _signal, suppress
    from trees import ASKED, NATURAL, NO_FOLDER, NOT_STARTED, TAG, TIME, Running, Trees

    del sys.path[0]

CHANNEL = 3
REQUEST = struct.Struct("<BIddqIiiB")
"""op, command, wall, cpu seconds, memory (or start ticks), number of arguments, user, group, flags."""
REPORT = struct.Struct("<BIBidqdI")
"""kind, command, reason, wait status (or errno), cpu seconds, peak bytes, wall, survivors."""
HELLO, SPAWN, KILL, INTERRUPT, DISCARD, KILL_ALL = range(6)
READY, ENDED, INTERRUPTED, ALL_KILLED = range(4)
FLAG_BODY_IN_FILE, FLAG_WARM = 1, 2
MAX_MESSAGE = 64 << 10
MAX_DISCARDS = 64
TAGS = 1 << 40
OWN_FLOOR = 64 << 20
"""The guard lives under the sandbox's memory limit too, so that no command starts without it; it needs some."""


class Request:
    """A command that somebody wants started.

    `room` holds, from `start` to `end`, the folder, the arguments and the variables, with a NUL between them.
    """

    __slots__ = ("argc", "cpu", "end", "fds", "flags", "group", "memory", "room", "start", "user")

    def __init__(
        self, fields: tuple[int, ...], cpu: float, place: "tuple[Room, int, int]", fds: list[int]
    ) -> None:
        self.memory, self.argc, self.user, self.group, self.flags = fields
        self.cpu = cpu
        self.room, self.start, self.end = place
        self.fds = fds


class Guard(Trees):
    def __init__(self, channel: _socket.socket) -> None:
        self.channel = channel
        self.pid = os.getpid()
        self.folder = self.lease = ""
        self.memory = self.pids = 0
        self.last = self.spawned = 0
        hard = resource.getrlimit(TAG)[1]
        self.tags = TAGS if hard == resource.RLIM_INFINITY else hard if hard > 1 << 33 else 0
        self.running = {}
        self.reports: list[bytes] = []
        self.discards: list[int] = []
        self.barren = True
        self.look_every = 0.1
        self.look_at = 0.0
        self.discard_at = 0.0
        self.room = mmap.mmap(-1, MAX_MESSAGE + 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.wake, self.wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        _signal.set_wakeup_fd(self.wake_end, warn_on_full_buffer=False)
        self.poll = select.poll()
        self.poll.register(self.wake, select.POLLIN)
        self.poll.register(channel.fileno(), select.POLLIN)
        self.owner = self.watch_owner()

    def watch_owner(self) -> int:
        """A descriptor that tells the owner's death: a fork of it may hold the channel open past that."""
        owner = os.pidfd_open(os.getppid())
        self.poll.register(owner, select.POLLIN)
        return owner

    def loop(self) -> None:
        own = self.channel.fileno()
        while True:
            for fd, _ in self.poll.poll(self.wait_ms()):
                if fd == self.owner or (fd == own and not self.receive()):
                    return
                if fd not in (own, self.wake):
                    self.heard(fd)
            self.swallow()
            self.reap()
            now = time.monotonic()
            for command in [c for c in self.running.values() if c.deadline and c.deadline <= now]:
                self.kill(command, TIME)
            if self.pids and not self.barren and now >= self.look_at:
                self.count(now)
            self.late(now)
            self.discard(now)
            self.flush()

    def wait_ms(self) -> float | None:
        times = [c.deadline for c in self.running.values() if c.deadline] + self.due()
        if self.pids and not self.barren:
            times.append(self.look_at)
        if self.discards:
            times.append(self.discard_at)
        return max(0.0, (min(times) - time.monotonic()) * 1000 + 0.5) if times else None

    def swallow(self) -> None:
        with suppress(BlockingIOError):
            os.read(self.wake, 4096)

    def receive(self) -> bool:
        """False when the owner hung up."""
        while True:
            try:
                size, extra, _, _ = self.channel.recvmsg_into(
                    [self.room], _socket.CMSG_SPACE(8 * 4), _socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return True
            except ConnectionError:
                return False
            if not size:
                return False
            fds = [fd for level, _, raw in extra for fd in struct.unpack(f"{len(raw) // 4}i", raw) if level == 1]
            try:
                self.obey(size, fds)
            finally:
                self.room[:size] = bytes(size)  # what one command was given is no other's to find
                for fd in fds:
                    os.close(fd)

    def obey(self, size: int, fds: list[int]) -> None:
        op, number, wall, cpu, amount, argc, user, group, flags = REQUEST.unpack_from(self.room)
        if op == SPAWN:
            place = self.room_of(fds.pop()) if flags & FLAG_BODY_IN_FILE else (self.room, REQUEST.size, size)
            self.spawn(Running(number, wall), Request((amount, argc, user, group, flags), cpu, place, fds))
            return
        body = bytes(self.room[REQUEST.size : size])
        if op == HELLO:
            self.begin([os.fsdecode(part) for part in body.split(b"\0")])
        elif op == KILL_ALL:
            left = self.kill_everyone() if user < 0 else self.kill_user(user)
            self.reports.append(REPORT.pack(ALL_KILLED, number, 0, 0, 0, 0, 0, left))
        elif op == DISCARD:
            if len(self.discards) < MAX_DISCARDS:
                self.discards.append(fds.pop())
        else:
            for command in self.called(number):
                if op == KILL:
                    self.kill(command, ASKED)
                else:
                    self.interrupt(command, body.decode(), amount)
            if op == INTERRUPT:
                self.reports.append(REPORT.pack(INTERRUPTED, number, 0, 0, 0, 0, 0, 0))

    def kill_everyone(self) -> int:
        """Kill all processes of the sandbox; return how many are still there afterwards."""
        self.kill_all()
        return 0 if self.barren else len(procs.children_of(self.pid))

    def kill_user(self, user: int) -> int:  # noqa: ARG002
        """Kill all processes of one user; return how many are still there. Here all processes have one user."""
        return self.kill_everyone()

    def called(self, number: int) -> list[Running]:
        return [c for c in self.running.values() if c.number == number]

    def room_of(self, fd: int) -> "tuple[Room, int, int]":
        """What does not fit into a message comes in a file, with a NUL behind it. Closes it."""
        try:
            size = os.fstat(fd).st_size
            return mmap.mmap(fd, size, mmap.MAP_PRIVATE), 0, size - 1
        finally:
            os.close(fd)

    def begin(self, parts: list[str]) -> None:
        self.folder, self.lease = parts[0], parts[1]
        self.memory, size, self.pids = (int(part) for part in parts[2:5])
        procs.lower(resource.RLIMIT_CORE, 0)
        procs.lower(resource.RLIMIT_NOFILE, 65536, 4096)
        if self.memory:
            procs.lower(resource.RLIMIT_DATA, max(self.memory, OWN_FLOOR))
        if size:
            procs.lower(resource.RLIMIT_FSIZE, size)
        self.reports.append(REPORT.pack(READY, 0, 0, 0, 0, 0, 0, 0))

    def spawn(self, command: Running, request: Request) -> None:
        self.last = max(self.last, command.number)
        command.tag = self.next_tag()
        self.expose(True)
        try:
            problem = self.start(command, request)
        finally:
            self.expose(False)
        if command.pid:
            self.adopt(command, request)
        elif problem is not None:
            self.report(command, *problem)

    def next_tag(self) -> int:
        """What is started from here on carries another mark than all before."""
        self.spawned += 1
        if self.tags:
            resource.setrlimit(TAG, (self.tags - self.spawned,) * 2)
        return self.spawned

    def start(self, command: Running, request: Request) -> tuple[int, int] | None:
        """Gives the command a process, or says why not: a reason and an errno."""
        parts = bytes(request.room[request.start : request.end]).split(b"\0")
        argv, pairs = parts[1 : request.argc + 1], parts[request.argc + 1 :]
        env = dict(pair.split(b"=", 1) for pair in pairs)
        try:
            os.chdir(parts[0])
        except OSError as error:
            return NO_FOLDER, error.errno or 0
        actions = [(os.POSIX_SPAWN_DUP2, fd, at) for at, fd in enumerate(request.fds[:4])]
        problem = errno.ENOENT
        for program in procs.candidates(argv[0], env.get(b"PATH", b"")):
            try:
                # vfork inside: the cost does not grow with our heap, as that of a fork would
                command.pid = os.posix_spawn(
                    program, argv, env, file_actions=actions, setsid=True, setsigmask=(), setsigdef=procs.DEFAULTED
                )
                break
            except OSError as error:
                problem = error.errno or problem
            except ValueError:  # a name or a word the system takes for none
                problem = errno.EINVAL
        os.chdir("/")
        return NOT_STARTED, problem

    def adopt(self, command: Running, request: Request) -> None:
        """The command has a process: it is one of those that we watch, under the limits that are its own."""
        self.running[command.pid] = command
        command.alone, self.barren = self.barren, False
        self.look_every = 0.1
        self.look_at = time.monotonic() + self.look_every
        # The sandbox's limits were inherited; a command's own, lower ones need no such care.
        memory = request.memory
        if memory and (not self.memory or memory < self.memory or memory < OWN_FLOOR):
            procs.lower(resource.RLIMIT_DATA, memory, pid=command.pid)
        if request.cpu > 0:
            seconds = max(1, int(-(-request.cpu // 1)))
            procs.lower(resource.RLIMIT_CPU, seconds + 1, seconds, pid=command.pid)

    def expose(self, on: bool) -> None:
        """Whether what is started from here on is to be ended before us when memory runs out."""

    def heard(self, fd: int) -> None:
        """Another descriptor that is watched is ready."""

    def gone(self, pid: int) -> None:
        """A child that is no command's first process was reaped."""

    def due(self) -> list[float]:
        """When `late` has something to do."""
        return []

    def late(self, now: float) -> None:
        """What has to be done by now."""

    def report(
        self, command: Running, reason: int, status: int, cpu: float = 0, peak: int = 0, left: int = 0
    ) -> None:
        wall = time.monotonic() - command.started
        self.reports.append(REPORT.pack(ENDED, command.number, reason, status, cpu, peak, wall, left))

    def ended(self, command: Running) -> bool:  # noqa: ARG002
        """Whether the end of a command that ended by itself was reported in another way."""
        return False

    def reap(self) -> None:
        while not self.barren:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                self.barren = True
                return
            if not pid:
                return
            command = self.running.pop(pid, None)
            if command is None:
                self.gone(pid)
                continue
            command.result = (status, usage.ru_utime + usage.ru_stime, usage.ru_maxrss << 10)
            if command.reason == NATURAL and not self.ended(command):
                self.report(command, NATURAL, *command.result)

    def discard(self, now: float) -> None:
        """What a finished command left running may write on, slowly, to nobody."""
        if not self.discards or now < self.discard_at:
            return
        self.discard_at = now + 0.05
        for fd in list(self.discards):
            try:
                if os.read(fd, 1 << 16):
                    continue
            except BlockingIOError:
                continue
            self.discards.remove(fd)
            os.close(fd)

    def flush(self) -> None:
        while self.reports:
            try:
                self.channel.send(self.reports[0])
            except BlockingIOError:
                self.poll.modify(self.channel.fileno(), select.POLLIN | select.POLLOUT)
                return
            except OSError:
                self.reports.clear()  # the owner is gone; the loop is about to see it
                return
            self.reports.pop(0)
        self.poll.modify(self.channel.fileno(), select.POLLIN)

    def leave(self) -> None:
        self.kill_all()
        if self.folder and self.barren:
            procs.remove_tree(self.folder)
            with suppress(FileNotFoundError):
                os.unlink(self.lease)


def main() -> None:
    import ctypes

    for name in os.listdir("/proc/self/fd"):
        if int(name) > CHANNEL:
            with suppress(OSError):
                os.close(int(name))
    os.set_inheritable(CHANNEL, False)
    os.chdir("/")
    os.umask(0o022)
    pr_set_child_subreaper = 36
    if ctypes.CDLL(None, use_errno=True).prctl(pr_set_child_subreaper, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    channel = _socket.socket(fileno=CHANNEL)
    channel.setblocking(False)
    guard = Guard(channel)
    try:
        guard.loop()
    except BaseException:
        guard.kill_all()  # the folder stays: the owner reads the traceback in it, then removes it
        raise
    guard.leave()


if __name__ == "__main__":
    main()
