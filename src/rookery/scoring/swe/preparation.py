"""Prepare a sandbox for an agent: copy the task's files, run its setup, strip Git history and take a snapshot.

Guarantees:
- Each file or directory that the task lists arrives in one transfer. The files and the working directory belong to
  the agent's user.
- If a setup script fails, or the sandbox cannot take the files, the task is at fault (`task.setup`), and the error
  contains the output.
- The setup script is removed from the sandbox after it ran. Tests and solutions never enter the sandbox.
- Git history that is not reachable from the task's commit is removed before the agent starts.
- If the provider supports snapshots, one is taken, from which fresh sandboxes for grading are forked.
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
from rookery.scoring.fresh_sandboxes import exec_with_deadline
from rookery.scoring.swe.git_history import MAX_REPOSITORIES, NO_GIT_MARK, STRIP_SCRIPT
from rookery.tasks.cache import is_registered, register_use
from rookery.tasks.swe import LOGS, SweStep, SweTask
from rookery.tasks.symlinks import get_upload_source

ROOT: Final = "root"
LOG_DIRECTORIES: Final = tuple(f"{LOGS}/{name}" for name in ("agent", "verifier", "artifacts"))
MAX_OUTPUT: Final = 4_000
"""Maximum number of characters of a script's output in an error message."""
MIN_SECONDS: Final = 1.0
"""The least time in seconds that `Deadline.remaining` returns, even after the deadline."""

_OPEN_SCRIPT: Final = r"""
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
  # Starting a program takes a millisecond, and most directories have the same parent.
  case $seen in *":$d:"*) continue ;; esac
  seen=$seen$d:
  [ -O "$d" ] || continue
  m=$(stat -c %a "$d") && [ "$m" != 1777 ] && chmod 1777 "$d" && printf '%s %s\n' "$m" "$d"
done
exit 0
"""
"""Shell script that runs as root. Its arguments are the log directory, then the directories to create. It makes
the existing parent directories writable for everybody until `_RESTORE_MODE_SCRIPT` runs, and prints their old
modes."""

_MAKE_SCRIPT: Final = 'umask 022; mkdir -p -- "$@" && exec id -u'
_RESTORE_MODE_SCRIPT: Final = 'm=$1; shift; exec chmod -- "$m" "$@"'

_LINK_SCRIPT: Final = """
umask 022; d=${2%/*}
[ -z "$d" ] || [ -d "$d" ] || mkdir -p -- "$d" || exit 1
rm -rf -- "$2" && exec ln -s -- "$1" "$2"
"""

_RUN_SCRIPT: Final = r"""
f=$1; if command -v bash >/dev/null 2>&1; then bash "$f"; else sh "$f"; fi; code=$?; rm -f -- "$f"; exit $code
"""


