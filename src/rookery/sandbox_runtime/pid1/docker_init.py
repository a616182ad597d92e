"""Pid 1 of a container. It is started from a directory that the provider mounts into the container.

Guarantees:
- it connects to the process that owns the container, over a Unix socket that is mounted into the container, and
  exits when the owner closes the connection or dies; the kernel then kills all processes of the container;
- programs have no capability, no way to new privileges and no system call that the seccomp filter refuses;
- of the capabilities that the container engine grants, pid 1 keeps those that it needs to start, reap and kill
  programs.

An error before the first command is reported to the owner as text.

Few containers have `CAP_SYS_RESOURCE`, which is needed to change the limits of other users' processes. Pid 1
therefore changes its real user to that of a program while it sets the limits of that program.
"""

import _socket
import os
import resource
import sys

from rookery.sandbox_runtime import guard, processes, syscalls
from rookery.sandbox_runtime.lightweight import _signal, loads, receive_message, send_message, suppress
from rookery.sandbox_runtime.pid1.init import CAN_SWITCH_USERS, PID1_UID, Init, load_programs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CONTROL_SOCKET = "/.rookery/control/socket"
FILTER_FILE = "/.rookery/seccomp_filter"
TOKEN_VARIABLE = b"ROOKERY_CONTROL_TOKEN"
"""Environment variable with the token by which the owner recognizes the container that connects."""
_CAPABILITIES = (
    syscalls.CAP_SETUID,
    syscalls.CAP_SETGID,
    syscalls.CAP_KILL,
    syscalls.CAP_SYS_PTRACE,
    syscalls.CAP_SYS_RESOURCE,
)
_LIMITS = {resource.RLIMIT_CORE: 0, resource.RLIMIT_MEMLOCK: 1 << 20, resource.RLIMIT_MSGQUEUE: 1 << 20}
_OPEN_FILES = (4096, 65536)
_TAG_LINE = b"Max file locks"
_exit_pipe = [-1]
"""Write end of a pipe. The owner holds the read end and sees the end of file when pid 1 dies, even if it cannot
see the pid."""


class DockerInit(Init):
    """Pid 1 of a container, which may be in the host's user namespace."""

    def track(self, command: guard.RunningCommand, request: guard.CommandRequest) -> None:
        user = request.user if request.user >= 0 else self.user
        group = request.group if request.group >= 0 else user
        os.setresgid(group, -1, -1)
        os.setresuid(user, -1, -1)
        try:
            super().track(command, request)
        except PermissionError:
            # The kernel gave the process another owner (set-user-id is disabled): the container's limits apply.
            pass
        finally:
            os.setresuid(PID1_UID, -1, -1)
            os.setresgid(PID1_UID, -1, -1)

    def read_tag(self, pid: int) -> int | None:
        """Return the tag of the command that started a process; None if the process has no tag.

        It is read from /proc, because prlimit works only for processes of the same user.
        """
        with suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/limits", "rb") as file:
            for line in file.read(8192).splitlines():
                if line.startswith(_TAG_LINE):
                    hard = line[len(_TAG_LINE) :].split()[1]
                    return self.tag_base - int(hard) if self.tag_base and hard != b"unlimited" else None
        return None


def main() -> None:
    load_programs(preload=False)  # images have other interpreters: there is nothing to share
    owner = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    owner.connect(CONTROL_SOCKET)
    owner.send(os.environb.pop(TOKEN_VARIABLE, b"-"))
    try:
        data, fds = receive_message(owner, 1 << 16, 1)
        if not data:
            os._exit(0)
        init, handed_out = _configure(loads(data), owner)
        send_message(owner, " ".join(("ready", str(init.user), *handed_out)).encode(), list(handed_out.values()))
        for fd in (*fds, *handed_out.values()):
            os.close(fd)
        owner.setblocking(False)
        sys.path.clear()
        sys.modules["resource"] = resource  # `os.wait4` imports it on every call
        init.run()
    except BaseException as error:
        with suppress(OSError):
            owner.send(f"! {type(error).__name__}: {error}".encode()[:2000])
        os._exit(2)
    os._exit(0)


