"""Files in and out of a folder that hostile programs write to at the same time.

Promises:
- no link is ever followed: every path is walked from the sandbox's own folder, one name at a time;
- nothing that is not a plain file or a folder is opened for reading: FIFOs, devices and sockets are refused
  by `read` and left out by `download`, as links are;
- what arrives is whole or not there; modes survive, set-user-id and its like do not;
- sizes, depth and number are bounded, and a deadline ends the work.

A path that may not be named at all (`..`, outside of the sandbox) is a `SandboxError(sandbox.refused)`: the
caller's mistake. What programs left at a good path (nothing, a link, a FIFO, too much) is an `OSError`.
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

BLOCK = 1 << 20
MAX_DEPTH = 200
MAX_ENTRIES = 200_000
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # NONBLOCK: opening a FIFO must not wait
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Clock:
    """Ends work that runs in a thread: at its deadline, or when it is told to stop."""

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
            raise OSError(errno.EFBIG, f"more than {limit} bytes")

    def entry(self) -> None:
        self.check()
        self.entries += 1
        if self.entries > MAX_ENTRIES:
            raise OSError(errno.EFBIG, f"more than {MAX_ENTRIES} files")


class Place(NamedTuple):
    """Where a sandbox's files are, seen from here."""

    top: str
    """The folder that every path is walked from."""
    work: tuple[str, ...]
    """From there to where relative paths begin."""
    tops: Mapping[str, tuple[str, ...]]
    """Absolute paths, as programs in the sandbox know them, and the names that lead to them."""
    user: int = -1
    """Who owns what is made there; -1: we do."""
    hidden: tuple[str, ...] = ()
    """Names at the top that hold no files, but the kernel."""


def names_of(place: Place, path: str) -> tuple[str, ...]:
    """The names from the top to a path: relative ones start in the working folder, absolute ones lie inside."""
    pure = PurePosixPath(path)
    if "\0" in path or ".." in pure.parts:
        raise SandboxError(f"{path!r} is no path of a sandbox: it must not contain '..'", cause="sandbox.refused")
    if not pure.is_absolute():
        return (*place.work, *pure.parts)
    for known, names in place.tops.items():
        if pure.is_relative_to(known):
            found = (*names, *pure.relative_to(known).parts)
            if found[:1] and found[0] in place.hidden:
                break
            return found
    raise SandboxError(
        f"{path!r} lies outside of the sandbox: use a path relative to its working folder", cause="sandbox.refused"
    )


