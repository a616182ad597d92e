"""The persistent Python interpreter of a worker: runs cells, as a child of the monitor.

Guarantees:
- whatever a cell did to streams, built-in names, trace functions, timers, signal masks or the recursion limit,
  the next cell runs;
- a process that a cell forked exits at the end of the cell, as a program would;
- host functions, which run outside of the sandbox, are called by name, by one thread at a time, with arguments
  that JSON can represent;
- a savepoint (a copy-on-write fork of this process) keeps no pipe or socket of the user open, so no other
  process waits for it to close them; buffered output is not written twice; when the savepoint continues, no fork
  hook has run and no random generator was reseeded.

The monitor does not trust what this process sends, because it runs the user's code.
"""

from __future__ import annotations

import _socket
import _thread
import builtins
import io
import os
import resource
import stat
import sys
from types import ModuleType

from rookery.sandbox_runtime.worker import linux
from rookery.sandbox_runtime.worker import protocol as p
from rookery.sandbox_runtime.worker.cells import MAX_ERROR, ONLY_AST, CellRunner
from rookery.sandbox_runtime.worker.channel import (
    BROKEN,
    CHANNEL_LOST,
    MonitorConnection,
    identify,
    move_fd_up,
)
from rookery.sandbox_runtime.worker.display import truncate

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn
else:
    import _signal

MAX_CALL = 4 << 20
MAX_FAILURES = 100
_BLOCKED_SIGNALS = [
    getattr(_signal, "SIG" + name)
    for name in ("ALRM", "CHLD", "HUP", "INT", "IO", "PROF", "TERM", "URG", "USR1", "USR2", "VTALRM", "WINCH")
]
"""Signals that are blocked between cells, because the user's handlers would interrupt the interpreter's own
code."""
_MIN_RECURSION_LIMIT = 400
_ESSENTIAL_MODULES = (
    "sys",
    "builtins",
    "_frozen_importlib",
    "_frozen_importlib_external",
    "_imp",
    "_warnings",
    "_weakref",
    "_io",
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
    "posixpath",
    "os.path",
    "site",
)
"""Modules that every import needs, or that cannot be imported twice."""
_TYPICAL_SOURCE = """
import os, sys as s
from os import path
x, y = [1], {"a": -2.5}
def f(a, *b, c=None):
    global x
    for i in range(len(b)):
        if i > 0 and not c or a is None:
            x += [a[i] * 2 for a in b if a.real == i]
    try:
        return f"{a}", lambda q: q[1:2]
    except (ValueError, KeyError) as e:
        raise
class A:
    z = 3 % 2
while True:
    break
with open("x") as g:
    print(x.y, *y, sep="")
"""
"""Source with the syntax of typical cells. It is compiled but never executed; see `touch_memory`."""


class HostFunctionError(RuntimeError):
    """A function that runs outside of the sandbox failed or could not be called."""

    __module__ = "builtins"  # tracebacks of cells show the bare name


