"""Running a program in an interpreter that is as new, and ending as an interpreter ends. Stand-alone, as `python`.

Promises:
- the program is at the bottom of the stack, and its tracebacks show no frame of ours;
- exit codes, uncaught exceptions, threads, `atexit`, streams that cannot be flushed and SIGINT end it as they end
  any program;
- what only a new interpreter can do, or would word in another way, it is asked to do.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _weakref
import gc
import os
import sys
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn, Protocol

    class Asked(Protocol):
        kind: str
        text: str
        switches: set[str]


if TYPE_CHECKING or "rookery.sandboxes" in sys.modules:
    from rookery.sandboxes.local import inside
else:
    try:
        import inside
    except ImportError:  # an interpreter without ctypes
        inside = None

_words: list[bytes] = []


def _plain(function: Callable[..., object], *args: object) -> object:
    return function(*args)


below: Any = inside.hidden if inside is not None else _plain
"""Calls a function for which there is nothing above it, where that can be done."""


def run(known: dict[str, ModuleType], asked: Asked, words: list[bytes]) -> NoReturn:
    """`known`: the modules of a new interpreter. `words`: what it would be started with."""
    global _words  # noqa: PLW0603
    _words = words
    main = ModuleType("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=sys.modules["builtins"])
    loader = sys.modules["_frozen_importlib"].BuiltinImporter
    main.__loader__ = loader
    sys.modules["__main__"] = main
    hidden = below
    del main
    try:
        caught = _finished(asked, sys.modules["__main__"].__dict__, hidden)
        # Outside of any handler: to who is told of it, it is no exception that is being handled.
        status = 0 if caught is None else _told(caught, hidden)
        interrupted = isinstance(caught, KeyboardInterrupt)
        del caught
        status = _ended(known, status, hidden)
        if interrupted:
            _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
            os.kill(os.getpid(), _signal.SIGINT)
        os._exit(status)
    finally:  # nothing that the program raises at its end may run in the frames above
        os._exit(1)


def _finished(asked: Asked, names: dict[str, Any], hidden: Any) -> BaseException | None:
    """Runs it; what it did not catch, without the frames that are ours."""
    safe = "I" in asked.switches
    try:
        if asked.kind == "m":
            if not safe:
                sys.path.insert(0, os.getcwd())
            code = None
        else:
            code = _code(asked, names, safe=safe)
        if code is not None:
            hidden(exec, code, names)
        else:
            import runpy

            module = asked.text if asked.kind == "m" else "__main__"
            hidden(runpy._run_module_as_main, module, asked.kind == "m")  # type: ignore[attr-defined]
    except BaseException as error:
        return _theirs(error)
    return None


def _theirs(error: BaseException) -> BaseException:
    """Without the frames above the program's."""
    own = error.__traceback__
    ours = [globals(), inside.__dict__ if inside is not None else None]
    while own is not None and any(own.tb_frame.f_globals is names for names in ours):
        own = own.tb_next
    return error.with_traceback(own)


def _code(asked: Asked, names: dict[str, Any], *, safe: bool) -> Any:
    """What to execute; None where it is a folder or an archive with a `__main__` of its own."""
    if asked.kind == "c":
        if not safe:
            sys.path.insert(0, "")
        code = compile(asked.text + "\n", "<string>", "exec", dont_inherit=True)
        if sys.version_info >= (3, 13):  # which shows its lines
            import linecache

            keyed = hasattr(linecache, "_interactive_cache")
            linecache._register_code(code if keyed else "<string>", asked.text + "\n", "<string>")  # type: ignore[attr-defined]
        return code
    if asked.kind == "-":
        if os.isatty(0):
            _anew()
        if not safe:
            sys.path.insert(0, "")
        at, parts = os.lseek(0, 0, os.SEEK_CUR) if _seekable() else -1, []
        while block := os.read(0, 1 << 20):
            parts.append(block)
        code = _compiled(b"".join(parts), "<stdin>", at)
        names.update(__file__="<stdin>", __cached__=None)
        return code
    path = os.path.join(os.getcwd(), asked.text) if sys.version_info >= (3, 9) else asked.text
    for hook in sys.path_hooks:
        try:
            sys.path_importer_cache[path] = hook(path)
        except ImportError:
            continue
        sys.path.insert(0, path)
        return None
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        sys.stderr.write(
            f"{os.fsdecode(_words[0])}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n"
        )
        raise SystemExit(2) from None
    if path.endswith(".pyc"):
        _anew()
    if not safe:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    code = _compiled(source, path, -1)
    loader = sys.modules["_frozen_importlib_external"].SourceFileLoader("__main__", path)
    names.update(__file__=path, __cached__=None, __loader__=loader)
    return code


