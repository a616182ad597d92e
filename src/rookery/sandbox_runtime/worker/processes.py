"""The processes of a worker: interpreter, savepoint, and everything that cells started. Runs in the monitor.

Guarantees:
- when a cell is killed, all processes that it started are killed, however they hide. Processes of earlier cells,
  the savepoint (a frozen fork of the interpreter) and the monitor are not;
- processes that an earlier monitor left behind are found and killed.

How a process is assigned to a cell: before each cell, the interpreter's hard limit of a resource that means
nothing to it (a tag) is lowered by one. Everything that the cell starts inherits the limit and can only lower
it, so a process can claim to belong to a later cell but never to an earlier one.
"""

from __future__ import annotations

import os
import select
import time

from rookery.sandbox_runtime.worker import linux
from rookery.sandbox_runtime.worker import protocol as p

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Iterator
    from typing import NoReturn
else:
    import _signal

MAX_CELLS = 1 << 20
"""Number of tags below a worker's own tag that are reserved for its cells."""
KILL_SECONDS = 4.0
SCAN_SECONDS = 0.008
FIRST_CHECK_SECONDS = 0.01
OUTPUT_FACTOR = 64
"""A cell that writes more than this many times the output that is kept is killed, because it would probably never
stop."""


def kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        pass


class Child:
    """A child process of the monitor: the interpreter or its savepoint."""

    def __init__(self, pid: int, fd: int) -> None:
        self.pid = pid
        self.connection = p.FrameConnection(fd, fd, p.MAX_UNTRUSTED_FRAME)
        self.memory = -1
        """Current memory limit in bytes; -1 if unknown."""
        self.children_cpu = 0.0
        """CPU seconds of the child's own reaped children before the current cell."""


class RunningCell:
    """The cell that is being executed, with its limits and what was measured so far."""

    def __init__(self, payload: bytes) -> None:
        head = p.CELL_HEAD.unpack_from(payload)
        self.number, self.wall, self.cpu, self.memory, output, self.processes = head[:6]
        self.display, self.calls, self.flags = head[6:]
        self.source = payload[p.CELL_HEAD.size :]
        self.max_output = OUTPUT_FACTOR * max(output, 1 << 16)
        self.token = os.urandom(8)
        self.written = [0, 0]
        self.began = self.deadline = self.next_check = 0.0
        self.check_interval = FIRST_CHECK_SECONDS
        self.call_began = 0.0
        """Time at which the pending call of a host function began; 0 if none is pending."""
        self.call_seconds = 0.0
        self.cpu_before = self.orphan_cpu = 0.0
        self.peak = self.start_ticks = 0
        self.clock = self.started = 0.0
        self.forward_at = 0.0
        """Time at which collected output is to be forwarded; 0 while the monitor waits for output."""


