"""The `edit` tool: view, create, replace, insert, undo.

Promises:
- whatever is wrong with the path, the file, the disk or the arguments is an answer to the model, never a crash;
- a file keeps its mode, encoding and line endings;
- undo goes back one edit of a file, and refuses when something else changed the file since; what it remembers is
  bounded, and the oldest is forgotten first.
"""

from collections import deque
from hashlib import blake2b
from typing import Final, Literal

from rookery.environments.context import Context
from rookery.environments.results import clip
from rookery.environments.schemas import CallLimit, Tool
from rookery.environments.swe import texts
from rookery.environments.swe.bash import FOLDER
from rookery.environments.swe.config import Tooling
from rookery.environments.swe.files import MAX_FILE, MAX_LISTED, Files, Found
from rookery.environments.swe.texts import Refused

MAX_REMEMBERED: Final = 8 << 20
"""Bytes of old versions kept for undo, over all files of an attempt."""
MAX_EDITS: Final = 100
AROUND: Final = 4
"""Lines shown before and after an edit."""
EDITOR: Final = "swe.editor"
WAIT: Final = 30.0


class _Edit:
    """One edit: what was there, and how to tell that it is still the last."""

    __slots__ = ("after", "before", "path")

    def __init__(self, path: str, before: bytes | None, after: bytes) -> None:
        self.path = path
        self.before = before
        """None: the file was new."""
        self.after = _digest(after)

    @property
    def size(self) -> int:
        return len(self.before or b"") + 256


class Editor:
    """The editor of one attempt."""

    def __init__(self, files: Files, limit: int, *, create_parents: bool = False) -> None:
        self._files = files
        self._create_parents = create_parents
        self._limit = limit
        """Bytes of one answer."""
        self._edits: deque[_Edit] = deque()
        self._size = 0

    async def view(self, path: str, view_range: list[int] | None) -> str:
        path = self._files.path(path)
        found = await self._files.look(path)
        if found.listing is not None:
            if view_range is not None:
                raise Refused(f"{path} is a folder: view_range is for files.")
            return self._listed(path, found.listing)
        file = texts.decoded(self._there(path, found))
        first, last = texts.checked_range(file.text, view_range)
        notes = []
        if file.encoding != "utf-8":
            notes.append("not UTF-8" if file.encoding == "latin-1" else file.encoding.upper())
        if file.crlf:
            notes.append("CRLF line ends")
        count = len(texts.lines_of(file.text))
        said = f" ({', '.join(notes)})" if notes else ""
        if not count:
            return f"{path} is empty."
        head = f"{path}{said}, lines {first} to {last} of {count}:\n"
        return head + clip(texts.numbered(file.text, first, last), self._limit)

    def _listed(self, path: str, listing: str) -> str:
        cut = "" if len(listing.encode()) < MAX_LISTED else "\n… the listing is cut here …"
        names = clip(listing.rstrip("\n"), self._limit)
        return f"{path}, two levels deep, hidden files left out:\n{names or '(nothing)'}{cut}"

    async def create(self, path: str, file_text: str | None) -> str:
        if file_text is None:
            raise Refused("create needs file_text, the content of the file.")
        path = self._files.path(path)
        data = file_text.encode("utf-8", "replace")
        if self._create_parents:
            if len(data) > MAX_FILE:
                raise Refused(f"That would be {len(data):,} bytes, more than the {MAX_FILE:,} of one edit.")
            await self._files.make_parents(path)
        found = await self._files.look(path)
        self._no_folder(path, found)
        await self._write(path, found, data)
        lines = len(texts.lines_of(file_text))
        done = "is written" if found.data is None else "is replaced as a whole"
        return f"{path} {done}: {lines} line{'' if lines == 1 else 's'}, {len(data)} bytes."

    async def replace(self, path: str, old_str: str | None, new_str: str | None) -> str:
        if old_str is None:
            raise Refused(
                "To replace, old_str is needed; new_str is what takes its place, nothing where left out."
            )
        path = self._files.path(path)
        found = await self._files.look(path)
        file = texts.decoded(self._there(path, found))
        text, line = texts.replaced(file, old_str, new_str or "")
        await self._write(path, found, file.encoded(text))
        return self._around(path, text, line, (new_str or "").count("\n"))

    async def insert(self, path: str, insert_line: int | None, new_str: str | None) -> str:
        if insert_line is None or new_str is None:
            raise Refused("insert needs insert_line, the line to insert after (0: at the start), and new_str.")
        path = self._files.path(path)
        found = await self._files.look(path)
        file = texts.decoded(self._there(path, found))
        text = texts.inserted(file, insert_line, new_str)
        await self._write(path, found, file.encoded(text))
        return self._around(path, text, insert_line + 1, new_str.removesuffix("\n").count("\n"))

    async def undo(self, path: str) -> str:
        path = self._files.path(path)
        edit = next((edit for edit in reversed(self._edits) if edit.path == path), None)
        if edit is None:
            raise Refused(f"There is no edit of {path} to undo.")
        found = await self._files.look(path)
        if found.data is None or _digest(found.data) != edit.after:
            raise Refused(f"{path} was changed since by something else: the edit cannot be undone.")
        if edit.before is None:
            await self._files.remove(path)
        else:
            await self._files.put(path, edit.before, found)
        self._edits.remove(edit)
        self._size -= edit.size
        return f"The last edit of {path} is undone{': the file is gone' if edit.before is None else ''}."

    async def _write(self, path: str, found: Found, data: bytes) -> None:
        await self._files.put(path, data, found)
        edit = _Edit(path, found.data, data)
        self._edits.append(edit)
        self._size += edit.size
        while self._edits and (self._size > MAX_REMEMBERED or len(self._edits) > MAX_EDITS):
            self._size -= self._edits.popleft().size

    def _around(self, path: str, text: str, line: int, more: int) -> str:
        count = len(texts.lines_of(text))
        if not count:
            return f"{path} is edited; it is empty now."
        first, last = max(1, line - AROUND), min(count, line + more + AROUND)
        shown = texts.numbered(text, first, last)
        return f"{path} is edited; lines {first} to {last} are now:\n{clip(shown, self._limit)}"

    @staticmethod
    def _no_folder(path: str, found: Found) -> None:
        if found.listing is not None:
            raise Refused(f"{path} is a folder.")

    def _there(self, path: str, found: Found) -> bytes:
        self._no_folder(path, found)
        if found.data is None:
            raise Refused(f"{path} does not exist.")
        return found.data


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


