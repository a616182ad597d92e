"""The layers of a box's files: copied for a snapshot, compared for a diff. Stand-alone: the keeper's forks run it.

A layer is the writable folder of an overlay: what a box wrote, and marks for what it removed (a device 0:0) or
replaced (an attribute of the folder). Hostile programs wrote it; while it is walked they are frozen where that can
be done, so every name is still opened as if it might change.

Promises:
- no link is followed, and nothing but plain files is opened for reading;
- a copy has the same content, owners, modes, times, links and holes; what is sparse stays sparse;
- how much is copied is bounded by the size of where it goes, how much is walked by a number.
"""

from __future__ import annotations

import errno
import os
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


MAX_ENTRIES = 500_000
MAX_DEPTH = 400
_BLOCK = 1 << 20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OPAQUE = "user.overlay.opaque"
_MARKS = ("user.overlay.origin", "user.overlay.impure", "user.overlay.nlink", "user.overlay.upper")
"""What an overlay notes about its own layer: of no meaning for a copy."""


class _Count:
    def __init__(self) -> None:
        self.left = MAX_ENTRIES

    def one(self, depth: int) -> None:
        self.left -= 1
        if self.left < 0 or depth > MAX_DEPTH:
            raise OSError(errno.EFBIG, f"more than {MAX_ENTRIES} files, or folders more than {MAX_DEPTH} deep")


def copy(source: int, target: int) -> None:
    """All of a layer, from one open folder into another, empty one."""
    # Folders are kept open on the way down: a path could be changed under us, and it could be too long.
    sys.setrecursionlimit(20 * MAX_DEPTH)
    _copy_folder(source, target, {}, _Count(), 0)


def _copy_folder(
    source: int, target: int, linked: dict[int, str], count: _Count, depth: int, where: str = ""
) -> None:
    for name in os.listdir(source):
        count.one(depth)
        info = os.stat(name, dir_fd=source, follow_symlinks=False)
        kind = stat.S_IFMT(info.st_mode)
        if kind == stat.S_IFDIR:
            os.mkdir(name, 0o700, dir_fd=target)
            below, there = os.open(name, _FOLDER, dir_fd=source), -1
            try:
                there = os.open(name, _FOLDER, dir_fd=target)
                _copy_folder(below, there, linked, count, depth + 1, f"{where}{name}/")
            finally:
                os.close(below)
                if there >= 0:
                    os.close(there)
        elif info.st_nlink > 1 and info.st_ino in linked:
            _link(linked[info.st_ino], name, target, depth)
            continue
        elif kind == stat.S_IFREG:
            _copy_file(name, source, target, info.st_size)
        elif kind == stat.S_IFLNK:
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
        elif kind == stat.S_IFIFO or (kind == stat.S_IFCHR and info.st_rdev == 0):
            os.mknod(name, info.st_mode, 0, dir_fd=target)
        else:
            continue  # a socket has no content; no device can be made in a box
        if info.st_nlink > 1 and kind != stat.S_IFDIR:
            linked[info.st_ino] = f"{where}{name}"
        _dress(name, target, info)
    _attributes(source, target)


def _link(first: str, name: str, target: int, depth: int) -> None:
    """Another name of a file that was copied already; `first` leads to it from the top."""
    os.link("../" * depth + first, name, src_dir_fd=target, dst_dir_fd=target, follow_symlinks=False)


def _copy_file(name: str, source: int, target: int, size: int) -> None:
    old = os.open(name, _FILE, dir_fd=source)
    try:
        new = os.open(name, _NEW, 0o600, dir_fd=target)
        try:
            _copy_data(old, new, size)
            _attributes(old, new)
        finally:
            os.close(new)
    finally:
        os.close(old)


