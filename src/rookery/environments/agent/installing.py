"""Agents, installed once for a machine, into folders that boxes have read-only.

Promises:
- an agent is installed once, however many ask for it together, in however many processes;
- a folder is there whole or not at all: whatever is killed in between leaves nothing that counts;
- what an install began ends with it: on a deadline or a cancellation, no program of it goes on;
- what belongs to another Python than ours is fetched for that one, by our own pip: a box needs neither pip nor a
  network;
- a failed installation raises `agent.start` (infra) with the end of its output.

Programs of an agent are started through `start.py`, which lies beside them. It finds the agent's packages by
itself: a variable such as PYTHONPATH would reach the programs that the agent starts, and change what they import.
"""

import asyncio
import contextlib
import hashlib
import importlib.util
import logging
import os
import platform
import re
import secrets
import shutil
import signal
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from rookery.core import RookeryError, UsageError
from rookery.core.apart import apart
from rookery.environments.agent.launchers import Install, Launcher
from rookery.sandboxes.images import locks

log = logging.getLogger("rookery.agents")

HOME: Final = "ROOKERY_AGENTS"
FORMAT: Final = 2
"""Raised when the same install would make another folder."""
DONE: Final = "installed.json"
TAIL: Final = 4_000
SHOWN: Final = 200
PAUSE: Final = 0.1
OLDEST: Final = (3, 8)

START: Final = '''\
"""Starts a module, a file or a text with the packages beside this file; no variable tells anybody of them."""
import os
import runpy
import site
import sys

site.addsitedir(os.path.join(os.path.dirname(os.path.abspath(__file__)), "python"))
added = [entry for entry in sys.path if entry.startswith(os.path.dirname(os.path.abspath(__file__)))]
sys.path[:] = added + [entry for entry in sys.path if entry not in added]
sys.argv = sys.argv[1:]
if sys.argv[0] == "-c":
    exec(sys.argv[1])
elif sys.argv[0].endswith(".py"):
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
'''

Say = Callable[[str], None]


class PythonOf(msgspec.Struct, frozen=True, kw_only=True):
    """The Python of a box, as far as packages have to fit it."""

    version: str
    """As `3.11`."""
    machine: str
    libc: str
    """As `glibc-2.36` or `musl-1.2`."""

    @property
    def own(self) -> bool:
        return self == own_python()


PROBE: Final = (
    "import os,platform,sys\n"
    "libc='-'.join(platform.libc_ver())\n"
    "try: libc=os.confstr('CS_GNU_LIBC_VERSION').replace(' ','-')\n"
    "except (ValueError,AttributeError,OSError): libc='musl-1.2'\n"
    "print('%d.%d'%sys.version_info[:2],platform.machine(),libc)"
)
"""For a box's Python; it answers in one line."""


def own_python() -> PythonOf:
    """Ours, which a box without an image has too."""
    try:
        libc = (os.confstr("CS_GNU_LIBC_VERSION") or "").replace(" ", "-")
    except (ValueError, OSError):
        libc = "musl-1.2"
    return PythonOf(version=f"{sys.version_info[0]}.{sys.version_info[1]}", machine=platform.machine(), libc=libc)


def python_of(answer: bytes) -> PythonOf | None:
    """What the probe said; None where that is no answer, or one of a Python that is too old."""
    words = answer.decode("utf-8", "replace").split()
    if len(words) != 3 or "-" not in words[2] or not re.fullmatch(r"[0-9]{1,3}\.[0-9]{1,3}", words[0]):
        return None
    found = PythonOf(version=words[0], machine=words[1], libc=words[2])
    major, _, minor = found.version.partition(".")
    return found if (int(major), int(minor)) >= OLDEST else None


def agents_home() -> Path:
    """Where agents are installed: ROOKERY_AGENTS, or a folder of the user's cache."""
    if named := os.environ.get(HOME):
        return Path(named).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().absolute() / "rookery" / "agents"


