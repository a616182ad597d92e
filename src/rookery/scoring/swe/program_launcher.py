"""Let a test script run the program under test as another user.

No program in a sandbox can change its user, so the script cannot do this itself. The environment variable
`ROOKERY_RUN` holds the path of a launcher command. The launcher writes a request to a directory that only the user
of the test script can access, and Rookery starts the program from outside the sandbox.

Guarantees:
- The program under test receives its arguments, working directory and standard input, but no file descriptor,
  environment variable or file of the script.
- Output and exit code return through the same directory. Input and output have maximum sizes.
- If the launcher command is terminated by a signal, for example by `timeout`, its program is killed; SIGKILL is an
  exception. All programs are killed when the script ends.

An invalid request returns exit code 125 and affects no other request.
"""

import asyncio
import contextlib
import re
from types import TracebackType
from typing import Final, Self

from rookery.core import ExecResult, SandboxError
from rookery.core.errors import describe
from rookery.sandboxes import Command, Process, Sandbox
from rookery.sandboxes.protocol import SupportsKillAll
from rookery.scoring.fresh_sandboxes import exec_with_deadline

GRADER_HOME: Final = "/grader"
"""Directory in the sandbox that only the user of the test script can enter."""
RUN_PATH: Final = f"{GRADER_HOME}/run"
RUN_VARIABLE: Final = "ROOKERY_RUN"
MAX_INPUT: Final = 16 << 20
MAX_OUTPUT: Final = 4 << 20
MAX_CALLS: Final = 32
"""Maximum number of programs that run at once; further ones wait."""
_NAME: Final = re.compile(r"[A-Za-z0-9]{6,20}")
CANNOT_RUN: Final = 125
TIMED_OUT: Final = 124

RUN_SCRIPT: Final = rf"""#!/bin/sh
# Runs a program as the user of the program under test: run [-t SECONDS] PROGRAM [ARGUMENT...]
limit=
if [ "$1" = -t ]; then limit=$2; shift 2; fi
[ $# -gt 0 ] || {{ echo 'run: no program was named' >&2; exit {CANNOT_RUN}; }}
call=$(mktemp -d {GRADER_HOME}/calls/XXXXXXXXXX) || exit {CANNOT_RUN}
name=${{call##*/}}
trap 'echo "end $name" > {GRADER_HOME}/ask; exit 143' TERM INT HUP
cat > "$call/stdin" || exit {CANNOT_RUN}
printf '%s\0' "$limit" "$PWD" "$@" > "$call/argv" && mkfifo "$call/done" || exit {CANNOT_RUN}
cat "$call/done" > "$call/code" &
echo "run $name" > {GRADER_HOME}/ask
wait $!
cat "$call/stdout"
[ ! -f "$call/stderr" ] || cat "$call/stderr" >&2
read -r code < "$call/code"
rm -rf "$call"
exit "${{code:-{CANNOT_RUN}}}"
"""

LISTEN_SCRIPT: Final = f"exec 3<>{GRADER_HOME}/ask && exec cat <&3"
_REPLY_SCRIPT: Final = f"""
code=$3
cat > "{GRADER_HOME}/calls/$1/$2" || code={CANNOT_RUN}
[ -z "$3" ] || echo "$code" > "{GRADER_HOME}/calls/$1/done"
"""
"""Shell script that writes the output and exit code of a program for the launcher command. It writes the exit code
even if the disk is too full for the output; otherwise the test script would wait until its time limit."""


