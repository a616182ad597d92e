"""The keeper: a daemon that creates and supervises `local` sandboxes. Each sandbox is a fork of it.

The keeper is single-threaded, with one event loop. It is started with its control socket as file descriptor 3 and
gets its settings as the first message. Other processes of the run can connect to its listening socket.

Guarantees:
- if the keeper dies, the kernel kills its sandboxes; if the process that started it dies, the keeper exits;
- a sandbox is killed when the connection over which it was requested closes;
- a few sandboxes are created in advance (warm), so that the next request is served at once;
- a creation that fails or is cancelled leaves no process, cgroup or lease.

Requests are served in the order of arrival, with at most `MAX_IN_SETUP` sandboxes in their setup at a time.
Requests with an image, mounts or other files of their own have a separate queue. Slow work (unpacking, copying) is
done in forked processes, so that other requests do not wait for it.
"""

import _socket
import errno
import gc
import os
import resource
import select
import time

from rookery.sandbox_runtime import cgroups, root_filesystem, syscalls
from rookery.sandbox_runtime.lightweight import (
    _signal,
    deque,
    dumps,
    loads,
    receive_message,
    send_message,
    suppress,
)
from rookery.sandbox_runtime.pid1 import init
from rookery.sandboxes.local.keeper.background_jobs import BackgroundJob
from rookery.sandboxes.local.keeper.factory import SandboxForker, SandboxProcess
from rookery.sandboxes.local.keeper.layer_store import SandboxImage
from rookery.sandboxes.local.keeper.registry import SandboxRegistry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

CONTROL_FD = 3
MAX_MESSAGE = 1 << 16
MAX_IN_SETUP = 8
FORKED_SPARES = 2
"""Number of forked sandboxes without a file system that are kept ready while requests with their own files (an
image, mounts or a snapshot) arrive."""
FORKED_SPARE_SECONDS = 30.0
_RETRYABLE = (errno.EAGAIN, errno.ETOOMANYREFS, errno.ENOBUFS)
PAUSE_SECONDS = 0.006
"""Pause after handing out a sandbox, before the next one is forked: the owner is about to start a command, and a
fork would delay it."""


class KeeperRequest:
    """A client's request for a new sandbox, or for a snapshot or a diff of one of its sandboxes."""

    __slots__ = ("cancelled", "channel", "client", "job", "message", "number", "plain")

    def __init__(self, client: "OwnerConnection", number: int, message: "dict[str, Any]") -> None:
        self.client = client
        self.number = number
        self.message = message
        self.channel: _socket.socket | None = None
        """The owner's end of the connection to the sandbox's PID 1."""
        self.cancelled = False
        self.job: BackgroundJob | None = None
        self.plain = True
        """True if any warm sandbox can serve the request, because it has no image, mounts or other files."""


class OwnerConnection:
    """A connection of a client to the keeper. When it closes, the sandboxes that were requested over it end."""

    __slots__ = ("requests", "sandboxes", "sock", "unsent")

    def __init__(self, sock: _socket.socket) -> None:
        self.sock = sock
        self.sandboxes: set[SandboxProcess] = set()
        self.requests: dict[int, KeeperRequest] = {}
        self.unsent: deque[tuple[bytes, list[int]]] = deque()
        """Responses, with their file descriptors, that wait until the socket can take them. One per request."""


