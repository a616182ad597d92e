"""Parse rows into tasks. A row is a JSON object, or a Python dictionary, that describes one task.

A row is `{"id"?, "prompt", "data"?, "files"?, "image"?, "limits"?, "node_labels"?}`. All other keys go into
`Task.data`, as do limits that the environment reads itself. Rows of SWE tasks are parsed by `swe_rows`.

Guarantees:
- `RowParser.task` returns a valid task, or one with `invalid` set, for any value; it does not raise.
- No two tasks of one `RowParser` have the same ID.
- A valid task can be written to a journal, and its `files` are inside the sandbox's working directory.
- A row from a file cannot expose other files of this machine: its image is the name of a container image, and its
  context files must be in the directory of that file.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from rookery.core import Limits, Message, Task

if TYPE_CHECKING:
    from rookery.tasks.row_formats import RowConverter
    from rookery.tasks.swe_rows import SweRowParser

MAX_ID: Final = 200
_FIELDS: Final = frozenset({"id", "prompt", "data", "files", "image", "limits", "node_labels"})
_SWE_MARKERS: Final = frozenset({"env_config", "instruction", "steps"})
_SWE_KEY: Final = "swe"
"""Same as `rookery.tasks.swe.DATA_KEY`, the field of `Task.data` that contains a `SweTask`."""
_PATH_FIELDS: Final = ("context_file", "context_folder")
"""Fields of `Task.data` that name a file or directory of this machine. The environment `rlm` reads them."""
_NO_LIMITS: Final = Limits()  # creating one costs as much as the rest of a task
_writable = msgspec.msgpack.Encoder().encode


class InvalidRow(Exception):  # noqa: N818  (becomes `Task.invalid`; does not leave this package)
    """A row is not a valid task. The message, which says why, becomes `Task.invalid`."""


class RowParser:
    """Parses rows one after the other and remembers the task IDs in use.

    A row without an ID gets an ID made of `kind` and its number; `where` and the number name the row in messages.
    `own_limits` are names of limits that the environment reads itself, from `Task.data`. `swe_rows` parses rows of
    SWE tasks; without it, such rows are parsed as other rows. `folder` is the directory of the file that contains
    the rows, outside of which they may name no files. None means that the rows come from Python code, which may
    name any file. `convert` converts rows of another format first.
    """

    def __init__(
        self,
        kind: str,
        where: str,
        own_limits: frozenset[str] = frozenset(),
        swe_rows: "SweRowParser | None" = None,
        folder: Path | None = None,
        convert: "RowConverter | None" = None,
    ) -> None:
        self._row_label = where
        self._own_limits = own_limits
        self._swe_rows = swe_rows
        self._folder = folder
        self._convert = convert
        self._ids = TaskIds(kind)

    def set_naming(self, kind: str, where: str) -> "RowParser":
        """Set how rows are named in IDs (`kind`) and messages (`where`), and forget the IDs in use.

        Return self.
        """
        self._ids = TaskIds(kind)
        self._row_label = where
        return self

    def task(self, row: object, number: int) -> Task:
        """Return the task that a row describes. `number` is the number of the row in its file or list.

        If the row is not valid, the task has `invalid` set.
        """
        name = ""
        try:
            if not isinstance(
                row, dict
            ):  # checked before `Task`, because `isinstance` with a Struct is ten times slower
                if isinstance(row, Task):
                    name = self._ids.claim(row.id)
                    _parse_files(row.files)
                    prompt: object = row.prompt
                    if not isinstance(prompt, tuple) or any(isinstance(message, dict) for message in prompt):
                        row = msgspec.structs.replace(row, prompt=parse_prompt(prompt))
                    return check_journalable(row)
                raise InvalidRow(f"a row must be an object with a prompt, got {_type_name(row)}")
            if self._convert is not None:
                row = _convert_row(self._convert, row)
            row_id = row.get("id")
            if self._swe_rows is not None and not _SWE_MARKERS.isdisjoint(row) and _is_swe_row(row):
                name = self._swe_task_name(row, number)
                return check_journalable(_confine_paths(self._swe_rows.task(row, name), self._folder))
            name = self._ids.next_free(number) if row_id is None else self._ids.claim(row_id)
            return check_journalable(_confine_paths(_parse_task(row, name, self._own_limits), self._folder))
        except InvalidRow as problem:
            return self.invalid(str(problem), number, name=name)

    def invalid(self, problem: str, number: int, *, name: str = "") -> Task:
        """Return a placeholder task for an invalid row. Its field `invalid` contains the problem."""
        return Task(id=name or self._ids.next_free(number), invalid=f"{self._row_label} {number}: {problem}")

    def _swe_task_name(self, row: dict[str, Any], number: int) -> str:
        """Reserve and return the ID for the row of a SWE task.

        It is the row's own ID, else the ID of its task directory if no other row uses it, else one made of its
        number.
        """
        if (row_id := row.get("id")) is not None:
            return self._ids.claim(row_id)
        config = row.get("env_config")
        try:
            return self._ids.claim(config.get("task_id") if isinstance(config, dict) else None)
        except InvalidRow:
            return self._ids.next_free(number)


def _convert_row(convert: "RowConverter", row: dict[Any, Any]) -> dict[Any, Any]:
    from rookery.tasks.row_formats import RowFormatError

    try:
        return convert(row)
    except RowFormatError as error:
        raise InvalidRow(str(error)) from None


def _is_swe_row(row: dict[str, Any]) -> bool:
    from rookery.tasks.swe_rows import is_swe_row

    return is_swe_row(row)


class TaskIds:
    """The task IDs in use. An ID that is made for a row without one consists of `kind` and a number."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._ids: set[str] = set()

    def claim(self, row_id: object) -> str:
        """Reserve and return the ID that a row specifies. Raise `InvalidRow` if it is invalid or in use."""
        if isinstance(row_id, int) and not isinstance(row_id, bool):
            row_id = f"{row_id:d}" if -(2**63) <= row_id < 2**64 else ""
        if not isinstance(row_id, str):
            raise InvalidRow(f"id must be a string or an integer, got {_type_name(row_id)}")
        if not row_id or len(row_id) > MAX_ID or not row_id.isprintable():
            raise InvalidRow(f"id must be 1 to {MAX_ID} printable characters, got {row_id[:40]!r}")
        if row_id in self._ids:
            raise InvalidRow(f"id {row_id!r} is already the id of another row")
        self._ids.add(row_id)
        return row_id

    def next_free(self, number: int) -> str:
        """Reserve and return an ID for a row that specifies none, made of its number."""
        first = found = f"{self._kind}-{number:06d}"
        n = 1
        while found in self._ids:
            n += 1
            found = f"{first}-{n}"
        self._ids.add(found)
        return found


