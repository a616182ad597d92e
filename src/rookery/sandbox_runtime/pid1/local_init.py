"""The first process of a `local` sandbox, from the fork in the keeper to pid 1 that runs commands.

The keeper sends two messages: first the layout of the file system, then the limits. A sandbox waits between
them, so that it can be prepared before anybody requests it.

Guarantees:
- when the keeper dies, the kernel kills pid 1 and with it everything in the sandbox;
- when the owner closes the connection, pid 1 exits, and everything in the sandbox dies with it;
- when the first program starts, the sandbox has no file descriptor, environment variable or capability of the
  host, and programs can neither gain privileges nor use system calls that `seccomp` refuses;
- no program can kill, stop, interrupt or outlive pid 1 by signals or by using up memory;
- an error during the setup is reported to the keeper as text.
"""

import _socket
import mmap
import os
import resource
import sys

from rookery.sandbox_runtime import guard, network_namespaces, processes, root_filesystem, syscalls
from rookery.sandbox_runtime.lightweight import _signal, loads, receive_message, send_message, suppress
from rookery.sandbox_runtime.pid1 import native_init
from rookery.sandbox_runtime.pid1.init import CAN_SWITCH_USERS, PID1_UID, Init, find_error_slot, run_forked_command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

KEEPER_FD = 3
MAX_MOUNTS = 16
_LIMITS = {resource.RLIMIT_CORE: 0, resource.RLIMIT_MEMLOCK: 1 << 20, resource.RLIMIT_MSGQUEUE: 1 << 20}
_OPEN_FILES = (4096, 65536)


def run(
    sync: _socket.socket,
    tree: root_filesystem.SharedTree,
    seccomp_filter: syscalls.SeccompFilter,
    parent: int,
    cgroup_fds: list[int],
    *,
    mapped: bool,
) -> None:
    """Set up the sandbox and serve as its pid 1. Never returns.

    `sync` is the connection to the keeper, `tree` holds the files that all sandboxes share, `parent` is the
    keeper's pid, `cgroup_fds` are `tasks` files of v1 cgroups to join, and `mapped` says that the sandbox has
    its own range of user IDs.
    """
    try:
        syscalls.die_with_parent()
        if os.getppid() not in (0, parent):
            os._exit(1)
        for fd in cgroup_fds:
            os.write(fd, b"0")
        sync = _reset_descriptors(sync)
        # The keeper had another effective user when it forked us; until here our files in /proc belong to root.
        syscalls.set_dumpable(True)
        # Opened now: later this process is not dumpable, and it could not open the file any more.
        oom_score_fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
        data, fds = receive_message(sync, 1 << 16, 1 + MAX_MOUNTS)
        plan, layer = _mount(data, fds, sync, tree, mapped=mapped)
        data, fds = receive_message(sync, 1 << 16, 2)
        _serve(data, fds, sync, seccomp_filter, plan, layer, oom_score_fd, mapped=mapped)
    except BaseException as error:
        _report_error(sync, error)
    os._exit(0)


def take_over(
    native: native_init.NativeInit, tree: root_filesystem.SharedTree, seccomp_filter: syscalls.SeccompFilter
) -> None:
    """Continue what the library has begun in this process: pid 1 or, in its fork, a command. Never returns."""
    state = native.state
    if state.stage == native_init.IN_COMMAND:
        run_forked_command(native)
    sync = _socket.socket(fileno=KEEPER_FD) if state.stage < native_init.AT_SERVE else None
    try:
        _reset_signals()
        if state.stage == native_init.AT_SERVE:
            _continue_serving(native)
            os._exit(0)
        assert sync is not None
        data, fds = native.take_message()
        if state.stage == native_init.AT_MOUNT:
            plan, layer = _mount(data, fds, sync, tree, mapped=True)
            data, fds = receive_message(sync, 1 << 16, 2)
        else:
            plan, layer = root_filesystem.MountPlan(state.disk, state.plan_uid), state.layer
        _serve(data, fds, sync, seccomp_filter, plan, layer, state.oom_score_fd, mapped=True)
    except BaseException as error:
        _report_error(sync, error)
    os._exit(0)


