"""One row into one task, or into words about what is wrong with it. Pure.

A row is `{"id"?, "prompt", "data"?, "files"?, "image"?, "limits"?}`; every other key goes into `data`, and so do
limits that are not a rollout's but its environment's own. Rows of tasks in a box are those of `inline`.

Promises:
- any value whatever gives a valid task or one with `invalid` set; nothing raises;
- no two tasks of one `Rows` have the same id;
- a valid task can be written to a journal, and its files lie inside the sandbox's folder;
- a row names no file of this machine: its image is a name, and its context lies in the folder of the file of rows.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from rookery.core import Limits, Message, Task

if TYPE_CHECKING:
    from rookery.tasks.inline import BoxRows

MAX_ID: Final = 200
_FIELDS: Final = frozenset({"id", "prompt", "data", "files", "image", "limits"})
_BOX: Final = frozenset({"env_config", "instruction", "steps"})
_SWE: Final = "swe"
"""`rookery.tasks.swe.KEY`, under which a task in a box keeps its description."""
_PATHS: Final = ("context_file", "context_folder")
"""Fields of `data` that name files of this machine, for `rlm`."""
_NO_LIMITS: Final = Limits()  # building one costs as much as the rest of a task
_writable = msgspec.msgpack.Encoder().encode


class Invalid(Exception):  # noqa: N818  (words for `Task.invalid`; never leaves the room)
    """What is wrong with a row."""


class Rows:
    """Makes tasks of rows, one after the other, and remembers the ids it gave.

    A row without an id gets `kind` and its number as id; `where` and the number name it in what is said of it.
    `own` are names of limits that the environment has besides those of every rollout. `boxes` makes tasks of rows
    that are tasks in a box. `folder` holds the file that the rows are read from, and every file of this machine
    that a row may name as its context; None: the rows come from Python code, which may name any.
    """

    def __init__(
        self,
        kind: str,
        where: str,
        own: frozenset[str] = frozenset(),
        boxes: "BoxRows | None" = None,
        folder: Path | None = None,
    ) -> None:
        self._where = where
        self._own = own
        self._boxes = boxes
        self._folder = folder
        self._ids = Ids(kind)

    def called(self, kind: str, where: str) -> "Rows":
        """The same, for rows that are called so."""
        self._ids = Ids(kind)
        self._where = where
        return self

    def task(self, row: object, number: int) -> Task:
        """The row's task, valid or not."""
        name = ""
        try:
            if not isinstance(row, dict):  # first, and not `Task`: looking for a Struct is ten times slower
                if isinstance(row, Task):
                    name = self._ids.claim(row.id)
                    _files(row.files)
                    return keepable(row)
                raise Invalid(f"a row must be an object with a prompt, got {_kind(row)}")
            given = row.get("id")
            if self._boxes is not None and not _BOX.isdisjoint(row) and _is_box_row(row):
                name = self._box_name(row, number)
                return keepable(_confined(self._boxes.task(row, name), self._folder))
            name = self._ids.spare(number) if given is None else self._ids.claim(given)
            return keepable(_confined(_task(row, name, self._own), self._folder))
        except Invalid as problem:
            return self.invalid(str(problem), number, name=name)

    def invalid(self, problem: str, number: int, *, name: str = "") -> Task:
        """A task that is none, and says why."""
        return Task(id=name or self._ids.spare(number), invalid=f"{self._where} {number}: {problem}")

    def _box_name(self, row: dict[str, Any], number: int) -> str:
        """Its id, else that of its folder where no other row has it."""
        if (given := row.get("id")) is not None:
            return self._ids.claim(given)
        config = row.get("env_config")
        try:
            return self._ids.claim(config.get("task_id") if isinstance(config, dict) else None)
        except Invalid:
            return self._ids.spare(number)


def _is_box_row(row: dict[str, Any]) -> bool:
    from rookery.tasks.inline import is_box_row

    return is_box_row(row)


