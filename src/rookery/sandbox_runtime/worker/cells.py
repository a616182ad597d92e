"""Run the source of a cell: from text to a value or a traceback. Runs in the interpreter of a worker.

- All cells share one namespace, `__main__`: classes can be pickled, and tracebacks show the cell's lines.
- A traceback shows no frame of Rookery. Syntax errors, exits and exceptions are distinguished.
- Cells that use `await` share one event loop; tasks that one cell leaves continue in the next cell that awaits.
"""

from __future__ import annotations
import __future__

import _ast
import errno
import linecache
import os
import sys
import traceback

from rookery.sandbox_runtime.worker import protocol as p
from rookery.sandbox_runtime.worker.display import format_value, truncate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

MAX_ERROR = 16_000
MAX_FIGURES = 20
_ALLOW_TOP_LEVEL_AWAIT, ONLY_AST, _COROUTINE = 0x2000, 0x0400, 0x0080
_FUTURE_FLAGS = 0
for _name in __future__.all_feature_names:
    _FUTURE_FLAGS |= getattr(__future__, _name).compiler_flag
_DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PRIVATE_BUILTINS: Any = globals().get("__builtins__")
"""A private copy of the built-in names, which cells cannot change. It also identifies Rookery's own stack
frames."""
settrace, setprofile = sys.settrace, sys.setprofile
_VALUE = " value"
"""Name of the variable that gets the value of the last expression. It is not a valid identifier in source code."""


def _assign_value(last: Any) -> Any:
    """Turn the last expression of a cell into an assignment, so that the cell is compiled as one program."""
    name = _ast.Name(_VALUE, _ast.Store())
    assignment = _ast.Assign([name], last.value)
    for node in (name, assignment):
        node.lineno, node.col_offset = last.lineno, last.col_offset
        node.end_lineno, node.end_col_offset = last.end_lineno, last.end_col_offset
    return assignment


class CellRunner:
    """Executes cells in the namespace of `__main__`. Figures are saved in `directory`."""

    def __init__(self, main: ModuleType, directory: str) -> None:
        self.main = main
        self.directory = directory
        self.future_flags = 0
        self.event_loop: Any = None
        self.reserve: Any = bytearray(1 << 20)
        """Memory that is freed when a MemoryError has to be reported."""

    def run(self, number: int, source: bytes, display: int) -> tuple[int, str, str]:
        """Run a cell.

        Return its outcome (a constant of `protocol`), the value of its last expression as text of about `display`
        characters at most, and its error message.
        """
        name = f"<cell {number}>"
        try:
            text = source.decode()
            linecache.cache[name] = (len(text), None, text.splitlines(True), name)
            flags = self.future_flags | _ALLOW_TOP_LEVEL_AWAIT
            tree = compile(text, name, "exec", flags | ONLY_AST, dont_inherit=True)
            if tree.body and isinstance(tree.body[-1], _ast.Expr):
                tree.body[-1] = _assign_value(tree.body[-1])
            code = compile(tree, name, "exec", flags, dont_inherit=True)
        except MemoryError as error:
            return p.MEMORY, "", self.format_error(error)
        except BaseException as error:
            return p.SYNTAX, "", self.format_error(error)
        self.future_flags |= code.co_flags & _FUTURE_FLAGS
        try:
            self._execute(code)
            value = self.main.__dict__.pop(_VALUE, None)
            return p.OK, "" if value is None else format_value(value, display), ""
        except SystemExit as error:
            if error.code is None or error.code == 0:
                return p.OK, "", ""
            return p.RUNTIME, "", f"SystemExit: {error.code}"
        except MemoryError as error:
            self.reserve = None
            return p.MEMORY, "", self.format_error(error)
        except OSError as error:
            outcome = p.DISK if error.errno in _DISK_FULL_ERRORS else p.RUNTIME
            return outcome, "", self.format_error(error)
        except BaseException as error:
            return p.RUNTIME, "", self.format_error(error)

    def _execute(self, code: Any) -> Any:
        names = self.main.__dict__
        try:
            if not code.co_flags & _COROUTINE:
                return eval(code, names)
            return self._get_event_loop().run_until_complete(eval(code, names))
        finally:  # before another function of ours is called, which would be traced
            settrace(None)
            setprofile(None)

    def _get_event_loop(self) -> Any:
        import asyncio

        if self.event_loop is None or self.event_loop.is_closed():
            self.event_loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.event_loop)
        return self.event_loop

    def format_error(self, error: BaseException) -> str:
        """Format an exception as a traceback of the user's frames. Never raises."""
        try:
            return self._format_traceback(error)
        except BaseException:
            try:
                return type(error).__name__
            except BaseException:
                return "an exception that cannot be formatted"

    def _format_traceback(self, error: BaseException) -> str:
        if (
            isinstance(error, SyntaxError)
            and error.__traceback__ is not None
            and not _strip_own_frames(error.__traceback__)
        ):
            return "".join(traceback.format_exception_only(type(error), error)).rstrip()
        seen = set()
        todo: list[Any] = [error]
        while todo:
            one = todo.pop()
            if one is None or id(one) in seen:
                continue
            seen.add(id(one))
            one.__traceback__ = _strip_own_frames(one.__traceback__)
            todo += [one.__cause__, one.__context__]
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        return truncate("".join(lines).rstrip(), MAX_ERROR)

    def save_figures(self, number: int) -> list[str]:
        """Save and close matplotlib's open figures, at most `MAX_FIGURES`. Return the names of the files."""
        pyplot: Any = sys.modules.get("matplotlib.pyplot")
        saved = []
        figures = pyplot.get_fignums()[:MAX_FIGURES] if pyplot is not None else ()
        for index, figure in enumerate(figures, 1):
            name = f"figure-{number}-{index}.png"
            pyplot.figure(figure).savefig(os.path.join(self.directory, name))
            saved.append(name)
        if saved:
            pyplot.close("all")
        return saved


def _strip_own_frames(trace: Any) -> Any:
    """Return a traceback without Rookery's frames and without the frames that called the cell."""
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    cells = (n for n, entry in enumerate(entries) if entry.tb_frame.f_code.co_filename.startswith("<cell "))
    users = [
        entry
        for entry in entries[next(cells, 0) :]
        if entry.tb_frame.f_globals.get("__builtins__") is not _PRIVATE_BUILTINS
    ]
    for entry, following in zip(users, [*users[1:], None]):
        entry.tb_next = following
    return users[0] if users else None
