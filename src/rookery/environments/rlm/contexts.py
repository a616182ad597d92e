"""Long contexts (the text, data or files that a task is about), and how they are placed in a sandbox.

Runs in a runner process. A context is transferred into the sandbox once, as a file or a directory. Only a
configurable preview of it becomes part of the prompt. An invalid context raises `TaskError`. A context generated
from a recipe is deleted from this machine after the transfer.
"""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from rookery.core import TaskError
from rookery.environments.rlm.recipes import Recipe
from rookery.sandboxes.protocol import Sandbox

Kind: TypeAlias = Literal["none", "text", "json", "bytes", "folder"]
MAX_SIZE = 1 << 30
"""Maximum bytes of the text, data or files that a task is about."""
MAX_FILE = 64 << 20
"""Maximum bytes of a file that a REPL passes to a sub-model. The file is held in the memory of this process."""
TRANSFER_SECONDS = 120.0
_NAMES = {"text": "context.txt", "json": "context.json", "bytes": "context.bin", "folder": "context"}
_FIELDS = ("context", "context_file", "context_folder", "recipe")


class PlacedContext(msgspec.Struct, frozen=True):
    """Describes a task's long context (the text, data or files that the task is about) after its transfer into a
    sandbox."""

    kind: Kind = "none"
    name: str = ""
    """Name of the file or directory in the sandbox's working directory."""
    size: int = 0
    """Size in bytes."""
    files: int = 0
    """Number of files."""
    preview: str = ""
    """First characters of the context."""

    def describe(self, repl: str) -> str:
        """Return a description of the context for the prompt of a model with a `python` or `bash` REPL."""
        python = repl == "python"
        variable = " and in the variable `context`" if python else ' ("$CONTEXT")'
        match self.kind:
            case "none":
                return "There is no context."
            case "text":
                text = f"The context is a text of {self.size:,} bytes. It is in the file {self.name}{variable}"
                text += " (a str)." if python else "."
            case "json":
                text = f"The context is JSON, {self.size:,} bytes of it. It is in the file {self.name}{variable}"
                text += ", parsed." if python else "."
            case "bytes":
                text = f"The context is {self.size:,} bytes of binary data, in the file {self.name}{variable}."
            case "folder":
                text = f"The context is {self.files:,} files, {self.size:,} bytes in the directory {self.name}"
                text += "; `context` is its pathlib.Path." if python else f"{variable}."
        return f"{text} It begins with:\n{self.preview}" if self.preview else text


def parse_source(task: str, data: dict[str, Any]) -> Any:
    """Return the source of a task's long context (the text, data or files that the task is about).

    It is the value of the only one of these fields in the task's data: `context` (text, a list or an object),
    `context_file` or `context_folder` (a path on this machine), or `recipe` (parameters from which the context is
    generated). Return None if the task has none of them. Raise `TaskError` if it has several, or if the value is
    invalid. `task` is the task's ID, for error messages.
    """
    fields = [name for name in _FIELDS if data.get(name) is not None]
    if len(fields) > 1:
        raise TaskError(f"task {task} has {' and '.join(fields)}: keep only one of these fields")
    if not fields:
        return None
    value = data[fields[0]]
    match fields[0]:
        case "context":
            if not isinstance(value, str | list | dict):
                raise TaskError(f"task {task}: context must be a text, a list or an object, not {value!r:.80}")
            return value
        case "recipe":
            try:
                return msgspec.convert(value, Recipe)
            except msgspec.ValidationError as error:
                raise TaskError(f"task {task}: recipe: {error}") from None
    path = Path(str(value)).expanduser()
    folder = fields[0] == "context_folder"
    if not (path.is_dir() if folder else path.is_file()):
        raise TaskError(f"task {task}: {fields[0]}: the {'directory' if folder else 'file'} {path} does not exist")
    if path.is_symlink():
        raise TaskError(f"task {task}: {fields[0]}: {path} is a symbolic link: specify its target")
    return path


async def place_context(sandbox: Sandbox, source: Any, *, preview: int = 0) -> PlacedContext:
    """Transfer a long context into a sandbox's working directory and describe what was placed there.

    `source` is a result of `parse_source`, or bytes. `preview` is the number of characters from the start of the
    context to include in the description.
    """
    if source is None:
        return PlacedContext()
    if isinstance(source, Path):
        return await _upload(sandbox, source, preview)
    if isinstance(source, Recipe):
        async with _generate(source) as path:
            return await _upload(sandbox, path, preview)
    if isinstance(source, bytes):
        kind: Kind = "text" if _is_text(source) else "bytes"
        data = source
    else:
        kind = "text" if isinstance(source, str) else "json"
        data = source.encode("utf-8", "replace") if isinstance(source, str) else msgspec.json.encode(source)
    await sandbox.write(_NAMES[kind], data, timeout=TRANSFER_SECONDS)
    return PlacedContext(kind, _NAMES[kind], len(data), 1, _make_preview(data, kind, preview))


@asynccontextmanager
async def _generate(recipe: Recipe) -> AsyncIterator[Path]:
    """Generate the context of a recipe in a temporary directory on this machine, and delete it after the block.

    A thread writes the files. If the attempt is cancelled while the thread runs, the directory is deleted when the
    thread ends.
    """
    folder = Path(tempfile.mkdtemp(prefix="rookery-context-"))
    # Not a task, which would be cancelled with the attempt while its thread kept writing to the removed directory.
    work = asyncio.get_running_loop().run_in_executor(None, recipe.write, folder)

    def remove(done: "asyncio.Future[Path]") -> None:
        shutil.rmtree(folder, ignore_errors=True)
        if not done.cancelled():
            done.exception()  # mark it as retrieved

    try:
        yield await asyncio.shield(work)
    finally:
        if work.done():
            remove(work)
        else:
            work.add_done_callback(remove)


async def _upload(sandbox: Sandbox, path: Path, preview: int) -> PlacedContext:
    kind, size, files, head = await asyncio.to_thread(_inspect, path)
    if size > MAX_SIZE:
        raise TaskError(
            f"the task's context {path.name} has {size:,} bytes; the maximum is {MAX_SIZE:,}: use a smaller one"
        )
    await sandbox.upload(path, _NAMES[kind], timeout=TRANSFER_SECONDS)
    return PlacedContext(kind, _NAMES[kind], size, files, _make_preview(head, kind, preview))


def _inspect(path: Path) -> tuple[Kind, int, int, bytes]:
    """Return the kind of the context at `path`, its bytes, its number of files and the start of its content."""
    if path.is_dir():
        sizes = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
        return "folder", sum(sizes), len(sizes), b""
    with path.open("rb") as file:
        head = file.read(1 << 16)
    kind: Kind = "json" if path.suffix == ".json" else "text" if _is_text(head, whole=False) else "bytes"
    return kind, path.stat().st_size, 1, head


def _is_text(data: bytes, *, whole: bool = True) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return not whole and error.start >= len(data) - 4 and b"\0" not in data
    return b"\0" not in data


def _make_preview(data: bytes, kind: Kind, preview: int) -> str:
    return data[: 4 * preview].decode("utf-8", "ignore")[:preview] if kind in ("text", "json") else ""
