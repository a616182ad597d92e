"""Install agents once per machine, into directories that sandboxes mount read-only.

Runs in the supervisor process and in runners. Concurrent requests, also from several processes, install an agent
only once. An agent is installed into a staging directory, which is renamed when it is complete; an interrupted
installation leaves at most a staging directory, which the next one removes. Cancellation and deadlines kill all
programs of an installation. For an image with another Python version, the host's pip downloads the packages for
that version, so that a sandbox needs neither pip nor a network.

Agents written in Python are started through `start.py` in the installation directory, which adds the agent's
packages to `sys.path`. PYTHONPATH would not do: programs started by the agent would inherit it.
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
from rookery.core.lifetimes import detached_context
from rookery.environments.agent.launchers import Install, Launcher
from rookery.sandboxes.images import file_locks

log = logging.getLogger("rookery.agents")

DIRECTORY_VARIABLE: Final = "ROOKERY_AGENTS"
FORMAT: Final = 2
"""Version of the directory layout. Increase it when the same `Install` would produce another directory."""
DONE_FILE: Final = "installed.json"
"""Name of the file that marks an installation directory as complete."""
MAX_OUTPUT: Final = 4_000
MAX_STEP_SHOWN: Final = 200
LOCK_POLL_SECONDS: Final = 0.1
MIN_PYTHON: Final = (3, 8)

START: Final = '''\
"""Run a module, a file or source text with the packages next to this file on sys.path."""
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

Report = Callable[[str], None]


class PythonPlatform(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a Python installation that decide which packages fit it."""

    version: str
    """Python version, such as `3.11`."""
    machine: str
    """CPU architecture, such as `x86_64`."""
    libc: str
    """C library and its version, such as `glibc-2.36` or `musl-1.2`."""

    @property
    def is_host(self) -> bool:
        """True if packages for the Python of this process fit this platform."""
        return self == host_python()


PROBE: Final = (
    "import os,platform,sys\n"
    "libc='-'.join(platform.libc_ver())\n"
    "try: libc=os.confstr('CS_GNU_LIBC_VERSION').replace(' ','-')\n"
    "except (ValueError,AttributeError,OSError): libc='musl-1.2'\n"
    "print('%d.%d'%sys.version_info[:2],platform.machine(),libc)"
)
"""Source of a program that prints the `PythonPlatform` of the sandbox's Python as one line."""


def host_python() -> PythonPlatform:
    """Return the platform of this process's Python. Sandboxes without a container image use the same Python."""
    try:
        libc = (os.confstr("CS_GNU_LIBC_VERSION") or "").replace(" ", "-")
    except (ValueError, OSError):
        libc = "musl-1.2"
    return PythonPlatform(
        version=f"{sys.version_info[0]}.{sys.version_info[1]}", machine=platform.machine(), libc=libc
    )


def parse_probe_output(output: bytes) -> PythonPlatform | None:
    """Parse the output of `PROBE`. Return None if it is invalid or shows a Python older than `MIN_PYTHON`."""
    words = output.decode("utf-8", "replace").split()
    if len(words) != 3 or "-" not in words[2] or not re.fullmatch(r"[0-9]{1,3}\.[0-9]{1,3}", words[0]):
        return None
    python = PythonPlatform(version=words[0], machine=words[1], libc=words[2])
    major, _, minor = python.version.partition(".")
    return python if (int(major), int(minor)) >= MIN_PYTHON else None


def get_agents_dir() -> Path:
    """Return the directory for agent installations: `$ROOKERY_AGENTS`, or `rookery/agents` in the user's cache."""
    if configured := os.environ.get(DIRECTORY_VARIABLE):
        return Path(configured).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().absolute() / "rookery" / "agents"


def install_dir(launcher: Launcher, python: PythonPlatform | None, home: Path | None = None) -> Path:
    """Return the installation directory of an agent for a Python platform, whether or not it exists.

    Its name contains a digest of everything that determines its content. `home` replaces `get_agents_dir()`.
    """
    packages = bool(launcher.install.python or launcher.install.python_no_deps)
    inputs = (FORMAT, launcher.install, python if packages else None, platform.machine())
    digest = hashlib.sha256(msgspec.json.encode(inputs)).hexdigest()[:20]
    return (home or get_agents_dir()) / f"{launcher.name}-{digest}"


