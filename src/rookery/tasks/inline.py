"""Rows of JSON that are tasks in a box: with files in them, or with the id of a task's folder.

    {"id": "fix-1", "instruction": "…", "image": "python:3.12", "files": {"a.py": "…"}, "setup": "…",
     "tests": {"test.sh": "…"}, "solution": {"solve.sh": "…"}, "workdir": "/app", "verifier": {"timeout": 60}}
    {"prompt": "…", "env_config": {"task_id": "fix-1", "image": "python:3.12"}}

A file is a text, or `{"text" | "base64" | "link": …, "executable": true}`. `tests` and `solution` may be the text
of their one script. Files of a row are written out once, under a name made of their content, so that everything
after this sees folders.

Promises:
- a row that is no such row is left alone: `env_config.task_id`, or an `instruction` (its own or its first step's)
  without `prompt`, makes it one;
- the same content is the same folder, for all rows, runs and processes;
- a task's id is one name: it cannot lead out of the folder of task data;
- no link leads out of the task: it is relative, and ends below the folder that its files go to, or at a path that
  the row itself puts there;
- the instruction reaches the model: a prompt of the row that does not hold it is followed by it.
"""

import base64
import binascii
import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from rookery.core import Message, Task
from rookery.core.limits import NO_LIMITS
from rookery.tasks.cache import Cache
from rookery.tasks.folders import MAX_TEXT, env_of, image_of, workdir_of
from rookery.tasks.links import read_inside, resolve_link
from rookery.tasks.parts import DOCKERFILE, pieces
from rookery.tasks.report import Notes
from rookery.tasks.rows import Invalid, checked_path, limits_of, prompt_of
from rookery.tasks.sidecars import STEP_FIELDS, TASK_FIELDS, TEST_TIMEOUT_KEY, merged
from rookery.tasks.swe import KEY, SOLUTION, TESTS, WORKSPACE, Part, SweStep, SweTask, swe_task, task_of

FORMAT: Final = "rows"
_STEP: Final = ("instruction", "files", "setup", "tests", "solution")
_OWN: Final = frozenset(
    {
        "id",
        "prompt",
        "messages",
        "image",
        "dockerfile",
        "steps",
        TEST_TIMEOUT_KEY,
        *_STEP,
        *STEP_FIELDS,
        *TASK_FIELDS,
    }
)
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class File(NamedTuple):
    """What is written at one place."""

    data: bytes = b""
    program: bool = False
    link: str = ""
    folder: bool = False


def is_box_row(row: dict[Any, Any]) -> bool:
    config = row.get("env_config")
    if isinstance(config, dict) and "task_id" in config:
        return True
    steps = row.get("steps")
    stepped = isinstance(steps, list) and bool(steps) and isinstance(steps[0], dict) and "instruction" in steps[0]
    return (stepped or "instruction" in row) and "prompt" not in row


