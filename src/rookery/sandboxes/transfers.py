"""Copy files into and out of a sandbox's directory, which malicious programs may modify at the same time.

Runs in the process that owns the sandbox.

Guarantees:
- no symbolic link is followed: every path is opened from the sandbox's root directory, one name at a time;
- only regular files and directories are opened for reading: FIFOs, devices and sockets are refused by `read` and
  skipped by `download`, as links are;
- a copied file appears completely or not at all; its mode is preserved, except the set-user-ID bit;
- sizes, depth and number of files are limited, and a deadline ends a transfer.

An invalid path (it contains `..` or lies outside of the sandbox) is the caller's mistake and raises
`SandboxError(sandbox.refused)`. If a valid path holds nothing, a link, a FIFO or too much data, that is the work
of the sandbox's programs and raises `OSError`.
"""

import contextlib
import ctypes
import errno
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from rookery.core import SandboxError

BLOCK_BYTES = 1 << 20
MAX_DEPTH = 200
MAX_ENTRIES = 200_000
OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # NONBLOCK: opening a FIFO must not wait
CREATE_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class TransferClock:
    """Checks the deadline, the cancellation and the limits of a file transfer that runs in a thread."""

    def __init__(self, timeout: float) -> None:
        self._end = time.monotonic() + timeout
        self.stop = threading.Event()
        self.entries = 0
        self.bytes = 0

    def check(self) -> None:
        if self.stop.is_set() or time.monotonic() > self._end:
            raise TimeoutError("the transfer's deadline passed")

    def count(self, size: int, limit: int | None) -> None:
        self.check()
        self.bytes += size
        if limit is not None and self.bytes > limit:
            raise OSError(errno.EFBIG, f"the transfer exceeds its limit of {limit} bytes")

    def count_entry(self) -> None:
        self.check()
        self.entries += 1
        if self.entries > MAX_ENTRIES:
            raise OSError(errno.EFBIG, f"the transfer exceeds the limit of {MAX_ENTRIES} files")


class SandboxRoot(NamedTuple):
    """The location of a sandbox's files on the host."""

    directory: str
    """The host directory from which every path is opened."""
    workdir: tuple[str, ...]
    """Names that lead from `directory` to the sandbox's working directory, where relative paths start."""
    prefixes: Mapping[str, tuple[str, ...]]
    """Maps absolute paths of the sandbox to the names that lead to them from `directory`."""
    uid: int = -1
    """User ID on the host that owns created files; -1 for the current user."""
    hidden: tuple[str, ...] = ()
    """Names of top-level directories of the sandbox that transfers must not access, like `proc`."""


def resolve_names(root: SandboxRoot, path: str) -> tuple[str, ...]:
    """Return the names that lead from `root.directory` to a path of the sandbox.

    Relative paths start in the sandbox's working directory. Raise `SandboxError(sandbox.refused)` if the path
    contains `..` or lies outside of the sandbox.
    """
    pure = PurePosixPath(path)
    if "\0" in path or ".." in pure.parts:
        raise SandboxError(
            f"{path!r} is not a valid path in a sandbox: it must not contain '..'", cause="sandbox.refused"
        )
    if not pure.is_absolute():
        return (*root.workdir, *pure.parts)
    for known, names in root.prefixes.items():
        if pure.is_relative_to(known):
            found = (*names, *pure.relative_to(known).parts)
            if found[:1] and found[0] in root.hidden:
                break
            return found
    raise SandboxError(
        f"{path!r} lies outside of the sandbox: use a path relative to its working directory",
        cause="sandbox.refused",
    )


@contextmanager
def acting_as_user(user: int) -> Iterator[None]:
    """Let this thread create files as the host's user ID `user`, with that user's permissions, during the block.

    Files that belong to the host's root would have no valid owner in a sandbox whose user namespace does not map
    that user.
    """
    if user < 0:
        yield
        return
    libc = ctypes.CDLL(None)
    try:
        libc.setfsgid(ctypes.c_uint(user))
        libc.setfsuid(ctypes.c_uint(user))
        yield
    finally:
        libc.setfsuid(ctypes.c_uint(os.geteuid()))
        libc.setfsgid(ctypes.c_uint(os.getegid()))


