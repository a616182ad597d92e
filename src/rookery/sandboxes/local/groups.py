"""Control groups: limits for a whole box, v2 first, v1 where only that has controllers. Stand-alone.

Promises:
- a box's group has the box's limits before a program starts in it, and goes when the box is gone; a few are kept
  for the next boxes, empty, as long as they account for next to nothing;
- what this machine cannot hold is said by name (`Held.missing`), never silently left out;
- killing through the group reaches everything in it at once, also what forks.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING or "rookery.sandboxes" in sys.modules:
    from rookery.sandboxes.small import suppress
else:
    from small import suppress

MEMORY, PIDS, CPU = "memory", "pids", "cpu"
_PERIOD = 100_000
MAX_IDLE = 32
MOST_LEFT = 4 << 20
"""Bytes that a group may still account for (files that its box read) when another box gets it."""
SOCKETS_PART = 8
"""On v1, all socket buffers of a sandbox together may hold this part of its memory limit, in addition to it."""
LEAST = 64 << 20
"""A box with less memory than this gets a new one: what is left would count."""


class Limits:
    """What a box may use in all; 0 is no limit."""

    __slots__ = ("cpus", "memory", "pids")

    def __init__(self, memory: int = 0, pids: int = 0, cpus: float = 0.0) -> None:
        self.memory = memory
        self.pids = pids
        self.cpus = cpus

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Limits) and (self.memory, self.pids, self.cpus) == (
            other.memory,
            other.pids,
            other.cpus,
        )

    __hash__ = None  # type: ignore[assignment]


class Held:
    """Where this process may make groups, and which limits they can hold."""

    def __init__(
        self, unified: str = "", v2: frozenset[str] = frozenset(), v1: dict[str, str] | None = None
    ) -> None:
        self.unified = unified
        """A folder of a v2 tree that we may make groups in; it can at least kill. Empty: none."""
        self.v2 = v2
        """Controllers that groups in it have."""
        self.v1 = v1 or {}
        """Controller → a folder of its v1 tree that we may make groups in."""
        self._idle: list[Group] = []

    @property
    def missing(self) -> list[str]:
        return [name for name in (MEMORY, PIDS, CPU) if name not in self.v2 and name not in self.v1]

    @property
    def tops(self) -> list[str]:
        """The folders that groups of ours are made in."""
        return list(dict.fromkeys(folder for folder in (self.unified, *self.v1.values()) if folder))

    @property
    def kills(self) -> bool:
        """Whether the kernel can end a whole group at once. Asked while the folder is there."""
        return bool(self.unified) and os.path.exists(f"{self.unified}/cgroup.kill")

    def leave(self) -> None:
        """Removes them where nobody has a group in them any more."""
        for group in self._idle:
            group.remove()
        self._idle.clear()
        for folder in self.tops:
            with suppress(OSError):
                os.rmdir(folder)

    def make(self, name: str) -> "Group":
        """One that nobody is in: a new one of this name, or one that was kept."""
        if self._idle:
            return self._idle.pop()
        try:
            return self._made(name)
        except FileNotFoundError:  # another keeper left, and took the folders along
            found = find()
            self.unified, self.v2, self.v1 = found.unified, found.v2, found.v1
            return self._made(name)

    def done_with(self, group: "Group", *, keep: bool) -> bool:
        """Whether the box is out of it; then it is kept or removed."""
        # Making and removing one costs the kernel several tenths of a millisecond for each controller.
        if (
            keep
            and not group.killed
            and len(self._idle) < MAX_IDLE
            and group.limits.memory >= LEAST
            and group.is_clean()
        ):
            self._idle.append(group)
            return True
        return group.remove()

    def _made(self, name: str) -> "Group":
        folders: list[str] = []
        group = Group(self, name, folders)
        try:
            for above in self.tops:
                os.mkdir(f"{above}/{name}")
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
        self.limits = Limits()
        """As they are now."""
        self.killed = False

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
        old, self.limits = self.limits, limits
        if limits == old:
            return
        memory = self.folder_of(MEMORY)
        if memory and limits.memory != old.memory:
            if MEMORY in self._held.v2:
                _write(f"{memory}/memory.max", str(limits.memory or "max"))
                _try(f"{memory}/memory.swap.max", "0" if limits.memory else "max")
            else:
                most = str(limits.memory or -1)
                _try(f"{memory}/memory.memsw.limit_in_bytes", "-1")  # never below the other, whichever way it goes
                _write(f"{memory}/memory.limit_in_bytes", most)
                _try(f"{memory}/memory.memsw.limit_in_bytes", most)
                # v1 counts socket buffers apart from other memory: what they may hold comes on top of the limit.
                # Each TCP socket can still exceed it by one segment (64 KiB), which the kernel never refuses.
                _try(f"{memory}/memory.kmem.tcp.limit_in_bytes", str(limits.memory // SOCKETS_PART or -1))
        if (pids := self.folder_of(PIDS)) and limits.pids != old.pids:
            _write(f"{pids}/pids.max", str(limits.pids or "max"))
        if (cpu := self.folder_of(CPU)) and limits.cpus != old.cpus:
            quota = max(1000, int(limits.cpus * _PERIOD)) if limits.cpus > 0 else 0
            if CPU in self._held.v2:
                _write(f"{cpu}/cpu.max", f"{quota or 'max'} {_PERIOD}")
            else:
                _write(f"{cpu}/cpu.cfs_period_us", str(_PERIOD))
                _write(f"{cpu}/cpu.cfs_quota_us", str(quota or -1))

    def is_clean(self) -> bool:
        """Nobody is in it, and next to nothing is accounted to it."""
        try:
            if self.folders and _read(f"{self.folders[0]}/cgroup.procs"):
                return False
            memory = self.folder_of(MEMORY)
            name = "memory.current" if MEMORY in self._held.v2 else "memory.usage_in_bytes"
            return not memory or int(_read(f"{memory}/{name}")) <= MOST_LEFT
        except OSError:
            return False

    def doors(self) -> list[int]:
        """Descriptors that a process writes "0" to, itself, to be in the v1 groups; a v2 group is joined by birth.

        Moving another process, or a whole one, waits for all processors: 10 to 14 ms after an idle moment. A
        thread that moves itself waits for nobody (0.1 ms).
        """
        found: list[int] = []
        try:
            for above in self._held.v1.values():
                found.append(os.open(f"{above}/{self.name}/tasks", os.O_WRONLY | os.O_CLOEXEC))  # noqa: PERF401
        except OSError:
            for fd in found:
                os.close(fd)
            raise
        return found

    def kill(self) -> bool:
        """Everything in it, at once; False where the kernel cannot."""
        if not self.unified:
            return False
        self.killed = True
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
                os.rmdir(folder)
            except FileNotFoundError:
                pass
            except OSError:
                gone = False
        return gone


def oom_kills(folder: str) -> int:
    """How many processes the kernel ended for want of memory, in the group whose memory this folder limits."""
    return _counted(folder, _memory_events(folder.rpartition("/")[0]), b"oom_kill")


def forks_refused(folder: str) -> int:
    """How often a process could not be started, in the group whose number of processes this folder limits."""
    return _counted(folder, "pids.events", b"max")


def _counted(folder: str, name: str, key: bytes) -> int:
    # Without a file object: every command of a box asks twice.
    try:
        fd = os.open(f"{folder}/{name}", os.O_RDONLY | os.O_CLOEXEC)
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


_known: dict[tuple[str, str], str] = {}
"""What was found out about the few folders that groups lie in: every command of a box asks."""


def _memory_events(above: str) -> str:
    """What v2 or v1 calls the file that counts."""
    key = (MEMORY, above)
    if key not in _known:
        v1 = os.path.exists(f"{above}/memory.oom_control")
        _remember(key, "memory.oom_control" if v1 else "memory.events")
    return _known[key]


def _remember(key: tuple[str, str], found: str) -> None:
    if len(_known) > 64:
        _known.clear()
    _known[key] = found


def pids_folder(memory: str) -> str:
    """Where the same group lies whose memory that folder limits, in the tree that limits processes; or empty."""
    above, _, name = memory.rpartition("/")
    key = (PIDS, above)
    if key not in _known:
        _remember(key, _pids_base(above))
    base = _known[key]
    return f"{base}/{name}" if base else ""


def _pids_base(memory: str) -> str:
    if os.path.exists(f"{memory}/pids.events"):  # v2, or both in one tree
        return memory
    name = memory.rpartition("/")[2]
    mounts = _mounts()
    for folder, kind, options in mounts:
        if kind == "cgroup" and PIDS in options:
            for top, other, of_top in mounts:  # an engine's lie at the same path in every tree, however deep
                if other == "cgroup" and MEMORY in of_top and memory.startswith(f"{top}/"):
                    same = f"{folder}{memory.removeprefix(top)}"
                    if os.path.exists(f"{same}/pids.events"):
                        return same
            for above in (f"{folder}{_own().get(PIDS, '/')}".rstrip("/"), folder):
                if os.path.exists(f"{above}/{name}/pids.events"):
                    return f"{above}/{name}"
    return ""


def find(name: str = "rookery") -> Held:
    """What may be used on this machine. Makes, where it can, a group of ours below the present one."""
    own = _own()
    mounts = _mounts()
    unified, v2 = "", frozenset[str]()
    v1: dict[str, str] = {}
    for folder, kind, _ in mounts:
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
    places = list(dict.fromkeys((here, os.path.dirname(here) if here != mount else here)))
    for above in places:
        base = f"{above}/{name}"
        if _is_free(above) and _ours(base):
            have = _enable(above, base, {MEMORY, PIDS, CPU})
            if have:
                return base, have
            with suppress(OSError):
                os.rmdir(base)
    for above in places:
        if _ours(f"{above}/{name}"):
            return f"{above}/{name}", frozenset()
    return "", frozenset()


def _is_free(group: str) -> bool:
    """Whether its children can have controllers: it is the root of all, or has no process of its own. In another
    one some can be enabled as well (pids, cpu), but then its children take no processes, ours or anybody's."""
    if not os.path.exists(f"{group}/cgroup.type"):
        return True
    with suppress(OSError), open(f"{group}/cgroup.procs") as file:
        return not file.read(1)
    return False


