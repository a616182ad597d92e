"""Files in and out of a container through the engine, for owners who are not root of this machine.

Promises:
- nothing that arrives is believed: only plain files and folders are taken, by checked names, up to a size, a
  number and a depth; what is placed on the host is whole or not there;
- a path that leads through a link is refused. The engine is asked for every name on the way; a program that
  changes one in between can only lead us to another place of its own container;
- a symbolic link of this machine is never followed: one in a folder becomes a link of the container, a source that
  is one is refused;
- what is put there belongs to the sandbox's user; modes survive, set-user-id and its like do not.
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
from rookery.sandboxes import procs, transfers
from rookery.sandboxes.docker import api

T = TypeVar("T")
_BLOCK = 1 << 18
_OVERHEAD = 64 << 20
"""What an archive may be longer than its content: headers and padding."""
_LINK = 1 << 27
"""Go's bit for a link, in a mode."""
_PACK_SECONDS = 3600.0
"""Bound on packing an upload in its thread; the caller's own deadline is shorter and ends the wait."""
_FOLDER = 1 << 31


class Archives:
    """Of one container."""

    def __init__(self, engine: api.Engine, name: str, place: transfers.Place, user: int) -> None:
        self._engine = engine
        self._name = name
        self._place = place
        self._user = user

    async def read(self, path: str, limit: int) -> bytes:
        names = await self._walked(path)
        with tempfile.TemporaryFile() as file:
            await self._fetch(names, file, limit)
            return await asyncio.to_thread(_one_file, file, path, limit)

    async def write(self, path: str, data: bytes, mode: int) -> None:
        names, made = await self._way_to(path)
        with tempfile.TemporaryFile() as file:
            with tarfile.open(fileobj=file, mode="w") as tar:
                self._folders(tar, names, made)
                tar.addfile(self._member("/".join(names), tarfile.REGTYPE, mode, len(data)), io.BytesIO(data))
            await self._put(file)

    async def upload(self, source: Path, target: str, inside: Path | None = None) -> None:
        names, made = await self._way_to(target)
        with tempfile.TemporaryFile() as file:
            await asyncio.to_thread(self._pack, file, source, inside, names, made)
            await self._put(file)

    async def download(self, source: str, target: Path, limit: int) -> None:
        names = await self._walked(source)
        with tempfile.TemporaryFile() as file:
            await self._fetch(names, file, limit)
            await asyncio.to_thread(_unpack, file, target, source, limit)

    # ---- the way

    async def _walked(self, path: str) -> tuple[str, ...]:
        """The names to a path that is there, none of which is a link."""
        names = transfers.names_of(self._place, path)
        if not names:
            raise IsADirectoryError(errno.EISDIR, "it is the sandbox's own root")
        for count in range(1, len(names) + 1):
            found = await self._stat(names[:count])
            if found is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            if found & _LINK:
                raise OSError(errno.ELOOP, "it leads through a link", path)
        return names

    async def _way_to(self, path: str) -> tuple[tuple[str, ...], int]:
        """The names to a path, and how many of its folders are there."""
        names = transfers.names_of(self._place, path)
        if not names:
            raise IsADirectoryError(errno.EISDIR, "it is the sandbox's own root")
        for count in range(1, len(names)):
            found = await self._stat(names[:count])
            if found is None:
                return names, count - 1
            if not found & _FOLDER or found & _LINK:
                raise NotADirectoryError(errno.ENOTDIR, "no folder is in the way", path)
        return names, len(names) - 1

    async def _stat(self, names: tuple[str, ...]) -> int | None:
        """A mode, as Go writes it; None where nothing is."""
        where = api.path("containers", self._name, "archive", path="/" + "/".join(names))
        text = await self._engine.header("HEAD", where, "X-Docker-Container-Path-Stat", ok=(404,))
        return None if text is None else int(json.loads(base64.b64decode(text))["mode"])

    # ---- out

    async def _fetch(self, names: tuple[str, ...], file: IO[bytes], limit: int) -> None:
        where = api.path("containers", self._name, "archive", path="/" + "/".join(names))
        size = 0
        async with self._engine.stream("GET", where) as body:
            while block := await body.read(_BLOCK):
                size += len(block)
                if size > limit + _OVERHEAD:
                    raise OSError(errno.EFBIG, f"more than {limit} bytes")
                file.write(block)
        file.seek(0)

    # ---- in

    def _member(self, name: str, kind: bytes, mode: int, size: int = 0) -> tarfile.TarInfo:
        info = tarfile.TarInfo(name)
        info.type, info.mode, info.size = kind, mode & 0o777, size
        info.uid = info.gid = self._user
        return info

    def _folders(self, tar: tarfile.TarFile, names: tuple[str, ...], made: int) -> None:
        for count in range(made + 1, len(names)):
            tar.addfile(self._member("/".join(names[:count]), tarfile.DIRTYPE, 0o755))

    def _pack(self, file: IO[bytes], source: Path, inside: Path | None, names: tuple[str, ...], made: int) -> None:
        """Write a tar archive of `source`. Symbolic links become links; none is followed on this machine."""
        with tarfile.open(fileobj=file, mode="w") as tar:
            self._folders(tar, names, made)
            for item in transfers.source_items(source, transfers.Clock(_PACK_SECONDS), inside):
                name, mode = "/".join((*names, *item.names)), item.info.st_mode
                if item.link is not None:
                    info = self._member(name, tarfile.SYMTYPE, mode)
                    info.linkname = item.link
                    tar.addfile(info)
                elif item.file is not None:
                    tar.addfile(self._member(name, tarfile.REGTYPE, mode, item.info.st_size), item.file)
                else:
                    tar.addfile(self._member(name, tarfile.DIRTYPE, mode))

    async def _put(self, file: IO[bytes]) -> None:
        file.seek(0)
        where = api.path("containers", self._name, "archive", path="/")
        try:
            await self._engine.call("PUT", where, data=file)
        except api.Refused as error:
            if error.status < 500 and error.status != 400:
                raise SandboxError(str(error)) from error
            raise OSError(errno.EIO, str(error)) from error


