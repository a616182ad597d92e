"""The file system of a box: the host's system folders, read-only, under a writable layer of bounded size.

Stand-alone. `prepare` runs once, in the keeper, in a mount namespace of its own; `enter` in every box.

Promises:
- of the host a box sees its system folders, read-only, and a handful of harmless files of /etc; nothing else;
- everything a box writes lies in one tmpfs of bounded size, which goes with the box;
- nothing of it is mounted where the host could see it, and nothing outside of the state folder is written.
"""

import contextlib
import os
import stat
import sys
from collections.abc import Callable

TYPE_CHECKING = False
if TYPE_CHECKING or "rookery.sandboxes" in sys.modules:
    from rookery.sandboxes.local import kernel as k
else:
    import kernel as k

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
WORK = "/work"
USER = 1000
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


class Tree:
    """What every box of this keeper is made from."""

    def __init__(self, system: list[str], overlay: bool) -> None:
        self.system = system
        """Folders and files that are bound into a box, in order."""
        self.overlay = overlay

    @property
    def skeleton(self) -> str:
        return "shared/skeleton"

    @property
    def spot(self) -> str:
        return "box"


def prepare(folder: str, extra: list[str], write_map: Callable[[int], None]) -> Tree:
    """In the keeper's own mount namespace. `extra`: further folders of the host, such as an interpreter's."""
    k.mount("none", "/", "", k.MS_REC | k.MS_PRIVATE)
    # Paths are relative from here on: a box is another user, who may not pass through the folders above.
    os.chmod(folder, 0o755)
    os.chdir(folder)
    for name in ("shared", "box"):
        os.makedirs(name, exist_ok=True)
    shared = "shared"
    k.mount("tmpfs", shared, "tmpfs", _QUIET, "size=16m,mode=755")
    skeleton = f"{shared}/skeleton"
    for name in ("skeleton", "bound", "skeleton/etc", *(f"skeleton/{place}" for place in _PLACES)):
        os.mkdir(f"{shared}/{name}")
    for name, text in _FILES.items():
        with open(f"{skeleton}/etc/{name}", "w") as file:
            file.write(text)
    os.symlink("/proc/mounts", f"{skeleton}/etc/mtab")
    system: list[str] = []
    for path in (*SYSTEM, *extra, *(f"/etc/{name}" for name in ETC)):
        if _offer(path, skeleton, f"{shared}/bound/{len(system)}", system):
            system.append(path)
    _devices(shared)
    tree = Tree(system, overlay=True)
    tree.overlay = _can_overlay(tree, write_map)
    k.mount("none", shared, "", k.MS_REMOUNT | k.MS_BIND | k.MS_RDONLY | _QUIET)
    return tree


def _offer(path: str, skeleton: str, spot: str, system: list[str]) -> bool:
    """Makes a place for one path of the host in the skeleton; True where it has to be bound into every box."""
    try:
        info = os.lstat(path)
    except OSError:
        return False
    if any(path == other or path.startswith(f"{other}/") for other in system):
        return False
    place = f"{skeleton}{path}"
    with contextlib.suppress(FileExistsError):
        os.makedirs(os.path.dirname(place))
    if stat.S_ISLNK(info.st_mode):
        with contextlib.suppress(FileExistsError):
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


def _can_overlay(tree: Tree, write_map: Callable[[int], None]) -> bool:
    """Whether a box can have one writable layer over everything; old kernels cannot, without privileges."""
    ready, go = os.pipe()
    pid, pidfd = k.clone(k.NEWUSER | k.NEWNS)
    if pid == 0:
        code = 1
        try:
            os.close(go)
            os.read(ready, 1)
            with contextlib.suppress(OSError):  # where only one user is mapped, it is that one already
                os.setresgid(0, 0, 0)
                os.setresuid(0, 0, 0)
            k.mount("tmpfs", tree.spot, "tmpfs", _QUIET, "size=1m")
            _layer(tree)
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


def _layer(tree: Tree) -> None:
    spot = tree.spot
    for name in ("upper", "under", "root"):
        with contextlib.suppress(FileExistsError):
            os.mkdir(f"{spot}/{name}")
    options = f"lowerdir={tree.skeleton},upperdir={spot}/upper,workdir={spot}/under,userxattr"
    k.mount("overlay", f"{spot}/root", "overlay", _QUIET, options)


def enter(tree: Tree, *, size: int, mapped: bool) -> None:
    """In a new box, with its own mount namespace: makes the root and moves into it."""
    spot = tree.spot
    k.mount("tmpfs", spot, "tmpfs", _QUIET, f"size={size},nr_inodes={max(1024, size // 2048)},mode=755")
    if tree.overlay:
        os.mkdir(f"{spot}/upper")
        _writable(f"{spot}/upper", mapped)
        _layer(tree)
    else:
        os.mkdir(f"{spot}/root")
        _copied(tree.skeleton, f"{spot}/root")
        _writable(f"{spot}/root", mapped)
        k.mount(f"{spot}/root", f"{spot}/root", "", k.MS_BIND)
    root = f"{spot}/root"
    for number, path in enumerate(tree.system):
        k.mount(f"shared/bound/{number}", root + path, "", k.MS_BIND | k.MS_REC)
    k.mount("shared/dev", f"{root}/dev", "", k.MS_BIND | k.MS_REC)
    os.mkdir(f"{spot}/shm")
    os.chmod(f"{spot}/shm", 0o1777)
    k.mount(f"{spot}/shm", f"{root}/dev/shm", "", k.MS_BIND)
    terminals = f"newinstance,ptmxmode=0666,mode=620,max={TERMINALS}"
    k.mount("devpts", f"{root}/dev/pts", "devpts", k.MS_NOSUID | k.MS_NOEXEC, terminals)
    k.mount("proc", f"{root}/proc", "proc", _QUIET | k.MS_NOEXEC)
    os.chdir(root)
    k.pivot_root(".", ".")
    k.unmount(".")
    os.chdir("/")


def _writable(top: str, mapped: bool) -> None:
    """The places that programs write to, in the layer that is theirs."""
    for name, mode in ((WORK[1:], 0o755), ("tmp", 0o1777), ("var", 0o755), ("var/tmp", 0o1777), ("run", 0o755)):
        with contextlib.suppress(FileExistsError):
            os.mkdir(f"{top}/{name}")
        os.chmod(f"{top}/{name}", mode)
        if mapped and name in (WORK[1:], "run"):
            os.chown(f"{top}/{name}", USER, USER)


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
