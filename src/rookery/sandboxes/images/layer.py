"""Unpacks one layer into a folder, as an overlay wants it. A stand-alone program: what it reads is not trusted.

It is started with the folder of `small.py` and a JSON object as its arguments, reads the layer on its standard
input, and says JSON objects, a line each: how far it is, at last what it made, or `error` and whose fault it is.
The folder that it writes to is its root before it reads the first byte, where the kernel lets it.

Promises:
- nothing is written outside of the folder, whatever names and links the layer holds;
- what a layer removes becomes what an overlay understands: a device 0:0 for a name, an attribute of a folder;
- modes, owners (where we may), times and links survive; devices, set-user-id bits and attributes do not;
- bytes, entries and names are bounded: a bomb ends as an error;
- the content is the one that was signed for: a digest of the plain stream is made while it is read;
- it ends soon after who started it has ended.
"""

from __future__ import annotations

import _thread
import errno
import os
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING or "rookery.sandboxes" in sys.modules:
    from rookery.sandboxes.images import tars
    from rookery.sandboxes.images.feeds import Feed
    from rookery.sandboxes.images.tars import BadArchiveError, Entry
    from rookery.sandboxes.small import dumps, loads, suppress
else:
    sys.path[:0] = [os.path.dirname(os.path.abspath(__file__)), sys.argv[1]]
    import tars
    from feeds import Feed
    from small import dumps, loads, suppress
    from tars import BadArchiveError, Entry

    del sys.path[:2]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

OPAQUE = "user.overlay.opaque"
MAX_ENTRIES = 3_000_000
MAX_NAMES = 64 << 20
"""Bytes of the names of folders and of what is removed, which are kept to know what was made here."""
LAST_USER = 65534
HOLE = 1 << 16
"""So many zeroes are not written."""
_WHITEOUT = b".wh."
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_BEYOND = 4_102_444_800 * 1_000_000_000
"""A time that file systems take: the end of this century."""