class Keeper:
    """Serves requests for sandboxes from several clients."""

    def __init__(self, control: _socket.socket, settings: "dict[str, Any]") -> None:
        self.settings = settings
        self.poller = select.poll()
        self.factory = SandboxForker(settings)
        self.registry = SandboxRegistry(self.factory, self.poller, self.on_ready, self.on_failed)
        self.clients: dict[int, OwnerConnection] = {}
        self.plain_requests: deque[KeeperRequest] = deque()
        self.custom_requests: deque[KeeperRequest] = deque()
        self.failed_at = 0.0
        self.last_custom = 0.0
        self.last_assigned = 0.0
        self.control_fd = control.fileno()
        self.listener: _socket.socket | None = None
        self.add_client(control)
        if settings["listen"]:
            self.listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_NONBLOCK)
            with suppress(FileNotFoundError):
                os.unlink(settings["listen"])
            self.listener.bind(settings["listen"])
            os.chmod(settings["listen"], 0o600)
            self.listener.listen(1024)
            self.poller.register(self.listener.fileno(), select.POLLIN)
        self.wakeup_reader, wakeup_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.stopping = False
        _signal.signal(_signal.SIGTERM, self.stop)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        _signal.set_wakeup_fd(wakeup_writer, warn_on_full_buffer=False)
        self.poller.register(self.wakeup_reader, select.POLLIN)

    def stop(self, *_: object) -> None:
        """Stop the event loop. Handler of SIGTERM, which the kernel also sends when the keeper's parent dies."""
        self.stopping = True

    def add_client(self, sock: _socket.socket) -> None:
        sock.setblocking(False)
        self.clients[sock.fileno()] = OwnerConnection(sock)
        self.poller.register(sock.fileno(), select.POLLIN)

    # ---- event loop

    def run(self) -> None:
        self.serve_requests()
        while not self.stopping:
            for fd, _ in self.poller.poll(self.poll_timeout()):
                if fd == self.wakeup_reader:
                    with suppress(BlockingIOError):
                        os.read(self.wakeup_reader, 4096)
                    self.registry.reap()
                elif self.listener is not None and fd == self.listener.fileno():
                    with suppress(OSError):
                        accepted: int = self.listener._accept()[0]  # type: ignore[attr-defined]
                        self.add_client(_socket.socket(fileno=accepted))
                elif fd in self.clients:
                    self.receive_requests(self.clients[fd])
                elif fd in self.registry.by_sync_fd:
                    self.registry.on_setup_message(self.registry.by_sync_fd[fd])
                if self.control_fd not in self.clients:
                    return
            self.registry.remove_dead()
            self.send_unsent()
            self.serve_requests()

    def poll_timeout(self) -> float | None:
        """Return how many milliseconds to wait for events; None means without a limit."""
        registry = self.registry
        if registry.warm and self.recently_assigned():
            return 2.0
        if any(client.unsent for client in self.clients.values()):
            return 2.0
        if (next_kill := registry.next_kill()) is not None:
            return max(1.0, min(20.0, (next_kill - time.monotonic()) * 1000 + 0.5))
        if registry.removing:
            return 2.0
        if (self.plain_requests or self.custom_requests) and self.failed_at:
            return 100.0
        if registry.forked:
            return FORKED_SPARE_SECONDS * 1000
        return None

    def receive_requests(self, client: OwnerConnection) -> None:
        while client.sock.fileno() >= 0:
            try:
                data, fds = receive_message(client.sock, MAX_MESSAGE, 4)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            try:
                if not data:
                    self.drop_client(client)
                    return
                self.handle_request(client, loads(data), fds)
            finally:
                for fd in fds:
                    os.close(fd)

    def handle_request(self, client: OwnerConnection, message: "dict[str, Any]", fds: list[int]) -> None:
        op = message["op"]
        if op in ("create", "snapshot", "diff"):
            request = KeeperRequest(client, message["number"], message)
            client.requests[request.number] = request
            if op == "create":
                if fds:
                    message["lease"] = fds.pop()
                # Without mapped IDs a sandbox has one user, which must be chosen before its file system is
                # mounted.
                other_user = message["uid"] != root_filesystem.USER and not self.factory.mapped
                own_files = message["image"] or message["snapshot"] or message["mounts"]
                request.plain = not own_files and message["network"] != "all" and not other_user
                (self.plain_requests if request.plain else self.custom_requests).append(request)
            else:
                self.start_job(request, fds[0])
        elif op == "cancel":
            if message["number"] in client.requests:
                self.cancel(client.requests.pop(message["number"]))
        elif op == "end":
            for sandbox in [one for one in client.sandboxes if one.name == message["name"]]:
                client.sandboxes.discard(sandbox)
                self.registry.release(sandbox)
        elif op == "status":
            self.send(client, {"status": self.status()})

    def start_job(self, request: KeeperRequest, layer: int) -> None:
        """Start a snapshot or a diff of one of the client's sandboxes."""
        message = request.message
        try:
            sandbox = next((one for one in request.client.sandboxes if one.name == message["name"]), None)
            if sandbox is None:
                raise OSError(3, "the sandbox is gone")
            if message["op"] == "snapshot":
                request.job = self.registry.take_snapshot(
                    sandbox, layer, lambda name, error: self.on_job_done(request, {"snapshot": name}, error)
                )
            else:
                request.job = self.registry.diff(
                    sandbox,
                    message["snapshot"],
                    layer,
                    lambda result, error: self.on_job_done(request, {}, error, (result,)),
                )
        except OSError as error:
            self.refuse(request, error.strerror or str(error))

    def on_job_done(
        self, request: KeeperRequest, response: "dict[str, Any]", error: str, fds: tuple[int, ...] = ()
    ) -> None:
        request.job = None
        if error:
            self.refuse(request, error)
            return
        request.client.requests.pop(request.number, None)
        if not request.cancelled:
            self.send(request.client, {"number": request.number, **response}, fds)

    def status(self) -> "dict[str, Any]":
        manager = self.factory.cgroups
        return {
            "pid": self.factory.pid,
            "sandboxes": len(self.registry.by_pid),
            "missing_controllers": manager.missing_controllers,
            "overlay": self.factory.tree.overlay,
            "unified": manager.unified,
            "can_kill": manager.can_kill,
            "native": self.factory.native is not None,
            "native_problem": self.factory.native_problem,
            "v1": manager.v1,
            "v2": sorted(manager.v2),
        }

    def cancel(self, request: KeeperRequest) -> None:
        request.cancelled = True
        self.close_lease(request)
        if request.job is not None:
            request.job.cancel()
        with suppress(ValueError):  # not queued: its sandbox is being configured and ends when it is ready
            (self.plain_requests if request.plain else self.custom_requests).remove(request)

    def close_lease(self, request: KeeperRequest) -> None:
        """Close the lease file of a request that gets no sandbox. The client deletes the file."""
        lease = request.message.pop("lease", -1)
        if lease >= 0:
            os.close(lease)

    def drop_client(self, client: OwnerConnection) -> None:
        fd = client.sock.fileno()
        self.poller.unregister(fd)
        del self.clients[fd]
        client.sock.close()
        for _, fds in client.unsent:
            _close_all(fds)
        client.unsent.clear()
        for request in client.requests.values():
            self.cancel(request)
        for sandbox in client.sandboxes:
            self.registry.release(sandbox)
        client.sandboxes.clear()

    def send(self, client: OwnerConnection, message: "dict[str, Any]", fds: tuple[int, ...] = ()) -> None:
        data = dumps(message)
        if client.sock.fileno() >= 0 and (client.unsent or not self.try_send(client, data, fds)):
            client.unsent.append((data, [os.dup(fd) for fd in fds]))

    def try_send(self, client: OwnerConnection, data: bytes, fds: "Sequence[int]") -> bool:
        """Send a message to a client without waiting.

        Return False if the client must read earlier messages first: the kernel limits the bytes and descriptors
        that are in flight.
        """
        try:
            send_message(client.sock, data, fds)
        except OSError as error:
            if error.errno in _RETRYABLE:
                return False
            self.drop_client(client)
        return True

    def send_unsent(self) -> None:
        for client in [one for one in self.clients.values() if one.unsent]:
            while client.unsent and self.try_send(client, *client.unsent[0]):
                if client.unsent:  # empty if the client was dropped
                    _close_all(client.unsent.popleft()[1])

    # ---- creation

    def serve_requests(self) -> None:
        """Hand out warm sandboxes to waiting requests, and start new ones for the other requests and as spares."""
        registry = self.registry
        while self.custom_requests and registry.configuring < MAX_IN_SETUP:
            self.create_custom(self.custom_requests.popleft())
        while self.plain_requests and registry.warm:
            request = self.plain_requests[0]
            sandbox = registry.find_warm(request.message)
            if sandbox is None:
                break
            sandbox.request = self.plain_requests.popleft()
            request.channel = registry.configure(sandbox, request.message)
            if sandbox.shape is not None:
                registry.assign_configured(sandbox)
        while not self.plain_requests and len(registry.warm) > self.settings["warm"]:
            registry.end(registry.warm[-1])  # was started for a request that is cancelled
        if self.failed_at and time.monotonic() - self.failed_at < 0.1:
            return
        self.failed_at = 0.0
        if not self.plain_requests and (registry.configuring or (registry.warm and self.recently_assigned())):
            return  # starting another sandbox takes milliseconds and would delay a client
        wanted = min(len(self.plain_requests) + self.settings["warm"] - len(registry.warm), MAX_IN_SETUP)
        try:
            while registry.mounting < wanted:
                registry.start_warm()
            self.keep_forked_spares()
        except OSError as error:
            self.failed_at = time.monotonic()
            if registry.mounting == 0 and self.plain_requests:
                self.refuse(self.plain_requests.popleft(), f"the sandbox's PID 1 could not be started: {error}")

    def recently_assigned(self) -> bool:
        return time.monotonic() - self.last_assigned < PAUSE_SECONDS

    def keep_forked_spares(self) -> None:
        """Keep forked sandboxes without a file system ready while requests with their own files arrive.

        End them when there was no such request for `FORKED_SPARE_SECONDS`.
        """
        registry = self.registry
        recent = self.last_custom and time.monotonic() - self.last_custom < FORKED_SPARE_SECONDS
        wanted = min(FORKED_SPARES, self.settings["warm"]) if recent else 0
        while len(registry.forked) < wanted:
            registry.forked.append(registry.fork())
        while len(registry.forked) > wanted:
            registry.end(registry.forked[-1])

    def create_custom(self, request: KeeperRequest) -> None:
        """Create a sandbox with an image, mounts, a snapshot, the host's network or another user."""
        message, registry = request.message, self.registry
        self.last_custom = time.monotonic()
        lineage = None
        try:
            image: SandboxImage | None = None
            snapshots: tuple[str, ...] = ()
            if message["snapshot"]:
                snapshot = self.factory.store.snapshots.get(message["snapshot"])
                if snapshot is None:
                    raise OSError(2, f"snapshot {message['snapshot']} no longer exists")
                lineage, image, snapshots = snapshot.lineage, snapshot.image, snapshot.paths
            elif message["layers"]:
                image = SandboxImage(message["image"], tuple(message["layers"]))
            elif message["image"]:
                directory = self.factory.store.find_image(
                    message["image"], lambda error: self.on_unpacked(request, error)
                )
                if not directory:
                    return
                image = SandboxImage(directory)
            isolated = message["network"] != "all"
            use_spare = isolated and registry.forked
            sandbox = registry.forked.popleft() if use_spare else registry.fork(isolated_network=isolated)
            sandbox.request = request
            try:
                plan = root_filesystem.MountPlan(
                    message["disk"], message["uid"], snapshots, host_resolver=not isolated
                )
                plan.mounts = tuple((source, target) for source, target in message["mounts"])
                registry.set_state(sandbox, "configuring")
                self.factory.send_mount_plan(sandbox, plan, image, lineage, isolated_network=isolated)
            except OSError as error:
                self.on_failed(sandbox, str(error))
                return
            request.channel = registry.configure(sandbox, message)
        except OSError as error:
            self.refuse(request, error.strerror or str(error))

    def on_unpacked(self, request: KeeperRequest, error: str) -> None:
        if error:
            self.refuse(request, error, cause="task.image")
        elif not request.cancelled:
            self.custom_requests.appendleft(request)

    def on_ready(self, sandbox: SandboxProcess, fds: "dict[str, int]") -> None:
        """Send a ready sandbox to the client that requested it, with descriptors of its root directory, writable
        layer and listener."""
        request: KeeperRequest = sandbox.request
        sandbox.request = None
        client, channel = request.client, request.channel
        assert channel is not None
        try:
            client.requests.pop(request.number, None)
            if request.cancelled or client.sock.fileno() < 0:
                self.registry.end(sandbox)
                return
            client.sandboxes.add(sandbox)
            sandbox.claimed = True
            self.last_assigned = time.monotonic()
            response = {
                "number": request.number,
                "name": sandbox.name,
                "pid": sandbox.pid,
                "memory_cgroup": sandbox.cgroup.find_directory(cgroups.MEMORY),
                "root_uid": self.factory.find_root_uid(sandbox),
                "cgroups": sandbox.cgroup.directories,
            }
            fds = {"channel": channel.fileno(), "pidfd": sandbox.pidfd, **fds}
            self.send(client, {**response, "fds": list(fds)}, tuple(fds.values()))
        finally:
            channel.close()

    def on_failed(self, sandbox: SandboxProcess, error: str) -> None:
        """End a sandbox whose setup failed, and answer the request that waits for it with the error."""
        request, sandbox.request = sandbox.request, None
        if request is not None:
            if request.channel is not None:
                request.channel.close()
            self.refuse(request, error)
        elif sandbox.state == "mounting":
            self.failed_at = time.monotonic()
            if self.plain_requests:
                self.refuse(self.plain_requests.popleft(), error)
        self.registry.end(sandbox)

    def refuse(self, request: KeeperRequest, error: str, cause: str = "sandbox.create") -> None:
        request.client.requests.pop(request.number, None)
        self.close_lease(request)
        if not request.cancelled:
            self.send(request.client, {"number": request.number, "error": error, "cause": cause})

    def close(self) -> None:
        self.registry.close(self.wakeup_reader)
        self.factory.stop_zygote()
        if self.listener is not None:
            with suppress(OSError):
                os.unlink(self.settings["listen"])


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _hide_command_line() -> None:
    """Overwrite the command line of this process.

    Sandboxes are forks of the keeper, so their /proc/1/cmdline would otherwise show paths of the host.
    """
    import ctypes

    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    if 0 < start < end:
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, b"sandbox", min(7, end - start))


def main() -> None:
    init.load_programs(preload=True)
    control = _socket.socket(fileno=CONTROL_FD)
    os.set_inheritable(CONTROL_FD, False)
    syscalls.close_range(CONTROL_FD + 1)
    settings = loads(control.recv(MAX_MESSAGE))
    if settings["parent"] != os.getppid():
        return
    syscalls.die_with_parent(_signal.SIGTERM)
    os.environ.clear()
    # Each sandbox needs a few descriptors, and there may be thousands of sandboxes.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    _hide_command_line()
    try:
        keeper = Keeper(control, settings)
    except Exception as error:
        control.send(dumps({"error": f"{type(error).__name__}: {error}"}))
        raise
    # Freeze the present objects: the garbage collector of a sandbox would otherwise copy their memory pages.
    gc.collect()
    gc.freeze()
    init.prepare_to_fork()
    keeper.factory.start_zygote()
    control.send(dumps({"status": keeper.status()}))
    try:
        keeper.run()
    finally:
        keeper.close()
