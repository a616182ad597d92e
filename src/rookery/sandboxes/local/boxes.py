"""The boxes that a keeper holds: their making, their states, their end. Stand-alone.

Promises:
- a box that could not be made, or that died in the making, is told of exactly once, with its last words;
- what a dead box leaves (control groups, a lease) is removed when its namespace is empty, not before.
"""

from __future__ import annotations

import _socket
import os
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

if TYPE_CHECKING or "rookery.sandboxes" in sys.modules:
    from typing import Any

    from rookery.sandboxes.local import box, groups, nets, root, seccomp, store
    from rookery.sandboxes.local import kernel as k
    from rookery.sandboxes.local.works import Work, Works
    from rookery.sandboxes.small import _signal, deque, dumps, receive, send, suppress
else:
    import box
    import groups
    import kernel as k
    import nets
    import root
    import seccomp
    import store
    from small import _signal, deque, dumps, receive, send, suppress
    from works import Work, Works

FIRST_UID = 0x20000000
RANGE = 65536
SLOTS = 4096
WARM_SIZE = 1 << 30
"""Of a usual box's disk: what is asked for without a word about it. Another one is another call of the kernel."""
GONE_SECONDS = 10.0
HURRY_SECONDS = 0.004
_SHAPE = ("memory", "pids", "cpus", "disk", "uid", "listen")
_NAMESPACES = k.NEWUSER | k.NEWPID | k.NEWNS | k.NEWIPC | k.NEWUTS | k.NEWCGROUP


