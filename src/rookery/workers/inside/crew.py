"""The monitor's family: the live Python, its twin, and all that cells started. Stand-alone.

Promises:
- a cell's end is the end of everything that it started, whatever it did to hide; what an earlier cell left
  running, the twin and we ourselves are not ended with it;
- what a monitor before us left is found, and ended.

Whose a process is: before each cell the live Python's hard limit of a resource that means nothing to it is lowered
by one. Everything that the cell starts inherits that, and can only lower it: so it can claim to be a later cell's,
never an earlier one's.
"""

from __future__ import annotations

import _socket
import os
import resource
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Iterator
    from typing import NoReturn
else:
    import _signal

if TYPE_CHECKING or "rookery.workers" in sys.modules:
    from rookery.workers.inside import frames as f
    from rookery.workers.inside import kernel as k
    from rookery.workers.inside.live import Live
else:
    import frames as f
    import kernel as k
    from live import Live

CELLS = 1 << 20
"""Tags below a worker's own that are its cells'."""
KILL_SECONDS = 4.0
LOOK_SECONDS = 0.008
FIRST_LOOK = 0.01
CEILING = 64
"""A cell that writes this many times what is kept of it is ended: it will not stop by itself."""


def kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        pass


class Child:
    """The live Python, or its twin."""

    def __init__(self, pid: int, fd: int) -> None:
        self.pid = pid
        self.line = f.Line(fd, fd, f.MOST_BACK)
        self.memory = -1
        """Its present limit; below 0 where that is not known."""
        self.children_cpu = 0.0
        """Seconds of children that it waited for, before the present cell."""


class Cell:
    """The cell that runs."""

    def __init__(self, payload: bytes) -> None:
        head = f.CELL_HEAD.unpack_from(payload)
        self.number, self.wall, self.cpu, self.memory, output, self.processes = head[:6]
        self.display, self.calls, self.flags = head[6:]
        self.source = payload[f.CELL_HEAD.size :]
        self.ceiling = CEILING * max(output, 1 << 16)
        self.token = os.urandom(8)
        self.written = [0, 0]
        self.began = self.deadline = self.look_at = 0.0
        self.look_every = FIRST_LOOK
        self.called = 0.0
        """When the host was asked for something that it has not answered."""
        self.outside = 0.0
        self.cpu_before = self.cpu_orphans = 0.0
        self.peak = self.ticks = 0
        self.clock = self.started = 0.0
        self.take_at = 0.0
        """When what was written is handed on."""


