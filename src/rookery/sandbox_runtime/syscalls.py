"""ctypes wrappers for Linux system calls that are missing from `os`. Runs in the keeper and in pid 1 of sandboxes.

A call that fails raises `OSError` with the kernel's errno and the name of the call.
"""

import ctypes
import os
import struct

_libc = ctypes.CDLL(None, use_errno=True)
# Keeps the GIL during the call: the child that returns from `clone` must hold it.
_libc_with_gil = ctypes.PyDLL(None, use_errno=True)
_MACHINE = os.uname().machine

_NUMBERS = {
    "x86_64": {"pivot_root": 155, "capset": 126, "seccomp": 317, "clone": 56},
    "aarch64": {"pivot_root": 41, "capset": 91, "seccomp": 277, "clone": 220},
}.get(_MACHINE, {})
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
_OPEN_TREE, _MOVE_MOUNT, _CLONE3, _CLOSE_RANGE, _MOUNT_SETATTR = 428, 429, 435, 436, 442

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
CLONE_INTO_CGROUP = 0x200000000
CLONE_PIDFD = 0x1000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC = 1, 2, 4, 8, 32, 4096, 16384
MS_PRIVATE, MS_RELATIME = 1 << 18, 1 << 21
MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 4, 24
_PR_SET_NO_NEW_PRIVS, _PR_SET_NAME, _PR_CAP_AMBIENT = 38, 15, 47
_PR_SET_SECUREBITS, _SECBIT_NO_SETUID_FIXUP = 28, 4
CAP_DAC_READ_SEARCH, CAP_KILL, CAP_SETGID, CAP_SETUID, CAP_SYS_PTRACE, CAP_SYS_RESOURCE = 2, 5, 6, 7, 19, 24
_SECCOMP_SET_MODE_FILTER, _SECCOMP_NEW_LISTENER = 1, 8
_LANDLOCK_CREATE_RULESET, _LANDLOCK_RESTRICT_SELF, _SCOPE_ABSTRACT_UNIX_SOCKET = 444, 446, 1
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH = 1, 4
_ATTR_READ_ONLY, _ATTR_IDMAP = 1 | 2 | 4, 0x100000
"""Read-only, without set-user-id and without devices."""


class _CloneArgs(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "flags",
            "pidfd",
            "child_tid",
            "parent_tid",
            "exit_signal",
            "stack",
            "stack_size",
            "tls",
            "set_tid",
            "set_tid_size",
            "cgroup",
        )
    ]


