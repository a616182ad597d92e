"""Build an image with Python, bash, awk, git, make and a C compiler from the files of this machine."""

import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

from tests.sandboxes.docker import engine as engines
from tests.sandboxes.root_filesystems import list_libraries

PROGRAMS = (
    "gcc",
    "make",
    "git",
    "awk",
    "as",
    "ld",
    "mktemp",
    "diff",
    "cmp",
    "timeout",
    "xargs",
    "tar",
    "comm",
    "uniq",
)
_HEADERS = (
    "stdio stdlib string stddef stdint limits errno ctype time math assert signal unistd fcntl sys/mman sys/stat"
)
_LIBRARIES = ("crt1.o", "Scrt1.o", "crti.o", "crtn.o", "libc.so", "libm.so", "libc_nonshared.a", "libgcc_s.so.1")


def system_at(tar: Path) -> Path:
    """Write the archive of a system; add to it if it exists."""
    engines.build_test_image(tar)
    with tarfile.open(tar, "a") as file:
        present = set(file.getnames())
        for target, source in sorted(_list_files().items()):
            if target not in present:
                file.add(os.path.realpath(source), target)
    return tar


def _list_files() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in PROGRAMS:
        program = shutil.which(name)
        assert program is not None, f"this machine has no {name}"
        found[f"usr/bin/{name}"] = program
    compiler_directory = Path(_query_gcc("-print-libgcc-file-name")).parent
    for path in (*compiler_directory.iterdir(), *(compiler_directory / "include").rglob("*")):
        # Other compilers and sanitizer libraries would be most of the size.
        if path.is_file() and not re.match(r"cc1plus|lto1|f951|lib[a-z]*san|g\+\+", path.name):
            found[str(path)[1:]] = str(path)
    for name in _LIBRARIES:
        library = os.path.normpath(_query_gcc(f"-print-file-name={name}"))
        if os.path.isabs(library):
            found[library[1:]] = library
            for other in re.findall(r"/\S+\.(?:so\.\d+|a|so)", _read_linker_script(library)):
                found[other[1:]] = other
    for header in _list_headers():
        found[os.path.normpath(header)[1:]] = header
    for source in list(found.values()):
        if os.access(source, os.X_OK):
            for library in list_libraries(source):
                found.setdefault(library[1:], library)
    return found


def _query_gcc(option: str) -> str:
    return subprocess.run(["gcc", option], capture_output=True, text=True, check=True).stdout.strip()


def _read_linker_script(path: str) -> str:
    """Return the text of a linker script, or an empty string for a binary file."""
    data = Path(path).read_bytes()
    return "" if b"\0" in data else data.decode()


def _list_headers() -> set[str]:
    """Return the headers that the compiler reads with any of the usual options."""
    lines = "".join(f"#include <{name}.h>\n" for name in _HEADERS.split())
    found: set[str] = set()
    for options in ("", "-O1 -std=c99", "-O1 -D_GNU_SOURCE", "-O1 -std=c99 -D_DEFAULT_SOURCE", "-std=c99"):
        words = ["gcc", *options.split(), "-M", "-xc", "-"]
        output = subprocess.run(words, input=lines, capture_output=True, text=True, check=True).stdout
        found.update(word for word in output.split() if word.startswith("/") and word.endswith(".h"))
    return found
