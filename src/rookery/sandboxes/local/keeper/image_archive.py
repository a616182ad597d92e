"""Unpack an archive of a root file system into a directory. Runs in forks of the keeper.

- Nothing is written outside of the directory, whatever names and links the archive contains.
- Modes, owners (as root), times and links are preserved; devices, sockets and set-user-id bits are not.
- The directory appears under its final name only when it is complete.
"""

import errno
import os
import stat

from rookery.sandbox_runtime.lightweight import suppress

TYPE_CHECKING = False

if TYPE_CHECKING:
    import tarfile

MAX_ENTRIES = 5_000_000
_BLOCK = 1 << 20
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class InvalidArchiveError(Exception):
    """The file is not a valid archive of a root file system."""


def unpack(archive: str, target: str, *, owners: bool) -> None:
    """Unpack the file `archive` into the new directory `target`.

    With `owners`, set the owners of files, which only root can do. Raise `InvalidArchiveError` for a bad archive.
    """
    import tarfile  # not at the top: it imports threading, which would make every fork of the keeper slower

    partial = f"{target}.part"
    os.mkdir(partial, 0o755)
    top = os.open(partial, _OPEN_DIRECTORY)
    times: list[tuple[str, tarfile.TarInfo]] = []
    try:
        try:
            with tarfile.open(archive, "r|*", bufsize=_BLOCK) as file:
                for number, member in enumerate(file):
                    if number > MAX_ENTRIES:
                        raise InvalidArchiveError(f"the archive has more than {MAX_ENTRIES} files")
                    _unpack_member(file, member, top, times, owners=owners)
                    file.members.clear()  # type: ignore[attr-defined]  # it would keep all members in memory
        except tarfile.TarError as error:
            raise InvalidArchiveError(f"the file is not a readable tar archive: {error}") from error
        except EOFError as error:
            raise InvalidArchiveError("the archive is truncated") from error
        # Directories last: writing into one changes its time, and its mode may forbid writing.
        for path, member in reversed(times):
            with suppress(InvalidArchiveError, OSError), _Parent(top, path) as (directory, name):
                info = _stat(directory, name)
                if info is not None and stat.S_ISDIR(info.st_mode):  # otherwise a later member replaced it
                    _set_metadata(directory, name, member, owners=owners)
        if not os.listdir(top):
            raise InvalidArchiveError("the archive is empty")
        os.fchmod(top, 0o755)
    finally:
        os.close(top)
    os.rename(partial, target)


class _Parent:
    """Context manager that opens the parent directory of an archive member and creates missing directories.

    Yields a descriptor of the parent directory and the member's last name.
    """

    def __init__(self, top: int, path: str) -> None:
        self.here = os.dup(top)
        self.path = path

    def __enter__(self) -> tuple[int, str]:
        names = [name for name in self.path.split("/") if name not in ("", ".")]
        try:
            if not names or ".." in names:
                raise InvalidArchiveError(f"the archive contains the invalid name {self.path[:200]!r}")
            for name in names[:-1]:
                with suppress(FileExistsError):
                    os.mkdir(name, 0o755, dir_fd=self.here)
                try:
                    below = os.open(name, _OPEN_DIRECTORY, dir_fd=self.here)
                except OSError as error:
                    if error.errno in (errno.ELOOP, errno.ENOTDIR):
                        raise InvalidArchiveError(f"a parent of {self.path[:200]!r} is not a directory") from error
                    raise
                os.close(self.here)
                self.here = below
        except BaseException:
            os.close(self.here)
            raise
        return self.here, names[-1]

    def __exit__(self, *_: object) -> None:
        os.close(self.here)


def _unpack_member(
    file: "tarfile.TarFile",
    member: "tarfile.TarInfo",
    top: int,
    times: "list[tuple[str, tarfile.TarInfo]]",
    *,
    owners: bool,
) -> None:
    if not [name for name in member.name.split("/") if name not in ("", ".")]:
        return  # the root itself
    with _Parent(top, member.name) as (directory, name):
        if member.isdir():
            _remove_existing(directory, name, keep_directory=True)
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=directory)
            times.append((member.name, member))
            return
        if member.isreg():
            _remove_existing(directory, name)
            _write_file(file, member, directory, name)
        elif member.issym():
            _remove_existing(directory, name)
            os.symlink(member.linkname, name, dir_fd=directory)
        elif member.islnk():
            with _Parent(top, member.linkname) as (there, first):
                info = _stat(there, first)
                if info is None or not (stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode)):
                    raise InvalidArchiveError(
                        f"{member.name[:200]!r} is a hard link to something that is not a file"
                    )
                if os.path.samestat(info, _stat(directory, name) or os.fstat(top)):
                    return
                _remove_existing(directory, name)
                os.link(first, name, src_dir_fd=there, dst_dir_fd=directory, follow_symlinks=False)
            return
        elif member.isfifo():
            _remove_existing(directory, name)
            os.mkfifo(name, dir_fd=directory)
        else:
            return  # devices: a sandbox has its own
        _set_metadata(directory, name, member, owners=owners)


def _stat(directory: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _remove_existing(directory: int, name: str, *, keep_directory: bool = False) -> None:
    """Remove what an earlier archive member of the same name created."""
    info = _stat(directory, name)
    if info is None or (keep_directory and stat.S_ISDIR(info.st_mode)):
        return
    if stat.S_ISDIR(info.st_mode):
        try:
            os.rmdir(name, dir_fd=directory)
        except OSError as error:
            raise InvalidArchiveError(
                f"the archive contains {name[:200]!r} as a directory with files and again as something else"
            ) from error
    else:
        os.unlink(name, dir_fd=directory)


def _write_file(file: "tarfile.TarFile", member: "tarfile.TarInfo", directory: int, name: str) -> None:
    source = file.extractfile(member)
    assert source is not None
    new = os.open(name, _CREATE_FILE, 0o600, dir_fd=directory)
    try:
        while block := source.read(_BLOCK):
            if block.count(0) == len(block):  # keep files sparse
                os.lseek(new, len(block), os.SEEK_CUR)
                continue
            view = memoryview(block)
            while view:
                view = view[os.write(new, view) :]
        os.truncate(new, member.size)
    finally:
        os.close(new)


def _set_metadata(directory: int, name: str, member: "tarfile.TarInfo", *, owners: bool) -> None:
    if owners:
        # IDs that a sandbox cannot have become nobody.
        uid, gid = (number if 0 <= number < 65535 else 65534 for number in (member.uid, member.gid))
        os.chown(name, uid, gid, dir_fd=directory, follow_symlinks=False)
    if not member.issym():
        os.chmod(name, member.mode & 0o1777, dir_fd=directory)
    os.utime(name, (member.mtime, member.mtime), dir_fd=directory, follow_symlinks=False)
