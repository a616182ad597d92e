"""Run a Python program in a forked interpreter and finalize it as a new interpreter would.

Runs in warm interpreters inside sandboxes, on Python 3.8 and newer.

Guarantees:
- the program is at the bottom of the stack, and its tracebacks show no frame of Rookery;
- exit codes, uncaught exceptions, threads, `atexit`, streams that cannot be flushed and SIGINT behave as in any
  program;
- if a new interpreter would behave differently or report another error, a new interpreter is started with execve.
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

    class Invocation(Protocol):
        """A parsed command line of `python`; see `warm_interpreter.CommandLine`."""

        kind: str
        target: str
        switches: set[str]


try:
    from rookery.sandbox_runtime.python import cpython_internals as internals
except ImportError:  # an interpreter without ctypes
    internals = None  # type: ignore[assignment]

_argv: list[bytes] = []


def _call(function: Callable[..., object], *args: object) -> object:
    return function(*args)


call_hidden: Any = internals.call_hidden if internals is not None else _call
"""Calls a function without any stack frame above it, if the interpreter has ctypes."""


def run(initial_modules: dict[str, ModuleType], invocation: Invocation, argv: list[bytes]) -> NoReturn:
    """Run the program and exit with its exit code. `initial_modules` are the modules of a new interpreter."""
    global _argv  # noqa: PLW0603
    _argv = argv
    main = ModuleType("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=sys.modules["builtins"])
    loader = sys.modules["_frozen_importlib"].BuiltinImporter
    main.__loader__ = loader
    sys.modules["__main__"] = main
    hidden = call_hidden
    del main
    try:
        error = _execute(invocation, sys.modules["__main__"].__dict__, hidden)
        # Outside of the except block: for `sys.excepthook`, no exception is being handled.
        status = 0 if error is None else _report_uncaught(error, hidden)
        interrupted = isinstance(error, KeyboardInterrupt)
        del error
        status = _finalize(initial_modules, status, hidden)
        if interrupted:
            _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
            os.kill(os.getpid(), _signal.SIGINT)
        os._exit(status)
    finally:  # an exception of the finalization must not reach the frames above
        os._exit(1)


def _execute(invocation: Invocation, names: dict[str, Any], hidden: Any) -> BaseException | None:
    """Run the program. Return its uncaught exception, without Rookery's frames in the traceback, or None."""
    safe = "I" in invocation.switches
    try:
        if invocation.kind == "m":
            if not safe:
                sys.path.insert(0, os.getcwd())
            code = None
        else:
            code = _load_code(invocation, names, safe=safe)
        if code is not None:
            hidden(exec, code, names)
        else:
            import runpy

            module = invocation.target if invocation.kind == "m" else "__main__"
            hidden(runpy._run_module_as_main, module, invocation.kind == "m")  # type: ignore[attr-defined]
    except BaseException as error:
        return _strip_own_frames(error)
    return None


def _strip_own_frames(error: BaseException) -> BaseException:
    """Remove Rookery's frames from the start of an exception's traceback."""
    trace = error.__traceback__
    own_globals = [globals(), internals.__dict__ if internals is not None else None]
    while trace is not None and any(trace.tb_frame.f_globals is names for names in own_globals):
        trace = trace.tb_next
    return error.with_traceback(trace)


def _load_code(invocation: Invocation, names: dict[str, Any], *, safe: bool) -> Any:
    """Compile the program. Return None for a directory or archive with its own `__main__` module."""
    if invocation.kind == "c":
        if not safe:
            sys.path.insert(0, "")
        code = compile(invocation.target + "\n", "<string>", "exec", dont_inherit=True)
        if sys.version_info >= (3, 13):  # shows source lines of -c programs in tracebacks
            import linecache

            keyed = hasattr(linecache, "_interactive_cache")
            linecache._register_code(code if keyed else "<string>", invocation.target + "\n", "<string>")  # type: ignore[attr-defined]
        return code
    if invocation.kind == "-":
        if os.isatty(0):
            _exec_interpreter()
        if not safe:
            sys.path.insert(0, "")
        position, parts = os.lseek(0, 0, os.SEEK_CUR) if _is_stdin_seekable() else -1, []
        while block := os.read(0, 1 << 20):
            parts.append(block)
        code = _compile(b"".join(parts), "<stdin>", position)
        names.update(__file__="<stdin>", __cached__=None)
        return code
    path = os.path.join(os.getcwd(), invocation.target) if sys.version_info >= (3, 9) else invocation.target
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
            f"{os.fsdecode(_argv[0])}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n"
        )
        raise SystemExit(2) from None
    if path.endswith(".pyc"):
        _exec_interpreter()
    if not safe:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    code = _compile(source, path, -1)
    loader = sys.modules["_frozen_importlib_external"].SourceFileLoader("__main__", path)
    names.update(__file__=path, __cached__=None, __loader__=loader)
    return code