def _copy_data(old: int, new: int, size: int) -> None:
    """Only where there is data: a file of a terabyte may hold none."""
    at = 0
    while at < size:
        try:
            at = os.lseek(old, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                break
            raise
        end = min(os.lseek(old, at, os.SEEK_HOLE), size)
        os.lseek(new, at, os.SEEK_SET)
        while at < end:
            sent = os.sendfile(new, old, at, min(_BLOCK, end - at))
            if not sent:
                break
            at += sent
        at = max(at, end)
    os.truncate(new, size)


def _attributes(old: int, new: int) -> None:
    try:
        names = os.listxattr(old)
    except OSError as error:
        if error.errno != errno.E2BIG:
            raise
        return  # a program set more than the kernel can list (64 KiB of names): nothing can copy these
    for name in names:
        if name.startswith("user.") and name not in _MARKS:
            os.setxattr(new, name, os.getxattr(old, name))


def _dress(name: str, target: int, info: os.stat_result) -> None:
    """Owner, mode and times of what was just made; modes after owners, which would clear bits of them."""
    if info.st_uid != os.geteuid() or info.st_gid != os.getegid():
        os.chown(name, info.st_uid, info.st_gid, dir_fd=target, follow_symlinks=False)
    if not stat.S_ISLNK(info.st_mode) and not stat.S_ISCHR(info.st_mode):
        os.chmod(name, stat.S_IMODE(info.st_mode), dir_fd=target)
    os.utime(name, ns=(info.st_atime_ns, info.st_mtime_ns), dir_fd=target, follow_symlinks=False)


# ------------------------------------------------------------------------------------------------- comparing


def diff(
    now: int, then: int, below: list[str], hidden: tuple[str, ...], shift: int = 0
) -> Iterator[tuple[str, str]]:
    """What changed between two states of one layer: (path, added | changed | removed).

    `below` are the folders under it, uppermost first; `hidden` names at the top are mounts of ours. Owners in the
    lowest of them may be seen, in a box, moved by `shift`.
    """
    sys.setrecursionlimit(20 * MAX_DEPTH)
    yield from _diff(now, then, "", below, hidden, shift, _Count(), 0)


def _diff(
    now: int,
    then: int,
    path: str,
    below: list[str],
    hidden: tuple[str, ...],
    shift: int,
    count: _Count,
    depth: int,
    gone: bool = False,
) -> Iterator[tuple[str, str]]:
    """`now` and `then` are open folders; -1 where the layer has none. `gone`: no folder any more."""
    new, old = _listed(now), _listed(then)
    # A folder that was made anew hides what lies under it.
    shown, had = not gone and not _opaque(now), not _opaque(then)
    for name in sorted({*new, *old, *(_names(below) if shown != had else ())}):
        if name in hidden:
            continue
        count.one(depth)
        here = f"{path}/{name}"
        under = _visible([f"{folder}/{name}" for folder in below])
        lowest = under[0][1] if under else None
        mine, theirs = new.get(name), old.get(name)
        before = theirs if theirs is not None else lowest if had else None
        after = mine if mine is not None else lowest if shown else None
        if after is None or _whiteout(after):
            if before is not None and not _whiteout(before):
                yield here, "removed"
            continue
        if before is None or _whiteout(before):
            yield here, "added"
        elif mine is not None and not _same(
            _Side(now, name, mine),
            _Side(then, name, theirs) if theirs is not None else _Side(-1, *under[0]),
            shift,
        ):
            yield here, "changed"
        folder = stat.S_ISDIR(after.st_mode)
        if folder or (before is not None and stat.S_ISDIR(before.st_mode)):
            # What a folder held is gone also where something else has its name now.
            deeper = [_below(now, name, mine), _below(then, name, theirs)]
            try:
                folders = [found for found, info in under if stat.S_ISDIR(info.st_mode)]
                yield from _diff(deeper[0], deeper[1], here, folders, (), shift, count, depth + 1, not folder)
            finally:
                for fd in deeper:
                    if fd >= 0:
                        os.close(fd)


def _names(below: list[str]) -> set[str]:
    return {name for folder in below for name in os.listdir(folder)}


def _visible(paths: list[str]) -> list[tuple[str, os.stat_result]]:
    """What is under a name, layer by layer, down to what hides the rest."""
    found: list[tuple[str, os.stat_result]] = []
    for path in paths:
        try:
            info = os.lstat(path)
        except OSError:
            continue
        if found and not stat.S_ISDIR(info.st_mode):
            break
        found.append((path, info))
        if not stat.S_ISDIR(info.st_mode) or _opaque(path):
            break
    return found


def _listed(folder: int) -> dict[str, os.stat_result]:
    if folder < 0:
        return {}
    found: dict[str, os.stat_result] = {}
    for name in os.listdir(folder):
        try:
            found[name] = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            continue
    return found


def _below(folder: int, name: str, info: os.stat_result | None) -> int:
    if folder < 0 or info is None or not stat.S_ISDIR(info.st_mode):
        return -1
    return os.open(name, _FOLDER, dir_fd=folder)


def _whiteout(info: os.stat_result) -> bool:
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def _opaque(folder: int | str) -> bool:
    if folder == -1:
        return False
    try:
        return os.getxattr(folder, _OPAQUE) == b"y"
    except OSError:
        return False


class _Side:
    """A file on one side of a comparison; without a folder, `name` is a path."""

    def __init__(self, folder: int, name: str, info: os.stat_result) -> None:
        self.folder = folder if folder >= 0 else None
        self.name = name
        self.info = info

    def target(self) -> str:
        return os.readlink(self.name, dir_fd=self.folder)

    def open(self) -> int:
        return os.open(self.name, _FILE, dir_fd=self.folder)


def _same(mine: _Side, before: _Side, shift: int) -> bool:
    new, old = mine.info, before.info
    if new.st_mode != old.st_mode:
        return False
    moved = 0 if before.folder is not None else shift
    if any(
        here not in (there, there + moved) for here, there in ((new.st_uid, old.st_uid), (new.st_gid, old.st_gid))
    ):
        return False
    if stat.S_ISLNK(new.st_mode):
        return mine.target() == before.target()
    if not stat.S_ISREG(new.st_mode):
        return True
    if new.st_size != old.st_size:
        return False
    # Times can be set by programs: only the content says whether it is another file.
    left = mine.open()
    try:
        right = before.open()
        try:
            return _equal(left, right)
        finally:
            os.close(right)
    finally:
        os.close(left)


def _equal(left: int, right: int) -> bool:
    """Holes are skipped where both have them: two sparse terabytes are compared at once."""
    at = 0
    while True:
        starts = [_data(fd, at) for fd in (left, right)]
        if starts == [-1, -1]:
            return True
        at = min(start for start in starts if start >= 0)
        one, other = os.pread(left, _BLOCK, at), os.pread(right, _BLOCK, at)
        if one != other:
            return False
        at += len(one)
        if not one:
            return True


def _data(fd: int, at: int) -> int:
    try:
        return os.lseek(fd, at, os.SEEK_DATA)
    except OSError:
        return -1
