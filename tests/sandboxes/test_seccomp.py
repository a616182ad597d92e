"""Seccomp filter: its decision for every call, and that the kernel enforces it."""

import errno
import os
import struct
import subprocess
import sys
import textwrap

import pytest

from rookery.sandbox_runtime import seccomp

X86, ARM = "x86_64", "aarch64"
I386, FOREIGN_ARM = 0x40000003, 0x40000028
ORDINARY_CALLS = {  # calls that every program needs
    X86: {"read": 0, "write": 1, "mmap": 9, "fork": 57, "vfork": 58, "execve": 59, "kill": 62, "openat": 257,
          "prlimit64": 302, "memfd_create": 319, "statx": 332, "pidfd_open": 434, "seccomp": 317, "prctl": 157},
    ARM: {"read": 63, "write": 64, "mmap": 222, "execve": 221, "kill": 129, "openat": 56, "prlimit64": 261,
          "memfd_create": 279, "statx": 291, "pidfd_open": 434, "seccomp": 277, "prctl": 167},
}  # fmt: skip
NAMESPACES = (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
THREAD = 0x3D0F00
"""The flags of a new thread."""
BY_ARGUMENT = {"clone", "unshare", "socket", "socketpair", "personality", "ioctl", "fcntl"}


def run_filter(program: bytes, arch: int, number: int, *args: int) -> int:
    """Interpret the BPF program for one system call, as the kernel does."""
    padded = (*args, *[0] * (6 - len(args)))
    data = struct.pack("<iIQ6Q", number if number < 1 << 31 else number - (1 << 32), arch, 0, *padded)
    steps = [struct.unpack_from("<HBBI", program, at) for at in range(0, len(program), 8)]
    accumulator, at = 0, 0
    for _ in range(len(steps) + 1):
        code, yes, no, value = steps[at]
        at += 1
        if code == 0x20:
            assert value % 4 == 0
            accumulator = struct.unpack_from("<I", data, value)[0]
        elif code == 0x06:
            return int(value)
        else:
            test = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
            at += yes if test else no
    raise AssertionError("the filter does not end")


def errno_action(number: int) -> int:
    return seccomp.ERRNO | number


@pytest.fixture(params=[X86, ARM])
def machine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Filter:
    def __init__(self, machine: str) -> None:
        self.arch = seccomp.AUDIT_ARCH[machine]
        self.program = seccomp.build_filter(machine)
        self.numbers = seccomp.call_numbers(machine)

    def decide(self, name: str | int, *args: int) -> int:
        return run_filter(self.program, self.arch, self.numbers[name] if isinstance(name, str) else name, *args)


@pytest.fixture
def seccomp_filter(machine: str) -> Filter:
    return Filter(machine)


def test_ordinary_calls_are_allowed(seccomp_filter: Filter, machine: str) -> None:
    for name, number in ORDINARY_CALLS[machine].items():
        assert seccomp_filter.decide(number) == seccomp.ALLOW, name


def test_calls_that_namespaces_do_not_cover_are_refused(seccomp_filter: Filter) -> None:
    for name in set(seccomp_filter.numbers) - BY_ARGUMENT:
        absent = name in ("clone3", "memfd_secret", "io_setup") or name.startswith("io_uring")
        assert seccomp_filter.decide(name) == errno_action(errno.ENOSYS if absent else errno.EPERM), name


def test_dangerous_calls_are_filtered(seccomp_filter: Filter) -> None:
    named = {"add_key", "keyctl", "request_key", "io_uring_setup", "ptrace", "process_vm_readv", "unshare",
             "setns", "bpf", "userfaultfd", "perf_event_open", "mount", "pivot_root", "chroot", "acct",
             "open_by_handle_at", "kexec_load", "init_module", "reboot", "swapon", "settimeofday", "clone",
             "clone3", "socket",
             "personality", "ioctl"}  # fmt: skip
    assert named <= set(seccomp_filter.numbers)


def test_foreign_architecture_kills_the_program(seccomp_filter: Filter, machine: str) -> None:
    other = seccomp.AUDIT_ARCH[ARM if machine == X86 else X86]
    for arch in (I386, FOREIGN_ARM, other, 0):
        for number in (0, 1, 20, 39, 435):
            assert run_filter(seccomp_filter.program, arch, number) == seccomp.KILL


def test_x32_abi_kills_the_program() -> None:
    seccomp_filter = Filter(X86)
    for number in (0x40000000, 0x40000000 | 39, 0x40000000 | 520, 0x7FFFFFFF):
        assert seccomp_filter.decide(number) == seccomp.KILL


def test_clone_is_allowed_without_namespaces(seccomp_filter: Filter) -> None:
    for plain in (17, THREAD, 0x4111, 0x1200011):
        assert seccomp_filter.decide("clone", plain) == seccomp.ALLOW
    for flag in NAMESPACES:
        assert seccomp_filter.decide("clone", flag | 17) == errno_action(errno.EPERM), hex(flag)
        assert seccomp_filter.decide("unshare", flag) == errno_action(errno.EPERM), hex(flag)
        assert seccomp_filter.decide("unshare", flag | THREAD) == errno_action(errno.EPERM), hex(flag)
    assert seccomp_filter.decide("unshare", 0x400) == seccomp.ALLOW  # an own table of descriptors


def test_socket_families_are_restricted(seccomp_filter: Filter) -> None:
    for family in range(64):
        known = family in (1, 2, 10, 16)
        expected = seccomp.ALLOW if known else errno_action(errno.EAFNOSUPPORT)
        of_socket = seccomp.USER_NOTIF if family == 16 else expected
        assert seccomp_filter.decide("socket", family, 1, 0) == of_socket, family
        assert seccomp_filter.decide("socketpair", family, 1, 0) == expected, family
    junk = 0xDEADBEEF << 32  # the kernel uses the low half
    assert seccomp_filter.decide("socket", junk | 40, 1, 0) == errno_action(errno.EAFNOSUPPORT)
    assert seccomp_filter.decide("socket", junk | 2, junk | 1, junk | 6) == seccomp.ALLOW


def test_socket_protocols_are_restricted(seccomp_filter: Filter) -> None:
    for family in (2, 10):
        for protocol in (0, 1, 6, 17, 58):
            assert seccomp_filter.decide("socket", family, 1, protocol) == seccomp.ALLOW
        for protocol in (2, 33, 47, 115, 132, 136, 255, 262):
            assert seccomp_filter.decide("socket", family, 1, protocol) == errno_action(errno.EPROTONOSUPPORT)
    for protocol in range(32):
        expected = seccomp.USER_NOTIF if protocol in (0, 4, 15) else errno_action(errno.EPROTONOSUPPORT)
        assert seccomp_filter.decide("socket", 16, 3, protocol) == expected
    assert seccomp_filter.decide("socket", 1, 1, 77) == seccomp.ALLOW


def test_terminal_injection_is_refused(seccomp_filter: Filter) -> None:
    for request in (0x5412, 0x541C, 0x5423, 1 << 32 | 0x5412):
        assert seccomp_filter.decide("ioctl", 0, request, 0) == errno_action(errno.EPERM)
        assert seccomp_filter.decide("ioctl", 0x5412, 0x5401, request) == seccomp.ALLOW
    for request in (0x5401, 0x5413, 0x5410, 0x540E):
        assert seccomp_filter.decide("ioctl", 0, request, 0) == seccomp.ALLOW


def test_file_leases_and_dnotify_are_refused(seccomp_filter: Filter) -> None:
    for request in (1024, 1026, 1040, 1 << 32 | 1024):
        assert seccomp_filter.decide("fcntl", 0, request, 1) == errno_action(errno.EPERM)
    for request in (0, 1, 2, 3, 4, 6, 38, 1025, 1030, 1031, 1033):
        assert seccomp_filter.decide("fcntl", 0, request, 1) == seccomp.ALLOW


def test_personalities_are_restricted(seccomp_filter: Filter) -> None:
    for value in (0, 8, 0x20000, 0x40000, 0xFFFFFFFF):
        assert seccomp_filter.decide("personality", value) == seccomp.ALLOW
    for value in (0x400000, 0x100000, 0x440000, 1, 6):
        assert seccomp_filter.decide("personality", value) == errno_action(errno.EPERM)


def test_every_path_of_the_filter_returns(machine: str) -> None:
    program = seccomp.build_filter(machine)
    steps = [struct.unpack_from("<HBBI", program, at) for at in range(0, len(program), 8)]
    assert len(program) % 8 == 0
    assert len(steps) < 4096
    for at, (code, yes, no, value) in enumerate(steps):
        if code in (0x15, 0x35, 0x45):
            assert max(yes, no) + at + 1 < len(steps)
        elif code == 0x06:
            assert value & 0xFFFF0000 in (seccomp.ALLOW, seccomp.KILL, seccomp.ERRNO, seccomp.USER_NOTIF)
    assert steps[-1][0] == 0x06


def test_unknown_architecture_is_refused() -> None:
    with pytest.raises(KeyError):
        seccomp.build_filter("vax")


@pytest.mark.skipif(os.uname().machine not in seccomp.AUDIT_ARCH, reason="[probed] another architecture")
def test_kernel_enforces_the_filter() -> None:
    script = textwrap.dedent("""
        import ctypes, os, sys
        from rookery.sandbox_runtime import seccomp, syscalls
        syscalls.no_new_privileges()
        syscalls.install_seccomp_filter(syscalls.SeccompFilter(seccomp.build_filter(os.uname().machine)))
        libc = ctypes.CDLL(None, use_errno=True)
        numbers = seccomp.call_numbers(os.uname().machine)
        wrong = []
        for name, number in numbers.items():
            if name in ("clone", "socket", "socketpair", "ioctl", "fcntl", "personality"):
                continue
            flags = 0x10000000 if name == "unshare" else 0
            got = libc.syscall(ctypes.c_long(number), ctypes.c_long(flags), *[ctypes.c_long(0)] * 5)
            if got >= 0 or ctypes.get_errno() not in (1, 38):
                wrong.append((name, got, ctypes.get_errno()))
        pid = os.fork()
        if pid == 0:
            os._exit(7)
        print(wrong, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """)
    argv = [sys.executable, "-c", script]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "[] 7\n", (done.stdout, done.stderr)
