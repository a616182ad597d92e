"""Kernel attack surface: each program makes system calls that sandboxes must refuse."""

import os

from tests.sandboxes.hostile.program import HostileProgram, isolation_check

_EPERM_ONLY = {
    "changes_the_clock": ("settimeofday", "clock_settime", "adjtimex"),
    "loads_modules": ("init_module", "finit_module", "delete_module"),
    "boots_another_kernel": ("kexec_load", "kexec_file_load", "reboot"),
    "swaps": ("swapon", "swapoff"),
    "uses_keyrings": ("add_key", "request_key", "keyctl"),
    "uses_bpf": ("bpf",),
    "watches_performance": ("perf_event_open",),
    "handles_page_faults": ("userfaultfd",),
    "opens_by_handle": ("open_by_handle_at", "name_to_handle_at"),
    "keeps_accounts": ("acct", "quotactl", "vhangup", "syslog", "fanotify_init"),
    "changes_mounts": ("mount", "umount2", "pivot_root", "chroot"),
    "changes_mounts_the_new_way": (
        "open_tree", "move_mount", "fsopen", "fsmount", "fspick", "mount_setattr", "statmount", "listmount",
    ),
}  # fmt: skip

X86 = [
    HostileProgram(
        name="calls_as_a_32_bit_program",
        text="""
            import ctypes, mmap
            page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
            page.write(bytes.fromhex("53b814000000cd805bc3"))  # getpid through int 0x80
            start = ctypes.addressof(ctypes.c_char.from_buffer(page))
            print("survived", ctypes.CFUNCTYPE(ctypes.c_int)(start)(), flush=True)
        """,
        status=("signaled",),
        signal=31,
    ),
    HostileProgram(
        name="calls_as_an_x32_program",
        text="""
            import ctypes
            print("survived", ctypes.CDLL(None).syscall(ctypes.c_long(0x40000000 | 39)), flush=True)
        """,
        status=("signaled",),
        signal=31,
    ),
    isolation_check(
        "talks_to_ports",
        """
            refused("iopl", call(nr["iopl"], 3), errno.EPERM)
            refused("ioperm", call(nr["ioperm"], 0, 1024, 1), errno.EPERM)
        """,
    ),
]

