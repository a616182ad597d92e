"""Reading one task's folder, which somebody else wrote.

Promises:
- nothing outside of the folder is read: a link that leads out of it is a problem, and is not followed;
- what is read is bounded, and a FIFO or a device is never opened;
- an image that a task names is a name: never a folder or an archive of this machine, which a box would show;
- names are data: none is ever part of a command.
"""

import os
import re
import stat
from pathlib import Path, PurePosixPath
from typing import Any, Final

from rookery.core import UsageError
from rookery.tasks.links import leads_out, read_inside, real_path
from rookery.tasks.report import Notes
from rookery.tasks.swe import LOGS, SOLUTION, TESTS, Part

MAX_TEXT: Final = 4 << 20
MAX_ENTRIES: Final = 200_000
MAX_BYTES: Final = 8 << 30
MAX_DEPTH: Final = 100
MAX_PATH: Final = 1_024
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,63})?", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)


class Folder:
    """A task's folder and what is found about it."""

    def __init__(self, path: Path, notes: Notes) -> None:
        self.path = path
        self.notes = notes
        self._real = real_path(path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def below(self, name: str) -> "Folder":
        return Folder(self.path / name, self.notes)

    def has(self, name: str) -> bool:
        """Whether anything of that name is there, a broken link included."""
        return os.path.lexists(self.path / name)

    def text(self, name: str, *, needed: bool = False, empty: bool = False) -> str | None:
        """A text; what is wrong with it is noted. `empty`: may it be?"""
        found = self._stat(name)
        if found is None:
            if needed and not self.has(name):
                self.notes.wrong(name, "it is missing")
            return None
        if not stat.S_ISREG(found.st_mode):
            self.notes.wrong(name, "it is no plain file")
            return None
        try:
            data = read_inside(self.path, self.path / name, MAX_TEXT + 1)
        except OSError as error:
            self.notes.wrong(name, f"it cannot be read: {error.strerror or type(error).__name__}")
            return None
        if len(data) > MAX_TEXT:
            self.notes.wrong(name, f"it is larger than {MAX_TEXT >> 20} MB")
            return None
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            self.notes.wrong(name, f"it is not UTF-8 (byte {error.start + 1})")
            return None
        if "\0" in text:
            self.notes.wrong(name, "it holds a NUL")
            return None
        if not empty and not text.strip():
            self.notes.wrong(name, "it is empty")
            return None
        return text.removeprefix("\ufeff")

    def script(self, name: str, *, needed: bool = False) -> str:
        """Return the path of a script; empty where there is none."""
        return self._inside(name) if self.text(name, needed=needed, empty=True) is not None else ""

    def part(self, name: str, target: str) -> tuple[Part, ...]:
        """Return a folder that goes into the box; nothing where it is missing or empty."""
        found = self._stat(name)
        if found is None:
            return ()
        if not stat.S_ISDIR(found.st_mode):
            self.notes.wrong(name, "it is no folder")
            return ()
        here = self._inside(name)
        if not check_tree(Path(here), name, self.notes, self._real):
            return ()
        return (Part(source=here, target=target),)

    def _inside(self, name: str) -> str:
        """Return a path below the folder that leads through no link, to what `name` leads to inside of it."""
        return str(self.path / real_path(self.path / name).relative_to(self._real))

    def _stat(self, name: str) -> os.stat_result | None:
        path = self.path / name
        try:
            os.lstat(path)
            if not real_path(path).is_relative_to(self._real):
                self.notes.wrong(name, "it is a link that leads out of the task")
                return None
            return path.stat()
        except (FileNotFoundError, NotADirectoryError):
            if self.has(name):
                self.notes.wrong(name, "it is a link that leads nowhere")
            return None
        except (OSError, ValueError) as error:
            words = error.strerror if isinstance(error, OSError) else None
            self.notes.wrong(name, f"it cannot be looked at: {words or type(error).__name__}")
            return None


def check_tree(top: Path, field: str, notes: Notes, inside: Path | None = None) -> bool:
    """Note everything below a folder that cannot be moved into a box, and return whether anything is in it.

    `inside`: the real path of the folder that no symbolic link may lead out of; None: `top` itself.
    """
    inside = real_path(top) if inside is None else inside
    todo: list[tuple[str, int]] = [(str(top), 0)]
    entries = size = 0
    while todo:
        here, depth = todo.pop()
        try:
            with os.scandir(here) as listed:
                found = sorted(listed, key=lambda entry: entry.name)
        except OSError as error:
            notes.wrong(field, f"{_below(here, top)} cannot be read: {error.strerror or type(error).__name__}")
            continue
        for entry in found:
            entries += 1
            where = _below(entry.path, top)
            try:
                entry.name.encode()
                info = entry.stat(follow_symlinks=False)
                if stat.S_ISLNK(info.st_mode) and leads_out(Path(entry.path), inside):
                    notes.wrong(field, f"{where} is a link that is absolute or leads out of the task")
            except UnicodeEncodeError:
                notes.wrong(field, f"the name {where} is not UTF-8")
                continue
            except OSError as error:
                notes.wrong(field, f"{where} cannot be looked at: {error.strerror or type(error).__name__}")
                continue
            size += info.st_size
            if stat.S_ISDIR(info.st_mode):
                if depth >= MAX_DEPTH:
                    notes.wrong(field, f"its folders are more than {MAX_DEPTH} deep")
                    return True
                todo.append((entry.path, depth + 1))
            elif not (stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode)):
                notes.wrong(field, f"{where} is neither a file nor a folder nor a link")
            if entries > MAX_ENTRIES or size > MAX_BYTES:
                notes.wrong(field, f"it holds more than {MAX_ENTRIES:,} entries or {MAX_BYTES >> 30} GB")
                return True
    return entries > 0


