"""The class of hostile programs, and source text that they share.

- A program that could harm a machine first checks where it runs, and refuses to start outside of a sandbox.
- A program that tests the isolation prints `contained` as its last line, or what it could do.
"""

import os
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rookery.core import ExecStatus

MB = 1 << 20

PRELUDE = textwrap.dedent("""\
    import os, sys
    with open("/proc/1/cmdline", "rb") as file:
        first = file.read().strip(b"\\0 ")
    if first != b"sandbox" or os.uname().nodename != "sandbox":
        sys.exit("refused: this is no sandbox")
""")
"""Start of every program: refuses to run outside of a sandbox."""

TOOLS = textwrap.dedent("""\
    import ctypes, errno, signal, struct, subprocess, time
    libc = ctypes.CDLL(None, use_errno=True)
    escaped = []

    def call(number, *args):
        "Make a system call. Return its result, or the negated errno."
        ctypes.set_errno(0)
        wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
        got = libc.syscall(ctypes.c_long(number), *wide)
        return -ctypes.get_errno() if got < 0 else got

    def refused(what, got, *allowed):
        "Record an escape unless `got` is a negated errno, one of `allowed` if given."
        if got >= 0 or (allowed and -got not in allowed):
            escaped.append(f"{what}: {got} {os.strerror(-got) if got < 0 else ''}")

    def fails(what, function, *args, allowed=()):
        try:
            got = function(*args)
        except OSError as error:
            if allowed and error.errno not in allowed:
                escaped.append(f"{what}: {error}")
        else:
            escaped.append(f"{what}: worked, {got!r:.200}")

    def holds(what, fact):
        if not fact:
            escaped.append(what)

    def warm_interpreter(name):
        # In a sandbox with a single user, programs can see the interpreter that starts warm commands.
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                found = file.read().endswith(b"\\0/proc/self/fd/4\\0")
        except OSError:
            return False
        return found and os.stat("/etc").st_uid == os.getuid()

    def done():
        print("ESCAPED " + "; ".join(escaped) if escaped else "contained", flush=True)
        os._exit(1 if escaped else 0)
""")
SYSCALLS: Mapping[str, Mapping[str, int]] = {
    "x86_64": {
        "unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "clone": 56,
        "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "add_key": 248,
        "request_key": 249, "keyctl": 250, "bpf": 321, "userfaultfd": 323, "perf_event_open": 298,
        "open_by_handle_at": 304, "name_to_handle_at": 303, "init_module": 175, "finit_module": 313,
        "delete_module": 176, "kexec_load": 246, "kexec_file_load": 320, "reboot": 169, "swapon": 167,
        "swapoff": 168, "settimeofday": 164, "clock_settime": 227, "adjtimex": 159, "sethostname": 170,
        "setdomainname": 171, "acct": 163, "syslog": 103, "fanotify_init": 300, "personality": 135,
        "mknod": 259, "setresuid": 117, "setresgid": 119, "setgroups": 116, "capset": 126, "getpid": 39,
        "quotactl": 179, "vhangup": 153, "timer_create": 222, "mq_open": 240, "shmget": 29, "shmat": 30,
        "msgget": 68, "msgsnd": 69, "semget": 64, "iopl": 172, "ioperm": 173, "mlockall": 151,
    },
    "aarch64": {
        "unshare": 97, "setns": 268, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "clone": 220,
        "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "add_key": 217,
        "request_key": 218, "keyctl": 219, "bpf": 280, "userfaultfd": 282, "perf_event_open": 241,
        "open_by_handle_at": 265, "name_to_handle_at": 264, "init_module": 105, "finit_module": 273,
        "delete_module": 106, "kexec_load": 104, "kexec_file_load": 294, "reboot": 142, "swapon": 224,
        "swapoff": 225, "settimeofday": 170, "clock_settime": 112, "adjtimex": 171, "sethostname": 161,
        "setdomainname": 162, "acct": 89, "syslog": 116, "fanotify_init": 262, "personality": 92,
        "mknod": 33, "setresuid": 147, "setresgid": 149, "setgroups": 159, "capset": 91, "getpid": 172,
        "quotactl": 60, "vhangup": 58, "timer_create": 107, "mq_open": 180, "shmget": 194, "shmat": 196,
        "msgget": 186, "msgsnd": 189, "semget": 190, "mlockall": 230,
    },
}  # fmt: skip
COMMON_SYSCALLS = {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
        "move_mount": 429, "fsopen": 430, "fsmount": 432, "fspick": 433, "pidfd_open": 434, "clone3": 435,
        "pidfd_getfd": 438, "mount_setattr": 442, "memfd_secret": 447,
        "statmount": 457, "listmount": 458}  # fmt: skip
"""Numbers that are the same on every architecture."""


@dataclass(frozen=True, kw_only=True)
class HostileProgram:
    """One hostile program."""

    name: str
    text: str
    status: tuple[ExecStatus, ...] = ("exited",)
    """Statuses that it may end with."""
    limits: Mapping[str, Any] = field(default_factory=dict)
    """Limits of its sandbox that differ from the default."""
    signal: int | None = None
    reports: bool = False
    """True if its last line must be `contained`."""
    leaves_processes: bool = False
    """True if it may leave processes, which must end with the sandbox."""
    argv: tuple[str, ...] = ("python3", "-c")
    warm: bool = False
    """True if it runs as a fork of a warm interpreter."""

    @property
    def source(self) -> str:
        if self.argv[0] != "python3":
            return self.text
        numbers = {**COMMON_SYSCALLS, **SYSCALLS.get(os.uname().machine, {})}
        tools = f"{TOOLS}nr = {numbers!r}\n" if self.reports else "import signal, time\n"
        return PRELUDE + tools + textwrap.dedent(self.text) + ("\ndone()\n" if self.reports else "")

    @property
    def command(self) -> tuple[str, ...]:
        return (*self.argv, self.source)


def isolation_check(name: str, text: str, **more: Any) -> HostileProgram:
    """Return a program that tests one aspect of the isolation and exits."""
    return HostileProgram(name=name, text=text, reports=True, **more)
