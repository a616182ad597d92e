"""The stub program that holds one sandbox's processes; stand-alone, and also a module of shared functions.

Promises:
- every process of the sandbox is its descendant, orphans included (it is their subreaper), so none gets away;
- a killed command is reported only when its whole tree is dead;
- when its owner dies or hangs up it kills everything it holds, removes folder and lease, and ends;
- it never blocks on its reports.

Whose tree a process belongs to: below a command's first process, that command's. An orphan belongs to the
command that its limits name: every command has its own hard limit of a resource that no kernel limits any more,
always a lower one than the last, and a program can lower its limits but not raise them. So it can claim to be a
later command's, never an earlier one's. Where that says nothing, its environment does (`ROOKERY_COMMAND`), and
if it hides that too, it belongs to the command being killed, unless it is older than that command. So what an
earlier command left running survives the kill of a later one.

It imports only what starts fast, and speaks structs and NUL-separated text: no JSON, no pickle.
"""

# pathlib is slow to import
# ruff: noqa: PTH108, PTH208

import _socket
import contextlib
import errno
import os
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Iterator

TYPE_CHECKING = False  # importing typing would cost as much as all the rest
if TYPE_CHECKING or "rookery.sandboxes" in sys.modules:
    from rookery.sandboxes import procs
else:  # stand-alone: only this one import may see the folder, whose subprocess.py would hide the real one
    sys.path.insert(0, sys.argv[1])
    import procs

    del sys.path[0]

CHANNEL = 3
REQUEST = struct.Struct("<BIddqIB")
"""op, command, wall, cpu seconds, memory (or start ticks), number of arguments, flags."""
REPORT = struct.Struct("<BIBidqdI")
"""kind, command, reason, wait status (or errno), cpu seconds, peak bytes, wall, survivors."""
HELLO, SPAWN, KILL, INTERRUPT, DISCARD = range(5)
READY, ENDED, INTERRUPTED = range(3)
FLAG_BODY_IN_FILE = 1
NATURAL, TIME, PROCESSES, ASKED, NOT_STARTED, NO_FOLDER = range(6)
INTERRUPT_SIGNAL = signal.SIGRTMAX - 3
MAX_MESSAGE = 64 << 10
MAX_DISCARDS = 64
KILL_SECONDS = 5.0
HOLD_AFTER = 3
"""Looks that find something after which a tree is held still: it may grow faster than it is killed."""
TAG = 10
"""RLIMIT_LOCKS, which has no meaning since Linux 2.4."""
TAGS = 1 << 40
OWN_FLOOR = 64 << 20
"""The guard lives under the sandbox's memory limit too, so that no command starts without it; it needs some."""


class Running:
    """A command whose first process lives, or whose tree is being killed."""

    __slots__ = ("alone", "deadline", "number", "pid", "reason", "result", "started", "tag", "ticks")

    def __init__(self, number: int, wall: float) -> None:
        self.number = number
        self.pid = self.tag = 0
        self.alone = False
        """Whether there was no other process when it started."""
        self.reason = NATURAL
        self.result: tuple[int, float, int] | None = None
        self.ticks = procs.now_ticks()
        self.started = time.monotonic()
        self.deadline = self.started + wall if wall > 0 else 0.0


