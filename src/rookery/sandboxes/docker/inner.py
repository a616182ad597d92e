"""Pid 1 of a container: the guard of `local`, dressed for an engine's. Stand-alone: it lives in a bundle.

Promises:
- it reaches its owner over the socket that was mounted for it, says so, and ends when the owner hangs up or dies;
  with it the kernel ends everything in the container;
- no program finds a right: no capability, none to be had, no new privileges, no call that the filter refuses;
- of what an engine gives pid 1 only what starting, reaping and killing other users' programs takes is kept;
- what goes wrong before the first command is said to the owner in words.

Where nobody has the right to change the limits of others (`CAP_SYS_RESOURCE` is rare), pid 1 is, really, the user
whose program it limits for that moment: the kernel lets users limit their own.
"""

import _socket
import os
import resource
import sys

TYPE_CHECKING = False
if TYPE_CHECKING or "rookery.sandboxes" in sys.modules:
    from typing import Any

    from rookery.sandboxes import guard, procs, trees
    from rookery.sandboxes.local import kernel as k
    from rookery.sandboxes.local.first import CAN_BE_OTHERS, OWN, Init
    from rookery.sandboxes.small import _signal, loads, receive, send, suppress
else:
    for _place in sys.argv[1:3]:
        sys.path.insert(0, _place)
    import guard
    import kernel as k
    import procs
    import trees
    from first import CAN_BE_OTHERS, OWN, Init
    from small import _signal, loads, receive, send, suppress

DOOR = "/.rookery/line/door"
FILTER = "/.rookery/filter"
_KEPT = (k.CAP_SETUID, k.CAP_SETGID, k.CAP_KILL, k.CAP_SYS_PTRACE, k.CAP_SYS_RESOURCE)
_LIMITED = {resource.RLIMIT_CORE: 0, resource.RLIMIT_MEMLOCK: 1 << 20, resource.RLIMIT_MSGQUEUE: 1 << 20}
_FILES = (4096, 65536)
_LOCKS = b"Max file locks"
_LIFE = [-1]


class Inner(Init):
    """As in a box, in a user namespace that may be the host's."""

    def adopt(self, command: trees.Running, request: guard.Request) -> None:
        user = request.user if request.user >= 0 else self.user
        group = request.group if request.group >= 0 else user
        os.setresgid(group, -1, -1)
        os.setresuid(user, -1, -1)
        try:
            super().adopt(command, request)
        except PermissionError:
            # It is somebody else's program by now (set-user-id is off, so a new owner is the kernel's doing): the
            # container's own limits hold.
            pass
        finally:
            os.setresuid(OWN, -1, -1)
            os.setresgid(OWN, -1, -1)

    def tag_of(self, pid: int) -> int | None:
        """Everybody may read limits, and only owners may ask for them."""
        with suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/limits", "rb") as file:
            for line in file.read(8192).splitlines():
                if line.startswith(_LOCKS):
                    hard = line[len(_LOCKS) :].split()[1]
                    return self.tags - int(hard) if self.tags and hard != b"unlimited" else None
        return None


def main() -> None:
    line = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    line.connect(DOOR)
    line.send(os.environb.pop(b"ROOKERY_WORD", b"-"))
    try:
        said, fds = receive(line, 1 << 16, 1)
        if not said:
            os._exit(0)
        init, out = _settled(loads(said), line)
        send(line, " ".join(("ready", str(init.user), *out)).encode(), list(out.values()))
        for fd in (*fds, *out.values()):
            os.close(fd)
        line.setblocking(False)
        sys.path.clear()
        sys.modules["resource"] = resource  # each `os.wait4` imports it
        init.loop()
    except BaseException as error:
        with suppress(OSError):
            line.send(f"! {type(error).__name__}: {error}".encode()[:2000])
        os._exit(2)
    os._exit(0)


def _settled(asked: "dict[str, Any]", line: _socket.socket) -> "tuple[Inner, dict[str, int]]":
    if not CAN_BE_OTHERS:
        raise OSError(1, "fs.suid_dumpable is 1 on this machine: programs could look into pid 1; set it to 0 or 2")
    _unnamed()
    for number in (_signal.SIGINT, _signal.SIGTERM):
        _signal.signal(number, _signal.SIG_DFL)
    os.umask(0o022)
    uid = _number_of(asked["user"], asked["uid"])
    _folder(asked["work"], uid)
    if asked["space"]:
        os.chown("/run", uid, uid)
    out: dict[str, int] = {}
    if asked["listen"]:
        door = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
        door.bind(("127.0.0.1", asked["listen"]))
        out["listener"] = door.detach()
    # Who cannot see our number knows our death by the end of this pipe, which no program is given.
    out["life"], _LIFE[0] = os.pipe2(os.O_CLOEXEC)
    score = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
    out["top"] = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    if asked["space"]:
        out["space"] = os.open("/work", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    with open(FILTER, "rb") as file:
        program = k.Filter(file.read())
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for at in range(3):
        os.dup2(null, at)
    os.close(null)
    init = Inner(line)
    init.user = uid
    for which, value in _LIMITED.items():
        procs.lower(which, value)
    procs.lower(resource.RLIMIT_NOFILE, _FILES[1], _FILES[0])
    if asked["file"]:
        procs.lower(resource.RLIMIT_FSIZE, asked["file"])
    os.setgroups([])
    k.set_dumpable(False)
    kept, idle = _had(_KEPT), _had((k.CAP_DAC_READ_SEARCH,))
    k.keep_capabilities()
    k.drop_bounding_set()
    # A user that no program can be: none of them can signal pid 1, or change its limits and priority.
    os.setresgid(OWN, OWN, OWN)
    os.setresuid(OWN, OWN, OWN)
    k.drop_capabilities(*kept, idle=idle)
    k.no_new_privileges()
    k.set_name("sandbox")
    init.watch_netlink(k.install_filter(program))
    k.set_dumpable(False)  # becoming another user set it again
    init.score, init.worth = score, os.pread(score, 16, 0)
    os.chdir("/")
    return init, out


def _number_of(name: str, other: int) -> int:
    """Of a user that the image names; `other` where it says nobody that a container can have."""
    if not name:
        return other
    with suppress(OSError, ValueError):
        fd = os.open("/etc/passwd", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            text = os.read(fd, 1 << 20)
        finally:
            os.close(fd)
        for line in text.split(b"\n"):
            fields = line.split(b":")
            if fields[0] == name.encode() and len(fields) > 3 and int(fields[2]) < 65535:
                return int(fields[2])
    return other


def _folder(work: str, uid: int) -> None:
    """Where commands run: theirs, where nobody had it before."""
    for place in ("/work", work):
        if os.path.isdir(place) and place != "/work":
            continue
        os.makedirs(place, exist_ok=True)
        if os.stat(place).st_uid != uid:
            os.chown(place, uid, uid)


def _had(wanted: tuple[int, ...]) -> tuple[int, ...]:
    """Those of the capabilities that the engine gave."""
    with open("/proc/self/status", "rb") as file:
        for line in file.read().splitlines():
            if line.startswith(b"CapPrm:"):
                held = int(line.split()[1], 16)
                return tuple(number for number in wanted if held >> number & 1)
    return ()


def _unnamed() -> None:
    """How it was started is nobody's affair."""
    import ctypes

    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    first, last = int(fields[45]), int(fields[46])
    environ = (int(fields[47]), int(fields[48]))
    for start, end in ((first, last), environ):
        if 0 < start < end:
            ctypes.memset(start, 0, end - start)
    ctypes.memmove(first, b"sandbox", min(7, last - first))


if __name__ == "__main__":
    main()
