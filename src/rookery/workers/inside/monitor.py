"""The monitor of a worker: the parent of the live Python and of its twin. Stand-alone; never runs the user's code.

Promises:
- a deadline, a cancel, a flood, too much memory or too many processes end the cell;
- the end of the live Python is noticed when it happens; the twin then goes on from the state before the cell, or,
  where there is none, a fresh one is forked from here, which is empty;
- what the live Python says is checked: a wrong token, a wrong length or a wrong moment is a crash of the cell;
- it never blocks on the host, and ends with it, with everything that it holds.
"""

from __future__ import annotations

import os
import resource
import select
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from typing import NoReturn
else:
    import _signal

if TYPE_CHECKING or "rookery.workers" in sys.modules:
    from rookery.workers.inside import frames as f
    from rookery.workers.inside import kernel as k
    from rookery.workers.inside.crew import CELLS, FIRST_LOOK, KILL_SECONDS, Cell, kill
    from rookery.workers.inside.savepoints import SLACK, Savepoints
else:
    import frames as f
    import kernel as k
    from crew import CELLS, FIRST_LOOK, KILL_SECONDS, Cell, kill
    from savepoints import SLACK, Savepoints

SAVE_SECONDS = 10.0
ENDING_SECONDS = 0.03
"""Who ends closes its descriptors first, and is dead a moment later."""
MOST_TWINS = 3
"""Made of one state: who goes on killing them has none."""
LAST_LOOK = 0.1
UNSENT = 1 << 20
GATHER_SECONDS = 0.002
"""What is written within this time is handed on together, and mostly with the end of the cell."""
CPUS = os.cpu_count() or 1
MOST_FILES, MOST_LOOKED = 100, 2_000


