"""Looking at the host before and after: what a box must not change, and what must not be left of it.

Promises:
- everything of a box is known by what the kernel says of it (its groups, its users, its namespaces), not by what
  its programs say of themselves;
- what other programs of this machine do at the same time is not counted.
"""

import contextlib
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from rookery.sandbox_runtime import processes
from rookery.sandboxes.local.provider import LocalProvider, LocalSandbox

FIRST, LAST = 0x20000000, 0x30000000
"""Users of boxes."""
_SETTINGS = ("core_pattern", "hostname", "domainname", "modprobe", "panic", "pid_max", "threads-max", "sysrq",
             "randomize_va_space", "printk")  # fmt: skip


@dataclass(frozen=True)
class Box:
    """How the host knows a box."""

    name: str
    pid: int
    uid: int
    started: str
    namespaces: tuple[str, ...]
    folders: tuple[str, ...]
    lease: Path

    def left(self) -> list[str]:
        """What there still is of it. Its groups may be the next box's by now, or kept for one."""
        found = [f"process {pid}" for pid in self.processes()]
        if self.lease.exists():
            found.append(f"lease {self.lease.name}")
        return found

    def processes(self) -> list[int]:
        """Those of its user in its namespaces; pid 1 is gone when all of them are."""
        first = processes.read_stat(self.pid)
        if first is not None and first[0] not in "ZX" and str(first[2]) == self.started:
            return [self.pid, *_below(self.pid)]
        if not self.namespaces:  # nobody but root may look; with pid 1 the kernel ends all of its namespace
            return []
        found = []
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            with contextlib.suppress(OSError):
                inside = self.uid < 0 or self.uid <= os.stat(f"/proc/{entry}").st_uid < self.uid + 65536
                if (
                    inside
                    and _namespaces(int(entry)) == self.namespaces
                    and Path(f"/proc/{entry}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
                ):
                    found.append(int(entry))
        return found


def look_at(sandbox: LocalSandbox) -> Box:
    """A box that is alive."""
    given = sandbox._handle
    assert given is not None
    groups = Path(f"/proc/{given.pid}/cgroup").read_text().splitlines()
    mounts = [line.split(" ") for line in Path("/proc/self/mounts").read_text().splitlines()]
    folders = []
    for line in groups:
        _, names, path = line.split(":", 2)
        for _, folder, kind, options, *_ in mounts:
            fits = kind == "cgroup2" if not names else kind == "cgroup" and names in options.split(",")
            if fits and "/rookery/" in path:
                folders.append(f"{folder}{path}")
    assert not groups or folders or not given.memory_cgroup
    return Box(
        name=given.name,
        pid=given.pid,
        uid=given.root_uid,
        started=_started(given.pid),
        namespaces=_namespaces(given.pid),
        folders=tuple(folders),
        lease=sandbox._folder / "leases" / f"{sandbox.id}.json",
    )


def _started(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def _below(pid: int) -> list[int]:
    found = processes.list_children(pid)
    for child in list(found):
        found += _below(child)
    return found


def _namespaces(pid: int) -> tuple[str, ...]:
    """Empty where we may not know them."""
    try:
        return tuple(os.readlink(f"/proc/{pid}/ns/{kind}") for kind in ("pid", "mnt", "net"))
    except PermissionError:
        return ()


@dataclass(frozen=True)
class Host:
    """What no box may change."""

    mounts: tuple[str, ...]
    """Those that a box or its keeper could have made: none."""
    interfaces: tuple[str, ...]
    settings: tuple[str, ...]
    memory: tuple[str, ...]
    """Shared memory that belongs to users of boxes: none."""
    cores: tuple[str, ...]
    clock: int
    root: tuple[str, ...]
    hostname: str
    home: tuple[str, ...]


def look_at_host(home: Path) -> Host:
    # The clock's second may turn while we look: it is halved.
    return Host(
        mounts=tuple(line for line in _text("/proc/self/mounts").splitlines() if _of_a_box(line, home)),
        interfaces=tuple(sorted(name for _, name in socket.if_nameindex())),
        settings=tuple(_text(f"/proc/sys/kernel/{name}") for name in _SETTINGS),
        memory=tuple(sorted(_of_boxes())),
        cores=tuple(
            sorted(str(path) for folder in (Path.cwd(), Path("/"), home) for path in folder.glob("core*"))
        ),
        clock=round((time.time() - time.monotonic()) / 10),
        root=tuple(sorted(os.listdir("/"))),
        hostname=socket.gethostname(),
        home=tuple(sorted(path.name for path in home.iterdir())),
    )


def _of_a_box(mount: str, home: Path) -> bool:
    """Whether a box could have made it; other programs of this machine mount things too."""
    return str(home) in mount or "skeleton" in mount or "userxattr" in mount


def _of_boxes() -> list[str]:
    found = []
    for path in Path("/dev/shm").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if FIRST <= path.lstat().st_uid < LAST:
                found.append(str(path))
    for kind, column in (("shm", 7), ("msg", 7), ("sem", 4)):
        lines = _text(f"/proc/sysvipc/{kind}").splitlines()[1:]
        found += [f"{kind} {line}" for line in lines if FIRST <= int(line.split()[column]) < LAST]
    return found


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        return str(error.errno)


async def keeper_of(provider: LocalProvider) -> int:
    """The pid of the provider's keeper."""
    return int((await (await provider.keeper()).status())["pid"])
