"""All sandboxes of a keeper: their states, snapshots and removal. Runs in the keeper.

- A sandbox that could not be created, or died during its setup, is reported exactly once, with its last message.
- What a dead sandbox leaves (cgroup, lease, network) is removed when its PID namespace is empty, not earlier.
"""

from __future__ import annotations

import os
import select
import time

from rookery.sandbox_runtime import root_filesystem, syscalls
from rookery.sandbox_runtime.lightweight import _signal, deque, receive_message, suppress
from rookery.sandboxes.local.keeper import layer_store
from rookery.sandboxes.local.keeper.background_jobs import BackgroundJob
from rookery.sandboxes.local.keeper.factory import SandboxForker, SandboxProcess

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    from collections.abc import Callable
    from typing import Any

DEFAULT_DISK = 1 << 30
"""Disk size in bytes of warm sandboxes: that of a spec without a disk limit. To change it later takes one more
system call."""
REMOVE_SECONDS = 10.0
KILL_CGROUP_SECONDS = 0.004
KILL_SMALL_CGROUP_SECONDS = 1.0
SMALL_CGROUP = 16
"""A cgroup with at most this many processes is killed later than others: on a busy machine even one process takes
some milliseconds to end, and a killed cgroup cannot be reused."""
_SHAPE_FIELDS = ("memory", "pids", "cpus", "disk", "uid", "listen")