def _checked(file: IO[bytes], use: Callable[[tarfile.TarFile], T]) -> T:
    try:
        with tarfile.open(fileobj=file, mode="r|") as tar:
            return use(tar)
    except (tarfile.TarError, ValueError, EOFError) as error:
        raise OSError(errno.EIO, f"the engine's archive cannot be read: {error}") from error


def _one_file(file: IO[bytes], path: str, limit: int) -> bytes:
    def use(tar: tarfile.TarFile) -> bytes:
        info = tar.next()
        if info is None or info.isdir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        body = tar.extractfile(info) if info.isreg() else None
        if body is None:
            raise OSError(errno.EINVAL, "not a plain file", path)
        if info.size > limit:
            raise OSError(errno.EFBIG, f"more than {limit} bytes")
        return body.read()

    return _checked(file, use)


def _unpack(file: IO[bytes], target: Path, source: str, limit: int) -> None:
    """Beside its place, then renamed over it. Links and all that is no file or folder are left out."""
    target.parent.mkdir(parents=True, exist_ok=True)
    half = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".half", dir=target.parent))
    try:
        kind = _checked(file, lambda tar: _place_all(tar, half, source, limit))
        if kind == stat.S_IFDIR:
            (half / "top").rename(target)
        else:
            os.replace(half / "top", target)  # noqa: PTH105  (a file may be there)
    finally:
        procs.remove_tree(str(half))


def _place_all(tar: tarfile.TarFile, half: Path, source: str, limit: int) -> int:
    kind, left = 0, limit
    modes: list[tuple[Path, int]] = []
    for count, info in enumerate(tar, 1):
        if count > transfers.MAX_ENTRIES:
            raise OSError(errno.EFBIG, f"more than {transfers.MAX_ENTRIES} files")
        parts = PurePosixPath(info.name).parts
        if not parts or info.name.startswith("/") or ".." in parts or len(parts) > transfers.MAX_DEPTH:
            raise OSError(errno.EINVAL, "an impossible name in the engine's archive", source)
        place = half.joinpath("top", *parts[1:])
        if info.isdir():
            place.mkdir()
            modes.append((place, info.mode & 0o777 | 0o700))
        elif info.isreg():
            left -= info.size
            if left < 0:
                raise OSError(errno.EFBIG, f"more than {limit} bytes")
            _copied(tar.extractfile(info), place, info.mode & 0o777)
        elif info.islnk() and (first := _placed_before(half, info.linkname)) is not None:
            left -= first.stat().st_size
            if left < 0:
                raise OSError(errno.EFBIG, f"more than {limit} bytes")
            shutil.copy(first, place)
        if not kind:
            kind = stat.S_IFDIR if info.isdir() else stat.S_IFREG
            if not info.isdir() and not info.isreg():
                raise OSError(errno.EINVAL, "not a plain file", source)
    if not kind:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
    for place, mode in reversed(modes):
        place.chmod(mode)
    return kind


def _placed_before(half: Path, name: str) -> Path | None:
    """The file that a hard link of the archive names, where it was placed; None if there is none inside of it."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts:
        return None
    place = half.joinpath("top", *parts[1:])
    return place if place.is_file() else None


def _copied(body: Any, place: Path, mode: int) -> None:
    with place.open("xb") as file:
        shutil.copyfileobj(body, file, _BLOCK)
    place.chmod(mode)
