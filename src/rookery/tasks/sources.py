"""Where tasks come from: what a source is, and the tasks of folders.

Promises:
- folders of tasks are absolute paths, so that a run can be resumed from anywhere;
- a task that is broken is there in its place, with all that is wrong with it;
- the same folder gives the same ids in the same order;
- what exists on this machine under that very text is that, before it is the name of a taskset.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from rookery.core import Task, UsageError
from rookery.tasks.formats import Found, Reading, TaskFormat, look, task_formats
from rookery.tasks.inline import BoxRows
from rookery.tasks.named import named
from rookery.tasks.parquet import SUFFIX as PARQUET
from rookery.tasks.report import Notes, TaskProblem
from rookery.tasks.rows import Ids, Invalid, keepable
from rookery.tasks.swe import task_of

HUB: Final = "hf:"
ARCHIVE: Final = "task-data.tar.gz"
_BESIDE: Final = ("task-data", "task_data", ARCHIVE)
_FIELD = re.compile(r"(?:.*, (?:line|item|row|task) [0-9]+: )?((?:prompt|id|files|data|image|limits)[^\s:]*)")


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A source on this machine: a file of rows, or a folder."""

    path: Path
    name: str
    source: str
    """As it was asked for, absolute where it is a path."""
    folder: bool
    shards: tuple[Path, ...] = ()
    """The files of rows, where they are several."""


def find(source: str | Path) -> Place:
    """`UsageError` where it is nothing."""
    text = str(source)
    if "\0" in text:
        raise UsageError(f"the tasks file {text!r} cannot exist: its name holds a NUL")
    if text.startswith(HUB) and not os.path.lexists(text):
        from rookery.tasks.hub import fetched, parse

        asked = parse(text)
        path = fetched(asked)
        place = Place(path=path, name=asked.repo.rpartition("/")[2], source=text, folder=path.is_dir())
        return _of_rows(place) if place.folder else place
    if not os.path.lexists(text) and (own := named(text)) is not None:
        return Place(path=own, name=text, source=text, folder=True)
    try:
        path = Path(source).expanduser()
    except RuntimeError as error:  # ~nobody
        raise UsageError(f"the tasks file {source} cannot be found: {error}") from None
    from rookery.tasks.archives import is_archive

    full = path.absolute()
    if "*" in path.name and path.name.endswith(PARQUET) and not os.path.lexists(path):
        found = tuple(sorted(one for one in full.parent.glob(path.name) if one.is_file()))
        if not found:
            raise UsageError(f"there is no file {path}")
        return Place(path=full.parent, name=full.parent.name, source=str(full), folder=False, shards=found)
    if is_archive(path) and not path.is_dir():
        stem = path.name.lower().partition(".t")[0]
        return Place(path=unpacked(path), name=path.name[: len(stem)], source=str(full), folder=True)
    if path.is_dir():
        return _of_rows(Place(path=full, name=full.name or "tasks", source=str(full), folder=True))
    name = path.name.removesuffix(".gz")
    return Place(path=path, name=name.rpartition(".")[0] or name, source=text, folder=False)


def _of_rows(place: Place) -> Place:
    """A folder that holds no task folders and files of rows in Parquet is those rows."""
    from rookery.tasks.parquet import shards

    try:
        if not any(next(one.glob(f"*{PARQUET}"), None) for one in (place.path, place.path / "data")):
            return place
        if look(place.path, task_formats())[0]:
            return place
    except OSError:  # said by who reads it
        return place
    return msgspec.structs.replace(place, folder=False, shards=shards(place.path))


def unpacked(archive: Path) -> Path:
    """The folder of an archive, unpacked once on this machine."""
    from rookery.tasks.archives import unpack
    from rookery.tasks.cache import Cache, key_of

    try:
        info = archive.stat()
    except FileNotFoundError:
        raise UsageError(f"the archive {archive} does not exist") from None
    except OSError as error:
        raise UsageError(f"the archive {archive} cannot be read: {error.strerror or error}") from None
    real = os.path.realpath(archive)
    key = key_of("archive", real, info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)
    return Cache().once(key, lambda folder: unpack(Path(real), folder), f"the archive {archive}")


