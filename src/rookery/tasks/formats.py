"""Protocol for formats of task directories, and discovery of installed formats and of task directories.

Guarantees:
- A format is a class registered in the entry point group `rookery.task_formats`. Adding a format changes no file
  of this package.
- The format of a directory follows from its content. If several formats match, the one with the highest
  priority is used.
- A directory that looks like a task but is not valid gives an invalid task. A directory that looks like no task
  gives a warning.
"""

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from rookery.core import UsageError
from rookery.core.errors import describe
from rookery.tasks.report import ProblemCollector
from rookery.tasks.swe import SweTask

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP: Final = "rookery.task_formats"
MAX_TASKS: Final = 1_000_000
WRAPPER_NAMES: Final = ("tasks", "task-data", "task_data")
"""Common names of the directory, in archives and repositories, that contains the task directories."""


class ReadOptions(msgspec.Struct, frozen=True):
    """Options for reading a task directory."""

    variables: Mapping[str, str] = {}
    """Values for `${NAME}` in a task, by name. Environment variables of this machine are not inserted."""


class TaskFormat(Protocol):
    """Protocol of a format of task directories: it recognises, reads and writes them."""

    name: str
    """Name of the format, such as `harbor`."""
    priority: int
    """If several formats match a directory, the one with the highest priority is used."""

    def matches(self, folder: Path) -> bool:
        """Return whether a directory looks like a task of this format, judging by file names only."""
        ...

    def read(self, folder: Path, id: str, problems: ProblemCollector, options: ReadOptions) -> SweTask | None:  # noqa: A002
        """Read the task in a directory, with the ID `id`, and report its problems to `problems`.

        Return None if the directory contains too little to make a task. If errors are reported, the task is
        invalid.
        """
        ...

    def write(self, task: SweTask, folder: Path) -> list[str]:
        """Write a task into an empty directory. Raise `UsageError` if the format cannot express it.

        Return the names of the fields that the format does not have and that only Rookery reads from the
        directory.
        """
        ...


def task_formats() -> list[TaskFormat]:
    """Return all installed formats of task directories, highest priority first.

    Raise `UsageError` if one of them cannot be loaded.
    """
    found: dict[str, TaskFormat] = {}
    for point in _get_entry_points():
        try:
            found.setdefault(point.name, point.load()())
        except Exception as error:
            raise UsageError(
                f"cannot load the task format {point.name!r} ({point.value}): {describe(error)}"
            ) from error
    return sorted(found.values(), key=lambda one: (-one.priority, one.name))


@functools.cache
def _get_entry_points() -> "tuple[EntryPoint, ...]":
    """Return the entry points of task formats. Cached, because the search takes as long as reading ten tasks."""
    from importlib.metadata import entry_points  # slow to import

    return tuple(entry_points(group=GROUP))


class FoundTask(msgspec.Struct, frozen=True):
    """A directory that looks like a task, and the format that it matches."""

    path: Path
    format: TaskFormat


def find_task_folders(
    folder: Path, formats: list[TaskFormat], depth: int = 3
) -> tuple[list[FoundTask], list[str]]:
    """Return the task directories in `folder`, sorted by name, and the names of its other subdirectories.

    If `folder` itself is a task directory, return only it. If it contains no task directories, but a single
    subdirectory or one named like `tasks`, search in that subdirectory, up to `depth` levels down.
    """
    for one in formats:
        if one.matches(folder):
            return [FoundTask(folder, one)], []
    names = []
    with os.scandir(folder) as listed:
        for entry in listed:
            if not entry.name.startswith(".") and entry.is_dir():
                names.append(entry.name)
                if len(names) > MAX_TASKS:
                    raise UsageError(
                        f"{folder} contains more than {MAX_TASKS:,} directories: divide it into several sources"
                    )
    names.sort()
    found, others = [], []
    for name in names:
        path = folder / name
        kind = next((one for one in formats if one.matches(path)), None)
        if kind is None:
            others.append(name)
        else:
            found.append(FoundTask(path, kind))
    if not found and depth:
        inner = [name for name in others if name in WRAPPER_NAMES] or (others if len(others) == 1 else [])
        if len(inner) == 1:
            return find_task_folders(folder / inner[0], formats, depth - 1)
    return found, others