class Guard:
    def __init__(self, channel: _socket.socket) -> None:
        self.channel = channel
        self.pid = os.getpid()
        self.folder = self.lease = ""
        self.memory = self.pids = 0
        self.last = self.spawned = 0
        hard = resource.getrlimit(TAG)[1]
        self.tags = TAGS if hard == resource.RLIM_INFINITY else hard if hard > 1 << 33 else 0
        self.running: dict[int, Running] = {}  # by the pid of the first process
        self.reports: list[bytes] = []
        self.discards: list[int] = []
        self.barren = True  # no children at all
        self.look_every = 0.1
        self.look_at = 0.0
        self.discard_at = 0.0
        self.wake, wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
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
            self.swallow()
            self.reap()
            now = time.monotonic()
            for command in [c for c in self.running.values() if c.deadline and c.deadline <= now]:
                self.kill(command, TIME)
            if self.pids and not self.barren and now >= self.look_at:
                self.count(now)
            self.discard(now)
            self.flush()

    def wait_ms(self) -> float | None:
        times = [c.deadline for c in self.running.values() if c.deadline]
        if self.pids and not self.barren:
            times.append(self.look_at)
        if self.discards:
            times.append(self.discard_at)
        return max(0.0, (min(times) - time.monotonic()) * 1000 + 0.5) if times else None

    def swallow(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake, 4096)

    def receive(self) -> bool:
        """False when the owner hung up."""
        while True:
            try:
                data, extra, _, _ = self.channel.recvmsg(
                    MAX_MESSAGE + 4096, _socket.CMSG_SPACE(8 * 4), _socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return True
            except ConnectionError:
                return False
            if not data:
                return False
            fds = [fd for level, _, raw in extra for fd in struct.unpack(f"{len(raw) // 4}i", raw) if level == 1]
            try:
                self.obey(data, fds)
            finally:
                for fd in fds:
                    os.close(fd)

    def obey(self, data: bytes, fds: list[int]) -> None:
        op, number, wall, cpu, amount, argc, flags = REQUEST.unpack_from(data)
        body = data[REQUEST.size :]
        if flags & FLAG_BODY_IN_FILE:
            size = os.fstat(fds[-1]).st_size
            body = os.pread(fds[-1], size, 0)
        if op == HELLO:
            self.begin([os.fsdecode(part) for part in body.split(b"\0")])
        elif op == SPAWN:
            self.spawn(Running(number, wall), cpu, amount, argc, body.split(b"\0"), fds)
        elif op == DISCARD:
            if len(self.discards) < MAX_DISCARDS:
                self.discards.append(fds.pop())
        else:
            for command in [c for c in self.running.values() if c.number == number]:
                if op == KILL:
                    self.kill(command, ASKED)
                else:
                    self.interrupt(command, body.decode(), amount)
            if op == INTERRUPT:
                self.reports.append(REPORT.pack(INTERRUPTED, number, 0, 0, 0, 0, 0, 0))

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

    def spawn(
        self, command: Running, cpu: float, memory: int, argc: int, parts: list[bytes], fds: list[int]
    ) -> None:
        self.last = max(self.last, command.number)
        argv, pairs = parts[1 : argc + 1], parts[argc + 1 :]
        env = dict(pair.split(b"=", 1) for pair in pairs)
        try:
            os.chdir(parts[0])
        except OSError as error:
            self.report(command, NO_FOLDER, error.errno or 0)
            return
        actions = [(os.POSIX_SPAWN_DUP2, fd, at) for at, fd in enumerate(fds[:4])]
        self.spawned += 1
        command.tag = self.spawned
        if self.tags:
            resource.setrlimit(TAG, (self.tags - command.tag,) * 2)
        self.expose(True)
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
        self.expose(False)
        os.chdir("/")
        if not command.pid:
            self.report(command, NOT_STARTED, problem)
            return
        self.running[command.pid] = command
        command.alone, self.barren = self.barren, False
        self.look_every = 0.1
        self.look_at = time.monotonic() + self.look_every
        # The sandbox's limits were inherited; a command's own, procs.lower ones need no such care.
        if memory and (not self.memory or memory < self.memory or memory < OWN_FLOOR):
            procs.lower(resource.RLIMIT_DATA, memory, pid=command.pid)
        if cpu > 0:
            seconds = max(1, int(-(-cpu // 1)))
            procs.lower(resource.RLIMIT_CPU, seconds + 1, seconds, pid=command.pid)

    def expose(self, on: bool) -> None:
        """Whether what is started from here on is to be ended before us when memory runs out."""

    def end_everyone(self) -> bool:
        """Ends every process in one go, where that reaches nobody else; whether they are gone."""
        return False

    def hold(self, *, last: bool) -> None:
        """Keeps every process from making others, where that can be done; `last`: ends them instead."""

    def let_go(self) -> None:
        """Undoes `hold`, for those who are left."""

    def report(
        self, command: Running, reason: int, status: int, cpu: float = 0, peak: int = 0, left: int = 0
    ) -> None:
        wall = time.monotonic() - command.started
        self.reports.append(REPORT.pack(ENDED, command.number, reason, status, cpu, peak, wall, left))

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
                continue
            command.result = (status, usage.ru_utime + usage.ru_stime, usage.ru_maxrss << 10)
            if command.reason == NATURAL:
                self.report(command, NATURAL, *command.result)

    def kill(self, command: Running, reason: int) -> None:
        command.reason = reason
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(command.pid, signal.SIGKILL)  # at once for all of the group: what forks cannot outrun it
        left = 0
        if not (command.alone and command.tag == self.spawned and self.end_everyone()):
            left = self.purge(command, str(command.number), command.ticks, whole=True)
        if command.result is None:  # stuck in the kernel: give it up rather than wait for ever
            self.running.pop(command.pid, None)
        self.report(command, reason, *(command.result or (signal.SIGKILL, 0.0, 0)), left)

    def interrupt(self, command: Running, mark: str, ticks: int) -> None:
        """Kills what the shell's present script started, then makes the shell drop the script."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(command.pid, signal.SIGSTOP)
            self.purge(command, mark, ticks, whole=False)
            os.kill(command.pid, INTERRUPT_SIGNAL)
            os.kill(command.pid, signal.SIGCONT)

    def purge(self, command: Running, mark: str, ticks: int, *, whole: bool) -> int:
        """SIGKILL until two looks in a row find nothing; how many are left when the time is over."""
        try:
            return self.purged(command, mark, ticks, whole=whole)
        finally:
            self.let_go()

    def purged(self, command: Running, mark: str, ticks: int, *, whole: bool) -> int:
        end = time.monotonic() + KILL_SECONDS
        clean = looks = 0
        while True:
            if looks >= HOLD_AFTER:
                self.hold(last=time.monotonic() > end - KILL_SECONDS / 2)
            victims = list(self.members(command, mark, ticks, whole=whole))
            for pid in victims:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            self.reap()
            looks += bool(victims)
            clean = 0 if victims else clean + 1
            # A list of children read while one of them ends may miss another: hence the second look.
            if (clean > 1 and not (whole and command.pid in self.running)) or time.monotonic() > end:
                return len(victims)
            if victims or clean > 1:
                select.select([self.wake], [], [], 0.01)
                self.swallow()

    def members(self, command: Running, mark: str, ticks: int, *, whole: bool) -> Iterator[int]:
        todo: list[tuple[int, bool | None]] = [(pid, None) for pid in procs.children_of(self.pid)]
        while todo:
            pid, doomed = todo.pop()
            if pid == command.pid:
                doomed = True if whole else None
                todo += [(child, doomed) for child in procs.children_of(pid)]
                if whole and (procs.stat_of(pid) or "Z")[0] not in "ZX":
                    yield pid
                continue
            stat = procs.stat_of(pid)
            if pid in self.running or stat is None or stat[0] in "ZX":
                continue
            tag = self.tag_of(pid) if whole and not doomed else None
            if tag is not None:  # one that was never given is a lie: then only its age counts
                doomed = tag == command.tag if 0 < tag <= self.spawned else stat[2] >= ticks
            elif not (whole and doomed):
                said = self.verdict(procs.variable_of(pid, procs.COMMAND) or "", mark, whole=whole)
                doomed = said if said is not None else (stat[2] >= ticks if doomed is None else doomed)
            todo += [(child, doomed) for child in procs.children_of(pid)]
            if doomed:
                yield pid

    def tag_of(self, pid: int) -> int | None:
        """Which command's a process is, by the limits that it was born with; None where they say nothing."""
        with contextlib.suppress(OSError, ValueError):
            hard = resource.prlimit(pid, TAG)[1]
            return self.tags - hard if self.tags and hard != resource.RLIM_INFINITY else None
        return None

    def verdict(self, said: str, mark: str, *, whole: bool) -> bool | None:
        """Whether a process that names `said` belongs to `mark`; None when its word says nothing."""
        number, _, script = said.partition(".")
        if not number.isdecimal() or not 0 < int(number[:9]) <= self.last:
            return None
        if whole:
            return number == mark
        if number == mark.partition(".")[0] and not script:
            return None  # a fork of the shell itself: it shows the shell's environment
        return said == mark

    def count(self, now: float) -> None:
        self.look_every = min(1.0, self.look_every * 2)
        self.look_at = now + self.look_every
        total, todo = 0, procs.children_of(self.pid)
        while todo and total <= self.pids:
            total += 1
            todo += procs.children_of(todo.pop())
        if total <= self.pids:
            return
        size = {
            c: sum(1 for _ in self.members(c, str(c.number), c.ticks, whole=True)) for c in self.running.values()
        }
        if size:
            self.kill(max(size, key=lambda c: size[c]), PROCESSES)
        else:
            self.kill_all()

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

    def kill_all(self) -> None:
        end = time.monotonic() + 2 * KILL_SECONDS
        while not self.barren and time.monotonic() < end:
            todo = procs.children_of(self.pid)
            for pid in list(self.running):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
            while todo:
                pid = todo.pop()
                todo += procs.children_of(pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            self.reap()
            if not self.barren:
                select.select([self.wake], [], [], 0.01)
                self.swallow()

    def leave(self) -> None:
        self.kill_all()
        if self.folder and self.barren:
            procs.remove_tree(self.folder)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.lease)


def main() -> None:
    import ctypes

    for name in os.listdir("/proc/self/fd"):
        if int(name) > CHANNEL:
            with contextlib.suppress(OSError):
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