class Box:
    """One box, from its making to its end: born, making, warm, settling, held, ending."""

    __slots__ = (
        "below",
        "channel",
        "family",
        "fds",
        "group",
        "image",
        "lease",
        "name",
        "net",
        "order",
        "pid",
        "pidfd",
        "shape",
        "shared",
        "state",
        "still",
        "sync",
    )

    def __init__(
        self, name: str, pid: int, pidfd: int, sync: _socket.socket, group: groups.Group, family: store.Family
    ) -> None:
        self.name = name
        self.pid = pid
        self.pidfd = pidfd
        self.sync: _socket.socket | None = sync
        self.group = group
        self.family = family
        """Whose users it is."""
        family.members += 1
        self.image = ""
        """The folder of its image; empty: the host's system."""
        self.below: tuple[str, ...] = ()
        """The snapshots under its layer, uppermost first."""
        self.state = "born"
        self.order: Any = None
        """Whom it is for."""
        self.lease = ""
        self.net = -1
        """The network it has been lent; -1: one that goes with it, or the host's."""
        self.shared = False
        """Whether somebody else holds a socket of its network."""
        self.still = 0
        """How much work goes on that wants it frozen."""
        self.shape: dict[str, Any] | None = None
        """What it is settled for before anybody asked for it."""
        self.channel: _socket.socket | None = None
        self.fds: dict[str, int] = {}
        """The owner's end of its line and what else the owner gets, where it waits settled."""

    def drop(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        for fd in self.fds.values():
            os.close(fd)
        self.fds = {}


class Boxes:
    """All of them. Watches their lines by the keeper's poll."""

    def __init__(
        self,
        settings: dict[str, Any],
        poll: select.poll,
        on_ready: Callable[[Box, dict[str, int]], None],
        on_spoiled: Callable[[Box, str], None],
    ) -> None:
        self.settings = settings
        self.poll = poll
        self.on_ready = on_ready
        self.on_spoiled = on_spoiled
        self.pid = os.getpid()
        self.uid, self.gid = os.geteuid(), os.getegid()
        self.mapped = self.uid == 0 and _has_ids()
        """Whether each box is users of its own, or all of them are the one that we are."""
        self.program = k.Filter(seccomp.program(os.uname().machine))
        self.held = groups.find()
        with open(f"{settings['folder']}/groups.json", "wb") as file:  # for the reaper, should we be killed
            file.write(dumps({"prefix": f"{settings['name']}-", "above": self.held.tops}))
        if not self.mapped:
            k.unshare(k.NEWUSER | k.NEWNS)
            _map("self", f"{self.uid} {self.uid} 1", f"{self.gid} {self.gid} 1", deny=True)
        else:
            k.unshare(k.NEWNS)
            k.keep_rights_as_another_user()
        self.nets = nets.Nets() if self.mapped else None
        self.tree = root.prepare(settings["folder"], settings["extra"], lambda pid: self.map(pid, 0, root.USER))
        # Begun somewhere else by each keeper, and taken in turn: user ids have limits of their own in the kernel.
        slots = deque((self.pid * 2654435761 + n) % SLOTS for n in range(SLOTS))
        self.works = Works()
        self.store = store.Store(self.works, slots, mapped=self.mapped)
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
        self.made = 0
        self.dying: deque[tuple[float, Box]] = deque()
        self.leaving: list[tuple[float, Box]] = []

    def uid_of(self, one: Box) -> int:
        """The host's id of its user 0; -1 where it is our own user."""
        return FIRST_UID + one.family.slot * RANGE if self.mapped else -1

    # ------------------------------------------------------------------------------------------- making

    def birth(self, *, alone: bool = True) -> Box:
        """A process in namespaces and groups of its own, that waits to be told what it is. `alone`: no network."""
        self.made += 1
        name = f"{self.settings['name']}-{self.made}"
        family = self.store.family()
        try:
            group = self.held.make(name)
        except OSError:
            self.store.slots.append(family.slot)
            raise
        doors: list[int] = []
        cgroup = net = -1
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        try:
            if group.unified:
                cgroup = os.open(group.unified, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if self.nets is not None and alone:
                net = self.nets.enter()
            elif self.nets is not None:
                self.nets.enter_host()
            doors = group.doors()
            flags = _NAMESPACES | k.NEWNET if alone and net < 0 else _NAMESPACES
            pid, pidfd = self.clone(flags, cgroup, FIRST_UID + family.slot * RANGE)
            if pid == 0:
                box.live(theirs, self.tree, self.program, self.pid, doors, mapped=self.mapped)
                os._exit(3)
        except OSError:
            ours.close()
            group.remove()
            self.store.slots.append(family.slot)
            if net >= 0:
                os.close(net)
            raise
        finally:
            theirs.close()
            for fd in (*doors, *((cgroup,) if cgroup >= 0 else ())):
                os.close(fd)
        one = Box(name, pid, pidfd, ours, group, family)
        one.net = net
        self.by_pid[pid] = one
        ours.setblocking(False)
        self.syncs[ours.fileno()] = one
        self.poll.register(ours.fileno(), select.POLLIN)
        with suppress(PermissionError, ProcessLookupError):
            # Pid 1 must get its turn when a hundred programs of its box want theirs; they do not inherit it.
            os.sched_setscheduler(pid, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, pid, -20)
        return one

    def clone(self, flags: int, cgroup: int, uid: int) -> tuple[int, int]:
        """What a box's users take of what the kernel counts by user (inotify, signals, namespaces) is also counted
        for the user who made the box: were it root, one box could leave the host's root without."""
        if not self.mapped:
            return k.clone(flags, cgroup=cgroup)
        os.seteuid(uid)
        pid = -1
        try:
            pid, pidfd = k.clone(flags, cgroup=cgroup)
        finally:
            if pid != 0:
                os.seteuid(0)
                k.die_with_parent(_signal.SIGTERM)  # which being another user had undone
        return pid, pidfd

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

    def dress(
        self,
        one: Box,
        dress: root.Dress,
        image: str = "",
        family: store.Family | None = None,
        *,
        alone: bool = True,
    ) -> None:
        """Tells a box what it is made from. `image`: a folder. `family`: whose users it is to be."""
        assert one.sync is not None
        one.image, one.below = image, dress.lowers
        if family is not None:
            family.members += 1
            self.store.leave(one.family)
            one.family = family
        self.map(one.pid, one.family.slot, dress.uid)
        said = {
            "size": dress.size,
            "uid": dress.uid,
            "lowers": dress.lowers,
            "resolve": dress.resolve,
            "loopback": alone and self.nets is None,
        }
        base = self.image_for(one, image) if image else -1
        try:
            send(one.sync, dumps(said), [base] if base >= 0 else [])
        finally:
            if base >= 0:
                os.close(base)

    def image_for(self, one: Box, image: str) -> int:
        """Its files as a box sees them: read-only, their owners the box's users where the kernel can do that."""
        base = k.detached(image)
        try:
            if not self.mapped:
                k.protect(base)
                return base
            users = os.open(f"/proc/{one.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
            try:
                k.protect(base, users)
            except OSError:  # a file system that cannot: owners show as nobody, and their files cannot be changed
                k.protect(base)
            finally:
                os.close(users)
        except BaseException:
            os.close(base)
            raise
        return base

    def map(self, pid: int, slot: int, uid: int) -> None:
        if self.mapped:
            ids = f"0 {FIRST_UID + slot * RANGE} {RANGE}"
            _map(pid, ids, ids)
        else:
            _map(pid, f"{uid} {self.uid} 1", f"{uid} {self.gid} 1", deny=True)

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
        one.lease = asked["lease"]
        if one.shape is not None:
            channel, one.channel = one.channel, None
            return channel
        try:
            return self.settle_for(one, asked)
        except OSError as error:
            self.on_spoiled(one, str(error))
            return None

    def settle_for(self, one: Box, asked: dict[str, Any]) -> _socket.socket:
        """Tells a box what it is to hold. Our end of its channel."""
        assert one.sync is not None
        one.shared = asked["listen"] > 0
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        try:
            one.group.limit(groups.Limits(asked["memory"], asked["pids"], asked["cpus"]))
            missing = self.held.missing
            said = {
                "disk": asked["disk"],
                "uid": asked["uid"],
                "listen": asked.get("listen", 0),
                "memory_each": asked["memory"] if groups.MEMORY in missing else 0,
                "pids_each": asked["pids"] if groups.PIDS in missing else 0,
            }
            send(one.sync, dumps(said), [theirs.fileno()])
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return ours

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
            self.leaving.append((time.monotonic(), one))

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
                if one.lease:
                    with suppress(OSError):
                        os.unlink(one.lease)
            else:
                one.group.kill()
                left.append((since, one))
        self.leaving = left

    def close(self, wake: int) -> None:
        """Ends all of them and sees them gone, for a bounded time."""
        self.works.close()
        for one in list(self.by_pid.values()):
            self.end(one)
        end = time.monotonic() + GONE_SECONDS
        while (self.by_pid or self.leaving or len(self.works)) and time.monotonic() < end:
            select.select([wake], [], [], 0.01)
            self.reap()
            self.tidy()
        self.held.leave()


def _map(pid: int | str, uids: str, gids: str, *, deny: bool = False) -> None:
    if deny:
        with open(f"/proc/{pid}/setgroups", "w") as file:
            file.write("deny")
    for name, text in (("uid_map", uids), ("gid_map", gids)):
        with open(f"/proc/{pid}/{name}", "w") as file:
            file.write(text)


def _has_ids() -> bool:
    """Whether the users that boxes would be exist here: in a container, root may be alone."""
    with open("/proc/self/uid_map") as file:
        for line in file:
            first, _, count = (int(word) for word in line.split())
            if first <= FIRST_UID and first + count >= FIRST_UID + SLOTS * RANGE:
                return True
    return False
