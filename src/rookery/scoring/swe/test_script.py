"""Place a task's test script in a sandbox, run it, and remove it.

Guarantees:
- Tests enter the sandbox as files of the user that runs them, in one command, when no process of the agent runs or
  none can access them.
- The directory of the verdict is new and empty. If the tests run the submission as another user, only the user of
  the tests may access it.
- The script starts without start-up files or environment variables of the agent.
- Tests and verdict are removed from a sandbox that continues to be used.
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
from rookery.sandboxes.protocol import SupportsKillAll
from rookery.scoring.fresh_sandboxes import exec_with_deadline
from rookery.scoring.swe import program_launcher
from rookery.scoring.swe.preparation import ROOT, Deadline, describe_result, run_script
from rookery.scoring.swe.protected_files import is_below
from rookery.scoring.swe.submission_transfer import UngradableSubmission
from rookery.tasks.swe import LOGS, SOLUTION, TESTS, FileMapping, SweStep, SweTask
from rookery.tasks.symlinks import iterate_files, read_inside

MAX_TEST_BYTES: Final = 256 << 20
MAX_SCANNED_BYTES: Final = 4 << 20
UNPRIVILEGED_USER: Final = "65533"
"""User ID for the program under test if the agent was root."""
SAFE_ENV: Final = {"BASH_ENV": "", "ENV": "", "PYTHONNOUSERSITE": "1"}
"""Environment variables of every test script. They keep shells and Python from reading start-up files of the
user."""
SEPARATE_USER_ENV: Final = {
    "PYTHONSAFEPATH": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "HOME": f"{program_launcher.GRADER_HOME}/home",
    "TMPDIR": f"{program_launcher.GRADER_HOME}/tmp",  # noqa: S108  (inside the sandbox)
}
"""Additional environment variables of a test script that runs the submission as another user."""

_PLACE_SCRIPT: Final = rf"""
umask 022
mode=$1 run=$2; shift 2
[ ! -L {LOGS} ] || rm -f {LOGS}
rm -rf -- "$@" {SOLUTION} {program_launcher.GRADER_HOME} {LOGS}/verifier || exit 1
[ -d {LOGS} ] || mkdir -p {LOGS} || exit 1
chmod go-w / {LOGS} 2>/dev/null
mkdir -m "$mode" {LOGS}/verifier || exit 1
mkdir -p -m "$mode" -- "$@" || exit 1
[ -n "$run" ] || exit 0
mkdir -m 700 {program_launcher.GRADER_HOME} && cd {program_launcher.GRADER_HOME} || exit 1
mkdir calls home tmp && mkfifo -m 600 ask || exit 1
printf '%s' "$run" > {program_launcher.RUN_PATH} && chmod 700 {program_launcher.RUN_PATH}
"""
"""Shell script that runs as root. Its arguments are the mode of the directories, the source of the launcher or
an empty string, then the directories to create anew."""

_EMPTY_SCRIPT: Final = f"""
[ -L {LOGS}/verifier ] && rm -f {LOGS}/verifier
[ -d {LOGS}/verifier ] && chmod -R u+rwX {LOGS}/verifier && find {LOGS}/verifier -mindepth 1 -delete
exit 0
"""
_UNPACK_SCRIPT: Final = r"""
command -v tar >/dev/null 2>&1 || exit 127
umask 022; exec tar -x -o -f - -C /
"""
KILL_SECONDS: Final = 30.0
KILL_SCRIPT: Final = "kill -9 -1 2>/dev/null; exit 0"
"""Shell command that kills all other processes of the user that runs it."""
_REMOVE_SCRIPT: Final = (
    f'for d; do rm -rf -- "$d"; done; rm -rf {program_launcher.GRADER_HOME} {LOGS}/verifier; exit 0'
)


class TestsCannotStart(Exception):  # noqa: N818  (a run in an untouched sandbox shows who is at fault)
    """The tests could not be started."""


def is_strong(task: SweTask, step: SweStep) -> bool:
    """Return whether the tests run the submission as another user.

    They do if one of their files mentions `ROOKERY_RUN`, the environment variable with the path of the launcher.
    """
    return any(_mentions(task, part, program_launcher.RUN_VARIABLE.encode()) for part in step.tests)


def task_mentions(task: SweTask, step: SweStep, path: str) -> bool:
    """Return whether the task's instruction, tests or solution mention a file or directory."""
    name = path.rpartition("/")[2]
    word = name if "." in name else f"{name}/"
    parts = (*step.tests, *step.solution)
    return word in step.instruction or any(_mentions(task, part, word.encode()) for part in parts)