def find_problems(install: Install) -> list[str]:
    """Return what this machine lacks for installing an agent, one sentence per missing program."""
    problems = []
    if (install.python or install.python_no_deps) and not _pip_command():
        problems.append("installing Python packages needs pip or uv: run `python3 -m ensurepip`")
    if install.node and shutil.which("npm") is None:
        problems.append("installing Node packages needs npm, which is not on the PATH")
    missing = [command[0] for command in install.commands if shutil.which(command[0]) is None]
    return problems + [f"the installation needs {name!r}, which is not on the PATH" for name in missing]


class _SharedInstall(NamedTuple):
    """An installation in progress and the number of callers waiting for it."""

    task: "asyncio.Task[Path]"
    waiting: list[int]
    """The number of callers, as the only item of a list, because a tuple's fields cannot be changed."""


_running: dict[tuple[int, str], _SharedInstall] = {}


async def install_agent(
    launcher: Launcher,
    python: PythonPlatform | None = None,
    *,
    home: Path | None = None,
    report: Report | None = None,
) -> Path:
    """Install an agent unless it is installed already, and return its directory.

    `python` is the platform for which Python packages are installed; None means this process's. `home` is the
    directory of all agent installations. `report` is called with progress messages. Raise an error with the cause
    `agent.start` if the installation fails. If all callers that wait for an installation are cancelled, it is
    stopped.
    """
    directory = install_dir(launcher, python, home)
    if (directory / DONE_FILE).is_file():
        return directory
    if problems := find_problems(launcher.install):
        raise UsageError(
            f"the agent {launcher.name} cannot be installed: {'; '.join(problems)}",
            cause="agent.start",
            fault="infra",
        )
    loop = asyncio.get_running_loop()
    key = (id(loop), str(directory))
    shared = _running.get(key)
    if shared is None or shared.task.done():
        task = loop.create_task(
            _install_locked(launcher, python, directory, report or _log_progress), context=detached_context()
        )
        shared = _running[key] = _SharedInstall(task, [0])
        task.add_done_callback(lambda _: _running.pop(key, None))
    shared.waiting[0] += 1
    try:
        return await asyncio.shield(shared.task)
    finally:
        shared.waiting[0] -= 1
        if not shared.waiting[0] and not shared.task.done():
            # All callers were cancelled; the next one starts a new installation.
            shared.task.cancel()
            await asyncio.wait({shared.task}, timeout=30.0)


def _log_progress(text: str) -> None:
    log.info("%s", text)


