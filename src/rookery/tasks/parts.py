"""The files of a task as trees: laid out, told apart, and described so that two tasks can be compared.

Promises:
- a link is copied as a link and never followed;
- two descriptions are equal exactly where a box and a grader would be given the same, wherever the folders lie.
"""

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rookery.core import UsageError
from rookery.tasks.swe import Part, SweTask

DOCKERFILE = "dockerfile:"
_FILES = ("files", "tests", "solution")


class Piece(NamedTuple):
    """One file, link or empty folder of a part."""

    path: str
    """In the box."""
    source: Path
    info: os.stat_result


def pieces(parts: Sequence[Part]) -> Iterator[Piece]:
    """Everything in parts; a later one of the same path goes over an earlier one."""
    for part in parts:
        yield from _pieces(Path(part.source), part.target.rstrip("/"))


def _pieces(source: Path, target: str) -> Iterator[Piece]:
    info = source.lstat()
    if not stat.S_ISDIR(info.st_mode):
        yield Piece(target, source, info)
        return
    names = sorted(entry.name for entry in source.iterdir())
    if not names:
        yield Piece(target, source, info)
    for name in names:
        yield from _pieces(source / name, f"{target}/{name}")


def lay_out(parts: Sequence[Part], base: str, folder: Path) -> None:
    """Copies what goes below `base` into a folder. `UsageError` for what goes elsewhere."""
    for piece in pieces(parts):
        if piece.path == base and stat.S_ISDIR(piece.info.st_mode):
            continue
        if not piece.path.startswith(f"{base}/"):
            raise UsageError(f"it puts files at {piece.path[:120]!r}, and the format has a place for {base} alone")
        target = folder / piece.path[len(base) + 1 :]
        target.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(target) and not stat.S_ISDIR(piece.info.st_mode):
            target.unlink()
        if stat.S_ISLNK(piece.info.st_mode):
            target.symlink_to(piece.source.readlink())
        elif stat.S_ISDIR(piece.info.st_mode):
            target.mkdir(exist_ok=True)
        else:
            shutil.copyfile(piece.source, target, follow_symlinks=False)
            target.chmod(0o755 if piece.info.st_mode & 0o111 else 0o644)


def tree(parts: Sequence[Part]) -> dict[str, str]:
    """Path in the box → what is there."""
    return {piece.path: _content(piece) for piece in pieces(parts)}


def _content(piece: Piece) -> str:
    if stat.S_ISLNK(piece.info.st_mode):
        return f"link {piece.source.readlink()}"
    if stat.S_ISDIR(piece.info.st_mode):
        return "folder"
    with piece.source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"{'program' if piece.info.st_mode & 0o111 else 'file'} {digest}"


def described(task: SweTask) -> dict[str, Any]:
    """All of a task but where it lies and what format it came in."""
    said: dict[str, Any] = {
        name: msgspec.to_builtins(getattr(task, name))
        for name in task.__struct_fields__
        if name not in ("format", "folder", "steps", "files", "image")
    }
    image = task.image
    if image is not None and image.startswith(DOCKERFILE):
        said["image"] = {"built": tree((Part(source=image.removeprefix(DOCKERFILE), target=""),))}
    else:
        said["image"] = image
    said["steps"] = []
    for number, step in enumerate(task.steps):
        one: dict[str, Any] = {
            name: msgspec.to_builtins(getattr(step, name))
            for name in step.__struct_fields__
            if name not in (*_FILES, "setup")
        }
        one["verifier"] = {
            name: msgspec.to_builtins(getattr(step.verifier, name)) for name in step.verifier.__struct_fields__
        }
        # What lies in the box from the start and what comes with the first step is the same to the agent.
        one["files"] = tree((*(task.files if not number else ()), *step.files))
        one["tests"], one["solution"] = tree(step.tests), tree(step.solution)
        one["setup"] = Path(step.setup).read_text() if step.setup else ""
        said["steps"].append(one)
    return said


def differences(one: SweTask, other: SweTask) -> list[str]:
    """Fields in which two tasks are not the same."""
    return list(_unlike(described(one), described(other), ""))


def _unlike(one: Any, other: Any, path: str) -> Iterator[str]:
    if type(one) is not type(other):
        yield path
    elif (
        isinstance(one, dict) and path.count(".") < 3 and not path.endswith(("env", "metadata", "image", *_FILES))
    ):
        for name in one.keys() | other.keys():
            yield from _unlike(one.get(name), other.get(name), f"{path}.{name}" if path else str(name))
    elif isinstance(one, list) and path == "steps" and len(one) == len(other):
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from _unlike(left, right, f"steps[{number}]")
    elif one != other:
        yield path