def folder_of(launcher: Launcher, python: PythonOf | None, home: Path | None = None) -> Path:
    """Where this agent is installed, or will be."""
    packages = bool(launcher.install.python or launcher.install.python_alone)
    what = (FORMAT, launcher.install, python if packages else None, platform.machine())
    digest = hashlib.sha256(msgspec.json.encode(what)).hexdigest()[:20]
    return (home or agents_home()) / f"{launcher.name}-{digest}"


def problems(install: Install) -> list[str]:
    """What is missing on this machine, in sentences; before anything is begun."""
    said = []
    if (install.python or install.python_alone) and not _pip():
        said.append("installing Python packages needs pip (python3 -m ensurepip) or uv, and there is neither")
    if install.node and shutil.which("npm") is None:
        said.append("installing Node packages needs npm, and there is none on the PATH")
    missing = [command[0] for command in install.commands if shutil.which(command[0]) is None]
    return said + [f"the install needs the program {name!r}, which is not on the PATH" for name in missing]


class _Shared(NamedTuple):
    task: "asyncio.Task[Path]"
    waiting: list[int]


_under_way: dict[tuple[int, str], _Shared] = {}


async def installed(
    launcher: Launcher, python: PythonOf | None = None, *, home: Path | None = None, say: Say | None = None
) -> Path:
    """The folder of an agent, which is made where it is not there yet. `say` is told how far that is."""
    folder = folder_of(launcher, python, home)
    if (folder / DONE).is_file():
        return folder
    if said := problems(launcher.install):
        raise UsageError(
            f"the agent {launcher.name} cannot be installed: {'; '.join(said)}", cause="agent.start", fault="infra"
        )
    loop = asyncio.get_running_loop()
    key = (id(loop), str(folder))
    shared = _under_way.get(key)
    if shared is None or shared.task.done():
        made = loop.create_task(_made(launcher, python, folder, say or _logged), context=apart())
        shared = _under_way[key] = _Shared(made, [0])
        made.add_done_callback(lambda _: _under_way.pop(key, None))
    shared.waiting[0] += 1
    try:
        return await asyncio.shield(shared.task)
    finally:
        shared.waiting[0] -= 1
        if not shared.waiting[0] and not shared.task.done():
            # Nobody wants it any more; whoever asks next begins anew.
            shared.task.cancel()
            await asyncio.wait({shared.task}, timeout=30.0)


def _logged(text: str) -> None:
    log.info("%s", text)


async def _made(launcher: Launcher, python: PythonOf | None, folder: Path, say: Say) -> Path:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        async with asyncio.timeout(launcher.install.seconds):
            lock = await _locked(folder, launcher.name, say)
            with lock:
                if not (folder / DONE).is_file():
                    await _fill(launcher, python, folder, lock.fd, say)
    except TimeoutError as error:
        raise _failed(launcher, f"it took longer than {launcher.install.seconds:g} s") from error
    except OSError as error:
        raise _failed(launcher, f"{folder.parent} cannot be used: {error}") from error
    return folder


async def _locked(folder: Path, name: str, say: Say) -> locks.Lock:
    told = False
    while True:
        lock = locks.attempt(folder.parent / f".{folder.name}.lock", alone=True)
        if lock is not None:
            return lock
        if not told:
            say(f"{name} is being installed by another process")
            told = True
        await asyncio.sleep(PAUSE)


async def _fill(launcher: Launcher, python: PythonOf | None, folder: Path, lock: int, say: Say) -> None:
    """Holding the lock: what others left half done goes first."""
    for old in folder.parent.glob(f".{folder.name}.*.part"):
        await asyncio.to_thread(_removed, old)
    aside = folder.parent / f".{folder.name}.{secrets.token_hex(4)}.part"
    aside.mkdir(mode=0o755)
    try:
        steps = _steps(launcher.install, python, aside)
        for at, (what, command) in enumerate(steps, 1):
            say(f"installing {launcher.name}, step {at} of {len(steps)}: {what}")
            await _run(launcher, what, command, aside, lock)
        about = {"launcher": launcher.name, "install": launcher.install, "python": python, "format": FORMAT}
        await asyncio.to_thread(_settled, aside, folder, msgspec.json.encode(about))
        say(f"{launcher.name} is installed")
    finally:
        await asyncio.shield(asyncio.to_thread(_removed, aside))


