"""The keeper: holds the boxes of a run on this machine, and makes new ones by forking itself.

A stand-alone program without a thread: one loop over sockets. It is started with its control socket as
descriptor 3 and its settings as the first message; other processes of the run connect to its listening socket.

Promises:
- a box dies with the keeper, through the kernel; the keeper dies with who started it;
- a box dies with the connection that asked for it;
- requests are served in the order of arrival, a few boxes in the making at once, however many ask together;
- some boxes are kept warm, so that the next one that is asked for is there already;
- a creation that fails or is given up leaves nothing: no process, no group, no lease.
"""

import contextlib
import json
import os
import select
import signal
import socket
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rookery.sandboxes.local import box, groups, root, seccomp
    from rookery.sandboxes.local import kernel as k
else:
    for _place in sys.argv[1:3]:
        sys.path.insert(0, _place)
    import box
    import groups
    import kernel as k
    import root
    import seccomp

    del sys.path[:2]

CONTROL = 3
MAX_MESSAGE = 1 << 16
AT_ONCE = 8
"""Boxes in the making at once."""
FIRST_UID = 0x20000000
RANGE = 65536
SLOTS = 4096
WARM_SIZE = 64 << 20
GONE_SECONDS = 10.0


class Box:
    """One box, from its making to its end."""

    __slots__ = ("asker", "group", "lease", "name", "pid", "pidfd", "since", "slot", "state", "sync")

    def __init__(self, name: str, pid: int, pidfd: int, sync: socket.socket, group, slot: int) -> None:
        self.name = name
        self.pid = pid
        self.pidfd = pidfd
        self.sync: socket.socket | None = sync
        self.group = group
        self.slot = slot
        self.state = "making"
        self.asker: Order | None = None
        self.lease = ""
        self.since = time.monotonic()


class Order:
    """One request for a box."""

    __slots__ = ("asked", "client", "given_up", "number")

    def __init__(self, client: "Client", number: int, asked: dict) -> None:
        self.client = client
        self.number = number
        self.asked = asked
        self.given_up = False


class Client:
    """A connection; its boxes end with it."""

    __slots__ = ("boxes", "orders", "sock")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.boxes: set[Box] = set()
        self.orders: dict[int, Order] = {}


