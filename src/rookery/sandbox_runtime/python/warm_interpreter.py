"""Turn a fork of a running interpreter into what a newly started interpreter would be for a given command line.

An interpreter that runs only to be forked is called warm. This module runs in pid 1 of sandboxes and in fork
servers inside them, on Python 3.8 and newer.

Guarantees:
- the program has a fresh `__main__`, only the modules of a new interpreter, its own arguments, environment, paths,
  streams and signal handlers, and no module, frame or variable of Rookery;
- it ends as it would in a new interpreter: exit codes, tracebacks, threads, `atexit`, SIGINT;
- a command line that cannot be imitated (other options, environment variables that change the interpreter, another
  locale) is executed with execve from the same process.

Known differences: all programs of one warm interpreter share its hash seed and memory addresses, and
`object.__subclasses__()` and `gc.unfreeze()` reveal classes that a new interpreter does not have.
"""

from __future__ import annotations

import _io
import _signal  # type: ignore[import-not-found]
import gc
import os
import posix
import select
import sys
import time
from types import ModuleType

from rookery.sandbox_runtime.python import program

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

try:
    from rookery.sandbox_runtime.python import cpython_internals as internals
except ImportError:  # an interpreter without ctypes
    internals = None  # type: ignore[assignment]

LOCALE = "C.UTF-8"
PRELOAD_SECONDS = 3.0
_WARMUP_RUNS = 20
NEWEST_VERSION = (3, 13)
"""The newest version of Python for which forked programs were compared with a new interpreter."""
_STARTUP_PREFIXES = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "GCONV_", "LOCPATH")
"""Prefixes of environment variables that change how an interpreter starts."""
_SWITCH_VARIABLES = {"PYTHONUNBUFFERED": "u", "PYTHONDONTWRITEBYTECODE": "B"}
_SWITCHES = {"u": "unbuffered", "B": "dont_write_bytecode", "E": "ignore_environment", "s": "no_user_site"}
_OWN_MODULES = ("resource", "__main__")
"""Modules that a warm interpreter may have in addition to those of a new one."""
_IGNORED_SIGNALS = {"SIGPIPE", "SIGXFSZ", "SIGXFZ"}
_CORE_MODULES = frozenset(
    [
        "sys",
        "builtins",
        "_frozen_importlib",
        "_imp",
        "_thread",
        "_warnings",
        "_weakref",
        "_io",
        "marshal",
        "posix",
        "_frozen_importlib_external",
        "time",
        "zipimport",
        "_codecs",
        "codecs",
        "encodings.aliases",
        "encodings",
        "encodings.utf_8",
        "_signal",
        "_abc",
        "abc",
        "io",
        "__main__",
    ]
)
"""Modules that an interpreter has imported before it imports `site`."""


class NotImitable(Exception):  # noqa: N818  (not an error: a new interpreter is started)
    """A forked interpreter cannot imitate a new one for this command line; a new one must be started."""


class Warm:
    """State that a new interpreter has before its program starts: modules and import paths."""

    __slots__ = ("meta_path", "modified", "modules", "path", "site", "user_site")

    def __init__(self, modules: dict[str, ModuleType]) -> None:
        self.modules = {name: module for name, module in modules.items() if name != "__main__"}
        self.path = list(sys.path)
        self.meta_path = list(sys.meta_path)
        self.site: Any = modules.get("site")
        self.user_site = self.site._get_path("") if self.site is not None else ""
        """Path of the user's site directory below its base directory."""
        self.modified = _read_modification_times(self.path)


