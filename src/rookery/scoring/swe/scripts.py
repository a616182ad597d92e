"""A test script in a box: put there, run, and what came of it.

Promises:
- tests come into the box as the grader's, in one command, when no program of the agent's runs there, or where none
  of them can reach;
- the place of the verdict is new and empty, and only the grader's user may write to it;
- the script starts from the task's own words: no start-up file, no variable of the agent's;
- nothing of tests and verdict is left in a box that goes on.
"""

import io
import shlex
import stat
import tarfile
from pathlib import Path
from typing import Final

from rookery.core import ExecResult, SandboxError, TaskError
from rookery.core.errors import describe
from rookery.sandboxes import Command, Sandbox
from rookery.sandboxes.protocol import Stopping
from rookery.scoring.boxes import bounded_exec
from rookery.scoring.swe import door
from rookery.scoring.swe.changes import TooMuch
from rookery.scoring.swe.planted import below
from rookery.scoring.swe.prepare import ROOT, Clock, run, told
from rookery.tasks.links import part_items, read_inside
from rookery.tasks.swe import LOGS, SOLUTION, TESTS, Part, SweStep, SweTask

MOST_TESTS: Final = 256 << 20
MOST_SCANNED: Final = 4 << 20
STRANGER: Final = "65533"
"""The user of the program under test where the agent was root."""
SAFE: Final = {"BASH_ENV": "", "ENV": "", "PYTHONNOUSERSITE": "1"}
"""Over what the box's own variables are, which are the image's and the task's: none of an agent's shell is among
them."""
APART: Final = {
    "PYTHONSAFEPATH": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "HOME": f"{door.HOME}/home",
    "TMPDIR": f"{door.HOME}/tmp",  # noqa: S108  (its own)
}
"""For a script that runs the submission as another user, and has no use for its folder."""

_PLACES: Final = rf"""
umask 022
mode=$1 run=$2; shift 2
[ ! -L {LOGS} ] || rm -f {LOGS}
rm -rf -- "$@" {SOLUTION} {door.HOME} {LOGS}/verifier || exit 1
[ -d {LOGS} ] || mkdir -p {LOGS} || exit 1
chmod go-w / {LOGS} 2>/dev/null
mkdir -m "$mode" {LOGS}/verifier || exit 1
mkdir -p -m "$mode" -- "$@" || exit 1
[ -n "$run" ] || exit 0
mkdir -m 700 {door.HOME} && cd {door.HOME} && mkdir calls home tmp && mkfifo -m 600 ask || exit 1
printf '%s' "$run" > {door.RUNNER} && chmod 700 {door.RUNNER}
"""
"""As root: mode of the folders, the runner or nothing, then the folders that are to be new."""

_EMPTY: Final = f"""
[ -L {LOGS}/verifier ] && rm -f {LOGS}/verifier
[ -d {LOGS}/verifier ] && chmod -R u+rwX {LOGS}/verifier && find {LOGS}/verifier -mindepth 1 -delete
exit 0
"""
_UNPACK: Final = r"""
command -v tar >/dev/null 2>&1 || exit 127
umask 022; exec tar -x -o -f - -C /
"""
KILL_SECONDS: Final = 30.0
KILL: Final = "kill -9 -1 2>/dev/null; exit 0"
"""As a user: all processes of that one but this."""
_GONE: Final = f'for d; do rm -rf -- "$d"; done; rm -rf {door.HOME} {LOGS}/verifier; exit 0'


class CannotStart(Exception):  # noqa: N818  (whose doing it is shows in a sandbox that no submission changed)
    """The tests could not be started."""


def is_strong(task: SweTask, step: SweStep) -> bool:
    """Whether the tests run the submission as another user, that is: whether they name the runner."""
    return any(_mentions(task, part, door.VARIABLE.encode()) for part in step.tests)


def asks_for(task: SweTask, step: SweStep, path: str) -> bool:
    """Return whether a task itself names a file or folder: its instruction, its tests or its solution do."""
    name = path.rpartition("/")[2]
    word = name if "." in name else f"{name}/"
    parts = (*step.tests, *step.solution)
    return word in step.instruction or any(_mentions(task, part, word.encode()) for part in parts)


def _mentions(task: SweTask, part: Part, word: bytes) -> bool:
    """Whether a file of a part holds a word. Symbolic links are not followed."""
    left = MOST_SCANNED
    for item in part_items(task, part):
        if item.file is not None and item.info.st_size <= MOST_SCANNED:
            data = item.file.read(max(0, left))
            left -= len(data)
            if word in data:
                return True
    return False


async def killed(box: Sandbox, clock: Clock, user: str | None = None) -> None:
    """Kill the processes of a user; all processes of the sandbox if it is None. "" is the sandbox's own user.

    Where the provider can do it from outside, it works also when programs hold every process that the
    sandbox may have. Elsewhere a program may keep us from it, and gains nothing: its sandbox is not believed
    afterwards.
    """
    if isinstance(box, Stopping):
        try:
            await box.kill_all(user=user, timeout=clock.left(KILL_SECONDS))
        except SandboxError as error:
            if error.code != "sandbox.refused":
                raise
        else:
            return
    await run(box, KILL, clock=clock, user=user or None)