@contextmanager
def creating(user: int) -> Iterator[None]:
    """What this thread makes belongs to that user, and only that user's rights count: also not root's.

    A file of root's could not even exist in a sandbox whose user namespace does not know that user.
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
def parent_of(place: Place, names: tuple[str, ...], *, make: bool = False) -> Iterator[int]:
    """A descriptor of the folder that holds the last name."""
    if not names:
        raise IsADirectoryError(errno.EISDIR, "it is the sandbox's own root")
    here = os.open(place.top, FOLDER)
    try:
        for name in names[:-1]:
            if make:
                with contextlib.suppress(FileExistsError), creating(place.user):
                    os.mkdir(name, 0o755, dir_fd=here)
            below = os.open(name, FOLDER, dir_fd=here)
            os.close(here)
            here = below
        yield here
    finally:
        os.close(here)


def read(place: Place, path: str, limit: int, clock: Clock) -> bytes:
    names = names_of(place, path)
    with parent_of(place, names) as folder:
        fd = os.open(names[-1], FILE, dir_fd=folder)
        with os.fdopen(_checked(fd, path), "rb", buffering=0) as file:
            parts = []
            while block := file.read(BLOCK):
                clock.count(len(block), limit)
                parts.append(block)
    return b"".join(parts)


def write(place: Place, path: str, data: bytes, mode: int, clock: Clock) -> None:
    names = names_of(place, path)
    with parent_of(place, names, make=True) as folder:
        view = memoryview(data)
        blocks = (view[at : at + BLOCK] for at in range(0, len(view), BLOCK))
        _place(folder, names[-1], blocks, mode, clock, None, place.user)


def _place(
    folder: int,
    name: str,
    blocks: "Iterator[memoryview] | Iterator[bytes]",
    mode: int,
    clock: Clock,
    limit: int | None,
    user: int = -1,
) -> None:
    """Writes beside, then renames over: a link or FIFO of that name is replaced, never written through."""
    half = f".{secrets.token_hex(8)}.half"
    with creating(user):
        fd = os.open(half, NEW, 0o600, dir_fd=folder)
    try:
        with os.fdopen(fd, "wb", buffering=0) as file:
            for block in blocks:
                clock.count(len(block), limit)
                view = memoryview(block)
                while view:
                    view = view[file.write(view) :]
            os.fchmod(fd, mode & 0o777)
        with creating(user):
            os.rename(half, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with creating(user):
            os.unlink(half, dir_fd=folder)
        raise


@contextmanager
def open_parent(source: Path, inside: Path | None = None) -> Iterator[tuple[int, str]]:
    """Open the folder of the host that holds `source`, and yield its descriptor and the last name.

    The last name is not resolved: it may be a symbolic link. With `inside`, no link is followed on the way from
    that folder to `source`, and a `source` that does not lie below it is refused. Without it, the path of the
    parent folder is the caller's own and is opened as it is.
    """
    source = Path(os.path.abspath(source)) if inside is None else source  # noqa: PTH100  (resolve() follows links)
    names: tuple[str, ...] = (source.name,)
    top = source.parent
    if inside is not None:
        top = inside
        names = source.relative_to(inside).parts if source.is_relative_to(inside) else ()
        if not names or ".." in names:
            raise OSError(errno.ELOOP, f"it does not lie inside of {inside}", str(source))
    here = os.open(top, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names[:-1]:
            try:
                below = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            except NotADirectoryError:
                raise OSError(errno.ELOOP, f"{name!r} on the way to it is no folder", str(source)) from None
            os.close(here)
            here = below
        yield here, names[-1] or "."
    finally:
        os.close(here)


class SourceItem(NamedTuple):
    """One file, folder or symbolic link below the source of an upload."""

    names: tuple[str, ...]
    """From the source to it; empty for the source itself."""
    info: os.stat_result
    link: str | None = None
    """Where a symbolic link leads, as it is written there."""
    file: IO[bytes] | None = None
    """The content of a plain file; closed when the next item is asked for."""


def source_items(source: Path, clock: Clock, inside: Path | None = None) -> Iterator[SourceItem]:
    """Yield everything that an upload of `source` sends, parents first, without following any symbolic link.

    Devices, FIFOs and sockets are left out. `OSError` if `source` itself is neither a plain file nor a folder.
    """
    with open_parent(source, inside) as (above, name):
        yield from _items(open_source(above, name, source), (), clock)


def open_source(above: int, name: str, source: Path) -> int:
    """Open the source of an upload. A symbolic link is refused: what it leads to is not for us to choose."""
    info = os.stat(name, dir_fd=above, follow_symlinks=False)
    if stat.S_ISLNK(info.st_mode):
        raise OSError(
            errno.ELOOP,
            "it is a symbolic link, which is never followed: upload the file that is meant",
            str(source),
        )
    fd = os.open(name, FILE, dir_fd=above)
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            _plain(fd, str(source))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _items(fd: int, names: tuple[str, ...], clock: Clock) -> Iterator[SourceItem]:
    """Of an open file or folder, which is closed at the end."""
    try:
        info = os.fstat(fd)
        if not stat.S_ISDIR(info.st_mode):
            with os.fdopen(fd, "rb", closefd=False) as file:
                yield SourceItem(names, info, file=file)
            return
        yield SourceItem(names, info)
        if len(names) >= MAX_DEPTH:
            raise OSError(errno.ELOOP, f"folders nested more than {MAX_DEPTH} deep")
        for name in sorted(os.listdir(fd)):
            clock.entry()
            below = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISLNK(below.st_mode):
                yield SourceItem((*names, name), below, link=os.readlink(name, dir_fd=fd))
            elif stat.S_ISREG(below.st_mode) or stat.S_ISDIR(below.st_mode):
                yield from _items(os.open(name, FILE, dir_fd=fd), (*names, name), clock)
    finally:
        os.close(fd)


def upload(place: Place, source: Path, target: str, clock: Clock, inside: Path | None = None) -> None:
    """Copy a file or a folder of the host into the sandbox.

    Symbolic links in a folder are copied as links. A source that is one itself is refused. `inside`: see
    `open_parent`.
    """
    names = names_of(place, target)
    with open_parent(source, inside) as (above, name):
        fd = open_source(above, name, source)
        try:
            with parent_of(place, names, make=True) as folder:
                info = os.fstat(fd)
                if stat.S_ISDIR(info.st_mode):
                    _copy(fd, folder, names[-1], clock, None, links=True, depth=0, user=place.user)
                    return
                with os.fdopen(fd, "rb", buffering=0, closefd=False) as file:
                    _place(folder, names[-1], _blocks(file.read), info.st_mode, clock, None, place.user)
        finally:
            os.close(fd)


def download(place: Place, source: str, target: Path, limit: int, clock: Clock) -> None:
    """`target` must not exist yet, or be an empty folder or a file (which is replaced)."""
    names = names_of(place, source)
    target.parent.mkdir(parents=True, exist_ok=True)
    with parent_of(place, names) as folder:
        above = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fd = os.open(names[-1], FILE, dir_fd=folder)
            try:
                if stat.S_ISDIR(os.fstat(fd).st_mode):
                    _download_folder(fd, above, target.name, limit, clock)
                    return
                mode = _plain(fd, source).st_mode
                with os.fdopen(fd, "rb", buffering=0, closefd=False) as file:
                    _place(above, target.name, _blocks(file.read), mode, clock, limit)
            finally:
                os.close(fd)
        finally:
            os.close(above)


def _download_folder(source: int, above: int, name: str, limit: int, clock: Clock) -> None:
    half = f".{name}.{secrets.token_hex(8)}.half"
    try:
        _copy(source, above, half, clock, limit, links=False, depth=0, user=-1)
        os.rename(half, name, src_dir_fd=above, dst_dir_fd=above)
    except BaseException:
        from rookery.sandboxes.procs import remove_tree

        remove_tree(f"/proc/self/fd/{above}/{half}")
        raise


def _copy(
    source: int, above: int, name: str, clock: Clock, limit: int | None, *, links: bool, depth: int, user: int
) -> None:
    """A folder, given open, becomes `name` in `above`; folders of that name are merged into."""
    if depth > MAX_DEPTH:
        raise OSError(errno.ELOOP, f"folders nested more than {MAX_DEPTH} deep")
    mode = stat.S_IMODE(os.fstat(source).st_mode) & 0o777
    with contextlib.suppress(FileExistsError), creating(user):
        os.mkdir(name, 0o700, dir_fd=above)
    target = os.open(name, FOLDER, dir_fd=above)
    try:
        with os.scandir(source) as entries:
            listed = []
            for entry in entries:
                clock.entry()
                listed.append(entry.name)
        for entry_name in listed:
            _copy_entry(source, entry_name, target, clock, limit, links=links, depth=depth, user=user)
        os.fchmod(target, mode | 0o700)  # whoever owns it must be able to remove it
    finally:
        os.close(target)


def _copy_entry(
    source: int, name: str, target: int, clock: Clock, limit: int | None, *, links: bool, depth: int, user: int
) -> None:
    info = os.stat(name, dir_fd=source, follow_symlinks=False)
    if stat.S_ISLNK(info.st_mode) and links:
        half = f".{secrets.token_hex(8)}.half"
        leads = os.readlink(name, dir_fd=source)  # with our own rights: the source may be nobody else's
        with creating(user):
            os.symlink(leads, half, dir_fd=target)
            os.rename(half, name, src_dir_fd=target, dst_dir_fd=target)
        return
    if not (stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)):
        return
    try:
        fd = os.open(name, FILE, dir_fd=source)
    except (FileNotFoundError, OSError) as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
            return  # swapped for something else since we looked
        raise
    try:
        info = os.fstat(fd)
        if stat.S_ISDIR(info.st_mode):
            _copy(fd, target, name, clock, limit, links=links, depth=depth + 1, user=user)
        elif stat.S_ISREG(info.st_mode):
            with os.fdopen(fd, "rb", buffering=0, closefd=False) as file:
                _place(target, name, _blocks(file.read), info.st_mode, clock, limit, user)
    finally:
        os.close(fd)


def _blocks(read_some: Callable[[int], bytes | None]) -> Iterator[bytes]:
    while block := read_some(BLOCK):
        yield block


def _checked(fd: int, path: str) -> int:
    try:
        _plain(fd, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _plain(fd: int, path: str) -> os.stat_result:
    info = os.fstat(fd)
    if stat.S_ISDIR(info.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(info.st_mode):
        raise OSError(errno.EINVAL, "not a plain file", path)
    return info