def _report_error(sync: _socket.socket | None, error: BaseException) -> "NoReturn":
    with suppress(OSError):
        if sync is not None:
            sync.send(f"! {type(error).__name__}: {error}".encode()[:2000])
    os._exit(2)


def _mount(
    data: bytes, fds: list[int], sync: _socket.socket, tree: root_filesystem.SharedTree, *, mapped: bool
) -> tuple[root_filesystem.MountPlan, int]:
    """Mount the file system that the keeper's first message describes. Return its plan and `enter`'s result."""
    if not data:
        os._exit(0)
    message = loads(data)
    plan = root_filesystem.MountPlan(
        message["size"], message["uid"], tuple(message["snapshots"]), host_resolver=message["host_resolver"]
    )
    plan.layers = tuple(message["layers"])
    if message["image"]:
        plan.image = fds.pop(0)
    plan.mounts = tuple(zip(fds, message["mounts"], strict=True))
    if plan.image >= 0:
        sys.path.clear()  # from here on an import would load files of the image
    if mapped:
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        with suppress(PermissionError):
            os.setgroups([])
    syscalls.unshare(syscalls.CLONE_NEWCGROUP)  # the cgroups that we have joined become the root inside
    os.umask(0o022)
    layer = root_filesystem.enter(tree, plan, mapped=mapped)
    if message["loopback"]:
        network_namespaces.bring_up_loopback()
    _socket.sethostname("sandbox")
    sync.send(b"mounted")
    return plan, layer


def _serve(
    data: bytes,
    fds: list[int],
    sync: _socket.socket,
    seccomp_filter: syscalls.SeccompFilter,
    plan: root_filesystem.MountPlan,
    layer: int,
    oom_score_fd: int,
    *,
    mapped: bool,
) -> None:
    """Apply the limits of the keeper's second message, tell the keeper that the sandbox is ready, and serve."""
    if not data:
        os._exit(0)
    channel = _socket.socket(fileno=fds[0])
    channel.setblocking(False)
    message = loads(data)
    descriptors = {"layer": layer} if layer >= 0 else {}
    if message["listen"]:
        descriptors["listener"] = _bind_loopback(message["listen"]).detach()
    init = _configure(message, channel, seccomp_filter, plan, mapped=mapped)
    init.oom_score_fd, init.oom_score = oom_score_fd, os.pread(oom_score_fd, 16, 0)
    descriptors["root"] = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    send_message(sync, " ".join(("ready", *descriptors)).encode(), list(descriptors.values()))
    for fd in descriptors.values():
        os.close(fd)
    sync.close()
    init.run()


def _continue_serving(native: native_init.NativeInit) -> None:
    """Serve the owner of a sandbox that the library has set up and handle the message that it left."""
    state = native.state
    init = Init(_socket.socket(fileno=state.channel))
    init.user, init.oom_score_fd, init.oom_score = state.user, state.oom_score_fd, state.oom_score
    init.tag_base, init.last_tag, init.last_number = state.tag_base, state.last_tag, state.last_number
    init.childless = bool(state.childless)
    if state.start_errors_fd >= 0:
        init.error_slots = mmap.mmap(state.start_errors_fd, 0)
        os.close(state.start_errors_fd)
    for one in state.commands[: state.command_count]:
        command = guard.RunningCommand(one.number, 0.0)
        command.pid, command.tag, command.started_alone = one.pid, one.tag, bool(one.started_alone)
        command.started, command.deadline, command.start_ticks = one.started, one.deadline, one.start_ticks
        if init.error_slots is not None:
            command.error_slot = find_error_slot(one.tag)
        init.running[command.pid] = command
    if state.report_size:
        init.reports.append(native.report())
    _drop_capabilities()
    init.watch_netlink(state.listener)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
    size, fds = native.move_message(init.buffer)
    if size:
        init.handle_received(size, fds)
    init.reap()
    init.flush_reports()
    init.run()


