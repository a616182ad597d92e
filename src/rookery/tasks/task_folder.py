"""Read the directory of one task, which comes from an untrusted source.

Guarantees:
- Nothing outside the directory is read. A symbolic link that leads outside is an error and is not followed.
- The size of text files and file trees is limited, and FIFOs and devices are never opened.
- The image of a task is always the name of a container image, never a directory or archive of this machine,
  because a sandbox would expose its content.
- File names are treated as data and never become part of a command.
"""

import os
import re
import stat
from pathlib import Path, PurePosixPath
from typing import Any, Final

from rookery.core import UsageError
from rookery.tasks.report import ProblemCollector
from rookery.tasks.swe import LOGS, SOLUTION, TESTS, FileMapping
from rookery.tasks.symlinks import leads_outside, read_inside, real_path

MAX_TEXT: Final = 4 << 20
MAX_ENTRIES: Final = 200_000
MAX_BYTES: Final = 8 << 30
MAX_DEPTH: Final = 100
MAX_PATH: Final = 1_024
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,63})?", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)


class TaskFolder:
    """The directory of one task. Its methods read files and report problems to a `ProblemCollector`."""

    def __init__(self, path: Path, problems: ProblemCollector) -> None:
        self.path = path
        self.problems = problems
        self._real = real_path(path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def has(self, name: str) -> bool:
        """Return whether an entry of that name exists; a broken symbolic link counts."""
        return os.path.lexists(self.path / name)

    def text(self, name: str, *, needed: bool = False, empty: bool = False) -> str | None:
        """Return the content of a UTF-8 text file, or None if it is missing or invalid.

        Problems are reported. A missing file is a problem only with `needed`; an empty file is valid only with
        `empty`.
        """
        status = self._stat(name)
        if status is None:
            if needed and not self.has(name):
                self.problems.error(name, "is missing")
            return None
        if not stat.S_ISREG(status.st_mode):
            self.problems.error(name, "is not a regular file")
            return None
        try:
            data = read_inside(self.path, self.path / name, MAX_TEXT + 1)
        except OSError as error:
            self.problems.error(name, f"cannot be read: {error.strerror or type(error).__name__}")
            return None
        if len(data) > MAX_TEXT:
            self.problems.error(name, f"is larger than {MAX_TEXT >> 20} MB")
            return None
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            self.problems.error(name, f"is not UTF-8 (byte {error.start + 1})")
            return None
        if "\0" in text:
            self.problems.error(name, "contains NUL")
            return None
        if not empty and not text.strip():
            self.problems.error(name, "is empty")
            return None
        return text.removeprefix("\ufeff")

    def script(self, name: str) -> str:
        """Return the path of a script; report a problem and return an empty string if it is not a text file."""
        return self._inside(name) if self.text(name, empty=True) is not None else ""

    def part(self, name: str, target: str) -> tuple[FileMapping, ...]:
        """Return the mapping of a subdirectory to the path `target` in the sandbox.

        Return an empty tuple if the subdirectory is missing or empty. Entries that cannot be copied are reported.
        """
        status = self._stat(name)
        if status is None:
            return ()
        if not stat.S_ISDIR(status.st_mode):
            self.problems.error(name, "is not a directory")
            return ()
        here = self._inside(name)
        if not check_tree(Path(here), name, self.problems, self._real):
            return ()
        return (FileMapping(source=here, target=target),)

    def _inside(self, name: str) -> str:
        """Return the path of an entry of this directory, with symbolic links below the directory resolved."""
        return str(self.path / real_path(self.path / name).relative_to(self._real))

    def _stat(self, name: str) -> os.stat_result | None:
        path = self.path / name
        try:
            os.lstat(path)
            if not real_path(path).is_relative_to(self._real):
                self.problems.error(name, "is a symbolic link that leads out of the task")
                return None
            return path.stat()
        except (FileNotFoundError, NotADirectoryError):
            if self.has(name):
                self.problems.error(name, "is a broken symbolic link")
            return None
        except (OSError, ValueError) as error:
            words = error.strerror if isinstance(error, OSError) else None
            self.problems.error(name, f"cannot be inspected: {words or type(error).__name__}")
            return None


def check_tree(top: Path, field: str, problems: ProblemCollector, inside: Path | None = None) -> bool:
    """Report every entry of a file tree that cannot be copied into a sandbox; return whether the tree has entries.

    `field` is the name of the tree in messages. `inside` is the real path of the directory that no symbolic link
    may lead out of; None means `top` itself.
    """
    inside = real_path(top) if inside is None else inside
    todo: list[tuple[str, int]] = [(str(top), 0)]
    entries = size = 0
    while todo:
        here, depth = todo.pop()
        try:
            with os.scandir(here) as scan:
                listed = sorted(scan, key=lambda entry: entry.name)
        except OSError as error:
            problems.error(
                field, f"{_quote_relative(here, top)} cannot be read: {error.strerror or type(error).__name__}"
            )
            continue
        for entry in listed:
            entries += 1
            where = _quote_relative(entry.path, top)
            try:
                entry.name.encode()
                info = entry.stat(follow_symlinks=False)
                if stat.S_ISLNK(info.st_mode) and leads_outside(Path(entry.path), inside):
                    problems.error(field, f"{where} is a symbolic link that is absolute or leads out of the task")
            except UnicodeEncodeError:
                problems.error(field, f"the name {where} is not UTF-8")
                continue
            except OSError as error:
                problems.error(field, f"{where} cannot be inspected: {error.strerror or type(error).__name__}")
                continue
            size += info.st_size
            if stat.S_ISDIR(info.st_mode):
                if depth >= MAX_DEPTH:
                    problems.error(field, f"directories are nested more than {MAX_DEPTH} deep")
                    return True
                todo.append((entry.path, depth + 1))
            elif not (stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode)):
                problems.error(field, f"{where} is neither a file nor a directory nor a symbolic link")
            if entries > MAX_ENTRIES or size > MAX_BYTES:
                problems.error(
                    field, f"contains more than {MAX_ENTRIES:,} entries or more than {MAX_BYTES >> 30} GB of files"
                )
                return True
    return entries > 0