class WorkerProcesses:
    """Reaps, finds and kills the processes of a worker."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.tag = 0
        """The worker's own tag. The tag of a cell is lower by the number of the cell."""
        self.tagged = False
        """True if processes can be tagged on this machine."""
        self.interpreter: Child | None = None
        self.savepoint: Child | None = None
        self.new_savepoint: Child | None = None
        """A savepoint that was forked and is not frozen yet."""
        self.cell: RunningCell | None = None
        self.reaped: set[int] = set()
        """Pids reaped since the last call of `kill_cell` began."""
        self.discarded: set[int] = set()
        """Killed savepoints that are not reaped yet. Their CPU time belongs to no cell."""
        self.dead: dict[int, tuple[int, float, int]] = {}
        """Wait status, CPU seconds and peak memory in bytes of the interpreter and savepoints that ended, by
        pid."""
        self.wakeup_reader, wakeup_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        _signal.set_wakeup_fd(wakeup_writer, warn_on_full_buffer=False)
        for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP):
            _signal.signal(number, _signal.SIG_IGN)

    def kill_leftovers(self) -> None:
        """Kill the processes that an earlier monitor of this worker left behind when it was killed."""
        end = time.monotonic() + KILL_SECONDS
        empty_scans = 0
        while empty_scans < 2 and time.monotonic() < end:
            left = [
                pid for pid in linux.list_pids() if self.tag - MAX_CELLS < (linux.read_tag(pid) or 0) <= self.tag
            ]
            for pid in left:
                kill(pid, _signal.SIGKILL)
            left = [pid for pid in left if (linux.read_stat(pid) or ("Z",))[0] not in "ZX"]
            empty_scans = 0 if left else empty_scans + 1
            if left:
                time.sleep(0.001)

    def drain_wakeups(self) -> None:
        try:
            os.read(self.wakeup_reader, 4096)
        except BlockingIOError:
            pass

    def wait_for_child(self, seconds: float) -> None:
        """Wait until a child ends or the time is over, then reap."""
        select.select([self.wakeup_reader], [], [], seconds)
        self.drain_wakeups()
        self.reap()

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
            if any(child is not None and child.pid == pid for child in self.children()):
                self.dead[pid] = (status, cpu, usage.ru_maxrss << 10)
            elif pid in self.discarded:
                self.discarded.discard(pid)
            elif self.cell is not None:
                self.cell.orphan_cpu += cpu

    def children(self) -> tuple[Child | None, ...]:
        return (self.interpreter, self.savepoint, self.new_savepoint)

    def discard(self, child: Child) -> None:
        """Kill a savepoint that is not needed any more."""
        kill(child.pid, _signal.SIGKILL)
        if self.dead.pop(child.pid, None) is None:
            self.discarded.add(child.pid)
        child.connection.close()

    def kill_all_and_exit(self) -> NoReturn:
        """Kill all descendants of the monitor and exit."""
        end = time.monotonic() + KILL_SECONDS
        while time.monotonic() < end:
            todo = linux.list_children(self.pid)
            while todo:
                pid = todo.pop()
                todo += linux.list_children(pid)
                kill(pid, _signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                break
            select.select([self.wakeup_reader], [], [], 0.005)
            self.drain_wakeups()
        os._exit(0)

    def list_descendants(self) -> Iterator[int]:
        """Yield all descendants of the monitor except the interpreter and its savepoints."""
        own = {child.pid for child in self.children() if child is not None}
        todo = linux.list_children(self.pid)
        while todo:
            pid = todo.pop()
            todo += linux.list_children(pid)
            if pid not in own:
                yield pid

    def find_members(self, cell: RunningCell) -> list[tuple[int, linux.Stat]]:
        """Return the living processes that a cell started."""
        members = []
        for pid in self.list_descendants():
            stat = linux.read_stat(pid)
            if stat is None or stat.state in "ZX":
                continue
            tag = linux.read_tag(pid) if self.tagged else None
            if tag is not None and self.tag - MAX_CELLS < tag <= self.tag:
                belongs = tag == self.tag - cell.number % MAX_CELLS
            else:
                belongs = stat.start_ticks >= cell.start_ticks
            if belongs:
                members.append((pid, stat))
        return members

    def measure_cpu(self, cell: RunningCell, stat: linux.Stat, members: list[tuple[int, linux.Stat]]) -> float:
        """Return the CPU seconds of a cell: interpreter, reaped children, orphans and living processes."""
        own = linux.read_cpu_clock(self.interpreter.pid) - cell.clock if self.interpreter is not None else 0.0
        reaped = max(0.0, stat.children_cpu - cell.cpu_before)
        return own + reaped + cell.orphan_cpu + sum(member.cpu + member.children_cpu for _, member in members)

    def kill_cell(self, cell: RunningCell, members: list[tuple[int, linux.Stat]]) -> int:
        """Kill the interpreter and all processes that the cell started.

        Return the number of these processes, or -1 if some are still alive after `KILL_SECONDS`.
        """
        assert self.interpreter is not None
        interpreter = self.interpreter.pid
        kill(interpreter, _signal.SIGKILL)
        end = time.monotonic() + KILL_SECONDS
        killed: set[int] = set()
        self.reaped.clear()
        empty_scans, scans = -1, 0  # the first scan was before the interpreter was killed
        victims = [pid for pid, _ in members]
        while True:
            if scans > 2 and victims:
                victims = self.stop_members(cell, victims)
            for pid in victims:
                kill(pid, _signal.SIGKILL)
            killed.update(victims)
            scans += bool(victims)
            self.drain_wakeups()
            self.reap()
            empty_scans = 0 if victims else empty_scans + 1
            if empty_scans > 1 and interpreter in self.dead:
                return len(killed)
            if time.monotonic() > end:
                return -1
            next_scan = time.monotonic() + SCAN_SECONDS
            # Killed processes are reaped by us, which is cheaper than another scan.
            while not (killed <= self.reaped and interpreter in self.dead) and time.monotonic() < next_scan:
                self.wait_for_child(SCAN_SECONDS / 4)
            victims = [pid for pid, _ in self.find_members(cell)]

    def stop_members(self, cell: RunningCell, victims: list[int]) -> list[int]:
        """Stop all processes of a cell, so that they do not fork faster than they are killed; return the pids."""
        stopped: set[int] = set()
        for _ in range(50):
            running = [pid for pid in victims if pid not in stopped]
            if not running:
                break
            for pid in running:
                kill(pid, _signal.SIGSTOP)
            stopped.update(running)
            victims = [pid for pid, _ in self.find_members(cell)]
        return victims
