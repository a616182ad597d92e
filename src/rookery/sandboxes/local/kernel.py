"""The calls of the kernel that Python has no function for. Stand-alone: the zygote imports it, and little else.

Promises:
- a call that fails raises `OSError` with the kernel's errno, and says which call it was;
- `clone` returns twice, as `os.fork` does.
"""

import ctypes
import os
import struct

_libc = ctypes.CDLL(None, use_errno=True)
# Holds the interpreter's lock while it calls: a child that comes out of `clone` must have it.
_held = ctypes.PyDLL(None, use_errno=True)
_MACHINE = os.uname().machine

_NUMBERS = {
    "x86_64": {"pivot_root": 155, "capset": 126, "seccomp": 317, "clone": 56},
    "aarch64": {"pivot_root": 41, "capset": 91, "seccomp": 277, "clone": 220},
}.get(_MACHINE, {})
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
_OPEN_TREE, _MOVE_MOUNT, _CLONE3, _CLOSE_RANGE, _MOUNT_SETATTR = 428, 429, 435, 436, 442

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
INTO_CGROUP = 0x200000000
CLONE_PIDFD = 0x1000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC = 1, 2, 4, 8, 32, 4096, 16384
MS_PRIVATE, MS_SLAVE, MS_RELATIME, MS_MOVE = 1 << 18, 1 << 19, 1 << 21, 8192
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
"""Read-only comes with no set-user-id and no devices."""


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


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def clone(flags: int, *, cgroup: int = -1) -> tuple[int, int]:
    """A child in new namespaces and in that cgroup: (its pid, a pidfd), or (0, -1) in the child.

    Only for a process without threads: then there is nothing that the interpreter would have to put in order on
    either side, and what it does all the same costs the child half a millisecond."""
    pidfd = ctypes.c_int(-1)
    args = _CloneArgs(flags=flags | CLONE_PIDFD, exit_signal=17, pidfd=ctypes.addressof(pidfd))
    if cgroup >= 0:
        args.flags |= INTO_CGROUP
        args.cgroup = cgroup
    pid = _held.syscall(ctypes.c_long(_CLONE3), ctypes.byref(args), ctypes.c_size_t(ctypes.sizeof(args)))
    return (0, -1) if pid == 0 else (_checked(pid, "clone3"), pidfd.value)


def fork() -> int:
    """As `os.fork`, and as `clone` for a process without threads."""
    none = ctypes.c_long(0)
    call = ctypes.c_long(_NUMBERS["clone"])
    return _checked(_held.syscall(call, ctypes.c_long(17), none, none, none, none), "clone")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    _checked(
        _libc.mount(
            os.fsencode(source),
            os.fsencode(target),
            kind.encode() or None,
            ctypes.c_ulong(flags),
            options.encode() or None,
        ),
        f"mount {kind or source} at {target}",
    )


def mount_new(kind: str, target: str, options: list[tuple[str, str]]) -> bool:
    """A file system without set-user-id and devices, its options told one by one; False where this kernel knows
    no such way, or not one of them."""
    context = _libc.syscall(ctypes.c_long(_FSOPEN), kind.encode(), 1)
    if context < 0:
        return False
    try:
        for name, value in options:
            how, text = (1, os.fsencode(value)) if value else (0, None)
            call = ctypes.c_long(_FSCONFIG)
            if _libc.syscall(call, context, how, name.encode(), text, 0) < 0:
                if ctypes.get_errno() == 22:
                    return False
                _checked(-1, f"fsconfig {name} {value}")
        _checked(_libc.syscall(ctypes.c_long(_FSCONFIG), context, 6, None, None, 0), f"fsconfig {kind}")
        made = _checked(_libc.syscall(ctypes.c_long(_FSMOUNT), context, 1, 2 | 4), f"fsmount {kind}")
    finally:
        os.close(context)
    try:
        attach(made, target)
    finally:
        os.close(made)
    return True


