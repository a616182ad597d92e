"""A box as the agent finds it: the task's files, its setup done, no history beyond its commit; and a snapshot.

Promises:
- files arrive in one transfer for each part, and belong to the agent's user, as the working folder does;
- a setup that fails, or a box that cannot take the files, is the task's fault (`task.setup`), with its output;
- no script of the task's is left in the box, and nothing of tests and solutions is brought into it;
- history that the task's commit does not reach is gone before the agent sees the box;
- where the provider can, a snapshot of that state is taken, which fresh boxes for grading are made of.
"""

import asyncio
import os
import posixpath
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from rookery.core import ExecResult, SandboxError, TaskError
from rookery.core.errors import describe
from rookery.sandboxes import Command, Sandbox
from rookery.sandboxes.transfers import open_parent
from rookery.scoring.boxes import bounded_exec
from rookery.scoring.swe.history import MOST_REPOSITORIES, NO_GIT, STRIP
from rookery.tasks.cache import is_kept, keep
from rookery.tasks.links import source_of
from rookery.tasks.swe import LOGS, SweStep, SweTask

ROOT: Final = "root"
FOLDERS: Final = tuple(f"{LOGS}/{name}" for name in ("agent", "verifier", "artifacts"))
TOLD: Final = 4_000
"""Characters of a script's output that are told."""
LEAST: Final = 1.0
"""Seconds that a step of the preparation gets, however late it is."""

_OPEN: Final = r"""
umask 022; top=$1; shift
seen=:
if [ ! -d "$top" ]; then
  mkdir -p -m 1777 -- "$top" || exit 1
  printf '755 %s\n' "$top"; seen=:$top:
fi
for d; do
  [ ! -d "$d" ] || continue
  while [ ! -d "$d" ]; do
    [ ! -L "$d" ] || exit 1
    d=${d%/*}; [ -n "$d" ] || d=/
  done
  # Every program costs a millisecond, and all of a task's folders lie in one or two.
  case $seen in *":$d:"*) continue ;; esac
  seen=$seen$d:
  [ -O "$d" ] || continue
  m=$(stat -c %a "$d") && [ "$m" != 1777 ] && chmod 1777 "$d" && printf '%s %s\n' "$m" "$d"
done
exit 0
"""
"""As root: a folder of its own, and for a moment the folders above those that are missing take new ones from
everybody; prints their modes."""

_MAKE: Final = 'umask 022; mkdir -p -- "$@" && exec id -u'
_BACK: Final = 'm=$1; shift; exec chmod -- "$m" "$@"'

_LINK: Final = """
umask 022; d=${2%/*}
[ -z "$d" ] || [ -d "$d" ] || mkdir -p -- "$d" || exit 1
rm -rf -- "$2" && exec ln -s -- "$1" "$2"
"""

_RUN: Final = r"""
f=$1; if command -v bash >/dev/null 2>&1; then bash "$f"; else sh "$f"; fi; code=$?; rm -f -- "$f"; exit $code
"""


