"""Compile the C library for pid 1 of `local` sandboxes at its first use and keep it in the user's cache.

Runs in the process that starts a keeper. Without root, without a C compiler, or with `ROOKERY_NATIVE=0`, sandboxes
do the same work in Python, at about twice the CPU time.
"""

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from rookery.sandbox_runtime.pid1 import native_init

COMPILE_SECONDS = 60.0
_SOURCES = Path(native_init.__file__).with_name("native")
_FLAGS = ("-O2", "-fPIC", "-shared", "-fstack-protector-strong", "-D_FORTIFY_SOURCE=2")


def find_library() -> str:
    """Return the path of the compiled library; empty if it is switched off or cannot be compiled or used here."""
    if os.geteuid() != 0 or os.environ.get("ROOKERY_NATIVE") == "0":
        return ""
    return _compile_once()


def library_path() -> Path:
    """Return where the compiled library is kept. The name depends on its sources and on this machine."""
    digest = hashlib.sha256(repr((_FLAGS, platform.machine(), platform.libc_ver())).encode())
    for source in sorted(_SOURCES.glob("*.[ch]")):
        digest.update(source.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute()
    return cache / "rookery" / "native" / f"pid1-{digest.hexdigest()[:16]}.so"


@functools.cache
def _compile_once() -> str:
    library = library_path()
    sources = sorted(_SOURCES.glob("*.c"))
    compiler = shutil.which("cc") or shutil.which("gcc")
    try:
        if not library.exists() and compiler and sources:
            library.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
            with tempfile.TemporaryDirectory(dir=library.parent) as folder:
                made = Path(folder, library.name)
                arguments = [compiler, *_FLAGS, "-o", str(made), *map(str, sources)]
                subprocess.run(arguments, check=True, capture_output=True, timeout=COMPILE_SECONDS)
                made.chmod(0o755)
                made.replace(library)
        return str(library) if _is_trusted(library.parent) and _is_trusted(library) else ""
    except (OSError, subprocess.SubprocessError):
        return ""


def _is_trusted(path: Path) -> bool:
    """Return whether only this user, or root, can change a file. The keeper executes it, often as root."""
    info = path.stat()
    return info.st_uid in (0, os.geteuid()) and not info.st_mode & 0o022