def check_journalable(task: Task) -> Task:
    """Return the task if it can be encoded for a journal; raise `InvalidRow` otherwise."""
    try:
        _writable(task)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRow(f"the row contains a value that cannot be stored: {error}") from None
    return task


def _parse_task(row: dict[Any, Any], name: str, own_limits: frozenset[str]) -> Task:
    data = row.get("data")
    if data is None:
        data = {}
    elif not isinstance(data, dict):
        raise InvalidRow(f"data must be an object, got {_type_name(data)}")
    others = {key: value for key, value in row.items() if key not in _FIELDS}
    if others:
        if data and (twice := others.keys() & data.keys()):
            raise InvalidRow(f"{min(map(str, twice))!r} is both a field of the row and of its data; keep one")
        data = data | others
    for key in data:
        if not isinstance(key, str):
            raise InvalidRow(f"the name of the field {key!r} must be a string")
    if _SWE_KEY in data:
        raise InvalidRow(
            f"the field {_SWE_KEY!r} is reserved for Rookery: describe the task with the fields instruction, "
            "files and tests"
        )
    image = row.get("image")
    if image is not None:
        image = _parse_image(image)
    limits = row.get("limits")
    if (
        own_limits
        and isinstance(limits, dict)
        and (theirs := {key: limits[key] for key in limits if key in own_limits})
    ):
        if "limits" in data:
            raise InvalidRow("limits is both a field of the row and of its data; keep one")
        data = data | {"limits": theirs}
        limits = {key: value for key, value in limits.items() if key not in own_limits}
    return Task(
        id=name,
        prompt=parse_prompt(row.get("prompt")),
        data=data,
        files=_parse_files(row.get("files")),
        image=image,
        limits=_NO_LIMITS if limits is None else parse_limits(limits),
        node_labels=_parse_labels(row.get("node_labels")),
    )


def _parse_labels(value: object) -> dict[str, str]:
    """Return the labels that a cluster node must have; raise `InvalidRow` if they are not names with texts."""
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(one, str) for pair in value.items() for one in pair):
        raise InvalidRow("node_labels must be an object whose values are texts")
    return value


def _parse_image(value: object) -> str:
    """Return the name of a container image; raise `InvalidRow` if it is invalid.

    Directories and archives of this machine are refused, because the sandbox would expose their content.
    """
    if not isinstance(value, str) or not value.strip():
        raise InvalidRow("image must be the name of an image")
    from rookery.tasks.report import ProblemCollector
    from rookery.tasks.task_folder import parse_image

    problems = ProblemCollector("")
    found = parse_image(value, "image", problems)
    if found is None:
        raise InvalidRow(problems.summary)
    return found


def _confine_paths(task: Task, folder: Path | None) -> Task:
    """Return the task with absolute paths in its fields `context_file` and `context_folder`.

    Raise `InvalidRow` if one of them is outside `folder`. If `folder` is None, return the task unchanged.
    """
    if folder is None or task.data.keys().isdisjoint(_PATH_FIELDS):
        return task
    paths = {
        key: _resolve_inside(key, value, folder)
        for key in _PATH_FIELDS
        if (value := task.data.get(key)) is not None
    }
    return msgspec.structs.replace(task, data=task.data | paths)