class PreparedSandbox(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Facts that grading needs about an agent's sandbox that `prepare` has set up."""

    snapshot: str = ""
    """ID of the snapshot taken after the preparation; empty if the provider has no snapshots."""
    agent: int = 1000
    """User ID of the agent."""
    multi_user: bool = True
    """True if commands in this sandbox can run as other users than the agent."""
    warnings: tuple[str, ...] = ()
    """Sentences that say what could not be prepared completely."""


async def prepare(sandbox: Sandbox, task: SweTask, *, timeout: float) -> PreparedSandbox:
    """Copy the task's files into an unused sandbox and run the setup of its first step.

    The working directory is created here, so the sandbox's spec need not name it. Raise `TaskError(task.setup)`
    if the task is at fault, `SandboxError` if the sandbox is.
    """
    deadline = Deadline(timeout)
    # A resumed run reads its tasks from the journal, so nothing has registered the use of the cached directory
    # yet.
    if not is_registered(task.folder) and not await asyncio.to_thread(register_use, task.folder):
        raise TaskError(
            (
                f"task {task.id}: its directory {task.folder} was removed from the task cache: load the "
                "taskset again"
            ),
            cause="task.setup",
        )
    agent, multi_user = await _make_directories(sandbox, (task.workdir, *LOG_DIRECTORIES), deadline)
    for part in task.files:
        await _upload(sandbox, task, part.source, part.target, deadline)
    if task.steps:
        await _begin_step(sandbox, task, task.steps[0], deadline)
    warnings = await _strip_history(sandbox, task, deadline)
    try:
        snapshot = await sandbox.snapshot(timeout=deadline.remaining())
    except SandboxError as error:
        if error.code != "sandbox.refused":
            raise
        snapshot = ""
    return PreparedSandbox(snapshot=snapshot, agent=agent, multi_user=multi_user, warnings=warnings)


async def prepare_step(sandbox: Sandbox, task: SweTask, step: SweStep, *, timeout: float) -> None:
    """Copy the files of a step into the sandbox and run its setup script.

    Does nothing for the first step, which `prepare` sets up.
    """
    if task.steps and step != task.steps[0]:
        await _begin_step(sandbox, task, step, Deadline(timeout))


class Deadline:
    """A point in time by which a sequence of operations must end."""

    def __init__(self, timeout: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.time() + timeout

    def remaining(self, most: float = float("inf")) -> float:
        """Return the seconds until the deadline: at most `most`, but never less than `MIN_SECONDS`."""
        return max(MIN_SECONDS, min(most, self._end - self._loop.time()))

    @property
    def expired(self) -> bool:
        """True if the deadline has passed."""
        return self._loop.time() >= self._end


async def _make_directories(sandbox: Sandbox, folders: Sequence[str], deadline: Deadline) -> tuple[int, bool]:
    """Create directories that belong to the agent's user.

    Return the ID of this user (-1 if unknown), and whether commands can also run as root.
    """
    # Programs in a sandbox cannot change the owner of files, so root opens the parent directories for the agent.
    opened: ExecResult | None = None
    try:
        opened = await run_script(sandbox, _OPEN_SCRIPT, LOGS, *folders, user=ROOT, deadline=deadline)
    except SandboxError as error:
        if error.code != "sandbox.refused":
            raise
    try:
        made = await run_script(sandbox, _MAKE_SCRIPT, *folders, deadline=deadline)
    finally:
        if opened is not None and opened.stdout:
            output = opened.stdout.decode("utf-8", "surrogateescape")
            pairs = [line.split(" ", 1) for line in output.splitlines()]
            for mode in sorted({mode for mode, _ in pairs}):
                names = [folder for one, folder in pairs if one == mode]
                await run_script(sandbox, _RESTORE_MODE_SCRIPT, mode, *names, user=ROOT, deadline=deadline)
    if not made.ok:
        raise TaskError(
            f"cannot create the directories {', '.join(folders)}: {describe_result(made)}", cause="task.setup"
        )
    words = made.stdout.split()
    return int(words[-1]) if words and words[-1].isdigit() else -1, opened is not None


async def run_script(
    sandbox: Sandbox,
    script: str,
    *arguments: str,
    deadline: Deadline,
    user: str | None = None,
    cwd: str = "/",
    stdin: bytes = b"",
    env: dict[str, str] | None = None,
) -> ExecResult:
    """Run a shell script with positional arguments. Raise `SandboxError` if the sandbox is lost."""
    command = Command(
        argv=("sh", "-c", script, "sh", *arguments),
        user=user,
        cwd=cwd,
        stdin=stdin,
        env=env or {},
        wall=deadline.remaining(),
    )
    result = await exec_with_deadline(sandbox, command)
    if result.status == "lost":
        raise SandboxError(f"sandbox {sandbox.id} was lost: {result.detail or 'no detail'}")
    return result


def describe_result(result: ExecResult) -> str:
    """Describe how a script ended, with the end of its output, for an error message."""
    how = f"exit code {result.exit_code}" if result.status == "exited" else result.status
    output = (result.stdout + result.stderr).decode("utf-8", "replace").strip()
    return (
        f"{how}{f' ({result.detail})' if result.detail else ''}: {output[-MAX_OUTPUT:]}"
        if output
        else f"{how}, no output"
    )


async def _upload(sandbox: Sandbox, task: SweTask, source: str, target: str, deadline: Deadline) -> None:
    path, inside = get_upload_source(task, source)
    try:
        if link := await asyncio.to_thread(_read_link, path, inside):
            await _make_symlink(sandbox, task, link, target, deadline)
        else:
            await sandbox.upload(path, target, inside=inside, timeout=deadline.remaining())
    except TimeoutError as error:
        raise SandboxError(
            f"task {task.id}: its files could not be copied into the sandbox in time: raise limits.setup",
            cause="engine.setup",
        ) from error
    except OSError as error:
        raise TaskError(
            f"task {task.id}: cannot copy {source!r:.300} to {target!r:.300}: {describe(error)}",
            cause="task.setup",
        ) from error


def _read_link(path: Path, inside: Path | None) -> str:
    """Return the target of the symbolic link at a path on the host, or an empty string if it is not a link."""
    with open_parent(path, inside) as (above, name):
        info = os.stat(name, dir_fd=above, follow_symlinks=False)
        return os.readlink(name, dir_fd=above) if stat.S_ISLNK(info.st_mode) else ""


async def _make_symlink(sandbox: Sandbox, task: SweTask, link: str, target: str, deadline: Deadline) -> None:
    """Create a symbolic link of the task in the sandbox, because `upload` does not follow or copy links."""
    if link.startswith("/"):
        raise TaskError(
            f"task {task.id}: {target!r:.300} is a link to the absolute path {link!r:.300}: make it relative",
            cause="task.setup",
        )
    result = await run_script(sandbox, _LINK_SCRIPT, link, target, deadline=deadline)
    if not result.ok:
        raise TaskError(
            (f"task {task.id}: cannot create the symbolic link {target!r:.300}: {describe_result(result)}"),
            cause="task.setup",
        )


async def _begin_step(sandbox: Sandbox, task: SweTask, step: SweStep, deadline: Deadline) -> None:
    for part in step.files:
        await _upload(sandbox, task, part.source, part.target, deadline)
    if step.setup:
        await _run_setup(sandbox, task, step, deadline)


async def _run_setup(sandbox: Sandbox, task: SweTask, step: SweStep, deadline: Deadline) -> None:
    # The script may reveal what was broken for the task, so it is neither on a command line nor in a file that
    # stays.
    script_path = f"/tmp/{secrets.token_hex(8)}.sh"  # noqa: S108  (inside the sandbox)
    await _upload(sandbox, task, step.setup, script_path, deadline)
    result = await run_script(sandbox, _RUN_SCRIPT, script_path, deadline=deadline, cwd=task.workdir, env=task.env)
    if not result.ok:
        what = f" of step {step.name!r}" if step.name else ""
        raise TaskError(f"task {task.id}: its setup{what} failed: {describe_result(result)}", cause="task.setup")


async def _strip_history(sandbox: Sandbox, task: SweTask, deadline: Deadline) -> tuple[str, ...]:
    tops = sorted(
        {task.workdir, *task.artifacts, *(posixpath.dirname(p.target) or "/" for p in task.files)} - {"/"}
    )
    result = await run_script(sandbox, STRIP_SCRIPT, str(MAX_REPOSITORIES), *tops, deadline=deadline)
    if not result.ok:
        raise TaskError(
            f"task {task.id}: cannot strip its Git history: {describe_result(result)}", cause="task.setup"
        )
    if NO_GIT_MARK.encode() in result.stdout.splitlines():
        return (
            (
                "the sandbox has Git repositories but no git program, so history that is not reachable from the "
                "task's commit remains in it: install git in the image"
            ),
        )
    return ()
