"""Unpack one layer into a directory in the form that overlayfs expects. Runs as a separate process.

Arguments: target directory, length of the input in bytes, expected DiffID (may be empty), "1" to set file owners,
"1" if the archive is a layer with whiteouts, and the largest total size of its files. Standard input is the layer.
Standard output carries JSON objects, one per line: the number of bytes read so far, and finally the result or an
error with its fault ("image" or "disk"). Before it reads the first byte the process makes the target directory its
root directory, if the kernel permits that.

Guarantees:
- nothing is written outside the target directory, whatever names and links the layer contains;
- whiteouts become the form that overlayfs uses: a 0:0 character device, or an extended attribute of a directory;
- modes, owners (if permitted), times and links are preserved; devices, set-user-ID bits and xattrs are dropped;
- bytes, entries and names are bounded: a decompression bomb ends with an error;
- the DiffID is computed from the decompressed stream while it is read.

The process ends soon after its parent has ended, because it writes to the parent's pipe.
"""

from __future__ import annotations

import _thread
import errno
import os
import stat
import sys
from _json import encode_basestring_ascii as encode_json_string  # `json` doubles the start-up time

from . import tar_stream
from .decompression import DecompressedStream, select_decompressor
from .tar_stream import BadArchiveError, TarEntry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

OPAQUE_ATTRIBUTE = "user.overlay.opaque"
MAX_ENTRIES = 3_000_000
MAX_NAME_BYTES = 64 << 20
"""Largest total length of the names of directories and whiteouts (marks for removed files), which are kept in
memory."""
NOBODY = 65534
"""Largest user ID in a sandbox. Files of users with a larger ID get this owner."""
HOLE_BYTES = 1 << 16
"""A run of at least this many zero bytes is skipped, so that the file becomes sparse."""
_WHITEOUT = b".wh."
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LATEST_TIME = 4_102_444_800 * 1_000_000_000
"""The year 2100 in nanoseconds: every file system accepts times up to it."""
_CLONE_NEWUSER = 0x10000000


