"""The tool `edit`: view, create, replace, insert and undo, on files in the sandbox.

If a path, file or argument is invalid, the model is told why. A file keeps its mode, encoding and line endings.
Undo reverts the last edit of a file, unless something else has changed the file since. The size of the undo
history is limited; the oldest edits are forgotten first.
"""

from collections import deque
from hashlib import blake2b
from typing import Final, Literal

from rookery.core import SandboxError
from rookery.environments.context import Context
from rookery.environments.swe import text_file
from rookery.environments.swe.bash_tool import FOLDER
from rookery.environments.swe.sandbox_files import MAX_FILE, MAX_LISTED, FileState, SandboxFiles
from rookery.environments.swe.text_file import EditRefused
from rookery.environments.swe.tool_config import ToolConfig
from rookery.environments.text import clip
from rookery.environments.tool_environment import increment
from rookery.environments.tools import CallLimit, Tool
from rookery.sandboxes.protocol import Command, Sandbox

MAX_UNDO_BYTES: Final = 8 << 20
"""Maximum bytes of the undo history of an attempt, over all its files."""
MAX_UNDO_EDITS: Final = 100
CONTEXT_LINES: Final = 4
"""Number of lines shown to the model before and after an edited place."""
EDITOR: Final = "swe.editor"
MAX_SCRIPT_SECONDS: Final = 30.0
"""Maximum time limit, in seconds, of one shell script with which `SandboxFiles` reads or writes a file."""


class _Edit:
    """One entry of the undo history."""

    def __init__(self, path: str, before: bytes | None, after: bytes) -> None:
        self.path = path
        self.before = before
        """Content before the edit, or None if the edit created the file."""
        self.after = _digest(after)
        """Digest of the content after the edit, with which later changes are detected."""

    @property
    def size(self) -> int:
        return len(self.before or b"") + 256


class Editor:
    """The file editor of one attempt, with its undo history.

    Its methods return the text that the model sees. They raise `EditRefused` if an operation is not possible.
    """

    def __init__(self, files: SandboxFiles, limit: int, *, create_parents: bool = False) -> None:
        self.files = files
        self._create_parents = create_parents
        self._limit = limit
        """Maximum bytes of text in a result for the model."""
        self._edits: deque[_Edit] = deque()
        self._size = 0

    async def view(self, path: str, view_range: list[int] | None) -> str:
        path = self.files.resolve(path)
        state = await self.files.inspect(path)
        if state.listing is not None:
            if view_range is not None:
                raise EditRefused(f"{path} is a directory: view_range is for files only.")
            return self._render_listing(path, state.listing)
        file = text_file.decode_file(self._get_data(path, state))
        first, last = text_file.resolve_range(file.text, view_range)
        notes = []
        if file.encoding != "utf-8":
            notes.append("not UTF-8" if file.encoding == "latin-1" else file.encoding.upper())
        if file.crlf:
            notes.append("CRLF line ends")
        count = len(text_file.split_lines(file.text))
        note = f" ({', '.join(notes)})" if notes else ""
        if not count:
            return f"{path} is empty."
        head = f"{path}{note}, lines {first} to {last} of {count}:\n"
        return head + clip(text_file.number_lines(file.text, first, last), self._limit)

    def _render_listing(self, path: str, listing: str) -> str:
        cut = "" if len(listing.encode()) < MAX_LISTED else "\n… listing truncated …"
        names = clip(listing.rstrip("\n"), self._limit)
        return f"{path}, two levels deep, without hidden files:\n{names or '(nothing)'}{cut}"

    async def create(self, path: str, file_text: str | None) -> str:
        if file_text is None:
            raise EditRefused("create needs file_text, the content of the file.")
        path = self.files.resolve(path)
        data = file_text.encode("utf-8", "replace")
        if self._create_parents:
            if len(data) > MAX_FILE:
                raise EditRefused(f"That would be {len(data):,} bytes, more than the {MAX_FILE:,} of one edit.")
            await self.files.make_parents(path)
        state = await self.files.inspect(path)
        self._refuse_directory(path, state)
        await self._write(path, state, data)
        lines = len(text_file.split_lines(file_text))
        done = "was written" if state.data is None else "was replaced"
        return f"{path} {done}: {lines} line{'' if lines == 1 else 's'}, {len(data)} bytes."

    async def replace(self, path: str, old_str: str | None, new_str: str | None) -> str:
        if old_str is None:
            raise EditRefused("old_str is required; new_str, its replacement, defaults to nothing.")
        path = self.files.resolve(path)
        state = await self.files.inspect(path)
        file = text_file.decode_file(self._get_data(path, state))
        text, line = text_file.replace_once(file, old_str, new_str or "")
        await self._write(path, state, file.encode(text))
        return self._show_around(path, text, line, (new_str or "").count("\n"))

    async def insert(self, path: str, insert_line: int | None, new_str: str | None) -> str:
        if insert_line is None or new_str is None:
            raise EditRefused("insert needs new_str and insert_line, the line to insert after (0 for the start).")
        path = self.files.resolve(path)
        state = await self.files.inspect(path)
        file = text_file.decode_file(self._get_data(path, state))
        text = text_file.insert_lines(file, insert_line, new_str)
        await self._write(path, state, file.encode(text))
        return self._show_around(path, text, insert_line + 1, new_str.removesuffix("\n").count("\n"))

    async def undo(self, path: str) -> str:
        path = self.files.resolve(path)
        edit = next((edit for edit in reversed(self._edits) if edit.path == path), None)
        if edit is None:
            raise EditRefused(f"There is no edit of {path} to undo.")
        state = await self.files.inspect(path)
        if state.data is None or _digest(state.data) != edit.after:
            raise EditRefused(f"{path} was changed by something else since: the edit cannot be undone.")
        if edit.before is None:
            await self.files.remove(path)
        else:
            await self.files.replace(path, edit.before, state)
        self._edits.remove(edit)
        self._size -= edit.size
        return f"The last edit of {path} was undone{': the file was deleted' if edit.before is None else ''}."

    async def _write(self, path: str, state: FileState, data: bytes) -> None:
        await self.files.replace(path, data, state)
        edit = _Edit(path, state.data, data)
        self._edits.append(edit)
        self._size += edit.size
        while self._edits and (self._size > MAX_UNDO_BYTES or len(self._edits) > MAX_UNDO_EDITS):
            self._size -= self._edits.popleft().size

    def _show_around(self, path: str, text: str, line: int, extra_lines: int) -> str:
        count = len(text_file.split_lines(text))
        if not count:
            return f"{path} was edited; it is now empty."
        first, last = max(1, line - CONTEXT_LINES), min(count, line + extra_lines + CONTEXT_LINES)
        shown = text_file.number_lines(text, first, last)
        return f"{path} was edited; lines {first} to {last} are now:\n{clip(shown, self._limit)}"

    @staticmethod
    def _refuse_directory(path: str, state: FileState) -> None:
        if state.listing is not None:
            raise EditRefused(f"{path} is a directory.")

    def _get_data(self, path: str, state: FileState) -> bytes:
        self._refuse_directory(path, state)
        if state.data is None:
            raise EditRefused(f"{path} does not exist.")
        return state.data


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