def _reset_descriptors(sync: _socket.socket) -> _socket.socket:
    """Point descriptors 0 to 2 at /dev/null, move the connection to the keeper to 3, and close all others."""
    _reset_signals()
    null = os.open("/dev/null", os.O_RDWR)
    fd = sync.detach()
    if fd != KEEPER_FD:
        os.dup2(fd, KEEPER_FD, inheritable=False)
    for target in range(KEEPER_FD):
        os.dup2(null, target)
    syscalls.close_range(KEEPER_FD + 1)
    return _socket.socket(fileno=KEEPER_FD)


def _reset_signals() -> None:
    _signal.set_wakeup_fd(-1)
    # A signal from inside the namespace reaches pid 1 only if it has a handler; Python installs one for SIGINT.
    for number in (_signal.SIGCHLD, _signal.SIGINT, _signal.SIGTERM):
        _signal.signal(number, _signal.SIG_DFL)  # plain integers: the enumerations of `signal` cost 0.25 ms


def _configure(
    message: "dict[str, Any]",
    channel: _socket.socket,
    seccomp_filter: syscalls.SeccompFilter,
    plan: root_filesystem.MountPlan,
    *,
    mapped: bool,
) -> Init:
    """Apply the limits and give up all privileges that pid 1 does not need. Return pid 1's `Init`."""
    if message["disk"] != plan.size:
        root_filesystem.resize(message["disk"])
    uid = message["uid"]
    if mapped and uid != plan.uid:
        for directory in (root_filesystem.WORK, "/run"):
            os.chown(directory, uid, uid)
    init = Init(channel)
    switches_users = mapped and CAN_SWITCH_USERS
    init.user = uid if switches_users else -1
    for which, value in _LIMITS.items():
        processes.lower_limit(which, value)
    processes.lower_limit(resource.RLIMIT_NOFILE, _OPEN_FILES[1], _OPEN_FILES[0])
    init.memory_limit = message["memory_per_process"]
    if init.memory_limit:
        processes.lower_limit(resource.RLIMIT_DATA, max(init.memory_limit, guard.MIN_GUARD_MEMORY))
    if message["pids_per_user"]:
        processes.lower_limit(resource.RLIMIT_NPROC, message["pids_per_user"])
    syscalls.set_dumpable(False)
    if switches_users:
        syscalls.lock_capabilities()
    syscalls.drop_bounding_set()
    if switches_users:
        # A user that no program can have: none of them can signal pid 1 or change its limits and priority.
        os.setresgid(PID1_UID, PID1_UID, PID1_UID)
        os.setresuid(PID1_UID, PID1_UID, PID1_UID)
        _drop_capabilities()
    else:
        if mapped:
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        syscalls.drop_capabilities()
    syscalls.no_new_privileges()
    if message["host_network"]:
        syscalls.scope_abstract_sockets()
    syscalls.set_name("sandbox")
    init.watch_netlink(syscalls.install_seccomp_filter(seccomp_filter))
    syscalls.set_dumpable(False)  # the change of user had set it
    syscalls.die_with_parent()  # the change of user had cleared it
    return init


def _drop_capabilities() -> None:
    """Keep only the capabilities that pid 1 needs to start, inspect and kill commands of other users."""
    syscalls.drop_capabilities(
        syscalls.CAP_SETUID,
        syscalls.CAP_SETGID,
        syscalls.CAP_KILL,
        syscalls.CAP_SYS_PTRACE,
        syscalls.CAP_SYS_RESOURCE,
        permitted=(syscalls.CAP_DAC_READ_SEARCH,),
    )


def _bind_loopback(port: int) -> _socket.socket:
    """Bind a port of the sandbox's loopback for the owner, so that no program in the sandbox can take it.

    The socket does not listen yet: until the owner serves it, connections are refused at once instead of waiting.
    """
    sock = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
    sock.bind(("127.0.0.1", port))
    return sock
