"""Inspect the host before and after a test: what sandboxes must not change, and what must not be left of them.

A sandbox is identified by what the kernel reports about it (cgroups, users, namespaces), not by what its programs
report. Changes by other programs of this machine are not counted.
"""

import contextlib
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from rookery.sandbox_runtime import processes
from rookery.sandboxes.local.provider import LocalProvider, LocalSandbox

FIRST_UID, LAST_UID = 0x20000000, 0x30000000
"""Range of the host's user IDs that sandboxes get."""
_SETTINGS = ("core_pattern", "hostname", "domainname", "modprobe", "panic", "pid_max", "threads-max", "sysrq",
             "randomize_va_space", "printk")  # fmt: skip


@dataclass(frozen=True)
class SandboxFootprint:
    """Traces that identify a live or dead sandbox on the host."""

    name: str
    pid: int
    uid: int
    started: str
    namespaces: tuple[str, ...]
    cgroups: tuple[str, ...]
    lease: Path

    def find_leftovers(self) -> list[str]:
        """Return what is left of the sandbox. Its cgroups may be reused by now, so they are not included."""
        found = [f"process {pid}" for pid in self.list_processes()]
        if self.lease.exists():
            found.append(f"lease {self.lease.name}")
        return found

    def list_processes(self) -> list[int]:
        """Return the living processes of the sandbox. Pid 1 ends last."""
        first = processes.read_stat(self.pid)
        if first is not None and first[0] not in "ZX" and str(first[2]) == self.started:
            return [self.pid, *_list_descendants(self.pid)]
        if not self.namespaces:  # only root can read them; the kernel kills a PID namespace with its pid 1
            return []
        found = []
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            with contextlib.suppress(OSError):
                inside = self.uid < 0 or self.uid <= os.stat(f"/proc/{entry}").st_uid < self.uid + 65536
                if (
                    inside
                    and _read_namespaces(int(entry)) == self.namespaces
                    and Path(f"/proc/{entry}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
                ):
                    found.append(int(entry))
        return found


def inspect_sandbox(sandbox: LocalSandbox) -> SandboxFootprint:
    """Return the footprint of a live sandbox."""
    handle = sandbox.handle
    assert handle is not None
    groups = Path(f"/proc/{handle.pid}/cgroup").read_text().splitlines()
    mounts = [line.split(" ") for line in Path("/proc/self/mounts").read_text().splitlines()]
    cgroups = []
    for line in groups:
        _, names, path = line.split(":", 2)
        for _, folder, kind, options, *_ in mounts:
            fits = kind == "cgroup2" if not names else kind == "cgroup" and names in options.split(",")
            if fits and "/rookery/" in path:
                cgroups.append(f"{folder}{path}")
    assert not groups or cgroups or not handle.memory_cgroup
    return SandboxFootprint(
        name=handle.name,
        pid=handle.pid,
        uid=handle.root_uid,
        started=_read_start_time(handle.pid),
        namespaces=_read_namespaces(handle.pid),
        cgroups=tuple(cgroups),
        lease=sandbox.folder / "leases" / f"{sandbox.id}.json",
    )


def _read_start_time(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def _list_descendants(pid: int) -> list[int]:
    found = processes.list_children(pid)
    for child in list(found):
        found += _list_descendants(child)
    return found


def _read_namespaces(pid: int) -> tuple[str, ...]:
    """Return the namespaces of a process; empty without the permission to read them."""
    try:
        return tuple(os.readlink(f"/proc/{pid}/ns/{kind}") for kind in ("pid", "mnt", "net"))
    except PermissionError:
        return ()


@dataclass(frozen=True)
class HostState:
    """Properties of the host that no sandbox may change."""

    mounts: tuple[str, ...]
    """Mounts that a sandbox or its keeper could have created; normally none."""
    interfaces: tuple[str, ...]
    settings: tuple[str, ...]
    memory: tuple[str, ...]
    """Shared memory that belongs to users of sandboxes; normally none."""
    cores: tuple[str, ...]
    clock: int
    root: tuple[str, ...]
    hostname: str
    home: tuple[str, ...]


def read_host_state(home: Path) -> HostState:
    # Rounded to ten seconds, so that the result does not depend on when it is read.
    return HostState(
        mounts=tuple(
            line for line in _read_text("/proc/self/mounts").splitlines() if _may_belong_to_a_sandbox(line, home)
        ),
        interfaces=tuple(sorted(name for _, name in socket.if_nameindex())),
        settings=tuple(_read_text(f"/proc/sys/kernel/{name}") for name in _SETTINGS),
        memory=tuple(sorted(_list_shared_memory())),
        cores=tuple(
            sorted(str(path) for folder in (Path.cwd(), Path("/"), home) for path in folder.glob("core*"))
        ),
        clock=round((time.time() - time.monotonic()) / 10),
        root=tuple(sorted(os.listdir("/"))),
        hostname=socket.gethostname(),
        home=tuple(sorted(path.name for path in home.iterdir())),
    )


def _may_belong_to_a_sandbox(mount: str, home: Path) -> bool:
    """Return whether a sandbox could have created a mount. Other programs of this machine mount things, too."""
    return str(home) in mount or "skeleton" in mount or "userxattr" in mount


def _list_shared_memory() -> list[str]:
    found = []
    for path in Path("/dev/shm").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if FIRST_UID <= path.lstat().st_uid < LAST_UID:
                found.append(str(path))
    for kind, column in (("shm", 7), ("msg", 7), ("sem", 4)):
        lines = _read_text(f"/proc/sysvipc/{kind}").splitlines()[1:]
        found += [f"{kind} {line}" for line in lines if FIRST_UID <= int(line.split()[column]) < LAST_UID]
    return found


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        return str(error.errno)


async def get_keeper_pid(provider: LocalProvider) -> int:
    """Return the pid of the provider's keeper."""
    return int((await (await provider.keeper()).status())["pid"])
