"""Pid 1 of a box: starts its commands, as whom they are to be, and ends them. Stand-alone, as the box is.

Promises:
- a program has no capability and no descriptor of pid 1's, whoever it runs as;
- what one command was given is not left in the memory that another is forked from;
- what can be done with the rights of a command only (its folder, its program) is done with no other;
- nothing that programs do to a warm interpreter of theirs keeps a command from starting.

Pid 1 is a user of its own, `OWN`, where users are mapped. For a command it changes its real user alone, and the
new process takes that over before it does anything else: what the kernel forgets when rights change (that the
death of the keeper is to be ours, that nobody may look at us) is never forgotten.
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

TYPE_CHECKING = False
if TYPE_CHECKING or "rookery.sandboxes" in sys.modules:
    from typing import NoReturn

    from rookery.sandboxes import guard, procs, trees
    from rookery.sandboxes.local import kernel as k
    from rookery.sandboxes.local import python
    from rookery.sandboxes.local.launch import Launcher
    from rookery.sandboxes.local.netlink import NetlinkGate
    from rookery.sandboxes.local.zygotes import Zygotes, text_of
    from rookery.sandboxes.small import _signal, send, suppress

    WARM: python.Warm | None = None
    TEXT = b""
else:
    import guard
    import kernel as k
    import procs
    import python
    import trees
    from launch import Launcher
    from netlink import NetlinkGate
    from small import _signal, send, suppress
    from zygotes import Zygotes, text_of

    _COLD = sys.argv[3:4] == ["cold"]  # in an image this interpreter is nobody's: there is nothing to be kept warm
    WARM = python.preload(sys.argv[1:3]) if not _COLD and python.can_preload(sys.argv[1:3]) else None
    TEXT = text_of(sys.argv[2])

LAUNCHER = Launcher()
OWN = 65535
"""Pid 1's user and group. No command can be this one."""
with open("/proc/sys/fs/suid_dumpable") as _file:
    CAN_BE_OTHERS = _file.read().strip() != "1"
