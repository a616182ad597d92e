"""Build the seccomp filter of sandboxes: a BPF program that refuses dangerous system calls. Pure: returns bytes.

It runs in the keeper for local sandboxes, and in the process that starts a container.

Guarantees:
- a call of a foreign architecture or of the x32 ABI kills the program: its numbers mean other calls;
- what namespaces do not isolate is refused: vsock and all socket families but unix, inet, inet6 and netlink
  (for which pid 1 is asked), keyrings, io_uring, ptrace and access to the memory of other processes, new
  namespaces, mounts, bpf, userfaultfd, perf, kernel modules, clocks, injection of terminal input, and
  asynchronous I/O contexts, whose number is limited for the whole machine;
- no program can delay or watch other users of a file that it can read: file leases and directory notifications
  fail;
- no call makes the host load a kernel module: sockets of rare protocols and line disciplines are refused;
- refused calls fail with an errno that programs handle: `ENOSYS` if libraries have a fallback (clone3, io_uring),
  otherwise `EPERM`.

The filter lists what is denied, not what is allowed: untrusted programs are compilers, databases and test
suites, and every kernel adds calls. The isolation is done by namespaces, dropped capabilities and users; the
filter closes the gaps.

We assemble the program ourselves because libseccomp (through pyseccomp) cannot express it: a rule compares each
argument at most once, so it cannot refuse "all values but these". It is not done for speed: the filters of both
take the same time to install and to run (1.0x), and pyseccomp takes 5 ms more to import and 0.6 ms more to build
one (`python -m benchmarks libraries`, 2026-11-19).
"""

import errno
import struct

_LD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_NR, _ARCH, _ARGS = 0, 4, 16
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
USER_NOTIF = 0x7FC00000
"""Action: pid 1 decides about the call (`netlink_gate`). If it does not listen, the call fails with `ENOSYS`."""

CLONE_NEW_FLAGS = 0x7E020080
"""Flags of `clone` and `unshare` that create namespaces: mount, cgroup, uts, ipc, user, pid, net and time."""
_X32 = 0x40000000
_UNIX, _INET, _INET6, _NETLINK = _FAMILIES = (1, 2, 10, 16)
_INET_PROTOCOLS = (0, 1, 6, 17, 58)
"""Allowed protocols of IPv4 and IPv6 sockets: default, ICMP, TCP, UDP, ICMPv6."""
_NETLINK_PROTOCOLS = (0, 4, 15)
"""Netlink protocols that pid 1 may allow: NETLINK_ROUTE, NETLINK_SOCK_DIAG, NETLINK_KOBJECT_UEVENT."""
_TERMINAL_REQUESTS = (0x5412, 0x541C, 0x5423)
"""Refused requests of `ioctl`: TIOCSTI, TIOCLINUX, TIOCSETD."""
_FCNTL_COMMANDS = (1024, 1026, 1040)
"""Refused commands of `fcntl`: F_SETLEASE and F_SETDELEG delay other processes that open a file, and F_NOTIFY
reports what they do in a directory."""
_PERSONALITIES = (0, 0x8, 0x20000, 0x20008, 0x40000, 0x40008, 0xFFFFFFFF)
"""Allowed arguments of `personality`: Linux, 32 bit, UNAME26, ADDR_NO_RANDOMIZE (for debuggers), and the query
for the current value."""

Instruction = tuple[int, int, int, int]
"""BPF instruction: code, jump if true, jump if false, operand."""
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# name: (x86_64, aarch64); -1: the architecture does not have the call
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
"""Calls that are refused with ENOSYS, as if the kernel did not have them."""


def call_numbers(machine: str) -> dict[str, int]:
    """Return the numbers of the filtered system calls on an architecture."""
    column = list(AUDIT_ARCH).index(machine)
    return {name: numbers[column] for name, numbers in _NUMBERS.items() if numbers[column] >= 0}