class BoxRows:
    """Makes tasks of such rows. Their files are there after `finish`."""

    def __init__(self, find: Callable[[str, Notes], Task | None]) -> None:
        """`find` gives the task of a folder of task data, or notes why there is none."""
        self._find = find
        self._cache = Cache()
        self._makers: dict[str, Callable[[Path], None]] = {}
        self.notes: list[Notes] = []

    def task(self, row: dict[str, Any], name: str) -> Task:
        """`Invalid` in words."""
        notes = Notes(name)
        self.notes.append(notes)
        task = self._task(row, name, notes)
        if task is None or notes.broken:
            raise Invalid(notes.words or "nothing can be made of it")
        return task

    def finish(self) -> None:
        if self._makers:
            self._cache.all_once(self._makers, "the files of the rows")

    def _task(self, row: dict[str, Any], name: str, notes: Notes) -> Task | None:
        config = row.get("env_config")
        config = config if isinstance(config, dict) else {}
        others = {key: value for key, value in row.items() if key not in _OWN}
        prompt: tuple[Message, ...] = ()
        given = row.get("prompt", row.get("messages"))
        if given is not None:
            try:
                prompt = prompt_of(given)
            except Invalid as problem:
                notes.wrong("prompt", str(problem))
        image = row.get("image") or config.get("image")
        if image is not None and not isinstance(image, str):
            notes.wrong("image", "it must be the name of an image")
            image = None
        made: SweTask | None
        if "task_id" in config:
            for key in sorted(row.keys() & {*_STEP, "steps", "dockerfile"}):
                notes.wrong(key, "a row with a task_id has its files in the folder of that task")
            wanted = config["task_id"]
            if not isinstance(wanted, str):
                notes.wrong("env_config.task_id", "it must be a text")
                return None
            found = self._find(wanted, notes)
            if found is None:
                return None
            made = msgspec.structs.replace(swe_task(found), id=name)
            said = {key: row[key] for key in (*TASK_FIELDS, TEST_TIMEOUT_KEY) if key in row}
            if TEST_TIMEOUT_KEY in config:
                said.setdefault(TEST_TIMEOUT_KEY, config[TEST_TIMEOUT_KEY])
            if said:
                made = merged(made, said, "", notes)
        else:
            made = self._inline(row, name, notes)
        if made is None:
            return None
        if image is not None:
            made = msgspec.structs.replace(made, image=image_of(image, "image", notes))
        if prompt and made.steps[0].instruction not in "\n".join(message.text for message in prompt):
            prompt = (*prompt, Message("user", made.steps[0].instruction))
        if isinstance(data := others.pop("data", {}), dict):
            others = {**data, **others}
        else:
            notes.wrong("data", "it must be an object")
        limits = NO_LIMITS
        if (given := others.pop("limits", None)) is not None:
            try:
                limits = limits_of(given)
            except Invalid as problem:
                notes.wrong("limits", str(problem))
        if notes.broken:  # no limits follow from values that were refused
            return None
        task = task_of(made, prompt)
        return msgspec.structs.replace(task, data={**others, **task.data}, limits=limits.over(task.limits))

    def _inline(self, row: dict[str, Any], name: str, notes: Notes) -> SweTask | None:
        tables = row.get("steps")
        if tables is None:
            tables = [{key: row[key] for key in (*_STEP, *STEP_FIELDS) if key in row and key != "files"}]
        elif not isinstance(tables, list) or not tables or not all(isinstance(one, dict) for one in tables):
            notes.wrong("steps", "it must be a list of objects")
            return None
        workdir = row.get("workdir", WORKSPACE)
        if workdir_of(workdir, "workdir", notes) is None:
            workdir = WORKSPACE
        # Twice: what the folder is called follows from what will be in it.
        draft = _Writing(Notes(name))
        draft.all(row, tables, Path("/"), workdir)
        place = self._cache.content / f"row-{draft.digest()}"
        writing = _Writing(notes)
        files, image, steps = writing.all(row, tables, place, workdir)
        task = SweTask(
            id=name,
            format=FORMAT,
            folder=str(place),
            steps=steps,
            image=image,
            files=files,
            workdir=workdir,
            env=env_of(row.get("env"), "env", notes),
        )
        said: dict[str, Any] = {
            key: row[key]
            for key in (*TASK_FIELDS, TEST_TIMEOUT_KEY)
            if key in row and key not in ("workdir", "env")
        }
        said["steps"] = [
            {key: one[key] for key in (*STEP_FIELDS, TEST_TIMEOUT_KEY) if key in one} for one in tables
        ]
        task = merged(task, said, "", notes)
        if not notes.broken:
            self._makers[place.name] = writing.write
        return task