async def _find_working_directory(sandbox: Sandbox) -> str:
    """Return the directory in which commands start in the sandbox, for environments that do not set one."""
    result = await sandbox.exec(Command(argv=("pwd",), wall=MAX_SCRIPT_SECONDS))
    if result.status == "lost":
        raise SandboxError(f"sandbox {sandbox.id} was lost: {result.detail or 'no detail'}")
    return result.stdout.decode(errors="replace").strip() or "/"


async def _run_edit(
    ctx: Context,
    limit: float,
    config: ToolConfig,
    command: str,
    path: str,
    file_text: str | None,
    old_str: str | None,
    new_str: str | None,
    insert_line: int | None,
    view_range: list[int] | None,
) -> str:
    editor: Editor | None = ctx.state.get(EDITOR)
    if editor is None:
        sandbox = await ctx.sandbox()
        folder = str(ctx.state.get(FOLDER) or await _find_working_directory(sandbox))
        seconds = max(1.0, min(limit, MAX_SCRIPT_SECONDS))
        editor = ctx.state[EDITOR] = Editor(
            SandboxFiles(sandbox, folder, seconds), config.edit.output, create_parents=config.create_parents
        )
    try:
        match command:
            case "view":
                return await editor.view(path, view_range)
            case "create":
                return await editor.create(path, file_text)
            case "insert":
                return await editor.insert(path, insert_line, new_str)
            case "undo" | "undo_edit":
                return await editor.undo(path)
            case _:
                return await editor.replace(path, old_str, new_str)
    except EditRefused as refused:
        increment(ctx, "edits_refused")
        return clip(str(refused), config.edit.output)


_SHORT_COMMANDS: Final = ("replace", "undo", Literal["view", "create", "replace", "insert", "undo"])
_LONG_COMMANDS: Final = (
    "str_replace",
    "undo_edit",
    Literal["view", "create", "str_replace", "insert", "undo_edit"],
)
_DOCSTRING: Final = """\
View and edit files: `view` shows a file with line numbers, or lists a directory; `create` writes a whole \
file{create}; `{replace}` replaces old_str, which must occur exactly once, with new_str; `insert` inserts new_str \
after the line insert_line; `{undo}` reverts the last edit of a file.

Args:
    command: What to do.
    path: The file or directory, absolute or relative to the working directory.
    file_text: For create: the whole content.
    old_str: For {replace}: the text to replace, exactly as it is in the file.
    new_str: For {replace} and insert: the new text.
    insert_line: For insert: the line to insert after; 0 is the start of the file.
    view_range: For view of a file: [first, last]; -1 means the last line.
"""


def edit_tool(config: ToolConfig) -> Tool:
    """Return the tool `edit`, with the name, commands, description and limits of the configuration."""

    async def edit(
        command: str,
        path: str,
        ctx: Context,
        limit: CallLimit,
        file_text: str | None = None,
        old_str: str | None = None,
        new_str: str | None = None,
        insert_line: int | None = None,
        view_range: list[int] | None = None,
    ) -> str:
        return await _run_edit(
            ctx, limit, config, command, path, file_text, old_str, new_str, insert_line, view_range
        )

    replace, undo, commands = _LONG_COMMANDS if config.editor_commands == "long" else _SHORT_COMMANDS
    create = ", and creates missing parent directories" if config.create_parents else ""
    edit.__doc__ = _DOCSTRING.format(replace=replace, undo=undo, create=create)
    edit.__annotations__["command"] = commands
    settings = config.edit
    return Tool(
        edit,
        name=settings.name or "edit",
        description=settings.description or None,
        timeout=settings.timeout,
        sandbox=True,
    )


edit: Final = edit_tool(ToolConfig(create_parents=True))
"""The tool `edit` with its default settings, which any environment can use. It creates missing directories."""
edit.__qualname__ = "edit"  # runner processes import it by this name