def unmount(target: str, flags: int = MNT_DETACH) -> None:
    _checked(_libc.umount2(os.fsencode(target), flags), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    _checked(
        _libc.syscall(ctypes.c_long(_NUMBERS["pivot_root"]), os.fsencode(new), os.fsencode(old)), "pivot_root"
    )


def detached(path: str) -> int:
    """A copy of the mounts at a path that is mounted nowhere yet."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_RECURSIVE
    return _checked(
        _libc.syscall(ctypes.c_long(_OPEN_TREE), _AT_FDCWD, os.fsencode(path), flags), f"open_tree {path}"
    )


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


def protect(tree: int, users: int = -1) -> None:
    """Makes detached mounts read-only; with a user namespace, their owners are those that it maps them to."""
    wanted = _MountAttributes(set=_ATTR_READ_ONLY)
    if users >= 0:
        wanted.set |= _ATTR_IDMAP
        wanted.userns = users
    size = ctypes.c_size_t(ctypes.sizeof(wanted))
    call = ctypes.c_long(_MOUNT_SETATTR)
    flags = _AT_EMPTY_PATH | _AT_RECURSIVE
    _checked(_libc.syscall(call, tree, b"", flags, ctypes.byref(wanted), size), "mount_setattr")


def attach(tree: int, target: str) -> None:
    """Mounts what is detached at a path."""
    call = ctypes.c_long(_MOVE_MOUNT)
    flags = _MOVE_MOUNT_F_EMPTY_PATH
    _checked(_libc.syscall(call, tree, b"", _AT_FDCWD, os.fsencode(target), flags), f"move_mount at {target}")


def unshare(flags: int) -> None:
    _checked(_libc.unshare(flags), "unshare")


def setns(fd: int, kind: int = 0) -> None:
    _checked(_libc.setns(fd, kind), "setns")


def set_name(name: str) -> None:
    _prctl(_PR_SET_NAME, name.encode()[:15])


def die_with_parent(signal: int = 9) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal)


def set_dumpable(on: bool) -> None:
    _prctl(_PR_SET_DUMPABLE, int(on))


def keep_rights_as_another_user() -> None:
    """Being another user for a moment takes no right away from root."""
    _prctl(_PR_SET_SECUREBITS, _SECBIT_NO_SETUID_FIXUP)


def no_new_privileges() -> None:
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def keep_capabilities() -> None:
    """Becoming another user neither takes nor gives any, from here on and for good; nor does being user 0."""
    _prctl(_PR_SET_SECUREBITS, 0xCF)


def drop_bounding_set() -> None:
    """No program started from here on can have any capability, whatever its file says."""
    for capability in range(64):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break  # past the last one that this kernel has
    _libc.prctl(_PR_CAP_AMBIENT, 4, 0, 0, 0)


# Made once: a box that makes its own pays for each page of the keeper's that it touches.
_CAP_HEADER = (ctypes.c_uint32 * 2)(0x20080522, 0)
_CAPS = (ctypes.c_uint32 * 6)()


def drop_capabilities(*kept: int, idle: tuple[int, ...] = ()) -> None:
    """Of this process: all that is inheritable, and what is effective and permitted but these.

    Those that are `idle` have no effect until they are wanted: see `capable`.
    """
    global _kept  # noqa: PLW0603
    _kept = (sum(1 << number for number in kept), sum(1 << number for number in (*kept, *idle)))
    _set_capabilities(*_kept)


_kept = (0, 0)


class capable:  # noqa: N801  (it is used as a function is)
    """With one that is idle."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __enter__(self) -> None:
        effective, permitted = _kept
        _set_capabilities(effective | 1 << self._number, permitted)

    def __exit__(self, *_: object) -> None:
        _set_capabilities(*_kept)


def _set_capabilities(effective: int, permitted: int) -> None:
    _CAPS[0], _CAPS[1] = effective, permitted
    _checked(_libc.syscall(ctypes.c_long(_NUMBERS["capset"]), _CAP_HEADER, _CAPS), "capset")


class Filter(ctypes.Structure):
    """A program for seccomp, ready to be installed."""

    _fields_ = [("length", ctypes.c_ushort), ("at", ctypes.c_void_p)]

    def __init__(self, program: bytes) -> None:
        self._kept = ctypes.create_string_buffer(program, len(program))
        super().__init__(len(program) // 8, ctypes.addressof(self._kept))


def install_filter(program: Filter) -> int:
    """Install a seccomp filter for this process and all it starts, for good.

    Return a descriptor on which the kernel asks about calls that the filter leaves to us; -1 if it cannot ask (an
    old kernel, or somebody asked for such a descriptor before), and then refuses those calls.
    """
    call = ctypes.c_long(_NUMBERS["seccomp"])
    said = ctypes.byref(program)
    listener = _libc.syscall(call, _SECCOMP_SET_MODE_FILTER, _SECCOMP_NEW_LISTENER, said)
    if listener >= 0:
        return int(listener)
    _checked(_libc.syscall(call, _SECCOMP_SET_MODE_FILTER, 0, said), "seccomp")
    return -1


def unlink_open_file(fd: int) -> None:
    """Remove the name of an open file, without that name ever being a value of Python's.

    Sandboxes are forks of this process and may read its memory: nothing in it may name another sandbox's files.
    """
    name = ctypes.create_string_buffer(4097)
    link = ctypes.create_string_buffer(b"/proc/self/fd/%d" % fd)
    try:
        size = _checked(_libc.readlink(link, name, 4096), "readlink")
        if size < 4096:
            _checked(_libc.unlink(name), "unlink")
    finally:
        ctypes.memset(name, 0, 4097)


def scope_abstract_sockets() -> None:
    """Keep this process and all it starts from abstract Unix sockets that others made.

    All processes of one network namespace share these. It takes Landlock of Linux 6.12; without, nothing happens.
    """
    attributes = struct.pack("<QQQ", 0, 0, _SCOPE_ABSTRACT_UNIX_SOCKET)
    rules = _libc.syscall(ctypes.c_long(_LANDLOCK_CREATE_RULESET), attributes, ctypes.c_size_t(24), 0)
    if rules < 0:
        return
    try:
        _checked(_libc.syscall(ctypes.c_long(_LANDLOCK_RESTRICT_SELF), rules, 0), "landlock_restrict_self")
    finally:
        os.close(rules)


def close_range(first: int, last: int = 0xFFFFFFFF) -> None:
    _checked(
        _libc.syscall(ctypes.c_long(_CLOSE_RANGE), ctypes.c_uint(first), ctypes.c_uint(last), 0), "close_range"
    )


def _prctl(option: int, value: object) -> None:
    _checked(_libc.prctl(option, value, 0, 0, 0), f"prctl {option}")
