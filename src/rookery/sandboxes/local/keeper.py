"""The keeper: holds the boxes of a run on this machine, and makes new ones by forking itself.

A stand-alone program without a thread: one loop over sockets. It is started with its control socket as
descriptor 3 and its settings as the first message; other processes of the run connect to its listening socket.

Promises:
- a box dies with the keeper, through the kernel; the keeper dies with who started it;
- a box dies with the connection that asked for it;
- requests are served in the order of arrival, a few boxes in the making at once, however many ask together;
- some boxes are kept warm, so that the next one that is asked for is there already;
- work that takes long (unpacking, copying) is done by forks: nobody else waits for it;
- a creation that fails or is given up leaves nothing: no process, no group, no lease.
"""

import _socket
import errno
import gc
import os
import resource
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING or "rookery.sandboxes" in sys.modules:
    from collections.abc import Sequence
    from typing import Any

    from rookery.sandboxes.local import first, groups, root
    from rookery.sandboxes.local import kernel as k
    from rookery.sandboxes.local.births import Box
    from rookery.sandboxes.local.boxes import Boxes
    from rookery.sandboxes.local.orders import Client, Order
    from rookery.sandboxes.local.store import Image
    from rookery.sandboxes.small import _signal, deque, dumps, loads, receive, send, suppress
else:  # stand-alone: only these imports may see the folders, whose subprocess.py would hide the real one
    for _place in sys.argv[1:3]:
        sys.path.insert(0, _place)
    import first
    import groups
    import kernel as k
    import root
    from births import Box
    from boxes import Boxes
    from orders import Client, Order
    from small import _signal, deque, dumps, loads, receive, send, suppress
    from store import Image

    del sys.path[:2]

CONTROL = 3
MAX_MESSAGE = 1 << 16
AT_ONCE = 8
"""Boxes in the making at once."""


BORN = 2
"""Boxes that wait for files other than the usual, once somebody wanted such a one."""
BORN_SECONDS = 30.0
_LATER = (errno.EAGAIN, errno.ETOOMANYREFS, errno.ENOBUFS)
BREATH_SECONDS = 0.006
"""Before the next box is made, where one is ready still: its owner is about to start something in it."""


