"""Load tasks from directories, archives, the Hugging Face Hub, JSONL, JSON and Parquet files, and Python lists.

Guarantees:
- The kind of a source follows from its name and content; no format has to be specified.
- A missing or unreadable file, a directory without tasks, an empty file, or a line that is not UTF-8, not JSON
  or longer than `MAX_LINE` raises `UsageError`; no task is returned.
- Blank lines are skipped, but counted in line numbers.
- A row (one JSON object that describes a task) without an ID gets an ID made from its line number, such as
  `line-000012`, so that it has the same ID in every run.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, cast

import msgspec

from rookery.core import Task, Taskset, UsageError
from rookery.tasks import parquet
from rookery.tasks.report import TaskReport
from rookery.tasks.row_formats import make_converter
from rookery.tasks.rows import RowParser

if TYPE_CHECKING:
    from rookery.tasks.sources import TaskSource
    from rookery.tasks.swe_rows import SweRowParser

MAX_LINE: Final = 64 << 20
MAX_JSON: Final = 1 << 30
_LINE_SUFFIXES: Final = (".jsonl", ".ndjson", "")
_ADVICE: Final = "write the tasks as .jsonl, one object per line"
_BOM: Final = b"\xef\xbb\xbf"

_decode = msgspec.json.Decoder().decode


def load_tasks(
    source: str | Path,
    *,
    limit: int | None = None,
    own_limits: frozenset[str] = frozenset(),
    task_data: str | Path | None = None,
    variables: Mapping[str, str] | None = None,
    row_format: str = "",
    columns: Mapping[str, str] | None = None,
) -> Taskset:
    """Load the tasks of a source, at most the first `limit`. An invalid task is included, with `invalid` set.

    A source is a directory of task directories, one task directory, a tar archive of them, the name of an
    installed taskset, `hf:OWNER/DATASET[@REVISION][:PATH]` on the Hugging Face Hub, a `.jsonl` or `.json` file
    (optionally with `.gz`), a `.parquet` file, a directory of Parquet files, or `NAME*.parquet`.

    `own_limits` are names of limits in rows that the environment reads itself, from `Task.data`. `task_data` is
    the directory or archive with the task directories that rows name in `env_config.task_id`; by default, they are
    looked for next to the file of rows. `variables` are the values for `${NAME}` in tasks.

    `row_format` names the format of the rows of a well-known dataset, such as `gsm8k`. `columns` maps names of
    fields to the columns of the rows that contain them, such as `{"prompt": "question"}`.
    """
    return read_tasks(
        source,
        limit=limit,
        own_limits=own_limits,
        task_data=task_data,
        variables=variables,
        row_format=row_format,
        columns=columns,
    ).tasks


def check_tasks(
    source: str | Path,
    *,
    task_data: str | Path | None = None,
    variables: Mapping[str, str] | None = None,
    row_format: str = "",
    columns: Mapping[str, str] | None = None,
) -> TaskReport:
    """Load the tasks of a source as `load_tasks` does, and return a report of all their problems."""
    return read_tasks(
        source, task_data=task_data, variables=variables, row_format=row_format, columns=columns
    ).report


class LoadedTasks(msgspec.Struct, frozen=True):
    """The tasks of a source, and a report of their problems."""

    tasks: Taskset
    report: TaskReport


def read_tasks(
    source: str | Path,
    *,
    limit: int | None = None,
    own_limits: frozenset[str] = frozenset(),
    task_data: str | Path | None = None,
    variables: Mapping[str, str] | None = None,
    row_format: str = "",
    columns: Mapping[str, str] | None = None,
) -> LoadedTasks:
    """Load tasks as `load_tasks` does, and return them with a report of their problems."""
    from rookery.tasks.sources import SourceReader, resolve_source

    _check_limit(limit)
    convert = make_converter(row_format, columns)
    resolved = resolve_source(source)
    reader = SourceReader(resolved, task_data, variables or {})
    if resolved.folder:
        if convert is not None:
            raise UsageError(f"{source} has task directories: a row format and columns are for files of rows")
        tasks, problems = reader.read_directories(limit)
    else:
        parser = RowParser("", "", own_limits, reader.swe_rows, _get_row_directory(resolved), convert)
        tasks = _load_rows(resolved.path, limit, parser, resolved.shards)
        reader.swe_rows.finish()
        problems = reader.problems(tasks)
    if not tasks:
        raise UsageError(f"{resolved.path} contains no tasks")
    report = TaskReport(source=resolved.source, tasks=len(tasks), problems=tuple(problems))
    return LoadedTasks(Taskset(tasks, name=resolved.name, source=resolved.source), report)


def _get_row_directory(resolved: "TaskSource") -> Path:
    """Return the directory that contains the file of rows. Rows may only name files in that directory."""
    return resolved.path.absolute() if resolved.path.is_dir() else resolved.path.absolute().parent


def _load_rows(path: Path, limit: int | None, parser: RowParser, shards: tuple[Path, ...] = ()) -> list[Task]:
    if shards or path.name.endswith(parquet.SUFFIX):
        named = f"{path.name}, row"
        return _collect(parquet.read_rows(shards or (path,)), limit, parser.set_naming("row", named))
    name = path.name.removesuffix(".gz")
    stem, dot, suffix = name.rpartition(".")
    suffix = f"{dot}{suffix}".lower() if stem else ""
    if suffix not in (*_LINE_SUFFIXES, ".json"):
        raise UsageError(f"{path}: files of type {suffix} are not supported; {_ADVICE}")
    try:
        with path.open("rb", buffering=1 << 20) as raw:
            packed = path.name.endswith(".gz")
            file = cast("BinaryIO", gzip.GzipFile(fileobj=raw)) if packed else raw
            if suffix == ".json":
                return _collect(
                    _read_json_rows(file, path), limit, parser.set_naming("item", f"{path.name}, item")
                )
            return _collect(_read_lines(file, path), limit, parser.set_naming("line", f"{path.name}, line"))
    except FileNotFoundError:
        raise UsageError(f"the tasks file {path} does not exist") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UsageError(f"{path} is not a complete gzip file: {error}") from None
    except OSError as error:
        raise UsageError(f"cannot read the tasks file {path}: {error.strerror or error}") from None


def tasks_from(
    obj: Iterable[Task | dict[str, Any] | str],
    name: str,
    *,
    limit: int | None = None,
    own_limits: frozenset[str] = frozenset(),
) -> Taskset:
    """Make a taskset from Python objects: `Task` objects, rows as dictionaries, or prompts as strings.

    `name` is the name of the taskset, also in messages. `limit` and `own_limits` are as in `load_tasks`.
    """
    _check_limit(limit)
    if isinstance(obj, Taskset):
        return cast("Taskset", obj[:limit]) if limit is not None else obj
    if isinstance(obj, str | bytes | dict) or not isinstance(obj, Iterable):
        raise UsageError(f"the tasks of {name} must be a list of tasks, rows or prompts, not {type(obj).__name__}")
    rows = (({"prompt": row} if isinstance(row, str) else row, n, "") for n, row in enumerate(obj, 1))
    swe_rows = _make_swe_row_parser()
    tasks = _collect(rows, limit, RowParser("task", f"{name}, task", own_limits, swe_rows))
    swe_rows.finish()
    if not tasks:
        raise UsageError(f"{name} defines no tasks")
    return Taskset(tasks, name=name)


def _make_swe_row_parser() -> "SweRowParser":
    from rookery.tasks.sources import SourceReader

    return SourceReader(None, None, {}).swe_rows


def _check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise UsageError(f"the number of tasks must be at least 1, got {limit}")


NumberedRow = tuple[object, int, str]
"""A row, its number, and the problem if it could not be decoded."""


def _collect(rows: Iterable[NumberedRow], limit: int | None, parser: RowParser) -> list[Task]:
    tasks: list[Task] = []
    for row, number, problem in rows:
        tasks.append(parser.invalid(problem, number) if problem else parser.task(row, number))
        if len(tasks) == limit:
            break
    return tasks


def _read_lines(file: BinaryIO, path: Path) -> Iterator[NumberedRow]:
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise UsageError(
                f"{path}, line {number} is longer than {MAX_LINE >> 20} MB: move large files out of the row"
            )
        if number == 1:
            line = line.removeprefix(_BOM)
        if line.isspace() or not line:
            continue
        row: object = None
        problem = ""
        try:
            row = _decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            problem = _explain_decode_error(line, error, f"{path}, line {number}")
        yield row, number, problem


def _read_json_rows(file: BinaryIO, path: Path) -> Iterator[NumberedRow]:
    data = file.read(MAX_JSON + 1)
    if len(data) > MAX_JSON:
        raise UsageError(f"{path} is larger than {MAX_JSON >> 30} GB; {_ADVICE}")
    data = data.removeprefix(_BOM)
    if not data.strip():
        return
    try:
        rows = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: {_explain_decode_error(data, error, str(path))}") from None
    if not isinstance(rows, list):
        raise UsageError(
            f"{path} must contain a list of tasks; a file with one object per line must be named .jsonl"
        )
    for number, row in enumerate(rows, 1):
        yield row, number, ""


def _explain_decode_error(data: bytes, error: Exception, where: str) -> str:
    """Return why a row that is valid JSON cannot be stored; raise `UsageError` if the data is not JSON.

    JSON allows numbers and lone surrogates that cannot be stored exactly. They make one row invalid, while data
    that is not JSON makes the whole file invalid. `where` names the file and line in messages.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as problem:
        raise UsageError(f"{where} is not UTF-8 (byte {problem.start + 1})") from None
    try:
        json.loads(text, parse_constant=_reject_constant)
    except json.JSONDecodeError as problem:
        line = f"line {problem.lineno}, " if problem.lineno > 1 else ""
        raise UsageError(f"{where} is not JSON: {problem.msg} ({line}column {problem.colno})") from None
    except RecursionError:
        raise UsageError(f"{where} is nested too deeply") from None
    except ValueError as problem:  # a number with more digits than Python reads, or a constant that is not JSON
        if isinstance(problem, _ConstantError):
            raise UsageError(f"{where} is not JSON: it contains {problem}") from None
    return f"the row contains a value that cannot be stored: {error}"


class _ConstantError(ValueError):
    """NaN or an infinity, which Python reads but JSON does not allow."""


def _reject_constant(name: str) -> object:
    raise _ConstantError(name)
