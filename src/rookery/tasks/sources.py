"""Find the source of a taskset on this machine and read the task directories that it contains.

A source is what the user names: a path, an archive, a dataset on the Hugging Face Hub or an installed taskset.

Guarantees:
- Task directories are stored as absolute paths, so that a run can be resumed from any working directory.
- An invalid task keeps its position in the taskset, with all its problems.
- The same directory gives the same task IDs in the same order.
- A local path takes precedence over an installed taskset of the same name.
"""

import os
import re
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

import msgspec

from rookery.core import RookeryError, Task, UsageError
from rookery.core.errors import describe
from rookery.tasks.formats import FoundTask, ReadOptions, TaskFormat, find_task_folders, task_formats
from rookery.tasks.parquet import SUFFIX as PARQUET
from rookery.tasks.report import ProblemCollector, TaskProblem
from rookery.tasks.rows import InvalidRow, TaskIds, check_journalable
from rookery.tasks.swe import make_task
from rookery.tasks.swe_rows import SweRowParser

TASKSET_GROUP: Final = "rookery.tasksets"
"""Entry point group of installed tasksets. Each entry point is a function that returns a taskset's directory."""
HUB_PREFIX: Final = "hf:"
ARCHIVE: Final = "task-data.tar.gz"
_TASK_DATA_NAMES: Final = ("task-data", "task_data", ARCHIVE)
_FIELD_PATTERN = re.compile(
    r"(?:.*, (?:line|item|row|task) [0-9]+: )?((?:prompt|id|files|data|image|limits)[^\s:]*)"
)


class TaskSource(msgspec.Struct, frozen=True, kw_only=True):
    """A source of tasks on this machine: a directory of task directories, or one or more files of rows."""

    path: Path
    """The file of rows, or the directory."""
    name: str
    """Name of the taskset."""
    source: str
    """The source as the user named it. A path is absolute."""
    folder: bool
    """True if `path` is a directory of task directories."""
    shards: tuple[Path, ...] = ()
    """The Parquet files that contain the rows, if `path` is their directory."""


def resolve_source(source: str | Path) -> TaskSource:
    """Return where a source of tasks is on this machine. Download or unpack it if needed.

    Raise `UsageError` if a download or an archive fails. A file that does not exist is reported when it is read.
    """
    text = str(source)
    if "\0" in text:
        raise UsageError(f"{text!r} is not a valid path of a tasks file: it contains a NUL character")
    if text.startswith(HUB_PREFIX) and not os.path.lexists(text):
        from rookery.tasks.hub import fetch, parse_reference

        reference = parse_reference(text)
        path = fetch(reference)
        resolved = TaskSource(path=path, name=reference.repo.rpartition("/")[2], source=text, folder=path.is_dir())
        return _detect_parquet(resolved) if resolved.folder else resolved
    if not os.path.lexists(text) and (own := find_taskset(text)) is not None:
        return TaskSource(path=own, name=text, source=text, folder=True)
    try:
        path = Path(source).expanduser()
    except RuntimeError as error:  # an unknown user
        raise UsageError(f"cannot find the tasks file {source}: {error}") from None
    from rookery.tasks.archives import is_archive

    full = path.absolute()
    if "*" in path.name and path.name.endswith(PARQUET) and not os.path.lexists(path):
        found = tuple(sorted(one for one in full.parent.glob(path.name) if one.is_file()))
        if not found:
            raise UsageError(f"there is no file that matches {path}: check the directory and the pattern")
        return TaskSource(path=full.parent, name=full.parent.name, source=str(full), folder=False, shards=found)
    if is_archive(path) and not path.is_dir():
        stem = path.name.lower().partition(".t")[0]
        return TaskSource(path=unpack_once(path), name=path.name[: len(stem)], source=str(full), folder=True)
    if path.is_dir():
        return _detect_parquet(TaskSource(path=full, name=full.name or "tasks", source=str(full), folder=True))
    name = path.name.removesuffix(".gz")
    return TaskSource(path=path, name=name.rpartition(".")[0] or name, source=str(full), folder=False)