async def placed(
    box: Sandbox,
    task: SweTask,
    step: SweStep,
    *,
    several: bool,
    used: bool,
    grader: str | None,
    strong: bool,
    clock: Clock,
) -> None:
    """The tests, and a new place for the verdict. `used`: an agent was there, or something of it may lie there."""
    tops = sorted({part.target.rstrip("/") or TESTS for part in step.tests} | {TESTS}, key=len)
    if any(not top or below(task.workdir, (top,)) for top in tops):
        raise TaskError(f"task {task.id}: its tests cannot lie in {tops[0]!r}: the working folder is there")
    mode = "0700" if strong else "1777"
    if several and used:  # what the agent's user has there only that one can remove
        await run(box, _EMPTY, clock=clock)
    made = await run(
        box,
        _PLACES,
        mode,
        door.RUN if strong else "",
        *tops,
        user=ROOT if several else None,
        clock=clock,
    )
    if not made.ok:
        raise TooMuch(f"there is no place for the tests in its box: {told(made)}")
    await unpacked(box, task, step.tests, user=grader, clock=clock)


async def unpacked(
    box: Sandbox, task: SweTask, parts: tuple[Part, ...], *, user: str | None, clock: Clock
) -> None:
    """Files of this machine, as that user's, into folders that are there."""
    if not parts:
        return
    result = await run(box, _UNPACK, stdin=packed(task, parts), user=user, clock=clock)
    if result.exit_code == 127:
        raise CannotStart("the sandbox has no `tar`, which grading needs")
    if not result.ok:
        raise TooMuch(f"the tests cannot be put into its box: {told(result)}")


def packed(task: SweTask, parts: tuple[Part, ...]) -> bytes:
    """Return a tar archive of the parts, with paths from the root of the box.

    Symbolic links become links of the archive; none is followed on this machine.
    """
    out = io.BytesIO()
    left = MOST_TESTS
    with tarfile.open(fileobj=out, mode="w") as tar:
        for part in parts:
            top = part.target.strip("/")
            try:
                for item in part_items(task, part):
                    folder = stat.S_ISDIR(item.info.st_mode)
                    if folder and not item.names:
                        continue  # it is there already, with the mode that it is to have
                    info = tarfile.TarInfo("/".join((top, *item.names)))
                    info.mode = (item.info.st_mode & 0o777) | (0o500 if folder else 0o400)
                    info.mtime = int(item.info.st_mtime)
                    if item.link is not None:
                        info.type, info.linkname = tarfile.SYMTYPE, item.link
                    elif folder:
                        info.type = tarfile.DIRTYPE
                    else:
                        info.size = item.info.st_size
                        left -= info.size
                    if left < 0:
                        raise TaskError(f"task {task.id}: its tests are larger than {MOST_TESTS} bytes")
                    tar.addfile(info, item.file)
            except OSError as error:
                raise TaskError(
                    f"task {task.id}: {part.source!r:.300} cannot be read: {describe(error)}"
                ) from error
    return out.getvalue()


async def ran(
    box: Sandbox,
    task: SweTask,
    step: SweStep,
    *,
    grader: str | None,
    program: str | None,
    strong: bool,
    wall: float,
) -> ExecResult:
    """The script, to its end or its limit."""
    env = {**SAFE, **(APART if strong else {}), **task.env, **step.verifier.env}
    if strong:
        env[door.VARIABLE] = door.RUNNER
    command = Command(argv=words(task, step), user=grader, cwd=task.workdir, env=env, wall=wall)
    if not strong:
        return await bounded_exec(box, command)
    async with door.Door(box, grader=grader, program=program, wall=wall):
        return await bounded_exec(box, command)


def words(task: SweTask, step: SweStep) -> tuple[str, ...]:
    """How the script is started: a shell's without its start-up files, another's as its first line says."""
    return _words(task, step.tests, TESTS, step.verifier.script)


def solving(task: SweTask, step: SweStep) -> tuple[str, ...]:
    return _words(task, step.solution, SOLUTION, step.solve)


def _words(task: SweTask, parts: tuple[Part, ...], top: str, script: str) -> tuple[str, ...]:
    place = f"{top}/{script}"
    for part in parts:
        here = Path(part.source) / script if part.target.rstrip("/") == top else Path(part.source)
        if part.target != place and part.target.rstrip("/") != top:
            continue
        try:
            first = read_inside(Path(task.folder), here, 200).partition(b"\n")[0]
        except OSError:
            continue
        said = shlex.split(first[2:].decode("utf-8", "replace")) if first.startswith(b"#!") else ["sh"]
        name = next((Path(word).name for word in reversed(said) if not word.startswith("-")), "sh")
        if name == "bash":
            return ("bash", "--noprofile", "--norc", place)
        return ("sh", place) if name in ("sh", "dash", "ash") or not first.startswith(b"#!") else (*said, place)
    raise TaskError(f"task {task.id}: there is no {script!r:.200} among the files for {top}", cause="task.invalid")


async def cleared(box: Sandbox, step: SweStep, *, several: bool, clock: Clock) -> None:
    """Nothing of a grading is left in a box that goes on."""
    tops = sorted({part.target.rstrip("/") or TESTS for part in step.tests} | {TESTS})
    await run(box, _GONE, *tops, user=ROOT if several else None, clock=clock)