def _steps(install: Install, python: PythonOf | None, aside: Path) -> list[tuple[str, list[str]]]:
    target = ["--target", str(aside / "python")]
    steps = []
    for wanted, alone in ((install.python, False), (install.python_alone, True)):
        if wanted:
            flags = [*_for(python), *(["--no-deps"] if alone else []), *target]
            steps.append((f"pip install {' '.join(wanted)}"[:SHOWN], [*_pip(), *flags, *wanted]))
    if install.node:
        quiet = ("--no-audit", "--no-fund", "--no-save", "--loglevel=error")
        command = ["npm", "install", *quiet, "--prefix", str(aside), *install.node]
        steps.append((f"npm install {' '.join(install.node)}"[:SHOWN], command))
    return [*steps, *((" ".join(command)[:SHOWN], list(command)) for command in install.commands)]


def _pip() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    if (uv := shutil.which("uv")) is not None:
        return [uv, "pip", "install", "--quiet"]
    return []


def _for(python: PythonOf | None) -> list[str]:
    """For another Python than ours: built packages only, since nothing of it could be run here."""
    if python is None or python.own:
        return []
    flags = ["--only-binary=:all:", "--python-version", python.version]
    if _pip()[0] == sys.executable:
        flags += ["--implementation", "cp"]
        flags += [part for tag in _platforms(python) for part in ("--platform", tag)]
    return flags


def _platforms(python: PythonOf) -> list[str]:
    kind, _, number = python.libc.partition("-")
    minor = int(number.split(".")[1]) if number.count(".") and number.split(".")[1].isdigit() else 17
    if kind == "glibc":
        names = [f"manylinux_2_{at}" for at in range(minor, 4, -1)] + [
            "manylinux2014",
            "manylinux2010",
            "manylinux1",
        ]
    else:
        names = [f"musllinux_1_{at}" for at in range(minor, 0, -1)]
    return [f"{name}_{python.machine}" for name in names]


async def _run(launcher: Launcher, what: str, command: Sequence[str], folder: Path, lock: int) -> None:
    """One step, in a session of its own. It has the lock too: nobody begins anew while a part of it lives."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=folder,
            env=env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(lock,),
            umask=0o022,
        )
    except OSError as error:
        raise _failed(launcher, f"{what}: {error}") from error
    tail = bytearray()
    try:
        assert process.stdout is not None
        while chunk := await process.stdout.read(1 << 16):
            tail += chunk
            del tail[: max(0, len(tail) - TAIL)]
        code = await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.returncode is None:
            await asyncio.shield(process.wait())
    if code:
        said = tail.decode("utf-8", "replace").strip()
        raise _failed(launcher, f"{what} ended with {code}: {said or 'no output'}")


def _failed(launcher: Launcher, why: str) -> RookeryError:
    return RookeryError(
        f"the agent {launcher.name} cannot be installed: {why}", cause="agent.start", fault="infra"
    )


def _settled(aside: Path, folder: Path, about: bytes) -> None:
    """The last steps: from the rename on, it is there."""
    (aside / "start.py").write_text(START, encoding="utf-8")
    (aside / DONE).write_bytes(about)
    _readable(aside)
    _removed(folder)  # half a one of other hands: it has no mark, so nobody uses it
    aside.rename(folder)


def _readable(folder: Path) -> None:
    """Whoever a box's user is may read it."""
    for top, names, files in os.walk(folder):
        for name in (*names, *files):
            path = os.path.join(top, name)  # noqa: PTH118  (tens of thousands of them)
            mode = os.lstat(path).st_mode
            if not stat.S_ISLNK(mode):
                wanted = stat.S_IMODE(mode) | 0o444 | (0o111 if mode & 0o111 else 0)
                if wanted != stat.S_IMODE(mode):
                    os.chmod(path, wanted)  # noqa: PTH101


def _removed(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