@contextmanager
def open_parent_inside(root: SandboxRoot, names: tuple[str, ...], *, make: bool = False) -> Iterator[int]:
    """Yield a descriptor of the sandbox directory that contains the last of `names`. With `make`, create it."""
    if not names:
        raise IsADirectoryError(errno.EISDIR, "the path is the sandbox's root directory")
    here = os.open(root.directory, OPEN_DIRECTORY)
    try:
        for name in names[:-1]:
            if make:
                with contextlib.suppress(FileExistsError), acting_as_user(root.uid):
                    os.mkdir(name, 0o755, dir_fd=here)
            below = os.open(name, OPEN_DIRECTORY, dir_fd=here)
            os.close(here)
            here = below
        yield here
    finally:
        os.close(here)


def read(root: SandboxRoot, path: str, limit: int, clock: TransferClock) -> bytes:
    names = resolve_names(root, path)
    with open_parent_inside(root, names) as folder:
        fd = os.open(names[-1], OPEN_FILE, dir_fd=folder)
        with os.fdopen(_require_regular(fd, path), "rb", buffering=0) as file:
            parts = []
            while block := file.read(BLOCK_BYTES):
                clock.count(len(block), limit)
                parts.append(block)
    return b"".join(parts)


def write(root: SandboxRoot, path: str, data: bytes, mode: int, clock: TransferClock) -> None:
    names = resolve_names(root, path)
    with open_parent_inside(root, names, make=True) as folder:
        view = memoryview(data)
        blocks = (view[at : at + BLOCK_BYTES] for at in range(0, len(view), BLOCK_BYTES))
        _write_file(folder, names[-1], blocks, mode, clock, None, root.uid)