class Keeper:
    def __init__(self, control: _socket.socket, settings: "dict[str, Any]") -> None:
        self.settings = settings
        self.poll = select.poll()
        self.boxes = Boxes(settings, self.poll, self.hand_over, self.spoiled)
        self.clients: dict[int, Client] = {}
        self.orders: deque[Order] = deque()
        """For usual boxes; those for others wait apart."""
        self.unusual: deque[Order] = deque()
        self.failed_at = 0.0
        self.unusual_at = 0.0
        self.gave_at = 0.0
        self.control = control.fileno()
        self.listener: _socket.socket | None = None
        self.connect(control)
        if settings["listen"]:
            self.listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_NONBLOCK)
            with suppress(FileNotFoundError):
                os.unlink(settings["listen"])
            self.listener.bind(settings["listen"])
            os.chmod(settings["listen"], 0o600)
            self.listener.listen(1024)
            self.poll.register(self.listener.fileno(), select.POLLIN)
        self.wake, end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.told = False
        """To end: who started us is gone."""
        _signal.signal(_signal.SIGTERM, self.tell_end)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        _signal.set_wakeup_fd(end, warn_on_full_buffer=False)
        self.poll.register(self.wake, select.POLLIN)

    def tell_end(self, *_: object) -> None:
        self.told = True

    def connect(self, sock: _socket.socket) -> None:
        sock.setblocking(False)
        self.clients[sock.fileno()] = Client(sock)
        self.poll.register(sock.fileno(), select.POLLIN)

    # ------------------------------------------------------------------------------------------ the loop

    def loop(self) -> None:
        self.make()
        while not self.told:
            for fd, _ in self.poll.poll(self.wait_ms()):
                if fd == self.wake:
                    with suppress(BlockingIOError):
                        os.read(self.wake, 4096)
                    self.boxes.reap()
                elif self.listener is not None and fd == self.listener.fileno():
                    with suppress(OSError):
                        got: int = self.listener._accept()[0]  # type: ignore[attr-defined]
                        self.connect(_socket.socket(fileno=got))
                elif fd in self.clients:
                    self.hear(self.clients[fd])
                elif fd in self.boxes.syncs:
                    self.boxes.progress(self.boxes.syncs[fd])
                if self.control not in self.clients:
                    return
            self.boxes.tidy()
            self.catch_up()
            self.make()

    def wait_ms(self) -> float | None:
        if self.boxes.dying or (self.boxes.warm and self.just_gave()):
            return 2.0
        if any(client.late for client in self.clients.values()):
            return 2.0
        if self.boxes.leaving:
            return 20.0
        if (self.orders or self.unusual) and self.failed_at:
            return 100.0
        if self.boxes.born:
            return BORN_SECONDS * 1000
        return None

    def hear(self, client: Client) -> None:
        while client.sock.fileno() >= 0:
            try:
                data, fds = receive(client.sock, MAX_MESSAGE, 4)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            try:
                if not data:
                    self.drop(client)
                    return
                self.obey(client, loads(data), fds)
            finally:
                for fd in fds:
                    os.close(fd)

    def obey(self, client: Client, asked: "dict[str, Any]", fds: list[int]) -> None:
        op = asked["op"]
        if op in ("create", "snapshot", "diff"):
            order = Order(client, asked["number"], asked)
            client.orders[order.number] = order
            if op == "create":
                if fds:
                    asked["lease"] = fds.pop()
                # Where there is but one user, it is the first of these or the other from the start.
                as_root = asked["uid"] != root.USER and not self.boxes.mapped
                plain = not (asked["image"] or asked["snapshot"] or asked["mounts"])
                order.usual = plain and asked["network"] != "all" and not as_root
                (self.orders if order.usual else self.unusual).append(order)
            else:
                self.work(order, fds[0])
        elif op == "give-up":
            if asked["number"] in client.orders:
                self.give_up(client.orders.pop(asked["number"]))
        elif op == "end":
            for one in [one for one in client.boxes if one.name == asked["name"]]:
                client.boxes.discard(one)
                self.boxes.release(one)
        elif op == "about":
            self.tell(client, {"about": self.about()})

    def work(self, order: Order, layer: int) -> None:
        """A snapshot or a diff of one of the client's boxes."""
        asked, boxes = order.asked, self.boxes
        try:
            one = next((one for one in order.client.boxes if one.name == asked["name"]), None)
            if one is None:
                raise OSError(3, "the box is gone")
            if asked["op"] == "snapshot":
                order.work = boxes.snapshot(
                    one, layer, lambda name, why: self.worked(order, {"snapshot": name}, why)
                )
            else:
                order.work = boxes.diff(
                    one, asked["snapshot"], layer, lambda result, why: self.worked(order, {}, why, (result,))
                )
        except OSError as error:
            self.refuse(order, error.strerror or str(error))

    def worked(self, order: Order, said: "dict[str, Any]", why: str, fds: tuple[int, ...] = ()) -> None:
        order.work = None
        if why:
            self.refuse(order, why)
            return
        order.client.orders.pop(order.number, None)
        if not order.given_up:
            self.tell(order.client, {"number": order.number, **said}, fds)

    def about(self) -> "dict[str, Any]":
        return {
            "pid": self.boxes.pid,
            "boxes": len(self.boxes.by_pid),
            "missing": self.boxes.held.missing,
            "overlay": self.boxes.tree.overlay,
            "unified": self.boxes.held.unified,
            "kills": self.boxes.held.kills,
            "v1": self.boxes.held.v1,
            "v2": sorted(self.boxes.held.v2),
        }

    def give_up(self, order: Order) -> None:
        order.given_up = True
        self.drop_lease(order)
        if order.work is not None:
            order.work.give_up()
        with suppress(ValueError):  # its box is being settled: it ends when it is ready
            (self.orders if order.usual else self.unusual).remove(order)

    def drop_lease(self, order: Order) -> None:
        """Close the lease of a request that gets no box; whoever asked removes the file."""
        lease = order.asked.pop("lease", -1)
        if lease >= 0:
            os.close(lease)

    def drop(self, client: Client) -> None:
        fd = client.sock.fileno()
        self.poll.unregister(fd)
        del self.clients[fd]
        client.sock.close()
        for _, fds in client.late:
            _close(fds)
        client.late.clear()
        for order in client.orders.values():
            self.give_up(order)
        for one in client.boxes:
            self.boxes.release(one)
        client.boxes.clear()

    def tell(self, client: Client, said: "dict[str, Any]", fds: tuple[int, ...] = ()) -> None:
        data = dumps(said)
        if client.sock.fileno() >= 0 and (client.late or not self.sent(client, data, fds)):
            client.late.append((data, [os.dup(fd) for fd in fds]))

    def sent(self, client: Client, data: bytes, fds: "Sequence[int]") -> bool:
        """False where it has to read first: a line has room for some messages, the kernel for some descriptors."""
        try:
            send(client.sock, data, fds)
        except OSError as error:
            if error.errno in _LATER:
                return False
            self.drop(client)  # it is gone, and its boxes go with it
        return True

    def catch_up(self) -> None:
        for client in [one for one in self.clients.values() if one.late]:
            while client.late and self.sent(client, *client.late[0]):
                if client.late:  # else it was dropped
                    _close(client.late.popleft()[1])

    # ------------------------------------------------------------------------------------------- making

    def make(self) -> None:
        """Gives boxes to those who wait, and makes as many as are wanted."""
        boxes = self.boxes
        while self.unusual and boxes.settling < AT_ONCE:
            self.make_unusual(self.unusual.popleft())
        while self.orders and boxes.warm:
            order = self.orders[0]
            one = boxes.fitting(order.asked)
            if one is None:
                break
            one.order = self.orders.popleft()
            order.channel = boxes.settle(one, order.asked)
            if one.shape is not None:
                boxes.ready(one)
        while not self.orders and len(boxes.warm) > self.settings["warm"]:
            boxes.end(boxes.warm[-1])  # begun for somebody who gave up
        if self.failed_at and time.monotonic() - self.failed_at < 0.1:
            return
        self.failed_at = 0.0
        if not self.orders and (boxes.settling or (boxes.warm and self.just_gave())):
            return  # who waits for one, or has just got one, comes first: making the next takes some milliseconds
        wanted = min(len(self.orders) + self.settings["warm"] - len(boxes.warm), AT_ONCE)
        try:
            while boxes.making < wanted:
                boxes.start()
            self.bear()
        except OSError as error:
            self.failed_at = time.monotonic()
            if boxes.making == 0 and self.orders:
                self.refuse(self.orders.popleft(), f"a box could not be started: {error}")

    def just_gave(self) -> bool:
        return time.monotonic() - self.gave_at < BREATH_SECONDS

    def bear(self) -> None:
        """Keeps boxes ready to get files other than the usual ones, for as long as somebody asks for such."""
        boxes = self.boxes
        recent = self.unusual_at and time.monotonic() - self.unusual_at < BORN_SECONDS
        goal = min(BORN, self.settings["warm"]) if recent else 0
        while len(boxes.born) < goal:
            boxes.born.append(boxes.birth())
        while len(boxes.born) > goal:
            boxes.end(boxes.born[-1])

    def make_unusual(self, order: Order) -> None:
        """A box with an image or mounts, from a snapshot, on the host's network or with another first user."""
        asked, boxes = order.asked, self.boxes
        self.unusual_at = time.monotonic()
        family = None
        try:
            image: Image | None = None
            lowers: tuple[str, ...] = ()
            if asked["snapshot"]:
                found = boxes.store.snapshots.get(asked["snapshot"])
                if found is None:
                    raise OSError(2, f"there is no snapshot {asked['snapshot']} any more")
                family, image, lowers = found.family, found.image, found.lowers
            elif asked["layers"]:
                image = Image(asked["image"], tuple(asked["layers"]))
            elif asked["image"]:
                folder = boxes.store.base(asked["image"], lambda why: self.unpacked(order, why))
                if not folder:
                    return
                image = Image(folder)
            alone = asked["network"] != "all"
            one = boxes.born.popleft() if alone and boxes.born else boxes.birth(alone=alone)
            one.order = order
            try:
                dress = root.Dress(asked["disk"], asked["uid"], lowers, resolve=not alone)
                dress.mounts = tuple((source, target) for source, target in asked["mounts"])
                boxes.turn(one, "settling")
                boxes.dress(one, dress, image, family, alone=alone)
            except OSError as error:
                self.spoiled(one, str(error))
                return
            order.channel = boxes.settle(one, asked)
        except OSError as error:
            self.refuse(order, error.strerror or str(error))

    def unpacked(self, order: Order, why: str) -> None:
        if why:
            self.refuse(order, why, cause="task.image")
        elif not order.given_up:
            self.unusual.appendleft(order)

    def hand_over(self, one: Box, fds: "dict[str, int]") -> None:
        """A box is there; with descriptors of its root, of the layer that it writes to, of its listener."""
        order: Order = one.order
        one.order = None
        client, channel = order.client, order.channel
        assert channel is not None
        try:
            client.orders.pop(order.number, None)
            if order.given_up or client.sock.fileno() < 0:
                self.boxes.end(one)
                return
            client.boxes.add(one)
            one.claimed = True
            self.gave_at = time.monotonic()
            said = {
                "number": order.number,
                "name": one.name,
                "pid": one.pid,
                "memory": one.group.folder_of(groups.MEMORY),
                "uid": self.boxes.uid_of(one),
                "folders": one.group.folders,
            }
            fds = {"channel": channel.fileno(), "pidfd": one.pidfd, **fds}
            self.tell(client, {**said, "fds": list(fds)}, tuple(fds.values()))
        finally:
            channel.close()

    def spoiled(self, one: Box, why: str) -> None:
        """A box could not be made; who waits for it is told."""
        order, one.order = one.order, None
        if order is not None:
            if order.channel is not None:
                order.channel.close()
            self.refuse(order, why)
        elif one.state == "making":
            self.failed_at = time.monotonic()
            if self.orders:
                self.refuse(self.orders.popleft(), why)
        self.boxes.end(one)

    def refuse(self, order: Order, why: str, cause: str = "sandbox.create") -> None:
        order.client.orders.pop(order.number, None)
        self.drop_lease(order)
        if not order.given_up:
            self.tell(order.client, {"number": order.number, "error": why, "cause": cause})

    def close(self) -> None:
        self.boxes.close(self.wake)
        if self.listener is not None:
            with suppress(OSError):
                os.unlink(self.settings["listen"])


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


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
    control = _socket.socket(fileno=CONTROL)
    os.set_inheritable(CONTROL, False)
    k.close_range(CONTROL + 1)
    settings = loads(control.recv(MAX_MESSAGE))
    if settings["parent"] != os.getppid():
        return
    k.die_with_parent(_signal.SIGTERM)
    os.environ.clear()
    # Each box is a few of them, and there may be thousands.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    _nameless()
    try:
        keeper = Keeper(control, settings)
    except Exception as error:
        control.send(dumps({"error": f"{type(error).__name__}: {error}"}))
        raise
    # What is here now stays: no collector of a box needs to touch, and thereby copy, all of it.
    gc.collect()
    gc.freeze()
    control.send(dumps({"about": keeper.about()}))
    first.bare()
    try:
        keeper.loop()
    finally:
        keeper.close()


if __name__ == "__main__":
    main()
