# ruff: noqa: BLE001, S606  (the first process of a machine must not die of an exception)
"""The first process of the guest: sets it up, runs the requested commands, and powers it off.

It runs on this machine's Python and uses only the standard library.

- Each run starts in its own scenario: a user, a cgroup, and permissions on it.
- After a run, everything is killed, and leftovers (processes, cgroups, mounts) are reported.
- Whatever happens, the guest is powered off.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

CGROUP = Path("/sys/fs/cgroup")
CONTROLLERS = "+memory +pids +cpu"
USER = 1000
_libc = ctypes.CDLL(None, use_errno=True)
_POWER_OFF = 0x4321FEDC


def mount(kind: str, target: str, options: str = "", flags: int = 0) -> None:
    Path(target).mkdir(parents=True, exist_ok=True)
    if _libc.mount(kind.encode(), target.encode(), kind.encode(), flags, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), f"mount {kind} on {target}")


def open_port(name: str) -> int:
    """Open the virtio port to the host with this name."""
    for entry in Path("/sys/class/virtio-ports").iterdir():
        if (entry / "name").read_text().strip() == name:
            return os.open(f"/dev/{entry.name}", os.O_WRONLY | os.O_CLOEXEC)
    raise OSError(f"there is no virtio port {name}")


def set_up(request: dict[str, Any]) -> None:
    quiet = 2 | 4 | 8  # nosuid, nodev, noexec
    mount("cgroup2", str(CGROUP), "nsdelegate", quiet)
    mount("devpts", "/dev/pts", "ptmxmode=0666,mode=620", 2 | 8)
    mount("tmpfs", "/dev/shm", "mode=1777", 2 | 4)  # noqa: S108  (the guest's)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        with contextlib.suppress(FileExistsError):
            Path(f"/dev/{name}").symlink_to(target)
    # The value of systemd: the kernel's default is too small for a whole machine.
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 524288))
    # An ordinary user must reach Python and the checkout, also below root's directories.
    for folder in request["open"]:
        for above in (Path(folder), *Path(folder).parents):
            mode = above.stat().st_mode
            if mode & 0o011 != 0o011:
                above.chmod(mode & 0o7777 | 0o011)


def prepare_cgroup(scenario: str) -> Path:
    """Create the cgroup that a run starts in, as an init system would."""
    if scenario == "bare":  # no controller is enabled, and all processes are in the root cgroup
        return CGROUP
    enable(CGROUP)
    if scenario == "service":
        return make_cgroups(CGROUP / "system.slice", CGROUP / "system.slice/test.service")
    middle = CGROUP / "user.slice"
    if scenario == "user":
        return make_cgroups(middle, middle / "user-1000.slice/session-1.scope")
    top = middle / "user-1000.slice/user@1000.service"
    group = make_cgroups(middle, top / "app.slice/test.scope")
    for folder in (top, top / "app.slice", group):
        os.chown(folder, USER, USER)
        for name in ("cgroup.procs", "cgroup.subtree_control", "cgroup.threads"):
            os.chown(folder / name, USER, USER)
    return group


def enable(group: Path) -> None:
    (group / "cgroup.subtree_control").write_text(CONTROLLERS)


def make_cgroups(first: Path, last: Path) -> Path:
    """Create all cgroups from the first to the last, with controllers in all but the last."""
    last.mkdir(parents=True, exist_ok=True)
    for group in reversed([group for group in last.parents if group.is_relative_to(first)]):
        enable(group)
    return last


def start(run: dict[str, Any], group: Path, out: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        (group / "cgroup.procs").write_text("0")
        scratch = f"/run/{run['name']}"
        env = {**run["env"], "TMPDIR": scratch, "HOME": scratch}
        Path(scratch).mkdir()
        if run["scenario"] in ("user", "delegated"):
            os.chown(scratch, USER, USER)
            os.setgroups([])
            os.setresgid(USER, USER, USER)
            os.setresuid(USER, USER, USER)
            env |= {"USER": "user", "LOGNAME": "user"}
        null = os.open(os.devnull, os.O_RDONLY)
        for fd, to in ((null, 0), (out, 1), (out, 2)):
            os.dup2(fd, to)
        os.chdir(run["cwd"])
        os.execve(run["command"][0], run["command"], env)
    except BaseException:
        os.write(out, traceback.format_exc().encode())
    finally:
        os._exit(127)


def wait_for(pid: int) -> int:
    """Wait for a process, and reap orphans meanwhile; return its exit code."""
    while True:
        found, status = os.wait()
        if found == pid:
            return os.waitstatus_to_exitcode(status)


def clean_up(mounts: int, group: Path) -> list[str]:
    """Remove what a run left; return a description of it."""
    found = []
    if group != CGROUP and (changed := (group / "cgroup.subtree_control").read_text().strip()):
        found.append(f"controllers in its initial cgroup: {changed}")
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and entry.name != "1" and (line := (entry / "cmdline").read_bytes()):
                found.append(f"process {line.replace(bytes(1), b' ').decode('utf-8', 'replace')[:200]}")
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    for folder, _, _ in os.walk(CGROUP, topdown=False):
        if "rookery" in folder:
            found.append(f"cgroup {folder}")
        if folder != str(CGROUP):
            with contextlib.suppress(OSError):
                Path(folder).rmdir()
    with contextlib.suppress(OSError):
        (CGROUP / "cgroup.subtree_control").write_text(CONTROLLERS.replace("+", "-"))
    if (more := count_mounts() - mounts) > 0:
        found.append(f"{more} mounts")
    return found


def count_mounts() -> int:
    return Path("/proc/self/mounts").read_text().count("\n")


def log(text: str) -> None:
    """Write to the console, which is shown if the guest fails."""
    Path("/dev/console").write_text(f"guest: {text}\n")


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    log("setting up")
    set_up(request)
    log("opening the ports to the host")
    out, results = open_port("rookery.out"), open_port("rookery.results")

    def report(**fields: Any) -> None:
        os.write(results, json.dumps(fields).encode() + b"\n")

    log("ready")
    report(booted=float(Path("/proc/uptime").read_text().split()[0]))
    for run in request["runs"]:
        group = prepare_cgroup(run["scenario"])
        mounts = count_mounts()
        os.write(out, f"\n==== {run['name']}: {run['title']}\n".encode())
        began = time.monotonic()
        code = wait_for(start(run, group, out))
        left = clean_up(mounts, group)
        for leftover in left:
            os.write(out, f"LEFT BEHIND: {leftover}\n".encode())
        report(name=run["name"], code=code, left=left, seconds=time.monotonic() - began)
    report(done=True)


if __name__ == "__main__":
    if os.getpid() != 1:
        sys.exit("this program runs only as the first process of a guest")
    try:
        main()
    except BaseException:
        Path("/dev/console").write_text(traceback.format_exc())
    finally:
        os.sync()
        _libc.reboot(_POWER_OFF)
