"""Whose a process is, and ending those who are somebody's. Stand-alone, as the guard is.

Promises:
- a tree is dead when `purge` says so: two looks in a row found nobody;
- what an earlier command left running survives the kill of a later one;
- what grows faster than it is killed is held still first, where that can be done.

Whose tree a process belongs to: below a command's first process, that command's. An orphan belongs to the
command that its limits name: every command has its own hard limit of a resource that no kernel limits any more,
always a lower one than the last, and a program can lower its limits but not raise them. So it can claim to be a
later command's, never an earlier one's. Where that says nothing, its environment does (`ROOKERY_COMMAND`), and
if it hides that too, it belongs to the command being killed, unless it is older than that command.
"""

from __future__ import annotations

import os
import resource
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

if TYPE_CHECKING or "rookery.sandboxes" in sys.modules:
    from rookery.sandboxes import procs
    from rookery.sandboxes.small import _signal, suppress
else:
    import procs
    from small import _signal, suppress

NATURAL, TIME, PROCESSES, ASKED, NOT_STARTED, NO_FOLDER = range(6)
INTERRUPT_SIGNAL = _signal.SIGRTMAX - 3
KILL_SECONDS = 5.0
HOLD_AFTER = 3
"""Looks that find something after which a tree is held still: it may grow faster than it is killed."""
TAG = 10
"""RLIMIT_LOCKS, which has no meaning since Linux 2.4."""


class Running:
    """A command whose first process lives, or whose tree is being killed."""

    __slots__ = ("alone", "deadline", "number", "pid", "reason", "result", "slot", "started", "tag", "ticks")

    def __init__(self, number: int, wall: float) -> None:
        self.number = number
        self.pid = self.tag = 0
        self.slot = -1
        """Where a warm start leaves word of what went wrong."""
        self.alone = False
        """Whether there was no other process when it started."""
        self.reason = NATURAL
        self.result: tuple[int, float, int] | None = None
        self.ticks = procs.now_ticks()
        self.started = time.monotonic()
        self.deadline = self.started + wall if wall > 0 else 0.0


class Trees:
    """The commands that run, and all that they started."""

    pid: int
    pids: int
    """How many processes there may be; 0 where something else counts them."""
    last: int
    spawned: int
    tags: int
    barren: bool
    """No children at all."""
    running: dict[int, Running]
    """By the pid of the first process."""
    wake: int
    look_every: float
    look_at: float

    def swallow(self) -> None:
        raise NotImplementedError

    def reap(self) -> None:
        raise NotImplementedError

    def report(
        self, command: Running, reason: int, status: int, cpu: float = 0, peak: int = 0, left: int = 0
    ) -> None:
        raise NotImplementedError

    def end_everyone(self) -> bool:
        """Ends every process in one go, where that reaches nobody else; whether they are gone."""
        return False

    def hold(self, *, last: bool) -> None:
        """Keeps every process from making others, where that can be done; `last`: ends them instead."""

    def let_go(self) -> None:
        """Undoes `hold`, for those who are left."""

    def kill(self, command: Running, reason: int) -> None:
        command.reason = reason
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(command.pid, _signal.SIGKILL)  # at once for all of the group: what forks cannot outrun it
        left = 0
        if not (command.alone and command.tag == self.spawned and self.end_everyone()):
            left = self.purge(command, str(command.number), command.ticks, whole=True)
        if command.result is None:  # stuck in the kernel: give it up rather than wait for ever
            self.running.pop(command.pid, None)
        self.report(command, reason, *(command.result or (_signal.SIGKILL, 0.0, 0)), left)

    def interrupt(self, command: Running, mark: str, ticks: int) -> None:
        """Kills what the shell's present script started, then makes the shell drop the script."""
        with suppress(ProcessLookupError):
            os.kill(command.pid, _signal.SIGSTOP)
            self.purge(command, mark, ticks, whole=False)
            os.kill(command.pid, INTERRUPT_SIGNAL)
            os.kill(command.pid, _signal.SIGCONT)

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
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, _signal.SIGKILL)
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
                said = self.verdict(self.said_of(pid), mark, whole=whole)
                doomed = said if said is not None else (stat[2] >= ticks if doomed is None else doomed)
            todo += [(child, doomed) for child in procs.children_of(pid)]
            if doomed:
                yield pid

    def said_of(self, pid: int) -> str:
        """Which command's a process says it is; empty where it hides that."""
        return procs.variable_of(pid, procs.COMMAND) or ""

    def tag_of(self, pid: int) -> int | None:
        """Which command's a process is, by the limits that it was born with; None where they say nothing."""
        with suppress(OSError, ValueError):
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

    def kill_all(self) -> None:
        end = time.monotonic() + 2 * KILL_SECONDS
        while not self.barren and time.monotonic() < end:
            todo = procs.children_of(self.pid)
            for pid in list(self.running):
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, _signal.SIGKILL)
            while todo:
                pid = todo.pop()
                todo += procs.children_of(pid)
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, _signal.SIGKILL)
            self.reap()
            if not self.barren:
                select.select([self.wake], [], [], 0.01)
                self.swallow()