def _detect_parquet(resolved: TaskSource) -> TaskSource:
    """Return the source as Parquet files of rows if its directory contains such files and no task directories."""
    from rookery.tasks.parquet import find_shards

    try:
        if not any(next(one.glob(f"*{PARQUET}"), None) for one in (resolved.path, resolved.path / "data")):
            return resolved
        if find_task_folders(resolved.path, task_formats())[0]:
            return resolved
    except OSError:  # reported when the directory is read
        return resolved
    return msgspec.structs.replace(resolved, folder=False, shards=find_shards(resolved.path))


def find_taskset(name: str) -> Path | None:
    """Return the directory of an installed taskset, or None if no entry point has this name.

    Raise `UsageError` if the function of the entry point raises.
    """
    for point in entry_points(group=TASKSET_GROUP, name=name):
        try:
            return Path(point.load()()).absolute()
        except RookeryError:
            raise
        except Exception as error:
            raise UsageError(f"cannot load taskset {name!r} ({point.value}): {describe(error)}") from error
    return None


def unpack_once(archive: Path) -> Path:
    """Unpack an archive into the task cache, unless it is already there, and return the directory.

    An archive that has changed since (size, modification time or inode) is unpacked again.
    """
    from rookery.tasks.archives import unpack
    from rookery.tasks.cache import TaskCache, make_key

    try:
        info = archive.stat()
    except FileNotFoundError:
        raise UsageError(f"the archive {archive} does not exist") from None
    except OSError as error:
        raise UsageError(f"cannot read the archive {archive}: {error.strerror or error}") from None
    real = os.path.realpath(archive)
    key = make_key("archive", real, info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)
    return TaskCache().get_or_create(key, lambda folder: unpack(Path(real), folder), f"the archive {archive}")


