"""Becoming a new Python: what a fork of a warm interpreter does, so that its program finds what a new one would.

Stand-alone, standard library only, for Python 3.8 and newer: its text also runs in interpreters of images.

Promises:
- the program has a fresh `__main__`, only the modules of a new interpreter, its own arguments, variables, paths,
  streams and signals, and no module, frame or variable of ours;
- how it ends is how it would end: exit codes, tracebacks, threads, `atexit`, SIGINT;
- what cannot be done faithfully (other options, variables that change an interpreter, another locale) is started
  the ordinary way, from the same process.

What differs and cannot be helped: all programs of one warm interpreter share its hash seed and addresses, and who
looks at `object.__subclasses__()` or calls `gc.unfreeze()` finds classes that a new interpreter does not have.
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

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, NoReturn
if TYPE_CHECKING or "rookery.sandboxes" in sys.modules:
    from rookery.sandboxes.local import inside, program
else:
    import program

    try:
        import inside
    except ImportError:  # an interpreter without ctypes
        inside = None

LOCALE = "C.UTF-8"
PRELOAD_SECONDS = 3.0
_REHEARSALS = 20
LAST = (3, 13)
"""The newest version that was compared with what it does itself."""
_HINTS = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "GCONV_", "LOCPATH")
"""Beginnings of the names of variables that change an interpreter from its start on."""
_HONOURED = {"PYTHONUNBUFFERED": "u", "PYTHONDONTWRITEBYTECODE": "B"}
_SWITCHES = {"u": "unbuffered", "B": "dont_write_bytecode", "E": "ignore_environment", "s": "no_user_site"}
_OURS = ("resource", "__main__")
"""What an interpreter that is forked may have kept for itself."""
_IGNORED = {"SIGPIPE", "SIGXFSZ", "SIGXFZ"}
_FIRST = frozenset(
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
"""What an interpreter has before it looks at its site."""


class Unfaithful(Exception):  # noqa: N818  (no error: another way)
    """It has to be started the ordinary way."""


class Warm:
    """What a new interpreter has before its program starts."""

    __slots__ = ("hooks", "modules", "path", "site", "times")

    def __init__(self, modules: dict[str, ModuleType]) -> None:
        self.modules = {name: module for name, module in modules.items() if name != "__main__"}
        self.path = list(sys.path)
        self.hooks = list(sys.meta_path)
        self.site: Any = modules.get("site")
        self.times = _times(self.path)


def preload(hidden: Iterable[str]) -> Warm | None:
    """In an interpreter without a site: what one with a site would have. `hidden`: our own places on its path."""
    ours, path, hooks, flags = dict(sys.modules), list(sys.path), list(sys.meta_path), sys.flags
    executable = sys.executable
    for name in [name for name in ours if name not in _FIRST]:
        del sys.modules[name]
    sys.path[:] = [place for place in path if place not in hidden]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        # Without a user's site: it would be that of whoever runs this.
        sys.flags = inside.flags(**dict.fromkeys(("no_site", "isolated", "ignore_environment"), 0))
        sys.executable = getattr(sys, "_base_executable", executable)  # no virtual environment of ours
        os.environ.setdefault("HOME", "/")  # where there is none, a site looks it up
        import site  # noqa: F401

        if len(os.listdir("/proc/self/task")) > 1:
            return None  # a site that starts threads: no fork of it is sound
        inside.calibrate()
        made = Warm(sys.modules)
        rehearse(made)
    except Exception:
        return None
    else:
        return made
    finally:
        sys.flags = flags
        sys.executable = executable
        sys.modules.clear()
        sys.modules.update(ours)
        sys.path[:] = path
        sys.meta_path[:] = hooks
        for place in hidden:
            sys.path_importer_cache.pop(place, None)


def can_preload(hidden: Iterable[str]) -> bool:
    """Tries it in a fork first: a site is somebody else's code, and may never come to an end."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = int(preload(hidden) is None)
        finally:
            os._exit(code)
    handle = os.pidfd_open(pid)
    try:
        if not select.select([handle], [], [], PRELOAD_SECONDS)[0]:
            os.kill(pid, _signal.SIGKILL)
    finally:
        os.close(handle)
    return os.waitpid(pid, 0)[1] == 0