def _enable(above: str, base: str, wanted: set[str]) -> frozenset[str]:
    for folder in (above, base):
        for controller in wanted:
            _try(f"{folder}/cgroup.subtree_control", f"+{controller}")
    with suppress(OSError), open(f"{base}/cgroup.subtree_control") as file:
        return frozenset(file.read().split()) & frozenset(wanted)
    return frozenset()


def _usable(mount: str, own: str, name: str) -> str:
    for above in dict.fromkeys((f"{mount}{own}".rstrip("/"), mount)):
        base = f"{above}/{name}"
        if _ours(base):
            return base
    return ""


def _ours(base: str) -> bool:
    """Whether groups can be made in this folder. It may be there already, and another user's."""
    try:
        os.makedirs(base, exist_ok=True)
    except OSError:
        return False
    return os.access(base, os.W_OK) and os.access(f"{base}/cgroup.procs", os.W_OK)


def _own() -> dict[str, str]:
    """Controller → the present group of this process; "" is v2's."""
    found: dict[str, str] = {}
    with suppress(OSError), open("/proc/self/cgroup") as file:
        for line in file:
            _, names, path = line.rstrip("\n").split(":", 2)
            for controller in names.split(","):
                found[controller] = path
    return found


def _mounts() -> list[tuple[str, str, list[str]]]:
    found: list[tuple[str, str, list[str]]] = []
    with suppress(OSError), open("/proc/self/mounts") as file:
        for line in file:
            _, folder, kind, options, *_ = line.split(" ")
            if kind in ("cgroup", "cgroup2"):
                found.append((folder, kind, options.split(",")))
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


def _try(path: str, text: str) -> None:
    with suppress(OSError):
        _write(path, text)