def _below(path: str, top: Path) -> str:
    return repr(os.path.relpath(path, top))[:120]


def image_of(text: str, field: str, notes: Notes) -> str | None:
    """A name of an image that a task gave."""
    from rookery.sandboxes.images.references import parse

    text = text.strip()
    here = os.path.lexists(text)
    try:
        # A name that is also a path here would mean that path: it is looked at as a registry would.
        found = parse(f"registry:{text}" if here else text)
    except UsageError:
        found = None
    if found is None or found.kind not in ("name", "engine", "registry"):
        notes.wrong(
            field,
            f"{text[:120]!r} cannot be the name of an image: names are like python:3.12; a task may not name "
            "folders and archives of this machine",
        )
        return None
    return found.name if here else text


def path_of(value: object, field: str, notes: Notes, *, base: str = "") -> str | None:
    """A path in the box: absolute, and none of those that are the grader's."""
    if (
        not isinstance(value, str)
        or not value
        or "\0" in value
        or len(value.encode("utf-8", "replace")) > MAX_PATH
    ):
        notes.wrong(field, "it must be a path in the box, like /app")
        return None
    path = PurePosixPath(base, value) if base else PurePosixPath(value)
    try:
        value.encode()
    except UnicodeEncodeError:
        notes.wrong(field, "it is not UTF-8")
        return None
    if not path.is_absolute() or ".." in path.parts:
        notes.wrong(field, f"{value[:120]!r} must be absolute and without '..'")
        return None
    return "/" + "/".join(part for part in path.parts if part.strip("/"))


def workdir_of(value: object, field: str, notes: Notes) -> str | None:
    found = path_of(value, field, notes)
    if found is not None and any(found == own or found.startswith(f"{own}/") for own in (TESTS, SOLUTION, LOGS)):
        notes.wrong(field, f"{found} is where tests, solutions and verdicts lie: the agent cannot work there")
        return None
    return found


def env_of(value: object, field: str, notes: Notes) -> dict[str, str]:
    """Variables; numbers and truth values as a shell would be given them."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        notes.wrong(field, "it must be a table of names and texts")
        return {}
    env = {}
    for name, given in value.items():
        if not isinstance(name, str) or not name or "=" in name or not name.isprintable() or len(name) > 200:
            notes.wrong(field, f"{str(name)[:80]!r} cannot be the name of a variable")
        elif isinstance(given, bool | int | float):
            env[name] = str(given).lower() if isinstance(given, bool) else str(given)
        elif not isinstance(given, str) or "\0" in given:
            notes.wrong(f"{field}.{name}", "it must be a text without NUL")
        else:
            env[name] = given
    return env


def user_of(value: object, field: str, notes: Notes) -> str | None:
    if value is None:
        return None
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not _USER.fullmatch(text):
        notes.wrong(field, f"{str(value)[:80]!r} cannot be the name or number of a user")
        return None
    return text


def name_of(value: object, field: str, notes: Notes) -> str | None:
    """One that is also a folder's."""
    if not isinstance(value, str) or not _NAME.fullmatch(value) or ".." in value:
        said = repr(value)[:80]
        notes.wrong(field, f"{said} cannot be a name: letters, digits, '.', '_' and '-', the first no '-'")
        return None
    return value


def number_of(value: Any, field: str, notes: Notes, *, most: float = 1e9, zero: bool = False) -> float | None:
    """A finite number above 0 (`zero`: or 0)."""
    if value is None:
        return None
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not (0 <= value <= most if zero else 0 < value <= most):
        notes.wrong(field, f"it must be a number above 0, got {str(value)[:40]!r}")
        return None
    return float(value)