def preload() -> Warm | None:
    """Import `site` in an interpreter that was started without it, and return the resulting state.

    The current state of this interpreter is restored afterwards. Return None if `site` fails or starts threads.
    """
    own_modules, path, meta_path, flags = dict(sys.modules), list(sys.path), list(sys.meta_path), sys.flags
    executable = sys.executable
    for name in [name for name in own_modules if name not in _CORE_MODULES]:
        del sys.modules[name]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        # `no_user_site` stays: the user site would be that of the user who runs this process.
        sys.flags = internals.build_flags(**dict.fromkeys(("no_site", "isolated", "ignore_environment"), 0))
        sys.executable = getattr(sys, "_base_executable", executable)  # not that of our virtual environment
        os.environ.setdefault("HOME", "/")  # `site` would look it up in the user database
        import site  # noqa: F401

        if len(os.listdir("/proc/self/task")) > 1:
            return None  # forking a process with threads is unsafe
        calibrate()
        warm = Warm(sys.modules)
        warm_up(warm)
    except Exception:
        return None
    else:
        return warm
    finally:
        sys.flags = flags
        sys.executable = executable
        sys.modules.clear()
        sys.modules.update(own_modules)
        sys.path[:] = path
        sys.meta_path[:] = meta_path


def can_preload() -> bool:
    """Try `preload` in a fork: `site` runs code of the installation, which may never return."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = int(preload() is None)
        finally:
            os._exit(code)
    handle = os.pidfd_open(pid)
    try:
        if not select.select([handle], [], [], PRELOAD_SECONDS)[0]:
            os.kill(pid, _signal.SIGKILL)
    finally:
        os.close(handle)
    return os.waitpid(pid, 0)[1] == 0


def reset_modules(warm: Warm) -> None:
    """Reset `sys.modules` and the import paths to those of a new interpreter, once for all forks of this process.

    Afterwards no module of Rookery can be imported. Functions that are already loaded continue to work.
    """
    main = sys.modules["__main__"]
    sys.modules.clear()
    sys.modules.update(warm.modules, __main__=main)
    sys.meta_path[:] = warm.meta_path
    sys.path[:] = warm.path
    internals.read_memory_map()


def calibrate() -> None:
    """Find out how to hide Rookery's stack frames from programs, if the interpreter has ctypes."""
    if internals is not None:
        internals.calibrate()


def warm_up(warm: Warm) -> None:
    """Execute once what every fork executes, so that forks share lazily created state instead of creating it."""
    before = [name + b"=" + value for name, value in os.environb.items()]
    env = {"HOME": "/", "LANG": LOCALE}
    for _ in range(_WARMUP_RUNS):
        command_line = parse_command_line(["python3", "-c", "pass", "x"], env)
        _set_user_site(warm, command_line, env)
        _reset_signals()
        _set_environment([b"LANG=" + LOCALE.encode(), b"HOME=/"])
        code = compile("import sys\nfor x in (): print(f'{x}', *x, sep=[y for y in x])", "<string>", "exec")
        if internals is not None:
            _build_flags(command_line.switches)
        program.call_hidden(exec, code, {})
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        stream = _open_stream(null, "stdout", writing=True, unbuffered=False)
        stream.write("x")
        stream.close()
        os.fsdecode(b"x")
    _set_environment(before)


class CommandLine:
    """The parsed arguments of a Python interpreter."""

    __slots__ = ("args", "kind", "switches", "target")

    def __init__(self, argv: list[str]) -> None:
        self.switches: set[str] = set()
        self.kind, self.target, self.args = "-", "", [""]
        """The code to run: the kind is `c` (source), `m` (module), `file` or `-` (standard input); `target` is the
        source, module or file, and `args` becomes `sys.argv`."""
        todo = argv[1:]
        while todo:
            word = todo[0]
            if word == "-" or not word.startswith("-"):
                self.kind = "-" if word == "-" else "file"
                self.target, self.args = word, todo
                return
            todo = todo[1:]
            for at, letter in enumerate(word[1:], 2):
                if letter in "cm":
                    rest = [word[at:]] if word[at:] else todo[:1]
                    if not rest:
                        raise NotImitable("an argument is missing")
                    self.kind, self.target = letter, rest[0]
                    self.args = [f"-{letter}", *(todo if word[at:] else todo[1:])]
                    return
                if letter == "I":
                    self.switches |= {"I", "E", "s"}
                elif letter in _SWITCHES:
                    self.switches.add(letter)
                else:
                    raise NotImitable(f"the option {word}")


