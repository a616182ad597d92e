"""Peers of the benchmark `sandbox`, and a loop that measures them alternately with our sandboxes.

Method:
- all operations do the same work: the same interpreter with the same arguments, or the same command;
- operations alternate in small blocks, so that changes of the machine's speed affect all of them; a block does not
  start while work of another is in progress;
- an operation that is missing or fails yields a note instead of a figure.
"""

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import Progress
from benchmarks.peers import peers_folder
from rookery.sandboxes.guarded_sandbox import DEFAULT_PATH
from rookery.sandboxes.local.provider import INTERPRETER

PYTHON = ("python3", "-I", "-S", "-c", "pass")
"""The Python command of all peers. Without `-S` its time would depend on the installed site packages."""
BARE = "bare python3 -I -S"
NO_PYTHON = "no python3 is installed in the usual places"
COMMAND = ("true",)
ENV = {"PATH": DEFAULT_PATH, "LANG": "C.UTF-8", "HOME": "/tmp"}  # noqa: S108  (home of the programs; not written to)
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")


class TimedOperation(NamedTuple):
    """An operation that is measured alternately with others: `block` times in a row, in one of `every` rounds."""

    name: str
    once: Callable[[], Awaitable[float]] | None
    """Runs the operation once and returns milliseconds. None if it is missing; `note` says why."""
    block: int = 5
    every: int = 1
    note: str = ""


class Timings(NamedTuple):
    """Milliseconds of an operation, or a note that says why there are none."""

    times: tuple[float, ...]
    note: str = ""


async def measure_alternately(
    operations: Sequence[TimedOperation], rounds: int, wait_idle: Callable[[], Awaitable[None]], progress: Progress
) -> dict[str, Timings]:
    """Measure milliseconds of each operation. `wait_idle` waits until the previous one has finished its work."""
    times: dict[str, list[float]] = {operation.name: [] for operation in operations}
    notes = {operation.name: operation.note for operation in operations}
    for round_number in range(rounds):
        for operation in operations:
            if (
                operation.once is None
                or round_number % operation.every
                or (notes[operation.name] and not times[operation.name])
            ):
                continue
            await wait_idle()
            try:
                for _ in range(operation.block):
                    times[operation.name].append(await operation.once())
            except (OSError, RuntimeError) as error:
                notes[operation.name] = f"{operation.name} failed: {error}"[:500]
                times[operation.name].clear()
                progress(notes[operation.name])
    return {name: Timings(tuple(times[name]), notes[name]) for name in times}


def python_path() -> str | None:
    """Return the interpreter that a sandbox finds as `python3`. On the host the name may be a wrapper script."""
    return shutil.which("python3", path=f"{INTERPRETER}:{DEFAULT_PATH}")


async def spawn_ms(argv: Sequence[str], env: dict[str, str] | None = None) -> float:
    """Run a program in the cheapest way, posix_spawn and waitpid, and return milliseconds."""
    return _spawn_ms(argv, ENV if env is None else env)  # nothing else runs, so blocking the event loop is fine


def _spawn_ms(argv: Sequence[str], env: dict[str, str]) -> float:
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        actions = [(os.POSIX_SPAWN_DUP2, null, fd) for fd in range(3)]
        began = time.perf_counter()
        pid = os.posix_spawnp(argv[0], list(argv), env, file_actions=actions)
        status = os.waitpid(pid, 0)[1]
        took = 1e3 * (time.perf_counter() - began)
    finally:
        os.close(null)
    if status:
        raise RuntimeError(f"{argv[0]} exited with {os.waitstatus_to_exitcode(status)}")
    return took


async def subprocess_ms(argv: Sequence[str]) -> float:
    """Run a program from the event loop with captured output, as a caller on the host would, and return ms."""
    pipe = asyncio.subprocess.PIPE
    began = time.perf_counter()
    program = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=ENV
    )
    await program.communicate()
    if program.returncode:
        raise RuntimeError(f"{argv[0]} exited with {program.returncode}")
    return 1e3 * (time.perf_counter() - began)


def bare_python() -> TimedOperation:
    """Return the operation that runs the interpreter without isolation."""
    python = python_path()
    if python is None:
        return TimedOperation(BARE, None, note=NO_PYTHON)

    async def once() -> float:
        return await spawn_ms((python, *PYTHON[1:]))

    return TimedOperation(BARE, once)


_FORKS = """
import os, sys, time
times = []
for _ in range(int(sys.argv[1])):
    began = time.perf_counter()
    pid = os.fork()
    if not pid:
        exec("pass")
        os._exit(0)
    os.waitpid(pid, 0)
    times.append(1e3 * (time.perf_counter() - began))
print(sorted(times)[len(times) // 2])
"""


async def fork_floor_ms(times: int) -> float | None:
    """Measure the floor: the median of forking a running Python and waiting for the child, without isolation."""
    python = python_path()
    if python is None:
        return None
    program = await asyncio.create_subprocess_exec(
        python, "-I", "-S", "-c", _FORKS, str(times), stdout=asyncio.subprocess.PIPE, env=ENV
    )
    return float((await program.communicate())[0])


def bwrap_command() -> list[str] | str:
    """Return a bwrap command line close to our sandboxes (no limits, no seccomp filter), or why it is missing."""
    found = shutil.which("bwrap") or _installed_program("usr/bin/bwrap")
    if found is None:
        return "bwrap is not installed: run `make peers` in a checkout"
    argv = [found, "--unshare-all", "--die-with-parent", "--new-session", "--ro-bind", "/usr", "/usr"]
    for path in map(Path, _SYSTEM):
        if path.is_symlink():
            argv += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            argv += ["--ro-bind", str(path), str(path)]
    if not str(INTERPRETER).startswith("/usr/"):
        argv += ["--ro-bind", str(INTERPRETER.parent), str(INTERPRETER.parent)]
    return [*argv, "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--dir", "/work", "--chdir", "/work"]  # noqa: S108


def bwrap_python() -> TimedOperation:
    argv, python = bwrap_command(), python_path()
    if isinstance(argv, str) or python is None:
        return TimedOperation("bwrap", None, note=argv if isinstance(argv, str) else NO_PYTHON)

    async def once() -> float:
        return await spawn_ms((*argv, python, *PYTHON[1:]))

    return TimedOperation("bwrap", once)


def _installed_program(path: str) -> str | None:
    """Return the path of a program that `make peers` unpacked."""
    found = peers_folder() / "sandboxes" / "root" / path
    return str(found) if os.access(found, os.X_OK) else None


async def per_second(once: Callable[[], Awaitable[object]], concurrency: int, seconds: float) -> float:
    """Return completions per second at this concurrency; operations in progress at the end do not count."""
    done = 0
    end = time.perf_counter() + seconds

    async def worker() -> None:
        nonlocal done
        while time.perf_counter() < end:
            await once()
            done += time.perf_counter() < end

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
    return done / (min(end, time.perf_counter()) - began)
