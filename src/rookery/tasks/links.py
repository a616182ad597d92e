"""Symbolic links in tasks: find those that lead out of the task, and open its files without following them.

A task is written by somebody else, so a link in it must never make Rookery read another file of this machine.
Links that lead out of the task are problems of the task, found while it is loaded. Afterwards its files are opened
by walking from the task's folder without following any link, so a link that is put there later changes nothing.
"""

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from rookery.core import TaskError
from rookery.core.errors import describe
from rookery.sandboxes.transfers import Clock, SourceItem, open_parent, open_source, source_items
from rookery.tasks.swe import Part, SweTask

MAX_HOPS: Final = 40
"""Links that Linux follows for one path."""
_READ_SECONDS: Final = 3600.0


def resolve_link(path: str, links: Mapping[str, str]) -> str | None:
    """Return the path that a link of a file tree leads to, or None if it leads out of the tree.

    `links` maps paths of the tree, relative to its root, to what their links say. Links on the way are followed;
    what is no link need not exist. A circle of links leads nowhere, which counts as inside.
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


def leads_out(path: Path, top: Path) -> bool:
    """Whether a symbolic link is absolute or leads out of the folder `top`, which is given as a real path."""
    return path.readlink().is_absolute() or not real_path(path).is_relative_to(top)


def real_path(path: Path) -> Path:
    return Path(os.path.realpath(path))


def read_inside(top: Path, path: Path, most: int) -> bytes:
    """Return up to `most` bytes of a file of the task in folder `top`.

    A link to another file of the task is followed. `OSError` if it leads out of the folder, or is no plain file.
    """
    real_top = real_path(top)
    real = real_path(path)
    inside = (
        real_top if path.is_relative_to(top) else None
    )  # a format that is installed may take files from elsewhere
    with open_parent(real, inside) as (above, name):
        fd = open_source(above, name, path)
        try:
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            with os.fdopen(fd, "rb", closefd=False) as file:
                return file.read(most)
        finally:
            os.close(fd)


def source_of(task: SweTask, source: str) -> tuple[Path, Path | None]:
    """Return the source of an upload for a task, and the folder that no link may lead out of on the way to it."""
    top, path = Path(task.folder), Path(source)
    if not task.folder or path == top or not path.is_relative_to(top):
        return path, None
    real = real_path(top)
    return real / path.relative_to(top), real


def part_items(task: SweTask, part: Part) -> Iterator[SourceItem]:
    """Yield the files, folders and links of a part without following links. `TaskError` if it cannot be read."""
    source, inside = source_of(task, part.source)
    try:
        yield from source_items(source, Clock(_READ_SECONDS), inside)
    except OSError as error:
        raise TaskError(f"task {task.id}: {part.source!r:.300} cannot be read: {describe(error)}") from error