def parse_command_line(argv: list[str], env: dict[str, str]) -> CommandLine:
    """Parse a command line; raise `NotImitable` if it needs a new interpreter."""
    if not (3, 8) <= sys.version_info[:2] <= NEWEST_VERSION:
        raise NotImitable("untested version of Python")
    parsed = CommandLine(argv)
    for name, value in env.items():
        if name in _SWITCH_VARIABLES:
            if value and "E" not in parsed.switches:
                parsed.switches.add(_SWITCH_VARIABLES[name])
        elif name.startswith(_STARTUP_PREFIXES) and not (name.startswith("PYTHON") and "E" in parsed.switches):
            raise NotImitable(name)
    if (env.get("LC_ALL") or env.get("LC_CTYPE") or env.get("LANG")) != LOCALE:
        raise NotImitable("another locale")
    if not env.get("HOME"):
        raise NotImitable("no home")
    if parsed.switches and internals is None:
        raise NotImitable("without ctypes, sys.flags cannot be set")
    return parsed


def become_command(warm: Warm, interpreter: str, argv: list[bytes], pairs: list[bytes]) -> NoReturn:
    """Run a Python command line in this process.

    The process must already have the command's file descriptors, working directory and user. `pairs` are the
    environment variables as NAME=value. If the command line cannot be imitated, execute `interpreter` instead.
    """
    prepare_commands(warm)
    if internals is not None:
        internals.set_command_line(argv, pairs)
    become_prepared_command(warm, interpreter, argv, pairs, piped=False)


def become_prepared_command(
    warm: Warm, interpreter: str, argv: list[bytes], pairs: list[bytes], *, piped: bool
) -> NoReturn:
    """Run a Python command line in a fork of a process that has called `prepare_commands`.

    As `become_command`, but /proc must already show the command line. `piped` says that the standard streams are
    a seekable file at its start and two pipes.
    """
    try:
        # A new interpreter reports invalid UTF-8 differently.
        texts = b"\0".join((*argv, *pairs)).decode().split("\0")
        env = dict(pair.partition("=")[::2] for pair in texts[len(argv) :])
        command_line = parse_command_line(texts[: len(argv)], env)
        _set_user_site(warm, command_line, env)
    except (NotImitable, UnicodeError):
        os.execve(interpreter, argv, {k: v for k, _, v in (pair.partition(b"=") for pair in pairs)})  # noqa: S606
    _reset_interpreter(warm, command_line, env, interpreter, texts[: len(argv)], pairs, piped=piped)
    program.run(warm.modules, command_line, argv)


# ---- resetting the interpreter


def _set_user_site(warm: Warm, command_line: CommandLine, env: dict[str, str]) -> None:
    """Set the path of the user's site directory.

    Raise `NotImitable` if that directory exists or an installed package changed.
    """
    site = warm.site
    if site is None or warm.modified != _read_modification_times(warm.path):
        raise NotImitable("site-packages changed")
    base = f"{env['HOME'].rstrip('/')}/.local"
    user_site = base + warm.user_site
    if base[0] != "/" or os.access(user_site, os.F_OK):
        raise NotImitable("the user has a site directory")
    site.ENABLE_USER_SITE = "s" not in command_line.switches
    site.USER_BASE, site.USER_SITE = base, user_site


def _read_modification_times(path: list[str]) -> list[int]:
    """Return when the package directories in `path` changed. Files there can affect how Python starts."""
    times = []
    for directory in path:
        if directory.endswith("-packages"):
            try:
                times.append(os.stat(directory).st_mtime_ns)
            except OSError:
                times.append(0)
    return times


def prepare_commands(warm: Warm) -> None:
    """Do what every command does before its program starts and what does not depend on the command.

    Forks of this process share the result instead of copying the memory pages that they would change.
    """
    _reset_signals()
    _set_environment([])
    if internals is not None:
        sys.flags = _build_flags(set())
    if sys.meta_path != warm.meta_path:
        sys.meta_path[:] = warm.meta_path
    if sys.path != warm.path:
        sys.path[:] = warm.path
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)
    gc.freeze()  # the garbage collector would copy every shared page