class Places:
    """Reads what one source holds."""

    def __init__(self, place: Place | None, task_data: str | Path | None, variables: Mapping[str, str]) -> None:
        self._place = place
        self._task_data = task_data
        self._given = Reading(variables)
        self._formats: list[TaskFormat] | None = None
        self._data: Path | None = None
        self.boxes = BoxRows(self._named)

    @property
    def formats(self) -> list[TaskFormat]:
        if self._formats is None:
            self._formats = task_formats()
        return self._formats

    # ---- folders

    def folders(self, limit: int | None) -> tuple[list[Task], list[TaskProblem]]:
        """All tasks that the source holds."""
        assert self._place is not None
        path = self._place.path
        try:
            found, others = look(path, self.formats)
        except OSError as error:
            raise UsageError(f"the folder {path} cannot be read: {error.strerror or error}") from None
        if not found:
            raise UsageError(_nothing(path))
        ids = Ids("task")
        tasks: list[Task] = []
        problems: list[TaskProblem] = []
        for number, one in enumerate(found[:limit], 1):
            notes = Notes("")
            tasks.append(self._read(one, number, ids, notes))
            problems += notes.found
        if limit is None:
            names = ", ".join(kind.name for kind in self.formats)
            problems += [
                TaskProblem(name, "folder", f"it looks like no task of any format ({names})", warning=True)
                for name in map(_printable, others)
            ]
        return tasks, problems

    def _read(self, one: Found, number: int, ids: Ids, notes: Notes) -> Task:
        path = one.path.absolute()
        try:
            name = ids.claim(path.name)
        except Invalid as problem:
            name = ids.spare(number)
            notes.task = name
            notes.wrong("folder", f"its name cannot be the id of a task: {problem}")
        notes.task = name
        return self._made(one.format, path, name, notes)

    def _made(self, kind: TaskFormat, path: Path, name: str, notes: Notes) -> Task:
        task = None
        try:
            task = kind.read(path, name, notes, self._given)
        except (OSError, UnicodeError) as error:
            notes.wrong("folder", f"it cannot be read: {error}")
        except RecursionError:
            notes.wrong("folder", "something in it is nested too deeply")
        if task is None and not notes.broken:
            notes.wrong("folder", f"nothing can be made of it as a task of {kind.name}")
        if task is None or notes.broken:
            return Task(id=name, invalid=notes.words)
        try:
            return keepable(task_of(task))
        except Invalid as problem:  # a path that is not UTF-8, say
            notes.wrong("folder", str(problem))
            return Task(id=name, invalid=notes.words)

    # ---- rows

    def _named(self, name: str, notes: Notes) -> Task | None:
        """The task of a folder of task data."""
        field = "env_config.task_id"
        bad = not name or name in (".", "..") or "/" in name or not name.isprintable()
        if bad or len(name.encode("utf-8", "replace")) > 255:
            notes.wrong(field, f"{name[:80]!r} cannot be the name of a task's folder")
            return None
        data = self._task_data_folder()
        if data is None:
            notes.wrong(
                field,
                f"there is no task data for {name!r}: name it with --task-data, in Python with "
                f"task_data, or put a folder task-data or {ARCHIVE} "
                "beside the rows",
            )
            return None
        path = data / name
        kind = next((one for one in self.formats if path.is_dir() and one.knows(path)), None)
        if kind is None:
            hint = "" if self._task_data is not None else "; name the folder that does with --task-data"
            notes.wrong(field, f"{data} holds no task {name!r}{hint}")
            return None
        made = self._made(kind, path, name, notes)
        return None if made.invalid else made

    def _task_data_folder(self) -> Path | None:
        if self._data is None:
            self._data = self._find_data()
        return self._data

    def _find_data(self) -> Path | None:
        if self._task_data is not None:
            place = find(self._task_data)
            if not place.folder:
                raise UsageError(f"the task data {self._task_data} is neither a folder nor an archive")
            return _holding(place.path, self.formats)
        if self._place is None:
            return None
        here = self._place.path.absolute()
        around = (here, self._place.shards[0].parent) if self._place.shards else (here.parent,)
        for path in (where / name for where in around for name in _BESIDE):
            if path.exists():
                return _holding(path if path.is_dir() else unpacked(path), self.formats)
        return around[0]

    def problems(self, tasks: list[Task]) -> list[TaskProblem]:
        """Of rows: by field where the row was one of a box."""
        known = {notes.task: notes.found for notes in self.boxes.notes}
        found: list[TaskProblem] = []
        for task in tasks:
            noted = known.get(task.id, [])
            found += noted
            if task.invalid and not any(not one.warning for one in noted):
                match = _FIELD.match(task.invalid)
                words = task.invalid.partition(": ")[2] or task.invalid
                found.append(TaskProblem(task.id, match[1] if match else "row", words))
        return found


def _holding(path: Path, formats: list[TaskFormat]) -> Path:
    """The folder below which the tasks lie."""
    found, _ = look(path, formats)
    return found[0].path.parent if found else path


def _nothing(path: Path) -> str:
    kinds = (".jsonl", ".json", ".jsonl.gz", ".tar.gz", PARQUET)
    rows = sorted(one.name for one in path.iterdir() if one.name.endswith(kinds))
    hint = f"; name a file of tasks in it ({', '.join(map(_printable, rows[:3]))})" if rows else ""
    return (
        f"the folder {path} holds no tasks: a task is a folder with task.toml (Harbor), or with instruction.md "
        f"and tests/test.sh (open-instruct){hint}"
    )


def _printable(name: str) -> str:
    return name if name.isprintable() else name.encode("unicode_escape", "surrogatepass").decode()