def build_filter(machine: str) -> bytes:
    """Return the filter for an architecture as an array of `struct sock_filter`.

    Raise `KeyError` if the architecture is not supported.
    """
    arch = AUDIT_ARCH[machine]
    numbers = call_numbers(machine)
    code = [(_LD, 0, 0, _ARCH), (_JEQ, 1, 0, arch), (_RET, 0, 0, KILL), (_LD, 0, 0, _NR)]
    if machine == "x86_64":
        code += [(_JGE, 0, 1, _X32), (_RET, 0, 0, KILL)]
    actions = {
        number: [_refuse(errno.ENOSYS if name in _ABSENT else errno.EPERM)] for name, number in numbers.items()
    }
    for name in ("clone", "unshare"):
        actions[numbers[name]] = _check_argument(0, [(_JSET, 0, 1, CLONE_NEW_FLAGS), _refuse(errno.EPERM)])
    protocols = [
        *_check_protocol((_INET, _INET6), _INET_PROTOCOLS),
        *_check_protocol((_NETLINK,), _NETLINK_PROTOCOLS, USER_NOTIF),
    ]
    actions[numbers["socket"]] = _check_argument(0, [*protocols, *_only((_UNIX,), errno.EAFNOSUPPORT)])
    actions[numbers["socketpair"]] = _check_argument(0, _only(_FAMILIES, errno.EAFNOSUPPORT))
    actions[numbers["personality"]] = _check_argument(0, _only(_PERSONALITIES, errno.EPERM))
    for name, requests in (("ioctl", _TERMINAL_REQUESTS), ("fcntl", _FCNTL_COMMANDS)):
        body = [line for number in requests for line in ((_JEQ, 0, 1, number), _refuse(errno.EPERM))]
        actions[numbers[name]] = _check_argument(1, body)
    code += _build_search_tree(_group_ranges(actions))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


def _group_ranges(actions: dict[int, list[Instruction]]) -> list[tuple[int, list[Instruction]]]:
    """Divide system call numbers into ranges with the same action; return each range's first number and action.

    An action is a list of BPF instructions. System calls that are not in `actions` are allowed.
    """
    ranges: list[tuple[int, list[Instruction]]] = []
    for number in sorted({0, *actions, *(number + 1 for number in actions)}):
        action = actions.get(number, [(_RET, 0, 0, ALLOW)])
        if not ranges or ranges[-1][1] != action:
            ranges.append((number, action))
    return ranges


def _build_search_tree(ranges: list[tuple[int, list[Instruction]]]) -> list[Instruction]:
    """Return code that finds the range of a call by binary search.

    When a filter is installed, the kernel runs it for every call number. A linear list of comparisons would
    cost each sandbox a tenth of a millisecond more.
    """
    if len(ranges) == 1:
        return ranges[0][1]
    half = len(ranges) // 2
    left, right = _build_search_tree(ranges[:half]), _build_search_tree(ranges[half:])
    return [(_JGE, len(left), 0, ranges[half][0]), *left, *right]


def _refuse(number: int) -> Instruction:
    return (_RET, 0, 0, ERRNO | number)


def _only(values: tuple[int, ...], otherwise: int) -> list[Instruction]:
    """Return BPF instructions that compare the loaded value with `values`.

    If it is one of them, the instruction after these runs next. Otherwise the system call fails with the error
    number `otherwise`.
    """
    checks = ((_JEQ, len(values) - index, 0, value) for index, value in enumerate(values))
    return [*checks, _refuse(otherwise)]


def _check_protocol(
    families: tuple[int, ...], protocols: tuple[int, ...], action: int = ALLOW
) -> list[Instruction]:
    """Return code that decides calls of `socket` with these families by the protocol, their third argument."""
    inner = [(_LD, 0, 0, _ARGS + 16), *_only(protocols, errno.EPROTONOSUPPORT), (_RET, 0, 0, action)]
    last = len(families) - 1
    heads = [
        (_JEQ, last - index, len(inner) if index == last else 0, family) for index, family in enumerate(families)
    ]
    return [*heads, *inner]


def _check_argument(argument: int, body: list[Instruction]) -> list[Instruction]:
    """Return code that runs `body` on the low half of an argument and allows the call if `body` falls through."""
    return [(_LD, 0, 0, _ARGS + 8 * argument), *body, (_RET, 0, 0, ALLOW)]
