"""Build a self-contained directory with the program that is PID 1 of every container, and a Python interpreter.

The directory contains the interpreter, its libraries, the dynamic loader and the package `sandbox_runtime`, all
from this machine. Nothing comes from the image, and the loader reads no configuration of the image (no preloaded
libraries, no cache). The provider builds the directory once and mounts it read-only into containers. It appears
under its final name only when it is complete.

The loader is started as a program with the interpreter as its argument, so it does not matter which C library
an image has, if any. Images of another architecture work if the kernel can run their programs.
"""

import importlib.util
import json
import os
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path

from rookery import sandbox_runtime
from rookery.core import SandboxError
from rookery.sandbox_runtime import seccomp

MOUNT_POINT = "/.rookery"
"""Path in a container at which the directory with the interpreter is mounted."""
CONTROL_DIRECTORY = "control"
"""Subdirectory of `MOUNT_POINT` at which the host directory with the owner's control socket is mounted."""
SECCOMP_FILTER = "seccomp_filter"
ETC = {
    "hosts": "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.0.1\tsandbox\n",
    "resolv.conf": "nameserver 127.0.0.1\nsearch .\n",
}
"""Content of files in /etc, for container engines that do not write them for a container without a network."""
_INIT = "rookery.sandbox_runtime.pid1.docker_init"
_RUNTIME = "runtime/rookery/sandbox_runtime"
_PRELOAD, _NO_PRELOAD = b"/etc/ld.so.preload\0", b"/.rookery/no-such\0\0"
_TIMEOUT_SECONDS = 60.0
_LIST_FILES = """
import sys
program = {"__name__": "program", "__file__": sys.argv[1]}
exec(open(sys.argv[1]).read(), program)
program["import_program"](sys.argv[2])
import encodings.ascii, encodings.latin_1, encodings.utf_8, json, os, resource
mapped = [line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if line.count("/") > 1]
files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
print(json.dumps({"mapped": sorted(set(mapped)), "files": files, "stdlib": os.path.dirname(os.__file__)}))
"""


def command_line() -> list[str]:
    """Return the command line of PID 1 in a container."""
    loader = ["--inhibit-cache"] if not _is_musl() else []
    python = [f"{MOUNT_POINT}/python/bin/python3", "-I", "-S", "-X", "utf8", "-X", "frozen_modules=on"]
    program = [f"{MOUNT_POINT}/{_RUNTIME}/__main__.py", _INIT]
    return [f"{MOUNT_POINT}/ld", *loader, "--library-path", f"{MOUNT_POINT}/lib", *python, *program]


def build(folder: Path) -> None:
    """Build the directory `folder`, which must not exist yet. Raise `SandboxError` if that fails."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        _build(partial)
        partial.rename(folder)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise SandboxError(
            f"cannot build {folder}, the directory with PID 1 of containers: {error}", cause="sandbox.create"
        ) from error


def _build(folder: Path) -> None:
    machine = os.uname().machine
    if machine not in seccomp.AUDIT_ARCH:
        raise ValueError(f"there is no seccomp filter for the machine type {machine}")
    base = getattr(sys, "_base_executable", "") or sys.executable
    package_root = Path(sandbox_runtime.__file__).parent
    command = [base, "-I", "-S", "-c", _LIST_FILES, str(package_root / "__main__.py"), _INIT]
    completed = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_SECONDS, check=False)
    if completed.returncode:
        raise ValueError(
            f"Python cannot import the program: {completed.stderr.decode('utf-8', 'replace').strip()[-500:]}"
        )
    found = json.loads(completed.stdout)
    stdlib = Path(found["stdlib"])
    loader = _find_loader(found["mapped"])
    target = folder / "python" / "lib" / stdlib.name
    for directory in (
        folder / "lib",
        folder / "python" / "bin",
        target / "lib-dynload",
        folder / CONTROL_DIRECTORY,
    ):
        directory.mkdir(parents=True)
    binary = Path("/proc/self/exe").resolve() if base == sys.executable else Path(base).resolve()
    shutil.copyfile(binary, folder / "python" / "bin" / "python3")
    text = Path(loader).read_bytes()
    (folder / "ld").write_bytes(text.replace(_PRELOAD, _NO_PRELOAD))
    extensions = {os.path.realpath(path) for path in found["files"].values() if path and path.endswith(".so")}
    for path in found["mapped"]:
        if (
            path not in (loader, str(binary))
            and os.path.realpath(path) not in extensions
            and ".so" in Path(path).name
        ):
            shutil.copyfile(path, folder / "lib" / _find_soname(path))
    for name in ("os.py", *(path for path in found["files"].values() if path)):
        source = stdlib / name
        if not source.is_relative_to(stdlib):
            continue
        if source.suffix == ".so":
            shutil.copyfile(source, target / "lib-dynload" / source.name)
        else:
            _copy_compiled(source, target / source.relative_to(stdlib))
    for package in ("", "pid1", "python"):
        for source in (package_root / package).glob("*.py"):
            _copy_compiled(source, folder / _RUNTIME / package / source.name)
    (folder / SECCOMP_FILTER).write_bytes(seccomp.build_filter(machine))
    for name, lines in ETC.items():
        (folder / name).write_text(lines)
    for path in (folder / "ld", folder / "python" / "bin" / "python3", *(folder / "lib").iterdir()):
        path.chmod(0o755)


def _copy_compiled(source: Path, target: Path) -> None:
    """Copy a Python module and compile it. Python uses the compiled file without comparing it to the source."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    cached = importlib.util.cache_from_source(str(target))
    py_compile.compile(
        str(target),
        cached,
        dfile=f"{MOUNT_POINT}/{target.name}",
        doraise=True,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )


def _find_loader(mapped: list[str]) -> str:
    for path in mapped:
        if Path(path).name.startswith(("ld-linux", "ld-musl", "ld-2", "ld.so")):
            return path
    raise ValueError("the dynamic loader of this machine was not found")


def _find_soname(path: str) -> str:
    """Return the file name by which programs load a library (its soname), for example `libz.so.1`."""
    real = Path(path)
    for other in real.parent.iterdir():
        if other.is_symlink() and ".so." in other.name and other.name != real.name and other.resolve() == real:
            return other.name
    return real.name


def _is_musl() -> bool:
    return any(Path("/lib").glob("ld-musl-*"))
