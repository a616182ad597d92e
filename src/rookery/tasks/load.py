"""Tasks from folders, archives, the hub, JSONL, JSON and Parquet files and Python lists.

Promises:
- what a source is follows from what is there: nothing has to be said about its format;
- a missing or unreadable file, a folder without tasks, an empty file, a line that is not UTF-8 or not JSON, or one
  above `MAX_LINE` raises `UsageError` that names it; no task is returned then;
- blank lines are skipped and do not change the numbers of the others;
- a row without an id gets its line number as id, so that it keeps it from run to run.
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
from rookery.tasks.rows import Rows

if TYPE_CHECKING:
    from rookery.tasks.inline import BoxRows
    from rookery.tasks.sources import Place

MAX_LINE: Final = 64 << 20
MAX_JSON: Final = 1 << 30
_LINES: Final = (".jsonl", ".ndjson", "")
_ADVICE: Final = "write the tasks as .jsonl, one object a line"
_BOM: Final = b"\xef\xbb\xbf"

_decode = msgspec.json.Decoder().decode


def load_tasks(
    source: str | Path,
    *,
    limit: int | None = None,
    own_limits: frozenset[str] = frozenset(),
    task_data: str | Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> Taskset:
    """The tasks of a source. At most `limit`, the first.

    A source is a folder of task folders, one task folder, an archive of them,
    `hf:OWNER/DATASET[@REVISION][:PATH]`, a `.jsonl`, or a `.json` with a list, each also as `.gz`, a `.parquet` or
    several of them: a folder that holds nothing else, or `NAME*.parquet`.

    `own_limits`: as the environment has them. `task_data`: where the folders lie that rows name by
    `env_config.task_id`; without it they lie beside the rows. `variables`: what `${NAME}` means in tasks.
    """
    return read_tasks(source, limit=limit, own_limits=own_limits, task_data=task_data, variables=variables).tasks


def check_tasks(
    source: str | Path,
    *,
    task_data: str | Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> TaskReport:
    """Every problem of every task of a source."""
    return read_tasks(source, task_data=task_data, variables=variables).report


class Loaded(msgspec.Struct, frozen=True):
    """Tasks, and what is wrong with them."""

    tasks: Taskset
    report: TaskReport


def read_tasks(
    source: str | Path,
    *,
    limit: int | None = None,
    own_limits: frozenset[str] = frozenset(),
    task_data: str | Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> Loaded:
    """As `load_tasks`, and the report that it comes with."""
    from rookery.tasks.sources import Places, find

    _check_limit(limit)
    place = find(source)
    places = Places(place, task_data, variables or {})
    if place.folder:
        tasks, problems = places.folders(limit)
    else:
        maker = Rows("", "", own_limits, places.boxes, _folder_of(place))
        tasks = _rows_of(place.path, limit, maker, place.shards)
        places.boxes.finish()
        problems = places.problems(tasks)
    if not tasks:
        raise UsageError(f"{place.path} holds no tasks")
    report = TaskReport(source=place.source, tasks=len(tasks), problems=tuple(problems))
    return Loaded(Taskset(tasks, name=place.name, source=place.source), report)


def _folder_of(place: "Place") -> Path:
    """The folder that holds the files of rows, and whatever else rows may name."""
    return place.path.absolute() if place.path.is_dir() else place.path.absolute().parent


def _rows_of(path: Path, limit: int | None, maker: Rows, shards: tuple[Path, ...] = ()) -> list[Task]:
    if shards or path.name.endswith(parquet.SUFFIX):
        named = f"{path.name}, row"
        return _collect(parquet.rows(shards or (path,)), limit, maker.called("row", named))
    name = path.name.removesuffix(".gz")
    stem, dot, suffix = name.rpartition(".")
    suffix = f"{dot}{suffix}".lower() if stem else ""
    if suffix not in (*_LINES, ".json"):
        raise UsageError(f"{path}: files of kind {suffix} are not read; {_ADVICE}")
    try:
        with path.open("rb", buffering=1 << 20) as raw:
            packed = path.name.endswith(".gz")
            file = cast("BinaryIO", gzip.GzipFile(fileobj=raw)) if packed else raw
            if suffix == ".json":
                return _collect(_json_rows(file, path), limit, maker.called("item", f"{path.name}, item"))
            return _collect(_lines(file, path), limit, maker.called("line", f"{path.name}, line"))
    except FileNotFoundError:
        raise UsageError(f"the tasks file {path} does not exist") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UsageError(f"{path} is not a whole gzip file: {error}") from None
    except OSError as error:
        raise UsageError(f"the tasks file {path} cannot be read: {error.strerror or error}") from None


def tasks_from(
    obj: Iterable[Task | dict[str, Any] | str],
    name: str,
    *,
    limit: int | None = None,
    own_limits: frozenset[str] = frozenset(),
) -> Taskset:
    """A taskset of what an environment defines in Python: tasks, rows as dicts, or prompts."""
    _check_limit(limit)
    if isinstance(obj, Taskset):
        return cast("Taskset", obj[:limit]) if limit is not None else obj
    if isinstance(obj, str | bytes | dict) or not isinstance(obj, Iterable):
        raise UsageError(f"the tasks of {name} must be a list of tasks, rows or prompts, not {type(obj).__name__}")
    rows = (({"prompt": row} if isinstance(row, str) else row, n, "") for n, row in enumerate(obj, 1))
    boxes = _boxes()
    tasks = _collect(rows, limit, Rows("task", f"{name}, task", own_limits, boxes))
    boxes.finish()
    if not tasks:
        raise UsageError(f"{name} defines no tasks")
    return Taskset(tasks, name=name)


def _boxes() -> "BoxRows":
    from rookery.tasks.sources import Places

    return Places(None, None, {}).boxes


def _check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise UsageError(f"the number of tasks must be at least 1, got {limit}")


Row = tuple[object, int, str]
"""The row, its number, and what is wrong with it where it could not be decoded."""


def _collect(rows: Iterable[Row], limit: int | None, maker: Rows) -> list[Task]:
    tasks: list[Task] = []
    for row, number, problem in rows:
        tasks.append(maker.invalid(problem, number) if problem else maker.task(row, number))
        if len(tasks) == limit:
            break
    return tasks


def _lines(file: BinaryIO, path: Path) -> Iterator[Row]:
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise UsageError(f"{path}, line {number} is longer than {MAX_LINE >> 20} MB")
        if number == 1:
            line = line.removeprefix(_BOM)
        if line.isspace() or not line:
            continue
        row: object = None
        problem = ""
        try:
            row = _decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            problem = _not_kept(line, error, f"{path}, line {number}")
        yield row, number, problem


def _json_rows(file: BinaryIO, path: Path) -> Iterator[Row]:
    data = file.read(MAX_JSON + 1)
    if len(data) > MAX_JSON:
        raise UsageError(f"{path} is larger than {MAX_JSON >> 30} GB; {_ADVICE}")
    data = data.removeprefix(_BOM)
    if not data.strip():
        return
    try:
        rows = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: {_not_kept(data, error, str(path))}") from None
    if not isinstance(rows, list):
        raise UsageError(f"{path} must hold a list of tasks; one object a line is a .jsonl file")
    for number, row in enumerate(rows, 1):
        yield row, number, ""


def _not_kept(data: bytes, error: Exception, where: str) -> str:
    """What is wrong with data that is JSON but cannot be kept; data that is not JSON raises `UsageError`.

    JSON's grammar allows numbers and half characters that no exact type holds: such a row is a bad row,
    not a bad file.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as problem:
        raise UsageError(f"{where} is not UTF-8 (byte {problem.start + 1})") from None
    try:
        json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as problem:
        spot = f"line {problem.lineno}, " if problem.lineno > 1 else ""
        raise UsageError(f"{where} is not JSON: {problem.msg} ({spot}column {problem.colno})") from None
    except RecursionError:
        raise UsageError(f"{where} is nested too deeply") from None
    except ValueError as problem:  # a number of more digits than Python reads, or a constant that is not JSON
        if isinstance(problem, _ConstantError):
            raise UsageError(f"{where} is not JSON: it holds {problem}") from None
    return f"the row holds a value that cannot be kept: {error}"


class _ConstantError(ValueError):
    """NaN and the infinities, which Python reads and JSON does not have."""


def _no_constant(name: str) -> object:
    raise _ConstantError(name)
