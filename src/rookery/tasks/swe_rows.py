"""Parse rows (JSON objects) that describe SWE tasks, with their files inline or with the ID of a task directory.

    {"id": "fix-1", "instruction": "…", "image": "python:3.12", "files": {"a.py": "…"}, "setup": "…",
     "tests": {"test.sh": "…"}, "solution": {"solve.sh": "…"}, "workdir": "/app", "verifier": {"timeout": 60}}
    {"prompt": "…", "env_config": {"task_id": "fix-1", "image": "python:3.12"}}

A file is a string, or `{"text" | "base64" | "link" | "folder": …, "executable": true}`. `tests` and `solution` may
each be a string, the source of their only script. The files of a row are written to the task cache once, into a
directory whose name is derived from their content.

Guarantees:
- A row describes a SWE task if it has `env_config.task_id`, or an `instruction` (its own or that of its first
  step) and no `prompt`. Other rows are parsed by `rows`.
- The same files are stored in the same directory, for all rows, runs and processes.
- The ID of a task directory is a single name, not a path, so it cannot lead out of the directory of task data.
- Symbolic links must be relative and lead to a path of the task.
- The instruction always reaches the model: if the row has a prompt that does not contain it, it is appended.
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
from rookery.tasks.cache import TaskCache
from rookery.tasks.file_trees import DOCKERFILE_PREFIX, walk_files
from rookery.tasks.report import ProblemCollector
from rookery.tasks.rows import InvalidRow, check_relative_path, parse_limits, parse_prompt
from rookery.tasks.sidecar import STEP_FIELDS, TASK_FIELDS, TEST_TIMEOUT_KEY, merge_sidecar
from rookery.tasks.swe import (
    DATA_KEY,
    SOLUTION,
    TESTS,
    WORKSPACE,
    FileMapping,
    SweStep,
    SweTask,
    get_swe_task,
    make_task,
)
from rookery.tasks.symlinks import read_inside, resolve_link
from rookery.tasks.task_folder import MAX_TEXT, parse_env, parse_image, parse_workdir

FORMAT: Final = "rows"
_STEP_KEYS: Final = ("instruction", "files", "setup", "tests", "solution")
_KNOWN_KEYS: Final = frozenset(
    {
        "id",
        "prompt",
        "messages",
        "image",
        "dockerfile",
        "steps",
        TEST_TIMEOUT_KEY,
        *_STEP_KEYS,
        *STEP_FIELDS,
        *TASK_FIELDS,
    }
)
_CREATE_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class RowFile(NamedTuple):
    """A file, symbolic link or empty directory in a row."""

    data: bytes = b""
    """Content, if it is a file."""
    program: bool = False
    """True if the file is executable."""
    link: str = ""
    """Target, if it is a symbolic link; otherwise empty."""
    folder: bool = False
    """True if it is a directory."""


def is_swe_row(row: dict[Any, Any]) -> bool:
    """Return whether a row describes a SWE task: it has `env_config.task_id`, or an instruction and no prompt."""
    config = row.get("env_config")
    if isinstance(config, dict) and "task_id" in config:
        return True
    steps = row.get("steps")
    stepped = isinstance(steps, list) and bool(steps) and isinstance(steps[0], dict) and "instruction" in steps[0]
    return (stepped or "instruction" in row) and "prompt" not in row


class SweRowParser:
    """Parses rows that describe SWE tasks.

    Call `finish` after the last row to write their files to the task cache.
    """

    def __init__(self, find: Callable[[str, ProblemCollector], Task | None]) -> None:
        """Create a parser.

        `find` returns the task of the task directory with a given ID, or reports a problem and returns None.
        """
        self._find = find
        self._cache = TaskCache()
        self._makers: dict[str, Callable[[Path], None]] = {}
        self.problems: list[ProblemCollector] = []

    def task(self, row: dict[str, Any], name: str) -> Task:
        """Return the task that a row describes, with the ID `name`; raise `InvalidRow` if the row is not valid."""
        problems = ProblemCollector(name)
        self.problems.append(problems)
        task = self._task(row, name, problems)
        if task is None or problems.has_errors:
            raise InvalidRow(problems.summary or "it is not a valid task")
        return task

    def finish(self) -> None:
        """Write the files of all valid rows that were parsed to the task cache."""
        if self._makers:
            self._cache.get_or_create_all(self._makers, "the files of the rows")

    def _task(self, row: dict[str, Any], name: str, problems: ProblemCollector) -> Task | None:
        config = row.get("env_config")
        config = config if isinstance(config, dict) else {}
        others = {key: value for key, value in row.items() if key not in _KNOWN_KEYS}
        prompt: tuple[Message, ...] = ()
        content = row.get("prompt", row.get("messages"))
        if content is not None:
            try:
                prompt = parse_prompt(content)
            except InvalidRow as problem:
                problems.error("prompt", str(problem))
        image = row.get("image") or config.get("image")
        if image is not None and not isinstance(image, str):
            problems.error("image", "must be the name of an image")
            image = None
        described: SweTask | None
        if "task_id" in config:
            for key in sorted(row.keys() & {*_STEP_KEYS, "steps", "dockerfile"}):
                problems.error(key, "a row with a task_id takes its files from the directory of that task")
            task_id = config["task_id"]
            if not isinstance(task_id, str):
                problems.error("env_config.task_id", "must be a string")
                return None
            found = self._find(task_id, problems)
            if found is None:
                return None
            described = msgspec.structs.replace(get_swe_task(found), id=name)
            overrides = {key: row[key] for key in (*TASK_FIELDS, TEST_TIMEOUT_KEY) if key in row}
            if TEST_TIMEOUT_KEY in config:
                overrides.setdefault(TEST_TIMEOUT_KEY, config[TEST_TIMEOUT_KEY])
            if overrides:
                described = merge_sidecar(described, overrides, "", problems)
        else:
            described = self._inline(row, name, problems)
        if described is None:
            return None
        if image is not None:
            described = msgspec.structs.replace(described, image=parse_image(image, "image", problems))
        if prompt and described.steps[0].instruction not in "\n".join(message.text for message in prompt):
            prompt = (*prompt, Message("user", described.steps[0].instruction))
        if isinstance(data := others.pop("data", {}), dict):
            others = {**data, **others}
        else:
            problems.error("data", "must be an object")
        limits = NO_LIMITS
        if (content := others.pop("limits", None)) is not None:
            try:
                limits = parse_limits(content)
            except InvalidRow as problem:
                problems.error("limits", str(problem))
        if problems.has_errors:  # limits cannot be derived from invalid values
            return None
        task = make_task(described, prompt)
        return msgspec.structs.replace(task, data={**others, **task.data}, limits=limits.over(task.limits))

    def _inline(self, row: dict[str, Any], name: str, problems: ProblemCollector) -> SweTask | None:
        tables = row.get("steps")
        if tables is None:
            tables = [{key: row[key] for key in (*_STEP_KEYS, *STEP_FIELDS) if key in row and key != "files"}]
        elif not isinstance(tables, list) or not tables or not all(isinstance(one, dict) for one in tables):
            problems.error("steps", "must be a list of objects")
            return None
        workdir = row.get("workdir", WORKSPACE)
        if parse_workdir(workdir, "workdir", problems) is None:
            workdir = WORKSPACE
        # Parsed twice, because the name of the directory depends on its content.
        draft = _RowFiles(ProblemCollector(name))
        draft.add_all(row, tables, Path("/"), workdir)
        folder = self._cache.content / f"row-{draft.digest()}"
        writing = _RowFiles(problems)
        files, image, steps = writing.add_all(row, tables, folder, workdir)
        task = SweTask(
            id=name,
            format=FORMAT,
            folder=str(folder),
            steps=steps,
            image=image,
            files=files,
            workdir=workdir,
            env=parse_env(row.get("env"), "env", problems),
        )
        fields: dict[str, Any] = {
            key: row[key]
            for key in (*TASK_FIELDS, TEST_TIMEOUT_KEY)
            if key in row and key not in ("workdir", "env")
        }
        fields["steps"] = [
            {key: one[key] for key in (*STEP_FIELDS, TEST_TIMEOUT_KEY) if key in one} for one in tables
        ]
        task = merge_sidecar(task, fields, "", problems)
        if not problems.has_errors:
            self._makers[folder.name] = writing.write
        return task


class _RowFiles:
    """The files of one row, by their path in the directory that they are written to."""

    def __init__(self, problems: ProblemCollector) -> None:
        self.problems = problems
        self.files: dict[str, RowFile] = {}

    def add_all(
        self, row: dict[str, Any], tables: list[dict[str, Any]], folder: Path, workdir: str
    ) -> tuple[tuple[FileMapping, ...], str | None, tuple[SweStep, ...]]:
        """Add all files of a row; return the task's file mappings, its image if it has a Dockerfile, and its
        steps.

        `tables` are the steps of the row. `folder` is the directory that the files will be written to.
        """
        files = self.parts("files", row.get("files"), folder, workdir)
        image = None
        if row.get("dockerfile") and self.parts("image", row["dockerfile"], folder, "/", "dockerfile"):
            image = f"{DOCKERFILE_PREFIX}{folder / 'image'}"
            if "image/Dockerfile" not in self.files:
                self.problems.error("dockerfile", "has no Dockerfile")
        stepped = "steps" in row
        steps = [
            self.step(one, folder, f"steps/{number}", f"steps[{number}]." if stepped else "", workdir)
            for number, one in enumerate(tables)
        ]
        return files, image, tuple(steps)

    def digest(self) -> str:
        return hashlib.sha256(msgspec.msgpack.encode(sorted(self.files.items()))).hexdigest()[:40]

    def step(self, one: dict[str, Any], folder: Path, at: str, field: str, workdir: str) -> SweStep:
        instruction = one.get("instruction")
        if not isinstance(instruction, str) or not instruction.strip() or "\0" in instruction:
            self.problems.error(f"{field}instruction", "must be a string that is not empty")
            instruction = ""
        setup = one.get("setup")
        if setup is not None and not isinstance(setup, str):
            self.problems.error(f"{field}setup", "must be the source of a script")
            setup = None
        if setup:
            self.files[f"{at}/setup.sh"] = RowFile(setup.encode("utf-8", "replace"), program=True)
        tests = one.get("tests")
        tests = {"test.sh": {"text": tests, "executable": True}} if isinstance(tests, str) else tests
        solution = one.get("solution")
        solution = {"solve.sh": {"text": solution, "executable": True}} if isinstance(solution, str) else solution
        step = SweStep(
            instruction=instruction,
            files=self.parts(f"{at}/files", one.get("files"), folder, workdir, f"{field}files"),
            tests=self.parts(f"{at}/tests", tests, folder, TESTS, f"{field}tests"),
            solution=self.parts(f"{at}/solution", solution, folder, SOLUTION, f"{field}solution"),
            setup=str(folder / at / "setup.sh") if setup else "",
        )
        verifier = one.get("verifier")
        script = verifier.get("script", "test.sh") if isinstance(verifier, dict) else "test.sh"
        file = self.files.get(f"{at}/tests/{script}")
        if file is None or file.folder or file.link:
            self.problems.error(f"{field}tests", f"has no file {str(script)[:80]}")
        elif not file.data.strip():
            self.problems.error(f"{field}tests", f"{str(script)[:80]} is empty")
        return step

    def parts(self, at: str, value: object, folder: Path, target: str, field: str = "") -> tuple[FileMapping, ...]:
        """Add the files of one field of the row; return their mappings into the sandbox.

        `at` is the subdirectory of `folder` for the files, `target` the directory in the sandbox that relative
        paths belong to, and `field` the name of the field in messages (default: `at`).
        """
        field = field or at
        if value is None or value == {}:
            return ()
        if not isinstance(value, dict):
            self.problems.error(field, "must be an object of paths and files")
            return ()
        mappings: list[FileMapping] = []
        inside = False
        seen: set[str] = set()
        given_files: dict[str, RowFile] = {}
        """The files of this field, by their path in the sandbox without the leading slash."""
        for path, content in value.items():
            if not isinstance(path, str):
                self.problems.error(field, "file names must be strings")
                continue
            absolute = path.startswith("/") and field.endswith("files")
            plain = path[1:] if absolute else path
            try:
                check_relative_path(plain)
                file = _parse_file(content)
            except InvalidRow as problem:
                self.problems.error(field, f"{path[:80]!r}: {problem}")
                continue
            where = f"{at}-root/{plain}" if absolute else f"{at}/{plain}"
            self.files[where] = given_files[plain if absolute else f"{target}/{plain}".lstrip("/")] = file
            seen.add(where)
            if absolute:
                mappings.append(FileMapping(source=str(folder / where), target=path))
            inside = inside or not absolute
        self._check_links(
            {path: file for path, file in given_files.items() if file.link}, given_files, target, field
        )
        for where in seen:
            above = where.split("/")
            if any("/".join(above[:n]) in seen for n in range(1, len(above))):
                self.problems.error(
                    field, f"{where[len(at) + 1 :][:80]!r} is inside something that is not a directory"
                )
        return (FileMapping(source=str(folder / at), target=target), *mappings) if inside else tuple(mappings)

    def _check_links(
        self, links: Mapping[str, RowFile], files: Mapping[str, RowFile], target: str, field: str
    ) -> None:
        """Report symbolic links that lead out of the task.

        `links` and `files` are keyed by path in the sandbox, without the leading slash.
        """
        if not links:
            return
        base = target.strip("/")
        known = set(files)
        for path in files:
            parts = path.split("/")
            known.update("/".join(parts[:n]) for n in range(1, len(parts)))
        targets = {path: file.link for path, file in links.items()}
        for path, link in targets.items():
            found = resolve_link(path, targets)
            inside = found is not None and (not base or found == base or found.startswith(f"{base}/"))
            if found is None or not (inside or found in known):
                shown = f"/{path[:80]}" if base else path[:80]
                self.problems.error(
                    field,
                    (
                        f"{shown!r} is a symbolic link to {link[:80]!r}, which leads out of the task: it "
                        "must be relative and lead to a file of the task"
                    ),
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
                with os.fdopen(os.open(path, _CREATE_FLAGS, 0o755 if file.program else 0o644), "wb") as opened:
                    opened.write(file.data)


def _parse_file(content: object) -> RowFile:
    if isinstance(content, str):
        content = {"text": content}
    if not isinstance(content, dict):
        raise InvalidRow("must be a string, or an object with text, base64, link or folder")
    known = {"text", "base64", "link", "folder"} & content.keys()
    if len(known) != 1 or content.keys() - known - {"executable"}:
        raise InvalidRow("must have one of text, base64, link and folder, and optionally executable")
    (kind,) = known
    value, program = content[kind], content.get("executable", False)
    if kind == "folder":
        return RowFile(folder=True)
    if not isinstance(value, str) or not isinstance(program, bool):
        raise InvalidRow(f"its {kind} must be a string, and executable true or false")
    try:
        if kind == "link":
            value.encode()
            if not value or "\0" in value or len(value) > 1_024:
                raise InvalidRow("its link is empty or invalid")
            return RowFile(link=value)
        return RowFile(value.encode() if kind == "text" else base64.b64decode(value, validate=True), program)
    except (UnicodeEncodeError, binascii.Error) as error:
        raise InvalidRow(f"its {kind} cannot be stored: {error}") from None


# ---- the other way


def make_row(task: SweTask) -> dict[str, Any]:
    """Return a row that describes a task completely, with all its files inline."""
    row: dict[str, Any] = {"id": task.id}
    plain = msgspec.to_builtins(task)
    row.update({key: plain[key] for key in TASK_FIELDS if key in plain})
    if task.image and task.image.startswith(DOCKERFILE_PREFIX):
        row["dockerfile"] = _dump_files(
            (FileMapping(source=task.image.removeprefix(DOCKERFILE_PREFIX), target=""),), ""
        )
    elif task.image:
        row["image"] = task.image
    if task.files:
        row["files"] = _dump_files(task.files, task.workdir)
    steps = []
    for step, fields in zip(task.steps, plain["steps"], strict=True):
        one = {"instruction": step.instruction, **{key: fields[key] for key in STEP_FIELDS if key in fields}}
        if step.setup:
            one["setup"] = read_inside(Path(task.folder), Path(step.setup), MAX_TEXT).decode()
        for key, base in (("files", task.workdir), ("tests", TESTS), ("solution", SOLUTION)):
            if found := getattr(step, key):
                one[key] = _dump_files(found, base)
        steps.append(one)
    return {**row, **steps[0]} if len(steps) == 1 and "files" not in steps[0] else {**row, "steps": steps}


def _dump_files(parts: tuple[FileMapping, ...], base: str) -> Mapping[str, Any]:
    base = base.rstrip("/")
    found: dict[str, Any] = {}
    for piece in walk_files(parts):
        if piece.path == base:
            continue
        inside = piece.path.startswith(f"{base}/")
        found[piece.path[len(base) + 1 :] if inside else piece.path] = _dump_file(piece.source)
    return found


def _dump_file(source: Path) -> Any:
    if source.is_symlink():
        return {"link": str(source.readlink())}
    if source.is_dir():
        return {"folder": True}
    data = source.read_bytes()
    program = bool(source.stat().st_mode & 0o111)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        dumped: dict[str, Any] = {"base64": base64.b64encode(data).decode()}
    else:
        if not program:
            return text
        dumped = {"text": text}
    return {**dumped, "executable": True} if program else dumped


__all__ = ["DATA_KEY", "SweRowParser", "is_swe_row", "make_row"]