class LayerWriter:
    """Writes the entries of a layer below the current directory, to which no other process writes."""

    def __init__(self, *, owners: bool, layered: bool, max_bytes: int) -> None:
        self.owners = owners
        self.layered = layered
        self.max_bytes = max_bytes
        """Largest total length of all files in bytes."""
        self.directories: dict[bytes, TarEntry | None] = {b"": None}
        """Maps every directory created so far to its archive entry; None if the archive had none for it so far."""
        self.whiteouts: set[bytes] = set()
        self.opaque: set[bytes] = set()
        self.entries = 0
        self.disk_bytes = 4096
        self._file_bytes = 0
        self._name_bytes = 0

    def add(self, entry: TarEntry, reader: tar_stream.TarReader) -> None:
        self.entries += 1
        if self.entries > MAX_ENTRIES:
            raise BadArchiveError(f"the layer contains more than {MAX_ENTRIES:,} entries")
        path = _normalize(entry.name)
        kind = entry.kind
        if not path:
            if kind == tar_stream.DIRECTORY:
                self.directories[b""] = entry
            return
        parent, _, name = path.rpartition(b"/")
        if parent not in self.directories:
            self._make_directory(parent)
        if self.layered and name.startswith(_WHITEOUT):
            self._add_whiteout(parent, name[len(_WHITEOUT) :])
        elif kind == tar_stream.REGULAR:
            self._write_file(path, entry, reader)
        elif kind == tar_stream.DIRECTORY:
            if path not in self.directories:
                self._make_directory(path)
            self.directories[path] = entry
        elif kind == tar_stream.SYMLINK:
            self._clear(path)
            os.symlink(entry.link, path)
            if self.owners and (entry.uid or entry.gid):
                os.chown(path, *_owner(entry), follow_symlinks=False)
            _set_time(path, entry)
        elif kind == tar_stream.HARD_LINK:
            self._hard_link(path, entry)
        elif kind == tar_stream.FIFO:
            self._clear(path)
            os.mkfifo(path, entry.mode & 0o777)
            self._set_metadata(path, entry)
        # Devices and unknown entry types are dropped: a sandbox has its own devices.

    def _write_file(self, path: bytes, entry: TarEntry, reader: tar_stream.TarReader) -> None:
        size = entry.size
        self._file_bytes += size
        if self._file_bytes > self.max_bytes:
            raise BadArchiveError(f"the files of the layer are larger than the limit of {self.max_bytes:,} bytes")
        mode = entry.mode & 0o1777
        try:
            fd = os.open(path, _CREATE, mode)
        except FileExistsError:
            self._clear(path)
            fd = os.open(path, _CREATE, mode)
        try:
            if entry.pieces is not None:
                for offset, length in entry.pieces:
                    os.lseek(fd, offset, os.SEEK_SET)
                    self._write_chunks(fd, reader.data(length))
                os.truncate(fd, size)
            elif size:
                chunk = reader.take_buffered(size)
                self._write_chunks(fd, reader.data(size) if chunk is None else (chunk,))
            if self.owners and (entry.uid or entry.gid):
                os.chown(fd, *_owner(entry))
                if mode & 0o1000:
                    os.chmod(fd, mode)
            _set_time(fd, entry)
        finally:
            os.close(fd)

    def _write_chunks(self, fd: int, chunks: Iterable[memoryview]) -> None:
        ends_in_hole = False
        for chunk in chunks:
            if len(chunk) >= HOLE_BYTES and not chunk[0] and not chunk[-1] and not any(chunk):
                os.lseek(fd, len(chunk), os.SEEK_CUR)
                ends_in_hole = True
                continue
            ends_in_hole = False
            self.disk_bytes += len(chunk)
            written = os.write(fd, chunk)
            while written < len(chunk):
                written += os.write(fd, chunk[written:])
        self.disk_bytes += 4096
        if ends_in_hole:
            os.truncate(fd, os.lseek(fd, 0, os.SEEK_CUR))

    def _make_directory(self, path: bytes) -> None:
        """Create a directory and its missing parents."""
        missing = [path]
        while (parent := missing[-1].rpartition(b"/")[0]) not in self.directories:
            missing.append(parent)
        for directory in reversed(missing):
            try:
                os.mkdir(directory, 0o700)
            except FileExistsError:
                replaces_whiteout = directory in self.whiteouts
                if not replaces_whiteout and missing[0] is not directory:
                    raise BadArchiveError(f"the parent of {_quote(path)} is not a directory") from None
                self._clear(directory)
                os.mkdir(directory, 0o700)
                if replaces_whiteout:  # the new directory must hide the content of the removed one
                    self._make_opaque(directory)
            self._count_name(directory)
            self.disk_bytes += 4096
            self.directories[directory] = None

    def _count_name(self, path: bytes) -> None:
        self._name_bytes += len(path)
        if self._name_bytes > MAX_NAME_BYTES:
            raise BadArchiveError(f"the names in the layer are longer than {MAX_NAME_BYTES:,} bytes in total")

    def _hard_link(self, path: bytes, entry: TarEntry) -> None:
        target = _normalize(entry.link)
        problem = f"{_quote(path)} is a hard link to something that is not a file of this layer"
        if target == path:
            return
        if not target or target.rpartition(b"/")[0] not in self.directories or target in self.whiteouts:
            raise BadArchiveError(problem)
        try:
            info = os.lstat(target)
        except FileNotFoundError:
            raise BadArchiveError(problem) from None
        if not (stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode)):
            raise BadArchiveError(problem)
        try:
            os.link(target, path, follow_symlinks=False)
        except FileExistsError:
            if os.path.samestat(info, os.lstat(path)):
                return
            self._clear(path)
            os.link(target, path, follow_symlinks=False)

    def _add_whiteout(self, parent: bytes, name: bytes) -> None:
        """Create the mark that hides the name `name` of the lower layers, as overlayfs expects it."""
        if name.startswith(_WHITEOUT):
            if name == _WHITEOUT + b".opq":
                self._make_opaque(parent)
            return  # other `.wh..wh.` files are metadata of aufs
        if name in (b"", b".", b".."):
            raise BadArchiveError(f"the layer contains a whiteout of the invalid name {_quote(name)}")
        path = parent + b"/" + name if parent else name
        if path in self.directories:
            self._make_opaque(path)  # the layer also has the directory: only the lower layers' content is removed
            return
        try:
            os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))
        except FileExistsError:
            return
        self._count_name(path)
        self.whiteouts.add(path)

    def _make_opaque(self, path: bytes) -> None:
        self.opaque.add(path)
        if path:
            os.setxattr(path, OPAQUE_ATTRIBUTE, b"y", follow_symlinks=False)

    def _clear(self, path: bytes) -> None:
        """Remove what an earlier entry of the same name created: the last entry of a name counts."""
        if path in self.directories:
            try:
                os.rmdir(path)
            except OSError as error:
                raise BadArchiveError(
                    f"the layer contains {_quote(path)} as a directory with files and again as another type"
                ) from error
            del self.directories[path]
            self.opaque.discard(path)
            return
        self.whiteouts.discard(path)
        try:  # noqa: SIM105  (contextlib is slow to import)
            os.unlink(path)
        except FileNotFoundError:
            pass

    def _set_metadata(self, path: bytes, entry: TarEntry) -> None:
        if self.owners and (entry.uid or entry.gid):
            os.chown(path, *_owner(entry), follow_symlinks=False)
        os.chmod(path, entry.mode & 0o1777)
        _set_time(path, entry)

    def finish(self) -> None:
        """Set the metadata of all directories.

        This is done last, because writing into a directory changes its time, and its mode may forbid writing.
        """
        for path, entry in reversed(self.directories.items()):
            if entry is not None and path:
                self._set_metadata(path, entry)
        os.chmod(".", 0o755)

    def implied_directories(self) -> list[bytes]:
        """Return the directories that the archive uses but has no entry for."""
        return [path for path, entry in self.directories.items() if entry is None and path]


