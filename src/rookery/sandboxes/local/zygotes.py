"""Pid 1's side of the warm interpreters in its box. Stand-alone.

Promises:
- pid 1 never waits for one: who is not ready, dead, stopped or slow is done without, and the command is started
  the ordinary way;
- what one says about itself is not believed: the kernel says who speaks, and only a child of pid 1's that carries
  the mark of the interpreter, is of the right user and is nobody else's command is taken for the command.
"""

import _socket
import os
import resource
import select
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING or "rookery.sandboxes" in sys.modules:
    from rookery.sandboxes import guard, procs, trees
    from rookery.sandboxes.local.launch import Launcher
    from rookery.sandboxes.small import _signal, send, suppress
else:
    import guard
    import procs
    import trees
    from launch import Launcher
    from small import _signal, send, suppress

HERE, GO = b"here", b"go"
MOST = 4
"""Interpreters of one box: programs times users."""
PATIENCE = 0.5
"""Seconds in which one has to answer."""
NAP = 5.0
"""Seconds after a failure before the next is tried."""
_CREDENTIALS = struct.Struct("<iII")
_ENVIRONMENT = (b"HOME=/", b"LANG=C.UTF-8", b"PATH=/usr/local/bin:/usr/bin:/bin")
_PROGRAM = b"/proc/self/fd/4"
"""A file, not a word: what is given as a word, newer versions keep."""
_TOGETHER = """
import os, sys
os.close(4)
before = dict(sys.modules)
kind = type(sys)
texts = %r
for name, text in texts:
    module = kind(name)
    sys.modules[name] = module
    try:
        exec(compile(text, "<warm>", "exec"), module.__dict__)
    except ImportError:
        del sys.modules[name]
        if name != "inside":
            raise
zygote, python, inside = sys.modules["zygote"], sys.modules["python"], sys.modules.get("inside")
del sys.path[0]
warm = python.Warm(before)
if inside is not None:
    inside.calibrate()
python.rehearse(warm)
sys.modules.clear()
sys.modules.update(before)
sys.argv[:] = [""]
zygote.serve(warm)
"""


def text_of(folder: str) -> bytes:
    """What a warm interpreter runs: the texts of our modules, in one."""
    texts = []
    for name in ("inside", "program", "python", "zygote"):
        with open(f"{folder}/{name}.py") as file:
            texts.append((name, file.read()))
    return (_TOGETHER % texts).encode()


class Zygote:
    """One warm interpreter."""

    __slots__ = ("key", "pid", "ready", "sock", "tag", "ticks")

    def __init__(self, key: tuple[bytes, int, int], sock: _socket.socket, pid: int, tag: int) -> None:
        self.key = key
        self.sock = sock
        self.pid = pid
        self.tag = tag
        self.ticks = procs.now_ticks()
        self.ready = False


class Pending:
    """A command that one was asked for."""

    __slots__ = ("body", "command", "deadline", "fds", "line", "request", "user", "zygote")

    def __init__(self, command: trees.Running, request: guard.Request, zygote: Zygote, user: int) -> None:
        self.command = command
        self.request = request
        self.zygote = zygote
        self.user = user
        self.line: _socket.socket | None = None
        self.body = -1
        self.fds: list[int] = []
        self.deadline = time.monotonic() + PATIENCE

    def open(self) -> _socket.socket:
        """What it needs until it is begun; the other end of its line."""
        self.line, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        try:
            self.line.setblocking(False)
            self.line.setsockopt(_socket.SOL_SOCKET, _socket.SO_PASSCRED, 1)
            self.body = os.memfd_create("command", os.MFD_CLOEXEC)
            for fd in self.request.fds[:4]:
                self.fds.append(os.dup(fd))
        except OSError:
            theirs.close()
            raise
        return theirs

    def close(self) -> None:
        if self.line is not None:
            self.line.close()
        for fd in (*self.fds, self.body):
            if fd >= 0:
                os.close(fd)
        self.fds, self.body = [], -1