class Monitor(Savepoints):
    """Between the host and the live Python."""

    def begin(self) -> None:
        """The first frame says what the worker is."""
        while True:
            if not self.host.feed():
                os._exit(0)
            found = next(self.host.frames(), None)
            if found is not None:
                break
            select.select([0], [], [])
        self.tag, self.memory, self.room, self.flags, self.last = f.SETUP_HEAD.unpack_from(found[1])
        self.functions = [name.decode() for name in f.unpacked(found[1], f.SETUP_HEAD.size)]
        if self.flags & f.SWEEP:
            self.sweep()
        adopts = k.adopt_orphans()
        self.tagged = k.tag_of(os.getpid()) is None
        k.worth(b"0")
        k.set_dumpable(False)
        k.set_name(b"worker")
        k.hurry()
        self.fresh()
        said = [b"%d.%d" % sys.version_info[:2], b"yes" if adopts else b"", b"yes" if k.can_clone() else b""]
        self.host.send(f.HELLO, f.packed(said))
        self.save_soon()

    def loop(self) -> NoReturn:
        while True:
            poll = select.poll()
            poll.register(0, select.POLLIN)
            poll.register(self.wake, select.POLLIN)
            if self.live is not None:
                fd = self.live.line.read
                poll.register(fd, select.POLLIN | (select.POLLOUT if self.live.line.waiting else 0))
            if self.coming is not None:
                poll.register(self.coming.line.read, select.POLLIN)
            if self.host.waiting:
                poll.register(1, select.POLLOUT)
            if self.cell is not None and not self.cell.take_at and self.host.waiting < UNSENT:
                for ours, _ in self.pipes:
                    poll.register(ours, select.POLLIN)
            ready = {fd for fd, _ in poll.poll(self.wait_ms())}
            if 0 in ready:
                self.listen()
            if self.wake in ready:
                self.swallow()
                self.reap()
            if self.cell is not None and any(ours in ready for ours, _ in self.pipes):
                self.cell.take_at = time.monotonic() + GATHER_SECONDS
            if self.live is not None and self.live.line.read in ready:
                self.hear()
            if self.coming is not None and self.coming.line.read in ready:
                self.came()
            self.deaths()
            self.late(time.monotonic())
            self.host.flush()

    def wait_ms(self) -> float | None:
        times = []
        cell = self.cell
        if cell is not None:
            times.append(cell.look_at)
            if cell.take_at:
                times.append(cell.take_at)
            if not cell.called and cell.deadline:
                times.append(cell.deadline)
        if self.making:
            times.append(self.making + SAVE_SECONDS)
        if self.save_at:
            times.append(self.save_at)
        return max(0.0, (min(times) - time.monotonic()) * 1000 + 0.2) if times else None

    def late(self, now: float) -> None:
        if self.cell is not None and self.cell.take_at and now >= self.cell.take_at:
            self.cell.take_at = 0.0
            for stream in range(2):
                self.take(stream)
        cell = self.cell
        if cell is not None and not cell.called and cell.deadline and now >= cell.deadline:
            self.fail(f.TIME, "wall")
        elif cell is not None and now >= cell.look_at:
            self.look(cell, now)
        if self.making and now >= self.making + SAVE_SECONDS and self.coming is not None:
            self.lost_coming()
        elif self.making and now >= self.making + SAVE_SECONDS:
            self.lose("it did not answer when it was to be copied")
        if self.save_at and now >= self.save_at:
            self.save()

    def deaths(self) -> None:
        if self.coming is not None and self.coming.pid in self.dead:
            self.lost_coming()
        if self.twin is not None and self.twin.pid in self.dead:
            self.drop_twin("its savepoint was ended")
            self.murders += 1
            if self.cell is None:
                if self.murders < MOST_TWINS:
                    self.save_soon()
                else:
                    self.decided(False, self.why)
        if self.live is not None and self.live.pid in self.dead:
            if self.cell is not None:
                self.fail(f.CRASH, "")
            else:
                self.lose("it ended by itself")

    def listen(self) -> None:
        there = self.host.feed()
        for kind, payload in self.host.frames():
            if kind == f.CELL:
                self.pending = Cell(payload)
                if not self.making:
                    self.start()
            elif kind == f.ANSWER:
                self.answer(payload)
            elif kind == f.CANCEL and self.cell is not None and self.cell.number == f.SIZE.unpack(payload)[0]:
                self.fail(f.CANCELLED, "")
        if not there:
            self.leave()

    def start(self) -> None:
        cell, self.pending, self.save_at = self.pending, None, 0.0
        self.reaped.clear()
        assert cell is not None
        assert self.live is not None
        self.cell = cell
        if self.stale:
            self.decided(False, self.stale)
        pid = self.live.pid
        if self.tagged:
            k.lower(k.TAG, self.tag - cell.number % CELLS, pid=pid)
        memory = cell.memory or self.memory
        if memory != self.live.memory and (memory or self.live.memory > 0):
            self.live.memory = memory
            try:
                hard = resource.prlimit(pid, resource.RLIMIT_DATA)[1]
                soft = hard if not memory else memory if hard == resource.RLIM_INFINITY else min(memory, hard)
                resource.prlimit(pid, resource.RLIMIT_DATA, (soft, hard))
            except (OSError, ValueError):
                pass  # it is gone, which is seen next
        cell.cpu_before = self.live.children_cpu
        cell.clock = k.cpu_of(pid)
        cell.ticks = int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))
        cell.began = time.monotonic()
        cell.started = time.time()
        cell.deadline = cell.began + cell.wall if cell.wall > 0 else 0.0
        cell.look_at = cell.began + FIRST_LOOK
        cell.take_at = cell.began + GATHER_SECONDS
        head = f.LIVE_CELL.pack(cell.number, cell.token, cell.display, cell.flags)
        self.live.line.send(f.CELL, head, cell.source)
        cell.source = b""

    def answer(self, payload: bytes) -> None:
        cell = self.cell
        number = f.SIZE.unpack_from(payload)[0]
        if cell is None or not cell.called or number != cell.number or self.live is None:
            return  # of a cell that is no more
        paused = time.monotonic() - cell.called
        cell.called = 0.0
        cell.outside += paused
        if cell.deadline:
            cell.deadline += paused
        self.live.line.send(f.ANSWER, payload[4:])

    def take(self, stream: int) -> None:
        """Hands on what the cell has written."""
        cell = self.cell
        if cell is None:
            return
        try:
            data = os.read(self.pipes[stream][0], 1 << 16)
        except BlockingIOError:
            return
        cell.written[stream] += len(data)
        self.host.queue(f.OUTPUT, b"\1" if stream else b"\0", data)
        if cell.written[stream] > cell.ceiling:
            self.fail(f.OUTPUT_FULL, "stderr" if stream else "stdout")

    def drain(self, cell: Cell) -> None:
        """Takes what is in the pipes at this moment; what is over the ceiling goes nowhere."""
        for stream, (ours, _) in enumerate(self.pipes):
            left = 2 << 20
            while left > 0:
                try:
                    data = os.read(ours, 1 << 16)
                except BlockingIOError:
                    break
                left -= len(data)
                if cell.written[stream] <= cell.ceiling:
                    cell.written[stream] += len(data)
                    self.host.queue(f.OUTPUT, b"\1" if stream else b"\0", data)

    def hear(self) -> None:
        assert self.live is not None
        live = self.live
        there = live.line.feed()
        try:
            for kind, payload in live.line.frames():
                if live is not self.live:
                    return
                self.heard(kind, payload)
        except (f.Garbage, struct.error, ValueError):
            self.broken("wrote on the worker's own line")
            return
        if not there and live is self.live:
            self.broken("closed the worker's own line, or became another program")

    def broken(self, what: str) -> None:
        assert self.live is not None
        end = time.monotonic() + ENDING_SECONDS
        while True:
            self.swallow()
            self.reap()
            if self.live.pid in self.dead:
                return  # it was about to end, which says more
            left = end - time.monotonic()
            if left <= 0:
                break
            select.select([self.wake], [], [], left)
        if self.cell is not None:
            self.fail(f.CRASH, what)
        else:
            self.lose("it " + what)

    def heard(self, kind: int, payload: bytes) -> None:
        cell = self.cell
        if kind == f.COPIED and self.making and self.coming is None:
            self.copied(f.SIZE.unpack_from(payload)[0], payload[4:200])
        elif cell is None or payload[:8] != cell.token:
            raise f.Garbage("not now")
        elif kind == f.CALL and not cell.called and cell.calls > 0:
            cell.calls -= 1
            cell.called = time.monotonic()
            self.host.send(f.CALL, f.SIZE.pack(cell.number), payload[8:])
        elif kind == f.CALL:
            assert self.live is not None
            self.live.line.send(f.ANSWER, b"\0HostFunctionError\nthis cell has called the host as often as it may")
        elif kind == f.DONE:
            _, ending, peak = f.LIVE_DONE.unpack_from(payload)
            texts = f.unpacked(payload, f.LIVE_DONE.size)
            if ending not in (f.OK, f.RUNTIME, f.SYNTAX, f.MEMORY, f.DISK) or len(texts) < 2:
                raise f.Garbage("no ending")
            cell.peak = max(cell.peak, peak)
            if ending == f.MEMORY:
                self.fail(f.MEMORY, "", texts)
            else:
                self.done(cell, ending, texts)
        else:
            raise f.Garbage("not a kind")

    def done(self, cell: Cell, ending: int, texts: list[bytes]) -> None:
        self.drain(cell)
        assert self.live is not None
        stat = k.stat_of(self.live.pid)
        cpu = k.cpu_of(self.live.pid) - cell.clock + cell.cpu_orphans
        if stat is not None:
            cpu += max(0.0, stat.children_cpu - cell.cpu_before)
            self.live.children_cpu = stat.children_cpu
        self.report(cell, ending, f.NONE, cpu, 0, [*texts[:2], b"", b"", *texts[2:]])
        self.murders = 0
        self.save_soon()

    def report(self, cell: Cell, ending: int, recovery: int, cpu: float, code: int, texts: list[bytes]) -> None:
        """`texts`: value, error, detail, why there was no savepoint, figures."""
        self.cell = None
        self.last = cell.number
        wall = time.monotonic() - cell.began - cell.outside
        if cell.called:
            wall -= time.monotonic() - cell.called
        others = sum(1 for _ in self.descendants()) if recovery != f.NONE else 0
        files = changed_files(cell.started) if cell.flags & f.FILES else []
        head = f.DONE_HEAD.pack(
            cell.number, ending, recovery, max(0.0, wall), max(0.0, cpu), cell.outside, cell.peak, code, others
        )
        self.host.send(f.DONE, head, f.packed([*texts, b"\0", *files]))

    def look(self, cell: Cell, now: float) -> None:
        """Adds up what the cell's processes take."""
        cell.look_every = min(LAST_LOOK, cell.look_every * 1.5)
        cell.look_at = now + cell.look_every
        assert self.live is not None
        stat = k.stat_of(self.live.pid)
        if stat is None:
            return
        members = self.members(cell)
        rss = stat.rss + sum(one.rss for _, one in members)
        limit = cell.memory or self.memory
        if limit and rss > limit:
            # Forks share: only what is divided among them adds up to what is there.
            rss = sum(k.shared_out(pid) for pid in (self.live.pid, *(pid for pid, _ in members))) or rss
        cell.peak = max(cell.peak, rss)
        if limit and rss > limit + SLACK:
            self.fail(f.MEMORY, "tree")
            return
        if cell.processes and len(members) > cell.processes:
            self.fail(f.PROCESSES, "")
            return
        if cell.cpu > 0:
            used = self.cpu(cell, stat, members)
            if used >= cell.cpu:
                self.fail(f.TIME, "cpu")
                return
            cell.look_at = min(cell.look_at, now + max(0.002, (cell.cpu - used) / CPUS))

    def fail(self, ending: int, detail: str, texts: list[bytes] | None = None) -> None:
        """Ends the cell and goes back to where it began."""
        cell = self.cell
        assert cell is not None
        assert self.live is not None
        stat = k.stat_of(self.live.pid)
        members = self.members(cell)
        ended = self.end_tree(cell, members)
        if ended < 0:
            os._exit(4)  # the sandbox has other means
        status, spent, peak = self.dead.pop(self.live.pid)
        # Its own, and its children's that it had waited for; then who was still there.
        cpu = max(0.0, spent - cell.clock) + cell.cpu_orphans
        if stat is not None and stat.state not in "ZX":
            cpu += max(0.0, stat.children_cpu - cell.cpu_before)
        cell.peak = max(cell.peak, peak)
        code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        self.drain(cell)
        recovery, lost = self.recover()
        why = self.why
        words = [b"%d" % ended, detail.encode(), b"%d" % lost]
        said = texts or [b"", b""]
        self.report(cell, ending, recovery, cpu, code, [*said[:2], b"\n".join(words), why.encode()])
        self.save_soon()

    def lose(self, what: str) -> None:
        """The live Python ended, or is to end, between cells."""
        assert self.live is not None
        kill(self.live.pid, _signal.SIGKILL)
        end = time.monotonic() + KILL_SECONDS
        while self.live.pid not in self.dead:
            self.swallow()
            self.reap()
            if time.monotonic() > end:
                os._exit(4)
            select.select([self.wake], [], [], 0.002)
        self.dead.pop(self.live.pid)
        stale, self.making = bool(self.making), 0.0
        if self.coming is not None:
            coming, self.coming = self.coming, None
            self.bury(coming)
        elif stale:
            os.close(self.new_twin)
        if stale:  # what it has is of before the last cell
            self.drop_twin(what)
        recovery, _ = self.recover()
        why = self.why
        self.stale = ""
        self.host.send(f.DIED, bytes([recovery]), f.packed([what.encode(), why.encode()]))
        if self.pending is not None:
            self.start()
        else:
            self.save_soon()


def changed_files(since: float) -> list[bytes]:
    """What changed below the working folder while the cell ran."""
    found: list[bytes] = []
    looked, todo = 0, [b"."]
    since -= 0.02  # a file system's clock is coarser than ours
    while todo and looked < MOST_LOOKED and len(found) < MOST_FILES:
        place = todo.pop()
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    looked += 1
                    if looked >= MOST_LOOKED or len(found) >= MOST_FILES:
                        break
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(entry.path)
                    elif (
                        entry.is_file(follow_symlinks=False)
                        and entry.stat(follow_symlinks=False).st_mtime >= since
                    ):
                        found.append(entry.path[2:])
        except OSError:
            continue
    return sorted(found)


def main() -> NoReturn:
    monitor = Monitor()
    monitor.begin()
    monitor.loop()