def undress(warm: Warm) -> None:
    """Leaves the interpreter as its forks are to be, as far as it can do without what it loses: the more is done
    here, the less has each of them to do. Nothing of ours can be imported any more."""
    main = sys.modules["__main__"]
    sys.modules.clear()
    sys.modules.update(warm.modules, __main__=main)
    sys.meta_path[:] = warm.hooks
    sys.path[:] = warm.path
    inside.layout()


def rehearse(warm: Warm) -> None:
    """What an interpreter prepares at the first uses of something, every fork would prepare anew."""
    before = [name + b"=" + value for name, value in os.environb.items()]
    env = {"HOME": "/", "LANG": LOCALE}
    for _ in range(_REHEARSALS):
        asked = understood(["python3", "-c", "pass", "x"], env)
        _site(warm, asked, env)
        _signals()
        _variables([b"LANG=" + LOCALE.encode(), b"HOME=/"])
        code = compile("import sys\nfor x in (): print(f'{x}', *x, sep=[y for y in x])", "<string>", "exec")
        if inside is not None:
            _flags(asked.switches)
        program.below(exec, code, {})
        stream = _stream(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), "stdout", writing=True, bare=False)
        stream.write("x")
        stream.close()
        os.fsdecode(b"x")
    _variables(before)


class Words:
    """A command line of Python's, understood."""

    __slots__ = ("args", "kind", "switches", "text")

    def __init__(self, words: list[str]) -> None:
        self.switches: set[str] = set()
        self.kind, self.text, self.args = "-", "", [""]
        todo = words[1:]
        while todo:
            word = todo[0]
            if word == "-" or not word.startswith("-"):
                self.kind = "-" if word == "-" else "file"
                self.text, self.args = word, todo
                return
            todo = todo[1:]
            for at, letter in enumerate(word[1:], 2):
                if letter in "cm":
                    rest = [word[at:]] if word[at:] else todo[:1]
                    if not rest:
                        raise Unfaithful("a word is missing")
                    self.kind, self.text = letter, rest[0]
                    self.args = [f"-{letter}", *(todo if word[at:] else todo[1:])]
                    return
                if letter == "I":
                    self.switches |= {"I", "E", "s"}
                elif letter in _SWITCHES:
                    self.switches.add(letter)
                else:
                    raise Unfaithful(f"the option {word}")


def understood(words: list[str], env: dict[str, str]) -> Words:
    """What is asked for, where it can be done here."""
    for text in (*words, *env, *env.values()):
        text.encode()  # what is no UTF-8 is told in other words by a new interpreter: UnicodeEncodeError
    if not (3, 8) <= sys.version_info[:2] <= LAST:
        raise Unfaithful("a version that we do not know")
    asked = Words(words)
    for name, value in env.items():
        if name in _HONOURED:
            if value and "E" not in asked.switches:
                asked.switches.add(_HONOURED[name])
        elif name.startswith(_HINTS) and not (name.startswith("PYTHON") and "E" in asked.switches):
            raise Unfaithful(name)
    if (env.get("LC_ALL") or env.get("LC_CTYPE") or env.get("LANG")) != LOCALE:
        raise Unfaithful("another locale")
    if not env.get("HOME"):
        raise Unfaithful("no home")
    if asked.switches and inside is None:
        raise Unfaithful("options cannot be shown")
    return asked


def become(warm: Warm, path: str, parts: list[bytes]) -> NoReturn:
    """In a process that has its descriptors, folder and user already: is that command. `parts`: words, variables.

    `parts` is two lists in one: the words end where an empty list would begin; see `split`.
    """
    gc.freeze()  # or looking for garbage would copy all that is shared
    words, pairs = split(parts)
    try:
        env = dict(pair.decode("utf-8", "surrogateescape").partition("=")[::2] for pair in pairs)
        asked = understood([word.decode("utf-8", "surrogateescape") for word in words], env)
        _site(warm, asked, env)
    except (Unfaithful, UnicodeError):
        os.execve(path, words, {k: v for k, _, v in (pair.partition(b"=") for pair in pairs)})  # noqa: S606
    _dress(warm, asked, env, path, words, pairs)
    program.run(warm.modules, asked, words)


