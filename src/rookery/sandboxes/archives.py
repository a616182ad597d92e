"""Pack host files into tar archives, and unpack archives that arrive from a sandbox. Runs in the owner's process.

Guarantees:
- an archive that arrives is not trusted: only regular files and directories with checked names are accepted, up to
  a total size, a number of entries and a depth; a download appears at its target completely or not at all;
- symbolic links of the host are never followed: a link in a directory becomes a link, and a source that is a link
  itself is refused.
"""

import errno
import os
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeVar

from rookery.sandbox_runtime import processes
from rookery.sandboxes import transfers

T = TypeVar("T")
TOP = "top"
"""Name of the first entry of an archive that `pack` writes."""
_BLOCK_BYTES = 1 << 18
_PACK_SECONDS = 3600.0
"""Time limit of the thread that packs files. The caller's deadline is normally shorter and ends the wait."""


def make_member(name: str, kind: bytes, mode: int, uid: int, size: int = 0) -> tarfile.TarInfo:
    """Return the header of an archive's entry. Set-user-ID bits are dropped."""
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.size = kind, mode & 0o777, size
    info.uid = info.gid = uid
    return info


def add_source(
    tar: tarfile.TarFile, source: Path, inside: Path | None, names: tuple[str, ...], uid: int = 0
) -> None:
    """Add a file or directory of the host to an archive, under `names`, as files of the user `uid`.

    `inside` is as for `Sandbox.upload`.
    """
    for item in transfers.walk_source(source, transfers.TransferClock(_PACK_SECONDS), inside):
        name, mode = "/".join((*names, *item.names)), item.info.st_mode
        if item.link is not None:
            info = make_member(name, tarfile.SYMTYPE, mode, uid)
            info.linkname = item.link
            tar.addfile(info)
        elif item.file is not None:
            tar.addfile(make_member(name, tarfile.REGTYPE, mode, uid, item.info.st_size), item.file)
        else:
            tar.addfile(make_member(name, tarfile.DIRTYPE, mode, uid))


def pack(file: IO[bytes], source: Path, inside: Path | None = None) -> None:
    """Write an archive with a file or directory of the host to `file`. Its first entry has the name `TOP`."""
    with tarfile.open(fileobj=file, mode="w") as tar:
        add_source(tar, source, inside, (TOP,))


def extract_trusted(file: IO[bytes], directory: Path) -> None:
    """Unpack an archive of the sandbox's owner, with its symbolic links, into an empty directory."""
    with tarfile.open(fileobj=file, mode="r|") as tar:
        # Not the argument `filter`, which some versions of Python 3.11 do not have.
        tar.extraction_filter = lambda member, _: member
        tar.extractall(directory)  # noqa: S202


def with_archive(file: IO[bytes], use: Callable[[tarfile.TarFile], T]) -> T:
    """Return `use(archive)` for an archive that arrived. A malformed one raises `OSError`."""
    try:
        with tarfile.open(fileobj=file, mode="r|") as tar:
            return use(tar)
    except (tarfile.TarError, ValueError, EOFError) as error:
        raise OSError(errno.EIO, f"a malformed archive arrived: {error}") from error


def unpack(file: IO[bytes], target: Path, source: str, limit: int) -> None:
    """Unpack a downloaded archive into a staging directory and rename the result to `target`.

    Only regular files and directories are kept.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".half", dir=target.parent))
    try:
        kind = with_archive(file, lambda tar: _extract_all(tar, staging, source, limit))
        if kind == stat.S_IFDIR:
            (staging / "top").rename(target)
        else:
            os.replace(staging / "top", target)  # noqa: PTH105  (a file may be there)
    finally:
        processes.remove_tree(str(staging))


def _extract_all(tar: tarfile.TarFile, staging: Path, source: str, limit: int) -> int:
    """Extract the archive to `staging`/top; return the file type of its first member."""
    kind, remaining = 0, limit
    modes: list[tuple[Path, int]] = []
    for count, info in enumerate(tar, 1):
        if count > transfers.MAX_ENTRIES:
            raise OSError(errno.EFBIG, f"the transfer exceeds the limit of {transfers.MAX_ENTRIES} files")
        parts = PurePosixPath(info.name).parts
        if not parts or info.name.startswith("/") or ".." in parts or len(parts) > transfers.MAX_DEPTH:
            raise OSError(errno.EINVAL, "the archive contains an invalid name", source)
        path = staging.joinpath("top", *parts[1:])
        if info.isdir():
            path.mkdir()
            modes.append((path, info.mode & 0o777 | 0o700))
        elif info.isreg():
            remaining -= info.size
            if remaining < 0:
                raise OSError(errno.EFBIG, f"the transfer exceeds its limit of {limit} bytes")
            _write_file(tar.extractfile(info), path, info.mode & 0o777)
        elif info.islnk() and (linked := _find_extracted(staging, info.linkname)) is not None:
            remaining -= linked.stat().st_size
            if remaining < 0:
                raise OSError(errno.EFBIG, f"the transfer exceeds its limit of {limit} bytes")
            shutil.copy(linked, path)
        if not kind:
            kind = stat.S_IFDIR if info.isdir() else stat.S_IFREG
            if not info.isdir() and not info.isreg():
                raise OSError(errno.EINVAL, "the path is not a regular file", source)
    if not kind:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
    for path, mode in reversed(modes):
        path.chmod(mode)
    return kind


def _find_extracted(staging: Path, name: str) -> Path | None:
    """Return the path of the extracted file to which a hard link points; None if there is no such file."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts:
        return None
    path = staging.joinpath("top", *parts[1:])
    return path if path.is_file() else None


def _write_file(body: Any, path: Path, mode: int) -> None:
    with path.open("xb") as file:
        shutil.copyfileobj(body, file, _BLOCK_BYTES)
    path.chmod(mode)