async def _edited(
    ctx: Context,
    limit: float,
    tooling: Tooling,
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
        box = await ctx.sandbox()
        folder = str(ctx.state.get(FOLDER) or ctx.spec.workdir or "/")
        seconds = max(1.0, min(limit, WAIT))
        editor = ctx.state[EDITOR] = Editor(
            Files(box, folder, seconds), tooling.edit.output, create_parents=tooling.create_parents
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
    except Refused as refused:
        ctx.metrics["edits_refused"] = ctx.metrics.get("edits_refused", 0.0) + 1
        return clip(str(refused), tooling.edit.output)


_SHORT: Final = ("replace", "undo", Literal["view", "create", "replace", "insert", "undo"])
_LONG: Final = ("str_replace", "undo_edit", Literal["view", "create", "str_replace", "insert", "undo_edit"])
_ABOUT: Final = """\
Views and edits files: `view` shows a file with line numbers, or lists a folder; `create` writes a whole \
file{create}; `{replace}` replaces old_str, which must occur exactly once, by new_str; `insert` puts new_str \
after the line insert_line; `{undo}` takes the last edit of a file back.

Args:
    command: What to do.
    path: The file or folder, absolute or from the working folder.
    file_text: For create: the whole content.
    old_str: For {replace}: the text to be replaced, exactly as it stands in the file.
    new_str: For {replace} and insert: the new text.
    insert_line: For insert: the line to insert after; 0 is the start of the file.
    view_range: For view of a file: [first, last]; -1 as the last is its end.
"""


def edit_tool(tooling: Tooling) -> Tool:
    """The tool as configured."""

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
        return await _edited(
            ctx, limit, tooling, command, path, file_text, old_str, new_str, insert_line, view_range
        )

    replace, undo, commands = _LONG if tooling.editor_words == "long" else _SHORT
    create = ", and makes the folders that are missing above it" if tooling.create_parents else ""
    edit.__doc__ = _ABOUT.format(replace=replace, undo=undo, create=create)
    edit.__annotations__["command"] = commands
    own = tooling.edit
    return Tool(edit, name=own.name or "edit", description=own.description or None, timeout=own.timeout)
