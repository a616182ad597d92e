"""Protocol and discovery of formats for task directories.

Guarantees:
- A format is a class registered in the entry point group `rookery.task_formats`. Adding one changes no file
  here.
- The format of a directory follows from its content. If several formats match, the one with the highest
  priority is used.
- A directory that looks like a task but is not valid is an error of that task. One that looks like no task is a
  warning.
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
"""Common names of the directory that contains the tasks in archives and repositories."""


class ReadOptions(msgspec.Struct, frozen=True):
    """Options for reading a task."""

    variables: Mapping[str, str] = {}
    """Values of `${NAME}` in a task. Nothing else of this machine's environment is inserted."""


class TaskFormat(Protocol):
    """A format of task directories."""

    name: str
    priority: int
    """If several formats match a directory, the one with the highest priority is used."""

    def matches(self, folder: Path) -> bool:
        """Return whether a directory looks like a task of this format, judging by file names only."""
        ...

    def read(self, folder: Path, id: str, problems: ProblemCollector, options: ReadOptions) -> SweTask | None:  # noqa: A002
        """Read a task and report its problems. Return None if there is too little for a task."""
        ...

    def write(self, task: SweTask, folder: Path) -> list[str]:
        """Write a task into an empty directory. Raise `UsageError` if the format cannot express it.

        Return the fields that only Rookery reads there, because the format does not have them.
        """
        ...


def task_formats() -> list[TaskFormat]:
    """Return all installed formats, highest priority first."""
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
    """Return the entry points. Cached, because the search takes as long as reading ten tasks."""
    from importlib.metadata import entry_points  # slow to import

    return tuple(entry_points(group=GROUP))


class FoundTask(msgspec.Struct, frozen=True):
    """A directory that looks like a task."""

    path: Path
    format: TaskFormat


def find_task_folders(
    folder: Path, formats: list[TaskFormat], depth: int = 3
) -> tuple[list[FoundTask], list[str]]:
    """Return the task directories that a directory is or contains, by name, and the names of other
    subdirectories."""
    for one in formats:
        if one.matches(folder):
            return [FoundTask(folder, one)], []
    names = []
    with os.scandir(folder) as listed:
        for entry in listed:
            if not entry.name.startswith(".") and entry.is_dir():
                names.append(entry.name)
                if len(names) > MAX_TASKS:
                    raise UsageError(f"{folder} contains more than {MAX_TASKS:,} directories")
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