def _resolve_inside(field: str, value: object, folder: Path) -> str:
    """Return the absolute path of a file that a row names; raise `InvalidRow` if it is outside `folder`."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise InvalidRow(f"{field} must be a path")
    top = folder.resolve()
    path = (top / value).resolve()
    if not path.is_relative_to(top):
        raise InvalidRow(
            f"{field}: {value[:120]!r} is outside the directory of the tasks file: move it into that directory, "
            "or define the tasks in Python"
        )
    return str(path)


def parse_prompt(value: object) -> tuple[Message, ...]:
    """Return the messages of a row's prompt, which is a string or a list of messages.

    Raise `InvalidRow` if the prompt is invalid or empty.
    """
    if isinstance(value, str):
        if not value.strip():
            raise InvalidRow("prompt is empty")
        return (Message("user", value),)
    if value is None:
        raise InvalidRow("prompt is missing")
    if not isinstance(value, list | tuple):
        raise InvalidRow(f"prompt must be a string or a list of messages, got {_type_name(value)}")
    if not value:
        raise InvalidRow("prompt is empty")
    messages = tuple(_parse_message(item, n) for n, item in enumerate(value))
    if not any(message.text.strip() or _has_non_text_part(message) for message in messages):
        raise InvalidRow("prompt is empty: no message has any content")
    return messages


def _has_non_text_part(message: Message) -> bool:
    return isinstance(message.content, tuple) and any(part.get("type") != "text" for part in message.content)


def _parse_message(value: object, n: int) -> Message:
    if isinstance(value, dict):
        if "tool_calls" in value:
            value = value | {"tool_calls": _flatten_tool_calls(value["tool_calls"])}
    elif isinstance(value, Message):
        return value
    try:
        message = msgspec.convert(value, Message)
    except msgspec.ValidationError as error:
        raise InvalidRow(_format_validation_error(error, f"prompt[{n}]")) from None
    if message.content is None and not message.tool_calls:
        raise InvalidRow(f"prompt[{n}].content is missing")
    return message


def _flatten_tool_calls(value: object) -> object:
    """Convert the tool calls of a message from the OpenAI format to that of `Message.tool_calls`."""
    if value is None:  # as some servers write it
        return []
    if not isinstance(value, list | tuple):
        return value
    return [
        {"id": call.get("id"), **call["function"]}
        if isinstance(call, dict) and isinstance(call.get("function"), dict)
        else call
        for call in value
    ]


def _parse_files(value: object) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRow(f"files must be an object that maps paths to strings, got {_type_name(value)}")
    for path, text in value.items():
        if not isinstance(path, str) or not isinstance(text, str):
            raise InvalidRow(f"files[{str(path)[:80]!r}] must be a string, got {_type_name(text)}")
        try:
            check_relative_path(path)
        except InvalidRow as problem:
            raise InvalidRow(f"files: {problem}") from None
    for path in value:
        parts = path.split("/")
        for n in range(1, len(parts)):
            if "/".join(parts[:n]) in value:
                raise InvalidRow(f"files: {'/'.join(parts[:n])!r} cannot be both a file and a directory")
    return value


def check_relative_path(path: str) -> None:
    """Raise `InvalidRow` unless the path is relative, valid UTF-8, not too long and without `.` and `..`."""
    try:
        raw = path.encode()
    except UnicodeEncodeError:
        raise InvalidRow(f"the path {path[:80]!r} is not UTF-8") from None
    parts = path.split("/")
    long = len(raw) > 1_024 or any(len(part.encode()) > 255 for part in parts)
    if long or "\0" in path or any(part in ("", ".", "..") for part in parts):
        why = "is too long" if long else "must be relative, without empty parts, '.', '..' or NUL"
        raise InvalidRow(f"the path {path[:80]!r} {why}")


def parse_limits(value: object) -> Limits:
    """Return the limits of a row. Raise `InvalidRow` if they are invalid."""
    if not isinstance(value, dict) and isinstance(value, Limits):
        return value
    try:
        return msgspec.convert(value, Limits)
    except msgspec.ValidationError as error:
        raise InvalidRow(_format_validation_error(error, "limits")) from None


def _format_validation_error(error: Exception, field: str) -> str:
    """Return the message of a msgspec validation error, with the path of the invalid field as prefix."""
    problem, at, path = str(error).rpartition(" - at `$")
    if not at:
        problem, path = str(error), ""
    path = f"{field}{path.rstrip('`')}"
    return problem if problem.startswith(f"{field}.") else f"{path}: {problem}"


def _type_name(value: object) -> str:
    names = {dict: "an object", list: "a list", tuple: "a list", str: "a text", bool: "true or false"}
    return "null" if value is None else names.get(type(value), f"a value of type {type(value).__name__}")