class Prepared(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What grading has to know about the box."""

    snapshot: str = ""
    """Of the box as the agent got it; empty where the provider has none."""
    agent: int = 1000
    """The agent's user, as a number."""
    several: bool = True
    """Whether commands of this box can be other users than the agent."""
    notes: tuple[str, ...] = ()
    """What could not be done as it should, in sentences."""


async def prepare(box: Sandbox, task: SweTask, *, timeout: float) -> Prepared:
    """The task's files and the setup of its first step, in a box that nobody used.

    `TaskError(task.setup)` where the task is at fault, `SandboxError` where the box is. The working folder is made
    here: the box's spec need not name it.
    """
    clock = Clock(timeout)
    # Who resumed a run has its tasks from the journal, and loaded nothing that would be kept for it.
    if not is_kept(task.folder) and not await asyncio.to_thread(keep, task.folder):
        raise TaskError(
            f"task {task.id}: its folder {task.folder} was removed from the task cache: load its source again",
            cause="task.setup",
        )
    agent, several = await _folders(box, (task.workdir, *FOLDERS), clock)
    for part in task.files:
        await _uploaded(box, task, part.source, part.target, clock)
    if task.steps:
        await _begun(box, task, task.steps[0], clock)
    notes = await _stripped(box, task, clock)
    try:
        snapshot = await box.snapshot(timeout=clock.left())
    except SandboxError as error:
        if error.code != "sandbox.refused":
            raise
        snapshot = ""
    return Prepared(snapshot=snapshot, agent=agent, several=several, notes=notes)


async def prepare_step(box: Sandbox, task: SweTask, step: SweStep, *, timeout: float) -> None:
    """The files and the setup of a later step, in the box as it is; those of the first are a part of `prepare`."""
    if task.steps and step != task.steps[0]:
        await _begun(box, task, step, Clock(timeout))


class Clock:
    """What is left of a deadline."""

    def __init__(self, timeout: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.time() + timeout

    def left(self, most: float = float("inf")) -> float:
        return max(LEAST, min(most, self._end - self._loop.time()))

    @property
    def over(self) -> bool:
        return self._loop.time() >= self._end


async def _folders(box: Sandbox, folders: Sequence[str], clock: Clock) -> tuple[int, bool]:
    """Folders that belong to the agent's user, also where that one may not make them. Who that is, and whether the
    box has more users than that one."""
    # No program in a box may give a file away; so who owns the folder above lets the agent make its own.
    opened: ExecResult | None = None
    try:
        opened = await run(box, _OPEN, LOGS, *folders, user=ROOT, clock=clock)
    except SandboxError as error:
        if error.code != "sandbox.refused":
            raise
    try:
        made = await run(box, _MAKE, *folders, clock=clock)
    finally:
        if opened is not None and opened.stdout:
            said = opened.stdout.decode("utf-8", "surrogateescape")
            pairs = [line.split(" ", 1) for line in said.splitlines()]
            for mode in sorted({mode for mode, _ in pairs}):
                names = [folder for one, folder in pairs if one == mode]
                await run(box, _BACK, mode, *names, user=ROOT, clock=clock)
    if not made.ok:
        raise TaskError(f"the folders {', '.join(folders)} cannot be made: {told(made)}", cause="task.setup")
    words = made.stdout.split()
    return int(words[-1]) if words and words[-1].isdigit() else -1, opened is not None


async def run(
    box: Sandbox,
    script: str,
    *arguments: str,
    clock: Clock,
    user: str | None = None,
    cwd: str = "/",
    stdin: bytes = b"",
    env: dict[str, str] | None = None,
) -> ExecResult:
    """A script of ours; what it is given is data. `SandboxError` where the box was lost."""
    command = Command(
        argv=("sh", "-c", script, "sh", *arguments),
        user=user,
        cwd=cwd,
        stdin=stdin,
        env=env or {},
        wall=clock.left(),
    )
    result = await bounded_exec(box, command)
    if result.status == "lost":
        raise SandboxError(f"sandbox {box.id} was lost: {result.detail or 'no detail'}")
    return result


def told(result: ExecResult) -> str:
    """How a script ended and the end of what it said, in one text."""
    how = f"exit code {result.exit_code}" if result.status == "exited" else result.status
    said = (result.stdout + result.stderr).decode("utf-8", "replace").strip()
    return (
        f"{how}{f' ({result.detail})' if result.detail else ''}: {said[-TOLD:]}" if said else f"{how}, no output"
    )


async def _uploaded(box: Sandbox, task: SweTask, source: str, target: str, clock: Clock) -> None:
    path, inside = source_of(task, source)
    try:
        if link := await asyncio.to_thread(_link_at, path, inside):
            await _linked(box, task, link, target, clock)
        else:
            await box.upload(path, target, inside=inside, timeout=clock.left())
    except TimeoutError as error:
        raise SandboxError(f"task {task.id}: its files did not arrive in time", cause="engine.setup") from error
    except OSError as error:
        raise TaskError(
            f"task {task.id}: {source!r:.300} cannot be put to {target!r:.300}: {describe(error)}",
            cause="task.setup",
        ) from error


def _link_at(path: Path, inside: Path | None) -> str:
    """Return what the symbolic link at a path of this machine says; empty if there is no link."""
    with open_parent(path, inside) as (above, name):
        info = os.stat(name, dir_fd=above, follow_symlinks=False)
        return os.readlink(name, dir_fd=above) if stat.S_ISLNK(info.st_mode) else ""


async def _linked(box: Sandbox, task: SweTask, link: str, target: str, clock: Clock) -> None:
    """Make a symbolic link of the task in the box; `upload` takes none."""
    if link.startswith("/"):
        raise TaskError(f"task {task.id}: {target!r:.300} is an absolute link: {link!r:.300}", cause="task.setup")
    result = await run(box, _LINK, link, target, clock=clock)
    if not result.ok:
        raise TaskError(
            f"task {task.id}: the link {target!r:.300} cannot be made: {told(result)}", cause="task.setup"
        )


async def _begun(box: Sandbox, task: SweTask, step: SweStep, clock: Clock) -> None:
    for part in step.files:
        await _uploaded(box, task, part.source, part.target, clock)
    if step.setup:
        await _setup(box, task, step, clock)


async def _setup(box: Sandbox, task: SweTask, step: SweStep, clock: Clock) -> None:
    # Neither on a command line nor in a file that stays: it may tell what was broken for the task.
    place = f"/tmp/{secrets.token_hex(8)}.sh"  # noqa: S108  (the box's own)
    await _uploaded(box, task, step.setup, place, clock)
    result = await run(box, _RUN, place, clock=clock, cwd=task.workdir, env=task.env)
    if not result.ok:
        what = f" of step {step.name!r}" if step.name else ""
        raise TaskError(f"task {task.id}: its setup{what} failed: {told(result)}", cause="task.setup")


async def _stripped(box: Sandbox, task: SweTask, clock: Clock) -> tuple[str, ...]:
    tops = sorted(
        {task.workdir, *task.artifacts, *(posixpath.dirname(p.target) or "/" for p in task.files)} - {"/"}
    )
    result = await run(box, STRIP, str(MOST_REPOSITORIES), *tops, clock=clock)
    if not result.ok:
        raise TaskError(f"task {task.id}: its history cannot be stripped: {told(result)}", cause="task.setup")
    if NO_GIT.encode() in result.stdout.splitlines():
        return (
            "the box has repositories and no git: objects that the task's commit does not reach are still there",
        )
    return ()