class _Writing:
    """What has to be written for one row."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        self.files: dict[str, File] = {}

    def all(
        self, row: dict[str, Any], tables: list[dict[str, Any]], place: Path, workdir: str
    ) -> tuple[tuple[Part, ...], str | None, tuple[SweStep, ...]]:
        """The files, the image where it is built, and the steps of a task whose folder is `place`."""
        files = self.parts("files", row.get("files"), place, workdir)
        image = None
        if row.get("dockerfile") and self.parts("image", row["dockerfile"], place, "/", "dockerfile"):
            image = f"{DOCKERFILE}{place / 'image'}"
            if "image/Dockerfile" not in self.files:
                self.notes.wrong("dockerfile", "it has no Dockerfile")
        stepped = "steps" in row
        steps = [
            self.step(one, place, f"steps/{number}", f"steps[{number}]." if stepped else "", workdir)
            for number, one in enumerate(tables)
        ]
        return files, image, tuple(steps)

    def digest(self) -> str:
        return hashlib.sha256(msgspec.msgpack.encode(sorted(self.files.items()))).hexdigest()[:40]

    def step(self, one: dict[str, Any], place: Path, at: str, field: str, workdir: str) -> SweStep:
        instruction = one.get("instruction")
        if not isinstance(instruction, str) or not instruction.strip() or "\0" in instruction:
            self.notes.wrong(f"{field}instruction", "it must be a text that says something")
            instruction = ""
        setup = one.get("setup")
        if setup is not None and not isinstance(setup, str):
            self.notes.wrong(f"{field}setup", "it must be the text of a script")
            setup = None
        if setup:
            self.files[f"{at}/setup.sh"] = File(setup.encode("utf-8", "replace"), program=True)
        tests = one.get("tests")
        tests = {"test.sh": {"text": tests, "executable": True}} if isinstance(tests, str) else tests
        solution = one.get("solution")
        solution = {"solve.sh": {"text": solution, "executable": True}} if isinstance(solution, str) else solution
        made = SweStep(
            instruction=instruction,
            files=self.parts(f"{at}/files", one.get("files"), place, workdir, f"{field}files"),
            tests=self.parts(f"{at}/tests", tests, place, TESTS, f"{field}tests"),
            solution=self.parts(f"{at}/solution", solution, place, SOLUTION, f"{field}solution"),
            setup=str(place / at / "setup.sh") if setup else "",
        )
        verifier = one.get("verifier")
        script = verifier.get("script", "test.sh") if isinstance(verifier, dict) else "test.sh"
        file = self.files.get(f"{at}/tests/{script}")
        if file is None or file.folder or file.link:
            self.notes.wrong(f"{field}tests", f"they have no file {str(script)[:80]}")
        elif not file.data.strip():
            self.notes.wrong(f"{field}tests", f"their {str(script)[:80]} is empty")
        return made

    def parts(self, at: str, value: object, place: Path, target: str, field: str = "") -> tuple[Part, ...]:
        """Puts files below a folder, and says what goes where in the box."""
        field = field or at
        if value is None or value == {}:
            return ()
        if not isinstance(value, dict):
            self.notes.wrong(field, "it must be an object of paths and files")
            return ()
        made: list[Part] = []
        inside = False
        seen: set[str] = set()
        given_files: dict[str, File] = {}
        """By path in the box, without the leading slash."""
        for path, given in value.items():
            if not isinstance(path, str):
                self.notes.wrong(field, "its names must be texts")
                continue
            absolute = path.startswith("/") and field.endswith("files")
            plain = path[1:] if absolute else path
            try:
                checked_path(plain)
                file = _file(given)
            except Invalid as problem:
                self.notes.wrong(field, f"{path[:80]!r}: {problem}")
                continue
            where = f"{at}-root/{plain}" if absolute else f"{at}/{plain}"
            self.files[where] = given_files[plain if absolute else f"{target}/{plain}".lstrip("/")] = file
            seen.add(where)
            if absolute:
                made.append(Part(source=str(place / where), target=path))
            inside = inside or not absolute
        self._check_links(
            {path: file for path, file in given_files.items() if file.link}, given_files, target, field
        )
        for where in seen:
            above = where.split("/")
            if any("/".join(above[:n]) in seen for n in range(1, len(above))):
                self.notes.wrong(field, f"{where[len(at) + 1 :][:80]!r} lies in something that is no folder")
        return (Part(source=str(place / at), target=target), *made) if inside else tuple(made)

    def _check_links(self, links: Mapping[str, File], files: Mapping[str, File], target: str, field: str) -> None:
        """Note every link that leads out of the task; paths are those in the box."""
        if not links:
            return
        base = target.strip("/")
        known = set(files)
        for path in files:
            parts = path.split("/")
            known.update("/".join(parts[:n]) for n in range(1, len(parts)))
        said = {path: file.link for path, file in links.items()}
        for path, link in said.items():
            found = resolve_link(path, said)
            inside = found is not None and (not base or found == base or found.startswith(f"{base}/"))
            if found is None or not (inside or found in known):
                shown = f"/{path[:80]}" if base else path[:80]
                self.notes.wrong(
                    field,
                    f"{shown!r} is a link to {link[:80]!r}, which leads out of the task: a link must be relative "
                    "and lead to a file of the task",
                )

    def write(self, folder: Path) -> None:
        for where, file in self.files.items():
            path = folder / where
            path.parent.mkdir(parents=True, exist_ok=True)
            if file.link:
                path.symlink_to(file.link)
            elif file.folder:
                path.mkdir(exist_ok=True)
            else:
                with os.fdopen(os.open(path, _NEW, 0o755 if file.program else 0o644), "wb") as opened:
                    opened.write(file.data)


def _file(given: object) -> File:
    if isinstance(given, str):
        given = {"text": given}
    if not isinstance(given, dict):
        raise Invalid("it must be a text, or an object with text, base64, link or folder")
    known = {"text", "base64", "link", "folder"} & given.keys()
    if len(known) != 1 or given.keys() - known - {"executable"}:
        raise Invalid("it must have one of text, base64, link and folder, and nothing else but executable")
    (kind,) = known
    value, program = given[kind], given.get("executable", False)
    if kind == "folder":
        return File(folder=True)
    if not isinstance(value, str) or not isinstance(program, bool):
        raise Invalid(f"its {kind} must be a text, and executable true or false")
    try:
        if kind == "link":
            value.encode()
            if not value or "\0" in value or len(value) > 1_024:
                raise Invalid("its link leads nowhere")
            return File(link=value)
        return File(value.encode() if kind == "text" else base64.b64decode(value, validate=True), program)
    except (UnicodeEncodeError, binascii.Error) as error:
        raise Invalid(f"its {kind} cannot be kept: {error}") from None


# ---- the other way


def row_of(task: SweTask) -> dict[str, Any]:
    """A row that holds everything of a task."""
    row: dict[str, Any] = {"id": task.id}
    plain = msgspec.to_builtins(task)
    row.update({key: plain[key] for key in TASK_FIELDS if key in plain})
    if task.image and task.image.startswith(DOCKERFILE):
        row["dockerfile"] = _packed((Part(source=task.image.removeprefix(DOCKERFILE), target=""),), "")
    elif task.image:
        row["image"] = task.image
    if task.files:
        row["files"] = _packed(task.files, task.workdir)
    steps = []
    for step, said in zip(task.steps, plain["steps"], strict=True):
        one = {"instruction": step.instruction, **{key: said[key] for key in STEP_FIELDS if key in said}}
        if step.setup:
            one["setup"] = read_inside(Path(task.folder), Path(step.setup), MAX_TEXT).decode()
        for key, base in (("files", task.workdir), ("tests", TESTS), ("solution", SOLUTION)):
            if found := getattr(step, key):
                one[key] = _packed(found, base)
        steps.append(one)
    return {**row, **steps[0]} if len(steps) == 1 and "files" not in steps[0] else {**row, "steps": steps}


def _packed(parts: tuple[Part, ...], base: str) -> Mapping[str, Any]:
    base = base.rstrip("/")
    found: dict[str, Any] = {}
    for piece in pieces(parts):
        if piece.path == base:
            continue
        inside = piece.path.startswith(f"{base}/")
        found[piece.path[len(base) + 1 :] if inside else piece.path] = _value(piece.source)
    return found


def _value(source: Path) -> Any:
    if source.is_symlink():
        return {"link": str(source.readlink())}
    if source.is_dir():
        return {"folder": True}
    data = source.read_bytes()
    program = bool(source.stat().st_mode & 0o111)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        made: dict[str, Any] = {"base64": base64.b64encode(data).decode()}
    else:
        if not program:
            return text
        made = {"text": text}
    return {**made, "executable": True} if program else made


__all__ = ["KEY", "BoxRows", "is_box_row", "row_of"]