class Layer:
    """The tree that is being made. Nobody else writes to it: what we made is what is there."""

    def __init__(self, *, owners: bool, layered: bool, most: int) -> None:
        self.owners = owners
        self.layered = layered
        self.most = most
        """Bytes that its files may be long, together."""
        self.user, self.group = os.geteuid(), os.getegid()
        self.folders: dict[bytes, Entry | None] = {b"": None}
        """All that were made, each a real one; None: nobody said what it is like."""
        self.gone: set[bytes] = set()
        """Names that are marked as removed."""
        self.opaque: set[bytes] = set()
        self.entries = 0
        self.bytes = 0
        self.disk = 4096
        self.names = 0

    def add(self, entry: Entry, reader: tars.Reader) -> None:
        self.entries += 1
        if self.entries > MAX_ENTRIES:
            raise BadArchiveError(f"it holds more than {MAX_ENTRIES:,} entries")
        path = _plain(entry.name)
        kind = entry.kind
        if not path:
            if kind == tars.FOLDER:
                self.folders[b""] = entry
            return
        parent, _, name = path.rpartition(b"/")
        if parent not in self.folders:
            self._folder(parent)
        if self.layered and name.startswith(_WHITEOUT):
            self._remove(parent, name[len(_WHITEOUT) :])
        elif kind == tars.REGULAR:
            self._file(path, entry, reader)
        elif kind == tars.FOLDER:
            if path not in self.folders:
                self._folder(path)
            self.folders[path] = entry
        elif kind == tars.SYMLINK:
            self._free(path)
            os.symlink(entry.link, path)
            if self.owners and (entry.uid or entry.gid):
                os.chown(path, *self._owner(entry), follow_symlinks=False)
            _set_time(path, entry)
        elif kind == tars.LINK:
            self._link(path, entry)
        elif kind == tars.FIFO:
            self._free(path)
            os.mkfifo(path, entry.mode & 0o777)
            self._dress(path, entry)
        # The rest are devices, of which a box has its own, and kinds that nobody writes.

    def _file(self, path: bytes, entry: Entry, reader: tars.Reader) -> None:
        size = entry.size
        self.bytes += size
        if self.bytes > self.most:
            raise BadArchiveError(f"its files are longer than the {self.most:,} bytes that they may be")
        mode = entry.mode & 0o1777
        try:
            fd = os.open(path, _NEW, mode)
        except FileExistsError:
            self._free(path)
            fd = os.open(path, _NEW, mode)
        try:
            if entry.pieces is not None:
                for offset, length in entry.pieces:
                    os.lseek(fd, offset, os.SEEK_SET)
                    self._write(fd, reader.data(length))
                os.truncate(fd, size)
            elif size:
                piece = reader.whole(size)
                self._write(fd, reader.data(size) if piece is None else (piece,))
            if self.owners and (entry.uid or entry.gid):
                os.chown(fd, *self._owner(entry))
                if mode & 0o1000:
                    os.chmod(fd, mode)
            _set_time(fd, entry)
        finally:
            os.close(fd)

    def _write(self, fd: int, pieces: Iterable[memoryview]) -> None:
        hole = False
        for piece in pieces:
            if len(piece) >= HOLE and not piece[0] and not piece[-1] and not any(piece):
                os.lseek(fd, len(piece), os.SEEK_CUR)  # what is sparse stays so
                hole = True
                continue
            hole = False
            self.disk += len(piece)
            written = os.write(fd, piece)
            while written < len(piece):
                written += os.write(fd, piece[written:])
        self.disk += 4096
        if hole:
            os.truncate(fd, os.lseek(fd, 0, os.SEEK_CUR))

    def _folder(self, path: bytes) -> None:
        """Makes a folder and those above it that are missing."""
        missing = [path]
        while (above := missing[-1].rpartition(b"/")[0]) not in self.folders:
            missing.append(above)
        for one in reversed(missing):
            try:
                os.mkdir(one, 0o700)
            except FileExistsError:
                hidden = one in self.gone
                if not hidden and missing[0] is not one:
                    raise BadArchiveError(f"{_shown(path)} leads through something that is no folder") from None
                self._free(one)
                os.mkdir(one, 0o700)
                if hidden:  # the folder is new, and shows nothing of what it had before
                    self._opaque(one)
            self._remember(one)
            self.disk += 4096
            self.folders[one] = None

    def _remember(self, path: bytes) -> None:
        self.names += len(path)
        if self.names > MAX_NAMES:
            raise BadArchiveError("the names of its folders are too long")

    def _link(self, path: bytes, entry: Entry) -> None:
        first = _plain(entry.link)
        why = f"{_shown(path)} is a second name of something that is no file of this layer"
        if first == path:
            return
        if not first or first.rpartition(b"/")[0] not in self.folders or first in self.gone:
            raise BadArchiveError(why)
        try:
            info = os.lstat(first)
        except FileNotFoundError:
            raise BadArchiveError(why) from None
        if not (stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode)):
            raise BadArchiveError(why)
        try:
            os.link(first, path, follow_symlinks=False)
        except FileExistsError:
            if os.path.samestat(info, os.lstat(path)):
                return
            self._free(path)
            os.link(first, path, follow_symlinks=False)

    def _remove(self, parent: bytes, name: bytes) -> None:
        """A mark that something of the layers below is gone."""
        if name.startswith(_WHITEOUT):
            if name == _WHITEOUT + b".opq":
                self._opaque(parent)
            return  # other marks of an older kind of layers: nothing to unpack
        if name in (b"", b".", b".."):
            raise BadArchiveError(f"it removes the name {_shown(name)}")
        path = parent + b"/" + name if parent else name
        if path in self.folders:
            self._opaque(path)  # what this layer has there stays; what was there before does not
            return
        try:
            os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))
        except FileExistsError:
            return
        self._remember(path)
        self.gone.add(path)

    def _opaque(self, path: bytes) -> None:
        self.opaque.add(path)
        if path:
            os.setxattr(path, OPAQUE, b"y", follow_symlinks=False)

    def _free(self, path: bytes) -> None:
        """A later entry of the same name takes the place of an earlier one."""
        if path in self.folders:
            try:
                os.rmdir(path)
            except OSError as error:
                raise BadArchiveError(f"{_shown(path)} is a folder with files, and then something else") from error
            del self.folders[path]
            self.opaque.discard(path)
            return
        self.gone.discard(path)
        with suppress(FileNotFoundError):
            os.unlink(path)

    def _owner(self, entry: Entry) -> tuple[int, int]:
        """Past what a box has users for, there is only nobody."""
        uid, gid = entry.uid, entry.gid
        return uid if 0 <= uid <= LAST_USER else LAST_USER, gid if 0 <= gid <= LAST_USER else LAST_USER

    def _dress(self, path: bytes, entry: Entry) -> None:
        if self.owners and (entry.uid or entry.gid):
            os.chown(path, *self._owner(entry), follow_symlinks=False)
        os.chmod(path, entry.mode & 0o1777)
        _set_time(path, entry)

    def finish(self) -> None:
        """Folders last: writing into one changes its time, and its mode may forbid it."""
        for path, entry in reversed(self.folders.items()):
            if entry is not None and path:
                self._dress(path, entry)
        os.chmod(".", 0o755)

    def implied(self) -> list[bytes]:
        return [path for path, entry in self.folders.items() if entry is None and path]


