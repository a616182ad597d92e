"""Formats of task folders: each one file behind this protocol, found by entry point.

Promises:
- a format is found by its name in the group `rookery.task_formats`; adding one edits nothing here;
- what a folder is follows from what is in it, and where several formats claim it, the most specific one has it;
- a folder that looks like a task and is none is a problem of that task; one that looks like nothing is a warning.
"""

import functools
import os
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Final, Protocol

import msgspec

from rookery.core import UsageError
from rookery.core.errors import describe
from rookery.tasks.report import Notes
from rookery.tasks.swe import SweTask

GROUP: Final = "rookery.task_formats"
MAX_TASKS: Final = 1_000_000
WRAPPERS: Final = ("tasks", "task-data", "task_data")
"""What archives and repositories call the folder that holds the tasks."""


class Reading(msgspec.Struct, frozen=True):
    """What a task may be given besides its folder."""

    variables: Mapping[str, str] = {}
    """What `${NAME}` means in a task; nothing else of this machine's environment is ever put in."""


class TaskFormat(Protocol):
    """A kind of task folder."""

    name: str
    rank: int
    """Of several that know a folder, the highest has it."""

    def knows(self, folder: Path) -> bool:
        """Whether the folder looks like a task of this format. Looks at names only."""
        ...

    def read(self, folder: Path, id: str, notes: Notes, given: Reading) -> SweTask | None:  # noqa: A002
        """The task; what is wrong goes into `notes`. None where nothing can be made of it."""
        ...

    def write(self, task: SweTask, folder: Path) -> list[str]:
        """Writes a task into an empty folder. `UsageError` where the format has no place for it at all.

        Returns the fields that only Rookery will read there, because the format has no place for them.
        """
        ...


def task_formats() -> list[TaskFormat]:
    """All that are installed, the most specific first."""
    found: dict[str, TaskFormat] = {}
    for point in _points():
        try:
            found.setdefault(point.name, point.load()())
        except Exception as error:
            raise UsageError(
                f"the task format {point.name!r} ({point.value}) cannot be loaded: {describe(error)}"
            ) from error
    return sorted(found.values(), key=lambda one: (-one.rank, one.name))


@functools.cache
def _points() -> tuple[EntryPoint, ...]:
    """Looking for them takes as long as reading ten tasks."""
    return tuple(entry_points(group=GROUP))


class Found(msgspec.Struct, frozen=True):
    """A folder that looks like a task."""

    path: Path
    format: TaskFormat


def look(folder: Path, formats: list[TaskFormat], depth: int = 3) -> tuple[list[Found], list[str]]:
    """The tasks that a folder is or holds, by name; and names in it that are none."""
    for one in formats:
        if one.knows(folder):
            return [Found(folder, one)], []
    names = []
    with os.scandir(folder) as listed:
        for entry in listed:
            if not entry.name.startswith(".") and entry.is_dir():
                names.append(entry.name)
                if len(names) > MAX_TASKS:
                    raise UsageError(f"{folder} holds more than {MAX_TASKS:,} folders")
    names.sort()
    found, others = [], []
    for name in names:
        path = folder / name
        kind = next((one for one in formats if one.knows(path)), None)
        if kind is None:
            others.append(name)
        else:
            found.append(Found(path, kind))
    if not found and depth:
        inner = [name for name in others if name in WRAPPERS] or (others if len(others) == 1 else [])
        if len(inner) == 1:
            return look(folder / inner[0], formats, depth - 1)
    return found, others
