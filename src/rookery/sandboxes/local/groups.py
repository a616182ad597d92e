"""Control groups: limits for a whole box, v2 first, v1 where only that has controllers. Stand-alone.

Promises:
- a box's group is made with its limits in it before the box starts, and removed when the box is gone;
- what this machine cannot hold is said by name (`Held.missing`), never silently left out;
- killing through the group reaches everything in it at once, also what forks.
"""

import contextlib
import os

MEMORY, PIDS, CPU = "memory", "pids", "cpu"
_PERIOD = 100_000


class Limits:
    """What a box may use in all; 0 is no limit."""

    __slots__ = ("cpus", "memory", "pids")

    def __init__(self, memory: int = 0, pids: int = 0, cpus: float = 0.0) -> None:
        self.memory = memory
        self.pids = pids
        self.cpus = cpus


class Held:
    """Where this process may make groups, and which limits they can hold."""

    def __init__(self, unified: str = "", v2: frozenset[str] = frozenset(), v1: dict[str, str] | None = None) -> None:
        self.unified = unified
        """A folder of a v2 tree that we may make groups in; it can at least kill. Empty: none."""
        self.v2 = v2
        """Controllers that groups in it have."""
        self.v1 = v1 or {}
        """Controller → a folder of its v1 tree that we may make groups in."""

    @property
    def missing(self) -> list[str]:
        return [name for name in (MEMORY, PIDS, CPU) if name not in self.v2 and name not in self.v1]

    def make(self, name: str) -> "Group":
        folders: list[str] = []
        group = Group(self, name, folders)
        try:
            for above in dict.fromkeys([*([self.unified] if self.unified else []), *self.v1.values()]):
                os.mkdir(f"{above}/{name}")  # noqa: PTH102
                folders.append(f"{above}/{name}")
        except OSError:
            group.remove()
            raise
        return group


class Group:
    """One box's groups."""

    def __init__(self, held: Held, name: str, folders: list[str]) -> None:
        self._held = held
        self.name = name
        self.folders = folders

    @property
    def unified(self) -> str:
        """Where its v2 group lies; empty where there is none."""
        return f"{self._held.unified}/{self.name}" if self._held.unified else ""

    def folder_of(self, controller: str) -> str:
        if controller in self._held.v2:
            return self.unified
        above = self._held.v1.get(controller)
        return f"{above}/{self.name}" if above else ""

    def limit(self, limits: Limits) -> None:
        memory = self.folder_of(MEMORY)
        if memory and limits.memory:
            if MEMORY in self._held.v2:
                _write(f"{memory}/memory.max", str(limits.memory))
                _try(f"{memory}/memory.swap.max", "0")
            else:
                _write(f"{memory}/memory.limit_in_bytes", str(limits.memory))
                _try(f"{memory}/memory.memsw.limit_in_bytes", str(limits.memory))
        if (pids := self.folder_of(PIDS)) and limits.pids:
            _write(f"{pids}/pids.max", str(limits.pids))
        if (cpu := self.folder_of(CPU)) and limits.cpus > 0:
            quota = max(1000, int(limits.cpus * _PERIOD))
            if CPU in self._held.v2:
                _write(f"{cpu}/cpu.max", f"{quota} {_PERIOD}")
            else:
                _write(f"{cpu}/cpu.cfs_period_us", str(_PERIOD))
                _write(f"{cpu}/cpu.cfs_quota_us", str(quota))

    def take(self, pid: int) -> None:
        """Moves a process into the v1 groups; a v2 group is joined by being born there."""
        for above in self._held.v1.values():
            _write(f"{above}/{self.name}/cgroup.procs", str(pid))

    def kill(self) -> bool:
        """Everything in it, at once; False where the kernel cannot."""
        if not self.unified:
            return False
        try:
            _write(f"{self.unified}/cgroup.kill", "1")
        except OSError:
            return False
        return True

    def remove(self) -> bool:
        """Whether all of it is gone: a group with a process in it stays."""
        gone = True
        for folder in self.folders:
            try:
                os.rmdir(folder)  # noqa: PTH106
            except FileNotFoundError:
                pass
            except OSError:
                gone = False
        return gone


