"""The Python that remembers: serves cells to the monitor, in a child of it. Stand-alone.

Promises:
- whatever a cell did to streams, builtins, traces, timers, masks or its recursion limit, the next one starts;
- a fork that a cell made and that reaches the cell's end is no worker: it ends as a program would;
- functions of the host's are called by name, by one thread at a time, with plain data.

What it says is the word of a process that runs the user's code, and taken as such.
"""

from __future__ import annotations

import _thread
import builtins
import io
import os
import resource
import sys
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn
else:
    import _signal

if TYPE_CHECKING or "rookery.workers" in sys.modules:
    from rookery.workers.inside import frames as f
    from rookery.workers.inside.display import cut
    from rookery.workers.inside.runs import MOST_ERROR
    from rookery.workers.inside.twins import Twins
    from rookery.workers.inside.wire import BROKEN, CHANNEL_LOST, high, identity
else:
    import frames as f
    from display import cut
    from runs import MOST_ERROR
    from twins import Twins
    from wire import BROKEN, CHANNEL_LOST, high, identity

MOST_CALL = 4 << 20
_HELD = [
    getattr(_signal, "SIG" + name)
    for name in ("ALRM", "CHLD", "HUP", "INT", "IO", "PROF", "TERM", "URG", "USR1", "USR2", "VTALRM", "WINCH")
]
"""No handler of the user's for one of these runs between cells: it would run in our code."""
_LEAST_DEPTH = 400
_FIRST = (
    *(
        "sys",
        "builtins",
        "_frozen_importlib",
        "_frozen_importlib_external",
        "_imp",
        "_warnings",
        "_weakref",
        "_io",
    ),
    *(
        "_thread",
        "marshal",
        "posix",
        "time",
        "zipimport",
        "codecs",
        "encodings",
        "_signal",
        "abc",
        "io",
        "os",
        "stat",
    ),
    *("posixpath", "os.path", "site"),
)
"""Modules that no import works without, or that cannot be imported twice."""


class HostFunctionError(RuntimeError):
    """A function of the host's did not return."""