def split(parts: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """The first part says how many words there are."""
    count = int(parts[0])
    return parts[1 : count + 1], parts[count + 1 :]


# ---- looking the part


def _site(warm: Warm, asked: Words, env: dict[str, str]) -> None:
    """A user's own site, and a site that changed since we looked, are a new interpreter's to read."""
    site = warm.site
    if site is None or warm.times != _times(warm.path):
        raise Unfaithful("another site")
    base = f"{env['HOME'].rstrip('/')}/.local"
    place = site._get_path(base)
    if base[0] != "/" or os.path.exists(place):
        raise Unfaithful("a user's own site")
    site.ENABLE_USER_SITE = "s" not in asked.switches
    site.USER_BASE, site.USER_SITE = base, place


def _times(path: list[str]) -> list[int]:
    """When the folders of packages last changed: what lies there may change an interpreter from its start on."""
    found = []
    for place in path:
        if place.endswith("-packages"):
            try:
                found.append(os.stat(place).st_mtime_ns)
            except OSError:
                found.append(0)
    return found


def _dress(
    warm: Warm, asked: Words, env: dict[str, str], path: str, words: list[bytes], pairs: list[bytes]
) -> None:
    _signals()
    _variables(pairs)
    if "TZ" in env:
        time.tzset()
    if inside is not None:
        inside.show(words, pairs)
        sys.flags = _flags(asked.switches)
    for name in _OURS:
        sys.modules.pop(name, None)
    if len(sys.modules) != len(warm.modules):  # looking at every name copies the pages that all of them lie in
        sys.modules.update(warm.modules)
        for name in [name for name in sys.modules if name not in warm.modules]:
            del sys.modules[name]
    if sys.meta_path != warm.hooks:
        sys.meta_path[:] = warm.hooks
    if sys.path != warm.path:
        sys.path[:] = warm.path
    sys.executable = path
    if hasattr(sys, "_base_executable"):
        sys._base_executable = path
    sys.argv[:] = asked.args
    if hasattr(sys, "orig_argv"):
        sys.orig_argv[:] = [word.decode() for word in words]
    sys.dont_write_bytecode = "B" in asked.switches
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)
    _streams(unbuffered="u" in asked.switches)


def _signals() -> None:
    """As an interpreter sets them that found all of them in their default state."""
    for number in range(1, _signal.NSIG):
        if number not in (_signal.SIGKILL, _signal.SIGSTOP):
            try:
                if _signal.getsignal(number) is not _signal.SIG_DFL:
                    _signal.signal(number, _signal.SIG_DFL)
            except (OSError, ValueError):
                pass  # the C library's own
    for name in _IGNORED:
        if hasattr(_signal, name):
            _signal.signal(getattr(_signal, name), _signal.SIG_IGN)
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())


def _variables(pairs: list[bytes]) -> None:
    """Python's, and those that C gives to other programs."""
    data: Any = os.environ._data  # type: ignore[attr-defined]
    for name in list(data):
        os.unsetenv(name)
    data.clear()
    posix.environ.clear()
    for pair in pairs:
        name, _, value = pair.partition(b"=")
        os.putenv(name, value)
        data[name] = posix.environ[name] = value


def _flags(switches: set[str]) -> Any:
    changed = dict.fromkeys(("no_site", "isolated", "ignore_environment", "no_user_site", "safe_path"), 0)
    for letter in switches:
        if letter == "I":
            changed.update(isolated=1, safe_path=1)
        else:
            changed[_SWITCHES[letter]] = 1
    return inside.flags(**changed)


def _streams(*, unbuffered: bool) -> None:
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _stream(fd, name, writing=fd > 0, bare=fd > 0 and unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _stream(fd: int, name: str, *, writing: bool, bare: bool) -> Any:
    buffer: Any = _io.open(fd, "wb" if writing else "rb", 0 if bare else -1, closefd=fd > 2)
    raw = buffer if bare else buffer.raw
    raw.name = f"<{name}>"
    stream = _io.TextIOWrapper(
        buffer,
        "utf-8",
        "backslashreplace" if name == "stderr" else "surrogateescape",  # as in the locale that is asked for
        "\n",
        line_buffering=not bare and ((name == "stderr" and sys.version_info >= (3, 9)) or raw.isatty()),
        write_through=bare,
    )
    stream.mode = "w" if writing else "r"  # type: ignore[misc]
    return stream