def oom_kills(folder: str) -> int:
    """How many processes the kernel ended for want of memory, in the group whose memory this folder limits."""
    for file, key in (("memory.events", b"oom_kill"), ("memory.oom_control", b"oom_kill")):
        with contextlib.suppress(OSError), open(f"{folder}/{file}", "rb") as data:  # noqa: PTH123
            for line in data.read(4096).splitlines():
                name, _, value = line.partition(b" ")
                if name == key and value.strip().isdigit():
                    return int(value)
    return 0


def find(name: str = "rookery") -> Held:
    """What may be used on this machine. Makes, where it can, a group of ours below the present one."""
    own = _own()
    mounts = _mounts()
    unified, v2 = "", frozenset[str]()
    v1: dict[str, str] = {}
    for folder, kind, options in mounts:
        if kind == "cgroup2" and not unified:
            unified, v2 = _usable_v2(folder, own.get("", "/"), name)
    for folder, kind, options in mounts:
        if kind != "cgroup":
            continue
        for controller in (MEMORY, PIDS, CPU):
            if controller in options and controller not in v1 and controller not in v2:
                above = _usable(folder, own.get(controller, "/"), name)
                if above:
                    v1[controller] = above
    return Held(unified, v2, v1)


def _usable_v2(mount: str, own: str, name: str) -> tuple[str, frozenset[str]]:
    """A folder for our groups and the controllers they have. In v2 a group with processes has no children with
    controllers, so ours is a sibling where we may make one, else a child that can only kill and count."""
    here = f"{mount}{own}".rstrip("/") or mount
    wanted = {MEMORY, PIDS, CPU}
    for above in dict.fromkeys((here, os.path.dirname(here) if here != mount else here)):  # noqa: PTH120
        base = f"{above}/{name}"
        try:
            os.makedirs(base, exist_ok=True)  # noqa: PTH103
        except OSError:
            continue
        have = _enable(above, base, wanted)
        if have or above == mount or above != here:
            return base, have
    base = f"{here}/{name}"
    return (base, frozenset()) if os.path.isdir(base) else ("", frozenset())  # noqa: PTH112


def _enable(above: str, base: str, wanted: set[str]) -> frozenset[str]:
    for folder in (above, base):
        for controller in wanted:
            _try(f"{folder}/cgroup.subtree_control", f"+{controller}")
    with contextlib.suppress(OSError), open(f"{base}/cgroup.subtree_control") as file:  # noqa: PTH123
        return frozenset(file.read().split()) & frozenset(wanted)
    return frozenset()


def _usable(mount: str, own: str, name: str) -> str:
    for above in dict.fromkeys((f"{mount}{own}".rstrip("/"), mount)):
        base = f"{above}/{name}"
        try:
            os.makedirs(base, exist_ok=True)  # noqa: PTH103
        except OSError:
            continue
        if os.access(f"{base}/cgroup.procs", os.W_OK):
            return base
    return ""


def _own() -> dict[str, str]:
    """Controller → the present group of this process; "" is v2's."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as file:  # noqa: PTH123
        for line in file:
            _, names, path = line.rstrip("\n").split(":", 2)
            for controller in names.split(","):
                found[controller] = path
    return found


def _mounts() -> list[tuple[str, str, list[str]]]:
    found: list[tuple[str, str, list[str]]] = []
    with contextlib.suppress(OSError), open("/proc/self/mounts") as file:  # noqa: PTH123
        for line in file:
            _, folder, kind, options, *_ = line.split(" ")
            if kind in ("cgroup", "cgroup2"):
                found.append((folder, kind, options.split(",")))
    return found


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _try(path: str, text: str) -> None:
    with contextlib.suppress(OSError):
        _write(path, text)
