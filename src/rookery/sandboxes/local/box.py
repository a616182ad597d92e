"""What a box does before it is one, and pid 1 of it afterwards. Stand-alone: it lives in forks of the keeper.

Promises:
- when the keeper dies, in whatever way, the kernel ends pid 1 and with it everything in the box;
- when the owner hangs up, pid 1 ends, and everything in the box with it;
- no descriptor, variable or right of the host is left when the first program starts: no capability, no new
  privileges, no call that `seccomp` refuses;
- no program in it can end, stop, interrupt or outweigh pid 1 by a signal or by taking memory, unless it gives up
  being the first to go;
- what goes wrong while it is made is said to the keeper in words.
"""

import _socket
import os
import resource
import sys

TYPE_CHECKING = False
if TYPE_CHECKING or "rookery.sandboxes" in sys.modules:
    from typing import Any

    from rookery.sandboxes import guard, procs
    from rookery.sandboxes.local import kernel as k
    from rookery.sandboxes.local import nets, root
    from rookery.sandboxes.local.first import CAN_BE_OTHERS, OWN, Init
    from rookery.sandboxes.small import _signal, loads, receive, send, suppress
else:
    import guard
    import kernel as k
    import nets
    import procs
    import root
    from first import CAN_BE_OTHERS, OWN, Init
    from small import _signal, loads, receive, send, suppress

SYNC = 3
MOUNTS = 16
"""As many as a spec may name."""
_LIMITED = {resource.RLIMIT_CORE: 0, resource.RLIMIT_MEMLOCK: 1 << 20, resource.RLIMIT_MSGQUEUE: 1 << 20}
_FILES = (4096, 65536)


def live(
    sync: _socket.socket, tree: root.Tree, program: k.Filter, parent: int, doors: list[int], *, mapped: bool
) -> None:
    """All of a box's life. `doors`: of groups to go into. Never returns."""
    try:
        k.die_with_parent()
        if os.getppid() not in (0, parent):
            os._exit(1)
        for door in doors:
            os.write(door, b"0")
        sync = _cleared(sync)
        k.set_dumpable(True)  # who made us was another user for that: until here, our own files are root's
        # Later it is not ours to open any more, since nobody may look into this process.
        score = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
        said, fds = receive(sync, 1 << 16, 1 + MOUNTS)
        if not said:
            os._exit(0)
        asked = loads(said)
        dress = root.Dress(asked["size"], asked["uid"], tuple(asked["lowers"]), resolve=asked["resolve"])
        dress.layers = tuple(asked["layers"])
        if asked["image"]:
            dress.base = fds.pop(0)
        dress.mounts = tuple(zip(fds, asked["mounts"], strict=True))
        if dress.base >= 0:
            sys.path.clear()  # from here on a module would come out of the image
        if mapped:
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
            with suppress(PermissionError):
                os.setgroups([])
        k.unshare(k.NEWCGROUP)  # by now it is in all of its groups: from inside, they are the top
        os.umask(0o022)
        layer = root.enter(tree, dress, mapped=mapped)
        if asked["loopback"]:
            nets.loopback()
        _socket.sethostname("sandbox")
        sync.send(b"warm")
        said, fds = receive(sync, 1 << 16, 2)
        if not said:
            os._exit(0)
        channel = _socket.socket(fileno=fds[0])
        channel.setblocking(False)
        asked = loads(said)
        out = {"layer": layer} if layer >= 0 else {}
        if asked["listen"]:
            out["listener"] = _door(asked["listen"]).detach()
        init = _settled(asked, channel, program, dress, mapped=mapped)
        init.score, init.worth = score, os.pread(score, 16, 0)
        out["top"] = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        send(sync, " ".join(("ready", *out)).encode(), list(out.values()))
        for fd in out.values():
            os.close(fd)
        sync.close()
        init.loop()
    except BaseException as error:
        with suppress(OSError):
            sync.send(f"! {type(error).__name__}: {error}".encode()[:2000])
        os._exit(2)
    os._exit(0)


def _cleared(sync: _socket.socket) -> _socket.socket:
    """Leaves 0, 1 and 2 on nothing, the line to the keeper on 3, and no other descriptor."""
    _signal.set_wakeup_fd(-1)
    # A signal from inside reaches pid 1 only where it has a handler for it; Python comes with one.
    for number in (_signal.SIGCHLD, _signal.SIGINT, _signal.SIGTERM):
        _signal.signal(number, _signal.SIG_DFL)  # without the enumerations, which cost a quarter of a millisecond
    null = os.open("/dev/null", os.O_RDWR)
    line = sync.detach()
    if line != SYNC:
        os.dup2(line, SYNC, inheritable=False)
    for at in range(SYNC):
        os.dup2(null, at)
    k.close_range(SYNC + 1)
    return _socket.socket(fileno=SYNC)


def _settled(
    asked: "dict[str, Any]", channel: _socket.socket, program: k.Filter, dress: root.Dress, *, mapped: bool
) -> Init:
    if asked["disk"] != dress.size:
        root.resize(asked["disk"])
    if mapped and asked["uid"] != dress.uid:
        for place in (root.WORK, "/run"):  # who has no right to pass over owners must be one
            os.chown(place, asked["uid"], asked["uid"])
    init = Init(channel)
    others = mapped and CAN_BE_OTHERS
    init.user = asked["uid"] if others else -1
    for which, value in _LIMITED.items():
        procs.lower(which, value)
    procs.lower(resource.RLIMIT_NOFILE, _FILES[1], _FILES[0])
    init.memory = asked["memory_each"]
    if init.memory:
        procs.lower(resource.RLIMIT_DATA, max(init.memory, guard.OWN_FLOOR))
    if asked["pids_each"]:
        procs.lower(resource.RLIMIT_NPROC, asked["pids_each"])
    k.set_dumpable(False)
    if others:
        k.keep_capabilities()
    k.drop_bounding_set()
    if others:
        # A user that no program can be: none of them can signal pid 1, or change its limits and priority.
        os.setresgid(OWN, OWN, OWN)
        os.setresuid(OWN, OWN, OWN)
        kept = (k.CAP_SETUID, k.CAP_SETGID, k.CAP_KILL, k.CAP_SYS_PTRACE, k.CAP_SYS_RESOURCE)
        k.drop_capabilities(*kept, idle=(k.CAP_DAC_READ_SEARCH,))
    else:
        if mapped:
            os.setresgid(asked["uid"], asked["uid"], asked["uid"])
            os.setresuid(asked["uid"], asked["uid"], asked["uid"])
        k.drop_capabilities()
    k.no_new_privileges()
    if asked["host_network"]:
        k.scope_abstract_sockets()
    k.set_name("sandbox")
    init.watch_netlink(k.install_filter(program))
    k.set_dumpable(False)  # becoming another user set it again
    k.die_with_parent()  # and cleared this
    return init


def _door(port: int) -> _socket.socket:
    """A socket that stays in this network wherever it goes. Bound, so that no program here can take its place; it
    does not listen: until somebody serves it, programs are refused at once instead of waiting."""
    door = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
    door.bind(("127.0.0.1", port))
    return door
