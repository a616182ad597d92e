"""Finish an unpacked layer and look up files in a stack of layers. Runs in the fetching process.

Guarantees:
- a directory that the archive has no entry for gets the mode, owner and times that it has in the lower layers;
- a whiteout of something that does not exist below is removed: overlayfs would show it as a broken name;
- no symbolic link is followed in any layer.
"""

import contextlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from rookery.sandboxes.images.unpacker.layer import OPAQUE_ATTRIBUTE

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class LowerLayers:
    """A stack of layers, uppermost first, as overlayfs would show it."""

    def __init__(self, layers: Sequence[Path]) -> None:
        self._layers = layers

    def find(self, path: str) -> os.stat_result | None:
        """Return the status of a path; None if it does not exist or a whiteout hides it."""
        parts = path.split("/")
        for layer in self._layers:
            found, hides_lower = _look_up(layer, parts)
            if found is not None:
                return None if stat.S_ISCHR(found.st_mode) else found
            if hides_lower:
                return None
        return None

    def read(self, path: str, limit: int) -> bytes | None:
        """Return the beginning of a regular file; None if the path is something else."""
        parts = path.split("/")
        for layer in self._layers:
            found, hides_lower = _look_up(layer, parts)
            if found is not None:
                if not stat.S_ISREG(found.st_mode):
                    return None
                with contextlib.suppress(OSError), _opened_directory(layer, parts[:-1]) as folder:
                    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                    fd = os.open(parts[-1], flags, dir_fd=folder)
                    try:
                        return os.pread(fd, limit, 0)
                    finally:
                        os.close(fd)
                return None
            if hides_lower:
                return None
        return None


class _opened_directory:  # noqa: N801  (it is used as a function is)
    """Open a directory of a layer without following symbolic links."""

    def __init__(self, layer: Path, parts: Sequence[str]) -> None:
        self._layer, self._parts = layer, parts
        self._fd = -1

    def __enter__(self) -> int:
        self._fd = os.open(self._layer, _OPEN_DIRECTORY)
        try:
            for part in self._parts:
                below = os.open(part, _OPEN_DIRECTORY, dir_fd=self._fd)
                os.close(self._fd)
                self._fd = below
        except BaseException:
            os.close(self._fd)
            raise
        return self._fd

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _look_up(layer: Path, parts: Sequence[str]) -> tuple[os.stat_result | None, bool]:
    """Return what one layer has at a path, and whether it hides the lower layers there."""
    here = os.open(layer, _OPEN_DIRECTORY)
    hides_lower = False
    try:
        for at, part in enumerate(parts):
            hides_lower = hides_lower or _is_opaque(here)
            try:
                info = os.stat(part, dir_fd=here, follow_symlinks=False)
            except FileNotFoundError:
                return None, hides_lower
            if at == len(parts) - 1:
                return info, True
            if not stat.S_ISDIR(info.st_mode):
                return None, True
            below = os.open(part, _OPEN_DIRECTORY, dir_fd=here)
            os.close(here)
            here = below
    finally:
        os.close(here)
    return None, hides_lower


def _is_opaque(folder: int) -> bool:
    try:
        return os.getxattr(folder, OPAQUE_ATTRIBUTE) == b"y"
    except OSError:
        return False


def finalize_layer(
    layer_directory: Path,
    below: Sequence[Path],
    implied_directories: Sequence[str],
    whiteouts: Sequence[str],
    *,
    owners: bool,
) -> None:
    """Complete a layer that no other process uses yet."""
    lower = LowerLayers(below)
    for path in whiteouts:
        parts = path.split("/")
        with _opened_directory(layer_directory, parts[:-1]) as folder:
            if lower.find(path) is None or _is_opaque(folder):
                os.unlink(parts[-1], dir_fd=folder)
    for path in sorted(implied_directories, key=len, reverse=True):
        found = lower.find(path)
        mode = 0o755
        with _opened_directory(layer_directory, path.split("/")) as folder:
            if found is not None and stat.S_ISDIR(found.st_mode):
                mode = stat.S_IMODE(found.st_mode)
                if owners:
                    os.chown(folder, found.st_uid, found.st_gid)
            os.chmod(folder, mode)
            if found is not None:
                os.utime(folder, ns=(found.st_mtime_ns, found.st_mtime_ns))


def find_user_id(layers: Sequence[Path], user: str) -> int:
    """Return the number of the user that an image names; -1 if it is missing or too large for a sandbox."""
    name = user.partition(":")[0]
    if name in ("", "root", "0"):
        return 0 if name else -1
    if name.isascii() and name.isdecimal():
        return int(name) if len(name) < 6 and int(name) < 65535 else -1
    data = LowerLayers(layers).read("etc/passwd", 1 << 20) or b""
    for line in data.decode("utf-8", "replace").splitlines():
        fields = line.split(":")
        if fields[0] == name and len(fields) > 3 and fields[2].isdecimal() and len(fields[2]) < 6:
            return int(fields[2]) if int(fields[2]) < 65535 else -1
    return -1


def has_directory(layers: Sequence[Path], path: str) -> bool:
    """Return whether a directory exists, or a symbolic link that may lead to one."""
    parts = [part for part in path.split("/") if part]
    if not parts:
        return True
    found = LowerLayers(layers).find("/".join(parts))
    if found is not None:
        return stat.S_ISDIR(found.st_mode) or stat.S_ISLNK(found.st_mode)
    return any(
        (above := LowerLayers(layers).find("/".join(parts[:at]))) is not None and stat.S_ISLNK(above.st_mode)
        for at in range(1, len(parts))
    )