def open_piped_streams() -> None:
    """Open the standard streams of commands whose input is a seekable file and whose output are two pipes."""
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    ends = os.pipe2(os.O_CLOEXEC)
    saved = [os.dup(fd) for fd in range(3)]
    try:
        for target, fd in enumerate((null, ends[1], ends[1])):
            os.dup2(fd, target)
        _open_streams(unbuffered=False)
    finally:
        for target, fd in enumerate(saved):
            os.dup2(fd, target)
        for fd in (null, *ends, *saved):
            os.close(fd)


def _reset_interpreter(
    warm: Warm,
    command_line: CommandLine,
    env: dict[str, str],
    interpreter: str,
    argv: list[str],
    pairs: list[bytes],
    *,
    piped: bool,
) -> None:
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)  # pid 1 has no handler
    _set_environment(pairs)
    if "TZ" in env:
        time.tzset()
    if command_line.switches:
        sys.flags = _build_flags(command_line.switches)
    for name in _OWN_MODULES:
        sys.modules.pop(name, None)
    if len(sys.modules) != len(warm.modules):  # comparing every name would copy shared memory pages
        sys.modules.update(warm.modules)
        for name in [name for name in sys.modules if name not in warm.modules]:
            del sys.modules[name]
    sys.executable = interpreter
    if hasattr(sys, "_base_executable"):
        sys._base_executable = interpreter
    sys.argv[:] = command_line.args
    if hasattr(sys, "orig_argv"):
        sys.orig_argv[:] = argv
    sys.dont_write_bytecode = "B" in command_line.switches
    unbuffered = "u" in command_line.switches
    if unbuffered or not piped:
        _open_streams(unbuffered=unbuffered)


def _reset_signals() -> None:
    """Set signal handlers as an interpreter does that starts with default handlers."""
    for number in range(1, _signal.NSIG):
        if number not in (_signal.SIGKILL, _signal.SIGSTOP):
            try:
                if _signal.getsignal(number) is not _signal.SIG_DFL:
                    _signal.signal(number, _signal.SIG_DFL)
            except (OSError, ValueError):
                pass  # reserved by the C library
    for name in _IGNORED_SIGNALS:
        if hasattr(_signal, name):
            _signal.signal(getattr(_signal, name), _signal.SIG_IGN)
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())


def _set_environment(pairs: list[bytes]) -> None:
    """Set the environment variables of Python and of the C library."""
    data: Any = os.environ._data  # type: ignore[attr-defined]
    for name in list(data):
        os.unsetenv(name)
    data.clear()
    posix.environ.clear()
    for pair in pairs:
        name, _, value = pair.partition(b"=")
        os.putenv(name, value)
        data[name] = posix.environ[name] = value


def _build_flags(switches: set[str]) -> Any:
    changed = dict.fromkeys(("no_site", "isolated", "ignore_environment", "no_user_site", "safe_path"), 0)
    for letter in switches:
        if letter == "I":
            changed.update(isolated=1, safe_path=1)
        else:
            changed[_SWITCHES[letter]] = 1
    return internals.build_flags(**changed)


def _open_streams(*, unbuffered: bool) -> None:
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _open_stream(fd, name, writing=fd > 0, unbuffered=fd > 0 and unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _open_stream(fd: int, name: str, *, writing: bool, unbuffered: bool) -> Any:
    buffer: Any = _io.open(fd, "wb" if writing else "rb", 0 if unbuffered else -1, closefd=fd > 2)
    raw = buffer if unbuffered else buffer.raw
    raw.name = f"<{name}>"
    stream = _io.TextIOWrapper(
        buffer,
        "utf-8",
        "backslashreplace" if name == "stderr" else "surrogateescape",  # as in the C.UTF-8 locale
        "\n",
        line_buffering=not unbuffered and ((name == "stderr" and sys.version_info >= (3, 9)) or raw.isatty()),
        write_through=unbuffered,
    )
    stream.mode = "w" if writing else "r"  # type: ignore[misc]
    return stream
