"""Contenders of the `sandbox` bench: what takes turns with our boxes, and why one of them is missing.

Promises:
- every contender does the same work: the same interpreter with the same words, or the same command;
- contenders take turns in small blocks, so that they share the machine's mood; a block of one does not begin
  while another's work is under way;
- one that is not there, or fails, gives a note and no figure.
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

PYTHON = ("python3", "-c", "pass")
COMMAND = ("true",)
ENV = {"PATH": DEFAULT_PATH, "LANG": "C.UTF-8", "HOME": "/tmp"}  # noqa: S108  (as a program's home, never written to)
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")


class Contender(NamedTuple):
    """One of those who take turns. `block` times in a row, in one of `every` rounds."""

    name: str
    once: Callable[[], Awaitable[float]] | None
    """Does it once; milliseconds. None: it is missing, and `note` says why."""
    block: int = 5
    every: int = 1
    note: str = ""


class Found(NamedTuple):
    """What one of them took, or why there is nothing."""

    times: tuple[float, ...]
    note: str = ""


async def by_turns(
    contenders: Sequence[Contender], rounds: int, rest: Callable[[], Awaitable[None]], progress: Progress
) -> dict[str, Found]:
    """Milliseconds of each. `rest` waits until nothing of the last one is under way."""
    times: dict[str, list[float]] = {one.name: [] for one in contenders}
    notes = {one.name: one.note for one in contenders}
    for at in range(rounds):
        for one in contenders:
            if one.once is None or at % one.every or (notes[one.name] and not times[one.name]):
                continue
            await rest()
            try:
                for _ in range(one.block):
                    times[one.name].append(await one.once())
            except (OSError, RuntimeError) as error:
                notes[one.name] = f"{one.name} failed: {error}"[:500]
                times[one.name].clear()
                progress(notes[one.name])
    return {name: Found(tuple(times[name]), notes[name]) for name in times}


def python_path() -> str | None:
    """The interpreter that a box's `python3` is: on the host the name may be a script that looks for another."""
    return shutil.which("python3", path=f"{INTERPRETER}:{DEFAULT_PATH}")


async def spawned(words: Sequence[str], env: dict[str, str] | None = None) -> float:
    """The cheapest way there is to run a program and see its end: posix_spawn, and a wait. Milliseconds."""
    return _spawned(words, ENV if env is None else env)  # nothing else is under way: the loop may stand still


def _spawned(words: Sequence[str], env: dict[str, str]) -> float:
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        actions = [(os.POSIX_SPAWN_DUP2, null, at) for at in range(3)]
        began = time.perf_counter()
        pid = os.posix_spawnp(words[0], list(words), env, file_actions=actions)
        status = os.waitpid(pid, 0)[1]
        took = 1e3 * (time.perf_counter() - began)
    finally:
        os.close(null)
    if status:
        raise RuntimeError(f"{words[0]} ended with {os.waitstatus_to_exitcode(status)}")
    return took


async def subprocessed(words: Sequence[str]) -> float:
    """As a caller on the bare host would do it: from the event loop, with what it writes. Milliseconds."""
    pipe = asyncio.subprocess.PIPE
    began = time.perf_counter()
    program = await asyncio.create_subprocess_exec(
        *words, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=ENV
    )
    await program.communicate()
    if program.returncode:
        raise RuntimeError(f"{words[0]} ended with {program.returncode}")
    return 1e3 * (time.perf_counter() - began)


def bare_python(*options: str) -> Contender:
    """With options, such as those for a start without a site: a site can be anything."""
    python, name = python_path(), " ".join(("bare python3", *options))
    if python is None:
        return Contender(name, None, note="no python3 is in the usual places")

    async def once() -> float:
        return await spawned((python, *options, *PYTHON[1:]))

    return Contender(name, once)


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


async def forked_ms(times: int) -> float | None:
    """The floor: a fork of a small Python that is there already, without any wall, to its end; the median."""
    python = python_path()
    if python is None:
        return None
    program = await asyncio.create_subprocess_exec(
        python, "-I", "-S", "-c", _FORKS, str(times), stdout=asyncio.subprocess.PIPE, env=ENV
    )
    return float((await program.communicate())[0])


def bwrap_words() -> list[str] | str:
    """bwrap with what comes nearest to a box (no limits, no filter, no user of its own); or why not."""
    found = shutil.which("bwrap") or _made("usr/bin/bwrap")
    if found is None:
        return "bwrap is missing: `make peers` in a checkout makes it"
    words = [found, "--unshare-all", "--die-with-parent", "--new-session", "--ro-bind", "/usr", "/usr"]
    for path in map(Path, _SYSTEM):
        if path.is_symlink():
            words += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            words += ["--ro-bind", str(path), str(path)]
    if not str(INTERPRETER).startswith("/usr/"):
        words += ["--ro-bind", str(INTERPRETER.parent), str(INTERPRETER.parent)]
    return [*words, "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--dir", "/work", "--chdir", "/work"]  # noqa: S108


def bwrap_python() -> Contender:
    words, python = bwrap_words(), python_path()
    if isinstance(words, str) or python is None:
        return Contender("bwrap", None, note=words if isinstance(words, str) else "there is no python3")

    async def once() -> float:
        return await spawned((*words, python, *PYTHON[1:]))

    return Contender("bwrap", once)


def _made(path: str) -> str | None:
    """A program that `make peers` unpacked."""
    found = peers_folder() / "sandboxes" / "root" / path
    return str(found) if os.access(found, os.X_OK) else None


async def per_second(once: Callable[[], Awaitable[object]], at_a_time: int, seconds: float) -> float:
    """How often a second it is done, this many at a time; what is under way at the end is not counted."""
    done = 0
    end = time.perf_counter() + seconds

    async def worker() -> None:
        nonlocal done
        while time.perf_counter() < end:
            await once()
            done += time.perf_counter() < end

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(at_a_time):
            group.create_task(worker())
    return done / (min(end, time.perf_counter()) - began)
