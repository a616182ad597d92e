"""How a box is born: a process in namespaces, groups and a network of its own; and how it is told what it is.

Stand-alone. What holds for all boxes of a keeper (whose users they can be, what they are made from) is found once.

Promises:
- a birth that fails leaves nothing: no process, no group, no users taken;
- what the kernel counts by user is counted for the box's own users, not for whoever runs us.
"""

from __future__ import annotations

import _socket
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING or "rookery.sandboxes" in sys.modules:
    from typing import Any

    from rookery.sandboxes.local import box, groups, nets, root, seccomp, store
    from rookery.sandboxes.local import kernel as k
    from rookery.sandboxes.local.works import Works
    from rookery.sandboxes.small import _signal, deque, dumps, send, suppress
else:
    import box
    import groups
    import kernel as k
    import nets
    import root
    import seccomp
    import store
    from small import _signal, deque, dumps, send, suppress
    from works import Works

FIRST_UID = 0x20000000
RANGE = 65536
SLOTS = 4096
_NAMESPACES = k.NEWUSER | k.NEWPID | k.NEWNS | k.NEWIPC | k.NEWUTS | k.NEWCGROUP


class Box:
    """One box, from its making to its end: born, making, warm, settling, held, ending."""

    __slots__ = (
        "below",
        "channel",
        "claimed",
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
        self.image: store.Image | None = None
        """What it is made from; None: the host's system."""
        self.below: tuple[str, ...] = ()
        """The snapshots under its layer, uppermost first."""
        self.state = "born"
        self.order: Any = None
        """Whom it is for."""
        self.lease = -1
        """A descriptor of a file that is removed with the box. Its name must not lie in our memory: boxes are
        forks of us, and could read it."""
        self.claimed = False
        """Whether an owner has it and has not ended it yet. Its control groups stay until then, also when it dies:
        the owner reads there whether the OOM killer was the cause."""
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


class Births:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
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
        self.made = 0

    def uid_of(self, one: Box) -> int:
        """The host's id of its user 0; -1 where it is our own user."""
        return FIRST_UID + one.family.slot * RANGE if self.mapped else -1

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
        ours.setblocking(False)
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

    def dress(
        self,
        one: Box,
        dress: root.Dress,
        image: store.Image | None = None,
        family: store.Family | None = None,
        *,
        alone: bool = True,
    ) -> None:
        """Tells a box what it is made from. `family`: whose users it is to be."""
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
            "layers": image.layers if image is not None else (),
            "mounts": [target for _, target in dress.mounts],
            "image": image is not None,
            "resolve": dress.resolve,
            "loopback": alone and self.nets is None,
        }
        folders = [image.folder] if image is not None else []
        trees: list[int] = []
        try:
            for folder in (*folders, *(str(source) for source, _ in dress.mounts)):
                trees.append(self.seen_by(one, folder))  # noqa: PERF401  (those before one that fails are closed)
            send(one.sync, dumps(said), trees)
        finally:
            for tree in trees:
                os.close(tree)

    def seen_by(self, one: Box, folder: str) -> int:
        """Files of the host as a box sees them: read-only, their owners its users where the kernel can do that."""
        base = k.detached(folder)
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
                "host_network": asked.get("network") == "all",
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