class SourceReader:
    """Reads the task directories of one source, and those that rows of the source refer to."""

    def __init__(
        self, resolved: TaskSource | None, task_data: str | Path | None, variables: Mapping[str, str]
    ) -> None:
        self._resolved = resolved
        self._task_data = task_data
        self._options = ReadOptions(variables)
        self._formats: list[TaskFormat] | None = None
        self._data: Path | None = None
        self.swe_rows = SweRowParser(self._read_named)

    @property
    def formats(self) -> list[TaskFormat]:
        """All installed formats of task directories, highest priority first."""
        if self._formats is None:
            self._formats = task_formats()
        return self._formats

    # ---- folders

    def read_directories(self, limit: int | None) -> tuple[list[Task], list[TaskProblem]]:
        """Read the task directories of this source, at most the first `limit`.

        Return their tasks and all their problems. Without `limit`, subdirectories that are not tasks are reported
        as warnings.
        """
        assert self._resolved is not None
        path = self._resolved.path
        try:
            found, others = find_task_folders(path, self.formats)
        except OSError as error:
            raise UsageError(f"cannot read the directory {path}: {error.strerror or error}") from None
        if not found:
            raise UsageError(_explain_no_tasks(path))
        ids = TaskIds("task")
        tasks: list[Task] = []
        problems: list[TaskProblem] = []
        for number, one in enumerate(found[:limit], 1):
            collector = ProblemCollector("")
            tasks.append(self._read(one, number, ids, collector))
            problems += collector.items
        if limit is None:
            names = ", ".join(kind.name for kind in self.formats)
            problems += [
                TaskProblem(name, "folder", f"matches no task format ({names})", warning=True)
                for name in map(_make_printable, others)
            ]
        return tasks, problems

    def _read(self, one: FoundTask, number: int, ids: TaskIds, problems: ProblemCollector) -> Task:
        path = one.path.absolute()
        try:
            name = ids.claim(path.name)
        except InvalidRow as problem:
            name = ids.next_free(number)
            problems.task = name
            problems.error("folder", f"its name cannot be the ID of a task: {problem}")
        problems.task = name
        return self._make_task(one.format, path, name, problems)

    def _make_task(self, kind: TaskFormat, path: Path, name: str, problems: ProblemCollector) -> Task:
        task = None
        try:
            task = kind.read(path, name, problems, self._options)
        except (OSError, UnicodeError) as error:
            problems.error("folder", f"cannot be read: {error}")
        except RecursionError:
            problems.error("folder", "something in it is nested too deeply")
        if task is None and not problems.has_errors:
            problems.error("folder", f"cannot be read as a task of the format {kind.name}")
        if task is None or problems.has_errors:
            return Task(id=name, invalid=problems.summary)
        try:
            return check_journalable(make_task(task))
        except InvalidRow as problem:  # for example a path that is not UTF-8
            problems.error("folder", str(problem))
            return Task(id=name, invalid=problems.summary)

    # ---- rows

    def _read_named(self, name: str, problems: ProblemCollector) -> Task | None:
        """Read the task in the directory `name` of the task data; report a problem and return None if that fails.

        The task data is a directory that contains one directory for each task. A row names one of them in its
        field `env_config.task_id`.
        """
        field = "env_config.task_id"
        bad = not name or name in (".", "..") or "/" in name or not name.isprintable()
        if bad or len(name.encode("utf-8", "replace")) > 255:
            problems.error(field, f"{name[:80]!r} cannot be the name of a task directory")
            return None
        data = self._task_data_folder()
        if data is None:
            problems.error(
                field,
                (
                    f"there is no task data for {name!r}: pass --task-data (task_data in Python), or put a "
                    f"directory task-data or {ARCHIVE} beside the rows"
                ),
            )
            return None
        path = data / name
        kind = next((one for one in self.formats if path.is_dir() and one.matches(path)), None)
        if kind is None:
            hint = "" if self._task_data is not None else "; pass the right directory with --task-data"
            problems.error(field, f"{data} contains no task {name!r}{hint}")
            return None
        task = self._make_task(kind, path, name, problems)
        return None if task.invalid else task

    def _task_data_folder(self) -> Path | None:
        if self._data is None:
            self._data = self._find_data()
        return self._data

    def _find_data(self) -> Path | None:
        if self._task_data is not None:
            resolved = resolve_source(self._task_data)
            if not resolved.folder:
                raise UsageError(f"the task data {self._task_data} is neither a directory nor an archive")
            return _find_task_root(resolved.path, self.formats)
        if self._resolved is None:
            return None
        here = self._resolved.path.absolute()
        around = (here, self._resolved.shards[0].parent) if self._resolved.shards else (here.parent,)
        for path in (where / name for where in around for name in _TASK_DATA_NAMES):
            if path.exists():
                return _find_task_root(path if path.is_dir() else unpack_once(path), self.formats)
        return around[0]

    def problems(self, tasks: list[Task]) -> list[TaskProblem]:
        """Return the problems of tasks that were read from rows.

        For SWE tasks these are all problems with their fields; for other tasks, the first error.
        """
        known = {collector.task: collector.items for collector in self.swe_rows.problems}
        found: list[TaskProblem] = []
        for task in tasks:
            noted = known.get(task.id, [])
            found += noted
            if task.invalid and not any(not one.warning for one in noted):
                match = _FIELD_PATTERN.match(task.invalid)
                words = task.invalid.partition(": ")[2] or task.invalid
                found.append(TaskProblem(task.id, match[1] if match else "row", words))
        return found


def _find_task_root(path: Path, formats: list[TaskFormat]) -> Path:
    """Return the directory that directly contains the task directories: `path` or one below it."""
    found, _ = find_task_folders(path, formats)
    return found[0].path.parent if found else path


def _explain_no_tasks(path: Path) -> str:
    kinds = (".jsonl", ".json", ".jsonl.gz", ".tar.gz", PARQUET)
    rows = sorted(one.name for one in path.iterdir() if one.name.endswith(kinds))
    hint = f"; pass a tasks file in it ({', '.join(map(_make_printable, rows[:3]))})" if rows else ""
    return (
        f"the directory {path} contains no tasks of any installed format "
        f"({', '.join(one.name for one in task_formats())}){hint}"
    )


def _make_printable(name: str) -> str:
    return name if name.isprintable() else name.encode("unicode_escape", "surrogatepass").decode()