def _normalize(name: bytes) -> bytes:
    """Return the name of an archive member as a path relative to the root of the layer.

    Raise `BadArchiveError` if the name contains `..` or a NUL byte.
    """
    if name[:1] not in (b".", b"/") and name[-1:] != b"/" and b"//" not in name and b"/." not in name:
        if b"\0" in name:
            raise BadArchiveError("a name in the layer contains a NUL byte")
        return name
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if b".." in parts or b"\0" in name:
        raise BadArchiveError(f"the layer contains the invalid name {_quote(name)}")
    return b"/".join(parts)


def _quote(name: bytes) -> str:
    return repr(os.fsdecode(name[:200])).encode("utf-8", "backslashreplace").decode()


def _owner(entry: TarEntry) -> tuple[int, int]:
    uid, gid = entry.uid, entry.gid
    return uid if 0 <= uid <= NOBODY else NOBODY, gid if 0 <= gid <= NOBODY else NOBODY


def _set_time(path: bytes | int, entry: TarEntry) -> None:
    time = entry.mtime if 0 <= entry.mtime <= _LATEST_TIME else 0
    if isinstance(path, int):
        os.utime(path, ns=(time, time))
    else:
        os.utime(path, ns=(time, time), follow_symlinks=False)


def _unpack(
    length: int, diff_id: str, *, owners: bool, layered: bool, max_bytes: int, on_read: Callable[[int], None]
) -> str:
    """Unpack standard input into the current directory; return the result as JSON."""
    stream = DecompressedStream(0, length, max_bytes, on_read)
    reader = tar_stream.TarReader(stream.read_chunk)
    writer = LayerWriter(owners=owners, layered=layered, max_bytes=max_bytes)
    for entry in reader.entries():
        writer.add(entry, reader)
    reader.drain()
    found = f"sha256:{stream.digest.hexdigest()}"
    if diff_id and found != diff_id:
        raise BadArchiveError(f"the layer's digest is {found}, but the image configuration names {diff_id}")
    if not layered and len(writer.directories) == 1 and not os.listdir("."):
        raise BadArchiveError("the archive is empty")
    writer.finish()
    return (
        f'{{"diff_id":"{found}","entries":{writer.entries},"bytes":{writer.disk_bytes},'
        f'"implied_directories":{_encode_names(writer.implied_directories())},'
        f'"whiteouts":{_encode_names(writer.whiteouts)},"opaque":{"true" if b"" in writer.opaque else "false"}}}'
    )


def _encode_names(names: Iterable[bytes]) -> str:
    return "[" + ",".join(encode_json_string(os.fsdecode(name)) for name in names) + "]"


def _encode_error(message: str, fault: str) -> str:
    return f'{{"error":{encode_json_string(message)},"fault":"{fault}"}}'


def main() -> None:
    target, length, diff_id, owners, layered, max_bytes = sys.argv[1:]
    os.umask(0)
    total = 0
    output_lock = _thread.allocate_lock()  # progress must not be written in the middle of the result

    def on_read(count: int) -> None:
        nonlocal total
        total += count
        with output_lock:
            os.write(1, b'{"read":%d}\n' % total)  # SIGPIPE or EPIPE ends this process if the parent is gone

    try:
        os.chdir(target)
        if stat.S_ISREG(os.fstat(0).st_mode):  # not the output of another decompressor
            # The modules of decompressors cannot be imported after the change of the root directory.
            select_decompressor(os.pread(0, 6, os.lseek(0, 0, os.SEEK_CUR)))
        _change_root()
        result = _unpack(
            int(length),
            diff_id,
            owners=owners == "1",
            layered=layered == "1",
            max_bytes=int(max_bytes),
            on_read=on_read,
        )
    except BadArchiveError as error:
        result = _encode_error(str(error), "image")
    except OSError as error:
        image_fault = error.errno in (errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP)
        prefix = f"{_quote(error.filename)}: " if isinstance(error.filename, bytes) else ""
        result = _encode_error(f"{prefix}{error.strerror or error}", "image" if image_fault else "disk")
    except MemoryError:
        result = _encode_error("unpacking the layer needs more memory than this machine has", "image")
    data = result.encode() + b"\n"
    output_lock.acquire()
    while data:
        data = data[os.write(1, data) :]
    os._exit(0)  # the decompression thread may still run


def _change_root() -> None:
    """Make the current directory the root directory.

    An unprivileged process first creates a user namespace. Where that is forbidden too, only the checks of member
    names protect the host.
    """
    if os.geteuid() != 0:
        import ctypes

        uid, gid = os.geteuid(), os.getegid()
        if ctypes.CDLL(None).unshare(_CLONE_NEWUSER) != 0:
            return
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    try:
        os.chroot(".")
    except PermissionError:
        return
    os.chdir("/")
