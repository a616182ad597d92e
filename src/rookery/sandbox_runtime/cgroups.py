"""Cgroups: limits for all processes of a sandbox together, with cgroup v2 or, for missing controllers, v1.

Cgroups are created in the keeper, the daemon that creates local sandboxes. The process that uses a sandbox reads
their counters.

Guarantees:
- a sandbox's cgroup has the sandbox's limits before a program starts in it, and is removed with the sandbox. A few
  empty ones are kept for later sandboxes, if almost no memory is charged to them;
- limits that this machine cannot enforce are listed (`CgroupManager.missing_controllers`), never silently ignored;
- killing a cgroup reaches all its processes at once, also those that fork.
"""

import os

from rookery.sandbox_runtime.lightweight import suppress

TYPE_CHECKING = False

MEMORY, PIDS, CPU = "memory", "pids", "cpu"
_CPU_PERIOD = 100_000
MAX_IDLE = 32
MAX_RESIDUAL_MEMORY = 4 << 20
"""Maximum number of bytes (page cache) that are still charged to a cgroup when another sandbox reuses it."""
SOCKET_BUFFER_DIVISOR = 8
"""Divisor for the socket buffers of a sandbox under cgroup v1: they may use the memory limit divided by this
number, in addition to the memory limit itself."""
MIN_REUSED_MEMORY = 64 << 20
"""A sandbox with a lower memory limit gets a new cgroup, because residual memory would matter."""


class CgroupLimits:
    """Limits for all processes of a sandbox together. 0 means no limit."""

    __slots__ = ("cpus", "memory", "pids")

    def __init__(self, memory: int = 0, pids: int = 0, cpus: float = 0.0) -> None:
        self.memory = memory
        self.pids = pids
        self.cpus = cpus

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CgroupLimits) and (self.memory, self.pids, self.cpus) == (
            other.memory,
            other.pids,
            other.cpus,
        )

    __hash__ = None  # type: ignore[assignment]


class CgroupManager:
    """Creates cgroups for sandboxes below the directories that `find_cgroups` found, and reuses idle ones."""

    def __init__(
        self, unified: str = "", v2: frozenset[str] = frozenset(), v1: dict[str, str] | None = None
    ) -> None:
        self.unified = unified
        """Parent directory in the v2 hierarchy; empty if this process may not create cgroups there. Even without
        controllers, such cgroups serve to kill all their processes at once."""
        self.v2 = v2
        """Controllers that the cgroups below `unified` have."""
        self.v1 = v1 or {}
        """Parent directory in the v1 hierarchy of each controller for which this process may create cgroups
        there."""
        self._idle: list[SandboxCgroup] = []

    @property
    def missing_controllers(self) -> list[str]:
        """The controllers whose limits cannot be enforced on this machine."""
        return [name for name in (MEMORY, PIDS, CPU) if name not in self.v2 and name not in self.v1]

    @property
    def parents(self) -> list[str]:
        """The directories in which cgroups are created."""
        return list(dict.fromkeys(path for path in (self.unified, *self.v1.values()) if path))

    @property
    def can_kill(self) -> bool:
        """True if the kernel can kill a whole cgroup at once. False if the parent directory does not exist."""
        return bool(self.unified) and os.path.exists(f"{self.unified}/cgroup.kill")

    def close(self) -> None:
        """Remove idle cgroups, and the parent directories if no other keeper uses them."""
        for group in self._idle:
            group.remove()
        self._idle.clear()
        for parent in self.parents:
            with suppress(OSError):
                os.rmdir(parent)

    def acquire(self, name: str) -> "SandboxCgroup":
        """Return a cgroup without processes: an idle one, or else a new one with this name."""
        if self._idle:
            return self._idle.pop()
        try:
            return self._create(name)
        except FileNotFoundError:  # another keeper removed the parent directories when it exited
            found = find_cgroups()
            self.unified, self.v2, self.v1 = found.unified, found.v2, found.v1
            return self._create(name)

    def release(self, group: "SandboxCgroup", *, reuse: bool) -> bool:
        """Take back the cgroup of a dead sandbox: keep it for reuse if possible, or remove it.

        Return False if it could not be removed because it still has processes.
        """
        # Creating and removing a cgroup takes the kernel several tenths of a millisecond per controller.
        if reuse and not group.killed and len(self._idle) < MAX_IDLE and group.limits.memory >= MIN_REUSED_MEMORY:
            # Not removed at once: if a process is still leaving the cgroup, it can be reused a moment later.
            if group.count_processes(1):
                return False
            if group.has_little_memory():
                self._idle.append(group)
                return True
        return group.remove()

    def _create(self, name: str) -> "SandboxCgroup":
        directories: list[str] = []
        group = SandboxCgroup(self, name, directories)
        try:
            for parent in self.parents:
                os.mkdir(f"{parent}/{name}")
                directories.append(f"{parent}/{name}")
        except OSError:
            group.remove()
            raise
        return group


