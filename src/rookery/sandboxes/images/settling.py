"""What a layer means depends on those below it: the last step before one is put into its place.

Promises:
- a folder that a layer only passes through keeps the mode, owner and times that it had below;
- a mark for something that is not below is removed: an overlay would show it as a broken name;
- no link is followed, in any layer.
"""

import contextlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from rookery.sandboxes.images.layer import OPAQUE

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Below:
    """The layers under one, uppermost first, as an overlay would show them."""

    def __init__(self, layers: Sequence[Path]) -> None:
        self._layers = layers

    def find(self, path: str) -> os.stat_result | None:
        """What is there; None where nothing is, or it was removed."""
        parts = path.split("/")
        for layer in self._layers:
            found, hidden = _look(layer, parts)
            if found is not None:
                return None if stat.S_ISCHR(found.st_mode) else found
            if hidden:
                return None
        return None

    def read(self, path: str, limit: int) -> bytes | None:
        """A plain file of them, where it is one."""
        parts = path.split("/")
        for layer in self._layers:
            found, hidden = _look(layer, parts)
            if found is not None:
                if not stat.S_ISREG(found.st_mode):
                    return None
                with contextlib.suppress(OSError), _opened(layer, parts[:-1]) as folder:
                    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                    fd = os.open(parts[-1], flags, dir_fd=folder)
                    try:
                        return os.pread(fd, limit, 0)
                    finally:
                        os.close(fd)
                return None
            if hidden:
                return None
        return None


class _opened:  # noqa: N801  (it is used as a function is)
    """A folder of a layer, by names that are no links."""

    def __init__(self, layer: Path, parts: Sequence[str]) -> None:
        self._layer, self._parts = layer, parts
        self._fd = -1

    def __enter__(self) -> int:
        self._fd = os.open(self._layer, _FOLDER)
        try:
            for part in self._parts:
                below = os.open(part, _FOLDER, dir_fd=self._fd)
                os.close(self._fd)
                self._fd = below
        except BaseException:
            os.close(self._fd)
            raise
        return self._fd

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _look(layer: Path, parts: Sequence[str]) -> tuple[os.stat_result | None, bool]:
    """What one layer has there, and whether it hides what is below."""
    here = os.open(layer, _FOLDER)
    hidden = False
    try:
        for at, part in enumerate(parts):
            hidden = hidden or _is_opaque(here)
            try:
                info = os.stat(part, dir_fd=here, follow_symlinks=False)
            except FileNotFoundError:
                return None, hidden
            if at == len(parts) - 1:
                return info, True
            if not stat.S_ISDIR(info.st_mode):
                return None, True
            below = os.open(part, _FOLDER, dir_fd=here)
            os.close(here)
            here = below
    finally:
        os.close(here)
    return None, hidden


def _is_opaque(folder: int) -> bool:
    try:
        return os.getxattr(folder, OPAQUE) == b"y"
    except OSError:
        return False


def settle(
    made: Path, below: Sequence[Path], implied: Sequence[str], gone: Sequence[str], *, owners: bool
) -> None:
    """Finishes a layer that nobody else sees yet."""
    under = Below(below)
    for path in gone:
        parts = path.split("/")
        with _opened(made, parts[:-1]) as folder:
            if under.find(path) is None or _is_opaque(folder):
                os.unlink(parts[-1], dir_fd=folder)
    for path in sorted(implied, key=len, reverse=True):
        found = under.find(path)
        mode = 0o755
        with _opened(made, path.split("/")) as folder:
            if found is not None and stat.S_ISDIR(found.st_mode):
                mode = stat.S_IMODE(found.st_mode)
                if owners:
                    os.chown(folder, found.st_uid, found.st_gid)
            os.chmod(folder, mode)
            if found is not None:
                os.utime(folder, ns=(found.st_mtime_ns, found.st_mtime_ns))


def user_id(layers: Sequence[Path], user: str) -> int:
    """The number of the user that an image names; -1 where it says none, or none that a box can have."""
    name = user.partition(":")[0]
    if name in ("", "root", "0"):
        return 0 if name else -1
    if name.isascii() and name.isdecimal():
        return int(name) if len(name) < 6 and int(name) < 65535 else -1
    data = Below(layers).read("etc/passwd", 1 << 20) or b""
    for line in data.decode("utf-8", "replace").splitlines():
        fields = line.split(":")
        if fields[0] == name and len(fields) > 3 and fields[2].isdecimal() and len(fields[2]) < 6:
            return int(fields[2]) if int(fields[2]) < 65535 else -1
    return -1


def has_folder(layers: Sequence[Path], path: str) -> bool:
    """Whether a folder is there, or something that may lead to one."""
    parts = [part for part in path.split("/") if part]
    if not parts:
        return True
    found = Below(layers).find("/".join(parts))
    if found is not None:
        return stat.S_ISDIR(found.st_mode) or stat.S_ISLNK(found.st_mode)
    return any(
        (above := Below(layers).find("/".join(parts[:at]))) is not None and stat.S_ISLNK(above.st_mode)
        for at in range(1, len(parts))
    )