def _mentions(task: SweTask, part: FileMapping, word: bytes) -> bool:
    """Return whether a file of a mapping contains a word. Symbolic links are not followed."""
    left = MAX_SCANNED_BYTES
    for item in iterate_files(task, part):
        if item.file is not None and item.info.st_size <= MAX_SCANNED_BYTES:
            data = item.file.read(max(0, left))
            left -= len(data)
            if word in data:
                return True
    return False


async def kill_processes(sandbox: Sandbox, deadline: Deadline, user: str | None = None) -> None:
    """Kill the processes of a user, or all processes of the sandbox if `user` is None; "" is its default user.

    If the provider can kill from outside, this also works when programs use up the process limit. Otherwise a
    shell in the sandbox kills only the processes of one user, the default user if `user` is None. A program may
    prevent that, but gains nothing, because its sandbox is not trusted afterwards.
    """
    if isinstance(sandbox, SupportsKillAll):
        try:
            await sandbox.kill_all(user=user, timeout=deadline.remaining(KILL_SECONDS))
        except SandboxError as error:
            if error.code != "sandbox.refused":
                raise
        else:
            return
    await run_script(sandbox, KILL_SCRIPT, deadline=deadline, user=user or None)


async def place_tests(
    sandbox: Sandbox,
    task: SweTask,
    step: SweStep,
    *,
    multi_user: bool,
    used: bool,
    grader: str | None,
    strong: bool,
    deadline: Deadline,
) -> None:
    """Copy the tests of a step into the sandbox, and create the directory to which they write their verdict.

    Existing directories are replaced. With `used`, an agent has worked in the sandbox, so the agent's user first
    deletes what it left in the verdict's directory. The copies belong to the user `grader`. With `strong`, only
    the owner of the directories may access them.
    """
    tops = sorted({part.target.rstrip("/") or TESTS for part in step.tests} | {TESTS}, key=len)
    if any(not top or is_below(task.workdir, (top,)) for top in tops):
        raise TaskError(
            f"task {task.id}: its tests cannot be placed in {tops[0]!r}, which contains the working directory"
        )
    mode = "0700" if strong else "1777"
    if multi_user and used:  # only the agent's user can remove its own files there
        await run_script(sandbox, _EMPTY_SCRIPT, deadline=deadline)
    made = await run_script(
        sandbox,
        _PLACE_SCRIPT,
        mode,
        program_launcher.RUN_SCRIPT if strong else "",
        *tops,
        user=ROOT if multi_user else None,
        deadline=deadline,
    )
    if not made.ok:
        raise UngradableSubmission(
            f"cannot create the directories for the tests in the submission's sandbox: {describe_result(made)}"
        )
    await unpack_files(sandbox, task, step.tests, user=grader, deadline=deadline)


async def unpack_files(
    sandbox: Sandbox, task: SweTask, parts: tuple[FileMapping, ...], *, user: str | None, deadline: Deadline
) -> None:
    """Copy files of the host into existing directories of the sandbox, as files of `user`.

    Raise `TestsCannotStart` if the sandbox has no tar, and `UngradableSubmission` if the files cannot be unpacked.
    """
    if not parts:
        return
    result = await run_script(
        sandbox, _UNPACK_SCRIPT, stdin=make_archive(task, parts), user=user, deadline=deadline
    )
    if result.exit_code == 127:
        raise TestsCannotStart("the sandbox has no tar, which grading needs: install it in the image")
    if not result.ok:
        raise UngradableSubmission(
            f"cannot copy the tests into the submission's sandbox: {describe_result(result)}"
        )


