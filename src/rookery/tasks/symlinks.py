"""Symbolic links in task directories: find links that lead out of the task, and open files without following
links.

Tasks come from untrusted sources, so a symbolic link in a task must never make Rookery read another file of this
machine. Links that lead out of the task are reported when the task is loaded. Later, its files are opened
component by component from the task's directory without following links, so a link that is created after the check
has no effect.
"""

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from rookery.core import TaskError
from rookery.core.errors import describe
from rookery.sandboxes.transfers import SourceItem, TransferClock, open_parent, open_source, walk_source
from rookery.tasks.swe import FileMapping, SweTask

MAX_HOPS: Final = 40
"""Maximum number of symbolic links that are followed for one path, as in Linux."""
_READ_SECONDS: Final = 3600.0


def resolve_link(path: str, links: Mapping[str, str]) -> str | None:
    """Return the path that a symbolic link in a file tree leads to, or None if it leads out of the tree.

    `path` is the path of the link relative to the root of the tree. `links` maps the paths of all links of the
    tree to their targets; the tree need not exist on disk. Links on the way are followed. For a cycle of links,
    return `path`.
    """
    done: list[str] = path.split("/")[:-1]
    todo: list[str] = []

    def follow(target: str) -> bool:
        todo.extend(reversed(target.split("/")))
        return not target.startswith("/")

    if not follow(links[path]):
        return None
    hops = 1
    while todo:
        name = todo.pop()
        if name == "..":
            if not done:
                return None
            done.pop()
        elif name not in ("", "."):
            done.append(name)
            target = links.get("/".join(done))
            if target is not None:
                hops += 1
                if hops > MAX_HOPS:
                    return path
                done.pop()
                if not follow(target):
                    return None
    return "/".join(done)


def leads_outside(path: Path, top: Path) -> bool:
    """Return whether the symbolic link `path` is absolute or leads outside the directory `top`.

    `top` must be a path without symbolic links.
    """
    return path.readlink().is_absolute() or not real_path(path).is_relative_to(top)


def real_path(path: Path) -> Path:
    """Return the path with all symbolic links resolved."""
    return Path(os.path.realpath(path))


def read_inside(top: Path, path: Path, most: int) -> bytes:
    """Return up to `most` bytes of a file of the task whose directory is `top`.

    A symbolic link to another file of the task is followed. Raise `OSError` if `path` leads outside the task or is
    not a regular file. A `path` that is not below `top`, as an installed format may use it, is not restricted to
    `top`.
    """
    real_top = real_path(top)
    real = real_path(path)
    inside = real_top if path.is_relative_to(top) else None  # an installed format may use files from elsewhere
    with open_parent(real, inside) as (above, name):
        fd = open_source(above, name, path)
        try:
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            with os.fdopen(fd, "rb", closefd=False) as file:
                return file.read(most)
        finally:
            os.close(fd)


def get_upload_source(task: SweTask, source: str) -> tuple[Path, Path | None]:
    """Return the path on this machine to upload for a task, and the directory that no symbolic link may lead out
    of.

    The directory is None if `source` is not below the task's directory.
    """
    top, path = Path(task.folder), Path(source)
    if not task.folder or path == top or not path.is_relative_to(top):
        return path, None
    real = real_path(top)
    return real / path.relative_to(top), real


def iterate_files(task: SweTask, part: FileMapping) -> Iterator[SourceItem]:
    """Yield the files, directories and symbolic links of one of a task's file mappings. Links are not followed.

    Raise `TaskError` if something cannot be read.
    """
    source, inside = get_upload_source(task, part.source)
    try:
        yield from walk_source(source, TransferClock(_READ_SECONDS), inside)
    except OSError as error:
        raise TaskError(f"task {task.id}: cannot read {part.source!r:.300}: {describe(error)}") from error