class Interpreter:
    """Executes the pieces of source code (cells) that its parent process, the monitor, sends.

    At the monitor's request it also forks a savepoint: a frozen copy of this process that continues in its place
    if a later cell crashes or is killed. `stdout` and `stderr` are the pipes to which cells write. `functions` are
    the names of the host functions: functions outside of the sandbox that cells can call.
    """

    def __init__(self, connection_fd: int, stdout: int, stderr: int, functions: Sequence[str]) -> None:
        self.pid = os.getpid()
        self.signal_mask: Any = set()
        self.token = b""
        self.cell_running = False
        self.connection = MonitorConnection(move_fd_up(connection_fd))
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        self.stream_fds = [move_fd_up(null), move_fd_up(stdout), move_fd_up(stderr)]
        self.stream_identities = [identify(fd) for fd in self.stream_fds]
        for target, fd in enumerate(self.stream_fds):
            os.dup2(fd, target)
        self.streams: list[Any] = [None, None, None]
        self.call_lock = _thread.allocate_lock()
        main = ModuleType("__main__")
        main.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = main
        self.runner = CellRunner(main, os.getcwd())
        sys.path.insert(0, "")
        sys.argv[:] = [""]
        for name in functions:
            setattr(builtins, name, self._make_function(name))
        self.builtins = dict(builtins.__dict__)
        self.modules = {name: sys.modules[name] for name in _ESSENTIAL_MODULES if name in sys.modules}
        os.register_at_fork(after_in_child=self.close_connection_in_fork)
        self.restore()

    def close_connection_in_fork(self) -> None:
        """Close the connection to the monitor in a process that a cell forked."""
        self.connection.close()

    def serve(self) -> NoReturn:
        failures = 0
        while failures < MAX_FAILURES:
            try:
                kind, payload, fds = self.connection.receive()
                if kind == p.CELL:
                    self.run_cell(payload)
                elif kind == p.SAVE:
                    self.fork_savepoint(fds[0])
                failures = 0
            except BaseException:  # a late handler of the user raised it: no reason to exit
                failures += 1
        os._exit(BROKEN)

    # ---- cells

    def run_cell(self, payload: bytes) -> None:
        number, token, display, flags = p.INTERPRETER_CELL_HEAD.unpack_from(payload)
        self.token = token
        source = payload[p.INTERPRETER_CELL_HEAD.size :]
        self.cell_running = True
        self.reset_peak_memory()
        outcome, value, error, figures = p.OK, "", "", []
        try:
            try:
                _signal.pthread_sigmask(_signal.SIG_SETMASK, self.signal_mask)
                outcome, value, error = self.runner.run(number, source, display)
                if flags & p.FIGURES and os.getpid() == self.pid:
                    figures = self.runner.save_figures(number)
            finally:
                self.signal_mask = _signal.pthread_sigmask(_signal.SIG_BLOCK, _BLOCKED_SIGNALS)
                _signal.setitimer(_signal.ITIMER_REAL, 0)
                _signal.sigtimedwait([_signal.SIGALRM], 0)  # a pending alarm must not hit a later cell
        except BaseException as late:
            if outcome == p.OK:
                outcome, error = p.RUNTIME, self.runner.format_error(late)
        if os.getpid() != self.pid:
            self.exit_fork(outcome, error)
        self.restore()
        with self.call_lock:  # a call of another thread still belongs to this cell
            self.cell_running = False
        texts = [
            truncate(text, most).encode("utf-8", "backslashreplace")
            for text, most in ((value, display + display // 4 + 400), (error, MAX_ERROR))
        ]
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self.connection.send(
            p.DONE,
            p.INTERPRETER_DONE_HEAD.pack(token, outcome, usage.ru_maxrss << 10),
            p.pack_texts([*texts, *(name.encode() for name in figures)]),
        )

    def exit_fork(self, outcome: int, error: str) -> NoReturn:
        """Exit from a process that a cell forked and that reached the end of the cell."""
        try:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            if error:
                os.write(2, error.encode("utf-8", "backslashreplace") + b"\n")
        finally:
            os._exit(0 if outcome == p.OK else 1)

    def reset_peak_memory(self) -> None:
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
        """Restore what the next cell needs: recursion limit, missing built-ins and modules, standard streams."""
        if sys.getrecursionlimit() < _MIN_RECURSION_LIMIT:
            sys.setrecursionlimit(1000)
        if self.runner.reserve is None:
            try:
                self.runner.reserve = bytearray(1 << 20)
            except MemoryError:
                pass
        if not self.builtins.keys() <= builtins.__dict__.keys():
            for name in self.builtins.keys() - builtins.__dict__.keys():
                builtins.__dict__[name] = self.builtins[name]
        if not self.modules.keys() <= sys.modules.keys():
            sys.modules.update((name, module) for name, module in self.modules.items() if name not in sys.modules)
        if sys.modules.get("__main__") is not self.runner.main:
            sys.modules["__main__"] = self.runner.main
        self.flush_streams()
        for target, fd in enumerate(self.stream_fds):
            try:
                if identify(fd) != self.stream_identities[target]:
                    os._exit(CHANNEL_LOST)
            except OSError:
                os._exit(CHANNEL_LOST)
            try:
                same = identify(target) == self.stream_identities[target]
            except OSError:
                same = False
            if not same:
                os.dup2(fd, target)
            elif target and not os.get_blocking(target):
                os.set_blocking(target, True)
            name = ("stdin", "stdout", "stderr")[target]
            stream = self.streams[target]
            if stream is None or stream.closed:
                stream = self.streams[target] = self.open_stream(target)
            if getattr(sys, name, None) is not stream:
                setattr(sys, name, stream)
            if getattr(sys, f"__{name}__", None) is not stream:
                setattr(sys, f"__{name}__", stream)

    def open_stream(self, fd: int) -> Any:
        raw: Any = open(fd, "rb" if fd == 0 else "wb", closefd=False)
        errors = "backslashreplace" if fd == 2 else "surrogateescape"
        stream = io.TextIOWrapper(raw, "utf-8", errors, "\n", line_buffering=fd > 0)
        stream.mode = "w" if fd else "r"  # type: ignore[misc]
        return stream

    def flush_streams(self) -> None:
        """Flush all streams: a savepoint would write buffered output a second time."""
        for stream in (*self.streams[1:], getattr(sys, "stdout", None), getattr(sys, "stderr", None)):
            try:
                if stream is not None and not stream.closed:
                    stream.flush()
            except BaseException:
                continue

    # ---- host functions

    def _make_function(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self.call_host(name, args, kwargs)

        call.__name__ = call.__qualname__ = name
        call.__doc__ = "Runs outside of the sandbox. Arguments and results must be representable as JSON."
        return call

    def call_host(self, name: str, args: Any, kwargs: Any) -> Any:
        import json

        try:
            request = json.dumps([name, args, kwargs], allow_nan=False).encode("utf-8", "surrogatepass")
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name}() accepts only arguments that JSON can represent: {error}") from None
        if len(request) > MAX_CALL:
            raise ValueError(f"the arguments of {name}() have {len(request)} bytes; the limit is {MAX_CALL}")
        if os.getpid() != self.pid or self.connection.fd < 0:
            raise HostFunctionError(f"{name}() cannot be called in a forked process")
        with self.call_lock:
            if not self.cell_running:
                raise HostFunctionError(f"{name}() can only be called while a cell runs")
            self.connection.send(p.CALL, self.token, request)
            kind, payload, _ = self.connection.receive()
        if kind != p.RESULT:
            os._exit(BROKEN)
        if payload[:1] == b"\1":
            return json.loads(payload[1:])
        error_name, _, text = payload[1:].decode("utf-8", "replace").partition("\n")
        raise (TimeoutError if error_name == "TimeoutError" else HostFunctionError)(text)

    # ---- savepoints

    def fork_savepoint(self, connection_fd: int) -> None:
        """Fork a savepoint as a sibling process, and tell the monitor its pid or the error."""
        self.flush_streams()
        connection_fd = move_fd_up(connection_fd)
        try:
            pid = linux.clone_sibling()
        except OSError as error:
            os.close(connection_fd)
            self.connection.send(p.COPIED, p.SIZE.pack(0), os.strerror(error.errno or 0).encode())
            return
        if pid:
            os.close(connection_fd)
            self.touch_memory()
            self.connection.send(p.COPIED, p.SIZE.pack(pid))
            return
        try:
            self.freeze(connection_fd)
        except BaseException:
            os._exit(BROKEN)

    def touch_memory(self) -> None:
        """Write to the memory pages that every cell needs, so that they are copied now and not during a cell."""
        compile(compile(_TYPICAL_SOURCE, "<cell 0>", "exec", ONLY_AST, True), "<cell 0>", "exec", 0, True)
        _, value, error = self.runner.run(0, b"[0]", 100)
        sys.stdout.write("")
        self.restore()
        p.pack_texts([truncate(text, 100).encode() for text in (value, error)])
        self.reset_peak_memory()

    def freeze(self, connection_fd: int) -> None:
        """Wait, in a new savepoint, until the monitor resumes it. Then return and continue as the interpreter.

        If the savepoint is not needed, the process exits here.
        """
        linux.die_with_parent()
        self.connection.abandon()
        os.setsid()
        linux.set_oom_score(b"0")
        lost = self.replace_pipes_and_sockets({connection_fd, *self.stream_fds})
        linux.set_dumpable(False)
        self.connection = MonitorConnection(connection_fd)
        self.connection.send(p.FROZEN)
        kind, _, _ = self.connection.receive()
        if kind != p.RESUME:
            os._exit(0)
        linux.set_oom_score(b"1000")
        linux.set_dumpable(True)
        self.pid = os.getpid()
        self.repair_event_loop()
        self.connection.send(p.RESUMED, p.SIZE.pack(self.pid), p.SIZE.pack(lost))

    def replace_pipes_and_sockets(self, own_fds: set[int]) -> int:
        """Replace every pipe and socket of the user by a socket whose peer is closed.

        Return how many there were, without those of the event loop. File descriptors in `own_fds` stay.
        """
        lost = 0
        closed_fd = -1
        event_loop_fds = self.list_event_loop_fds()
        for name in os.listdir("/proc/self/fd"):
            fd = int(name)
            try:
                kind = stat.S_IFMT(os.fstat(fd).st_mode)
                if (
                    fd <= 2
                    or fd == closed_fd
                    or fd in own_fds
                    or kind in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFCHR, stat.S_IFBLK)
                ):
                    continue
            except OSError:
                continue
            if closed_fd < 0:
                one, other = _socket.socketpair()
                other.close()
                closed_fd = one.detach()
            os.dup2(closed_fd, fd, inheritable=False)
            lost += fd not in event_loop_fds
        if closed_fd >= 0:
            os.close(closed_fd)
        return lost

    def list_event_loop_fds(self) -> set[int]:
        fds = set()
        for name in ("_ssock", "_csock", "_selector"):
            part = getattr(self.runner.event_loop, name, None)
            if part is not None:
                try:
                    fds.add(part.fileno())
                except Exception:
                    continue
        return fds

    def repair_event_loop(self) -> None:
        """Give the event loop new file descriptors; `replace_pipes_and_sockets` has replaced the old ones."""
        loop = self.runner.event_loop
        if loop is None or loop.is_closed():
            return
        try:
            import selectors

            loop._selector = selectors.DefaultSelector()
            loop._internal_fds = 0
            loop._make_self_pipe()
        except Exception:
            self.runner.event_loop = None
