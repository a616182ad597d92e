"""Copy and compare the writable layers of sandboxes, for snapshots and diffs. Runs in forks of the keeper.

A layer is the upper directory of an overlay: the files that a sandbox wrote, and marks for files that it
removed (a character device 0:0) or directories that it replaced (an extended attribute). Untrusted programs
wrote it. They are frozen while the layer is read, if possible, but every name is opened as if it could change at
any moment.

- No symbolic link is followed, and only regular files are opened for reading.
- A copy has the same content, owners, modes, times and links, and stays sparse.
- The copied size is limited by the target's file system, the number of entries by `MAX_ENTRIES`.
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
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OPAQUE = "user.overlay.opaque"
_MARKS = ("user.overlay.origin", "user.overlay.impure", "user.overlay.nlink", "user.overlay.upper")
"""Extended attributes in which overlayfs keeps internal state that is invalid in a copy."""


class _EntryCounter:
    def __init__(self) -> None:
        self.left = MAX_ENTRIES

    def add(self, depth: int) -> None:
        self.left -= 1
        if self.left < 0 or depth > MAX_DEPTH:
            raise OSError(
                errno.EFBIG,
                f"the directory has more than {MAX_ENTRIES} files, or is nested more than {MAX_DEPTH} levels",
            )


def copy(source: int, target: int) -> None:
    """Copy a layer from the open directory `source` into the open, empty directory `target`."""
    # Directories stay open on the way down: a path could change meanwhile, or be too long.
    sys.setrecursionlimit(20 * MAX_DEPTH)
    _copy_folder(source, target, {}, _EntryCounter(), 0)


def _copy_folder(
    source: int, target: int, linked: dict[int, str], count: _EntryCounter, depth: int, where: str = ""
) -> None:
    for name in os.listdir(source):
        count.add(depth)
        info = os.stat(name, dir_fd=source, follow_symlinks=False)
        kind = stat.S_IFMT(info.st_mode)
        if kind == stat.S_IFDIR:
            os.mkdir(name, 0o700, dir_fd=target)
            below, there = os.open(name, _OPEN_DIRECTORY, dir_fd=source), -1
            try:
                there = os.open(name, _OPEN_DIRECTORY, dir_fd=target)
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
            continue  # sockets have no content, and sandboxes cannot create devices
        if info.st_nlink > 1 and kind != stat.S_IFDIR:
            linked[info.st_ino] = f"{where}{name}"
        _set_metadata(name, target, info)
    _copy_attributes(source, target)


def _link(first: str, name: str, target: int, depth: int) -> None:
    """Create a hard link `name` to a copied file; `first` is the path of that file from the top of the copy."""
    os.link("../" * depth + first, name, src_dir_fd=target, dst_dir_fd=target, follow_symlinks=False)


def _copy_file(name: str, source: int, target: int, size: int) -> None:
    old = os.open(name, _OPEN_FILE, dir_fd=source)
    try:
        new = os.open(name, _CREATE_FILE, 0o600, dir_fd=target)
        try:
            _copy_data(old, new, size)
            _copy_attributes(old, new)
        finally:
            os.close(new)
    finally:
        os.close(old)


def _copy_data(old: int, new: int, size: int) -> None:
    """Copy the data of a sparse file, but not its holes: a file of a terabyte may contain no data."""
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


def _copy_attributes(old: int, new: int) -> None:
    try:
        names = os.listxattr(old)
    except OSError as error:
        if error.errno != errno.E2BIG:
            raise
        return  # more names than the kernel can list (64 KiB): they cannot be copied
    for name in names:
        if name.startswith("user.") and name not in _MARKS:
            os.setxattr(new, name, os.getxattr(old, name))


def _set_metadata(name: str, target: int, info: os.stat_result) -> None:
    """Set owner, mode and times of a copy. The mode is set after the owner, because `chown` clears bits of it."""
    if info.st_uid != os.geteuid() or info.st_gid != os.getegid():
        os.chown(name, info.st_uid, info.st_gid, dir_fd=target, follow_symlinks=False)
    if not stat.S_ISLNK(info.st_mode) and not stat.S_ISCHR(info.st_mode):
        os.chmod(name, stat.S_IMODE(info.st_mode), dir_fd=target)
    os.utime(name, ns=(info.st_atime_ns, info.st_mtime_ns), dir_fd=target, follow_symlinks=False)


# ------------------------------------------------------------------------------------------------- comparing


def diff(
    now: int, then: int, below: list[str], hidden: tuple[str, ...], shift: int = 0
) -> Iterator[tuple[str, str]]:
    """Yield (path, "added" | "changed" | "removed") for the differences between two states of a layer.

    `now` and `then` are descriptors of open directories; -1 means that the state had no layer. `below` are the
    paths of the directories under the layer in the overlay, uppermost first. Top-level names in `hidden` are
    ignored. User IDs of files in the lowest directory may differ by `shift` without counting as a change.
    """
    sys.setrecursionlimit(20 * MAX_DEPTH)
    yield from _diff(now, then, "", below, hidden, shift, _EntryCounter(), 0)


def _diff(
    now: int,
    then: int,
    path: str,
    below: list[str],
    hidden: tuple[str, ...],
    shift: int,
    count: _EntryCounter,
    depth: int,
    gone: bool = False,
) -> Iterator[tuple[str, str]]:
    """Compare two open directories; -1 stands for one that does not exist.

    `gone` says that the path is no longer a directory.
    """
    new, old = _list_directory(now), _list_directory(then)
    # A replaced directory hides the files below it.
    shown, was_shown = not gone and not _is_opaque(now), not _is_opaque(then)
    for name in sorted({*new, *old, *(_list_names(below) if shown != was_shown else ())}):
        if name in hidden:
            continue
        count.add(depth)
        here = f"{path}/{name}"
        under = _find_visible([f"{directory}/{name}" for directory in below])
        lowest = under[0][1] if under else None
        mine, theirs = new.get(name), old.get(name)
        before = theirs if theirs is not None else lowest if was_shown else None
        after = mine if mine is not None else lowest if shown else None
        if after is None or _is_whiteout(after):
            if before is not None and not _is_whiteout(before):
                yield here, "removed"
            continue
        if before is None or _is_whiteout(before):
            yield here, "added"
        elif mine is not None and not _is_same(
            _Side(now, name, mine),
            _Side(then, name, theirs) if theirs is not None else _Side(-1, *under[0]),
            shift,
        ):
            yield here, "changed"
        directory = stat.S_ISDIR(after.st_mode)
        if directory or (before is not None and stat.S_ISDIR(before.st_mode)):
            # The files of a directory are gone too if something else has its name now.
            deeper = [_open_subdirectory(now, name, mine), _open_subdirectory(then, name, theirs)]
            try:
                directories = [found for found, info in under if stat.S_ISDIR(info.st_mode)]
                yield from _diff(
                    deeper[0], deeper[1], here, directories, (), shift, count, depth + 1, not directory
                )
            finally:
                for fd in deeper:
                    if fd >= 0:
                        os.close(fd)


def _list_names(below: list[str]) -> set[str]:
    return {name for directory in below for name in os.listdir(directory)}


def _find_visible(paths: list[str]) -> list[tuple[str, os.stat_result]]:
    """Return the existing ones of `paths` (one per layer, uppermost first) up to one that hides those below it."""
    found: list[tuple[str, os.stat_result]] = []
    for path in paths:
        try:
            info = os.lstat(path)
        except OSError:
            continue
        if found and not stat.S_ISDIR(info.st_mode):
            break
        found.append((path, info))
        if not stat.S_ISDIR(info.st_mode) or _is_opaque(path):
            break
    return found


def _list_directory(directory: int) -> dict[str, os.stat_result]:
    if directory < 0:
        return {}
    found: dict[str, os.stat_result] = {}
    for name in os.listdir(directory):
        try:
            found[name] = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            continue
    return found


def _open_subdirectory(directory: int, name: str, info: os.stat_result | None) -> int:
    if directory < 0 or info is None or not stat.S_ISDIR(info.st_mode):
        return -1
    return os.open(name, _OPEN_DIRECTORY, dir_fd=directory)


def _is_whiteout(info: os.stat_result) -> bool:
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def _is_opaque(directory: int | str) -> bool:
    if directory == -1:
        return False
    try:
        return os.getxattr(directory, _OPAQUE) == b"y"
    except OSError:
        return False


class _Side:
    """A file on one side of a comparison: `name` in the open directory `directory`, or a path if that is -1."""

    def __init__(self, directory: int, name: str, info: os.stat_result) -> None:
        self.directory = directory if directory >= 0 else None
        self.name = name
        self.info = info

    def target(self) -> str:
        return os.readlink(self.name, dir_fd=self.directory)

    def open(self) -> int:
        return os.open(self.name, _OPEN_FILE, dir_fd=self.directory)


def _is_same(mine: _Side, before: _Side, shift: int) -> bool:
    new, old = mine.info, before.info
    if new.st_mode != old.st_mode:
        return False
    moved = 0 if before.directory is not None else shift
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
    # Programs can set times, so only the content tells whether a file changed.
    left = mine.open()
    try:
        right = before.open()
        try:
            return _has_same_content(left, right)
        finally:
            os.close(right)
    finally:
        os.close(left)


def _has_same_content(left: int, right: int) -> bool:
    """Return whether two files have the same content. Common holes are skipped, so large sparse files are fast."""
    at = 0
    while True:
        starts = [_find_data(fd, at) for fd in (left, right)]
        if starts == [-1, -1]:
            return True
        at = min(start for start in starts if start >= 0)
        one, other = os.pread(left, _BLOCK, at), os.pread(right, _BLOCK, at)
        if one != other:
            return False
        at += len(one)
        if not one:
            return True


def _find_data(fd: int, at: int) -> int:
    try:
        return os.lseek(fd, at, os.SEEK_DATA)
    except OSError:
        return -1
