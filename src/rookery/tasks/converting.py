"""From one format of tasks into another.

Promises:
- what a task loses on the way is said, by task and field: the written task is read again and compared;
- what only Rookery reads in the new format is said too;
- nothing is overwritten, and the target is there whole or not at all;
- a task that is broken, or that the format has no place for, is left out, and said.
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
from rookery.tasks.formats import Reading, TaskFormat, task_formats
from rookery.tasks.inline import BoxRows, row_of
from rookery.tasks.parts import differences
from rookery.tasks.report import Notes
from rookery.tasks.swe import KEY, SweTask, swe_task

ROWS: Final = "rows"


class Converted(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of one task."""

    task: str
    lost: tuple[str, ...] = ()
    """Fields that the written task does not have."""
    aside: tuple[str, ...] = ()
    """Fields that only Rookery will read."""
    problem: str = ""
    """Why it was left out."""


def known_formats() -> list[str]:
    return [*(one.name for one in task_formats()), ROWS]


def convert(tasks: Sequence[Task], target: str | Path, to: str) -> list[Converted]:
    """Writes tasks of boxes as a folder of task folders, or as a file of rows."""
    path = Path(target).expanduser()
    if os.path.lexists(path):
        raise UsageError(f"{path} exists already, and nothing is overwritten: name something new")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} to put {path.name} into")
    if to == ROWS:
        return _to_rows(tasks, path)
    kind = next((one for one in task_formats() if one.name == to), None)
    if kind is None:
        raise UsageError(f"there is no format {to!r} of tasks: known are {', '.join(known_formats())}")
    with _aside(path) as half:
        half.mkdir()
        done = [_to_folder(task, half, kind) for task in tasks]
        if all(one.problem for one in done):
            raise UsageError(f"none of the tasks can be written as {to}: {done[0].task}: {done[0].problem}")
    return done


@contextmanager
def _aside(path: Path) -> Iterator[Path]:
    """A name beside the target, which becomes it when all went well."""
    half = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        yield half
        if os.path.lexists(path):
            raise UsageError(f"{path} has come to be meanwhile, and nothing is overwritten")
        half.rename(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        if half.is_dir():
            shutil.rmtree(half)
        else:
            half.unlink(missing_ok=True)


def _to_folder(task: Task, root: Path, kind: TaskFormat) -> Converted:
    if task.invalid:
        return Converted(task=task.id, problem=task.invalid)
    name = task.id
    if name.startswith(".") or "/" in name or len(name.encode()) > 200:
        return Converted(task=name, problem="its id cannot be the name of a folder")
    folder = root / name
    try:
        described = swe_task(task)
        folder.mkdir()
        aside = kind.write(described, folder)
    except RookeryError as problem:
        shutil.rmtree(folder, ignore_errors=True)
        return Converted(task=name, problem=str(problem))
    notes = Notes(name)
    read = kind.read(folder, name, notes, Reading())
    if read is None or notes.broken:
        shutil.rmtree(folder)
        return Converted(task=name, problem=notes.words or "what was written cannot be read")
    lost = (*sorted(differences(described, read)), *_extra(task, described))
    return Converted(task=name, lost=lost, aside=tuple(aside))


def _extra(task: Task, described: SweTask) -> list[str]:
    """What a row had besides its description."""
    found = [f"data.{name}" for name in task.data if name not in (KEY, "env_config")]
    return [*found, "prompt"] if task.text != described.steps[0].instruction else found


def _to_rows(tasks: Sequence[Task], path: Path) -> list[Converted]:
    done: list[Converted] = []
    with _aside(path) as half, half.open("xb") as file:
        for task in tasks:
            try:
                if task.invalid:
                    raise UsageError(task.invalid)
                described = swe_task(task)
                row = _row(task, described)
                found = _unread(row, described)
                done.append(Converted(task=task.id, lost=tuple(sorted(found))))
                file.write(msgspec.json.encode(row) + b"\n")
            except RookeryError as problem:
                done.append(Converted(task=task.id, problem=str(problem)))
        if all(one.problem for one in done):
            raise UsageError(f"none of the tasks can be written as rows: {done[0].task}: {done[0].problem}")
    return done


def _row(task: Task, described: SweTask) -> dict[str, Any]:
    row = row_of(described)
    row.update({name: value for name, value in task.data.items() if name not in (KEY, "env_config", *row)})
    if task.text != described.steps[0].instruction:
        row["messages"] = msgspec.to_builtins(task.prompt)
    return row


def _unread(row: dict[str, Any], described: SweTask) -> list[str]:
    """Fields in which the row, read again, is another task."""
    rows = BoxRows(lambda *_: None)
    again = rows.task(msgspec.json.decode(msgspec.json.encode(row)), described.id)
    rows.finish()
    return differences(described, swe_task(again))
