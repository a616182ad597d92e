"""Finish an unpacked layer, and look up files in a stack of layers. Runs in the process that fetches an image.

Guarantees:
- a directory that a layer's archive has no entry for gets the mode, owner and times of that directory in the lower
  layers;
- a whiteout (a mark for a removed file) of something that no lower layer has is removed, because overlayfs would
  show it as a broken file;
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
    """Looks up files in a stack of layers (uppermost first), as an overlayfs mount of them would show them."""

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
        """Return the first `limit` bytes of a regular file; None if the path is missing or not a regular file."""
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
    """Context manager that opens a directory of a layer without following symbolic links; yields a descriptor."""

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
    """Return the status of a path in one layer (None if missing), and whether the layer hides the lower layers."""
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
    """Complete an unpacked layer that is not published yet.

    `below` are the lower layers. `implied_directories` are directories for which the archive has no entry: they
    get the metadata of the lower layers. `whiteouts` without an effect are removed. `owners`: set owners, too.
    """
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
    """Return the user ID of `user`, a name or number from an image's configuration.

    -1 if the image's /etc/passwd does not have the user, or the ID is too large for a sandbox.
    """
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
    """Return whether the layers have a directory at `path`, or a symbolic link that may lead to a directory."""
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