class SandboxCgroup:
    """The cgroup of one sandbox, in one or several hierarchies."""

    def __init__(self, manager: CgroupManager, name: str, directories: list[str]) -> None:
        self._manager = manager
        self.name = name
        self.directories = directories
        self.limits = CgroupLimits()
        """The limits that are currently set."""
        self.killed = False

    @property
    def unified(self) -> str:
        """The cgroup's directory in the v2 hierarchy; empty if it is not in that hierarchy."""
        return f"{self._manager.unified}/{self.name}" if self._manager.unified else ""

    def find_directory(self, controller: str) -> str:
        """Return the directory with the files of a controller; empty if the cgroup lacks the controller."""
        if controller in self._manager.v2:
            return self.unified
        parent = self._manager.v1.get(controller)
        return f"{parent}/{self.name}" if parent else ""

    def set_limits(self, limits: CgroupLimits) -> None:
        """Set the limits of the cgroup. Limits whose controller is missing are skipped."""
        old, self.limits = self.limits, limits
        if limits == old:
            return
        memory = self.find_directory(MEMORY)
        if memory and limits.memory != old.memory:
            if MEMORY in self._manager.v2:
                _write(f"{memory}/memory.max", str(limits.memory or "max"))
                _try_write(f"{memory}/memory.swap.max", "0" if limits.memory else "max")
            else:
                most = str(limits.memory or -1)
                _try_write(f"{memory}/memory.memsw.limit_in_bytes", "-1")  # must never be below the memory limit
                _write(f"{memory}/memory.limit_in_bytes", most)
                _try_write(f"{memory}/memory.memsw.limit_in_bytes", most)
                # v1 counts socket buffers separately, in addition to the memory limit. Each TCP socket can exceed
                # its limit by one segment (64 KiB), which the kernel never refuses.
                _try_write(
                    f"{memory}/memory.kmem.tcp.limit_in_bytes", str(limits.memory // SOCKET_BUFFER_DIVISOR or -1)
                )
        if (pids := self.find_directory(PIDS)) and limits.pids != old.pids:
            _write(f"{pids}/pids.max", str(limits.pids or "max"))
        if (cpu := self.find_directory(CPU)) and limits.cpus != old.cpus:
            quota = max(1000, int(limits.cpus * _CPU_PERIOD)) if limits.cpus > 0 else 0
            if CPU in self._manager.v2:
                _write(f"{cpu}/cpu.max", f"{quota or 'max'} {_CPU_PERIOD}")
            else:
                _write(f"{cpu}/cpu.cfs_period_us", str(_CPU_PERIOD))
                _write(f"{cpu}/cpu.cfs_quota_us", str(quota or -1))

    def count_processes(self, most: int) -> int:
        """Return how many processes the cgroup has, but at most `most`; `most` if that cannot be read."""
        try:
            listed = _read(f"{self.directories[0]}/cgroup.procs") if self.directories else b""
            return min(most, listed.count(b"\n"))
        except FileNotFoundError:
            return 0
        except OSError:
            return most

    def has_little_memory(self) -> bool:
        """Return whether almost no memory is charged to the cgroup, so that another sandbox can use it."""
        try:
            memory = self.find_directory(MEMORY)
            name = "memory.current" if MEMORY in self._manager.v2 else "memory.usage_in_bytes"
            return not memory or int(_read(f"{memory}/{name}")) <= MAX_RESIDUAL_MEMORY
        except OSError:
            return False

    def open_v1_tasks(self) -> list[int]:
        """Open the `tasks` files of the v1 cgroups. A process writes "0" to them to join.

        Processes are forked into a v2 cgroup, but must move into v1 cgroups. Moving another process waits for
        all CPUs (10 to 14 ms on an idle machine); a thread that moves itself does not wait (0.1 ms).
        """
        fds: list[int] = []
        try:
            for parent in self._manager.v1.values():
                fds.append(os.open(f"{parent}/{self.name}/tasks", os.O_WRONLY | os.O_CLOEXEC))  # noqa: PERF401
        except OSError:
            for fd in fds:
                os.close(fd)
            raise
        return fds

    def kill(self) -> bool:
        """Kill all processes of the cgroup at once. Return False if the kernel does not support that."""
        if not self.unified:
            return False
        self.killed = True
        try:
            _write(f"{self.unified}/cgroup.kill", "1")
        except OSError:
            return False
        return True

    def remove(self) -> bool:
        """Remove the cgroup. Return False if it still has processes."""
        removed = True
        for directory in self.directories:
            try:
                os.rmdir(directory)
            except FileNotFoundError:
                pass
            except OSError:
                removed = False
        return removed


def count_oom_kills(directory: str) -> int:
    """Return how many processes the OOM killer has killed in a cgroup of the memory controller."""
    return _read_counter(directory, _find_memory_events_file(directory.rpartition("/")[0]), b"oom_kill")


def count_refused_forks(directory: str) -> int:
    """Return how many forks the kernel has refused in a cgroup of the pids controller."""
    return _read_counter(directory, "pids.events", b"max")


def _read_counter(directory: str, name: str, key: bytes) -> int:
    # Without a file object: this runs twice for every command.
    try:
        fd = os.open(f"{directory}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        for line in os.read(fd, 4096).splitlines():
            found, _, value = line.partition(b" ")
            if found == key and value.strip().isdigit():
                return int(value)
    except OSError:
        pass
    finally:
        os.close(fd)
    return 0


_cache: dict[tuple[str, str], str] = {}
"""Cached file names and directories, by controller and parent directory. Every command needs them."""


def _find_memory_events_file(parent: str) -> str:
    """Return the name of the file that counts OOM kills, which differs between v1 and v2."""
    key = (MEMORY, parent)
    if key not in _cache:
        v1 = os.path.exists(f"{parent}/memory.oom_control")
        _store(key, "memory.oom_control" if v1 else "memory.events")
    return _cache[key]


def _store(key: tuple[str, str], value: str) -> None:
    if len(_cache) > 64:
        _cache.clear()
    _cache[key] = value


def find_pids_directory(memory_directory: str) -> str:
    """Return a cgroup's directory for the pids controller, given its directory for the memory controller.

    Return an empty string if there is none.
    """
    parent, _, name = memory_directory.rpartition("/")
    key = (PIDS, parent)
    if key not in _cache:
        _store(key, _find_pids_parent(parent))
    base = _cache[key]
    return f"{base}/{name}" if base else ""


def _find_pids_parent(memory: str) -> str:
    if os.path.exists(f"{memory}/pids.events"):  # v2, or both controllers in one v1 hierarchy
        return memory
    name = memory.rpartition("/")[2]
    mounts = list_cgroup_mounts()
    for mount_point, kind, options in mounts:
        if kind == "cgroup" and PIDS in options:
            for top, other, top_options in mounts:  # Docker uses the same path in every hierarchy
                if other == "cgroup" and MEMORY in top_options and memory.startswith(f"{top}/"):
                    same = f"{mount_point}{memory.removeprefix(top)}"
                    if os.path.exists(f"{same}/pids.events"):
                        return same
            for parent in (f"{mount_point}{_read_own_cgroups().get(PIDS, '/')}".rstrip("/"), mount_point):
                if os.path.exists(f"{parent}/{name}/pids.events"):
                    return f"{parent}/{name}"
    return ""


def find_cgroups(name: str = "rookery") -> CgroupManager:
    """Find out where this process may create cgroups, and create a parent directory for them near its own cgroup.

    `name` is the name of the parent directory.
    """
    own = _read_own_cgroups()
    mounts = list_cgroup_mounts()
    unified, v2 = "", frozenset[str]()
    v1: dict[str, str] = {}
    for mount_point, kind, _ in mounts:
        if kind == "cgroup2" and not unified:
            unified, v2 = _find_v2_parent(mount_point, own.get("", "/"), name)
    for mount_point, kind, options in mounts:
        if kind != "cgroup":
            continue
        for controller in (MEMORY, PIDS, CPU):
            if controller in options and controller not in v1 and controller not in v2:
                parent = _find_v1_parent(mount_point, own.get(controller, "/"), name)
                if parent:
                    v1[controller] = parent
    return CgroupManager(unified, v2, v1)


def _find_v2_parent(mount: str, own: str, name: str) -> tuple[str, frozenset[str]]:
    """Create a parent directory for cgroups and return it with its controllers.

    In v2, children of a cgroup with processes cannot have controllers. The parent is therefore a sibling of this
    process's own cgroup if it can be created. Otherwise it is a child without controllers, whose cgroups serve
    only to kill their processes.
    """
    here = f"{mount}{own}".rstrip("/") or mount
    parents = list(dict.fromkeys((here, os.path.dirname(here) if here != mount else here)))
    for parent in parents:
        base = f"{parent}/{name}"
        if _has_no_processes(parent) and _make_parent(base):
            enabled = _enable_controllers(parent, base, {MEMORY, PIDS, CPU})
            if enabled:
                return base, enabled
            with suppress(OSError):
                os.rmdir(base)
    for parent in parents:
        if _make_parent(f"{parent}/{name}"):
            return f"{parent}/{name}", frozenset()
    return "", frozenset()


def _has_no_processes(group: str) -> bool:
    """Return whether children of a v2 cgroup can have controllers: it is the root, or has no process.

    In other cgroups some controllers (pids, cpu) can be enabled too, but then no process can join a child.
    """
    if not os.path.exists(f"{group}/cgroup.type"):
        return True
    with suppress(OSError), open(f"{group}/cgroup.procs") as file:
        return not file.read(1)
    return False


def _enable_controllers(parent: str, base: str, wanted: set[str]) -> frozenset[str]:
    for directory in (parent, base):
        for controller in wanted:
            _try_write(f"{directory}/cgroup.subtree_control", f"+{controller}")
    with suppress(OSError), open(f"{base}/cgroup.subtree_control") as file:
        return frozenset(file.read().split()) & frozenset(wanted)
    return frozenset()


def _find_v1_parent(mount: str, own: str, name: str) -> str:
    for parent in dict.fromkeys((f"{mount}{own}".rstrip("/"), mount)):
        base = f"{parent}/{name}"
        if _make_parent(base):
            return base
    return ""


def _make_parent(base: str) -> bool:
    """Create a directory, unless it exists, and return whether this process may create cgroups in it.

    It may not if the directory belongs to another user.
    """
    try:
        os.makedirs(base, exist_ok=True)
    except OSError:
        return False
    return os.access(base, os.W_OK) and os.access(f"{base}/cgroup.procs", os.W_OK)


def _read_own_cgroups() -> dict[str, str]:
    """Return the path of this process's cgroup for each controller. The key of the v2 hierarchy is empty."""
    found: dict[str, str] = {}
    with suppress(OSError), open("/proc/self/cgroup") as file:
        for line in file:
            _, names, path = line.rstrip("\n").split(":", 2)
            for controller in names.split(","):
                found[controller] = path
    return found


def list_cgroup_mounts() -> list[tuple[str, str, list[str]]]:
    """Return mount point, type (`cgroup` or `cgroup2`) and options of all mounted cgroup hierarchies."""
    found: list[tuple[str, str, list[str]]] = []
    with suppress(OSError), open("/proc/self/mounts") as file:
        for line in file:
            _, mount_point, kind, options, *_ = line.split(" ")
            if kind in ("cgroup", "cgroup2"):
                found.append((mount_point, kind, options.split(",")))
    return found


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _try_write(path: str, text: str) -> None:
    with suppress(OSError):
        _write(path, text)