def _quote_relative(path: str, top: Path) -> str:
    return repr(os.path.relpath(path, top))[:120]


def parse_image(text: str, field: str, problems: ProblemCollector) -> str | None:
    """Return the name of a container image, or report a problem and return None if it is invalid.

    Names of directories and archives of this machine are invalid.
    """
    from rookery.sandboxes.images.references import parse_reference

    text = text.strip()
    here = os.path.lexists(text)
    try:
        # A name that is also a local path is parsed as the name of a registry image, never as the path.
        reference = parse_reference(f"registry:{text}" if here else text)
    except UsageError:
        reference = None
    if reference is None or reference.kind not in ("name", "engine", "registry"):
        problems.error(
            field,
            (
                f"{text[:120]!r} is not the name of an image like python:3.12; a task may not name "
                "directories and archives of this machine"
            ),
        )
        return None
    return reference.name if here else text


def parse_path(value: object, field: str, problems: ProblemCollector, *, base: str = "") -> str | None:
    """Return an absolute path in the sandbox, or report a problem and return None if it is invalid.

    A relative path is valid only with `base`, the directory that it is relative to.
    """
    if (
        not isinstance(value, str)
        or not value
        or "\0" in value
        or len(value.encode("utf-8", "replace")) > MAX_PATH
    ):
        problems.error(field, "must be a path in the sandbox, like /app")
        return None
    path = PurePosixPath(base, value) if base else PurePosixPath(value)
    try:
        value.encode()
    except UnicodeEncodeError:
        problems.error(field, "is not UTF-8")
        return None
    if not path.is_absolute() or ".." in path.parts:
        problems.error(field, f"{value[:120]!r} must be absolute and without '..'")
        return None
    return "/" + "/".join(part for part in path.parts if part.strip("/"))


def parse_workdir(value: object, field: str, problems: ProblemCollector) -> str | None:
    """Return a working directory in the sandbox, or report a problem and return None if it is invalid.

    `/tests`, `/solution`, `/logs` and directories below them are reserved and invalid.
    """
    path = parse_path(value, field, problems)
    if path is not None and any(path == own or path.startswith(f"{own}/") for own in (TESTS, SOLUTION, LOGS)):
        problems.error(
            field, f"{path} is reserved for tests, solutions and verdicts: choose another working directory"
        )
        return None
    return path


def parse_env(value: object, field: str, problems: ProblemCollector) -> dict[str, str]:
    """Return environment variables by name, without the invalid ones, which are reported.

    Numbers and booleans become strings.
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        problems.error(field, "must be a table of names and strings")
        return {}
    env = {}
    for name, item in value.items():
        if not isinstance(name, str) or not name or "=" in name or not name.isprintable() or len(name) > 200:
            problems.error(field, f"{str(name)[:80]!r} cannot be the name of a variable")
        elif isinstance(item, bool | int | float):
            env[name] = str(item).lower() if isinstance(item, bool) else str(item)
        elif not isinstance(item, str) or "\0" in item:
            problems.error(f"{field}.{name}", "must be a string without NUL")
        else:
            env[name] = item
    return env


def parse_user(value: object, field: str, problems: ProblemCollector) -> str | None:
    """Return a user name or numeric ID, optionally with `:GROUP`, as a string.

    Return None if it is not set or is invalid; an invalid one is reported.
    """
    if value is None:
        return None
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not _USER.fullmatch(text):
        problems.error(field, f"{str(value)[:80]!r} is not the name or number of a user")
        return None
    return text


def parse_name(value: object, field: str, problems: ProblemCollector) -> str | None:
    """Return a name that is safe as the name of a directory, or report a problem and return None."""
    if not isinstance(value, str) or not _NAME.fullmatch(value) or ".." in value:
        shown = repr(value)[:80]
        problems.error(
            field,
            f"{shown} is not a valid name: use letters, digits, '.', '_', '-', and begin with a letter or digit",
        )
        return None
    return value


def parse_number(
    value: Any, field: str, problems: ProblemCollector, *, most: float = 1e9, zero: bool = False
) -> float | None:
    """Return a number above 0 and up to `most`; with `zero`, 0 is valid too.

    Return None if the value is None or is invalid; an invalid one is reported.
    """
    if value is None:
        return None
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not (0 <= value <= most if zero else 0 < value <= most):
        problems.error(field, f"must be a number above 0, got {str(value)[:40]!r}")
        return None
    return float(value)