def _plain(name: bytes) -> bytes:
    """A name as a path below the top; the usual ones are that already."""
    if name[:1] not in (b".", b"/") and name[-1:] != b"/" and b"//" not in name and b"/." not in name:
        if b"\0" in name:
            raise BadArchiveError("a name holds a NUL")
        return name
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if b".." in parts or b"\0" in name:
        raise BadArchiveError(f"it holds the name {_shown(name)}")
    return b"/".join(parts)


def _shown(name: bytes) -> str:
    return repr(os.fsdecode(name[:200])).encode("utf-8", "backslashreplace").decode()


def _set_time(where: bytes | int, entry: Entry) -> None:
    time = entry.mtime if 0 <= entry.mtime <= _BEYOND else 0
    if isinstance(where, int):
        os.utime(where, ns=(time, time))
    else:
        os.utime(where, ns=(time, time), follow_symlinks=False)


def unpack(asked: dict[str, Any], beat: Callable[[int], None]) -> dict[str, Any]:
    """In the folder that is the present one."""
    feed = Feed(0, asked["length"], asked["most"], beat)
    reader = tars.Reader(feed.more)
    layer = Layer(owners=asked["owners"], layered=asked["layered"], most=asked["most"])
    for entry in reader.entries():
        layer.add(entry, reader)
    reader.drain()
    found = f"sha256:{feed.digest.hexdigest()}"
    if asked["diff"] and found != asked["diff"]:
        raise BadArchiveError(f"its content is {found}, and {asked['diff']} was signed for")
    if not layer.layered and len(layer.folders) == 1 and not os.listdir("."):
        raise BadArchiveError("it is empty")
    layer.finish()
    return {
        "diff": found,
        "entries": layer.entries,
        "bytes": layer.disk,
        "implied": [os.fsdecode(path) for path in layer.implied()],
        "gone": [os.fsdecode(path) for path in layer.gone],
        "opaque": b"" in layer.opaque,
    }


def main() -> None:
    asked = loads(sys.argv[2].encode())
    os.umask(0)
    read = 0
    word = _thread.allocate_lock()  # the last one is nobody's to break into

    def beat(count: int) -> None:
        nonlocal read
        read += count
        with word:
            os.write(1, b'{"read":%d}\n' % read)  # to nobody, where who started us is gone: that ends us

    try:
        os.chdir(asked["target"])
        _enclose()
        said = unpack(asked, beat)
    except BadArchiveError as error:
        said = {"error": str(error), "fault": "image"}
    except OSError as error:
        bad = error.errno in (errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP)
        named = f"{_shown(error.filename)}: " if isinstance(error.filename, bytes) else ""
        said = {"error": f"{named}{error.strerror or error}", "fault": "image" if bad else "disk"}
    except MemoryError:
        said = {"error": "it takes more memory than there is", "fault": "image"}
    data = dumps(said) + b"\n"
    word.acquire()
    while data:
        data = data[os.write(1, data) :]
    os._exit(0)  # the thread that reads may be in the middle of it


def _enclose() -> None:
    """Makes the present folder the root. What has no right to that gets one in a user namespace of its own; where
    there are none, the checks of names stand alone."""
    if os.geteuid() != 0:
        import ctypes

        uid, gid = os.geteuid(), os.getegid()
        if ctypes.CDLL(None).unshare(0x10000000) != 0:
            return
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    try:
        os.chroot(".")
    except PermissionError:
        return
    os.chdir("/")


if __name__ == "__main__":
    main()
