"""The file system of a box: the host's system or an image, read-only, under a writable layer of bounded size.

Stand-alone. `prepare` runs once, in the keeper, in a mount namespace of its own; `enter` in every box.

Promises:
- of the host a box without an image sees its system folders, read-only, and copies of a handful of harmless files
  of /etc that everybody may read; nothing else; a box with an image sees nothing of the host;
- no path of a box is looked up before the box's root is the root: a link in it leads nowhere but into the box;
- everything a box writes lies in one tmpfs of bounded size, which goes with the box;
- nothing of it is mounted where the host could see it, and nothing outside of the state folder is written.
"""

from __future__ import annotations

import os
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

if TYPE_CHECKING or "rookery.sandboxes" in sys.modules:
    from rookery.sandboxes.local import kernel as k
    from rookery.sandboxes.small import suppress
else:
    import kernel as k
    from small import suppress

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt/venv")
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
ETC = (
    "alternatives",
    "ca-certificates",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
    "protocols",
    "services",
    "ssl",
    "pki",
    "terminfo",
    "magic",
    "debian_version",
    "os-release",
)
MASKED = ("/proc/cmdline", "/proc/loadavg", "/proc/sys/kernel/random/boot_id")
"""Files of /proc that tell how the host was started, which one it is and how busy it is."""
WORK = "/work"
USER = 1000
MANY = 32
"""Layers: from here on a box is made in another way, which older kernels do not have."""
_PAGE = 4000
TERMINALS = 64
"""Of one box; the host has a few thousand for all."""
_FILES = {
    "passwd": f"root:x:0:0:root:/root:/bin/sh\nuser:x:{USER}:{USER}:user:{WORK}:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
    "group": f"root:x:0:\nuser:x:{USER}:\ntty:x:5:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "hostname": "sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
_PLACES = ("proc", "dev", "tmp", "run", "var", "var/tmp", "root", "home", "srv", "mnt", "media", "opt", WORK[1:])
_QUIET = k.MS_NOSUID | k.MS_NODEV
_MOST_OF_ETC = 4 << 20


SKELETON = "shared/skeleton"
SPOT = "box"
KEPT = "kept"
"""Snapshots, in a tmpfs of their own."""


class Tree:
    """What every box of this keeper is made from."""

    def __init__(self, system: list[str], overlay: bool) -> None:
        self.system = system
        """Folders and files that are bound into a box without an image, in order."""
        self.overlay = overlay


class Dress:
    """What one box is to be made from."""

    __slots__ = ("base", "layers", "lowers", "mounts", "resolve", "size", "uid")

    def __init__(self, size: int, uid: int = USER, lowers: tuple[str, ...] = (), *, resolve: bool = False) -> None:
        self.size = size
        self.uid = uid
        self.lowers = lowers
        """Snapshots under its writable layer, uppermost first."""
        self.base = -1
        """Detached mounts of an image; -1: the host's system."""
        self.layers: tuple[str, ...] = ()
        """Folders in them that it is made of, uppermost first; none: it is the system itself."""
        self.mounts: tuple[tuple[str | int, str], ...] = ()
        """Folders of the host, or detached mounts of them, each with where it goes."""
        self.resolve = resolve
        """Whether it finds names the way the host does."""


def prepare(folder: str, extra: list[str], write_map: Callable[[int], None]) -> Tree:
    """In the keeper's own mount namespace. `extra`: further folders of the host, such as an interpreter's."""
    k.mount("none", "/", "", k.MS_REC | k.MS_PRIVATE)
    # Paths are relative from here on: a box is another user, who may not pass through the folders above.
    os.chmod(folder, 0o755)
    os.chdir(folder)
    for name in ("shared", SPOT, KEPT):
        os.makedirs(name, exist_ok=True)
    shared = "shared"
    k.mount("tmpfs", shared, "tmpfs", _QUIET, "size=64m,mode=755")
    k.mount("tmpfs", KEPT, "tmpfs", _QUIET, "mode=755")
    for name in ("skeleton", "bound", "skeleton/etc", *(f"skeleton/{place}" for place in _PLACES)):
        os.mkdir(f"{shared}/{name}")
    for name, text in _FILES.items():
        _write(f"{SKELETON}/etc/{name}", text)
    os.symlink("/proc/mounts", f"{SKELETON}/etc/mtab")
    # Debian's Pythons have a part of their site there: a new one must find what ours found.
    for name in (*ETC, *(name for name in os.listdir("/etc") if name.startswith("python"))):
        _copy_public(f"/etc/{name}", f"{SKELETON}/etc/{name}")
    system: list[str] = []
    for path in (*SYSTEM, *extra):
        if _offer(path, SKELETON, f"{shared}/bound/{len(system)}", system):
            system.append(path)
    _devices(shared)
    _masks(shared)
    tree = Tree(system, overlay=True)
    tree.overlay = _can_overlay(write_map)
    k.mount("none", shared, "", k.MS_REMOUNT | k.MS_BIND | k.MS_RDONLY | _QUIET)
    return tree


def _copy_public(source: str, target: str) -> None:
    """What everybody on this machine may read. Copies, since each mount in a box costs its making and its end."""
    try:
        info = os.lstat(source)
        if stat.S_ISLNK(info.st_mode):
            os.symlink(os.readlink(source), target)
        elif stat.S_ISDIR(info.st_mode) and info.st_mode & 0o005 == 0o005:
            os.mkdir(target)
            for name in os.listdir(source):
                _copy_public(f"{source}/{name}", f"{target}/{name}")
        elif stat.S_ISREG(info.st_mode) and info.st_mode & 0o004 and info.st_size < _MOST_OF_ETC:
            with open(source, "rb") as old, open(target, "wb") as new:
                new.write(old.read(_MOST_OF_ETC))
    except (FileNotFoundError, PermissionError):
        pass


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _offer(path: str, skeleton: str, spot: str, system: list[str]) -> bool:
    """Makes a place for one path of the host in the skeleton; True where it has to be bound into every box."""
    try:
        info = os.lstat(path)
    except OSError:
        return False
    if any(path == other or path.startswith(f"{other}/") for other in system):
        return False
    place = f"{skeleton}{path}"
    with suppress(FileExistsError):
        os.makedirs(os.path.dirname(place))
    if stat.S_ISLNK(info.st_mode):
        with suppress(FileExistsError):
            os.symlink(os.readlink(path), place)
        return False
    if stat.S_ISDIR(info.st_mode):
        os.makedirs(place, exist_ok=True)
        os.mkdir(spot)
    elif stat.S_ISREG(info.st_mode) and not os.path.exists(place):
        for new in (place, spot):
            os.close(os.open(new, os.O_CREAT | os.O_WRONLY, 0o644))
    else:
        return False
    k.mount(path, spot, "", k.MS_BIND | k.MS_REC)
    _read_only(spot)
    return True


def _read_only(spot: str) -> None:
    # In a user namespace of ours, flags that the host's mount has are locked: they must be repeated.
    known = {os.ST_NOSUID: k.MS_NOSUID, os.ST_NODEV: k.MS_NODEV, os.ST_NOEXEC: k.MS_NOEXEC, 4096: k.MS_RELATIME}
    found = os.statvfs(spot).f_flag
    flags = sum(flag for bit, flag in known.items() if found & bit)
    k.mount("none", spot, "", k.MS_BIND | k.MS_REMOUNT | k.MS_RDONLY | k.MS_NOSUID | flags)


def _devices(shared: str) -> None:
    os.mkdir(f"{shared}/dev")
    for name in DEVICES:
        spot = f"{shared}/dev/{name}"
        if os.path.exists(f"/dev/{name}"):
            os.close(os.open(spot, os.O_CREAT | os.O_WRONLY, 0o666))
            k.mount(f"/dev/{name}", spot, "", k.MS_BIND)
            _read_only(spot)  # devices can be written to all the same; their times and modes cannot be changed
    for name, target in (
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
        ("ptmx", "pts/ptmx"),
    ):
        os.symlink(target, f"{shared}/dev/{name}")
    for name in ("shm", "pts"):
        os.mkdir(f"{shared}/dev/{name}")


def _masks(shared: str) -> None:
    """Files that stand in the place of those in /proc that tell about the host."""
    os.mkdir(f"{shared}/masks")
    made = bytearray(os.urandom(16))
    made[6], made[8] = made[6] & 0x0F | 0x40, made[8] & 0x3F | 0x80
    text = made.hex()
    identity = "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
    for name, said in (("cmdline", "\n"), ("loadavg", "0.00 0.00 0.00 1/1 1\n"), ("boot_id", f"{identity}\n")):
        _write(f"{shared}/masks/{name}", said)


def _can_overlay(write_map: Callable[[int], None]) -> bool:
    """Whether a box can have one writable layer over everything; old kernels cannot, without privileges."""
    ready, go = os.pipe()
    pid, pidfd = k.clone(k.NEWUSER | k.NEWNS)
    if pid == 0:
        code = 1
        try:
            os.close(go)
            os.read(ready, 1)
            with suppress(OSError):  # where only one user is mapped, it is that one already
                os.setresgid(0, 0, 0)
                os.setresuid(0, 0, 0)
            k.mount("tmpfs", SPOT, "tmpfs", _QUIET, "size=1m")
            os.mkdir(f"{SPOT}/upper")
            _layer([SKELETON])
            code = 0
        except OSError:
            pass
        finally:
            os._exit(code)
    os.close(ready)
    write_map(pid)
    os.close(go)
    os.close(pidfd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _layer(lowers: list[str]) -> None:
    for name in ("under", "root"):
        os.mkdir(f"{SPOT}/{name}")
    if len(lowers) > MANY:
        # One by one: all of them in one text would be more than the page that there is for it.
        options = [*(("lowerdir+", lower) for lower in lowers), ("upperdir", f"{SPOT}/upper")]
        if k.mount_new("overlay", f"{SPOT}/root", [*options, ("workdir", f"{SPOT}/under"), ("userxattr", "")]):
            return
    text = f"lowerdir={':'.join(lowers)},upperdir={SPOT}/upper,workdir={SPOT}/under,userxattr"
    if len(text) > _PAGE:
        raise OSError(7, f"this kernel gives boxes fewer than {len(lowers)} layers")
    k.mount("overlay", f"{SPOT}/root", "overlay", _QUIET, text)


def enter(tree: Tree, dress: Dress, *, mapped: bool) -> int:
    """In a new box, with its own mount namespace: makes the root and moves into it.

    A descriptor of the layer that it writes to; -1 where it has none."""
    size = dress.size
    k.mount("tmpfs", SPOT, "tmpfs", _QUIET, f"size={size},nr_inodes={max(1024, size // 2048)},mode=755")
    os.mkdir(f"{SPOT}/shm")
    os.chmod(f"{SPOT}/shm", 0o1777)
    layer = -1
    if tree.overlay:
        os.mkdir(f"{SPOT}/upper")
        lowers = [*dress.lowers, SKELETON]
        if dress.base >= 0:
            os.mkdir(f"{SPOT}/base")
            k.attach(dress.base, f"{SPOT}/base")
            os.close(dress.base)
            lowers[-1:] = [f"{SPOT}/base/{name}" for name in dress.layers] or [f"{SPOT}/base"]
        if not dress.lowers:
            _writable(f"{SPOT}/upper", dress, mapped)
        _layer(lowers)
        layer = os.open(f"{SPOT}/upper", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    else:
        if dress.base >= 0 or dress.lowers:
            raise OSError(38, "this kernel gives boxes no layers: no image, no snapshot")
        os.mkdir(f"{SPOT}/root")
        _copied(SKELETON, f"{SPOT}/root")
        _writable(f"{SPOT}/root", dress, mapped)
        k.mount(f"{SPOT}/root", f"{SPOT}/root", "", k.MS_BIND)
    wanted = {} if dress.base >= 0 else {path: f"shared/bound/{at}" for at, path in enumerate(tree.system)}
    wanted |= {"/dev": "shared/dev", "/dev/shm": f"{SPOT}/shm"}
    parts = {path: k.detached(source) for path, source in wanted.items()}
    masks = {path: k.detached(f"shared/masks/{os.path.basename(path)}") for path in MASKED}
    parts |= {target: tree for tree, target in dress.mounts if isinstance(tree, int)}
    os.chdir(f"{SPOT}/root")
    k.pivot_root(".", ".")
    for path, part in parts.items():
        try:
            k.attach(part, path)
        except OSError:
            if not dress.lowers:
                raise
            # What was there when the snapshot was taken moved it away: its own doing, and its loss.
        os.close(part)
    terminals = f"newinstance,ptmxmode=0666,mode=620,max={TERMINALS}"
    k.mount("devpts", "/dev/pts", "devpts", k.MS_NOSUID | k.MS_NOEXEC, terminals)
    # Read-only: a program that could write `oom_score_adj` could make the kernel kill pid 1 in its place.
    k.mount("proc", "/proc", "proc", _QUIET | k.MS_NOEXEC | k.MS_RDONLY)
    for path, mask in masks.items():
        with suppress(FileNotFoundError):  # not every kernel has all of them
            k.attach(mask, path)
        os.close(mask)
    k.unmount(".")
    os.chdir("/")
    return layer


def _writable(top: str, dress: Dress, mapped: bool) -> None:
    """The places that programs write to and that mounts need, in the layer that is theirs."""
    owned = (WORK[1:], "run")
    places = [(WORK[1:], 0o755), ("tmp", 0o1777), ("var", 0o755), ("var/tmp", 0o1777), ("run", 0o755)]
    if dress.base >= 0:
        places += [("proc", 0o555), ("dev", 0o755), ("etc", 0o755)]
    elif dress.resolve:
        places += [("etc", 0o755)]
    for name, mode in places:
        with suppress(FileExistsError):
            os.mkdir(f"{top}/{name}")
        os.chmod(f"{top}/{name}", mode)
        if mapped and name in owned and dress.uid != 0:
            os.chown(f"{top}/{name}", dress.uid, dress.uid)
    for _, target in dress.mounts:
        os.makedirs(f"{top}/{target}", exist_ok=True)
    if dress.base >= 0:
        for name in ("hosts", "hostname"):
            _write(f"{top}/etc/{name}", _FILES[name])
    if dress.resolve:
        for name in ("resolv.conf", "hosts"):
            with suppress(OSError), open(f"/etc/{name}", errors="replace") as file:
                _write(f"{top}/etc/{name}", file.read(1 << 16))


def _copied(source: str, target: str) -> None:
    for entry in os.scandir(source):
        there = f"{target}/{entry.name}"
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), there)
        elif entry.is_dir():
            os.mkdir(there)
            _copied(entry.path, there)
        else:
            with open(entry.path, "rb") as old, open(there, "wb") as new:
                new.write(old.read())


def resize(size: int) -> None:
    """In a box that still has its rights."""
    k.mount("none", "/dev/shm", "", k.MS_REMOUNT | _QUIET, f"size={size},nr_inodes={max(1024, size // 2048)}")
