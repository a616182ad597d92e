"""The boxes that a keeper holds: their making, their states, their end. Stand-alone.

Promises:
- a box that could not be made, or that died in the making, is told of exactly once, with its last words;
- what a dead box leaves (control groups, a lease) is removed when its namespace is empty, not before.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable

TYPE_CHECKING = False
if TYPE_CHECKING or "rookery.sandboxes" in sys.modules:
    from typing import Any

    from rookery.sandboxes.local import box, groups, root, seccomp
    from rookery.sandboxes.local import kernel as k
else:
    import box
    import groups
    import kernel as k
    import root
    import seccomp

FIRST_UID = 0x20000000
RANGE = 65536
SLOTS = 4096
WARM_SIZE = 64 << 20
GONE_SECONDS = 10.0
_NAMESPACES = k.NEWUSER | k.NEWPID | k.NEWNS | k.NEWNET | k.NEWIPC | k.NEWUTS | k.NEWCGROUP


class Box:
    """One box, from its making to its end: making, warm, settling, held, ending."""

    __slots__ = ("group", "lease", "name", "order", "pid", "pidfd", "slot", "state", "sync")

    def __init__(
        self, name: str, pid: int, pidfd: int, sync: socket.socket, group: groups.Group, slot: int
    ) -> None:
        self.name = name
        self.pid = pid
        self.pidfd = pidfd
        self.sync: socket.socket | None = sync
        self.group = group
        self.slot = slot
        self.state = "making"
        self.order: Any = None
        """Whom it is for."""
        self.lease = ""


class Boxes:
    """All of them. Watches their lines by the keeper's poll."""

    def __init__(
        self,
        settings: "dict[str, Any]",
        poll: "select.poll",
        on_ready: Callable[[Box, int], None],
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
        self.program = seccomp.program(os.uname().machine)
        self.held = groups.find()
        with open(f"{settings['folder']}/groups.json", "w") as file:  # for the reaper, should we be killed
            json.dump({"prefix": f"{settings['name']}-", "above": self.held.tops}, file)
        if not self.mapped:
            k.unshare(k.NEWUSER | k.NEWNS)
            _map("self", f"{self.uid} {self.uid} 1", f"{self.gid} {self.gid} 1", deny=True)
        else:
            k.unshare(k.NEWNS)
        self.tree = root.prepare(settings["folder"], settings["extra"], lambda pid: self.map(pid, 0))
        # Begun somewhere else by each keeper, and taken in turn: user ids have limits of their own in the kernel.
        self.slots = deque((self.pid * 2654435761 + n) % SLOTS for n in range(SLOTS))
        self.by_pid: dict[int, Box] = {}
        self.syncs: dict[int, Box] = {}
        """By the descriptor of their line to us."""
        self.warm: deque[Box] = deque()
        self.making = 0
        self.made = 0
        self.leaving: list[tuple[float, Box]] = []

    def uid_of(self, one: Box) -> int:
        """The host's id of its user 0; -1 where it is our own user."""
        return FIRST_UID + one.slot * RANGE if self.mapped else -1

    # ------------------------------------------------------------------------------------------- making

    def start(self) -> None:
        if not self.slots:
            raise OSError(11, "no user ids are left")
        self.made += 1
        name = f"{self.settings['name']}-{self.made}"
        slot = self.slots[0]
        group = self.held.make(name)
        cgroup = -1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            if group.unified:
                cgroup = os.open(group.unified, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            pid, pidfd = k.clone(_NAMESPACES, cgroup=cgroup)
            if pid == 0:
                box.live(theirs, self.tree, self.program, self.pid, size=WARM_SIZE, mapped=self.mapped)
                os._exit(3)
        except OSError:
            ours.close()
            group.remove()
            raise
        finally:
            theirs.close()
            if cgroup >= 0:
                os.close(cgroup)
        one = Box(name, pid, pidfd, ours, group, slot)
        self.slots.popleft()
        self.by_pid[pid] = one
        self.making += 1
        ours.setblocking(False)
        self.syncs[ours.fileno()] = one
        self.poll.register(ours.fileno(), select.POLLIN)
        try:
            group.take(pid)
            self.map(pid, slot)
            with contextlib.suppress(PermissionError):
                # Pid 1 must get its turn when a hundred programs of its box want theirs; they do not inherit it.
                os.sched_setscheduler(pid, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
                os.setpriority(os.PRIO_PROCESS, pid, -10)
            ours.send(b"mapped")
        except OSError as error:
            self.on_spoiled(one, str(error))

    def map(self, pid: int, slot: int) -> None:
        if self.mapped:
            ids = f"0 {FIRST_UID + slot * RANGE} {RANGE}"
            _map(pid, ids, ids)
        else:
            _map(pid, f"{root.USER} {self.uid} 1", f"{root.USER} {self.gid} 1", deny=True)

    def progress(self, one: Box) -> None:
        """A box in the making says how far it is."""
        assert one.sync is not None
        try:
            data, fds = box.receive(one.sync, 4096, 1)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if data == b"warm":
            self.turn(one, "warm")
        elif data == b"ready" and one.state == "settling" and fds:
            self.unsync(one)
            self.turn(one, "held")
            self.on_ready(one, fds.pop())
        else:
            self.on_spoiled(one, data[2:].decode("utf-8", "replace") if data[:1] == b"!" else "it died")
        for fd in fds:
            os.close(fd)

    def settle(self, one: Box, asked: "dict[str, Any]") -> socket.socket | None:
        """Makes a warm box the one that is asked for; our end of its channel, or None where it was spoiled."""
        assert one.sync is not None
        self.turn(one, "settling")
        one.lease = asked["lease"]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            one.group.limit(groups.Limits(asked["memory"], asked["pids"], asked["cpus"]))
            missing = self.held.missing
            said = {
                "disk": asked["disk"],
                "uid": asked["uid"],
                "memory_each": asked["memory"] if groups.MEMORY in missing else 0,
                "pids_each": asked["pids"] if groups.PIDS in missing else 0,
            }
            socket.send_fds(one.sync, [json.dumps(said).encode()], [theirs.fileno()])
        except OSError as error:
            ours.close()
            self.on_spoiled(one, str(error))
            return None
        finally:
            theirs.close()
        return ours

    # ------------------------------------------------------------------------------------------- ending

    def turn(self, one: Box, state: str) -> None:
        """Into another state; `making` and `warm` are counted."""
        if one.state == "making":
            self.making -= 1
        elif one.state == "warm" and one in self.warm:
            self.warm.remove(one)
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
        if one.state != "ending":
            self.turn(one, "ending")
            one.group.kill()
            if one.pidfd >= 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(one.pidfd, signal.SIGKILL)

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
                continue
            if one.sync is not None:
                self.progress(one)  # its last words
            del self.by_pid[pid]
            if one.state in ("making", "warm", "settling"):
                self.on_spoiled(one, f"it died while it was made (wait status {status})")
            self.end(one)
            os.close(one.pidfd)
            one.pidfd = -1
            self.leaving.append((time.monotonic(), one))

    def tidy(self) -> None:
        """Removes what dead boxes leave: pid 1 is gone only when all of its namespace is."""
        left: list[tuple[float, Box]] = []
        for since, one in self.leaving:
            if one.group.remove() or time.monotonic() - since > GONE_SECONDS:
                self.slots.append(one.slot)
                if one.lease:
                    with contextlib.suppress(OSError):
                        os.unlink(one.lease)
            else:
                one.group.kill()
                left.append((since, one))
        self.leaving = left

    def close(self, wake: int) -> None:
        """Ends all of them and sees them gone, for a bounded time."""
        for one in list(self.by_pid.values()):
            self.end(one)
        end = time.monotonic() + GONE_SECONDS
        while (self.by_pid or self.leaving) and time.monotonic() < end:
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