def _check(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


def clone(flags: int, *, cgroup: int = -1) -> tuple[int, int]:
    """Fork a child into new namespaces and, if given, the cgroup v2 directory that is open as `cgroup`.

    Return (pid, pidfd) in the parent and (0, -1) in the child.

    Only for single-threaded processes: the interpreter's own work around a fork, which takes the child half a
    millisecond, is skipped.
    """
    pidfd = ctypes.c_int(-1)
    args = _CloneArgs(flags=flags | CLONE_PIDFD, exit_signal=17, pidfd=ctypes.addressof(pidfd))
    if cgroup >= 0:
        args.flags |= CLONE_INTO_CGROUP
        args.cgroup = cgroup
    pid = _libc_with_gil.syscall(ctypes.c_long(_CLONE3), ctypes.byref(args), ctypes.c_size_t(ctypes.sizeof(args)))
    return (0, -1) if pid == 0 else (_check(pid, "clone3"), pidfd.value)


def fork() -> int:
    """Fork like `os.fork`, without the interpreter's own work. Only for single-threaded processes."""
    none = ctypes.c_long(0)
    call = ctypes.c_long(_NUMBERS["clone"])
    return _check(_libc_with_gil.syscall(call, ctypes.c_long(17), none, none, none, none), "clone")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    _check(
        _libc.mount(
            os.fsencode(source),
            os.fsencode(target),
            kind.encode() or None,
            ctypes.c_ulong(flags),
            options.encode() or None,
        ),
        f"mount {kind or source} at {target}",
    )


def mount_filesystem(kind: str, target: str, options: list[tuple[str, str]]) -> bool:
    """Mount a new file system with fsopen, fsconfig and fsmount, which take any number of options.

    Return False if the kernel does not have these calls or does not know an option.
    """
    context = _libc.syscall(ctypes.c_long(_FSOPEN), kind.encode(), 1)
    if context < 0:
        return False
    try:
        for name, value in options:
            command, text = (1, os.fsencode(value)) if value else (0, None)
            call = ctypes.c_long(_FSCONFIG)
            if _libc.syscall(call, context, command, name.encode(), text, 0) < 0:
                if ctypes.get_errno() == 22:
                    return False
                _check(-1, f"fsconfig {name} {value}")
        _check(_libc.syscall(ctypes.c_long(_FSCONFIG), context, 6, None, None, 0), f"fsconfig {kind}")
        tree = _check(_libc.syscall(ctypes.c_long(_FSMOUNT), context, 1, 2 | 4), f"fsmount {kind}")
    finally:
        os.close(context)
    try:
        move_mount(tree, target)
    finally:
        os.close(tree)
    return True


def unmount(target: str) -> None:
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    _check(_libc.syscall(ctypes.c_long(_NUMBERS["pivot_root"]), os.fsencode(new), os.fsencode(old)), "pivot_root")


def open_detached_tree(path: str) -> int:
    """Return a file descriptor of a copy of the mounts at a path. The copy is not mounted anywhere."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_RECURSIVE
    return _check(
        _libc.syscall(ctypes.c_long(_OPEN_TREE), _AT_FDCWD, os.fsencode(path), flags), f"open_tree {path}"
    )


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


def make_read_only(tree: int, user_namespace: int = -1) -> None:
    """Make detached mounts read-only. With a user namespace, map the files' owners through it."""
    attributes = _MountAttributes(set=_ATTR_READ_ONLY)
    if user_namespace >= 0:
        attributes.set |= _ATTR_IDMAP
        attributes.userns = user_namespace
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    call = ctypes.c_long(_MOUNT_SETATTR)
    flags = _AT_EMPTY_PATH | _AT_RECURSIVE
    _check(_libc.syscall(call, tree, b"", flags, ctypes.byref(attributes), size), "mount_setattr")


def move_mount(tree: int, target: str) -> None:
    """Mount a detached mount at a path."""
    call = ctypes.c_long(_MOVE_MOUNT)
    flags = _MOVE_MOUNT_F_EMPTY_PATH
    _check(_libc.syscall(call, tree, b"", _AT_FDCWD, os.fsencode(target), flags), f"move_mount at {target}")


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, kind: int = 0) -> None:
    _check(_libc.setns(fd, kind), "setns")


def set_name(name: str) -> None:
    _prctl(_PR_SET_NAME, name.encode()[:15])


def die_with_parent(signal: int = 9) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal)


def set_dumpable(on: bool) -> None:
    _prctl(_PR_SET_DUMPABLE, int(on))


def keep_capabilities_on_seteuid() -> None:
    """Let this process keep its capabilities when root changes its effective user."""
    _prctl(_PR_SET_SECUREBITS, _SECBIT_NO_SETUID_FIXUP)


def no_new_privileges() -> None:
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def lock_capabilities() -> None:
    """Make capabilities independent of the user: from now on, neither a change of user nor being user 0 adds or
    removes any. This cannot be undone."""
    _prctl(_PR_SET_SECUREBITS, 0xCF)


def drop_bounding_set() -> None:
    """Keep all programs that are executed from now on from gaining capabilities through their files."""
    for capability in range(64):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break  # after the last capability of this kernel
    _libc.prctl(_PR_CAP_AMBIENT, 4, 0, 0, 0)


# Allocated once: a sandbox would copy the keeper's memory pages to allocate its own.
_CAP_HEADER = (ctypes.c_uint32 * 2)(0x20080522, 0)
_CAPS = (ctypes.c_uint32 * 6)()