def _write_file(
    folder: int,
    name: str,
    blocks: "Iterator[memoryview] | Iterator[bytes]",
    mode: int,
    clock: TransferClock,
    limit: int | None,
    user: int = -1,
) -> None:
    """Write a temporary file and rename it to `name`. A link or FIFO there is replaced, never written through."""
    half = f".{secrets.token_hex(8)}.half"
    with acting_as_user(user):
        fd = os.open(half, CREATE_FILE, 0o600, dir_fd=folder)
    try:
        with os.fdopen(fd, "wb", buffering=0) as file:
            for block in blocks:
                clock.count(len(block), limit)
                view = memoryview(block)
                while view:
                    view = view[file.write(view) :]
            os.fchmod(fd, mode & 0o777)
        with acting_as_user(user):
            os.rename(half, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with acting_as_user(user):
            os.unlink(half, dir_fd=folder)
        raise


@contextmanager
def open_parent(source: Path, inside: Path | None = None) -> Iterator[tuple[int, str]]:
    """Open the directory of the host that contains `source`; yield its descriptor and the last name.

    The last name is not resolved: it may be a symbolic link. With `inside`, no link is followed on the path from
    that directory to `source`, and a `source` outside of it is refused with `OSError`. Without `inside`, links in
    the path of the parent directory are followed.
    """
    source = Path(os.path.abspath(source)) if inside is None else source  # noqa: PTH100  (resolve() follows links)
    names: tuple[str, ...] = (source.name,)
    top = source.parent
    if inside is not None:
        top = inside
        names = source.relative_to(inside).parts if source.is_relative_to(inside) else ()
        if not names or ".." in names:
            raise OSError(errno.ELOOP, f"the path to read is not inside the directory {inside}", str(source))
    here = os.open(top, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names[:-1]:
            try:
                below = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            except NotADirectoryError:
                raise OSError(
                    errno.ELOOP, f"{name!r} in the path of the source is not a directory", str(source)
                ) from None
            os.close(here)
            here = below
        yield here, names[-1] or "."
    finally:
        os.close(here)


class SourceItem(NamedTuple):
    """One file, directory or symbolic link below the source of an upload."""

    names: tuple[str, ...]
    """Names that lead from the source of the upload to this item; empty for the source itself."""
    info: os.stat_result
    link: str | None = None
    """Target of a symbolic link; None for other items."""
    file: IO[bytes] | None = None
    """A regular file, opened for reading, and closed when the next item is requested; None for other items."""


def walk_source(source: Path, clock: TransferClock, inside: Path | None = None) -> Iterator[SourceItem]:
    """Yield everything that an upload of `source` sends, parents first, without following any symbolic link.

    Devices, FIFOs and sockets are skipped. `OSError` if `source` itself is neither a regular file nor a
    directory.
    """
    with open_parent(source, inside) as (above, name):
        yield from _items(open_source(above, name, source), (), clock)


def open_source(above: int, name: str, source: Path) -> int:
    """Open the file or directory `name` in the directory `above`. Raise `OSError` if it is a symbolic link."""
    info = os.stat(name, dir_fd=above, follow_symlinks=False)
    if stat.S_ISLNK(info.st_mode):
        raise OSError(
            errno.ELOOP,
            "the source is a symbolic link, which is not followed: upload its target instead",
            str(source),
        )
    fd = os.open(name, OPEN_FILE, dir_fd=above)
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            _stat_regular(fd, str(source))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _items(fd: int, names: tuple[str, ...], clock: TransferClock) -> Iterator[SourceItem]:
    """Yield an open file, or an open directory and everything below it. Closes `fd` at the end."""
    try:
        info = os.fstat(fd)
        if not stat.S_ISDIR(info.st_mode):
            with os.fdopen(fd, "rb", closefd=False) as file:
                yield SourceItem(names, info, file=file)
            return
        yield SourceItem(names, info)
        if len(names) >= MAX_DEPTH:
            raise OSError(errno.ELOOP, f"the directories to upload are nested more than {MAX_DEPTH} levels deep")
        for name in sorted(os.listdir(fd)):
            clock.count_entry()
            below = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISLNK(below.st_mode):
                yield SourceItem((*names, name), below, link=os.readlink(name, dir_fd=fd))
            elif stat.S_ISREG(below.st_mode) or stat.S_ISDIR(below.st_mode):
                yield from _items(os.open(name, OPEN_FILE, dir_fd=fd), (*names, name), clock)
    finally:
        os.close(fd)


def upload(root: SandboxRoot, source: Path, target: str, clock: TransferClock, inside: Path | None = None) -> None:
    """Copy a file or directory of the host into the sandbox.

    Symbolic links in a directory are copied as links. A source that is a link raises `OSError`. With `inside`, the
    source must lie below that directory, and no link on the path to it is followed.
    """
    names = resolve_names(root, target)
    with open_parent(source, inside) as (above, name):
        fd = open_source(above, name, source)
        try:
            with open_parent_inside(root, names, make=True) as folder:
                info = os.fstat(fd)
                if stat.S_ISDIR(info.st_mode):
                    _copy(fd, folder, names[-1], clock, None, links=True, depth=0, user=root.uid)
                    return
                with os.fdopen(fd, "rb", buffering=0, closefd=False) as file:
                    _write_file(folder, names[-1], _blocks(file.read), info.st_mode, clock, None, root.uid)
        finally:
            os.close(fd)


def download(root: SandboxRoot, source: str, target: Path, limit: int, clock: TransferClock) -> None:
    """Copy a file or directory out of the sandbox to `target` on the host.

    A file replaces an existing file. A directory can only replace an empty directory.
    """
    names = resolve_names(root, source)
    target.parent.mkdir(parents=True, exist_ok=True)
    with open_parent_inside(root, names) as folder:
        above = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fd = os.open(names[-1], OPEN_FILE, dir_fd=folder)
            try:
                if stat.S_ISDIR(os.fstat(fd).st_mode):
                    _download_directory(fd, above, target.name, limit, clock)
                    return
                mode = _stat_regular(fd, source).st_mode
                with os.fdopen(fd, "rb", buffering=0, closefd=False) as file:
                    _write_file(above, target.name, _blocks(file.read), mode, clock, limit)
            finally:
                os.close(fd)
        finally:
            os.close(above)


def _download_directory(source: int, above: int, name: str, limit: int, clock: TransferClock) -> None:
    half = f".{name}.{secrets.token_hex(8)}.half"
    try:
        _copy(source, above, half, clock, limit, links=False, depth=0, user=-1)
        os.rename(half, name, src_dir_fd=above, dst_dir_fd=above)
    except BaseException:
        from rookery.sandbox_runtime.processes import remove_tree

        remove_tree(f"/proc/self/fd/{above}/{half}")
        raise


def _copy(
    source: int,
    above: int,
    name: str,
    clock: TransferClock,
    limit: int | None,
    *,
    links: bool,
    depth: int,
    user: int,
) -> None:
    """Copy an open directory to `name` in the directory `above`. An existing directory keeps its other entries."""
    if depth > MAX_DEPTH:
        raise OSError(errno.ELOOP, f"the directories to copy are nested more than {MAX_DEPTH} levels deep")
    mode = stat.S_IMODE(os.fstat(source).st_mode) & 0o777
    with contextlib.suppress(FileExistsError), acting_as_user(user):
        os.mkdir(name, 0o700, dir_fd=above)
    target = os.open(name, OPEN_DIRECTORY, dir_fd=above)
    try:
        with os.scandir(source) as entries:
            listed = []
            for entry in entries:
                clock.count_entry()
                listed.append(entry.name)
        for entry_name in listed:
            _copy_entry(source, entry_name, target, clock, limit, links=links, depth=depth, user=user)
        os.fchmod(target, mode | 0o700)  # its owner must be able to remove it
    finally:
        os.close(target)


def _copy_entry(
    source: int,
    name: str,
    target: int,
    clock: TransferClock,
    limit: int | None,
    *,
    links: bool,
    depth: int,
    user: int,
) -> None:
    info = os.stat(name, dir_fd=source, follow_symlinks=False)
    if stat.S_ISLNK(info.st_mode) and links:
        half = f".{secrets.token_hex(8)}.half"
        leads = os.readlink(
            name, dir_fd=source
        )  # with our own permissions: the user may not be allowed to read the source
        with acting_as_user(user):
            os.symlink(leads, half, dir_fd=target)
            os.rename(half, name, src_dir_fd=target, dst_dir_fd=target)
        return
    if not (stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)):
        return
    try:
        fd = os.open(name, OPEN_FILE, dir_fd=source)
    except (FileNotFoundError, OSError) as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
            return  # replaced by something else since it was listed
        raise
    try:
        info = os.fstat(fd)
        if stat.S_ISDIR(info.st_mode):
            _copy(fd, target, name, clock, limit, links=links, depth=depth + 1, user=user)
        elif stat.S_ISREG(info.st_mode):
            with os.fdopen(fd, "rb", buffering=0, closefd=False) as file:
                _write_file(target, name, _blocks(file.read), info.st_mode, clock, limit, user)
    finally:
        os.close(fd)


def _blocks(read_some: Callable[[int], bytes | None]) -> Iterator[bytes]:
    while block := read_some(BLOCK_BYTES):
        yield block


def _require_regular(fd: int, path: str) -> int:
    try:
        _stat_regular(fd, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _stat_regular(fd: int, path: str) -> os.stat_result:
    info = os.fstat(fd)
    if stat.S_ISDIR(info.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(info.st_mode):
        raise OSError(errno.EINVAL, "the path is not a regular file", path)
    return info
