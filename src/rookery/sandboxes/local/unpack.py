"""Archives of a whole system, unpacked into a folder for boxes. Stand-alone: forks of the keeper run it.

Promises:
- nothing is written outside of the folder, whatever names and links the archive holds;
- modes, owners (where we may), times and links survive; devices, sockets and set-user-id bits do not;
- the folder appears, whole, under its name, or not at all.
"""

import errno
import os
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING or "rookery.sandboxes" in sys.modules:
    from rookery.sandboxes.small import suppress
else:
    from small import suppress

if TYPE_CHECKING:
    import tarfile

MAX_ENTRIES = 5_000_000
_BLOCK = 1 << 20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class BadArchiveError(Exception):
    """It cannot be what it is taken for."""


def unpack(archive: str, target: str, *, owners: bool) -> None:
    """`owners`: files get the archive's owners, which only root can give."""
    import tarfile  # only here: threading comes with it, and makes every fork of the keeper slower

    making = f"{target}.part"
    os.mkdir(making, 0o755)
    top = os.open(making, _FOLDER)
    times: list[tuple[str, tarfile.TarInfo]] = []
    try:
        try:
            with tarfile.open(archive, "r|*", bufsize=_BLOCK) as file:
                for number, member in enumerate(file):
                    if number > MAX_ENTRIES:
                        raise BadArchiveError(f"it holds more than {MAX_ENTRIES} files")
                    _member(file, member, top, times, owners=owners)
                    file.members.clear()  # type: ignore[attr-defined]  # it would keep all of them
        except tarfile.TarError as error:
            raise BadArchiveError(f"it is no archive that can be read: {error}") from error
        except EOFError as error:
            raise BadArchiveError("it ends in the middle") from error
        # Folders last: writing into one changes its time, and its mode may forbid it.
        for path, member in reversed(times):
            with suppress(BadArchiveError, OSError), _Parent(top, path) as (folder, name):
                info = _stat(folder, name)
                if info is not None and stat.S_ISDIR(info.st_mode):  # else a later member took its place
                    _finish(folder, name, member, owners=owners)
        if not os.listdir(top):
            raise BadArchiveError("it is empty")
        os.fchmod(top, 0o755)
    finally:
        os.close(top)
    os.rename(making, target)


class _Parent:
    """The open folder that holds a member, and the member's name in it; folders on the way are made."""

    def __init__(self, top: int, path: str) -> None:
        self.here = os.dup(top)
        self.path = path

    def __enter__(self) -> tuple[int, str]:
        names = [name for name in self.path.split("/") if name not in ("", ".")]
        try:
            if not names or ".." in names:
                raise BadArchiveError(f"it holds the name {self.path[:200]!r}")
            for name in names[:-1]:
                with suppress(FileExistsError):
                    os.mkdir(name, 0o755, dir_fd=self.here)
                try:
                    below = os.open(name, _FOLDER, dir_fd=self.here)
                except OSError as error:
                    if error.errno in (errno.ELOOP, errno.ENOTDIR):
                        raise BadArchiveError(
                            f"{self.path[:200]!r} leads through something that is no folder"
                        ) from error
                    raise
                os.close(self.here)
                self.here = below
        except BaseException:
            os.close(self.here)
            raise
        return self.here, names[-1]

    def __exit__(self, *_: object) -> None:
        os.close(self.here)


def _member(
    file: "tarfile.TarFile",
    member: "tarfile.TarInfo",
    top: int,
    times: "list[tuple[str, tarfile.TarInfo]]",
    *,
    owners: bool,
) -> None:
    if not [name for name in member.name.split("/") if name not in ("", ".")]:
        return  # the root itself
    with _Parent(top, member.name) as (folder, name):
        if member.isdir():
            _clear(folder, name, keep_folder=True)
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=folder)
            times.append((member.name, member))
            return
        if member.isreg():
            _clear(folder, name)
            _file(file, member, folder, name)
        elif member.issym():
            _clear(folder, name)
            os.symlink(member.linkname, name, dir_fd=folder)
        elif member.islnk():
            with _Parent(top, member.linkname) as (there, first):
                info = _stat(there, first)
                if info is None or not (stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode)):
                    raise BadArchiveError(f"{member.name[:200]!r} is a second name of something that is no file")
                if os.path.samestat(info, _stat(folder, name) or os.fstat(top)):
                    return
                _clear(folder, name)
                os.link(first, name, src_dir_fd=there, dst_dir_fd=folder, follow_symlinks=False)
            return
        elif member.isfifo():
            _clear(folder, name)
            os.mkfifo(name, dir_fd=folder)
        else:
            return  # devices: a box has its own
        _finish(folder, name, member, owners=owners)


def _stat(folder: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _clear(folder: int, name: str, *, keep_folder: bool = False) -> None:
    """A later member of the same name takes the place of an earlier one."""
    info = _stat(folder, name)
    if info is None or (keep_folder and stat.S_ISDIR(info.st_mode)):
        return
    if stat.S_ISDIR(info.st_mode):
        try:
            os.rmdir(name, dir_fd=folder)
        except OSError as error:
            raise BadArchiveError(f"{name[:200]!r} is a folder with files, and then something else") from error
    else:
        os.unlink(name, dir_fd=folder)


def _file(file: "tarfile.TarFile", member: "tarfile.TarInfo", folder: int, name: str) -> None:
    source = file.extractfile(member)
    assert source is not None
    new = os.open(name, _NEW, 0o600, dir_fd=folder)
    try:
        while block := source.read(_BLOCK):
            if block.count(0) == len(block):  # what is sparse stays so
                os.lseek(new, len(block), os.SEEK_CUR)
                continue
            view = memoryview(block)
            while view:
                view = view[os.write(new, view) :]
        os.truncate(new, member.size)
    finally:
        os.close(new)


def _finish(folder: int, name: str, member: "tarfile.TarInfo", *, owners: bool) -> None:
    if owners:
        # Past what a box has users for, there is only nobody.
        uid, gid = (number if 0 <= number < 65535 else 65534 for number in (member.uid, member.gid))
        os.chown(name, uid, gid, dir_fd=folder, follow_symlinks=False)
    if not member.issym():
        os.chmod(name, member.mode & 0o1777, dir_fd=folder)
    os.utime(name, (member.mtime, member.mtime), dir_fd=folder, follow_symlinks=False)
