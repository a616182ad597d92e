"""How a test script runs the program under test as another user than its own.

No program in a box can become another user, so the script cannot do it itself: `ROOKERY_RUN` asks, over a folder
that only the grader's user can reach, and the owner of the box starts the program.

Promises:
- what the program under test is given is its arguments, its folder and the standard input: no descriptor, no
  variable and no file of the script's;
- output and exit code come back through the same folder; both are bounded;
- a script that is killed, by `timeout` too, takes its programs with it; all of them end with the script;
- a request that cannot be read is answered with exit code 125, and harms nobody.
"""

import asyncio
import contextlib
import re
from types import TracebackType
from typing import Final, Self

from rookery.core import ExecResult, SandboxError
from rookery.core.errors import describe
from rookery.sandboxes import Command, Process, Sandbox
from rookery.sandboxes.protocol import Stopping
from rookery.scoring.boxes import bounded_exec

HOME: Final = "/grader"
"""The grader's own folder; only its user may pass through."""
RUNNER: Final = f"{HOME}/run"
VARIABLE: Final = "ROOKERY_RUN"
MOST_INPUT: Final = 16 << 20
MOST_OUTPUT: Final = 4 << 20
MOST_CALLS: Final = 32
"""Programs at once; further ones wait."""
_NAME: Final = re.compile(r"[A-Za-z0-9]{6,20}")
CANNOT: Final = 125
LATE: Final = 124

RUN: Final = rf"""#!/bin/sh
# Runs a program as the user of the program under test: run [-t SECONDS] PROGRAM [ARGUMENT...]
limit=
if [ "$1" = -t ]; then limit=$2; shift 2; fi
[ $# -gt 0 ] || {{ echo 'run: no program was named' >&2; exit {CANNOT}; }}
call=$(mktemp -d {HOME}/calls/XXXXXXXXXX) || exit {CANNOT}
name=${{call##*/}}
trap 'echo "end $name" > {HOME}/ask; exit 143' TERM INT HUP
cat > "$call/stdin" || exit {CANNOT}
printf '%s\0' "$limit" "$PWD" "$@" > "$call/argv" && mkfifo "$call/done" || exit {CANNOT}
cat "$call/done" > "$call/code" &
echo "run $name" > {HOME}/ask
wait $!
cat "$call/stdout"
[ ! -f "$call/stderr" ] || cat "$call/stderr" >&2
read -r code < "$call/code"
rm -rf "$call"
exit "${{code:-{CANNOT}}}"
"""

SERVE: Final = f"exec 3<>{HOME}/ask && exec cat <&3"
_ANSWER: Final = f"""
code=$3
cat > "{HOME}/calls/$1/$2" || code={CANNOT}
[ -z "$3" ] || echo "$code" > "{HOME}/calls/$1/done"
"""
"""The end is told also where a full disk does not take the output: who waits would wait out its limit."""


class Door:
    """Serves the runner of one script. `grader` and `program`: users of the box; None is the box's own."""

    def __init__(self, box: Sandbox, *, grader: str | None, program: str | None, wall: float) -> None:
        self._box = box
        self._grader = grader
        self._program = program
        self._wall = wall
        self._process: Process | None = None
        self._serving: asyncio.Task[None] | None = None
        self._calls: dict[str, asyncio.Task[None]] = {}
        self._gate = asyncio.Semaphore(MOST_CALLS)

    async def __aenter__(self) -> Self:
        self._process = await self._box.start(
            Command(argv=("sh", "-c", SERVE), user=self._grader, cwd="/", wall=self._wall + LATE)
        )
        self._serving = asyncio.create_task(self._serve(self._process))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = [task for task in (self._serving, *self._calls.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._process is not None:
            with contextlib.suppress(SandboxError):  # it went with its box
                await self._process.kill()

    async def _serve(self, process: Process) -> None:
        rest = b""
        async for stream, data in process.output():
            if stream != "stdout":
                continue
            *lines, rest = (rest + data).split(b"\n")
            rest = rest[-200:]
            for line in lines:
                self._asked(line.decode("ascii", "replace"))

    def _asked(self, line: str) -> None:
        what, _, name = line.partition(" ")
        if not _NAME.fullmatch(name):
            return
        if what == "end" and (call := self._calls.get(name)) is not None:
            call.cancel()
        elif what == "run" and name not in self._calls:
            task = asyncio.create_task(self._call(name))
            self._calls[name] = task
            task.add_done_callback(lambda done: self._over(name, done))

    def _over(self, name: str, task: "asyncio.Task[None]") -> None:
        self._calls.pop(name, None)
        if not task.cancelled():
            task.exception()  # a box that was lost is told by the script's own end

    async def _call(self, name: str) -> None:
        async with self._gate:
            try:
                result = await self._ran(name)
            except (OSError, ValueError) as error:
                text = f"run: it cannot be run: {describe(error)}\n".encode()
                result = ExecResult(status="exited", exit_code=CANNOT, stderr=text)
            if result.status == "lost":
                raise SandboxError(f"sandbox {self._box.id} was lost under a program")
            said = result.stderr
            if result.stdout_dropped or result.stderr_dropped:
                said += f"run: {result.stdout_dropped + result.stderr_dropped} bytes of output left out\n".encode()
            elif result.detail:
                said += f"run: {result.detail}\n".encode("utf-8", "replace")
            if said:
                await self._answer(name, "stderr", "", said)
            await self._answer(name, "stdout", str(_code(result)), result.stdout)

    async def _ran(self, name: str) -> ExecResult:
        folder = f"{HOME}/calls/{name}"
        parts = (await self._box.read(f"{folder}/argv", limit=MOST_INPUT)).split(b"\0")[:-1]
        stdin = await self._box.read(f"{folder}/stdin", limit=MOST_INPUT)
        limit, cwd, *argv = (part.decode("utf-8", "surrogateescape") for part in parts)
        wall = min(float(limit), self._wall) if limit else self._wall
        if not wall > 0:
            raise ValueError(f"{limit!r:.40} is no number of seconds")
        command = Command(
            argv=tuple(argv), stdin=stdin, cwd=cwd, user=self._program, wall=wall, output=MOST_OUTPUT
        )
        return await bounded_exec(self._box, command)

    async def _answer(self, name: str, what: str, code: str, data: bytes) -> None:
        # By the grader's own user: what the owner of the sandbox writes belongs to the sandbox's user.
        command = Command(
            argv=("sh", "-c", _ANSWER, "sh", name, what, code),
            stdin=data,
            user=self._grader,
            cwd="/",
            wall=30.0,
        )
        result = await bounded_exec(self._box, command)
        if result.status in ("process_limit", "memory_limit") and isinstance(self._box, Stopping):
            # The program ended and left processes that take all there is: the script would wait out its limit.
            await self._box.kill_all(user=self._program or "")
            await bounded_exec(self._box, command)


def _code(result: ExecResult) -> int:
    if result.status == "time_limit":
        return LATE
    if result.exit_code is not None:
        return result.exit_code
    return 128 + result.signal if result.signal else CANNOT
