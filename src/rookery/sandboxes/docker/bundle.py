"""What pid 1 of a container is made of: a folder that holds all it needs, whatever the image is.

Promises:
- nothing in it is the image's: interpreter, libraries and the loader itself come from this machine, and the loader
  reads no setting of the image's (no list of libraries to load first, no cache);
- it is made once for a provider and mounted read-only; a folder that is there is whole.

The loader is started as a program, with the interpreter as its argument: so it does not matter which C library an
image has, or whether it has any. Images of another architecture work where the kernel can run their programs.
"""

import importlib.util
import json
import os
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path

from rookery.core import SandboxError
from rookery.sandboxes import guard
from rookery.sandboxes.local import seccomp

TOP = "/.rookery"
"""Where it is mounted in a container."""
LINE = "line"
"""The folder in it that the owner's socket is mounted at."""
FILTER = "filter"
ETC = {
    "hosts": "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.0.1\tsandbox\n",
    "resolv.conf": "nameserver 127.0.0.1\nsearch .\n",
}
"""For an engine that does not write them as a container without a network needs them."""
_OURS = ("guard", "procs", "small", "trees")
_OF_LOCAL = ("first", "inside", "kernel", "launch", "netlink", "program", "python", "zygote", "zygotes")
_OF_DOCKER = ("inner",)
_PRELOAD, _NO_PRELOAD = b"/etc/ld.so.preload\0", b"/.rookery/no-such\0\0"
_SECONDS = 60.0
_LOOK = """
import sys
sys.path.insert(0, sys.argv[4])
import inner
import encodings.ascii, encodings.latin_1, encodings.utf_8, json, os, resource
mapped = [line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if line.count("/") > 1]
files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
print(json.dumps({"mapped": sorted(set(mapped)), "files": files, "stdlib": os.path.dirname(os.__file__)}))
"""


def words() -> list[str]:
    """How pid 1 is started in a container."""
    loader = ["--inhibit-cache"] if not _is_musl() else []
    python = [f"{TOP}/python/bin/python3", "-I", "-S", "-X", "utf8", "-X", "frozen_modules=on"]
    places = [f"{TOP}/ours", f"{TOP}/ours/local"]
    return [f"{TOP}/ld", *loader, "--library-path", f"{TOP}/lib", *python, f"{TOP}/ours/inner.py", *places, "cold"]


def make(folder: Path) -> None:
    """All of it, in a folder that does not exist yet."""
    half = folder.with_name(f".{folder.name}.half")
    shutil.rmtree(half, ignore_errors=True)
    try:
        _make(half)
        half.rename(folder)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        shutil.rmtree(half, ignore_errors=True)
        raise SandboxError(
            f"what a container starts with cannot be made: {error}", cause="sandbox.create"
        ) from error


def _make(folder: Path) -> None:
    machine = os.uname().machine
    if machine not in seccomp.AUDIT_ARCH:
        raise ValueError(f"no filter of system calls is known for {machine}")
    base = getattr(sys, "_base_executable", "") or sys.executable
    ours = Path(guard.__file__).parent
    look = [base, "-I", "-S", "-c", _LOOK, str(ours), str(ours / "local"), "cold", str(ours / "docker")]
    ran = subprocess.run(look, capture_output=True, timeout=_SECONDS, check=False)
    if ran.returncode:
        raise ValueError(f"this Python cannot run it: {ran.stderr.decode('utf-8', 'replace').strip()[-500:]}")
    found = json.loads(ran.stdout)
    stdlib = Path(found["stdlib"])
    loader = _loader(found["mapped"])
    target = folder / "python" / "lib" / stdlib.name
    for place in (
        folder / "lib",
        folder / "python" / "bin",
        target / "lib-dynload",
        folder / "ours",
        folder / LINE,
    ):
        place.mkdir(parents=True)
    (folder / "ours" / "local").mkdir()
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
            shutil.copyfile(path, folder / "lib" / _soname(path))
    for name in ("os.py", *(path for path in found["files"].values() if path)):
        source = stdlib / name
        if not source.is_relative_to(stdlib):
            continue
        if source.suffix == ".so":
            shutil.copyfile(source, target / "lib-dynload" / source.name)
        else:
            _compiled(source, target / source.relative_to(stdlib))
    for package, names in (("", _OURS), ("local", _OF_LOCAL)):
        for name in names:
            _compiled(ours / package / f"{name}.py", folder / "ours" / package / f"{name}.py")
    for name in _OF_DOCKER:
        _compiled(ours / "docker" / f"{name}.py", folder / "ours" / f"{name}.py")
    (folder / FILTER).write_bytes(seccomp.program(machine))
    for name, lines in ETC.items():
        (folder / name).write_text(lines)
    for path in (folder / "ld", folder / "python" / "bin" / "python3", *(folder / "lib").iterdir()):
        path.chmod(0o755)


def _compiled(source: Path, target: Path) -> None:
    """With its compiled form beside it, which is taken as it is: file times do not survive everywhere."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    cached = importlib.util.cache_from_source(str(target))
    py_compile.compile(
        str(target),
        cached,
        dfile=f"{TOP}/{target.name}",
        doraise=True,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )


def _loader(mapped: list[str]) -> str:
    for path in mapped:
        if Path(path).name.startswith(("ld-linux", "ld-musl", "ld-2", "ld.so")):
            return path
    raise ValueError("the loader of this machine's programs was not found")


def _soname(path: str) -> str:
    """The name that programs ask for: of a file with a longer one, the link beside it that is short."""
    real = Path(path)
    for other in real.parent.iterdir():
        if other.is_symlink() and ".so." in other.name and other.name != real.name and other.resolve() == real:
            return other.name
    return real.name


def _is_musl() -> bool:
    return any(Path("/lib").glob("ld-musl-*"))