class Crew:
    """Who is there, and how they are ended."""

    tag = memory = room = last = 0
    """The worker's mark, memory of each process, of the whole sandbox, and the number of the last cell."""
    tagged = False
    functions: list[str]

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.host = f.Line(0, 1, f.MOST)
        self.cell: Cell | None = None
        self.pending: Cell | None = None
        self.live: Child | None = None
        self.twin: Child | None = None
        self.why = ""
        """Why there is no twin."""
        self.making = 0.0
        """When a twin was asked for that is not there yet."""
        self.new_twin = -1
        self.coming: Child | None = None
        """The twin that is not frozen yet: until it has a group of its own, a cell could end it by mistake."""
        self.save_at = 0.0
        self.retries = 0
        self.murders = 0
        self.stale = ""
        """Why the twin there is, if any, is not of the present state, while that is not decided."""
        self.reaped: set[int] = set()
        """Since a tree was last being ended."""
        self.buried: set[int] = set()
        """Twins that were ended and are not reaped yet: what they used is no cell's."""
        self.dead: dict[int, tuple[int, float, int]] = {}
        self.wake, end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        _signal.set_wakeup_fd(end, warn_on_full_buffer=False)
        for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP):
            _signal.signal(number, _signal.SIG_IGN)
        self.pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(2)]
        for ours, _ in self.pipes:
            os.set_blocking(ours, False)

    def sweep(self) -> None:
        """Ends what a monitor before us left when it was killed."""
        end = time.monotonic() + KILL_SECONDS
        clean = 0
        while clean < 2 and time.monotonic() < end:
            left = [pid for pid in k.every() if self.tag - CELLS < (k.tag_of(pid) or 0) <= self.tag]
            for pid in left:
                kill(pid, _signal.SIGKILL)
            left = [pid for pid in left if (k.stat_of(pid) or ("Z",))[0] not in "ZX"]
            clean = 0 if left else clean + 1
            if left:
                time.sleep(0.001)

    def fresh(self) -> None:
        """A live Python that knows nothing."""
        ours, theirs = _socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                self.become_live(theirs.detach())
            finally:
                os._exit(1)
        theirs.close()
        self.live = Child(pid, ours.detach())

    def become_live(self, line: int) -> NoReturn:
        _signal.set_wakeup_fd(-1)
        for number in (_signal.SIGCHLD, _signal.SIGTERM, _signal.SIGHUP):
            _signal.signal(number, _signal.SIG_DFL)
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
        k.die_with_parent()
        if os.getppid() != self.pid:
            os._exit(1)
        os.setsid()
        k.set_dumpable(True)
        k.worth(b"1000")
        kept = {line, *(theirs for _, theirs in self.pipes)}
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in kept:
                try:
                    os.close(int(name))
                except OSError:
                    continue
        null = os.open(os.devnull, os.O_RDWR)  # takes 0
        os.dup2(null, 1)
        os.dup2(null, 2)
        k.lower(resource.RLIMIT_CORE, 0)
        if self.memory:
            k.lower(resource.RLIMIT_DATA, self.memory)
        k.shield(self.pid)
        k.set_name(b"python3")
        Live(line, self.pipes[0][1], self.pipes[1][1], self.functions).serve()

    def swallow(self) -> None:
        try:
            os.read(self.wake, 4096)
        except BlockingIOError:
            pass

    def reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            self.reaped.add(pid)
            cpu = usage.ru_utime + usage.ru_stime
            if self.known(pid):
                self.dead[pid] = (status, cpu, usage.ru_maxrss << 10)
            elif pid in self.buried:
                self.buried.discard(pid)
            elif self.cell is not None:
                self.cell.cpu_orphans += cpu

    def known(self, pid: int) -> bool:
        return any(child is not None and child.pid == pid for child in (self.live, self.twin, self.coming))

    def leave(self) -> NoReturn:
        """Ends everything that was ever started here."""
        end = time.monotonic() + KILL_SECONDS
        while time.monotonic() < end:
            todo = k.children_of(self.pid)
            while todo:
                pid = todo.pop()
                todo += k.children_of(pid)
                kill(pid, _signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                break
            select.select([self.wake], [], [], 0.005)
            self.swallow()
        os._exit(0)

    def descendants(self) -> Iterator[int]:
        """Everyone but the live Python and its twin."""
        kept = {child.pid for child in (self.live, self.twin, self.coming) if child is not None}
        todo = k.children_of(self.pid)
        while todo:
            pid = todo.pop()
            todo += k.children_of(pid)
            if pid not in kept:
                yield pid

    def members(self, cell: Cell) -> list[tuple[int, k.Stat]]:
        """Who was started by the cell, and lives."""
        found = []
        for pid in self.descendants():
            stat = k.stat_of(pid)
            if stat is None or stat.state in "ZX":
                continue
            tag = k.tag_of(pid) if self.tagged else None
            if tag is not None and self.tag - CELLS < tag <= self.tag:
                theirs = tag == self.tag - cell.number % CELLS
            else:
                theirs = stat.started >= cell.ticks
            if theirs:
                found.append((pid, stat))
        return found

    def cpu(self, cell: Cell, stat: k.Stat, members: list[tuple[int, k.Stat]]) -> float:
        own = k.cpu_of(self.live.pid) - cell.clock if self.live is not None else 0.0
        below = max(0.0, stat.children_cpu - cell.cpu_before)
        return own + below + cell.cpu_orphans + sum(one.cpu + one.children_cpu for _, one in members)

    def end_tree(self, cell: Cell, members: list[tuple[int, k.Stat]]) -> int:
        """Kills the live Python and all that the cell started; how many, or -1 when some would not die."""
        assert self.live is not None
        live = self.live.pid
        kill(live, _signal.SIGKILL)
        end = time.monotonic() + KILL_SECONDS
        ended: set[int] = set()
        self.reaped.clear()
        clean, looks = -1, 0  # the first look was before the live Python was killed
        victims = [pid for pid, _ in members]
        while True:
            if looks > 2 and victims:
                victims = self.hold(cell, victims)
            for pid in victims:
                kill(pid, _signal.SIGKILL)
            ended.update(victims)
            looks += bool(victims)
            self.swallow()
            self.reap()
            clean = 0 if victims else clean + 1
            if clean > 1 and live in self.dead:
                return len(ended)
            if time.monotonic() > end:
                return -1
            soon = time.monotonic() + LOOK_SECONDS
            # Who was killed comes to us, and costs less to wait for than to look at.
            while not (ended <= self.reaped and live in self.dead) and time.monotonic() < soon:
                select.select([self.wake], [], [], LOOK_SECONDS / 4)
                self.swallow()
                self.reap()
            victims = [pid for pid, _ in self.members(cell)]

    def hold(self, cell: Cell, victims: list[int]) -> list[int]:
        """Stops them all first: what grows faster than it is killed cannot grow when it stands."""
        held: set[int] = set()
        for _ in range(50):
            new = [pid for pid in victims if pid not in held]
            if not new:
                break
            for pid in new:
                kill(pid, _signal.SIGSTOP)
            held.update(new)
            victims = [pid for pid, _ in self.members(cell)]
        return victims
