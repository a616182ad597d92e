"""Compile the C library for pid 1 of `local` sandboxes at its first use and keep it in the user's cache.

Runs in the process that starts a keeper. Without root, without a C compiler, or with `ROOKERY_NATIVE=0`, sandboxes
do the same work in Python, at about twice the CPU time.

Guarantees:
- the library is loaded only from a path that no other user can change;
- processes that need it at the same time compile it once.
"""

import fcntl
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from rookery.sandbox_runtime.pid1 import native_init

COMPILE_SECONDS = 60.0
_SOURCES = Path(native_init.__file__).with_name("native")
_FLAGS = ("-O2", "-fPIC", "-shared", "-fstack-protector-strong", "-D_FORTIFY_SOURCE=2")


class NativeLibrary(NamedTuple):
    """The compiled library, or why it is not used."""

    path: str = ""
    problem: str = ""
    fix: str = ""


def find_library() -> NativeLibrary:
    """Return the library, compiled if necessary, or why it cannot be used here."""
    if os.geteuid() != 0:
        return NativeLibrary("", "it needs root")
    if os.environ.get("ROOKERY_NATIVE") == "0":
        return NativeLibrary("", "ROOKERY_NATIVE is 0", "unset ROOKERY_NATIVE")
    return compile_once()


def library_path() -> Path:
    """Return where the compiled library is kept. The name depends on its sources and on this machine.

    Raises `RuntimeError` if this user has no home directory.
    """
    digest = hashlib.sha256(repr((_FLAGS, platform.machine(), platform.libc_ver())).encode())
    for source in sorted(_SOURCES.glob("*.[ch]")):
        digest.update(source.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache.resolve() / "rookery" / "native" / f"pid1-{digest.hexdigest()[:16]}.so"


@functools.cache
def compile_once() -> NativeLibrary:
    try:
        library = library_path()
        directory = library.parent
        if (changeable := _find_changeable(directory)) is None:
            directory.mkdir(parents=True, exist_ok=True, mode=0o755)
            changeable = _find_changeable(directory)
        if changeable is not None:
            fix = "set XDG_CACHE_HOME to a directory that only root can change"
            return NativeLibrary("", f"other users can change {changeable}", fix)
        if not library.exists():
            compiler = shutil.which("cc") or shutil.which("gcc")
            if compiler is None:
                return NativeLibrary("", "there is no C compiler", "install gcc")
            _compile(compiler, library)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return NativeLibrary("", f"it cannot be compiled: {error}")
    if _find_changeable(library) is not None:
        return NativeLibrary("", f"other users can change {library}", f"remove {library}")
    return NativeLibrary(str(library))


def _compile(compiler: str, library: Path) -> None:
    """Compile the library, unless another process does it while this one waits for the lock of the directory."""
    lock = os.open(library.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder, library.name)
            arguments = [compiler, *_FLAGS, "-o", str(made), *map(str, sorted(_SOURCES.glob("*.c")))]
            subprocess.run(arguments, check=True, capture_output=True, timeout=COMPILE_SECONDS)
            made.chmod(0o755)
            with made.open("rb") as file:
                os.fsync(file.fileno())  # otherwise the file could be incomplete after a power failure
            made.replace(library)
    finally:
        os.close(lock)


def _find_changeable(path: Path) -> Path | None:
    """Return the first part of a path without symbolic links that other users can change; None if there is none.

    Parts that do not exist are skipped. In a sticky directory, such as /tmp, other users can only add files.
    """
    for part in (*reversed(path.parents), path):
        try:
            info = part.lstat()
        except FileNotFoundError:
            return None
        sticky = stat.S_ISDIR(info.st_mode) and info.st_mode & stat.S_ISVTX
        if info.st_uid != 0 or (info.st_mode & 0o022 and not sticky):
            return part
    return None
