"""The root file system of a `local` sandbox: the host's system or an image, read-only, below a writable layer.

`prepare` runs once in the keeper, in its own mount namespace; `enter` runs in the first process of every sandbox.

Guarantees:
- a sandbox without an image sees the host's system directories, read-only, and copies of a few harmless files
  of /etc that everybody may read. A sandbox with an image sees nothing of the host;
- no path of the sandbox is resolved before the process has moved into the sandbox's root, so symbolic links cannot
  lead outside;
- everything that a sandbox writes is in one tmpfs of limited size, which disappears with the sandbox;
- none of the mounts is visible to the host, and nothing outside of the keeper's state directory is written.
"""

from __future__ import annotations

import os
import stat

from rookery.sandbox_runtime import syscalls
from rookery.sandbox_runtime.lightweight import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


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
"""Files of /proc that would reveal the host's boot options, identity and load."""
WORK = "/work"
USER = 1000
MANY_LAYERS = 32
"""An overlay of more layers than this is mounted with fsconfig, if the kernel supports that."""
_MAX_MOUNT_OPTIONS = 4000
MAX_TERMINALS = 64
"""Maximum number of pseudo-terminals of one sandbox. The host has a few thousand in all."""
DEVPTS_OPTIONS = f"newinstance,ptmxmode=0666,mode=620,max={MAX_TERMINALS}"
_FILES = {
    "passwd": f"root:x:0:0:root:/root:/bin/sh\nuser:x:{USER}:{USER}:user:{WORK}:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
    "group": f"root:x:0:\nuser:x:{USER}:\ntty:x:5:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "hostname": "sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
_DIRECTORIES = (
    "proc",
    "dev",
    "tmp",
    "run",
    "var",
    "var/tmp",
    "root",
    "home",
    "srv",
    "mnt",
    "media",
    "opt",
    WORK[1:],
)
_NOSUID_NODEV = syscalls.MS_NOSUID | syscalls.MS_NODEV
_MAX_ETC_BYTES = 4 << 20

SKELETON = "shared/skeleton"
"""Directory with the files of a sandbox without an image, except those that are bind-mounted from the host."""
MOUNT_POINT = "sandbox"
"""The path at which a sandbox mounts its file system before it becomes the root. Each sandbox has its own mount
namespace."""
SNAPSHOTS = "snapshots"
"""Directory in which the keeper stores snapshots of sandboxes; a tmpfs."""


class SharedTree:
    """The files that all sandboxes of a keeper share."""

    def __init__(self, system: list[str], overlay: bool) -> None:
        self.system = system
        """Paths of the host that are bind-mounted into a sandbox without an image, in order."""
        self.overlay = overlay
        """True if sandboxes can mount an overlay."""


class MountPlan:
    """Describes the file system of one sandbox.

    `size` is the maximum number of bytes that programs can write, and `uid` owns the working directory.
    """

    __slots__ = ("host_resolver", "image", "layers", "mounts", "size", "snapshots", "uid")

    def __init__(
        self, size: int, uid: int = USER, snapshots: tuple[str, ...] = (), *, host_resolver: bool = False
    ) -> None:
        self.size = size
        self.uid = uid
        self.snapshots = snapshots
        """Directories of the snapshots below the writable layer, uppermost first."""
        self.image = -1
        """File descriptor of a detached mount of an image; -1 if the host's system directories are used."""
        self.layers: tuple[str, ...] = ()
        """Directories of the image that are its layers, uppermost first; empty if the image is one directory."""
        self.mounts: tuple[tuple[str | int, str], ...] = ()
        """Directories of the host, or detached mounts of them, each with its target."""
        self.host_resolver = host_resolver
        """True if the sandbox gets the host's /etc/resolv.conf and /etc/hosts."""


def prepare(directory: str, extra: list[str], write_id_map: Callable[[int], None]) -> SharedTree:
    """Mount the files that all sandboxes share, in the keeper's own mount namespace.

    `directory` is the keeper's state directory. `extra` are further directories of the host that sandboxes see,
    such as the interpreter's. `write_id_map` sets the user ID map of the process with a given pid.
    """
    syscalls.mount("none", "/", "", syscalls.MS_REC | syscalls.MS_PRIVATE)
    # Relative paths from here on: a sandbox has another user, who may not pass through the directories above.
    os.chmod(directory, 0o755)
    os.chdir(directory)
    for name in ("shared", MOUNT_POINT, SNAPSHOTS):
        os.makedirs(name, exist_ok=True)
    shared = "shared"
    syscalls.mount("tmpfs", shared, "tmpfs", _NOSUID_NODEV, "size=64m,mode=755")
    syscalls.mount("tmpfs", SNAPSHOTS, "tmpfs", _NOSUID_NODEV, "mode=755")
    for name in ("skeleton", "bound", "skeleton/etc", *(f"skeleton/{name}" for name in _DIRECTORIES)):
        os.mkdir(f"{shared}/{name}")
    for name, text in _FILES.items():
        _write(f"{SKELETON}/etc/{name}", text)
    os.symlink("/proc/mounts", f"{SKELETON}/etc/mtab")
    # Debian's Python keeps a part of its `site` configuration in /etc/pythonX.Y.
    for name in (*ETC, *(name for name in os.listdir("/etc") if name.startswith("python"))):
        _copy_public(f"/etc/{name}", f"{SKELETON}/etc/{name}")
    system: list[str] = []
    for path in (*SYSTEM, *extra):
        if _bind_host_path(path, f"{shared}/bound/{len(system)}", system):
            system.append(path)
    _bind_devices(shared)
    _write_masks(shared)
    tree = SharedTree(system, overlay=_can_mount_overlay(write_id_map))
    syscalls.mount("none", shared, "", syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_RDONLY | _NOSUID_NODEV)
    return tree


def _copy_public(source: str, target: str) -> None:
    """Copy files that everybody on this machine may read. Copies are cheaper than one more mount per sandbox."""
    try:
        info = os.lstat(source)
        if stat.S_ISLNK(info.st_mode):
            os.symlink(os.readlink(source), target)
        elif stat.S_ISDIR(info.st_mode) and info.st_mode & 0o005 == 0o005:
            os.mkdir(target)
            for name in os.listdir(source):
                _copy_public(f"{source}/{name}", f"{target}/{name}")
        elif stat.S_ISREG(info.st_mode) and info.st_mode & 0o004 and info.st_size < _MAX_ETC_BYTES:
            with open(source, "rb") as old, open(target, "wb") as new:
                new.write(old.read(_MAX_ETC_BYTES))
    except (FileNotFoundError, PermissionError):
        pass


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _bind_host_path(path: str, target: str, system: list[str]) -> bool:
    """Add a path of the host to the skeleton. Return whether it has to be bind-mounted into every sandbox."""
    try:
        info = os.lstat(path)
    except OSError:
        return False
    if any(path == other or path.startswith(f"{other}/") for other in system):
        return False
    skeleton_path = f"{SKELETON}{path}"
    with suppress(FileExistsError):
        os.makedirs(os.path.dirname(skeleton_path))
    if stat.S_ISLNK(info.st_mode):
        with suppress(FileExistsError):
            os.symlink(os.readlink(path), skeleton_path)
        return False
    if stat.S_ISDIR(info.st_mode):
        os.makedirs(skeleton_path, exist_ok=True)
        os.mkdir(target)
    elif stat.S_ISREG(info.st_mode) and not os.path.exists(skeleton_path):
        for new in (skeleton_path, target):
            os.close(os.open(new, os.O_CREAT | os.O_WRONLY, 0o644))
    else:
        return False
    syscalls.mount(path, target, "", syscalls.MS_BIND | syscalls.MS_REC)
    _read_only(target)
    return True


def _read_only(target: str) -> None:
    # In a user namespace, flags of the host's mount are locked and must be repeated.
    locked = {
        os.ST_NOSUID: syscalls.MS_NOSUID,
        os.ST_NODEV: syscalls.MS_NODEV,
        os.ST_NOEXEC: syscalls.MS_NOEXEC,
        4096: syscalls.MS_RELATIME,
    }
    found = os.statvfs(target).f_flag
    flags = sum(flag for bit, flag in locked.items() if found & bit)
    syscalls.mount(
        "none",
        target,
        "",
        syscalls.MS_BIND | syscalls.MS_REMOUNT | syscalls.MS_RDONLY | syscalls.MS_NOSUID | flags,
    )


def _bind_devices(shared: str) -> None:
    os.mkdir(f"{shared}/dev")
    for name in DEVICES:
        target = f"{shared}/dev/{name}"
        if os.path.exists(f"/dev/{name}"):
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o666))
            syscalls.mount(f"/dev/{name}", target, "", syscalls.MS_BIND)
            _read_only(target)  # programs can still write to the device, but not change its times and mode
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


