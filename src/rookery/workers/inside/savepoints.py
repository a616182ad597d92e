"""Savepoints: how the monitor has twins made, and goes back to them. Stand-alone.

Promises:
- a twin is made after every cell, while nobody waits; an older one goes when the new one is there, or cannot be;
- one is never made of a process with two threads, nor where memory could not hold both; then it is said why;
- going back ends with a live Python: the twin, or a fresh one, which is empty.
"""

from __future__ import annotations

import _socket
import os
import select
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
else:
    import _signal

if TYPE_CHECKING or "rookery.workers" in sys.modules:
    from rookery.workers.inside import frames as f
    from rookery.workers.inside import kernel as k
    from rookery.workers.inside.crew import Child, Crew, kill
else:
    import frames as f
    import kernel as k
    from crew import Child, Crew, kill

ANSWER_SECONDS = 5.0
SLACK = 32 << 20
_RETRY = (0.001, 0.002, 0.004, 0.008)
"""A thread that was joined may be there for a moment."""


class Savepoints(Crew):
    """The twin of the live Python."""

    def start(self) -> None:
        """Runs the cell that waits."""
        raise NotImplementedError

    def recover(self) -> tuple[int, int]:
        """The twin lives, or a fresh one does; and how many pipes and sockets were lost."""
        assert self.live is not None
        self.live.line.close()
        self.live = None
        twin, self.twin = self.twin, None
        if twin is not None:
            self.live = twin
            twin.line.send(f.GO)
            end = time.monotonic() + ANSWER_SECONDS
            while twin.pid not in self.dead and time.monotonic() < end:
                try:
                    there = twin.line.feed()
                    found = next(twin.line.frames(), None)
                    if found is not None:
                        kind, payload = found
                        if kind == f.LIVE and f.SIZE.unpack_from(payload)[0] == twin.pid:
                            return f.KEPT, f.SIZE.unpack_from(payload, 4)[0]
                        there = False
                except (f.Garbage, struct.error):
                    there = False
                if not there:
                    break
                select.select([twin.line.read, self.wake], [], [], max(0.0, end - time.monotonic()))
                self.swallow()
                self.reap()
            self.live = None
            self.why = "its savepoint was ended"
            self.bury(twin)
        try:
            self.fresh()
        except OSError:
            os._exit(3)
        return f.RESET, 0

    def bury(self, child: Child) -> None:
        kill(child.pid, _signal.SIGKILL)
        if self.dead.pop(child.pid, None) is None:
            self.buried.add(child.pid)
        child.line.close()

    def drop_twin(self, why: str) -> None:
        self.why = why
        if self.twin is not None:
            twin, self.twin = self.twin, None
            self.bury(twin)

    def save_soon(self) -> None:
        self.retries = 0
        self.stale = "there was no time to make one"
        self.save()

    def save(self) -> None:
        """Asks for a twin where one can be."""
        self.save_at = 0.0
        if self.live is None or self.making or self.cell is not None:
            return
        stat = k.stat_of(self.live.pid)
        if stat is None or stat.state in "ZX":
            return  # dead, which is seen next
        why = ""
        if not k.can_clone():
            why = "this machine has no way to copy it"
        elif stat.threads > 1:
            # Again and again: it may end while nobody waits.
            wait = _RETRY[self.retries] if self.retries < len(_RETRY) else min(1.0, 0.01 * 2 ** (self.retries - 4))
            self.save_at = time.monotonic() + wait
            self.retries += 1
            self.stale = f"it had {stat.threads} threads"
            if self.retries != len(_RETRY) + 1:
                return
            why = self.stale
        elif self.room and stat.rss + (self.memory or stat.rss) + SLACK > self.room:
            why = f"with {stat.rss >> 20} MB it is too large for the sandbox's memory to hold it twice"
        if why:
            self.decided(False, why)
            return
        ours, theirs = _socket.socketpair()
        self.making = time.monotonic()
        self.new_twin = ours.detach()
        live = self.live.line
        try:
            live.flush()
            if live.waiting:
                raise BlockingIOError
            sock = _socket.socket(fileno=os.dup(live.write))
            try:
                rights = struct.pack("i", theirs.fileno())
                sock.sendmsg([f.HEAD.pack(0, f.SAVE)], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
            finally:
                sock.close()
        except OSError:
            os.close(self.new_twin)
            self.decided(False, "it could not be asked")
        finally:
            theirs.close()

    def copied(self, pid: int, problem: bytes) -> None:
        """The live Python says that there is a twin, or why not."""
        stat = k.stat_of(pid) if pid else None
        if stat is None or stat.parent != self.pid or (self.live is not None and pid == self.live.pid):
            os.close(self.new_twin)
            self.decided(False, "it could not be copied: " + problem.decode("utf-8", "replace"))
        else:
            self.coming = Child(pid, self.new_twin)

    def came(self) -> None:
        """The twin says that it is frozen."""
        assert self.coming is not None
        there = self.coming.line.feed()
        try:
            kind = next(self.coming.line.frames(), (0, b""))[0]
        except f.Garbage:
            kind = -1
        if kind == f.FROZEN:
            twin, self.coming = self.coming, None
            self.drop_twin("")
            self.twin = twin
            self.decided(True, "", time.monotonic() - self.making)
        elif kind or not there:
            self.lost_coming()

    def lost_coming(self) -> None:
        if self.coming is not None:
            coming, self.coming = self.coming, None
            self.bury(coming)
            self.decided(False, "its savepoint was ended")

    def decided(self, made: bool, why: str, took: float = 0.0) -> None:
        self.stale, self.making = "", 0.0
        if not made:
            self.drop_twin(why)
        self.host.send(f.SAVED, f.SAVED_HEAD.pack(self.last, made, took), why.encode())
        if self.pending is not None and self.cell is None:
            self.start()
