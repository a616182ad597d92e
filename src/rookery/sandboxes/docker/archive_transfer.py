"""Copy files into and out of a container through the container engine's archive API.

Runs in the process that owns the sandbox, if that process is not root. Root accesses the files directly.

Guarantees:
- an archive that arrives is not trusted: only regular files and directories with checked names are accepted, up to
  a total size, a number of entries and a depth; a download appears at its target completely or not at all;
- a path that leads through a symbolic link is refused. The container engine is asked about every name on the path;
  a program that replaces one by a link between check and use can only redirect the transfer inside its own
  container;
- symbolic links of the host are never followed: a link in an uploaded directory becomes a link, and a source that
  is a link itself is refused;
- uploaded files belong to the sandbox's user; modes are preserved, set-user-ID bits are not.
"""

import asyncio
import base64
import errno
import io
import json
import os
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeVar

from rookery.core import SandboxError
from rookery.sandbox_runtime import processes
from rookery.sandboxes import transfers
from rookery.sandboxes.docker.client import EngineAPIError, EngineClient, api_path

T = TypeVar("T")
_BLOCK_BYTES = 1 << 18
_MAX_OVERHEAD = 64 << 20
"""Number of bytes that an archive may have for headers and padding, in addition to the content of its files."""
_GO_MODE_SYMLINK = 1 << 27
_GO_MODE_DIRECTORY = 1 << 31
_PACK_SECONDS = 3600.0
"""Time limit of the thread that packs an upload. The caller's deadline is normally shorter and ends the wait."""