class ProgramLauncher:
    """Async context manager that runs programs for one test script.

    `grader` is the user that runs the script, and `program` the user that runs the programs; None is the sandbox's
    default user. `wall` is the time limit of each program in seconds.
    """

    def __init__(self, sandbox: Sandbox, *, grader: str | None, program: str | None, wall: float) -> None:
        self._sandbox = sandbox
        self._grader = grader
        self._program = program
        self._wall = wall
        self._process: Process | None = None
        self._serve_task: asyncio.Task[None] | None = None
        self._calls: dict[str, asyncio.Task[None]] = {}
        self._gate = asyncio.Semaphore(MAX_CALLS)

    async def __aenter__(self) -> Self:
        self._process = await self._sandbox.start(
            Command(argv=("sh", "-c", LISTEN_SCRIPT), user=self._grader, cwd="/", wall=self._wall + TIMED_OUT)
        )
        self._serve_task = asyncio.create_task(self._serve(self._process))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = [task for task in (self._serve_task, *self._calls.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._process is not None:
            with contextlib.suppress(SandboxError):  # its sandbox is gone
                await self._process.kill()

    async def _serve(self, process: Process) -> None:
        rest = b""
        async for stream, data in process.output():
            if stream != "stdout":
                continue
            *lines, rest = (rest + data).split(b"\n")
            rest = rest[-200:]
            for line in lines:
                self._handle_line(line.decode("ascii", "replace"))

    def _handle_line(self, line: str) -> None:
        action, _, name = line.partition(" ")
        if not _NAME.fullmatch(name):
            return
        if action == "end" and (call := self._calls.get(name)) is not None:
            call.cancel()
        elif action == "run" and name not in self._calls:
            task = asyncio.create_task(self._serve_call(name))
            self._calls[name] = task
            task.add_done_callback(lambda done: self._on_call_done(name, done))

    def _on_call_done(self, name: str, task: "asyncio.Task[None]") -> None:
        self._calls.pop(name, None)
        if not task.cancelled():
            task.exception()  # a lost sandbox also ends the script, which reports it

    async def _serve_call(self, name: str) -> None:
        async with self._gate:
            try:
                result = await self._run_program(name)
            except (OSError, ValueError) as error:
                text = f"run: cannot start the program: {describe(error)}\n".encode()
                result = ExecResult(status="exited", exit_code=CANNOT_RUN, stderr=text)
            if result.status == "lost":
                raise SandboxError(f"sandbox {self._sandbox.id} was lost while it ran a program")
            stderr = result.stderr
            if result.stdout_dropped or result.stderr_dropped:
                stderr += (
                    f"run: {result.stdout_dropped + result.stderr_dropped} bytes of output dropped\n".encode()
                )
            elif result.detail:
                stderr += f"run: {result.detail}\n".encode("utf-8", "replace")
            if stderr:
                await self._write_reply(name, "stderr", "", stderr)
            await self._write_reply(name, "stdout", str(_exit_code(result)), result.stdout)

    async def _run_program(self, name: str) -> ExecResult:
        folder = f"{GRADER_HOME}/calls/{name}"
        parts = (await self._sandbox.read(f"{folder}/argv", limit=MAX_INPUT)).split(b"\0")[:-1]
        stdin = await self._sandbox.read(f"{folder}/stdin", limit=MAX_INPUT)
        limit, cwd, *argv = (part.decode("utf-8", "surrogateescape") for part in parts)
        wall = min(float(limit), self._wall) if limit else self._wall
        if not wall > 0:
            raise ValueError(f"the time limit {limit!r:.40} is not a positive number of seconds")
        command = Command(argv=tuple(argv), stdin=stdin, cwd=cwd, user=self._program, wall=wall, output=MAX_OUTPUT)
        return await exec_with_deadline(self._sandbox, command)

    async def _write_reply(self, name: str, stream_name: str, code: str, data: bytes) -> None:
        # Runs as the grader's user: files written from outside would belong to the sandbox's default user.
        command = Command(
            argv=("sh", "-c", _REPLY_SCRIPT, "sh", name, stream_name, code),
            stdin=data,
            user=self._grader,
            cwd="/",
            wall=30.0,
        )
        result = await exec_with_deadline(self._sandbox, command)
        if result.status in ("process_limit", "memory_limit") and isinstance(self._sandbox, SupportsKillAll):
            # The program ended and left processes that use up a limit. Without the reply the script would wait for
            # its time limit.
            await self._sandbox.kill_all(user=self._program or "")
            await exec_with_deadline(self._sandbox, command)


def _exit_code(result: ExecResult) -> int:
    if result.status == "time_limit":
        return TIMED_OUT
    if result.exit_code is not None:
        return result.exit_code
    return 128 + result.signal if result.signal else CANNOT_RUN