def _write_masks(shared: str) -> None:
    """Write the files that sandboxes see instead of the files listed in `MASKED`, into `masks` in `shared`."""
    os.mkdir(f"{shared}/masks")
    uuid = bytearray(os.urandom(16))
    uuid[6], uuid[8] = uuid[6] & 0x0F | 0x40, uuid[8] & 0x3F | 0x80
    digits = uuid.hex()
    boot_id = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
    for name, text in (("cmdline", "\n"), ("loadavg", "0.00 0.00 0.00 1/1 1\n"), ("boot_id", f"{boot_id}\n")):
        _write(f"{shared}/masks/{name}", text)


def _can_mount_overlay(write_id_map: Callable[[int], None]) -> bool:
    """Return whether an overlay can be mounted in a user namespace, which old kernels do not allow."""
    ready, go = os.pipe()
    pid, pidfd = syscalls.clone(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS)
    if pid == 0:
        code = 1
        try:
            os.close(go)
            os.read(ready, 1)
            with suppress(OSError):  # with a single mapped user it has that user already
                os.setresgid(0, 0, 0)
                os.setresuid(0, 0, 0)
            syscalls.mount("tmpfs", MOUNT_POINT, "tmpfs", _NOSUID_NODEV, "size=1m")
            os.mkdir(f"{MOUNT_POINT}/upper")
            _mount_overlay([SKELETON])
            code = 0
        except OSError:
            pass
        finally:
            os._exit(code)
    os.close(ready)
    write_id_map(pid)
    os.close(go)
    os.close(pidfd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _mount_overlay(lowers: list[str]) -> None:
    for name in ("under", "root"):
        os.mkdir(f"{MOUNT_POINT}/{name}")
    if len(lowers) > MANY_LAYERS:
        # One option per layer: mount(2) takes all options in a single memory page.
        options = [*(("lowerdir+", lower) for lower in lowers), ("upperdir", f"{MOUNT_POINT}/upper")]
        if syscalls.mount_filesystem(
            "overlay", f"{MOUNT_POINT}/root", [*options, ("workdir", f"{MOUNT_POINT}/under"), ("userxattr", "")]
        ):
            return
    text = f"lowerdir={':'.join(lowers)},upperdir={MOUNT_POINT}/upper,workdir={MOUNT_POINT}/under,userxattr"
    if len(text) > _MAX_MOUNT_OPTIONS:
        raise OSError(7, f"this kernel cannot mount an overlay of {len(lowers)} layers; Linux 6.8 can")
    syscalls.mount("overlay", f"{MOUNT_POINT}/root", "overlay", _NOSUID_NODEV, text)


def enter(tree: SharedTree, plan: MountPlan, *, mapped: bool) -> int:
    """Mount the root of a new sandbox and move this process into it. The process must have its own mount
    namespace.

    `mapped` says that the sandbox has its own range of user IDs. Return a file descriptor of the writable layer,
    or -1 if the kernel cannot mount overlays.
    """
    size = plan.size
    syscalls.mount(
        "tmpfs", MOUNT_POINT, "tmpfs", _NOSUID_NODEV, f"size={size},nr_inodes={max(1024, size // 2048)},mode=755"
    )
    os.mkdir(f"{MOUNT_POINT}/shm")
    os.chmod(f"{MOUNT_POINT}/shm", 0o1777)
    layer = -1
    if tree.overlay:
        os.mkdir(f"{MOUNT_POINT}/upper")
        lowers = [*plan.snapshots, SKELETON]
        if plan.image >= 0:
            os.mkdir(f"{MOUNT_POINT}/base")
            syscalls.move_mount(plan.image, f"{MOUNT_POINT}/base")
            os.close(plan.image)
            lowers[-1:] = [f"{MOUNT_POINT}/base/{name}" for name in plan.layers] or [f"{MOUNT_POINT}/base"]
        if not plan.snapshots:
            _make_writable_directories(f"{MOUNT_POINT}/upper", plan, mapped)
        _mount_overlay(lowers)
        layer = os.open(f"{MOUNT_POINT}/upper", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    else:
        if plan.image >= 0 or plan.snapshots:
            raise OSError(
                38,
                "this kernel cannot mount overlays in user namespaces; images and snapshots need Linux 5.11",
            )
        os.mkdir(f"{MOUNT_POINT}/root")
        _copy_tree(SKELETON, f"{MOUNT_POINT}/root")
        _make_writable_directories(f"{MOUNT_POINT}/root", plan, mapped)
        syscalls.mount(f"{MOUNT_POINT}/root", f"{MOUNT_POINT}/root", "", syscalls.MS_BIND)
    wanted = list_trees(tree, system=plan.image < 0)
    parts = {path: syscalls.open_detached_tree(source) for source, path in wanted}
    masks = {path: syscalls.open_detached_tree(source) for source, path in list_masks()}
    parts |= {target: mount for mount, target in plan.mounts if isinstance(mount, int)}
    os.chdir(f"{MOUNT_POINT}/root")
    syscalls.pivot_root(".", ".")
    for path, part in parts.items():
        try:
            syscalls.move_mount(part, path)
        except OSError:
            if not plan.snapshots:
                raise
            # A program had removed the mount point before the snapshot was taken.
        os.close(part)
    syscalls.mount("devpts", "/dev/pts", "devpts", syscalls.MS_NOSUID | syscalls.MS_NOEXEC, DEVPTS_OPTIONS)
    # Read-only: a program that could write `oom_score_adj` could make the kernel kill pid 1 in its place.
    syscalls.mount("proc", "/proc", "proc", _NOSUID_NODEV | syscalls.MS_NOEXEC | syscalls.MS_RDONLY)
    for path, mask in masks.items():
        with suppress(FileNotFoundError):  # the file depends on the kernel's configuration
            syscalls.move_mount(mask, path)
        os.close(mask)
    syscalls.unmount(".")
    os.chdir("/")
    return layer


def list_trees(tree: SharedTree, *, system: bool = True) -> list[tuple[str, str]]:
    """Return what is mounted into every sandbox: source below the keeper's directory, and path in the sandbox.

    Without `system`, the host's system directories are left out.
    """
    bound = [(f"shared/bound/{at}", path) for at, path in enumerate(tree.system)] if system else []
    return [*bound, ("shared/dev", "/dev"), (f"{MOUNT_POINT}/shm", "/dev/shm")]


def list_masks() -> list[tuple[str, str]]:
    """Return what is mounted over files of /proc, as `list_trees` does."""
    return [(f"shared/masks/{os.path.basename(path)}", path) for path in MASKED]


def _make_writable_directories(top: str, plan: MountPlan, mapped: bool) -> None:
    """Create the directories that programs write to, and the mount points, in the writable layer."""
    owned = (WORK[1:], "run")
    directories = [(WORK[1:], 0o755), ("tmp", 0o1777), ("var", 0o755), ("var/tmp", 0o1777), ("run", 0o755)]
    if plan.image >= 0:
        directories += [("proc", 0o555), ("dev", 0o755), ("etc", 0o755)]
    elif plan.host_resolver:
        directories += [("etc", 0o755)]
    for name, mode in directories:
        with suppress(FileExistsError):
            os.mkdir(f"{top}/{name}")
        os.chmod(f"{top}/{name}", mode)
        if mapped and name in owned and plan.uid != 0:
            os.chown(f"{top}/{name}", plan.uid, plan.uid)
    for _, target in plan.mounts:
        os.makedirs(f"{top}/{target}", exist_ok=True)
    if plan.image >= 0:
        for name in ("hosts", "hostname"):
            _write(f"{top}/etc/{name}", _FILES[name])
    if plan.host_resolver:
        for name in ("resolv.conf", "hosts"):
            with suppress(OSError), open(f"/etc/{name}", errors="replace") as file:
                _write(f"{top}/etc/{name}", file.read(1 << 16))


def _copy_tree(source: str, target: str) -> None:
    for entry in os.scandir(source):
        there = f"{target}/{entry.name}"
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), there)
        elif entry.is_dir():
            os.mkdir(there)
            _copy_tree(entry.path, there)
        else:
            with open(entry.path, "rb") as old, open(there, "wb") as new:
                new.write(old.read())


def resize(size: int) -> None:
    """Change the size of the sandbox's tmpfs, in bytes. Works only before pid 1 gives up its privileges."""
    syscalls.mount(
        "none",
        "/dev/shm",
        "",
        syscalls.MS_REMOUNT | _NOSUID_NODEV,
        f"size={size},nr_inodes={max(1024, size // 2048)}",
    )