class Live(Twins):
    """Lives in a child of the monitor's. `serve` never returns."""

    def __init__(self, line: int, out: int, err: int, functions: Sequence[str]) -> None:
        self.pid = os.getpid()
        self.folder = os.getcwd()
        self.future = 0
        self.mask: Any = set()
        self.loop: Any = None
        self.token = b""
        self.running = False
        self.reserve: Any = bytearray(1 << 20)
        self.attach(high(line))
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        self.streams = [high(null), high(out), high(err)]
        self.known = [identity(fd) for fd in self.streams]
        for at, fd in enumerate(self.streams):
            os.dup2(fd, at)
        self.texts: list[Any] = [None, None, None]
        self.calling = _thread.allocate_lock()
        main = ModuleType("__main__")
        main.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = main
        self.main = main
        sys.path.insert(0, "")
        sys.argv[:] = [""]
        for name in functions:
            setattr(builtins, name, self.function(name))
        self.builtins = dict(builtins.__dict__)
        self.modules = {name: sys.modules[name] for name in _FIRST if name in sys.modules}
        os.register_at_fork(after_in_child=self.forked)
        self.restore()

    def forked(self) -> None:
        """In a fork that a cell made: nothing of ours is its own."""
        if self.line >= 0:
            self.line = -1
            self.socket.close()

    def serve(self) -> NoReturn:
        troubles = 0
        while troubles < 100:
            try:
                kind, payload, fds = self.hear()
                if kind == f.CELL:
                    self.cell(payload)
                elif kind == f.SAVE:
                    self.save(fds[0])
                troubles = 0
            except BaseException:  # a handler of the user's, run late: not ours to end for
                troubles += 1
        os._exit(BROKEN)

    def cell(self, payload: bytes) -> None:
        number, token, display, flags = f.LIVE_CELL.unpack_from(payload)
        self.token = token
        source = payload[f.LIVE_CELL.size :]
        self.running = True
        self.peak_from_here()
        ending, value, error, figures = f.OK, "", "", []
        try:
            try:
                _signal.pthread_sigmask(_signal.SIG_SETMASK, self.mask)
                ending, value, error = self.run(number, source, display)
                if flags & f.FIGURES and os.getpid() == self.pid:
                    figures = self.figures(number)
            finally:
                self.mask = _signal.pthread_sigmask(_signal.SIG_BLOCK, _HELD)
                _signal.setitimer(_signal.ITIMER_REAL, 0)
                _signal.sigtimedwait([_signal.SIGALRM], 0)  # one that has come already is no later cell's
        except BaseException as late:
            if ending == f.OK:
                ending, error = f.RUNTIME, self.told(late)
        if os.getpid() != self.pid:
            self.end_fork(ending, error)
        self.restore()
        with self.calling:  # a thread's call under way is still this cell's
            self.running = False
        texts = [
            cut(text, most).encode("utf-8", "backslashreplace")
            for text, most in ((value, display + display // 4 + 400), (error, MOST_ERROR))
        ]
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self.say(
            f.DONE,
            f.LIVE_DONE.pack(token, ending, usage.ru_maxrss << 10),
            f.packed([*texts, *(name.encode() for name in figures)]),
        )

    def end_fork(self, ending: int, error: str) -> NoReturn:
        """A fork that a cell made went past the cell's end."""
        try:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            if error:
                os.write(2, error.encode("utf-8", "backslashreplace") + b"\n")
        finally:
            os._exit(0 if ending == f.OK else 1)

    def peak_from_here(self) -> None:
        try:
            fd = os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            os.write(fd, b"5")
        except OSError:
            pass
        finally:
            os.close(fd)

    def restore(self) -> None:
        """So that the next cell starts as any."""
        if sys.getrecursionlimit() < _LEAST_DEPTH:
            sys.setrecursionlimit(1000)
        if self.reserve is None:
            try:
                self.reserve = bytearray(1 << 20)
            except MemoryError:
                pass
        if not self.builtins.keys() <= builtins.__dict__.keys():
            for name in self.builtins.keys() - builtins.__dict__.keys():
                builtins.__dict__[name] = self.builtins[name]
        if not self.modules.keys() <= sys.modules.keys():
            sys.modules.update((name, found) for name, found in self.modules.items() if name not in sys.modules)
        if sys.modules.get("__main__") is not self.main:
            sys.modules["__main__"] = self.main
        self.flush()
        for at, fd in enumerate(self.streams):
            try:
                if identity(fd) != self.known[at]:
                    os._exit(CHANNEL_LOST)
            except OSError:
                os._exit(CHANNEL_LOST)
            try:
                same = identity(at) == self.known[at]
            except OSError:
                same = False
            if not same:
                os.dup2(fd, at)
            elif at and not os.get_blocking(at):
                os.set_blocking(at, True)
            name = ("stdin", "stdout", "stderr")[at]
            text = self.texts[at]
            if text is None or text.closed:
                text = self.texts[at] = self.opened(at)
            if getattr(sys, name, None) is not text:
                setattr(sys, name, text)
            if getattr(sys, f"__{name}__", None) is not text:
                setattr(sys, f"__{name}__", text)

    def opened(self, fd: int) -> Any:
        raw: Any = open(fd, "rb" if fd == 0 else "wb", closefd=False)
        errors = "backslashreplace" if fd == 2 else "surrogateescape"
        text = io.TextIOWrapper(raw, "utf-8", errors, "\n", line_buffering=fd > 0)
        text.mode = "w" if fd else "r"  # type: ignore[misc]
        return text

    def flush(self) -> None:
        """What is in a buffer when a twin is made would be written twice."""
        for stream in (*self.texts[1:], getattr(sys, "stdout", None), getattr(sys, "stderr", None)):
            try:
                if stream is not None and not stream.closed:
                    stream.flush()
            except BaseException:
                continue

    def function(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self.call(name, args, kwargs)

        call.__name__ = call.__qualname__ = name
        call.__doc__ = "Runs outside of the sandbox. Takes and returns plain data."
        return call

    def call(self, name: str, args: Any, kwargs: Any) -> Any:
        import json

        try:
            asked = json.dumps([name, args, kwargs], allow_nan=False).encode("utf-8", "surrogatepass")
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name}() takes plain data only: {error}") from None
        if len(asked) > MOST_CALL:
            raise ValueError(f"{name}() was given {len(asked)} bytes; {MOST_CALL} is the most")
        if os.getpid() != self.pid or self.line < 0:
            raise HostFunctionError(f"{name}() can be called by the worker itself only, not by a fork of it")
        with self.calling:
            if not self.running:
                raise HostFunctionError(f"{name}() can be called only while a cell runs")
            self.say(f.CALL, self.token, asked)
            kind, payload, _ = self.hear()
        if kind != f.ANSWER:
            os._exit(BROKEN)
        if payload[:1] == b"\1":
            return json.loads(payload[1:])
        what, _, text = payload[1:].decode("utf-8", "replace").partition("\n")
        raise (TimeoutError if what == "TimeoutError" else HostFunctionError)(text)