def make_archive(task: SweTask, parts: tuple[FileMapping, ...]) -> bytes:
    """Return a tar archive of the mapped files, with paths relative to the root of the sandbox.

    Symbolic links stay links; none is followed on the host.
    """
    out = io.BytesIO()
    left = MAX_TEST_BYTES
    with tarfile.open(fileobj=out, mode="w") as tar:
        for part in parts:
            top = part.target.strip("/")
            try:
                for item in iterate_files(task, part):
                    folder = stat.S_ISDIR(item.info.st_mode)
                    if folder and not item.names:
                        continue  # it already exists, with the required mode
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
                        raise TaskError(f"task {task.id}: its tests are larger than {MAX_TEST_BYTES} bytes")
                    tar.addfile(info, item.file)
            except OSError as error:
                raise TaskError(f"task {task.id}: cannot read {part.source!r:.300}: {describe(error)}") from error
    return out.getvalue()


async def run_test_script(
    sandbox: Sandbox,
    task: SweTask,
    step: SweStep,
    *,
    grader: str | None,
    program: str | None,
    strong: bool,
    wall: float,
) -> ExecResult:
    """Run the test script until its end or its time limit of `wall` seconds.

    `grader` is the user of the script. With `strong`, the script can run programs as the user `program` through
    `ROOKERY_RUN`.
    """
    env = {**SAFE_ENV, **(SEPARATE_USER_ENV if strong else {}), **task.env, **step.verifier.env}
    if strong:
        env[program_launcher.RUN_VARIABLE] = program_launcher.RUN_PATH
    command = Command(argv=get_test_command(task, step), user=grader, cwd=task.workdir, env=env, wall=wall)
    if not strong:
        return await exec_with_deadline(sandbox, command)
    async with program_launcher.ProgramLauncher(sandbox, grader=grader, program=program, wall=wall):
        return await exec_with_deadline(sandbox, command)


def get_test_command(task: SweTask, step: SweStep) -> tuple[str, ...]:
    """Return the command that starts the test script: its interpreter, without the start-up files of a shell."""
    return _get_script_command(task, step.tests, TESTS, step.verifier.script)


def get_solution_command(task: SweTask, step: SweStep) -> tuple[str, ...]:
    """Return the command that starts the reference solution."""
    return _get_script_command(task, step.solution, SOLUTION, step.solve)


def _get_script_command(task: SweTask, parts: tuple[FileMapping, ...], top: str, script: str) -> tuple[str, ...]:
    script_path = f"{top}/{script}"
    for part in parts:
        here = Path(part.source) / script if part.target.rstrip("/") == top else Path(part.source)
        if part.target != script_path and part.target.rstrip("/") != top:
            continue
        try:
            first = read_inside(Path(task.folder), here, 200).partition(b"\n")[0]
        except OSError:
            continue
        interpreter = shlex.split(first[2:].decode("utf-8", "replace")) if first.startswith(b"#!") else ["sh"]
        name = next((Path(word).name for word in reversed(interpreter) if not word.startswith("-")), "sh")
        if name == "bash":
            return ("bash", "--noprofile", "--norc", script_path)
        return (
            ("sh", script_path)
            if name in ("sh", "dash", "ash") or not first.startswith(b"#!")
            else (*interpreter, script_path)
        )
    raise TaskError(
        f"task {task.id}: the script {script!r:.200} is missing from the files that the task places in {top}",
        cause="task.invalid",
    )


async def remove_tests(sandbox: Sandbox, step: SweStep, *, multi_user: bool, deadline: Deadline) -> None:
    """Remove the tests and the verdict from a sandbox that continues to be used."""
    tops = sorted({part.target.rstrip("/") or TESTS for part in step.tests} | {TESTS})
    await run_script(sandbox, _REMOVE_SCRIPT, *tops, user=ROOT if multi_user else None, deadline=deadline)
