"""Hostile programs that run as forks of a warm interpreter, or beside programs of other users."""

from tests.sandboxes.hostile.program import HostileProgram, isolation_check

MEMORY_SCAN = """
    import re
    wanted = bytes.fromhex(os.environ["INVERTED"])
    turn = bytes(byte ^ 0x55 for byte in range(256))
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as mem:
        for line in maps:
            where, rights = line.split()[:2]
            if not rights.startswith("rw"):
                continue
            first, last = (int(part, 16) for part in where.split("-"))
            try:
                mem.seek(first)
                block = mem.read(last - first)
            except (OSError, ValueError, OverflowError):
                continue
            for match in re.finditer(b"secret-", block):
                if block[match.end() : match.end() + len(wanted)].translate(turn) == wanted:
                    escaped.append(f"in {line.strip()}: {block[max(0, match.start() - 40) : match.end()]!r}")
"""
"""Searches its own memory for a secret, which it gets with inverted bits so that it never holds it itself."""

WARM: list[HostileProgram] = [
    isolation_check(
        "looks_for_what_it_was_forked_from",
        """
            import gc, inspect
            holds("a frame above", sys._getframe().f_back is None and len(inspect.stack()) == 1)
            ours = ("Init", "Guard", "Keeper", "SandboxRegistry", "SandboxForker", "SandboxProcess",
                    "ClientConnection", "KeeperRequest", "RunningCommand", "Spawner", "ForkServerClient")
            for one in gc.get_objects():
                holds(f"an object {type(one)}", type(one).__name__ not in ours)
                if isinstance(one, dict) and str(one.get("__name__")).startswith("rookery."):
                    escaped.append(f"names of {one['__name__']}")
            for name in sys.modules:
                holds(f"the module {name}", name.partition(".")[0] != "rookery")
            for path in sys.path_importer_cache:
                holds(f"the directory {path}", "sandbox_runtime" not in path)
            for thread, frame in sys._current_frames().items():
                while frame.f_back:
                    frame = frame.f_back
                holds("a frame at the bottom", frame.f_globals is globals())
            import threading
            holds("a thread", threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == 1)
        """,
    ),
    isolation_check(
        "inherits_nothing_of_pid_1",
        """
            for name in os.listdir("/proc/self/fd"):
                if int(name) > 2:
                    try:
                        escaped.append(f"{name}: {os.readlink(f'/proc/self/fd/{name}')}")
                    except OSError:
                        pass  # the one that lists them
            death = ctypes.c_int(-1)
            libc.prctl(2, ctypes.byref(death), 0, 0, 0)
            holds("a signal at a parent's death", death.value == 0)
            holds("dumpable", libc.prctl(3, 0, 0, 0, 0) == 1)
            with open("/proc/self/status") as file:
                fields = dict(line.rstrip().split(":", 1) for line in file)
            for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
                holds(f"{name} {fields[name]}", int(fields[name], 16) == 0)
            holds("privileges", fields["NoNewPrivs"].strip() == "1" and fields["Seccomp"].strip() == "2")
            holds("users", len(set(fields["Uid"].split())) == len(set(fields["Gid"].split())) == 1)
            holds("groups", fields["Groups"].strip() == "")
            holds("a priority", os.nice(0) == 0 and os.getpriority(os.PRIO_PROCESS, 0) == 0)
            holds("a worth", open("/proc/self/oom_score_adj").read() == "1000\\n")
            for call in (lambda: os.setuid(0 if os.getuid() else 1), lambda: os.setuid(65535),
                         lambda: os.setgid(5), lambda: os.setgroups([5])):
                fails("to be somebody else", call)
            fails("to change the interpreter", os.open, "/proc/self/exe", os.O_WRONLY)
            fails("to change its mode", os.chmod, "/proc/self/exe", 0o777)
            holds("the variables of the host", set(os.environ) <= {"PATH", "HOME", "USER", "TMPDIR", "LANG",
                  "ROOKERY_SANDBOX", "ROOKERY_COMMAND", "SECRET_FILE", "HOST_SOCKET", "HOST_PORT", "HOST_KEY",
                  "HOST_BOOT_ID"})
            for name in ("fd", "environ", "mem", "maps", "root", "cwd", "exe"):
                path = f"/proc/1/{name}"
                fails(path, lambda: os.listdir(path) if name == "fd" else os.readlink(path)
                      if name in ("root", "cwd", "exe") else os.open(path, os.O_RDONLY))
        """,
    ),
]

