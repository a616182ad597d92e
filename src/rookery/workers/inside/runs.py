"""Running a cell: from its text to a value or a traceback. Stand-alone.

Promises:
- one namespace, `__main__`: classes can be pickled, functions call themselves, tracebacks show the cell's lines;
- a traceback has no frame of ours; a syntax error, an exit and an exception are told apart;
- cells that await share one loop; what one left waiting goes on in the next that awaits.
"""

from __future__ import annotations
import __future__

import _ast
import errno
import linecache
import os
import sys
import traceback

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

if TYPE_CHECKING or "rookery.workers" in sys.modules:
    from rookery.workers.inside import frames as f
    from rookery.workers.inside.display import cut, shown
    from rookery.workers.inside.wire import Wire
else:
    import frames as f
    from display import cut, shown
    from wire import Wire

MOST_ERROR = 16_000
MOST_FIGURES = 20
_AWAIT, TREE, _COROUTINE = 0x2000, 0x0400, 0x0080
_FUTURES = 0
for _name in __future__.all_feature_names:
    _FUTURES |= getattr(__future__, _name).compiler_flag
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PRIVATE: Any = globals().get("__builtins__")
"""Ours alone: a cell that empties the real ones does not reach us. Also how our own frames are known."""
settrace, setprofile = sys.settrace, sys.setprofile
_VALUE = " value"
"""A name that no program can write."""


def _kept(last: Any) -> Any:
    """The last expression, as a statement that keeps its value: one program is compiled faster than two."""
    name = _ast.Name(_VALUE, _ast.Store())
    made = _ast.Assign([name], last.value)
    for node in (name, made):
        node.lineno, node.col_offset = last.lineno, last.col_offset
        node.end_lineno, node.end_col_offset = last.end_lineno, last.end_col_offset
    return made


class Runs(Wire):
    """What a worker remembers."""

    main: ModuleType
    folder: str
    future = 0
    loop: Any = None
    reserve: Any = None
    """Memory to tell with that there is none."""

    def run(self, number: int, source: bytes, display: int) -> tuple[int, str, str]:
        name = f"<cell {number}>"
        try:
            text = source.decode()
            linecache.cache[name] = (len(text), None, text.splitlines(True), name)
            flags = self.future | _AWAIT
            tree = compile(text, name, "exec", flags | TREE, dont_inherit=True)
            if tree.body and isinstance(tree.body[-1], _ast.Expr):
                tree.body[-1] = _kept(tree.body[-1])
            code = compile(tree, name, "exec", flags, dont_inherit=True)
        except MemoryError as error:
            return f.MEMORY, "", self.told(error)
        except BaseException as error:
            return f.SYNTAX, "", self.told(error)
        self.future |= code.co_flags & _FUTURES
        try:
            self.execute(code)
            value = self.main.__dict__.pop(_VALUE, None)
            return f.OK, "" if value is None else shown(value, display), ""
        except SystemExit as error:
            if error.code is None or error.code == 0:
                return f.OK, "", ""
            return f.RUNTIME, "", f"SystemExit: {error.code}"
        except MemoryError as error:
            self.reserve = None
            return f.MEMORY, "", self.told(error)
        except OSError as error:
            return f.DISK if error.errno in _FULL else f.RUNTIME, "", self.told(error)
        except BaseException as error:
            return f.RUNTIME, "", self.told(error)

    def execute(self, code: Any) -> Any:
        names = self.main.__dict__
        try:
            if not code.co_flags & _COROUTINE:
                return eval(code, names)
            return self.asynchronous().run_until_complete(eval(code, names))
        finally:  # here, before another function of ours is called: it would be traced
            settrace(None)
            setprofile(None)

    def asynchronous(self) -> Any:
        """One loop for all cells: what a cell left waiting goes on in the next that awaits."""
        import asyncio

        if self.loop is None or self.loop.is_closed():
            self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        return self.loop

    def told(self, error: BaseException) -> str:
        """As a traceback of the user's frames alone; never raises."""
        try:
            return self.formatted(error)
        except BaseException:
            try:
                return type(error).__name__
            except BaseException:
                return "an exception that cannot be told"

    def formatted(self, error: BaseException) -> str:
        if (
            isinstance(error, SyntaxError)
            and error.__traceback__ is not None
            and not self.theirs(error.__traceback__)
        ):
            return "".join(traceback.format_exception_only(type(error), error)).rstrip()
        seen = set()
        todo: list[Any] = [error]
        while todo:
            one = todo.pop()
            if one is None or id(one) in seen:
                continue
            seen.add(id(one))
            one.__traceback__ = self.theirs(one.__traceback__)
            todo += [one.__cause__, one.__context__]
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        return cut("".join(lines).rstrip(), MOST_ERROR)

    def theirs(self, trace: Any) -> Any:
        """Without our own frames, and without those above the cell."""
        every = []
        while trace is not None:
            every.append(trace)
            trace = trace.tb_next
        cells = (at for at, one in enumerate(every) if one.tb_frame.f_code.co_filename.startswith("<cell "))
        kept = [
            one for one in every[next(cells, 0) :] if one.tb_frame.f_globals.get("__builtins__") is not _PRIVATE
        ]
        for one, following in zip(kept, [*kept[1:], None]):
            one.tb_next = following
        return kept[0] if kept else None

    def figures(self, number: int) -> list[str]:
        """Saves and closes what matplotlib holds open."""
        plots: Any = sys.modules.get("matplotlib.pyplot")
        saved = []
        for at, which in enumerate(plots.get_fignums()[:MOST_FIGURES] if plots is not None else (), 1):
            name = f"figure-{number}-{at}.png"
            plots.figure(which).savefig(os.path.join(self.folder, name))
            saved.append(name)
        if saved:
            plots.close("all")
        return saved