async def _install_locked(
    launcher: Launcher, python: PythonPlatform | None, directory: Path, report: Report
) -> Path:
    """Install an agent while holding a lock file that keeps other processes from installing the same agent."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        async with asyncio.timeout(launcher.install.seconds):
            lock = await _acquire_lock(directory, launcher.name, report)
            with lock:
                if not (directory / DONE_FILE).is_file():
                    await _build(launcher, python, directory, lock.fd, report)
    except TimeoutError as error:
        raise _install_error(launcher, f"it took longer than {launcher.install.seconds:g} s") from error
    except OSError as error:
        raise _install_error(launcher, f"{directory.parent} cannot be used: {error}") from error
    return directory


async def _acquire_lock(directory: Path, name: str, report: Report) -> file_locks.FileLock:
    reported = False
    while True:
        lock = file_locks.try_lock(directory.parent / f".{directory.name}.lock", exclusive=True)
        if lock is not None:
            return lock
        if not reported:
            report(f"waiting for another process that is installing {name}")
            reported = True
        await asyncio.sleep(LOCK_POLL_SECONDS)


async def _build(
    launcher: Launcher, python: PythonPlatform | None, directory: Path, lock: int, report: Report
) -> None:
    """Install an agent into a staging directory and rename that to `directory`.

    The caller holds the lock file; `lock` is its file descriptor.
    """
    for leftover in directory.parent.glob(f".{directory.name}.*.part"):
        await asyncio.to_thread(_remove, leftover)
    staging = directory.parent / f".{directory.name}.{secrets.token_hex(4)}.part"
    staging.mkdir(mode=0o755)
    try:
        steps = _plan_steps(launcher.install, python, staging)
        for number, (title, command) in enumerate(steps, 1):
            report(f"installing {launcher.name}, step {number} of {len(steps)}: {title}")
            await _run_step(launcher, title, command, staging, lock)
        manifest = {"launcher": launcher.name, "install": launcher.install, "python": python, "format": FORMAT}
        await asyncio.to_thread(_publish, staging, directory, msgspec.json.encode(manifest))
        report(f"{launcher.name} is installed")
    finally:
        await asyncio.shield(asyncio.to_thread(_remove, staging))


def _plan_steps(install: Install, python: PythonPlatform | None, staging: Path) -> list[tuple[str, list[str]]]:
    target = ["--target", str(staging / "python")]
    steps = []
    for requirements, no_deps in ((install.python, False), (install.python_no_deps, True)):
        if requirements:
            flags = [*_target_flags(python), *(["--no-deps"] if no_deps else []), *target]
            steps.append(
                (
                    f"pip install {' '.join(requirements)}"[:MAX_STEP_SHOWN],
                    [*_pip_command(), *flags, *requirements],
                )
            )
    if install.node:
        quiet = ("--no-audit", "--no-fund", "--no-save", "--loglevel=error")
        command = ["npm", "install", *quiet, "--prefix", str(staging), *install.node]
        steps.append((f"npm install {' '.join(install.node)}"[:MAX_STEP_SHOWN], command))
    return [*steps, *((" ".join(command)[:MAX_STEP_SHOWN], list(command)) for command in install.commands)]


def _pip_command() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    if (uv := shutil.which("uv")) is not None:
        return [uv, "pip", "install", "--quiet"]
    return []


def _target_flags(python: PythonPlatform | None) -> list[str]:
    """Return pip's flags for a Python platform other than the host's; none for the host's.

    For another platform, only wheels can be installed, since packages cannot be built from source for it.
    """
    if python is None or python.is_host:
        return []
    flags = ["--only-binary=:all:", "--python-version", python.version]
    if _pip_command()[0] == sys.executable:
        flags += ["--implementation", "cp"]
        flags += [part for tag in list_platform_tags(python) for part in ("--platform", tag)]
    return flags


def list_platform_tags(python: PythonPlatform) -> list[str]:
    kind, _, number = python.libc.partition("-")
    minor = int(number.split(".")[1]) if number.count(".") and number.split(".")[1].isdigit() else 17
    if kind == "glibc":
        names = [f"manylinux_2_{minor_version}" for minor_version in range(minor, 4, -1)] + [
            "manylinux2014",
            "manylinux2010",
            "manylinux1",
        ]
    else:
        names = [f"musllinux_1_{minor_version}" for minor_version in range(minor, 0, -1)]
    return [f"{name}_{python.machine}" for name in names]


async def _run_step(launcher: Launcher, title: str, command: Sequence[str], directory: Path, lock: int) -> None:
    """Run one command of an installation in a new process session; raise if it fails.

    Its processes inherit the file descriptor `lock` of the lock file, so that no other installation starts while
    one of them is alive.
    """
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=directory,
            env=env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(lock,),
            umask=0o022,
        )
    except OSError as error:
        raise _install_error(launcher, f"{title}: {error}") from error
    tail = bytearray()
    try:
        assert process.stdout is not None
        while chunk := await process.stdout.read(1 << 16):
            tail += chunk
            del tail[: max(0, len(tail) - MAX_OUTPUT)]
        code = await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.returncode is None:
            await asyncio.shield(process.wait())
    if code:
        output = tail.decode("utf-8", "replace").strip()
        raise _install_error(launcher, f"{title} exited with code {code}: {output or 'no output'}")


def _install_error(launcher: Launcher, why: str) -> RookeryError:
    return RookeryError(
        f"the agent {launcher.name} cannot be installed: {why}", cause="agent.start", fault="infra"
    )


def _publish(staging: Path, directory: Path, manifest: bytes) -> None:
    """Add `start.py` and the manifest to the staging directory and rename it to its final name."""
    (staging / "start.py").write_text(START, encoding="utf-8")
    (staging / DONE_FILE).write_bytes(manifest)
    _make_readable(staging)
    _remove(directory)  # without the file `installed.json` it is incomplete and not in use
    staging.rename(directory)


def _make_readable(directory: Path) -> None:
    """Make all files readable for every user, since a sandbox may run as any user."""
    for top, names, files in os.walk(directory):
        for name in (*names, *files):
            path = os.path.join(top, name)  # noqa: PTH118  (tens of thousands of them)
            mode = os.lstat(path).st_mode
            if not stat.S_ISLNK(mode):
                readable = stat.S_IMODE(mode) | 0o444 | (0o111 if mode & 0o111 else 0)
                if readable != stat.S_IMODE(mode):
                    os.chmod(path, readable)  # noqa: PTH101


def _remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