class Zygotes:
    """All of a box's."""

    def __init__(self, init: guard.Guard, text: bytes) -> None:
        self.init = init
        self.text = text
        self.by_key: dict[tuple[bytes, int, int], Zygote] = {}
        self.pending: dict[int, Pending] = {}
        """By the descriptor of their line."""
        self.not_before = 0.0

    def pids(self) -> set[int]:
        return {one.pid for one in self.by_key.values()}

    def take(
        self,
        command: trees.Running,
        request: guard.Request,
        program: bytes,
        who: tuple[int, int],
        launcher: Launcher,
    ) -> bool:
        """Whether a warm interpreter was asked for the command. One that is not there is started for the next."""
        key = (program, *who)
        one = self.by_key.get(key)
        if one is None:
            if len(self.by_key) < MOST and time.monotonic() >= self.not_before:
                self.begin(key, launcher)
                command.tag = self.init.next_tag()
            return False
        if not one.ready:
            return False
        asked = Pending(command, request, one, who[0] if who[0] >= 0 else os.getuid())
        try:
            theirs = asked.open()
            try:
                with memoryview(request.room) as room, room[request.start : request.end] as part:
                    os.writev(asked.body, [part, b"\0"])
                fds = [theirs.fileno(), asked.body, *request.fds[:4]]
                send(one.sock, b"%d %s" % (request.argc, program), fds)
            finally:
                theirs.close()
        except OSError:
            asked.close()
            self.drop(one)
            return False
        assert asked.line is not None
        self.pending[asked.line.fileno()] = asked
        self.init.poll.register(asked.line.fileno(), select.POLLIN)
        return True

    def begin(self, key: tuple[bytes, int, int], launcher: Launcher) -> None:
        """Starts one, as whom the command is; we are them, really, at this moment."""
        self.not_before = time.monotonic() + NAP
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        tag = self.init.next_tag()
        text = -1
        problem = 1
        try:
            text = os.memfd_create("warm", os.MFD_CLOEXEC)
            os.write(text, self.text)
            words = (b"/", key[0], _PROGRAM, *_ENVIRONMENT)
            room = bytearray(b"\0".join(words) + b"\0")
            bounds = [0]
            for word in words:
                bounds.append(bounds[-1] + len(word) + 1)
            pid, problem = launcher.spawn([key[0]], room, bounds, 2, (0, 1, 2, theirs.fileno(), text))
        finally:
            theirs.close()
            if text >= 0:
                os.close(text)
            if problem:
                ours.close()
        if problem:
            return
        self.not_before = 0.0
        ours.setblocking(False)
        self.init.barren = False
        self.by_key[key] = Zygote(key, ours, pid, tag)
        self.init.poll.register(ours.fileno(), select.POLLIN)

    def heard(self, fd: int) -> None:
        """Something came on a line of ours."""
        asked = self.pending.get(fd)
        if asked is not None:
            self.answered(asked)
            return
        for one in list(self.by_key.values()):
            if one.sock.fileno() == fd:
                try:
                    said = one.sock.recv(16)
                except BlockingIOError:
                    return
                except OSError:
                    said = b""
                if said == HERE and not one.ready:
                    one.ready = True
                else:
                    self.drop(one)

    def answered(self, asked: Pending) -> None:
        assert asked.line is not None
        try:
            data, extra, _, _ = asked.line.recvmsg(16, _socket.CMSG_SPACE(_CREDENTIALS.size))
        except BlockingIOError:
            return
        except OSError:
            data, extra = b"", []
        pid = -1
        for level, kind, raw in extra:
            if level == _socket.SOL_SOCKET and kind == _socket.SCM_CREDENTIALS:
                pid = _CREDENTIALS.unpack(raw)[0]
        if data != HERE or not self.believed(asked, pid):
            self.instead(asked)
            return
        init, command = self.init, asked.command
        self.forget(asked)
        try:
            if init.tags:
                resource.prlimit(pid, trees.TAG, (init.tags - command.tag,) * 2)
            asked.line.send(GO)
        except OSError:
            self.start(asked)
            return
        command.pid = pid
        init.adopt(command, asked.request)
        asked.close()

    def believed(self, asked: Pending, pid: int) -> bool:
        stat = procs.stat_of(pid) if pid > 1 else None
        if stat is None or pid in self.init.running or pid in self.pids():
            return False
        if stat[0] in "ZX" or stat[1] != self.init.pid or stat[2] < asked.zygote.ticks - 1:
            return False
        try:
            owner = os.stat(f"/proc/{pid}").st_uid
        except OSError:
            return False
        tag = self.init.tag_of(pid)
        return owner == asked.user and (tag is None or tag == asked.zygote.tag)

    def instead(self, asked: Pending) -> None:
        """The ordinary way, since this one came to nothing."""
        self.forget(asked)
        self.start(asked)

    def start(self, asked: Pending) -> None:
        asked.request.flags &= ~guard.FLAG_WARM
        asked.request.fds = asked.fds
        asked.request.room, asked.request.start, asked.request.end = self.init.room_of(os.dup(asked.body))
        try:
            self.init.spawn(asked.command, asked.request)
        finally:
            asked.close()

    def cancel(self, command: trees.Running) -> bool:
        """Whether it had not begun; then it never does."""
        for asked in [asked for asked in self.pending.values() if asked.command is command]:
            self.forget(asked)
            asked.close()
            return True
        return False

    def forget(self, asked: Pending) -> None:
        assert asked.line is not None
        self.init.poll.unregister(asked.line.fileno())
        del self.pending[asked.line.fileno()]

    def drop(self, one: Zygote) -> None:
        """Does without it from here on. What it was asked for, and has not begun, is started in another way."""
        if self.by_key.pop(one.key, None) is not one:
            return
        self.not_before = time.monotonic() + NAP
        self.init.poll.unregister(one.sock.fileno())
        one.sock.close()
        with suppress(ProcessLookupError, PermissionError):
            os.kill(one.pid, _signal.SIGKILL)

    def gone(self, pid: int) -> None:
        """It was reaped: its number may be another's from here on."""
        for one in [one for one in self.by_key.values() if one.pid == pid]:
            one.pid = -1
            self.by_key.pop(one.key)
            self.init.poll.unregister(one.sock.fileno())
            one.sock.close()

    def due(self) -> list[float]:
        return [asked.deadline for asked in self.pending.values()]

    def late(self, now: float) -> None:
        for asked in [asked for asked in self.pending.values() if asked.deadline <= now]:
            self.drop(asked.zygote)
            self.instead(asked)