def _is_stdin_seekable() -> bool:
    try:
        os.lseek(0, 0, os.SEEK_CUR)
    except OSError:
        return False
    return True


def _compile(source: bytes, name: str, position: int) -> Any:
    """Compile a source file. If a new interpreter would report another error, start a new interpreter instead.

    `position` is the offset of the source in a seekable standard input; -1 if the source is not from standard
    input or cannot be read again.
    """
    try:
        if b"\0" in source:
            raise UnicodeError
        if b"coding" not in source[:400]:
            source.decode()
    except UnicodeError:
        if name != "<stdin>":
            _exec_interpreter()
        if position >= 0:
            os.lseek(0, position, os.SEEK_SET)
            _exec_interpreter()
    try:
        return compile(source, name, "exec", dont_inherit=True)
    except SyntaxError:
        if sys.version_info < (3, 10) and name != "<stdin>":
            _exec_interpreter()  # its parser reports other positions
        raise


def _exec_interpreter() -> NoReturn:
    """Replace this process by a new interpreter with the same command line."""
    os.execve(sys.executable, _argv, os.environ)  # noqa: S606


def _report_uncaught(error: BaseException, hidden: Any) -> int:
    """Print an uncaught exception as the interpreter does. Return the exit code."""
    if isinstance(error, SystemExit):
        code = error.code
        if code is None:
            return 0
        if isinstance(code, int):
            return int(code) & 0xFF
        try:
            sys.stderr.write(f"{code}\n")
            sys.stderr.flush()
        except Exception:  # standard error is closed
            return 1
        return 1
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    try:
        hidden(sys.excepthook, type(error), error, error.__traceback__)
    except SystemExit as other:
        return _report_uncaught(other, hidden)
    except BaseException as other:
        sys.stderr.write("Error in sys.excepthook:\n")
        sys.__excepthook__(type(other), other, _strip_own_frames(other).__traceback__)
        sys.stderr.write("\nOriginal exception was:\n")
        sys.__excepthook__(type(error), error, error.__traceback__)
    return 1


def _finalize(initial_modules: dict[str, ModuleType], status: int, hidden: Any) -> int:
    """Join threads, run `atexit` handlers, flush streams and clear modules, in the order of the interpreter."""
    threads = sys.modules.get("threading")
    if threads is not None:
        try:
            hidden(threads._shutdown)
        except BaseException as error:
            _report_unraisable(error, f"in: {threads!r}", "")
    atexit = sys.modules.get("atexit")
    if atexit is not None:
        with _suppress_all():  # older versions raise the last exception, which they have printed already
            if atexit._ncallbacks():
                hidden(atexit._run_exitfuncs)
    status = _flush_streams(status)
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)
    for name in ("stdout", "stderr"):
        if getattr(sys, name, None) is not (stream := getattr(sys, f"__{name}__")):
            hidden(setattr, sys, name, stream)
    references = []
    # Most programs import nothing. Looking at every module would copy the memory pages that they are in.
    imported_nothing = len(sys.modules) == len(initial_modules) + 1 and next(reversed(sys.modules)) == "__main__"
    for name in (
        ["__main__"] if imported_nothing else [name for name in sys.modules if name not in initial_modules]
    ):
        module: ModuleType | None = sys.modules.pop(name)
        if isinstance(module, ModuleType):
            references.append(_weakref.ref(module))
    module = None
    hidden(gc.collect)
    for reference in reversed(references):
        module = reference()
        if module is not None:
            _clear_names(module.__dict__, hidden)
    module = None
    hidden(gc.collect)
    return _flush_streams(status)


class _suppress_all:  # noqa: N801  (not every program has imported contextlib)
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> bool:
        return True


def _clear_names(names: dict[str, Any], hidden: Any) -> None:
    for first in (True, False):
        for name in list(names):
            if name != "__builtins__" and (name[:1] == "_" and name[1:2] != "_") == first:
                hidden(names.__setitem__, name, None)


def _flush_streams(status: int) -> int:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not getattr(stream, "closed", False):
            try:
                stream.flush()
            except BaseException as error:
                if stream is not sys.stderr:
                    new = sys.version_info >= (3, 13)
                    _report_unraisable(
                        error, "on flushing sys.stdout" if new else f"in: {stream!r}", ":" if new else ""
                    )
                status = 120
    return status


def _report_unraisable(error: BaseException, where: str, end: str) -> None:
    try:
        sys.stderr.write(f"Exception ignored {where}{end}\n")
        sys.__excepthook__(type(error), error.with_traceback(None), None)
    except Exception:
        return