def drop_capabilities(*effective: int, permitted: tuple[int, ...] = ()) -> None:
    """Drop all capabilities of this process except those in `effective` and `permitted`.

    Capabilities in `permitted` have no effect until `raised_capability` makes them effective.
    """
    global _capability_sets  # noqa: PLW0603
    all_permitted = (*effective, *permitted)
    _capability_sets = (sum(1 << number for number in effective), sum(1 << number for number in all_permitted))
    _set_capabilities(*_capability_sets)


_capability_sets = (0, 0)


class raised_capability:  # noqa: N801  (used like a function)
    """Context manager that makes a permitted capability effective inside its block."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __enter__(self) -> None:
        effective, permitted = _capability_sets
        _set_capabilities(effective | 1 << self._number, permitted)

    def __exit__(self, *_: object) -> None:
        _set_capabilities(*_capability_sets)


def _set_capabilities(effective: int, permitted: int) -> None:
    _CAPS[0], _CAPS[1] = effective, permitted
    _check(_libc.syscall(ctypes.c_long(_NUMBERS["capset"]), _CAP_HEADER, _CAPS), "capset")


class SeccompFilter(ctypes.Structure):
    """`struct sock_fprog`: a BPF program that can be installed with `install_seccomp_filter`."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]

    def __init__(self, program: bytes) -> None:
        self._memory = ctypes.create_string_buffer(program, len(program))
        super().__init__(len(program) // 8, ctypes.addressof(self._memory))


def install_seccomp_filter(program: SeccompFilter) -> int:
    """Install a seccomp filter for this process and all its descendants. It cannot be removed.

    Return a file descriptor on which the kernel asks about calls with the action `USER_NOTIF`. Return -1 if the
    kernel is too old or such a descriptor exists already; the kernel then refuses those calls.
    """
    call = ctypes.c_long(_NUMBERS["seccomp"])
    argument = ctypes.byref(program)
    listener = _libc.syscall(call, _SECCOMP_SET_MODE_FILTER, _SECCOMP_NEW_LISTENER, argument)
    if listener >= 0:
        return int(listener)
    _check(_libc.syscall(call, _SECCOMP_SET_MODE_FILTER, 0, argument), "seccomp")
    return -1


def unlink_open_file(fd: int) -> None:
    """Delete an open file by its path, without storing the path in a Python object.

    Sandboxes are forks of this process and may read its memory, which must not name the files of other sandboxes.
    """
    name = ctypes.create_string_buffer(4097)
    link = ctypes.create_string_buffer(b"/proc/self/fd/%d" % fd)
    try:
        size = _check(_libc.readlink(link, name, 4096), "readlink")
        if size < 4096:
            _check(_libc.unlink(name), "unlink")
    finally:
        ctypes.memset(name, 0, 4097)


def scope_abstract_sockets() -> None:
    """Keep this process and its descendants from connecting to abstract Unix sockets of other processes.

    All processes of a network namespace share these sockets. Needs Landlock of Linux 6.12; older kernels ignore
    it.
    """
    attributes = struct.pack("<QQQ", 0, 0, _SCOPE_ABSTRACT_UNIX_SOCKET)
    rules = _libc.syscall(ctypes.c_long(_LANDLOCK_CREATE_RULESET), attributes, ctypes.c_size_t(24), 0)
    if rules < 0:
        return
    try:
        _check(_libc.syscall(ctypes.c_long(_LANDLOCK_RESTRICT_SELF), rules, 0), "landlock_restrict_self")
    finally:
        os.close(rules)


def close_range(first: int, last: int = 0xFFFFFFFF) -> None:
    _check(_libc.syscall(ctypes.c_long(_CLOSE_RANGE), ctypes.c_uint(first), ctypes.c_uint(last), 0), "close_range")


def _prctl(option: int, value: object) -> None:
    _check(_libc.prctl(option, value, 0, 0, 0), f"prctl {option}")