class Keeper:
    def __init__(self, control: socket.socket, settings: dict) -> None:
        self.pid = os.getpid()
        self.settings = settings
        self.mapped = os.geteuid() == 0
        self.uid, self.gid = os.geteuid(), os.getegid()
        self.program = seccomp.program(os.uname().machine)
        self.held = groups.find()
        self.flags = k.NEWUSER | k.NEWPID | k.NEWNS | k.NEWNET | k.NEWIPC | k.NEWUTS | k.NEWCGROUP
        if not self.mapped:
            k.unshare(k.NEWUSER | k.NEWNS)
            _map("self", f"{self.uid} {self.uid} 1", f"{self.gid} {self.gid} 1", deny=True)
        else:
            k.unshare(k.NEWNS)
        self.tree = root.prepare(settings["folder"], settings["extra"], lambda pid: self.map(pid, 0))
        self.slots = set(range(SLOTS))
        self.first = (self.pid * 2654435761) % SLOTS
        self.boxes: dict[int, Box] = {}
        """By the pid of their first process."""
        self.syncs: dict[int, Box] = {}
        self.clients: dict[int, Client] = {}
        self.orders: list[Order] = []
        self.leaving: list[tuple[float, Box]] = []
        self.made = 0
        self.failed_at = 0.0
        self.poll = select.poll()
        self.control = control.fileno()
        self.listener: socket.socket | None = None
        self.connect(control)
        if settings["listen"]:
            self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(settings["listen"])
            self.listener.bind(settings["listen"])
            os.chmod(settings["listen"], 0o600)
            self.listener.listen(1024)
            self.poll.register(self.listener.fileno(), select.POLLIN)
        self.wake, end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(end, warn_on_full_buffer=False)
        self.poll.register(self.wake, select.POLLIN)

    def connect(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.clients[sock.fileno()] = Client(sock)
        self.poll.register(sock.fileno(), select.POLLIN)

    # ------------------------------------------------------------------------------------------ the loop

    def loop(self) -> None:
        while True:
            for fd, _ in self.poll.poll(self.wait_ms()):
                if fd == self.wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self.wake, 4096)
                    self.reap()
                elif self.listener is not None and fd == self.listener.fileno():
                    with contextlib.suppress(OSError):
                        self.connect(self.listener.accept()[0])
                elif fd in self.clients:
                    self.hear(self.clients[fd])
                elif fd in self.syncs:
                    self.progress(self.syncs[fd])
                if self.control not in self.clients:
                    return
            self.tidy()
            self.make()

    def wait_ms(self) -> float | None:
        if self.leaving:
            return 20.0
        if self.orders and self.failed_at:
            return 100.0
        return None

    def hear(self, client: Client) -> None:
        while client.sock.fileno() >= 0:
            try:
                data, fds = box.receive(client.sock, MAX_MESSAGE, 4)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            for fd in fds:
                os.close(fd)
            if not data:
                self.drop(client)
                return
            asked = json.loads(data)
            if asked["op"] == "create":
                order = Order(client, asked["number"], asked)
                client.orders[order.number] = order
                self.orders.append(order)
            elif asked["op"] == "give-up":
                order = client.orders.pop(asked["number"], None)
                if order is not None:
                    order.given_up = True
            elif asked["op"] == "end":
                for one in [one for one in client.boxes if one.name == asked["name"]]:
                    self.end(one)
            elif asked["op"] == "about":
                self.tell(client, {"about": self.about()})

    def about(self) -> dict:
        return {
            "pid": self.pid,
            "boxes": len(self.boxes),
            "missing": self.held.missing,
            "overlay": self.tree.overlay,
            "unified": self.held.unified,
            "v1": self.held.v1,
            "v2": sorted(self.held.v2),
        }

    def drop(self, client: Client) -> None:
        fd = client.sock.fileno()
        self.poll.unregister(fd)
        del self.clients[fd]
        client.sock.close()
        for order in client.orders.values():
            order.given_up = True
        for one in list(client.boxes):
            self.end(one)

    def tell(self, client: Client, said: dict, fds: tuple[int, ...] = ()) -> None:
        if client.sock.fileno() < 0:
            return
        try:
            socket.send_fds(client.sock, [json.dumps(said).encode()], list(fds))
        except OSError:
            # Gone, or it does not read what it asked for: its boxes go with it.
            self.drop(client)

    # ------------------------------------------------------------------------------------------- making

    def make(self) -> None:
        """Gives warm boxes to those who wait, and makes as many as are wanted."""
        self.orders = [order for order in self.orders if not order.given_up]
        warm = [one for one in self.boxes.values() if one.state == "warm"]
        while self.orders and warm:
            self.assign(warm.pop(0), self.orders.pop(0))
        making = sum(one.state == "making" for one in self.boxes.values())
        wanted = len(self.orders) + self.settings["warm"] - len(warm)
        if self.failed_at and time.monotonic() - self.failed_at < 0.1:
            return
        self.failed_at = 0.0
        while making < min(wanted, AT_ONCE):
            try:
                self.start()
            except OSError as error:
                self.failed_at = time.monotonic()
                if making == 0 and self.orders:
                    order = self.orders.pop(0)
                    self.refuse(order, f"a box could not be started: {error}")
                return
            making += 1

    def start(self) -> None:
        if not self.slots:
            raise OSError(11, "no user ids are left")
        self.made += 1
        name = f"{self.settings['name']}-{self.made}"
        slot = min(self.slots, key=lambda slot: (slot - self.first) % SLOTS)
        group = self.held.make(name)
        cgroup = -1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            if group.unified:
                cgroup = os.open(group.unified, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            pid, pidfd = k.clone(self.flags, cgroup=cgroup)
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
        self.slots.discard(slot)
        self.boxes[pid] = one
        ours.setblocking(False)
        self.syncs[ours.fileno()] = one
        self.poll.register(ours.fileno(), select.POLLIN)
        try:
            group.take(pid)
            self.map(pid, slot)
            ours.send(b"mapped")
        except OSError as error:
            self.spoiled(one, str(error))

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
            one.state = "warm"
        elif data == b"ready" and one.asker is not None and fds:
            self.hand_over(one, fds.pop())
        else:
            self.spoiled(one, data[2:].decode("utf-8", "replace") if data[:1] == b"!" else "it died")
        for fd in fds:
            os.close(fd)

    def assign(self, one: Box, order: Order) -> None:
        assert one.sync is not None
        asked = order.asked
        one.state, one.asker, one.lease = "settling", order, asked["lease"]
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
            self.spoiled(one, str(error))
        else:
            asked["channel"] = ours
        finally:
            theirs.close()

    def hand_over(self, one: Box, top: int) -> None:
        order = one.asker
        assert order is not None
        channel = order.asked.pop("channel")
        try:
            self.unsync(one)
            one.state = "held"
            order.client.orders.pop(order.number, None)
            if order.given_up or order.client.sock.fileno() < 0:
                self.end(one)
                return
            order.client.boxes.add(one)
            said = {
                "number": order.number,
                "name": one.name,
                "pid": one.pid,
                "memory": one.group.folder_of(groups.MEMORY),
                "uid": FIRST_UID + one.slot * RANGE if self.mapped else -1,
                "folders": one.group.folders,
            }
            self.tell(order.client, said, (channel.fileno(), one.pidfd, top))
        finally:
            channel.close()
            os.close(top)

    def spoiled(self, one: Box, why: str) -> None:
        """A box that could not be made; who waits for it is told."""
        order, one.asker = one.asker, None
        if order is not None:
            channel = order.asked.pop("channel", None)
            if channel is not None:
                channel.close()
            self.refuse(order, why)
        elif one.state == "making":
            self.failed_at = time.monotonic()
            if self.orders:
                self.refuse(self.orders.pop(0), why)
        self.end(one)

    def refuse(self, order: Order, why: str) -> None:
        order.client.orders.pop(order.number, None)
        if not order.given_up:
            self.tell(order.client, {"number": order.number, "error": why})

    # ------------------------------------------------------------------------------------------- ending

    def unsync(self, one: Box) -> None:
        if one.sync is not None:
            self.syncs.pop(one.sync.fileno(), None)
            self.poll.unregister(one.sync.fileno())
            one.sync.close()
            one.sync = None

    def end(self, one: Box) -> None:
        self.unsync(one)
        if one.asker is not None:
            one.asker.client.boxes.discard(one)
        if one.state != "ending":
            one.state = "ending"
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
            one = self.boxes.get(pid)
            if one is None:
                continue
            if one.sync is not None:
                self.progress(one)  # its last words
            del self.boxes[pid]
            if one.state in ("making", "warm", "settling"):
                self.spoiled(one, f"it died while it was made, {status}")
            self.end(one)
            os.close(one.pidfd)
            one.pidfd = -1
            self.leaving.append((time.monotonic(), one))
        
    def tidy(self) -> None:
        """Removes what dead boxes leave: pid 1 is gone only when all of its namespace is."""
        left: list[tuple[float, Box]] = []
        for since, one in self.leaving:
            if one.group.remove() or time.monotonic() - since > GONE_SECONDS:
                self.slots.add(one.slot)
                if one.lease:
                    with contextlib.suppress(OSError):
                        os.unlink(one.lease)
            else:
                one.group.kill()
                left.append((since, one))
        self.leaving = left

    def close(self) -> None:
        for one in list(self.boxes.values()):
            self.end(one)
        end = time.monotonic() + GONE_SECONDS
        while (self.boxes or self.leaving) and time.monotonic() < end:
            select.select([self.wake], [], [], 0.01)
            self.reap()
            self.tidy()
        if self.listener is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.settings["listen"])


