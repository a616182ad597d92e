"""The system calls that a sandboxed program may not make, as a filter for the kernel. Pure: bytes out.

Promises:
- calls of a foreign architecture, and x32's, end the program: they have other numbers, and could mean anything;
- what namespaces do not cover is refused: vsock and every socket family but unix, inet, inet6 and netlink (about
  which pid 1 is asked), keyrings, io_uring, ptrace and reading others' memory, new namespaces, mounts, bpf,
  userfaultfd, perf, modules, clocks, raw input to terminals, requests of asynchronous input (their number is one
  for the whole machine);
- no program delays or watches whoever uses a file that it can read: no file leases, no directory notifications;
- nothing makes the host load a module: of rare protocols and line disciplines not even the first is asked for;
- what is refused fails with an errno that programs know how to live with: `ENOSYS` where libraries have another
  way (clone3, io_uring), `EPERM` elsewhere.

It is a list of what is denied, not of what is allowed: untrusted programs are compilers, databases and test
suites, and a kernel adds calls every year. The walls are the namespaces, the dropped rights and the user; this
closes the doors that those leave.
"""

import errno
import struct

_LD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_NR, _ARCH, _ARGS = 0, 4, 16
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
ASK = 0x7FC00000
"""Pid 1 decides (`netlink`); without somebody to ask, the kernel refuses with `ENOSYS`."""

CLONE_NEW = 0x7E020080
"""Every namespace: mount, cgroup, uts, ipc, user, pid, net and time."""
_X32 = 0x40000000
_UNIX, _INET, _INET6, _NETLINK = _FAMILIES = (1, 2, 10, 16)
_INET_PROTOCOLS = (0, 1, 6, 17, 58)
"""Any, ICMP, TCP, UDP, ICMPv6."""
_NETLINK_PROTOCOLS = (0, 4, 15)
"""Routes, sockets, events of devices."""
_TERMINAL = (0x5412, 0x541C, 0x5423)
"""TIOCSTI, TIOCLINUX, TIOCSETD."""
_FCNTL = (1024, 1026, 1040)
"""F_SETLEASE, F_NOTIFY, F_SETDELEG: they delay whoever opens a file, or tell of what others do in a folder."""
_PERSONALITIES = (0, 0x8, 0x20000, 0x20008, 0x40000, 0x40008, 0xFFFFFFFF)
"""As it is, 32 bits, an old version, fixed addresses (debuggers), and asking."""

Step = tuple[int, int, int, int]
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# name: (x86_64, aarch64); -1 where an architecture does not have it
_NUMBERS = {
    "ioctl": (16, 29),
    "fcntl": (72, 25),
    "clone": (56, 220),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "unshare": (272, 97),
    "clone3": (435, 435),
    "personality": (135, 92),
    "io_setup": (206, 0),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "memfd_secret": (447, 447),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "statmount": (457, 457),
    "listmount": (458, 458),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "fanotify_init": (300, 262),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "create_module": (174, -1),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "iopl": (172, -1),
    "ioperm": (173, -1),
    "uselib": (134, -1),
    "vhangup": (153, 58),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "syslog": (103, 116),
    "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
}
_ABSENT = ("clone3", "io_setup", "io_uring_setup", "io_uring_enter", "io_uring_register", "memfd_secret")
"""Refused as if the kernel did not have them."""


def numbers(machine: str) -> dict[str, int]:
    """The calls by name, on this architecture."""
    at = list(AUDIT_ARCH).index(machine)
    return {name: both[at] for name, both in _NUMBERS.items() if both[at] >= 0}


def program(machine: str) -> bytes:
    """The filter, as the kernel takes it. `KeyError` where the architecture is none that we know."""
    arch = AUDIT_ARCH[machine]
    found = numbers(machine)
    code = [(_LD, 0, 0, _ARCH), (_JEQ, 1, 0, arch), (_RET, 0, 0, KILL), (_LD, 0, 0, _NR)]
    if machine == "x86_64":
        code += [(_JGE, 0, 1, _X32), (_RET, 0, 0, KILL)]
    leaves = {
        number: [_refuse(errno.ENOSYS if name in _ABSENT else errno.EPERM)] for name, number in found.items()
    }
    for name in ("clone", "unshare"):
        leaves[found[name]] = _looking(0, [(_JSET, 0, 1, CLONE_NEW), _refuse(errno.EPERM)])
    protocols = [
        *_protocols((_INET, _INET6), _INET_PROTOCOLS),
        *_protocols((_NETLINK,), _NETLINK_PROTOCOLS, ASK),
    ]
    leaves[found["socket"]] = _looking(0, [*protocols, *_only((_UNIX,), errno.EAFNOSUPPORT)])
    leaves[found["socketpair"]] = _looking(0, _only(_FAMILIES, errno.EAFNOSUPPORT))
    leaves[found["personality"]] = _looking(0, _only(_PERSONALITIES, errno.EPERM))
    for name, requests in (("ioctl", _TERMINAL), ("fcntl", _FCNTL)):
        body = [step for number in requests for step in ((_JEQ, 0, 1, number), _refuse(errno.EPERM))]
        leaves[found[name]] = _looking(1, body)
    code += _tree(_ranges(leaves))
    return b"".join(struct.pack("<HBBI", *step) for step in code)


def _ranges(leaves: dict[int, list[Step]]) -> list[tuple[int, list[Step]]]:
    """Where each stretch of calls begins that are answered alike, and how."""
    found: list[tuple[int, list[Step]]] = []
    for number in sorted({0, *leaves, *(number + 1 for number in leaves)}):
        steps = leaves.get(number, [(_RET, 0, 0, ALLOW)])
        if not found or found[-1][1] != steps:
            found.append((number, steps))
    return found


def _tree(ranges: list[tuple[int, list[Step]]]) -> list[Step]:
    """Halves again and again. The kernel tries every call there is on a filter that is installed: a list of
    comparisons costs each box a tenth of a millisecond more."""
    if len(ranges) == 1:
        return ranges[0][1]
    half = len(ranges) // 2
    left, right = _tree(ranges[:half]), _tree(ranges[half:])
    return [(_JGE, len(left), 0, ranges[half][0]), *left, *right]


def _refuse(number: int) -> Step:
    return (_RET, 0, 0, ERRNO | number)


def _only(values: tuple[int, ...], otherwise: int) -> list[Step]:
    """Goes on past its own end with one of these values, and refuses every other."""
    return [*((_JEQ, len(values) - at, 0, value) for at, value in enumerate(values)), _refuse(otherwise)]


def _protocols(families: tuple[int, ...], protocols: tuple[int, ...], answer: int = ALLOW) -> list[Step]:
    """Ends the matter for these families, by the third argument; with another it goes on past its own end."""
    inner = [(_LD, 0, 0, _ARGS + 16), *_only(protocols, errno.EPROTONOSUPPORT), (_RET, 0, 0, answer)]
    last = len(families) - 1
    heads = [(_JEQ, last - at, len(inner) if at == last else 0, family) for at, family in enumerate(families)]
    return [*heads, *inner]


def _looking(argument: int, body: list[Step]) -> list[Step]:
    """`body` looks at the low half of an argument, and falls through to allow it."""
    return [(_LD, 0, 0, _ARGS + 8 * argument), *body, (_RET, 0, 0, ALLOW)]
