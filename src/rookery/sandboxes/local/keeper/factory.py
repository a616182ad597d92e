"""Create the first process (PID 1) of a sandbox: namespaces, cgroup, network and user IDs. Runs in the keeper.

A failed creation leaves no process, cgroup or reserved user IDs. Resources that the kernel counts per user are
charged to the sandbox's own users, not to the user who runs the keeper.
"""

from __future__ import annotations

import _socket
import errno
import os

from rookery.sandbox_runtime import cgroups, network_namespaces, root_filesystem, seccomp, syscalls
from rookery.sandbox_runtime.lightweight import _signal, deque, dumps, send_message, suppress
from rookery.sandbox_runtime.pid1 import init, local_init, native_init
from rookery.sandboxes.local.keeper import layer_store
from rookery.sandboxes.local.keeper.background_jobs import BackgroundJobs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FIRST_UID = 0x20000000
IDS_PER_SANDBOX = 65536
ID_SLOTS = 4096
_NAMESPACES = (
    syscalls.CLONE_NEWUSER
    | syscalls.CLONE_NEWPID
    | syscalls.CLONE_NEWNS
    | syscalls.CLONE_NEWIPC
    | syscalls.CLONE_NEWUTS
    | syscalls.CLONE_NEWCGROUP
)


class SandboxProcess:
    """The keeper's record of a sandbox, from its fork until its cgroup and lease are removed.

    States: `forked` (waits for its file system), `mounting`, `warm` (waits for a request), `configuring`,
    `in_use`, `ending`.
    """

    def __init__(
        self,
        name: str,
        pid: int,
        pidfd: int,
        sync: _socket.socket,
        cgroup: cgroups.SandboxCgroup,
        lineage: layer_store.Lineage,
    ) -> None:
        self.name = name
        self.pid = pid
        self.pidfd = pidfd
        self.sync: _socket.socket | None = sync
        """Connection to the sandbox's PID 1 during its setup; None afterwards."""
        self.cgroup = cgroup
        self.lineage = lineage
        lineage.members += 1
        self.image: layer_store.SandboxImage | None = None
        """The image of the sandbox; None if it uses the host's system directories."""
        self.below: tuple[str, ...] = ()
        """Paths of the snapshots below the writable layer, uppermost first."""
        self.state = "forked"
        self.request: Any = None
        """The client's request for which the sandbox is being created or configured."""
        self.lease = -1
        """Descriptor of the lease file, which is deleted when the sandbox is gone. The file's name must not be in
        the keeper's memory: sandboxes are forks of the keeper and could read it."""
        self.claimed = False
        """True if the sandbox has an owner that has not released it yet. Until then its cgroup stays, even when
        the sandbox is dead: the owner reads there whether the OOM killer was the cause."""
        self.network = -1
        """Descriptor of the sandbox's network namespace if it comes from the pool of namespaces; else -1."""
        self.network_shared = False
        """True if a process outside of the sandbox has a socket of the sandbox's network namespace."""
        self.frozen_by = 0
        """Number of running jobs (snapshots, diffs) for which the sandbox's processes are frozen."""
        self.shape: dict[str, Any] | None = None
        """Limits with which the sandbox was configured before it was requested; None if it was not."""
        self.channel: _socket.socket | None = None
        """The owner's end of the connection to PID 1, until the owner gets the sandbox."""
        self.fds: dict[str, int] = {}
        """Descriptors that the owner will get, by name, until the owner gets the sandbox."""
        self.native = False
        """True if the sandbox is set up by the C library, which gets messages of its own."""

    def close_descriptors(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        for fd in self.fds.values():
            os.close(fd)
        self.fds = {}


class SandboxForker:
    """Forks sandboxes out of the keeper and sends them their setup messages."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.pid = os.getpid()
        self.uid, self.gid = os.geteuid(), os.getegid()
        self.mapped = self.uid == 0 and _has_id_range()
        """True if each sandbox has its own range of user IDs; otherwise all sandboxes run as the keeper's user."""
        self.seccomp_filter = syscalls.SeccompFilter(seccomp.build_filter(os.uname().machine))
        self.cgroups = cgroups.find_cgroups()
        with open(f"{settings['folder']}/cgroups.json", "wb") as file:  # for the reaper, in case we are killed
            file.write(dumps({"prefix": f"{settings['name']}-", "above": self.cgroups.parents}))
        if not self.mapped:
            syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS)
            _write_id_maps("self", f"{self.uid} {self.uid} 1", f"{self.gid} {self.gid} 1", deny_setgroups=True)
        else:
            syscalls.unshare(syscalls.CLONE_NEWNS)
            syscalls.keep_capabilities_on_seteuid()
        self.networks = network_namespaces.NetworkNamespacePool() if self.mapped else None
        self.tree = root_filesystem.prepare(
            settings["folder"], settings["extra"], lambda pid: self.map_ids(pid, 0, root_filesystem.USER)
        )
        # Each owner starts at another slot and uses them in turn: the kernel has limits per user ID. Keepers of
        # the same owner have different slots.
        first, index, count = settings["parent"] * 2654435761, settings["index"], settings["count"]
        id_slots = deque((first + n) % ID_SLOTS for n in range(index, ID_SLOTS, count))
        self.native_problem = ""
        """Why the C library is not used although it was compiled."""
        self.native = self._load_native(settings["native"]) if settings["native"] else None
        self.jobs = BackgroundJobs()
        self.store = layer_store.LayerStore(self.jobs, id_slots, mapped=self.mapped)
        self._serial = 0

    def find_root_uid(self, sandbox: SandboxProcess) -> int:
        """Return the user ID that the sandbox's root (user 0) has on the host.

        Return -1 if sandboxes have no user IDs of their own and run as the user of this process, the keeper.
        """
        return FIRST_UID + sandbox.lineage.id_slot * IDS_PER_SANDBOX if self.mapped else -1

    def fork(self, *, isolated_network: bool = True) -> SandboxProcess:
        """Fork a process into new namespaces and a new cgroup. It then waits for `send_mount_plan`."""
        try:
            return self._fork_once(isolated_network=isolated_network)
        except native_init.ZygoteEndedError as error:
            # If the zygote has forked a process, that process exits, because its connection is closed. It shares
            # nothing with the process that is forked now.
            self._stop_using_library(str(error))
            return self._fork_once(isolated_network=isolated_network)

    def _fork_once(self, *, isolated_network: bool) -> SandboxProcess:
        self._serial += 1
        name = f"{self.settings['name']}-{self._serial}"
        lineage = self.store.new_lineage()
        try:
            cgroup = self.cgroups.acquire(name)
        except OSError:
            self.store.id_slots.append(lineage.id_slot)
            raise
        task_fds: list[int] = []
        cgroup_fd = network = -1
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        try:
            if cgroup.unified:
                cgroup_fd = os.open(cgroup.unified, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if self.networks is not None and isolated_network:
                network = self.networks.enter_unused()
            elif self.networks is not None:
                self.networks.enter_host()
            task_fds = cgroup.open_v1_tasks()
            new_network = isolated_network and network < 0
            flags = _NAMESPACES | syscalls.CLONE_NEWNET if new_network else _NAMESPACES
            uid = FIRST_UID + lineage.id_slot * IDS_PER_SANDBOX
            native = self._fork_native(flags, uid, theirs.fileno(), network, cgroup_fd, task_fds)
            pid, pidfd = native or self._clone(flags, cgroup_fd, uid)
            if pid == 0:
                local_init.run(theirs, self.tree, self.seccomp_filter, self.pid, task_fds, mapped=self.mapped)
                os._exit(3)
        except OSError:
            ours.close()
            cgroup.remove()
            self.store.id_slots.append(lineage.id_slot)
            if network >= 0:
                os.close(network)
            raise
        finally:
            theirs.close()
            for fd in (*task_fds, *((cgroup_fd,) if cgroup_fd >= 0 else ())):
                os.close(fd)
        sandbox = SandboxProcess(name, pid, pidfd, ours, cgroup, lineage)
        sandbox.network = network
        sandbox.native = native is not None
        ours.setblocking(False)
        with suppress(PermissionError, ProcessLookupError):
            # Pid 1 must get CPU time while a hundred programs of its sandbox compete. They do not inherit this.
            os.sched_setscheduler(pid, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, pid, -20)
        return sandbox

    def _load_native(self, path: str) -> native_init.NativeInit | None:
        """Load the C library for pid 1; None if it cannot be used for the sandboxes of this keeper."""
        if not (self.mapped and self.tree.overlay and init.CAN_SWITCH_USERS):
            self.native_problem = "it needs overlay mounts and a range of user IDs for each sandbox"
            return None
        try:
            return native_init.NativeInit(path, self.tree, self.seccomp_filter, warm=init.Init.warm is not None)
        except OSError as error:
            self.native_problem = f"it cannot be loaded: {error}"
            return None

    def _stop_using_library(self, problem: str) -> None:
        self.native, self.native_problem = None, problem

    def _fork_native(
        self, flags: int, uid: int, sync: int, network: int, cgroup_fd: int, task_fds: list[int]
    ) -> tuple[int, int] | None:
        """Let the zygote fork a sandbox. Return None if there is no zygote, or it cannot do it on this machine."""
        if self.native is None or self.networks is None:
            return None
        entered = network if network >= 0 else self.networks.host
        try:
            return self.native.fork(flags, uid, sync, entered, cgroup_fd, task_fds)
        except OSError as error:
            # The zygote had been killed, or the kernel does not allow it to fork children of the keeper.
            if not isinstance(error, ConnectionError) and error.errno != errno.EINVAL:
                raise
            self._stop_using_library(str(error))
            return None

    def start_zygote(self) -> None:
        """Start the process that forks sandboxes, if the C library is used and the process can be started."""
        if self.native is not None:
            try:
                self.native.start_zygote(init.prepare_zygote)
            except OSError as error:
                self._stop_using_library(f"the zygote could not be started: {error}")
                return
            if self.native.pid == 0:
                local_init.take_over(self.native, self.tree, self.seccomp_filter)

    def stop_zygote(self) -> None:
        """End the zygote, which runs in the keeper's directory, before the keeper ends."""
        if self.native is not None:
            self.native.stop_zygote()

    def _clone(self, flags: int, cgroup_fd: int, uid: int) -> tuple[int, int]:
        """Clone this process, with the sandbox's user 0 as the effective user.

        Per-user resources of a sandbox (inotify, signals, namespaces) are also charged to the user who created
        its user namespace. If that were root, one sandbox could exhaust them for the host's root.
        """
        if not self.mapped:
            return syscalls.clone(flags, cgroup=cgroup_fd)
        os.seteuid(uid)
        pid = -1
        try:
            pid, pidfd = syscalls.clone(flags, cgroup=cgroup_fd)
        finally:
            if pid != 0:
                os.seteuid(0)
                syscalls.die_with_parent(_signal.SIGTERM)  # the change of user had cleared it
        return pid, pidfd

    def send_mount_plan(
        self,
        sandbox: SandboxProcess,
        plan: root_filesystem.MountPlan,
        image: layer_store.SandboxImage | None = None,
        lineage: layer_store.Lineage | None = None,
        *,
        isolated_network: bool = True,
    ) -> None:
        """Write the user ID maps of a forked sandbox and tell it to mount its file system.

        For a sandbox that starts with the files of a snapshot, `lineage` is the lineage of that snapshot: the
        sandbox it was taken of, with all forks, which share a range of user IDs.
        """
        assert sandbox.sync is not None
        sandbox.image, sandbox.below = image, plan.snapshots
        if lineage is not None:
            lineage.members += 1
            self.store.leave(sandbox.lineage)
            sandbox.lineage = lineage
        self.map_ids(sandbox.pid, sandbox.lineage.id_slot, plan.uid)
        if sandbox.native and image is None and (encoded := native_init.encode_mount_plan(plan)) is not None:
            send_message(sandbox.sync, encoded)
            return
        sandbox.native = False  # its PID 1 leaves the library
        message = {
            "size": plan.size,
            "uid": plan.uid,
            "snapshots": plan.snapshots,
            "layers": image.layers if image is not None else (),
            "mounts": [target for _, target in plan.mounts],
            "image": image is not None,
            "host_resolver": plan.host_resolver,
            "loopback": isolated_network and self.networks is None,
        }
        directories = [image.directory] if image is not None else []
        trees: list[int] = []
        try:
            for directory in (*directories, *(str(source) for source, _ in plan.mounts)):
                trees.append(self._open_read_only(sandbox, directory))  # noqa: PERF401  (closed if a later one fails)
            send_message(sandbox.sync, dumps(message), trees)
        finally:
            for tree in trees:
                os.close(tree)

    def _open_read_only(self, sandbox: SandboxProcess, directory: str) -> int:
        """Return a descriptor of a detached read-only mount of a host directory.

        If the file system allows it, owners are mapped to the sandbox's user IDs.
        """
        tree = syscalls.open_detached_tree(directory)
        try:
            if not self.mapped:
                syscalls.make_read_only(tree)
                return tree
            user_namespace = os.open(f"/proc/{sandbox.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
            try:
                syscalls.make_read_only(tree, user_namespace)
            except OSError:  # the file system has no ID-mapped mounts: owners appear as nobody
                syscalls.make_read_only(tree)
            finally:
                os.close(user_namespace)
        except BaseException:
            os.close(tree)
            raise
        return tree

    def map_ids(self, pid: int, id_slot: int, uid: int) -> None:
        """Write the user and group ID maps of a process in a new user namespace."""
        if self.mapped:
            ids = f"0 {FIRST_UID + id_slot * IDS_PER_SANDBOX} {IDS_PER_SANDBOX}"
            _write_id_maps(pid, ids, ids)
        else:
            _write_id_maps(pid, f"{uid} {self.uid} 1", f"{uid} {self.gid} 1", deny_setgroups=True)

    def send_configuration(self, sandbox: SandboxProcess, request: dict[str, Any]) -> _socket.socket:
        """Send a mounted sandbox its limits. Return the owner's end of the connection to its PID 1."""
        assert sandbox.sync is not None
        sandbox.network_shared = request["listen"] > 0
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        try:
            limits = cgroups.CgroupLimits(request["memory"], request["pids"], request["cpus"])
            sandbox.cgroup.set_limits(limits)
            missing = self.cgroups.missing_controllers
            message = {
                "disk": request["disk"],
                "uid": request["uid"],
                "listen": request.get("listen", 0),
                "host_network": request.get("network") == "all",
                "memory_per_process": request["memory"] if cgroups.MEMORY in missing else 0,
                "pids_per_user": request["pids"] if cgroups.PIDS in missing else 0,
            }
            data = (
                native_init.encode_limits(request["uid"], request["disk"], message["listen"])
                if sandbox.native and not (message["host_network"] or missing)
                else dumps(message)
            )
            send_message(sandbox.sync, data, [theirs.fileno()])
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return ours


def _write_id_maps(pid: int | str, uids: str, gids: str, *, deny_setgroups: bool = False) -> None:
    denied = (("setgroups", "deny"),) if deny_setgroups else ()
    for name, text in (*denied, ("uid_map", uids), ("gid_map", gids)):
        fd = os.open(f"/proc/{pid}/{name}", os.O_WRONLY | os.O_CLOEXEC)  # faster than a file object
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)


def _has_id_range() -> bool:
    """Return whether the keeper's user namespace has user IDs for sandboxes. A container may lack them."""
    with open("/proc/self/uid_map") as file:
        for line in file:
            first, _, count = (int(field) for field in line.split())
            if first <= FIRST_UID and first + count >= FIRST_UID + ID_SLOTS * IDS_PER_SANDBOX:
                return True
    return False
