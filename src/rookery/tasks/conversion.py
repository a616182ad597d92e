"""Convert SWE tasks (tasks that an agent solves in a sandbox) from one format to another.

Guarantees:
- Each written task is read again and compared with the original, and the fields that differ are reported.
- Fields that the new format does not have, so that only Rookery reads them there, are reported as well.
- Nothing is overwritten. The target appears when it is complete, or not at all.
- A task that is invalid, or that the new format cannot express, is left out and reported.
"""

import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from rookery.core import RookeryError, Task, UsageError
from rookery.tasks.file_trees import find_differences
from rookery.tasks.formats import ReadOptions, TaskFormat, task_formats
from rookery.tasks.report import ProblemCollector
from rookery.tasks.swe import DATA_KEY, SweTask, get_swe_task
from rookery.tasks.swe_rows import SweRowParser, make_row

ROWS: Final = "rows"


class ConversionResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Result of converting one task."""

    task: str
    """ID of the task."""
    lost: tuple[str, ...] = ()
    """Fields that are missing or different when the written task is read again."""
    rookery_only: tuple[str, ...] = ()
    """Fields that the new format does not have. Rookery reads them there; other programs do not."""
    problem: str = ""
    """The reason why the task was left out; empty if it was written."""


def known_formats() -> list[str]:
    """Return the names of the formats that tasks can be converted to: the installed task formats, and `rows`."""
    return [*(one.name for one in task_formats()), ROWS]


def convert(tasks: Sequence[Task], target: str | Path, to: str) -> list[ConversionResult]:
    """Write SWE tasks in the format `to`; return one result per task.

    `target` must not exist. It becomes a JSON Lines file for `to="rows"`, else a directory of task directories.
    Raise `UsageError` if no task can be written.
    """
    path = Path(target).expanduser()
    if os.path.lexists(path):
        raise UsageError(f"{path} already exists and is not overwritten: choose another name")
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: the directory {path.parent} does not exist; create it first")
    if to == ROWS:
        return _write_rows(tasks, path)
    kind = next((one for one in task_formats() if one.name == to), None)
    if kind is None:
        raise UsageError(f"there is no task format {to!r}: choose one of {', '.join(known_formats())}")
    with _staged(path) as half:
        half.mkdir()
        done = [_write_folder(task, half, kind) for task in tasks]
        if all(one.problem for one in done):
            raise UsageError(f"no task can be written as {to}: {done[0].task}: {done[0].problem}")
    return done


@contextmanager
def _staged(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the directory of `path`.

    What is written there is renamed to `path` if the block succeeds, and removed otherwise.
    """
    half = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        yield half
        if os.path.lexists(path):
            raise UsageError(
                f"{path} was created by another program during the conversion and is not overwritten: choose "
                "another name"
            )
        half.rename(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if half.is_dir():
            shutil.rmtree(half)
        else:
            half.unlink(missing_ok=True)


def _write_folder(task: Task, root: Path, kind: TaskFormat) -> ConversionResult:
    if task.invalid:
        return ConversionResult(task=task.id, problem=task.invalid)
    name = task.id
    if name.startswith(".") or "/" in name or len(name.encode()) > 200:
        return ConversionResult(task=name, problem="the ID of the task cannot be the name of a directory")
    folder = root / name
    try:
        described = get_swe_task(task)
        folder.mkdir()
        rookery_only = kind.write(described, folder)
    except RookeryError as problem:
        shutil.rmtree(folder, ignore_errors=True)
        return ConversionResult(task=name, problem=str(problem))
    problems = ProblemCollector(name)
    read = kind.read(folder, name, problems, ReadOptions())
    if read is None or problems.has_errors:
        shutil.rmtree(folder)
        return ConversionResult(task=name, problem=problems.summary or "the written task cannot be read again")
    lost = (*sorted(find_differences(described, read)), *_find_extra_fields(task, described))
    return ConversionResult(task=name, lost=lost, rookery_only=tuple(rookery_only))


def _find_extra_fields(task: Task, described: SweTask) -> list[str]:
    """Return the names of a task's fields that are not part of its SWE task, so that a directory lacks them."""
    found = [f"data.{name}" for name in task.data if name not in (DATA_KEY, "env_config")]
    return [*found, "prompt"] if task.text != described.steps[0].instruction else found


def _write_rows(tasks: Sequence[Task], path: Path) -> list[ConversionResult]:
    done: list[ConversionResult] = []
    with _staged(path) as half, half.open("xb") as file:
        for task in tasks:
            try:
                if task.invalid:
                    raise UsageError(task.invalid)
                described = get_swe_task(task)
                row = _make_row(task, described)
                found = _find_lost_fields(row, described)
                done.append(ConversionResult(task=task.id, lost=tuple(sorted(found))))
                file.write(msgspec.json.encode(row) + b"\n")
            except RookeryError as problem:
                done.append(ConversionResult(task=task.id, problem=str(problem)))
        if all(one.problem for one in done):
            raise UsageError(f"no task can be written as a row: {done[0].task}: {done[0].problem}")
    return done


def _make_row(task: Task, described: SweTask) -> dict[str, Any]:
    row = make_row(described)
    row.update({name: value for name, value in task.data.items() if name not in (DATA_KEY, "env_config", *row)})
    if task.text != described.steps[0].instruction:
        row["messages"] = msgspec.to_builtins(task.prompt)
    return row


def _find_lost_fields(row: dict[str, Any], described: SweTask) -> list[str]:
    """Return the fields in which the task differs when the written row is read again."""
    rows = SweRowParser(lambda *_: None)
    again = rows.task(msgspec.json.decode(msgspec.json.encode(row)), described.id)
    rows.finish()
    return find_differences(described, get_swe_task(again))
