"""Visibility: each program looks for data of the host, of another sandbox, or of pid 1.

The environment variable `SECRET_FILE` is the path of a file of the host that contains a secret.
"""

from tests.sandboxes.hostile.program import HostileProgram, isolation_check

PROGRAMS = [
    isolation_check(
        "reads_about_the_host_in_proc",
        """
            def read(name):
                with open(f"/proc/{name}") as file:
                    return file.read().strip()

            holds(f"cmdline: {read('cmdline')}", read("cmdline") == "")
            holds(f"load: {read('loadavg')}", read("loadavg").split()[:3] == ["0.00"] * 3)
            import uuid
            boot = read("sys/kernel/random/boot_id")
            holds("the boot ID is the host's", boot != os.environ["HOST_BOOT_ID"])
            uuid.UUID(boot)
        """,
    ),
    isolation_check(
        "writes_to_proc",
        """
            for name in ("self/oom_score_adj", "self/comm", "self/coredump_filter", "self/clear_refs", "self/mem"):
                fails(name, os.open, f"/proc/{name}", os.O_WRONLY)
        """,
    ),
    isolation_check(
        "changes_device_files_of_the_host",
        """
            for name in ("null", "zero", "full", "random", "urandom", "tty"):
                before = os.stat(f"/dev/{name}")
                fails(f"touch {name}", os.utime, f"/dev/{name}", allowed=(errno.EROFS, errno.EACCES, errno.EPERM))
                fails(f"chmod {name}", os.chmod, f"/dev/{name}", 0o600)
                if name != "tty":
                    with open(f"/dev/{name}", "rb") as file:
                        file.read(1)
                after = os.stat(f"/dev/{name}")
                same = (before.st_mtime_ns, before.st_mode) == (after.st_mtime_ns, after.st_mode)
                holds(f"{name} changed", same)
            with open("/dev/null", "w") as file:
                file.write("text")
        """,
    ),
    isolation_check(
        "looks_for_other_sandboxes_in_its_memory",
        """
            import re
            own = os.environ["ROOKERY_SANDBOX"].rpartition("/")[2].encode()
            found = set()
            with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
                for line in maps:
                    place, kind = line.split()[:2]
                    first, last = (int(word, 16) for word in place.split("-"))
                    if kind[0] != "r" or "[v" in line:
                        continue
                    try:
                        memory.seek(first)
                        found.update(re.findall(b"b[0-9a-f]{16}(?=[.]json)", memory.read(last - first)))
                    except (OSError, ValueError):
                        pass
            holds(f"leases: {found}", not found - {own})
        """,
        warm=True,
    ),
    isolation_check(
        "lists_the_processes_of_others",
        """
            for name in os.listdir("/proc"):
                if name.isdigit() and int(name) not in (1, os.getpid()) and not warm_interpreter(name):
                    escaped.append(f"process {name}: {open(f'/proc/{name}/cmdline').read()!r}")
            holds("few numbers", os.getpid() < 5000)
            holds("a parent", os.getppid() in (0, 1))
        """,
    ),
    isolation_check(
        "reads_the_first_process",
        """
            for name in ("environ", "maps", "mem", "auxv", "stack", "syscall", "pagemap", "smaps", "personality",
                         "io", "timers", "fdinfo", "fd", "map_files", "cwd", "root", "exe", "ns/net", "ns/mnt"):
                path = f"/proc/1/{name}"
                def look():
                    return os.listdir(path) if os.path.isdir(path) else os.open(path, os.O_RDONLY)
                fails(path, look if not name.startswith("ns") else lambda: os.readlink(path))
            with open("/proc/1/cmdline", "rb") as file:
                holds("a bare name", file.read().strip(b"\\0") == b"sandbox")
        """,
    ),
    isolation_check(
        "writes_to_the_first_process",
        """
            for name in ("mem", "oom_score_adj", "coredump_filter", "clear_refs", "comm", "uid_map", "gid_map",
                         "setgroups", "autogroup"):
                fails(name, os.open, f"/proc/1/{name}", os.O_WRONLY)
            for name in ("timerslack_ns", "attr/current", "attr/exec"):
                fails(name, lambda: os.write(os.open(f"/proc/1/{name}", os.O_WRONLY), b"1"))
        """,
    ),
    isolation_check(
        "looks_for_secrets_in_environments",
        """
            for name in os.listdir("/proc"):
                try:
                    with open(f"/proc/{name}/environ", "rb") as file:
                        text = file.read()
                except OSError:
                    continue
                if warm_interpreter(name):
                    plain = {b"HOME=/", b"LANG=C.UTF-8", b"PATH=/usr/local/bin:/usr/bin:/bin", b""}
                    holds("variables of the warm interpreter", set(text.split(b"\\0")) <= plain)
                    continue
                holds(f"environment of {name}", name in ("self", "thread-self", str(os.getpid())))
                holds("variables", set(text.split(b"\\0")) >= {b"HOME=/work", b"USER=user"})
            known = {"PATH", "HOME", "USER", "TMPDIR", "LANG", "ROOKERY_SANDBOX", "ROOKERY_COMMAND", "SECRET",
                     "SECRET_FILE", "HOST_SOCKET", "HOST_PORT", "HOST_KEY", "HOST_BOOT_ID", "LC_CTYPE"}
            holds(f"{set(os.environ) - known}", set(os.environ) <= known)
        """,
    ),
    isolation_check(
        "inherits_descriptors",
        """
            for at in range(3, 4096):
                try:
                    what = os.readlink(f"/proc/self/fd/{at}")
                    os.fstat(at)
                except OSError:
                    continue
                escaped.append(f"{at}: {what}")
            holds("no input", os.read(0, 1) == b"")
            for at in (1, 2):
                holds(f"{at} is a pipe", os.readlink(f"/proc/self/fd/{at}").startswith("pipe:"))
        """,
    ),
    isolation_check(
        "reads_files_of_the_host",
        """
            secret = os.environ["SECRET_FILE"]
            for path in (secret, f"/proc/1/root{secret}", f"/proc/1/cwd{secret}", f"/proc/self/root{secret}",
                         f"/../../../..{secret}", "/etc/shadow", "/etc/sudoers", "/etc/machine-id", "/etc/fstab",
                         "/root/.bashrc", "/root/.ssh", "/root/.profile", "/var/log", "/var/lib", "/sys/kernel",
                         "/boot", "/run/docker.sock", "/var/run/docker.sock", "/run/systemd", "/dev/mem",
                         "/dev/kmsg", "/dev/kvm", "/dev/vda", "/dev/sda", "/dev/vsock", "/dev/fuse", "/dev/net",
                         "/dev/vhost-vsock", "/dev/vhost-net", "/dev/loop-control", "/dev/mapper", "/dev/console"):
                holds(path, not os.path.lexists(path))
            holds("homes", os.listdir("/home") == [])
            holds("services", os.listdir("/srv") + os.listdir("/mnt") + os.listdir("/media") == [])
            holds("temporary files", [n for n in os.listdir("/tmp") + os.listdir("/run") if n] == [])
            holds("root's", set(os.listdir("/root")) <= {".pyenv", ".local", ".cache"})
            with open("/etc/passwd") as file:
                holds("users", len(file.readlines()) == 3)
        """,
    ),
    isolation_check(
        "changes_files_of_the_host",
        # without root, everything but the host's directories is a layer that belongs to the sandbox's user
        """
            own = os.stat("/etc").st_uid == os.getuid()
            theirs = ["/etc", "/etc/ssl", "/opt", "/root", "/home", *(["/", "/var"] if os.getuid() else [])]
            for folder in ("/usr", "/usr/bin", "/usr/lib", "/bin", "/lib", "/dev", "/proc",
                           sys.base_prefix, *([] if own else theirs)):
                if os.path.isdir(folder):
                    fails(folder, os.mkdir, f"{folder}/planted")
            files = ("/etc/passwd", "/etc/hosts", "/etc/ld.so.cache")
            for path in ("/usr/bin/env", "/bin/sh", sys.executable, *([] if own else files)):
                fails(path, os.open, path, os.O_WRONLY | os.O_TRUNC)
                fails(path, os.unlink, path)
                fails(path, os.chmod, path, 0o777)
                fails(path, os.utime, path)
                fails(path, os.setxattr, path, "user.x", b"1")
            fails("rename", os.rename, "/usr", "/work/usr")
            fails("link", os.link, "/usr/bin/env", "/work/env")
        """,
    ),
    isolation_check(
        "climbs_above_the_root_directory",
        """
            top = os.open("/", os.O_RDONLY)
            for _ in range(64):
                os.chdir("..")
            above = os.stat(".")
            holds("the same root", (above.st_dev, above.st_ino) == (os.fstat(top).st_dev, os.fstat(top).st_ino))
            os.mkdir("/tmp/a")
            inside = os.open("/tmp/a", os.O_RDONLY)
            os.rename("/tmp/a", "/work/a")
            os.fchdir(inside)
            for _ in range(64):
                os.chdir("..")
            holds("nothing above", not os.path.exists(os.environ["SECRET_FILE"][1:]))
            os.rmdir("/work/a")
        """,
    ),
    isolation_check(
        "sees_mounts_of_the_host",
        """
            with open("/proc/self/mountinfo") as file:
                lines = [line.split() for line in file]
            for line in lines:
                where, options, kind = line[4], line[5].split(","), line[line.index("-") + 1]
                free = where in ("/", "/dev/shm", "/dev/pts", "/proc") or where.startswith("/dev/")
                holds(f"{where} is written to", free or "ro" in options)
                holds(f"{where} has privileged programs", "nosuid" in options or where.startswith("/dev/"))
                holds(f"{where} is {kind}", kind not in ("sysfs", "cgroup", "cgroup2", "securityfs", "debugfs",
                                                         "tracefs", "bpf", "fusectl", "configfs", "mqueue"))
            holds("a handful", len(lines) < 64)
        """,
    ),
    isolation_check(
        "looks_at_control_groups",
        """
            for path in ("/sys/fs/cgroup", "/sys", "/cgroup", "/proc/1/cgroup.procs"):
                holds(path, not os.path.exists(path))
            for pid in (1, "self"):
                with open(f"/proc/{pid}/cgroup") as file:
                    for line in file:
                        holds(line, line.split(":")[2].strip() == "/")
            for kind in (b"cgroup2", b"cgroup", b"sysfs", b"proc", b"tmpfs"):
                refused(f"mount {kind}", call(nr["mount"], b"none", b"/mnt", kind, 0, b""), errno.EPERM)
        """,
    ),
    isolation_check(
        "opens_kernel_settings",
        # opened for writing, never written
        """
            for path in ("kernel/core_pattern", "kernel/modprobe", "kernel/hostname", "kernel/domainname",
                         "kernel/sysrq", "kernel/panic", "kernel/threads-max", "vm/drop_caches",
                         "vm/overcommit_memory", "fs/file-max", "fs/suid_dumpable", "kernel/randomize_va_space",
                         "kernel/unprivileged_bpf_disabled", "fs/binfmt_misc/register",
                         "kernel/kptr_restrict",
                         # of its own namespaces, which root in the sandbox may change
                         *(["kernel/pid_max", "kernel/shmmax", "user/max_user_namespaces", "net/ipv4/ip_forward"]
                           if os.getuid() else [])):
                fails(path, os.open, f"/proc/sys/{path}", os.O_WRONLY)
            for path in ("/proc/sysrq-trigger", "/proc/kcore", "/proc/kmsg", "/proc/mtrr",
                         "/proc/irq/default_smp_affinity", "/proc/timer_list", "/proc/vmallocinfo",
                         "/proc/kpagecount", "/proc/slabinfo", "/proc/scsi/scsi", "/proc/acpi/wakeup"):
                fails(path, os.open, path, os.O_RDWR)
        """,
    ),
    isolation_check(
        "learns_addresses_of_the_kernel",
        """
            # where in a line the address is
            for path, column in (("/proc/kallsyms", 0), ("/proc/iomem", 0), ("/proc/modules", 5)):
                try:
                    with open(path) as file:
                        seen = [line for line in file if int(line.split()[column].split("-")[0], 16)]
                except OSError:
                    continue
                holds(f"{path}: {seen[:1]}", not seen)
            for path in ("/proc/keys", "/proc/key-users"):
                if os.path.exists(path):
                    with open(path) as file:
                        holds(path, file.read().count("\\n") <= 2)
        """,
    ),
    isolation_check(
        "learns_the_name_of_the_host",
        """
            import socket
            holds(os.uname().nodename, os.uname().nodename == "sandbox")
            holds(socket.gethostname(), socket.gethostname() == "sandbox")
            with open("/etc/hostname") as file:
                holds("a file", file.read().strip() == "sandbox")
            refused("sethostname", call(nr["sethostname"], b"owned", 5), errno.EPERM)
            refused("setdomainname", call(nr["setdomainname"], b"owned", 5), errno.EPERM)
        """,
    ),
    isolation_check(
        "becomes_somebody_else",
        """
            holds(f"{os.getresuid()}", os.getresuid() == (1000, 1000, 1000) == os.getresgid())
            holds(f"{os.getgroups()}", set(os.getgroups()) <= {1000, 65534})
            for ident in (0, 1, 999, 1001, 65534, 65535, 65536, 0x20000000):
                refused(f"uid {ident}", call(nr["setresuid"], ident, ident, ident), errno.EPERM, errno.EINVAL)
                refused(f"gid {ident}", call(nr["setresgid"], ident, ident, ident), errno.EPERM, errno.EINVAL)
            refused("groups", call(nr["setgroups"], 0, None), errno.EPERM)
            for which in ("uid", "gid"):
                with open(f"/proc/self/{which}_map") as file:
                    inside, outside, count = map(int, file.read().split())
                holds(f"{which} {outside}", outside >= 0x20000000 or count == 1)
                fails(f"{which}_map", lambda: os.write(os.open(f"/proc/self/{which}_map", 1), b"0 0 1"))
        """,
    ),
    isolation_check(
        "has_a_capability",
        """
            with open("/proc/self/status") as file:
                status = {name: text.strip() for name, _, text in (line.partition(":") for line in file)}
            for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
                holds(f"{name} {status[name]}", int(status[name], 16) == 0)
            holds("no new privileges", status["NoNewPrivs"] == "1")
            holds("a filter", status["Seccomp"] == "2")
            header, data = struct.pack("Ii", 0x20080522, 0), struct.pack("6I", *[0xFFFFFFFF] * 6)
            refused("capset", call(nr["capset"], header, data), errno.EPERM)
            refused("ambient", -ctypes.get_errno() if libc.prctl(47, 2, 21, 0, 0) < 0 else 0, errno.EPERM)
            refused("no_new_privs off", -ctypes.get_errno() if libc.prctl(38, 0, 0, 0, 0) < 0 else 0)
        """,
    ),
    isolation_check(
        "starts_privileged_programs",
        """
            for path in ("su", "sudo", "mount", "umount", "passwd", "newgrp", "chsh", "ping", "pkexec", "chfn"):
                for folder in ("/bin", "/usr/bin"):
                    if os.path.exists(f"{folder}/{path}"):
                        script = f"exec {folder}/{path} --version >/dev/null 2>&1 </dev/null"
                        subprocess.run(["sh", "-c", script], timeout=20)
            import shutil
            shutil.copy("/bin/sh", "/work/sh")
            os.chmod("/work/sh", 0o6777)
            got = subprocess.run(["/work/sh", "-p", "-c", "grep -E '^(Uid|CapEff)' /proc/self/status"],
                                 capture_output=True, text=True).stdout
            os.unlink("/work/sh")
            holds(got, "1000\\t1000\\t1000\\t1000" in got and "0000000000000000" in got)
            holds("still itself", os.getresuid() == (1000, 1000, 1000))
        """,
    ),
    isolation_check(
        "finds_files_of_another_sandbox",
        """
            for path in ("/work", "/tmp", "/dev/shm", "/var/tmp", "/run"):
                for name in os.listdir(path):
                    holds(f"{path}/{name}", not name.startswith("other"))
        """,
    ),
    HostileProgram(
        name="plants_links_in_its_outputs",
        text="""
            import socket
            secret = os.environ["SECRET_FILE"]
            os.makedirs("outputs/sub")
            os.symlink(secret, "outputs/absolute")
            os.symlink("../" * 40 + secret[1:], "outputs/relative")
            os.symlink(os.path.dirname(secret), "outputs/folder")
            os.symlink("/proc/self/root" + secret, "outputs/magic")
            os.symlink("/proc/1/fd/3", "outputs/descriptor")
            os.symlink("loop", "outputs/loop")
            os.mkfifo("outputs/fifo")
            one = socket.socket(socket.AF_UNIX)
            one.bind("outputs/socket")
            with open("outputs/giant", "wb") as file:
                file.truncate(1 << 40)
            with open(b"outputs/\\xff\\xfe", "wb") as file:
                file.write(b"fine")
            with open("outputs/sub/good", "w") as file:
                file.write("good")
        """,
    ),
]