def _seekable() -> bool:
    try:
        os.lseek(0, 0, os.SEEK_CUR)
    except OSError:
        return False
    return True


def _compiled(source: bytes, name: str, at: int) -> Any:
    """Where a new interpreter would word its refusal in another way, it is asked."""
    try:
        if b"\0" in source:
            raise UnicodeError
        if b"coding" not in source[:400]:
            source.decode()
    except UnicodeError:
        if name != "<stdin>":
            _anew()
        if at >= 0:
            os.lseek(0, at, os.SEEK_SET)
            _anew()
    try:
        return compile(source, name, "exec", dont_inherit=True)
    except SyntaxError:
        if sys.version_info < (3, 10) and name != "<stdin>":
            _anew()  # it finds another place for some
        raise


def _anew() -> NoReturn:
    os.execve(sys.executable, _words, os.environ)  # noqa: S606


def _told(error: BaseException, hidden: Any) -> int:
    """Says what an uncaught exception says, and what exit code that is."""
    if isinstance(error, SystemExit):
        code = error.code
        if code is None:
            return 0
        if isinstance(code, int):
            return int(code) & 0xFF
        try:
            sys.stderr.write(f"{code}\n")
            sys.stderr.flush()
        except Exception:  # there is nobody to tell
            return 1
        return 1
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    try:
        hidden(sys.excepthook, type(error), error, error.__traceback__)
    except SystemExit as other:
        return _told(other, hidden)
    except BaseException as other:
        sys.stderr.write("Error in sys.excepthook:\n")
        sys.__excepthook__(type(other), other, _theirs(other).__traceback__)
        sys.stderr.write("\nOriginal exception was:\n")
        sys.__excepthook__(type(error), error, error.__traceback__)
    return 1


def _ended(known: dict[str, ModuleType], status: int, hidden: Any) -> int:
    """What an interpreter does at its end: threads, handlers, streams, then what the program's names hold."""
    threads = sys.modules.get("threading")
    if threads is not None:
        try:
            hidden(threads._shutdown)
        except BaseException as error:
            _unraisable(error, f"in: {threads!r}", "")
    if "atexit" in sys.modules:
        with _quiet():  # older versions raise the last of what they told already
            hidden(sys.modules["atexit"]._run_exitfuncs)
    status = _flushed(status)
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)
    for name in ("stdout", "stderr"):
        hidden(setattr, sys, name, getattr(sys, f"__{name}__"))
    left = []
    # Mostly there is nothing but the program itself; looking at every name copies the pages that they lie in.
    plain = len(sys.modules) == len(known) + 1 and next(reversed(sys.modules)) == "__main__"
    for name in ["__main__"] if plain else [name for name in sys.modules if name not in known]:
        module: ModuleType | None = sys.modules.pop(name)
        if isinstance(module, ModuleType):
            left.append(_weakref.ref(module))
    module = None
    hidden(gc.collect)
    for which in reversed(left):
        module = which()
        if module is not None:
            _clear(module.__dict__, hidden)
    module = None
    hidden(gc.collect)
    return _flushed(status)


class _quiet:  # noqa: N801  (contextlib is no module that every program has)
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> bool:
        return True


def _clear(names: dict[str, Any], hidden: Any) -> None:
    for first in (True, False):
        for name in list(names):
            if name != "__builtins__" and (name[:1] == "_" and name[1:2] != "_") == first:
                hidden(names.__setitem__, name, None)


def _flushed(status: int) -> int:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not getattr(stream, "closed", False):
            try:
                stream.flush()
            except BaseException as error:
                if stream is not sys.stderr:
                    new = sys.version_info >= (3, 13)
                    _unraisable(error, "on flushing sys.stdout" if new else f"in: {stream!r}", ":" if new else "")
                status = 120
    return status


def _unraisable(error: BaseException, where: str, end: str) -> None:
    try:
        sys.stderr.write(f"Exception ignored {where}{end}\n")
        sys.__excepthook__(type(error), error.with_traceback(None), None)
    except Exception:
        return
