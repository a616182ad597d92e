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
import tarfile
import tempfile
from pathlib import Path
from typing import IO

from rookery.core import SandboxError
from rookery.sandboxes import archives, transfers
from rookery.sandboxes.docker.client import EngineAPIError, EngineClient, api_path

_BLOCK_BYTES = 1 << 18
_MAX_OVERHEAD = 64 << 20
"""Number of bytes that an archive may have for headers and padding, in addition to the content of its files."""
_GO_MODE_SYMLINK = 1 << 27
_GO_MODE_DIRECTORY = 1 << 31


class ArchiveTransfer:
    """Implements `rookery.sandboxes.file_transfer.FileTransfer` for one container."""

    def __init__(
        self,
        engine: EngineClient,
        container: str,
        root: transfers.SandboxRoot,
        uid: int,
        *,
        read_only: bool = False,
    ) -> None:
        self._engine = engine
        self._container = container
        self._root = root
        self._uid = uid
        self._read_only = read_only

    async def read(self, path: str, *, limit: int, timeout: float) -> bytes:
        async with asyncio.timeout(timeout):
            names = await self._resolve_existing(path)
            with tempfile.TemporaryFile() as file:
                await self._fetch(names, file, limit)
                return await asyncio.to_thread(_read_single_file, file, path, limit)

    async def write(self, path: str, data: bytes, *, mode: int, timeout: float) -> None:
        async with asyncio.timeout(timeout):
            names, existing = await self._resolve_target(path)
            with tempfile.TemporaryFile() as file:
                with tarfile.open(fileobj=file, mode="w") as tar:
                    self._add_parents(tar, names, existing)
                    member = archives.make_member("/".join(names), tarfile.REGTYPE, mode, self._uid, len(data))
                    tar.addfile(member, io.BytesIO(data))
                await self._put(file)

    async def upload(self, source: Path, target: str, *, inside: Path | None, timeout: float) -> None:
        async with asyncio.timeout(timeout):
            names, existing = await self._resolve_target(target)
            with tempfile.TemporaryFile() as file:
                await asyncio.to_thread(self.pack, file, source, inside, names, existing)
                await self._put(file)

    async def download(self, source: str, target: Path, *, limit: int, timeout: float) -> None:
        async with asyncio.timeout(timeout):
            names = await self._resolve_existing(source)
            with tempfile.TemporaryFile() as file:
                await self._fetch(names, file, limit)
                await asyncio.to_thread(archives.unpack, file, target, source, limit)

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

        Raise `OSError` if one of its parents is not a directory, and `SandboxError(sandbox.refused)` if the
        container is read-only.
        """
        if self._read_only:
            raise SandboxError(
                "the docker provider cannot write into a read-only container, unless Rookery runs as root",
                cause="sandbox.refused",
            )
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

    def _add_parents(self, tar: tarfile.TarFile, names: tuple[str, ...], existing: int) -> None:
        for count in range(existing + 1, len(names)):
            tar.addfile(archives.make_member("/".join(names[:count]), tarfile.DIRTYPE, 0o755, self._uid))

    def pack(
        self, file: IO[bytes], source: Path, inside: Path | None, names: tuple[str, ...], existing: int
    ) -> None:
        with tarfile.open(fileobj=file, mode="w") as tar:
            self._add_parents(tar, names, existing)
            archives.add_source(tar, source, inside, names, self._uid)

    async def _put(self, file: IO[bytes]) -> None:
        file.seek(0)
        try:
            await self._engine.call("PUT", api_path("containers", self._container, "archive", path="/"), data=file)
        except EngineAPIError as error:
            if error.status < 500 and error.status != 400:
                raise SandboxError(str(error)) from error
            raise OSError(errno.EIO, str(error)) from error


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

    return archives.with_archive(file, read)
