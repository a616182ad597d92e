"""The boxes that a keeper holds: their making, their states, their end. Stand-alone.

Promises:
- a box that could not be made, or that died in the making, is told of exactly once, with its last words;
- what a dead box leaves (control groups, a lease) is removed when its namespace is empty, not before.
"""

from __future__ import annotations

import os
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    from collections.abc import Callable

if TYPE_CHECKING or "rookery.sandboxes" in sys.modules:
    from typing import Any

    from rookery.sandboxes.local import kernel as k
    from rookery.sandboxes.local import root, store
    from rookery.sandboxes.local.births import Births, Box
    from rookery.sandboxes.local.works import Work
    from rookery.sandboxes.small import _signal, deque, receive, suppress
else:
    import kernel as k
    import root
    import store
    from births import Births, Box
    from small import _signal, deque, receive, suppress
    from works import Work

WARM_SIZE = 1 << 30
"""Of a usual box's disk: what is asked for without a word about it. Another one is another call of the kernel."""
GONE_SECONDS = 10.0
HURRY_SECONDS = 0.004
_SHAPE = ("memory", "pids", "cpus", "disk", "uid", "listen")


class Boxes(Births):
    """All of them. Watches their lines by the keeper's poll."""

    def __init__(
        self,
        settings: dict[str, Any],
        poll: select.poll,
        on_ready: Callable[[Box, dict[str, int]], None],
        on_spoiled: Callable[[Box, str], None],
    ) -> None:
        super().__init__(settings)
        self.poll = poll
        self.on_ready = on_ready
        self.on_spoiled = on_spoiled
        self.by_pid: dict[int, Box] = {}
        self.syncs: dict[int, Box] = {}
        """By the descriptor of their line to us."""
        self.born: deque[Box] = deque()
        """Without files yet: for those who want others than the usual."""
        self.warm: deque[Box] = deque()
        self.last: dict[str, Any] | None = None
        """What the last usual one was asked for as."""
        self.shape: dict[str, Any] | None = None
        """What the next ones are settled for in advance: two in a row were asked for so."""
        self.making = 0
        self.settling = 0
        self.dying: deque[tuple[float, Box]] = deque()
        self.leaving: list[tuple[float, Box]] = []
        self.dead_but_claimed: set[Box] = set()

    # ------------------------------------------------------------------------------------------- making

    def birth(self, *, alone: bool = True) -> Box:
        one = super().birth(alone=alone)
        assert one.sync is not None
        self.by_pid[one.pid] = one
        self.syncs[one.sync.fileno()] = one
        self.poll.register(one.sync.fileno(), select.POLLIN)
        return one

    def start(self) -> None:
        """One of the usual boxes, to be warm soon."""
        one = self.birth()
        self.turn(one, "making")
        shape = self.shape
        try:
            self.dress(
                one, root.Dress(shape["disk"] if shape else WARM_SIZE, shape["uid"] if shape else root.USER)
            )
            if shape is not None:
                one.shape = shape
                one.channel = self.settle_for(one, shape)
        except OSError as error:
            self.on_spoiled(one, str(error))

    def progress(self, one: Box) -> None:
        """A box in the making says how far it is."""
        assert one.sync is not None
        try:
            data, fds = receive(one.sync, 4096, 4)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if data == b"warm":
            if one.state == "making" and one.shape is None:  # else it goes on to be ready
                self.turn(one, "warm")
        elif data.startswith(b"ready ") and one.state == "making":
            self.unsync(one)
            one.fds = dict(zip(data.decode().split()[1:], fds, strict=True))
            fds = []
            self.turn(one, "warm")
        elif data.startswith(b"ready ") and one.state == "settling":
            self.unsync(one)
            self.turn(one, "held")
            self.on_ready(one, dict(zip(data.decode().split()[1:], fds, strict=True)))
        else:
            self.on_spoiled(one, data[2:].decode("utf-8", "replace") if data[:1] == b"!" else "it died")
        for fd in fds:
            os.close(fd)

    def settle(self, one: Box, asked: dict[str, Any]) -> _socket.socket | None:
        """Makes a warm box the one that is asked for; our end of its channel, or None where it was spoiled."""
        self.turn(one, "settling")
        one.lease = asked.pop("lease", -1)
        if one.shape is not None:
            channel, one.channel = one.channel, None
            return channel
        try:
            return self.settle_for(one, asked)
        except OSError as error:
            self.on_spoiled(one, str(error))
            return None

    def fitting(self, asked: dict[str, Any]) -> Box | None:
        """A warm box for this; those that were settled for something else cannot be changed any more, and end."""
        shape = {name: asked[name] for name in _SHAPE}
        self.shape = shape if shape == self.last else None
        self.last = shape
        for one in list(self.warm):
            if one.shape is None or one.shape == shape:
                return one
            self.end(one)
        return None

    def ready(self, one: Box) -> None:
        """A box that had been settled already is there."""
        self.turn(one, "held")
        self.on_ready(one, one.fds)
        one.drop()

    # --------------------------------------------------------------------------------------- snapshots

    def snapshot(self, one: Box, layer: int, ended: Callable[[str, str], None]) -> Work:
        """Of what the box wrote. Tells the snapshot's name, or what went wrong."""

        def done(name: str, why: str) -> None:
            self.move_on(one)
            ended(name, why)

        work = self.store.snapshot(one.family, one.below, one.image, layer, one.group.unified, done)
        one.still += 1
        return work

    def diff(self, one: Box, name: str, layer: int, ended: Callable[[int, str], None]) -> Work:
        """What the box wrote since a snapshot of it, or since the one that it was forked from."""
        found = self.store.snapshots.get(name)
        if found is None or found.family is not one.family:
            raise OSError(2, f"there is no snapshot {name} of this box")
        # The layers above the snapshot that a fork of it lies on would have to be looked through one by one.
        taken = one.below == found.below
        if not taken and one.below != found.lowers:
            raise OSError(22, f"{name} is no snapshot of this box, nor what it was forked from")

        def done(result: int, why: str) -> None:
            self.move_on(one)
            ended(result, why)

        work = self.store.diff(found, layer, one.group.unified, self.uid_of(one), done, taken=taken)
        one.still += 1
        return work

    def move_on(self, one: Box) -> None:
        one.still -= 1
        if one.still == 0:
            store.thaw(one.group.unified)

    # ------------------------------------------------------------------------------------------- ending

    def turn(self, one: Box, state: str) -> None:
        """Into another state; `making` and `settling` are counted, `born` and `warm` listed."""
        self.making += (state == "making") - (one.state == "making")
        self.settling += (state == "settling") - (one.state == "settling")
        for name, listed in (("born", self.born), ("warm", self.warm)):
            if one.state == name and one in listed:
                listed.remove(one)
        one.state = state
        if state == "warm":
            self.warm.append(one)

    def unsync(self, one: Box) -> None:
        if one.sync is not None:
            self.syncs.pop(one.sync.fileno(), None)
            self.poll.unregister(one.sync.fileno())
            one.sync.close()
            one.sync = None

    def end(self, one: Box) -> None:
        self.unsync(one)
        one.drop()
        if one.state != "ending":
            self.turn(one, "ending")
            if one.pidfd >= 0:
                with suppress(ProcessLookupError):
                    _signal.pidfd_send_signal(one.pidfd, _signal.SIGKILL)
                self.dying.append((time.monotonic(), one))

    def hurry(self) -> None:
        """Kills what did not die with pid 1 at once: a bomb. Who is born into a group that was killed once is
        killed too, on some kernels, so this is not done to all of them."""
        now = time.monotonic()
        while self.dying and (self.dying[0][1].pidfd < 0 or now - self.dying[0][0] > HURRY_SECONDS):
            one = self.dying.popleft()[1]
            if one.pidfd >= 0:
                one.group.kill()

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            one = self.by_pid.get(pid)
            if one is None:
                self.works.reaped(pid, status)
                continue
            if one.sync is not None:
                self.progress(one)  # its last words
            del self.by_pid[pid]
            if one.state in ("born", "making", "warm", "settling"):
                self.on_spoiled(one, f"it died while it was made (wait status {status})")
            self.end(one)
            os.close(one.pidfd)
            one.pidfd = -1
            if one.claimed:
                self.dead_but_claimed.add(one)
            else:
                self.leaving.append((time.monotonic(), one))

    def release(self, one: Box) -> None:
        """End a box on behalf of its owner, who needs nothing of it any more."""
        one.claimed = False
        if one in self.dead_but_claimed:
            self.dead_but_claimed.discard(one)
            self.leaving.append((time.monotonic(), one))
        else:
            self.end(one)

    def tidy(self) -> None:
        """Removes what dead boxes leave: pid 1 is gone only when all of its namespace is."""
        if self.dying:
            self.hurry()
        left: list[tuple[float, Box]] = []
        for since, one in self.leaving:
            if self.held.done_with(one.group, keep=not one.still) or time.monotonic() - since > GONE_SECONDS:
                if one.net >= 0 and self.nets is not None:
                    self.nets.give_back(one.net, shared=one.shared)
                self.store.leave(one.family)
                if one.lease >= 0:
                    with suppress(OSError):
                        k.unlink_open_file(one.lease)
                    os.close(one.lease)
                    one.lease = -1
            else:
                one.group.kill()
                left.append((since, one))
        self.leaving = left

    def close(self, wake: int) -> None:
        """Ends all of them and sees them gone, for a bounded time."""
        self.works.close()
        for one in (*self.by_pid.values(), *self.dead_but_claimed):
            self.release(one)
        end = time.monotonic() + GONE_SECONDS
        while (self.by_pid or self.leaving or len(self.works)) and time.monotonic() < end:
            select.select([wake], [], [], 0.01)
            self.reap()
            self.tidy()
        self.held.leave()