"""Whether a process that becomes somebody else stays closed to them: there is a setting for debugging which opens
it, and with it the memory that it shares with us."""
_ASK_SECONDS = 1.0
_OF_FILES = (errno.ENOENT, errno.EACCES, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
_NAME = b"\0%s=" % procs.COMMAND.encode()
_MOST = 1 << 20
_REHEARSALS = 20
_SLOT = struct.Struct("<i")
_SLOTS = mmap.PAGESIZE // _SLOT.size


class Init(guard.Guard):
    """Starts, reaps and kills, until the owner hangs up."""

    score = -1
    """Where it says how much it is worth when memory runs out. It may make itself cheaper, and dear as before."""
    worth = b"0"
    stopped: set[int] | None = None
    user = -1
    """Whom commands are, where nothing else is said; -1: all are who we are."""
    zygotes: Zygotes | None = None
    netlink: NetlinkGate | None = None
    page: mmap.mmap | None = None
    slate: mmap.mmap | None = None
    """What a fork of ours has to say before it is the program."""

    def watch_owner(self) -> int:
        return -1

    def watch_netlink(self, listener: int) -> None:
        """Answer questions about netlink sockets from now on; -1: the kernel asks none."""
        if listener >= 0:
            self.netlink = NetlinkGate(listener)
            self.poll.register(listener, select.POLLIN)

    def expose(self, on: bool) -> None:
        # Memory that is no process's own (files, buffers) is paid for by the largest, which would be this one.
        if self.score >= 0:
            os.pwrite(self.score, b"1000" if on else self.worth, 0)

    # ---- starting

    def start(self, command: trees.Running, request: guard.Request) -> tuple[int, int] | None:
        room, start, end = request.room, request.start, request.end
        bounds = [start]
        while (at := room.find(b"\0", bounds[-1], end)) >= 0:
            bounds.append(at + 1)
        bounds.append(end + 1)
        folder = bytes(room[start : bounds[1] - 1])
        name = bytes(room[bounds[1] : bounds[2] - 1])
        user = request.user if request.user >= 0 else self.user
        group = request.group if request.group >= 0 else user
        if self.user < 0 and user >= 0:
            return trees.NOT_STARTED, errno.EPERM
        if OWN in (user, group):
            return trees.NOT_STARTED, errno.EPERM
        where = room.rfind(b"\0PATH=", bounds[request.argc + 1] - 1, end)
        path = bytes(room[where + 6 : _end_of(room, where + 6, end)]) if where >= 0 else b""
        if user >= 0:
            os.setresgid(group, -1, -1)
            os.setresuid(user, -1, -1)
        try:
            return self.started(command, request, bounds, folder, _found(name, path, folder), (user, group))
        finally:
            if user >= 0:
                os.setresuid(OWN, -1, -1)
                os.setresgid(OWN, -1, -1)
                k.set_dumpable(False)  # who shared our memory became somebody else

    def started(
        self,
        command: trees.Running,
        request: guard.Request,
        bounds: list[int],
        folder: bytes,
        programs: list[bytes],
        who: tuple[int, int],
    ) -> tuple[int, int] | None:
        if request.flags & guard.FLAG_WARM and programs and _is_python(programs[0]):
            # Where a box's user is the host's, no program of it may be our own interpreter: it could change that.
            if self.user >= 0 and is_ours(programs[0]):
                self.fork(command, request, bounds, folder, programs[0], who)
                return None
            self.zygotes = self.zygotes or Zygotes(self, TEXT)
            with suppress(OSError):  # something has run out: the ordinary way says what
                if self.zygotes.take(command, request, programs[0], who, LAUNCHER):
                    return None
        command.pid, problem = LAUNCHER.spawn(programs, request.room, bounds, request.argc, request.fds[:4])
        if not problem:
            return None
        # The folder and the program fail with the same errors.
        wrong = self.folder_of(folder, who) if problem in _OF_FILES else 0
        return (trees.NO_FOLDER, wrong) if wrong else (trees.NOT_STARTED, problem)

    def folder_of(self, folder: bytes, who: tuple[int, int]) -> int:
        """What is wrong with a folder, for them: asked by a fork, which may become them. 0: nothing."""
        try:
            pid = os.fork()
        except OSError:
            return 0
        if pid == 0:
            code = 0
            try:
                _is(*who)
                os.chdir(folder)
            except OSError as error:
                code = error.errno or errno.EPERM
            finally:
                os._exit(code)
        handle = os.pidfd_open(pid)
        try:
            # As them it can be stopped by them.
            if not select.select([handle], [], [], _ASK_SECONDS)[0]:
                os.kill(pid, _signal.SIGKILL)
        finally:
            os.close(handle)
        return max(0, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    def fork(
        self,
        command: trees.Running,
        request: guard.Request,
        bounds: list[int],
        folder: bytes,
        program: bytes,
        who: tuple[int, int],
    ) -> None:
        """The command is a fork of ours: the interpreter that it would start is the one that we run on."""
        self.slate = self.slate or mmap.mmap(-1, mmap.PAGESIZE)
        at = command.tag % _SLOTS * _SLOT.size
        self.slate[at : at + _SLOT.size] = bytes(_SLOT.size)
        try:
            command.pid = k.fork()
        except OSError as error:
            self.report(command, trees.NOT_STARTED, error.errno or 0)
            return
        if command.pid == 0:
            self.leap(request, bounds, folder, program, who, at)
        command.slot = at

    def leap(
        self,
        request: guard.Request,
        bounds: list[int],
        folder: bytes,
        program: bytes,
        who: tuple[int, int],
        at: int,
    ) -> "NoReturn":
        """In the fork: is the command, and nothing of us any more."""
        try:
            assert self.slate is not None
            assert WARM is not None
            _signal.set_wakeup_fd(-1)
            os.setsid()
            count = len(request.fds[:4])
            for fd, theirs in enumerate(request.fds[:4]):
                os.dup2(theirs, fd)
                os.set_inheritable(fd, True)  # also where it was there already
            k.close_range(count)
            try:
                _is(*who)
                os.chdir(folder)
            except OSError as error:
                _SLOT.pack_into(self.slate, at, error.errno or errno.EPERM)
                os._exit(1)
            k.set_dumpable(True)
            self.slate.close()
            room = request.room
            parts = [bytes(room[bounds[at] : bounds[at + 1] - 1]) for at in range(1, len(bounds) - 1)]
            room[request.start : request.end] = bytes(request.end - request.start)
            python.become(WARM, os.fsdecode(program), [b"%d" % request.argc, *parts])
        finally:
            os._exit(1)

    def ended(self, command: trees.Running) -> bool:
        if command.slot < 0 or self.slate is None:
            return False
        (problem,) = _SLOT.unpack_from(self.slate, command.slot)
        if problem:
            self.report(command, trees.NO_FOLDER, problem)
        return bool(problem)

    def adopt(self, command: trees.Running, request: guard.Request) -> None:
        super().adopt(command, request)
        if self.zygotes is not None and self.zygotes.by_key:  # who else is there can be started anew
            command.alone = set(procs.children_of(self.pid)) <= self.zygotes.pids() | {command.pid}

    # ---- warm interpreters

    def called(self, number: int) -> list[trees.Running]:
        waiting = self.zygotes.pending.values() if self.zygotes is not None else ()
        return super().called(number) + [one.command for one in waiting if one.command.number == number]

    def kill(self, command: trees.Running, reason: int) -> None:
        if self.zygotes is not None and self.zygotes.cancel(command):
            self.report(command, reason, _signal.SIGKILL)
        else:
            super().kill(command, reason)

    def heard(self, fd: int) -> None:
        if self.netlink is not None and fd == self.netlink.listener:
            self.netlink.answer()
        elif self.zygotes is not None:
            self.zygotes.heard(fd)

    def gone(self, pid: int) -> None:
        if self.zygotes is not None:
            self.zygotes.gone(pid)

    def due(self) -> list[float]:
        return self.zygotes.due() if self.zygotes is not None else []

    def late(self, now: float) -> None:
        if self.zygotes is not None:
            self.zygotes.late(now)

    # ---- ending

    def said_of(self, pid: int) -> str:
        # Variables may hold what no other command is to know: they are read where nothing of them stays.
        self.page = self.page or mmap.mmap(-1, _MOST, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            with k.capable(k.CAP_DAC_READ_SEARCH) if self.user >= 0 else suppress():
                fd = os.open(f"/proc/{pid}/environ", os.O_RDONLY | os.O_CLOEXEC)
            try:
                size = os.readv(fd, [self.page])
            finally:
                os.close(fd)
            start = len(_NAME) - 1
            if self.page[:start] != _NAME[1:]:
                at = self.page.find(_NAME, 0, size)
                if at < 0:
                    return ""
                start = at + len(_NAME)
            return self.page[start : min(_end_of(self.page, start, size), start + 64)].decode("utf-8", "replace")
        except OSError:
            return ""
        finally:
            self.page.madvise(mmap.MADV_DONTNEED)

    def end_everyone(self, within: float = trees.KILL_SECONDS) -> bool:
        if self.pid != 1:  # outside of a pid namespace it would reach the whole machine
            return False
        end = time.monotonic() + within
        with suppress(ProcessLookupError):
            os.kill(-1, _signal.SIGKILL)
        self.reap()
        while not self.barren and time.monotonic() < end:
            select.select([self.wake], [], [], 0.05)
            self.swallow()
            self.reap()
        return self.barren

    def kill_everyone(self) -> int:
        if self.pid != 1:  # outside of a pid namespace it would reach the whole machine
            return super().kill_everyone()
        end = time.monotonic() + 2 * trees.KILL_SECONDS
        while not self.barren and time.monotonic() < end:
            # Again and again: for all at once, so that what forks cannot outrun it.
            self.end_everyone(within=0.5)
        return 0 if self.barren else len(_pids())

    def kill_user(self, user: int) -> int:
        if self.pid != 1 or self.user < 0:
            return self.kill_everyone()
        end = time.monotonic() + 2 * trees.KILL_SECONDS
        found = [1]
        try:
            while found and time.monotonic() < end:
                self.hold(last=False)  # what forks could outrun us
                found = [pid for pid in _pids() if _belongs(pid, user)]
                for pid in found:
                    with suppress(ProcessLookupError):
                        os.kill(pid, _signal.SIGKILL)
                self.reap()
                if found:
                    select.select([self.wake], [], [], 0.01)
                    self.swallow()
                    self.reap()
        finally:
            self.let_go()
        return len(found)

    def hold(self, *, last: bool) -> None:
        if self.pid != 1:
            return
        if self.stopped is None:
            self.stopped = {pid for pid in _pids() if (procs.stat_of(pid) or "?")[0] == "T"}
        with suppress(ProcessLookupError):
            # For all in one go: who is just being made gets it too.
            os.kill(-1, _signal.SIGKILL if last else _signal.SIGSTOP)

    def let_go(self) -> None:
        if self.stopped is not None:
            for pid in set(_pids()) - self.stopped:
                with suppress(ProcessLookupError):
                    os.kill(pid, _signal.SIGCONT)
            self.stopped = None

    def leave(self) -> None:
        os._exit(0)


def bare() -> None:
    """In the keeper, when it has all that it needs: boxes are forked from an interpreter that is nearly new."""
    _rehearse()
    if WARM is not None:
        python.undress(WARM)
    # Each `os.wait4` imports it: without this, from wherever a box's path leads, which may be an image's.
    sys.modules["resource"] = resource
    gc.collect()
    gc.freeze()  # or every box, looking for garbage, would copy all that it shares with the others


def _rehearse() -> None:
    """Starts a few programs, as pid 1 does: what is prepared at the first use need not be in every box."""
    handler, wakeup = _signal.getsignal(_signal.SIGCHLD), _signal.set_wakeup_fd(-1)
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    init = Init(theirs)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        body = b"\0".join((b"/", b"true", b"PATH=/usr/bin:/bin"))
        for number in range(_REHEARSALS):
            head = guard.REQUEST.pack(guard.SPAWN, number + 1, 0, 0, 0, 1, -1, -1, 0)
            send(ours, head + body, [null] * 3)
            init.receive()
            while not init.reports:
                init.poll.poll()
                init.swallow()
                init.reap()
            init.flush()
            ours.recv(4096)
    finally:
        _signal.set_wakeup_fd(-1)
        _signal.signal(_signal.SIGCHLD, handler)
        _signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        for fd in (null, init.wake, init.wake_end):
            os.close(fd)
        for sock in (ours, theirs):
            sock.close()


def _pids() -> list[int]:
    """Everyone but pid 1."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]


def _belongs(pid: int, user: int) -> bool:
    """Whether a process that lives is one user's."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            fields = dict(line.split(b":", 1) for line in file.read().split(b"\n") if b":" in line)
    except OSError:
        return False
    return fields[b"State"].split()[0] not in (b"Z", b"X") and int(fields[b"Uid"].split()[0]) == user


def _is(user: int, group: int) -> None:
    """Becomes that user for good, without a right."""
    if user >= 0:
        os.setresgid(group, group, group)
        os.setresuid(user, user, user)
    k.drop_capabilities()


def _end_of(room: "guard.Room", start: int, end: int) -> int:
    at = room.find(b"\0", start, end)
    return end if at < 0 else at


def _found(name: bytes, path: bytes, folder: bytes) -> list[bytes]:
    """Where the program may lie, for who we really are, from a folder that we are not in."""
    if b"/" in name or not name:
        return [name]
    places = b":".join(os.path.join(folder, place) for place in path.split(b":"))
    return procs.candidates(name, places)


def _is_python(program: bytes) -> bool:
    version = os.path.basename(program).removeprefix(b"python")
    return program[:1] == b"/" and version != os.path.basename(program) and not version.strip(b"0123456789.")


_SELF = os.stat("/proc/self/exe")


def is_ours(program: bytes) -> bool:
    """Whether starting it would give the interpreter that we run on, with nothing beside it that changes it."""
    if WARM is None:
        return False
    try:
        found = os.stat(program)
    except OSError:
        return False
    if (found.st_dev, found.st_ino) != (_SELF.st_dev, _SELF.st_ino):
        return False
    beside = os.path.dirname(program)
    return not any(
        os.path.exists(os.path.join(place, b"pyvenv.cfg")) for place in (beside, os.path.dirname(beside))
    )
