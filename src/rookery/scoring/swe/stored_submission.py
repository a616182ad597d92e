"""Store a submission in the record of its rollout, so that it can be graded again without the agent's sandbox.

A stored submission is compressed text for JSON. It contains the files that the agent added or changed, and the
names of those that it removed.

- A submission that is larger than `MAX_STORED_BYTES`, or than `MAX_STORED_TEXT` after compression, is not stored.
- Unpacking writes only below the given directory, and never through a symbolic link.
"""

import base64
import binascii
import os
import stat
import zlib
from pathlib import Path
from typing import Final, Literal

import msgspec

from rookery.core import TaskError
from rookery.scoring.swe.submission_transfer import SubmissionFiles, get_host_path, make_link

MAX_STORED_BYTES: Final = 4 << 20
MAX_STORED_TEXT: Final = 256 << 10
_MAX_UNPACKED: Final = 2 * MAX_STORED_BYTES + (1 << 20)


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """A file, directory or symbolic link. Paths are bytes, because file names need not be UTF-8."""

    path: bytes
    kind: Literal["file", "folder", "link"]
    mode: int
    data: bytes = b""
    """The content of a file, or the target of a link."""


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    tops: tuple[bytes, ...]
    folders: tuple[bytes, ...]
    removed: tuple[bytes, ...]
    replaced: tuple[bytes, ...]
    entries: tuple[_Entry, ...]


def pack_submission(files: SubmissionFiles, tops: tuple[str, ...]) -> str:
    """Return the copy of a submission as text, or an empty string if it is too large to be stored.

    `tops` are the directories in the sandbox that contain it.
    """
    if files.size > MAX_STORED_BYTES:
        return ""
    entries: list[_Entry] = []
    size = 0
    for folder, directories, names in os.walk(files.tree):
        for name in (*directories, *names):
            local = Path(folder, name)
            info = local.lstat()
            path = os.fsencode(f"/{local.relative_to(files.tree)}")
            size += len(path) + 16
            if stat.S_ISLNK(info.st_mode):
                entries.append(_Entry(path, "link", 0, os.fsencode(local.readlink())))
            elif stat.S_ISDIR(info.st_mode):
                entries.append(_Entry(path, "folder", stat.S_IMODE(info.st_mode)))
            else:
                size += info.st_size
                if size > MAX_STORED_BYTES:
                    return ""
                entries.append(_Entry(path, "file", stat.S_IMODE(info.st_mode), local.read_bytes()))
    if size > MAX_STORED_BYTES:
        return ""
    stored = _Stored(
        tops=tuple(map(os.fsencode, tops)),
        folders=tuple(map(os.fsencode, sorted(files.folders))),
        removed=tuple(map(os.fsencode, files.removed)),
        replaced=tuple(map(os.fsencode, files.replaced)),
        entries=tuple(entries),
    )
    text = base64.b64encode(zlib.compress(msgspec.msgpack.encode(stored), 6)).decode()
    return text if len(text) <= MAX_STORED_TEXT else ""


def unpack_submission(text: str, into: Path) -> tuple[tuple[str, ...], SubmissionFiles]:
    """Write a stored submission below `into`, an empty directory of the host.

    Return the directories in the sandbox that contain it, and the copies. Raise `TaskError` if it is damaged.
    """
    try:
        inflater = zlib.decompressobj()
        data = inflater.decompress(base64.b64decode(text, validate=True), _MAX_UNPACKED)
        if inflater.unconsumed_tail:
            raise TaskError("the stored submission is larger than it may be")
        stored = msgspec.msgpack.decode(data, type=_Stored)
    except (binascii.Error, zlib.error, msgspec.DecodeError, ValueError) as error:
        raise TaskError(f"the stored submission cannot be read: {error}") from None
    tree = into / "tree"
    tree.mkdir()
    paths = {entry: get_host_path(tree, os.fsdecode(entry.path)) for entry in stored.entries}
    for entry, local in paths.items():
        if entry.kind == "folder":
            local.mkdir(parents=True, exist_ok=True)
    for entry, local in paths.items():
        if entry.kind == "file":
            local.parent.mkdir(parents=True, exist_ok=True)
            local.write_bytes(entry.data)
            local.chmod(entry.mode & 0o777)
    for entry, local in paths.items():
        if entry.kind == "folder":
            local.chmod(entry.mode & 0o777 | 0o700)
    for entry in paths:  # links come last, so that nothing is written through one
        if entry.kind == "link":
            make_link(tree, os.fsdecode(entry.path), os.fsdecode(entry.data))
    tops, folders, removed, replaced = (
        tuple(map(os.fsdecode, names)) for names in (stored.tops, stored.folders, stored.removed, stored.replaced)
    )
    files = SubmissionFiles(tree=tree, folders=frozenset(folders), removed=removed, replaced=replaced)
    return tops, files