class SandboxRegistry:
    """Tracks all sandboxes of the keeper, and follows their setup through the keeper's `select.poll` object."""

    def __init__(
        self,
        factory: SandboxForker,
        poller: select.poll,
        on_ready: Callable[[SandboxProcess, dict[str, int]], None],
        on_failed: Callable[[SandboxProcess, str], None],
    ) -> None:
        self.factory = factory
        self.poller = poller
        self.on_ready = on_ready
        self.on_failed = on_failed
        self.by_pid: dict[int, SandboxProcess] = {}
        self.by_sync_fd: dict[int, SandboxProcess] = {}
        """Sandboxes in their setup, by the descriptor of their connection to the keeper."""
        self.forked: deque[SandboxProcess] = deque()
        """Forked sandboxes without a file system, for requests with an image, mounts or a snapshot."""
        self.warm: deque[SandboxProcess] = deque()
        self.last_shape: dict[str, Any] | None = None
        """Limits of the last request for a sandbox without files of its own."""
        self.shape: dict[str, Any] | None = None
        """Limits for which warm sandboxes are configured in advance, because two requests in a row had them."""
        self.mounting = 0
        self.configuring = 0
        self.killed: deque[tuple[float, SandboxProcess]] = deque()
        """Sandboxes whose PID 1 was killed, with the time at which to look at their cgroups if they live on."""
        self.ending_slowly: deque[tuple[float, SandboxProcess]] = deque()
        """Sandboxes with few processes whose PID 1 was killed, with the time at which to kill their cgroups."""
        self.removing: list[tuple[float, SandboxProcess]] = []
        """Dead sandboxes whose cgroup is not removed yet, with the time since when it could be removed."""
        self.dead_but_claimed: set[SandboxProcess] = set()

    # ---- creation

    def fork(self, *, isolated_network: bool = True) -> SandboxProcess:
        sandbox = self.factory.fork(isolated_network=isolated_network)
        assert sandbox.sync is not None
        self.by_pid[sandbox.pid] = sandbox
        self.by_sync_fd[sandbox.sync.fileno()] = sandbox
        self.poller.register(sandbox.sync.fileno(), select.POLLIN)
        return sandbox

    def start_warm(self) -> None:
        """Start a sandbox without image and mounts before it is requested."""
        sandbox = self.fork()
        self.set_state(sandbox, "mounting")
        shape = self.shape
        try:
            disk, uid = (shape["disk"], shape["uid"]) if shape else (DEFAULT_DISK, root_filesystem.USER)
            self.factory.send_mount_plan(sandbox, root_filesystem.MountPlan(disk, uid))
            if shape is not None:
                sandbox.shape = shape
                sandbox.channel = self.factory.send_configuration(sandbox, shape)
        except OSError as error:
            self.on_failed(sandbox, str(error))

    def on_setup_message(self, sandbox: SandboxProcess) -> None:
        """Handle a message that the PID 1 of a sandbox sent during its setup."""
        assert sandbox.sync is not None
        try:
            data, fds = receive_message(sandbox.sync, 4096, 4)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if data == b"mounted":
            if sandbox.state == "mounting" and sandbox.shape is None:  # otherwise `ready` follows
                self.set_state(sandbox, "warm")
        elif data.startswith(b"ready ") and sandbox.state == "mounting":
            self.close_sync(sandbox)
            sandbox.fds = dict(zip(data.decode().split()[1:], fds, strict=True))
            fds = []
            self.set_state(sandbox, "warm")
        elif data.startswith(b"ready ") and sandbox.state == "configuring":
            self.close_sync(sandbox)
            self.set_state(sandbox, "in_use")
            self.on_ready(sandbox, dict(zip(data.decode().split()[1:], fds, strict=True)))
        else:
            self.on_failed(sandbox, data[2:].decode("utf-8", "replace") if data[:1] == b"!" else "its PID 1 died")
        for fd in fds:
            os.close(fd)

    def configure(self, sandbox: SandboxProcess, request: dict[str, Any]) -> _socket.socket | None:
        """Send a sandbox the limits of a request. Return the owner's end of its connection, or None on failure."""
        self.set_state(sandbox, "configuring")
        sandbox.lease = request.pop("lease", -1)
        if sandbox.shape is not None:
            channel, sandbox.channel = sandbox.channel, None
            return channel
        try:
            return self.factory.send_configuration(sandbox, request)
        except OSError as error:
            self.on_failed(sandbox, str(error))
            return None

    def find_warm(self, request: dict[str, Any]) -> SandboxProcess | None:
        """Return a warm sandbox for a request; None if there is none.

        Warm sandboxes that are configured for other limits than the request's are ended.
        """
        shape = {name: request[name] for name in _SHAPE_FIELDS}
        self.shape = shape if shape == self.last_shape else None
        self.last_shape = shape
        for sandbox in list(self.warm):
            if sandbox.shape is None or sandbox.shape == shape:
                return sandbox
            self.end(sandbox)
        return None

    def assign_configured(self, sandbox: SandboxProcess) -> None:
        """Give a request the warm sandbox that was configured in advance for the limits of its request."""
        self.set_state(sandbox, "in_use")
        self.on_ready(sandbox, sandbox.fds)
        sandbox.close_descriptors()

    # ---- snapshots

    def take_snapshot(
        self, sandbox: SandboxProcess, layer: int, on_done: Callable[[str, str], None]
    ) -> BackgroundJob:
        """Start to copy what the sandbox has written. `on_done` gets the snapshot's name and an error message.

        One of the two is empty.
        """

        def finish(name: str, error: str) -> None:
            self.unfreeze(sandbox)
            on_done(name, error)

        job = self.factory.store.take_snapshot(
            sandbox.lineage, sandbox.below, sandbox.image, layer, sandbox.cgroup.unified, finish
        )
        sandbox.frozen_by += 1
        return job

    def diff(
        self, sandbox: SandboxProcess, name: str, layer: int, on_done: Callable[[int, str], None]
    ) -> BackgroundJob:
        """Start to list what the sandbox changed since the snapshot `name`.

        The snapshot must be one of this sandbox, or the one that it was forked from. `on_done` gets a descriptor
        of the list and an error message.
        """
        snapshot = self.factory.store.snapshots.get(name)
        if snapshot is None or snapshot.lineage is not sandbox.lineage:
            raise OSError(2, f"this sandbox has no snapshot {name}")
        # A comparison with an older snapshot would have to search every layer above it.
        same_sandbox = sandbox.below == snapshot.below
        if not same_sandbox and sandbox.below != snapshot.paths:
            raise OSError(22, f"{name} is neither a snapshot of this sandbox nor the one that it was forked from")

        def finish(result: int, error: str) -> None:
            self.unfreeze(sandbox)
            on_done(result, error)

        uid_shift = self.factory.find_root_uid(sandbox)
        job = self.factory.store.diff(
            snapshot, layer, sandbox.cgroup.unified, uid_shift, finish, same_sandbox=same_sandbox
        )
        sandbox.frozen_by += 1
        return job

    def unfreeze(self, sandbox: SandboxProcess) -> None:
        sandbox.frozen_by -= 1
        if sandbox.frozen_by == 0:
            layer_store.thaw(sandbox.cgroup.unified)

    # ---- removal

    def set_state(self, sandbox: SandboxProcess, state: str) -> None:
        """Change a sandbox's state, and with it the counters and lists of sandboxes by state."""
        self.mounting += (state == "mounting") - (sandbox.state == "mounting")
        self.configuring += (state == "configuring") - (sandbox.state == "configuring")
        for name, members in (("forked", self.forked), ("warm", self.warm)):
            if sandbox.state == name and sandbox in members:
                members.remove(sandbox)
        sandbox.state = state
        if state == "warm":
            self.warm.append(sandbox)

    def close_sync(self, sandbox: SandboxProcess) -> None:
        if sandbox.sync is not None:
            self.by_sync_fd.pop(sandbox.sync.fileno(), None)
            self.poller.unregister(sandbox.sync.fileno())
            sandbox.sync.close()
            sandbox.sync = None

    def end(self, sandbox: SandboxProcess) -> None:
        """Kill a sandbox's PID 1, and with it all its processes. Does not wait until they are dead."""
        self.close_sync(sandbox)
        sandbox.close_descriptors()
        if sandbox.state != "ending":
            self.set_state(sandbox, "ending")
            if sandbox.pidfd >= 0:
                with suppress(ProcessLookupError):
                    _signal.pidfd_send_signal(sandbox.pidfd, _signal.SIGKILL)
                self.killed.append((time.monotonic() + KILL_CGROUP_SECONDS, sandbox))

    def kill_slow_cgroups(self) -> None:
        """Kill the cgroups of sandboxes that did not die at once when their PID 1 was killed, such as fork bombs.

        This is not done for every sandbox: on some kernels a process that later joins a killed cgroup is killed.
        """
        now = time.monotonic()
        while self.killed and (self.killed[0][1].pidfd < 0 or now >= self.killed[0][0]):
            sandbox = self.killed.popleft()[1]
            if sandbox.pidfd >= 0 and sandbox.cgroup.count_processes(SMALL_CGROUP + 1) > SMALL_CGROUP:
                sandbox.cgroup.kill()
            elif sandbox.pidfd >= 0:
                self.ending_slowly.append((now + KILL_SMALL_CGROUP_SECONDS, sandbox))
        while self.ending_slowly and (self.ending_slowly[0][1].pidfd < 0 or now >= self.ending_slowly[0][0]):
            sandbox = self.ending_slowly.popleft()[1]
            if sandbox.pidfd >= 0:
                sandbox.cgroup.kill()

    def next_kill(self) -> float | None:
        """Return the time at which `kill_slow_cgroups` must be called; None if nothing is ending."""
        return min((queue[0][0] for queue in (self.killed, self.ending_slowly) if queue), default=None)

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            sandbox = self.by_pid.get(pid)
            if sandbox is None:
                self.factory.jobs.on_child_reaped(pid, status)
                continue
            if sandbox.sync is not None:
                self.on_setup_message(sandbox)  # its error message
            del self.by_pid[pid]
            if sandbox.state in ("forked", "mounting", "warm", "configuring"):
                self.on_failed(sandbox, f"its first process died during the setup (wait status {status})")
            self.end(sandbox)
            os.close(sandbox.pidfd)
            sandbox.pidfd = -1
            if sandbox.claimed:
                self.dead_but_claimed.add(sandbox)
            else:
                self.removing.append((time.monotonic(), sandbox))

    def release(self, sandbox: SandboxProcess) -> None:
        """End a sandbox whose owner has released it, so that its cgroup can be removed."""
        sandbox.claimed = False
        if sandbox in self.dead_but_claimed:
            self.dead_but_claimed.discard(sandbox)
            self.removing.append((time.monotonic(), sandbox))
        else:
            self.end(sandbox)

    def remove_dead(self) -> None:
        """Remove the cgroups and leases of dead sandboxes.

        That is safe, because PID 1 of a sandbox is reaped only after all processes of its PID namespace are gone.
        """
        if self.killed or self.ending_slowly:
            self.kill_slow_cgroups()
        remaining: list[tuple[float, SandboxProcess]] = []
        factory = self.factory
        for since, sandbox in self.removing:
            released = factory.cgroups.release(sandbox.cgroup, reuse=not sandbox.frozen_by)
            if released or time.monotonic() - since > REMOVE_SECONDS:
                if sandbox.network >= 0 and factory.networks is not None:
                    factory.networks.release(sandbox.network, shared=sandbox.network_shared)
                factory.store.leave(sandbox.lineage)
                if sandbox.lease >= 0:
                    with suppress(OSError):
                        syscalls.unlink_open_file(sandbox.lease)
                    os.close(sandbox.lease)
                    sandbox.lease = -1
            else:
                if time.monotonic() - since > KILL_SMALL_CGROUP_SECONDS:
                    sandbox.cgroup.kill()
                remaining.append((since, sandbox))
        self.removing = remaining

    def close(self, wakeup_fd: int) -> None:
        """End all sandboxes and wait a limited time until they are gone."""
        jobs = self.factory.jobs
        jobs.cancel_all()
        for sandbox in (*self.by_pid.values(), *self.dead_but_claimed):
            self.release(sandbox)
        end = time.monotonic() + REMOVE_SECONDS
        while (self.by_pid or self.removing or len(jobs)) and time.monotonic() < end:
            select.select([wakeup_fd], [], [], 0.01)
            self.reap()
            self.remove_dead()
        self.factory.cgroups.close()