class ArchiveTransfer:
    """Reads, writes, uploads and downloads files of one container."""

    def __init__(self, engine: EngineClient, container: str, root: transfers.SandboxRoot, uid: int) -> None:
        self._engine = engine
        self._container = container
        self._root = root
        self._uid = uid

    async def read(self, path: str, limit: int) -> bytes:
        names = await self._resolve_existing(path)
        with tempfile.TemporaryFile() as file:
            await self._fetch(names, file, limit)
            return await asyncio.to_thread(_read_single_file, file, path, limit)

    async def write(self, path: str, data: bytes, mode: int) -> None:
        names, existing = await self._resolve_target(path)
        with tempfile.TemporaryFile() as file:
            with tarfile.open(fileobj=file, mode="w") as tar:
                self._add_parents(tar, names, existing)
                tar.addfile(self._make_member("/".join(names), tarfile.REGTYPE, mode, len(data)), io.BytesIO(data))
            await self._put(file)

    async def upload(self, source: Path, target: str, inside: Path | None = None) -> None:
        names, existing = await self._resolve_target(target)
        with tempfile.TemporaryFile() as file:
            await asyncio.to_thread(self._pack, file, source, inside, names, existing)
            await self._put(file)

    async def download(self, source: str, target: Path, limit: int) -> None:
        names = await self._resolve_existing(source)
        with tempfile.TemporaryFile() as file:
            await self._fetch(names, file, limit)
            await asyncio.to_thread(unpack, file, target, source, limit)

    # ---- paths

    async def _resolve_existing(self, path: str) -> tuple[str, ...]:
        """Return the names of a path in the container. Raise `OSError` if it does not exist or contains a link."""
        names = self._split(path)
        for count in range(1, len(names) + 1):
            mode = await self._get_mode(names[:count])
            if mode is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            if mode & _GO_MODE_SYMLINK:
                raise OSError(errno.ELOOP, "the path contains a symbolic link", path)
        return names

    async def _resolve_target(self, path: str) -> tuple[tuple[str, ...], int]:
        """Return the names of a path to write to, and how many of its parent directories exist in the container.

        Raise `OSError` if one of its parents is not a directory.
        """
        names = self._split(path)
        for count in range(1, len(names)):
            mode = await self._get_mode(names[:count])
            if mode is None:
                return names, count - 1
            if not mode & _GO_MODE_DIRECTORY or mode & _GO_MODE_SYMLINK:
                raise NotADirectoryError(errno.ENOTDIR, "a parent of the path is not a directory", path)
        return names, len(names) - 1

    def _split(self, path: str) -> tuple[str, ...]:
        names = transfers.resolve_names(self._root, path)
        if not names:
            raise IsADirectoryError(errno.EISDIR, "the path is the sandbox's root directory")
        return names

    async def _get_mode(self, names: tuple[str, ...]) -> int | None:
        """Return the mode of a path in the encoding of Go's `FileMode`; None if the path does not exist."""
        path = api_path("containers", self._container, "archive", path="/" + "/".join(names))
        header = await self._engine.get_header("HEAD", path, "X-Docker-Container-Path-Stat", ok=(404,))
        return None if header is None else int(json.loads(base64.b64decode(header))["mode"])

    # ---- from the container

    async def _fetch(self, names: tuple[str, ...], file: IO[bytes], limit: int) -> None:
        path = api_path("containers", self._container, "archive", path="/" + "/".join(names))
        size = 0
        async with self._engine.stream("GET", path) as body:
            while block := await body.read(_BLOCK_BYTES):
                size += len(block)
                if size > limit + _MAX_OVERHEAD:
                    raise OSError(errno.EFBIG, f"the transfer exceeds its limit of {limit} bytes")
                file.write(block)
        file.seek(0)

    # ---- into the container

    def _make_member(self, name: str, kind: bytes, mode: int, size: int = 0) -> tarfile.TarInfo:
        info = tarfile.TarInfo(name)
        info.type, info.mode, info.size = kind, mode & 0o777, size
        info.uid = info.gid = self._uid
        return info

    def _add_parents(self, tar: tarfile.TarFile, names: tuple[str, ...], existing: int) -> None:
        for count in range(existing + 1, len(names)):
            tar.addfile(self._make_member("/".join(names[:count]), tarfile.DIRTYPE, 0o755))

    def _pack(
        self, file: IO[bytes], source: Path, inside: Path | None, names: tuple[str, ...], existing: int
    ) -> None:
        with tarfile.open(fileobj=file, mode="w") as tar:
            self._add_parents(tar, names, existing)
            for item in transfers.walk_source(source, transfers.TransferClock(_PACK_SECONDS), inside):
                name, mode = "/".join((*names, *item.names)), item.info.st_mode
                if item.link is not None:
                    info = self._make_member(name, tarfile.SYMTYPE, mode)
                    info.linkname = item.link
                    tar.addfile(info)
                elif item.file is not None:
                    tar.addfile(self._make_member(name, tarfile.REGTYPE, mode, item.info.st_size), item.file)
                else:
                    tar.addfile(self._make_member(name, tarfile.DIRTYPE, mode))

    async def _put(self, file: IO[bytes]) -> None:
        file.seek(0)
        try:
            await self._engine.call("PUT", api_path("containers", self._container, "archive", path="/"), data=file)
        except EngineAPIError as error:
            if error.status < 500 and error.status != 400:
                raise SandboxError(str(error)) from error
            raise OSError(errno.EIO, str(error)) from error


def _with_archive(file: IO[bytes], use: Callable[[tarfile.TarFile], T]) -> T:
    try:
        with tarfile.open(fileobj=file, mode="r|") as tar:
            return use(tar)
    except (tarfile.TarError, ValueError, EOFError) as error:
        raise OSError(errno.EIO, f"the container engine sent a malformed archive: {error}") from error


def _read_single_file(file: IO[bytes], path: str, limit: int) -> bytes:
    def read(tar: tarfile.TarFile) -> bytes:
        info = tar.next()
        if info is None or info.isdir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        body = tar.extractfile(info) if info.isreg() else None
        if body is None:
            raise OSError(errno.EINVAL, "the path is not a regular file", path)
        if info.size > limit:
            raise OSError(errno.EFBIG, f"the transfer exceeds its limit of {limit} bytes")
        return body.read()

    return _with_archive(file, read)


def unpack(file: IO[bytes], target: Path, source: str, limit: int) -> None:
    """Unpack a downloaded archive into a staging directory and rename the result to `target`.

    Only regular files and directories are kept.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".half", dir=target.parent))
    try:
        kind = _with_archive(file, lambda tar: _extract_all(tar, staging, source, limit))
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
            raise OSError(errno.EINVAL, "the container engine's archive contains an invalid name", source)
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