def _configure(message: "dict[str, Any]", owner: _socket.socket) -> "tuple[DockerInit, dict[str, int]]":
    """Set up the container and give up privileges.

    Return the `DockerInit`, and the file descriptors that are sent to the owner, by name.
    """
    if not CAN_SWITCH_USERS:
        raise OSError(
            1, "the kernel setting fs.suid_dumpable is 1, so programs could read pid 1's memory; set it to 0 or 2"
        )
    _hide_command_line()
    for number in (_signal.SIGINT, _signal.SIGTERM):
        _signal.signal(number, _signal.SIG_DFL)
    os.umask(0o022)
    uid = _find_uid(message["user"], message["uid"])
    _make_working_directory(message["workdir"], uid)
    if message["work_tmpfs"]:
        os.chown("/run", uid, uid)
    handed_out: dict[str, int] = {}
    if message["listen_port"]:
        listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
        listener.bind(("127.0.0.1", message["listen_port"]))
        handed_out["listener"] = listener.detach()
    handed_out["exit_pipe"], _exit_pipe[0] = os.pipe2(os.O_CLOEXEC)
    oom_score_fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
    handed_out["root"] = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    if message["work_tmpfs"]:
        handed_out["work_tmpfs"] = os.open("/work", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    with open(FILTER_FILE, "rb") as file:
        seccomp_filter = syscalls.SeccompFilter(file.read())
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for target in range(3):
        os.dup2(null, target)
    os.close(null)
    init = DockerInit(owner)
    init.user = uid
    for which, value in _LIMITS.items():
        processes.lower_limit(which, value)
    processes.lower_limit(resource.RLIMIT_NOFILE, _OPEN_FILES[1], _OPEN_FILES[0])
    if message["max_file_size"]:
        processes.lower_limit(resource.RLIMIT_FSIZE, message["max_file_size"])
    os.setgroups([])
    syscalls.set_dumpable(False)
    effective, permitted = _select_granted(_CAPABILITIES), _select_granted((syscalls.CAP_DAC_READ_SEARCH,))
    syscalls.lock_capabilities()
    syscalls.drop_bounding_set()
    # A user that no program can have: none of them can signal pid 1 or change its limits and priority.
    os.setresgid(PID1_UID, PID1_UID, PID1_UID)
    os.setresuid(PID1_UID, PID1_UID, PID1_UID)
    syscalls.drop_capabilities(*effective, permitted=permitted)
    syscalls.no_new_privileges()
    syscalls.set_name("sandbox")
    init.watch_netlink(syscalls.install_seccomp_filter(seccomp_filter))
    syscalls.set_dumpable(False)  # the change of user had set it
    init.oom_score_fd, init.oom_score = oom_score_fd, os.pread(oom_score_fd, 16, 0)
    os.chdir("/")
    return init, handed_out


def _find_uid(name: str, default: int) -> int:
    """Return the uid of the user `name` in the image's /etc/passwd; `default` if there is no such user."""
    if not name:
        return default
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
    return default


def _make_working_directory(work: str, uid: int) -> None:
    """Create /work and the working directory of commands, owned by `uid`.

    An existing working directory keeps its owner, unless it is /work.
    """
    for directory in ("/work", work):
        if os.path.isdir(directory) and directory != "/work":
            continue
        os.makedirs(directory, exist_ok=True)
        if os.stat(directory).st_uid != uid:
            os.chown(directory, uid, uid)


def _select_granted(wanted: tuple[int, ...]) -> tuple[int, ...]:
    """Return the capabilities in `wanted` that the container engine granted to this process."""
    with open("/proc/self/status", "rb") as file:
        for line in file.read().splitlines():
            if line.startswith(b"CapPrm:"):
                granted = int(line.split()[1], 16)
                return tuple(number for number in wanted if granted >> number & 1)
    return ()


def _hide_command_line() -> None:
    """Overwrite this process's arguments and environment in /proc/1, which programs of the container can read."""
    import ctypes

    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    arg_start, arg_end = int(fields[45]), int(fields[46])
    environ = (int(fields[47]), int(fields[48]))
    for start, end in ((arg_start, arg_end), environ):
        if 0 < start < end:
            ctypes.memset(start, 0, end - start)
    ctypes.memmove(arg_start, b"sandbox", min(7, arg_end - arg_start))
