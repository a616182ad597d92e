"""Copy, walk and compare the file trees of tasks.

Guarantees:
- Symbolic links are copied as links and never followed.
- `describe_task` returns equal descriptions for two tasks if and only if agent and grader would receive the same
  data and files, wherever the files are stored on this machine.
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
from rookery.tasks.swe import FileMapping, SweTask

DOCKERFILE_PREFIX = "dockerfile:"
_FILES = ("files", "tests", "solution")


class TreeEntry(NamedTuple):
    """One file, symbolic link or empty directory of a task."""

    path: str
    """Its path in the sandbox."""
    source: Path
    """Its path on this machine."""
    info: os.stat_result


def walk_files(parts: Sequence[FileMapping]) -> Iterator[TreeEntry]:
    """Yield all files, symbolic links and empty directories that the mappings put into a sandbox.

    Each mapping has a path on this machine and a path in the sandbox. If two entries have the same path in the
    sandbox, both are yielded, and the caller must let the later one replace the earlier one.
    """
    for part in parts:
        yield from _walk(Path(part.source), part.target.rstrip("/"))


def _walk(source: Path, target: str) -> Iterator[TreeEntry]:
    info = source.lstat()
    if not stat.S_ISDIR(info.st_mode):
        yield TreeEntry(target, source, info)
        return
    names = sorted(entry.name for entry in source.iterdir())
    if not names:
        yield TreeEntry(target, source, info)
    for name in names:
        yield from _walk(source / name, f"{target}/{name}")


def copy_files(parts: Sequence[FileMapping], base: str, folder: Path) -> None:
    """Copy the files that the mappings put into a sandbox to the directory `folder` on this machine.

    `base` is the directory in the sandbox that `folder` corresponds to. Raise `UsageError` for a file outside
    `base`.
    """
    for piece in walk_files(parts):
        if piece.path == base and stat.S_ISDIR(piece.info.st_mode):
            continue
        if not piece.path.startswith(f"{base}/"):
            raise UsageError(
                f"the task puts files at {piece.path[:120]!r}, but the format only supports files below {base}"
            )
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


def digest_files(parts: Sequence[FileMapping]) -> dict[str, str]:
    """Return a digest of each file, symbolic link and empty directory, by its path in the sandbox."""
    return {piece.path: _digest_entry(piece) for piece in walk_files(parts)}


def _digest_entry(piece: TreeEntry) -> str:
    if stat.S_ISLNK(piece.info.st_mode):
        return f"link {piece.source.readlink()}"
    if stat.S_ISDIR(piece.info.st_mode):
        return "folder"
    with piece.source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"{'program' if piece.info.st_mode & 0o111 else 'file'} {digest}"


def describe_task(task: SweTask) -> dict[str, Any]:
    """Return everything about a task except its directory on this machine and its format, as plain data.

    Files are represented by digests, so that two tasks can be compared.
    """
    description: dict[str, Any] = {
        name: msgspec.to_builtins(getattr(task, name))
        for name in task.__struct_fields__
        if name not in ("format", "folder", "steps", "files", "image")
    }
    image = task.image
    if image is not None and image.startswith(DOCKERFILE_PREFIX):
        description["image"] = {
            "built": digest_files((FileMapping(source=image.removeprefix(DOCKERFILE_PREFIX), target=""),))
        }
    else:
        description["image"] = image
    description["steps"] = []
    for number, step in enumerate(task.steps):
        one: dict[str, Any] = {
            name: msgspec.to_builtins(getattr(step, name))
            for name in step.__struct_fields__
            if name not in (*_FILES, "setup")
        }
        one["verifier"] = {
            name: msgspec.to_builtins(getattr(step.verifier, name)) for name in step.verifier.__struct_fields__
        }
        # Files of the task and files of its first step are the same for the agent.
        one["files"] = digest_files((*(task.files if not number else ()), *step.files))
        one["tests"], one["solution"] = digest_files(step.tests), digest_files(step.solution)
        one["setup"] = Path(step.setup).read_text() if step.setup else ""
        description["steps"].append(one)
    return description


def find_differences(one: SweTask, other: SweTask) -> list[str]:
    """Return the names of the fields in which two tasks differ."""
    return list(_compare(describe_task(one), describe_task(other), ""))


def _compare(one: Any, other: Any, path: str) -> Iterator[str]:
    if type(one) is not type(other):
        yield path
    elif (
        isinstance(one, dict) and path.count(".") < 3 and not path.endswith(("env", "metadata", "image", *_FILES))
    ):
        for name in one.keys() | other.keys():
            yield from _compare(one.get(name), other.get(name), f"{path}.{name}" if path else str(name))
    elif isinstance(one, list) and path == "steps" and len(one) == len(other):
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from _compare(left, right, f"steps[{number}]")
    elif one != other:
        yield path