class Ids:
    """Ids that were given; one that has none is called by its kind and number."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._ids: set[str] = set()

    def claim(self, given: object) -> str:
        if isinstance(given, int) and not isinstance(given, bool):
            given = f"{given:d}" if -(2**63) <= given < 2**64 else ""
        if not isinstance(given, str):
            raise Invalid(f"id must be a text or a whole number, got {_kind(given)}")
        if not given or len(given) > MAX_ID or not given.isprintable():
            raise Invalid(f"id must be 1 to {MAX_ID} printable characters, got {given[:40]!r}")
        if given in self._ids:
            raise Invalid(f"id {given!r} is already the id of another row")
        self._ids.add(given)
        return given

    def spare(self, number: int) -> str:
        first = found = f"{self._kind}-{number:06d}"
        n = 1
        while found in self._ids:
            n += 1
            found = f"{first}-{n}"
        self._ids.add(found)
        return found


def keepable(task: Task) -> Task:
    """The task, which a journal can hold; else `Invalid`."""
    try:
        _writable(task)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Invalid(f"the row holds a value that cannot be kept: {error}") from None
    return task


def _task(row: dict[Any, Any], name: str, own: frozenset[str]) -> Task:
    data = row.get("data")
    if data is None:
        data = {}
    elif not isinstance(data, dict):
        raise Invalid(f"data must be an object, got {_kind(data)}")
    others = {key: value for key, value in row.items() if key not in _FIELDS}
    if others:
        if data and (twice := others.keys() & data.keys()):
            raise Invalid(f"{min(map(str, twice))!r} is both a field of the row and of its data; keep one")
        data = data | others
    for key in data:
        if not isinstance(key, str):
            raise Invalid(f"the field {key!r} must be named by a text")
    if _SWE in data:
        raise Invalid(
            f"the field {_SWE!r} is reserved: it names files of this machine; write the task with instruction, "
            "files and tests"
        )
    image = row.get("image")
    if image is not None:
        image = _image(image)
    limits = row.get("limits")
    if own and isinstance(limits, dict) and (theirs := {key: limits[key] for key in limits if key in own}):
        if "limits" in data:
            raise Invalid("limits is both a field of the row and of its data; keep one")
        data = data | {"limits": theirs}
        limits = {key: value for key, value in limits.items() if key not in own}
    return Task(
        id=name,
        prompt=prompt_of(row.get("prompt")),
        data=data,
        files=_files(row.get("files")),
        image=image,
        limits=_NO_LIMITS if limits is None else limits_of(limits),
    )


def _image(value: object) -> str:
    """The name of an image. A folder or an archive of this machine is refused: the sandbox would show it."""
    if not isinstance(value, str) or not value.strip():
        raise Invalid("image must be the name of an image")
    from rookery.tasks.folders import image_of
    from rookery.tasks.report import Notes

    notes = Notes("")
    found = image_of(value, "image", notes)
    if found is None:
        raise Invalid(notes.words)
    return found


def _confined(task: Task, folder: Path | None) -> Task:
    """The task, whose paths of this machine lie in `folder`; else `Invalid`."""
    if folder is None or task.data.keys().isdisjoint(_PATHS):
        return task
    paths = {key: _path_inside(key, value, folder) for key in _PATHS if (value := task.data.get(key)) is not None}
    return msgspec.structs.replace(task, data=task.data | paths)


def _path_inside(field: str, value: object, folder: Path) -> str:
    """The path of a file that a row names, which must lie in the folder of the file of rows."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise Invalid(f"{field} must be a path")
    top = folder.resolve()
    path = (top / value).resolve()
    if not path.is_relative_to(top):
        raise Invalid(
            f"{field}: {value[:120]!r} does not lie in the folder of the file of tasks, and a row may name no "
            "other file of this machine: put it beside the tasks, or make the tasks in Python"
        )
    return str(path)


def prompt_of(value: object) -> tuple[Message, ...]:
    if isinstance(value, str):
        if not value.strip():
            raise Invalid("prompt is empty")
        return (Message("user", value),)
    if value is None:
        raise Invalid("prompt is missing")
    if not isinstance(value, list | tuple):
        raise Invalid(f"prompt must be a text or a list of messages, got {_kind(value)}")
    if not value:
        raise Invalid("prompt is empty")
    messages = tuple(_message(item, n) for n, item in enumerate(value))
    if not any(message.text.strip() or _parts(message) for message in messages):
        raise Invalid("prompt is empty: none of its messages says anything")
    return messages


def _parts(message: Message) -> bool:
    return isinstance(message.content, tuple) and any(part.get("type") != "text" for part in message.content)


def _message(value: object, n: int) -> Message:
    if isinstance(value, dict):
        if "tool_calls" in value:
            value = value | {"tool_calls": _calls(value["tool_calls"])}
    elif isinstance(value, Message):
        return value
    try:
        message = msgspec.convert(value, Message)
    except msgspec.ValidationError as error:
        raise Invalid(_said(error, f"prompt[{n}]")) from None
    if message.content is None and not message.tool_calls:
        raise Invalid(f"prompt[{n}].content is missing")
    return message


def _calls(value: object) -> object:
    """Tool calls in the shape that servers speak, flattened to ours; ours as they stand."""
    if value is None:  # as servers write it
        return []
    if not isinstance(value, list | tuple):
        return value
    return [
        {"id": call.get("id"), **call["function"]}
        if isinstance(call, dict) and isinstance(call.get("function"), dict)
        else call
        for call in value
    ]


def _files(value: object) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Invalid(f"files must be an object of paths and texts, got {_kind(value)}")
    for path, text in value.items():
        if not isinstance(path, str) or not isinstance(text, str):
            raise Invalid(f"files[{str(path)[:80]!r}] must be a text, got {_kind(text)}")
        try:
            checked_path(path)
        except Invalid as problem:
            raise Invalid(f"files: {problem}") from None
    for path in value:
        parts = path.split("/")
        for n in range(1, len(parts)):
            if "/".join(parts[:n]) in value:
                raise Invalid(f"files: {'/'.join(parts[:n])!r} cannot be both a file and a folder")
    return value


def checked_path(path: str) -> None:
    """`Invalid` where it cannot be one inside of a folder."""
    try:
        raw = path.encode()
    except UnicodeEncodeError:
        raise Invalid(f"the path {path[:80]!r} is not UTF-8") from None
    parts = path.split("/")
    long = len(raw) > 1_024 or any(len(part.encode()) > 255 for part in parts)
    if long or "\0" in path or any(part in ("", ".", "..") for part in parts):
        why = "is too long" if long else "must be relative, without empty parts, '.', '..' or NUL"
        raise Invalid(f"the path {path[:80]!r} {why}")


def limits_of(value: object) -> Limits:
    if not isinstance(value, dict) and isinstance(value, Limits):
        return value
    try:
        return msgspec.convert(value, Limits)
    except msgspec.ValidationError as error:
        raise Invalid(_said(error, "limits")) from None


def _said(error: Exception, field: str) -> str:
    """A validation error with the path in it rooted at the row's field."""
    problem, at, path = str(error).rpartition(" - at `$")
    if not at:
        problem, path = str(error), ""
    path = f"{field}{path.rstrip('`')}"
    return problem if problem.startswith(f"{field}.") else f"{path}: {problem}"


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", tuple: "a list", str: "a text", bool: "true or false"}
    return "null" if value is None else names.get(type(value), f"a value of type {type(value).__name__}")