def _map(pid: int | str, uids: str, gids: str, *, deny: bool = False) -> None:
    if deny:
        with open(f"/proc/{pid}/setgroups", "w") as file:
            file.write("deny")
    for name, text in (("uid_map", uids), ("gid_map", gids)):
        with open(f"/proc/{pid}/{name}", "w") as file:
            file.write(text)


def _nameless() -> None:
    """Nothing about the host in /proc/1/cmdline of a box, which is a fork of ours."""
    import ctypes

    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    first, last = int(fields[45]), int(fields[46])
    if 0 < first < last:
        ctypes.memset(first, 0, last - first)
        ctypes.memmove(first, b"sandbox", min(7, last - first))


def main() -> None:
    control = socket.socket(fileno=CONTROL)
    os.set_inheritable(CONTROL, False)
    k.close_range(CONTROL + 1)
    settings = json.loads(control.recv(MAX_MESSAGE))
    if settings["parent"] and settings["parent"] != os.getppid():
        return
    k.die_with_parent(signal.SIGTERM)
    os.environ.clear()
    _nameless()
    try:
        keeper = Keeper(control, settings)
    except Exception as error:
        control.send(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        raise
    control.send(json.dumps({"about": keeper.about()}).encode())
    try:
        keeper.loop()
    finally:
        keeper.close()


if __name__ == "__main__":
    main()
