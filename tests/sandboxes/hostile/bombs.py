"""Resource bombs: each program takes as much of one resource as it can get."""

from tests.sandboxes.hostile.program import MB, HostileProgram, isolation_check

SHORT = {"wall": 1.0, "memory": 512 * MB}

PROGRAMS = [
    HostileProgram(
        name="forks_for_ever",
        text="while True: os.fork()",
        status=("process_limit",),
        limits={"memory": 512 * MB},
        leaves_processes=True,
    ),
    HostileProgram(
        name="forks_for_ever_ignoring_errors",
        text="""
            while True:
                try:
                    os.fork()
                except OSError:
                    pass
        """,
        status=("time_limit", "process_limit"),
        limits=SHORT,
    ),
    HostileProgram(
        name="forks_into_sessions_of_their_own",
        text="""
            while True:
                try:
                    if os.fork() == 0:
                        os.setsid()
                except OSError:
                    pass
        """,
        status=("time_limit", "process_limit"),
        limits=SHORT,
    ),
    HostileProgram(
        name="forks_in_a_shell",
        text="[ \"$(tr -d '\\0' < /proc/1/cmdline)\" = sandbox ] || exit 1; "
        "b() { b | b & }; b; while :; do sleep 1 || exit 1; done",
        argv=("sh", "-c"),
        status=("process_limit", "time_limit"),
        limits=SHORT,
        leaves_processes=True,
    ),
    HostileProgram(
        name="starts_threads_for_ever",
        text="""
            import threading
            stay = threading.Event()
            while True:
                threading.Thread(target=stay.wait, daemon=True).start()
        """,
        status=("process_limit",),
    ),
    HostileProgram(
        name="takes_memory_in_one_process",
        text="held = []\nwhile True: held.append(bytearray(b'x') * (1 << 20))",
        status=("memory_limit",),
    ),
    HostileProgram(
        name="takes_memory_in_many_processes",
        text="""
            children = []
            for _ in range(12):
                pid = os.fork()
                if pid == 0:
                    held = bytearray(b"x") * (16 << 20)
                    time.sleep(600)
                children.append(pid)
            sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(-1, 0)[1]) != 0 for _ in range(1)))
        """,
        status=("memory_limit",),
        leaves_processes=True,
    ),
    HostileProgram(
        name="takes_memory_through_a_shared_map",
        text="""
            import mmap
            area = mmap.mmap(-1, 1 << 30)
            for at in range(0, 1 << 30, 4096):
                area[at] = 1
        """,
        status=("memory_limit",),
    ),
    HostileProgram(
        name="takes_memory_for_page_tables",
        text="""
            import mmap
            areas = []
            while True:
                area = mmap.mmap(-1, 64 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
                areas.append(area)
                for at in range(0, 64 << 30, 2 << 20):
                    area[at]  # the page of zeros: only the tables cost
        """,
        status=("memory_limit",),
    ),
    HostileProgram(
        name="takes_memory_through_memfd",
        text="""
            held = os.memfd_create("x")
            while True:
                os.write(held, bytes(1 << 20))
        """,
        status=("memory_limit",),
    ),
    HostileProgram(
        name="takes_memory_through_sysv",
        text="""
            import ctypes
            libc = ctypes.CDLL(None, use_errno=True)
            libc.shmat.restype = ctypes.c_void_p
            while True:
                key = libc.shmget(0, ctypes.c_size_t(32 << 20), 0o600)
                if key < 0:
                    sys.exit(1)
                ctypes.memset(libc.shmat(key, None, 0), 1, 32 << 20)
        """,
        status=("memory_limit",),
    ),
    HostileProgram(
        name="takes_memory_through_messages",
        text="""
            import ctypes
            libc = ctypes.CDLL(None, use_errno=True)
            message = (1).to_bytes(8, sys.byteorder) + bytes(8000)
            while True:
                key = libc.msgget(0, 0o600)
                if key < 0:
                    sys.exit(0)
                while libc.msgsnd(key, message, ctypes.c_size_t(8000), 0o4000) == 0:
                    pass
        """,
        status=("memory_limit", "exited"),
        limits={"memory": 48 * MB},
    ),
    HostileProgram(
        name="fills_shared_memory",
        text="with open('/dev/shm/x', 'wb') as file:\n    while True: file.write(bytes(1 << 20))",
        status=("disk_limit",),
    ),
    HostileProgram(
        name="fills_the_disk",
        text="with open('/tmp/x', 'wb') as file:\n    while True: file.write(bytes(1 << 20))",
        status=("disk_limit",),
    ),
    HostileProgram(
        name="fills_the_disk_with_reserved_space",
        text="held = os.open('x', os.O_CREAT | os.O_WRONLY)\nos.posix_fallocate(held, 0, 1 << 30)",
        status=("exited", "disk_limit"),
    ),
    HostileProgram(
        name="fills_the_disk_from_many_processes",
        text="""
            for _ in range(4):
                if os.fork() == 0:
                    break
            with open(f"/var/tmp/{os.getpid()}", "wb", buffering=0) as file:
                while file.write(bytes(1 << 16)):
                    pass
        """,
        status=("disk_limit",),
        leaves_processes=True,
    ),
    HostileProgram(
        name="lowers_its_oom_score_and_fills_a_tmpfs",
        text="""
            try:
                with open("/proc/self/oom_score_adj", "w") as file:
                    file.write("0")
            except OSError:
                pass
            os.execv("/bin/sh", ["sh", "-c", "cat /dev/zero > /tmp/x"])
        """,
        status=("memory_limit",),
        limits={"memory": 48 * MB, "disk": 512 * MB},
        leaves_processes=True,
    ),
    HostileProgram(
        name="lowers_its_oom_score_and_fills_a_memfd",
        text="""
            for name in ("self", "thread-self", str(os.getpid())):
                try:
                    with open(f"/proc/{name}/oom_score_adj", "w") as file:
                        file.write("0")
                except OSError:
                    pass
            held = os.memfd_create("x")
            os.dup2(held, 7)
            os.execv("/bin/sh", ["sh", "-c", "cat /dev/zero >&7"])
        """,
        status=("memory_limit",),
        limits={"memory": 48 * MB, "disk": 512 * MB},
        leaves_processes=True,
    ),
    isolation_check(
        "takes_netlink_sockets_from_many_threads",
        """
            import resource, socket, threading
            resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
            held, again = [], threading.Barrier(16)

            def take():
                again.wait()
                for _ in range(200):
                    try:
                        held.append(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0))
                    except OSError as error:
                        holds(f"{error}", error.errno in (errno.ENOBUFS, errno.ENOSYS))

            threads = [threading.Thread(target=take) for _ in range(16)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            holds(f"{len(held)} netlink sockets", len(held) <= 40)
            had = bool(held)
            while held:
                held.pop().close()
            if had:
                socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).close()
        """,
    ),
    HostileProgram(
        name="fills_memory_that_outlives_it",
        text="""
            import ctypes
            libc = ctypes.CDLL(None, use_errno=True)
            libc.shmat.restype = ctypes.c_void_p
            while True:
                key = libc.shmget(0, ctypes.c_size_t(1 << 16), 0o600)
                if key < 0:
                    break
                area = ctypes.c_void_p(libc.shmat(key, None, 0))
                ctypes.memset(area, 1, 1 << 16)
                libc.shmdt(area)
            os.execv("/bin/sh", ["sh", "-c", "cat /dev/zero > /dev/shm/x"])
        """,
        status=("memory_limit",),
        limits={"memory": 48 * MB, "disk": 512 * MB},
        leaves_processes=True,
    ),
    HostileProgram(
        name="takes_every_inode",
        text="for n in range(10**7): open(f'/tmp/{n}', 'w').close()",
        status=("disk_limit",),
        limits={"disk": 4 * MB},
    ),
    HostileProgram(
        name="makes_the_deepest_folder",
        text="while True:\n    os.mkdir('d')\n    os.chdir('d')",
        status=("disk_limit", "exited"),
        limits={"disk": 4 * MB, "wall": 60.0},
    ),
    isolation_check(
        "takes_every_descriptor",
        """
            import resource
            resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
            count = 0
            try:
                while count < 200_000:
                    os.open("/dev/null", os.O_RDONLY)
                    count += 1
            except OSError as error:
                holds(f"{error}", error.errno == errno.EMFILE)
            else:
                escaped.append("no end of descriptors")
        """,
    ),
    isolation_check(
        "sends_descriptors_to_nobody",
        """
            import socket
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            sent = 0
            try:
                while sent < 100_000:
                    pair = socket.socketpair()
                    socket.send_fds(ours, [b"x"], [one.fileno() for one in pair] * 50, socket.MSG_DONTWAIT)
                    sent += 100
            except OSError as error:
                pass
            holds(f"{sent} under way", sent < 100_000)
        """,
    ),
    HostileProgram(
        name="fills_pipes",
        text="""
            import fcntl
            while True:
                out, into = os.pipe()
                os.set_blocking(into, False)
                try:
                    fcntl.fcntl(into, 1031, 1 << 20)
                except PermissionError:
                    pass
                try:
                    while os.write(into, bytes(1 << 16)):
                        pass
                except BlockingIOError:
                    pass
        """,
        status=("memory_limit", "exited"),
    ),
    HostileProgram(
        name="fills_socket_buffers",
        text="""
            import socket
            while True:
                for one in (pair := socket.socketpair()):
                    one.setblocking(False)
                    try:
                        while one.send(bytes(1 << 16)):
                            pass
                    except BlockingIOError:
                        pass
                    one.detach()
        """,
        status=("memory_limit", "exited"),
    ),
    HostileProgram(
        name="fills_loopback_connections",
        text="""
            import socket
            held, server = [], socket.create_server(("127.0.0.1", 0), backlog=1024)
            while len(held) < 1500:
                one = socket.create_connection(server.getsockname())
                held += [one, server.accept()[0]]
                one.setblocking(False)
                try:
                    while one.send(bytes(1 << 16)):
                        pass
                except OSError:
                    pass
            sys.exit(1)
        """,
        status=("memory_limit", "exited", "time_limit"),
        limits={"wall": 4.0},
    ),
    HostileProgram(name="floods_stdout", text="while True: os.write(1, bytes(65536))", status=("output_limit",)),
    HostileProgram(name="floods_stderr", text="while True: os.write(2, bytes(65536))", status=("output_limit",)),
    HostileProgram(
        name="floods_from_many_processes",
        text="[os.fork() for _ in range(3)]\nwhile True: os.write(1, bytes(4096)); os.write(2, bytes(4096))",
        status=("output_limit",),
    ),
    HostileProgram(
        name="spins_on_every_core",
        text="[os.fork() for _ in range(3)]\nwhile True: pass",
        status=("time_limit",),
        limits=SHORT,
    ),
    HostileProgram(
        name="spins_past_its_processor_time",
        text="signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        status=("time_limit",),
        limits={"cpu_seconds": 1.0},
    ),
    isolation_check(
        "takes_every_inotify_instance",
        """
            count = 0
            while count < 100_000 and libc.inotify_init() >= 0:
                count += 1
            holds(f"{count} instances", count < 10_000)
        """,
    ),
    isolation_check(
        "takes_every_terminal",
        """
            count = 0
            try:
                while count < 100_000:
                    os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
                    count += 1
            except OSError:
                pass
            holds(f"{count} terminals", count <= 256)
        """,
    ),
    isolation_check(
        "takes_every_message_queue",
        """
            count = 0
            while count < 10_000 and call(nr["mq_open"], f"q{count}".encode(), 0o102, 0o600, None) >= 0:
                count += 1
            holds(f"{count} queues", count < 100)
        """,
    ),
    isolation_check(
        "locks_all_memory",
        """
            refused("mlockall", call(nr["mlockall"], 3), errno.EPERM, errno.ENOMEM)
        """,
    ),
    HostileProgram(
        name="dumps_core",
        text="""
            import resource
            try:
                resource.setrlimit(resource.RLIMIT_CORE, (-1, -1))
            except ValueError:
                pass
            os.kill(os.getpid(), signal.SIGSEGV)
        """,
        status=("signaled",),
        signal=11,
    ),
    isolation_check(
        "raises_its_limits",
        """
            import resource
            for which in (resource.RLIMIT_CORE, resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK):
                for pid in (0, 1):
                    try:
                        resource.prlimit(pid, which, (-1, -1))
                    except (OSError, ValueError):
                        continue
                    escaped.append(f"limit {which} of {pid}")
            fails("nice", os.nice, -5)
            fails("fifo", os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(50))
            for pid in ("1", "self"):
                fails(f"oom score of {pid}", lambda: os.write(os.open(f"/proc/{pid}/oom_score_adj", 1), b"-1000"))
        """,
    ),
]