ATTACK_OTHER_USER = """
    pid = int(os.environ["PID"])
    import resource
    for number in (0, 2, 9, 15, 19, 28):
        fails(f"signal {number}", os.kill, pid, number)
    fails("a group", os.killpg, pid, 9)
    for name in ("environ", "mem", "maps", "auxv", "fd", "stack", "syscall", "io", "pagemap", "smaps"):
        path = f"/proc/{pid}/{name}"
        fails(path, lambda: os.listdir(path) if os.path.isdir(path) else os.open(path, os.O_RDONLY))
    for name in ("root", "cwd", "exe", "ns/net", "fd/0", "fd/1"):
        fails(name, os.readlink, f"/proc/{pid}/{name}")
    for name in ("mem", "oom_score_adj", "comm", "clear_refs", "coredump_filter"):
        fails(name, os.open, f"/proc/{pid}/{name}", os.O_WRONLY)
    fails("limits", resource.prlimit, pid, resource.RLIMIT_NOFILE, (1, 1))
    fails("limits, read", resource.prlimit, pid, resource.RLIMIT_NOFILE)
    fails("priority", os.setpriority, os.PRIO_PROCESS, pid, 19)
    fails("affinity", os.sched_setaffinity, pid, {0})
    refused("ptrace", call(nr["ptrace"], 16, pid, 0, 0))
    buffer = ctypes.create_string_buffer(64)
    refused("memory", call(nr["process_vm_readv"], pid, buffer, 1, buffer, 1, 0))
    fd = call(nr["pidfd_open"], pid, 0)
    if fd >= 0:
        refused("a descriptor", call(nr["pidfd_getfd"], fd, 0, 0))
        fails("a signal by descriptor", signal.pidfd_send_signal, fd, 9)
    fails("its file", os.open, os.environ["THEIRS"], os.O_RDONLY)
    fails("its file, written", os.open, os.environ["THEIRS"], os.O_WRONLY)
    if os.getuid() != os.stat("/tmp").st_uid:
        fails("its file, removed", os.unlink, os.environ["THEIRS"])
"""
"""Attacks the process `PID` of another user and its private file `THEIRS`."""

ATTACK_PID_1 = """
    import resource
    for which, limit in ((resource.RLIMIT_CPU, (1, 1)), (resource.RLIMIT_NOFILE, (1, 1)), (10, (1, 1))):
        fails(f"limit {which} of pid 1", resource.prlimit, 1, which, limit)
    fails("priority of pid 1", os.setpriority, os.PRIO_PROCESS, 1, 19)
    fails("affinity of pid 1", os.sched_setaffinity, 1, {0})
    fails("a signal", os.kill, 1, 0)
"""
"""Attacks pid 1, which has its own user where user IDs are mapped."""

FAKE_FORK_SERVER = """#!{interpreter}
import os, socket, struct, sys, time
if sys.argv[1].startswith("/proc/self/fd/"):
    connection = socket.socket(fileno=3)
    connection.send(b"ready")
    while True:
        data, extra, _, _ = connection.recvmsg(1 << 16, socket.CMSG_SPACE(4 * 8))
        if not data:
            os._exit(0)
        fds = list(struct.unpack("%di" % (len(extra[0][2]) // 4), extra[0][2]))
        with open("/tmp/asked", "a") as file:
            file.write("x")
        {lie}
        for fd in fds:
            os.close(fd)
print("started normally")
"""
"""A fake interpreter that violates the protocol of fork servers in the way of `{lie}`."""
LIES = {
    "never_replies": "time.sleep(600)",
    "hangs_up": "pass",
    "replies_as_the_command_itself": 'os.write(fds[0], b"ready"); os.read(fds[0], 16)',
    "lets_its_child_reply": """
        if os.fork() == 0:
            os.write(fds[0], b"ready"); os.read(fds[0], 16); time.sleep(600)""",
    "replies_with_garbage": 'os.write(fds[0], b"gone" * 4000)',
    "floods_its_connection": """
        for _ in range(100000):
            try: connection.send(b"ready", socket.MSG_DONTWAIT)
            except OSError: break""",
    "claims_to_be_pid_1": """
        s = socket.socket(fileno=fds[0])
        try: s.sendmsg([b"ready"], [(socket.SOL_SOCKET, 2, struct.pack("iII", 1, os.getuid(), os.getgid()))])
        except OSError: pass
        s.detach()""",
    "ends": "os._exit(1)",
    "stops": "os.kill(os.getpid(), 19)",
}