PROGRAMS = [
    *(
        isolation_check(
            name, f"for name in {calls!r}:\n    refused(name, call(nr[name], 0, 0, 0, 0, 0), errno.EPERM)"
        )
        for name, calls in _EPERM_ONLY.items()
    ),
    isolation_check(
        "uses_io_uring",
        """
            for name in ("io_uring_setup", "io_uring_enter", "io_uring_register"):
                refused(name, call(nr[name], 8, ctypes.create_string_buffer(120), 0, 0), errno.ENOSYS)
            refused("memfd_secret", call(nr["memfd_secret"], 0), errno.ENOSYS)
        """,
    ),
    isolation_check(
        "makes_namespaces",
        """
            kinds = {"time": 0x80, "mount": 0x20000, "cgroup": 0x2000000, "uts": 0x4000000, "ipc": 0x8000000,
                     "user": 0x10000000, "pid": 0x20000000, "net": 0x40000000}
            for name, flag in kinds.items():
                refused(f"unshare {name}", call(nr["unshare"], flag), errno.EPERM)
                refused(f"unshare user+{name}", call(nr["unshare"], flag | kinds["user"]), errno.EPERM)
                if name != "time":
                    got = call(nr["clone"], flag | 17, 0, 0, 0, 0)
                    if got == 0:
                        os._exit(0)
                    refused(f"clone {name}", got, errno.EPERM)
                got = call(nr["clone3"], struct.pack("11Q", flag, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0), 88)
                if got == 0:
                    os._exit(0)
                refused(f"clone3 {name}", got, errno.ENOSYS)
        """,
    ),
    isolation_check(
        "enters_namespaces",
        """
            for name in ("mnt", "net", "pid", "user", "uts", "ipc", "cgroup"):
                fd = os.open(f"/proc/self/ns/{name}", os.O_RDONLY)
                refused(f"setns {name}", call(nr["setns"], fd, 0), errno.EPERM)
            fd = call(nr["pidfd_open"], 1, 0)
            if fd >= 0:
                refused("setns of the first process", call(nr["setns"], fd, 0x20000), errno.EPERM)
                refused("a descriptor of the first process", call(nr["pidfd_getfd"], fd, 0, 0), errno.EPERM)
        """,
    ),
    isolation_check(
        "traces_others",
        """
            child = os.fork()
            if child == 0:
                signal.pause()
            try:
                for pid in (1, child):
                    for request in (16, 0x4206):
                        refused(f"ptrace {request} of {pid}", call(nr["ptrace"], request, pid, 0, 0), errno.EPERM)
                    piece = ctypes.create_string_buffer(64)
                    vector = struct.pack("PN", ctypes.addressof(piece), 64)
                    for name in ("process_vm_readv", "process_vm_writev"):
                        refused(f"{name} of {pid}", call(nr[name], pid, vector, 1, vector, 1, 0), errno.EPERM)
                    refused(f"kcmp with {pid}", call(nr["kcmp"], os.getpid(), pid, 0, 0, 0), errno.EPERM)
                refused("traceme", call(nr["ptrace"], 0, 0, 0, 0), errno.EPERM)
            finally:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        """,
    ),
    isolation_check(
        "opens_other_families_of_sockets",
        """
            import socket
            for family in range(0, 47):
                if family in (1, 2, 10, 16):
                    continue
                for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
                    fails(f"family {family}", socket.socket, family, kind, 0, allowed=(errno.EAFNOSUPPORT,))
            fails("vsock", socket.socket, 40, socket.SOCK_STREAM, 0, allowed=(errno.EAFNOSUPPORT,))
            fails("a pair", socket.socketpair, 40, socket.SOCK_STREAM, 0, allowed=(errno.EAFNOSUPPORT,))
        """,
    ),
    isolation_check(
        "leases_files_and_watches_folders",
        """
            import fcntl
            with open("leased", "w") as file:
                for what in (fcntl.F_RDLCK, fcntl.F_WRLCK):
                    fails("a lease", fcntl.fcntl, file.fileno(), fcntl.F_SETLEASE, what, allowed=(errno.EPERM,))
            folder = os.open("/usr/bin", os.O_RDONLY)
            fails("dnotify", fcntl.fcntl, folder, fcntl.F_NOTIFY, fcntl.DN_ACCESS, allowed=(errno.EPERM,))
        """,
    ),
    isolation_check(
        "opens_rare_protocols",
        """
            import socket
            for family in (socket.AF_INET, socket.AF_INET6):
                for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, 6, socket.SOCK_RAW):
                    for protocol in (2, 33, 46, 47, 50, 51, 94, 103, 108, 115, 132, 136, 137, 255):
                        fails(f"{family} {kind} {protocol}", socket.socket, family, kind, protocol)
            for protocol in (2, 5, 6, 8, 10, 11, 12, 13, 14, 16, 18, 19, 20, 21, 22):
                fails(f"netlink {protocol}", socket.socket, socket.AF_NETLINK, socket.SOCK_RAW, protocol)
            socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).close()
        """,
    ),
    isolation_check(
        "types_into_terminals",
        """
            import fcntl
            main, end = os.openpty()
            for request in (0x5412, 0x541C, 0x5412 | 1 << 32, 0x5423):
                got = libc.ioctl(end, ctypes.c_ulong(request), ctypes.create_string_buffer(b"x\\0\\0\\0"))
                refused(f"ioctl {request:x}", -ctypes.get_errno() if got < 0 else got, errno.EPERM)
            fails("a terminal of the host", os.open, "/dev/tty", os.O_RDWR)
        """,
    ),
    isolation_check(
        "changes_its_personality",
        """
            for value in (0x0400000, 0x0100000, 0x4000000, 0x8000000, 0x0200000):
                refused(f"{value:x}", call(nr["personality"], value), errno.EPERM)
            holds("asking", call(nr["personality"], 0xFFFFFFFF) >= 0)
        """,
    ),
    isolation_check(
        "makes_devices",
        """
            import stat
            for major, minor in ((1, 1), (1, 3), (254, 0), (8, 0), (5, 1)):
                number = os.makedev(major, minor)
                for kind in (stat.S_IFCHR, stat.S_IFBLK):
                    fails(f"mknod {number:x}", os.mknod, "/work/device", kind | 0o666, number)
        """,
    ),
    isolation_check(
        "asks_for_asynchronous_input",
        # the number of requests is one for the whole machine
        """
            number = 206 if os.uname().machine == "x86_64" else 0
            context = ctypes.c_ulong(0)
            refused("io_setup", call(number, 65000, ctypes.byref(context)), errno.ENOSYS)
        """,
    ),
    isolation_check(
        "puts_a_filter_of_its_own",
        # allowed, but a filter that allows everything must not undo ours
        """
            class Fprog(ctypes.Structure):
                _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
            code = ctypes.create_string_buffer(struct.pack("<HBBI", 6, 0, 0, 0x7FFF0000), 8)
            libc.prctl(22, 2, ctypes.byref(Fprog(1, ctypes.addressof(code))), 0, 0)
            refused("unshare", call(nr["unshare"], 0x10000000), errno.EPERM)
            refused("ptrace", call(nr["ptrace"], 16, 1, 0, 0), errno.EPERM)
        """,
    ),
    *(X86 if os.uname().machine == "x86_64" else []),
]
