"""A persistent bash under a guard.

Promises:
- folder, variables, functions and background jobs stay from one script to the next;
- a script that runs out of time is killed and dropped, with everything it started, while the shell, its
  state and earlier scripts' background jobs stay; only a shell that does not come back is replaced;
- a shell that ended (`exit`, `exec`, a signal) is replaced at once, and the result says what was lost;
- where a script ends is said over a channel of its own, in a word drawn anew for each script: nothing a
  program prints can be mistaken for it.

Why an interactive bash: only that one can drop a script half way and keep its state. A signal of ours has
a trap in it that raises SIGINT, which throws bash back to its prompt; the guard sends it after it killed the
script's processes. Interactive also means that bash announces background jobs (`[1] 4711`) on stderr.
"""

import asyncio
import contextlib
import os
import secrets
import shlex
import signal
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from rookery.core import ExecResult, ExecUsage, SandboxError
from rookery.sandboxes import procs, trees
from rookery.sandboxes.capture import Capture, Feeder, Pump, first_of
from rookery.sandboxes.channel import Report
from rookery.sandboxes.jobs import HARD_OUTPUT, Job

ARGV = ("bash", "--noprofile", "--norc", "--noediting", "-i")
WORD_FD = 3
START_SECONDS = 20.0
COME_BACK_SECONDS = 3.0
MAX_WORD = 4096
INIT = (
    "PS1= PS2= PROMPT_COMMAND=; set +H; unset HISTFILE MAILCHECK; shopt -s expand_aliases; "
    f"trap 'trap - INT; kill -INT $BASHPID' RTMAX-{signal.SIGRTMAX - trees.INTERRUPT_SIGNAL}\n"
)
RESET = "the shell was replaced: its folder, variables and functions are gone"


EXHAUSTING = ("memory_limit", "process_limit", "disk_limit")
"""Limits that a program can use up so that no bash can start."""


class NotStarted(Exception):  # noqa: N818
    """No bash could start, because the sandbox's programs use up one of its limits."""

    def __init__(self, result: ExecResult) -> None:
        super().__init__(result.detail)
        self.result = result


class Opening(Protocol):
    """What a shell needs from its sandbox."""

    async def job(self) -> Job:
        """Return the job of a fresh bash; `SandboxError` if the sandbox is gone."""
        ...

    async def interrupt(self, job: Job, mark: str, ticks: int) -> None: ...

    def forget(self, shell: "GuardedShell") -> None: ...


class Bash:
    """One bash process and its pipes."""

    def __init__(self, job: Job, output: int) -> None:
        self.job = job
        job.ceiling = 0  # counted for each script, below
        self._output = output
        self._loop = asyncio.get_running_loop()
        self._word = bytearray()
        self._news = asyncio.Event()
        self._scripts = 0
        job.on_output = self._flooding
        self.flooded = False
        job.on_end = self._news.set
        self._feeder: Feeder | None = None
        self._words: Pump | None = None

    def _flooding(self, _stream: str, _data: bytes) -> None:
        if any(c.total > HARD_OUTPUT * max(self._output, 1 << 16) for c in self.job.captures.values()):
            self.flooded = True
            self._news.set()

    def _hear(self, data: bytes) -> None:
        self._word += data
        del self._word[:-MAX_WORD]
        self._news.set()

    async def open(self) -> None:
        """Starts bash and waits until it listens."""
        theirs_in, ours_in = os.pipe2(os.O_CLOEXEC)
        self._feeder = Feeder(self._loop, ours_in)
        ours_word, theirs_word = os.pipe2(os.O_CLOEXEC)
        self._words = Pump(self._loop, ours_word, self._hear)
        try:
            await self.job.begin(theirs_in, (theirs_word,))
        finally:
            os.close(theirs_in)
            os.close(theirs_word)
        token = secrets.token_hex(16)
        with contextlib.suppress(BrokenPipeError):
            await self._feeder.write(f"{INIT}{_say(token)}".encode())
        if await self.until(token, START_SECONDS) is None:
            if self.job.promise.done():
                result = await self.job.explained(self.job.collect(self.job.promise.result()))
                if result.status in EXHAUSTING:
                    raise NotStarted(result)
            raise SandboxError(f"bash did not start: {self.job.captures['stderr'].result()[0][:500]!r}")
        self.fresh()

    def fresh(self) -> None:
        """Counts output anew. What background jobs write between scripts belongs to the next."""
        self.job.captures["stdout"] = Capture(self._output)
        self.job.captures["stderr"] = Capture(self._output)
        self.flooded = False

    def next(self) -> str:
        self._scripts += 1
        return f"{self.job.number}.{self._scripts}"

    async def send(self, script: str, mark: str, token: str) -> None:
        assert self._feeder is not None
        line = f"export {procs.COMMAND}={mark}; eval {shlex.quote(script)} </dev/null {WORD_FD}>&-\n"
        with contextlib.suppress(BrokenPipeError):  # it is dead, which is seen by whoever waits for its word
            await self._feeder.write((line + _say(token)).encode("utf-8", "surrogateescape"))

    async def until(self, token: str, timeout: float, outside: Callable[[], float] | None = None) -> int | None:
        """The exit code said with this word; None when bash ended, was flooded, or the time was over."""
        wanted = token.encode() + b" "
        end = time.monotonic() + timeout
        while True:
            for line in self._word.split(b"\n")[:-1]:
                if line.startswith(wanted) and line[len(wanted) :].isdigit():
                    self._word.clear()
                    return int(line[len(wanted) :])
            left = end - time.monotonic() + (outside() if outside is not None else 0.0)
            if self.job.promise.done() or self.flooded or left <= 0:
                return None
            self._news.clear()
            await first_of(self._news.wait(), self.job.promise, timeout=left)

    async def comes_back(self, timeout: float) -> bool:
        """Whether bash answers after an interruption."""
        assert self._feeder is not None
        token = secrets.token_hex(16)
        flooded, self.flooded = self.flooded, False
        try:
            async with asyncio.timeout(timeout):
                # Twice: bash drops the line it is reading when the signal reaches it.
                await self._feeder.write(f"\n{_say(token)}\n{_say(token)}".encode())
                return await self.until(token, timeout) is not None
        except (TimeoutError, BrokenPipeError):
            return False
        finally:
            self.flooded = flooded

    def release(self, *, leave_running: bool = False) -> None:
        self.job.release(leave_running=leave_running)
        if self._feeder is not None:
            self._feeder.close()
        if self._words is not None:
            self._words.close()


class GuardedShell:
    """One script at a time; a second waits for the first."""

    def __init__(self, opening: Opening, output: int) -> None:
        self._opening = opening
        self._output = output
        self._bash: Bash | None = None
        self._lock = asyncio.Lock()
        self._closed = False
        self._cancelled = False
        self._replaced = False

    async def run(self, script: str, *, timeout: float, outside: Callable[[], float] | None = None) -> ExecResult:
        async with self._lock:
            if self._closed:
                raise SandboxError("the shell is closed")
            try:
                script.encode("utf-8", "surrogateescape")
            except UnicodeEncodeError:
                return ExecResult(status="exited", exit_code=126, detail="the script is no valid text")
            if "\0" in script:
                return ExecResult(status="exited", exit_code=126, detail="the script contains a NUL")
            try:
                bash = await self._open()
            except NotStarted as error:
                return error.result
            if self._cancelled:
                self._cancelled = False
                bash.fresh()
            mark, token, ticks, began = bash.next(), secrets.token_hex(16), procs.now_ticks(), time.monotonic()
            finished = False
            try:
                async with asyncio.timeout(timeout):
                    await bash.send(script, mark, token)
                code = await bash.until(token, max(0.0, began + timeout - time.monotonic()), outside)
                finished = code is not None
            except asyncio.CancelledError:
                self._cancelled = True
                raise
            except TimeoutError:
                code = None  # bash does not even read the script: it is busy or stopped
            finally:
                if not finished and not bash.job.promise.done():
                    # Also on cancellation: what the script started dies, the shell stays if it can.
                    await self._drop(bash, mark, ticks)
            return await bash.job.explained(self._result(bash, code, timeout, time.monotonic() - began))

    async def _open(self) -> Bash:
        if self._bash is None or self._bash.job.promise.done():
            self._replaced = self._bash is not None
            self._discard()
            bash = Bash(await self._opening.job(), self._output)
            try:
                await bash.open()
            except BaseException:
                await bash.job.abort()
                bash.release()
                raise
            self._bash = bash
        return self._bash

    async def _drop(self, bash: Bash, mark: str, ticks: int) -> None:
        try:
            await self._opening.interrupt(bash.job, mark, ticks)
            back = await bash.comes_back(COME_BACK_SECONDS)
        except BaseException:
            bash.job.kill_soon()
            raise
        if not back:
            await bash.job.abort()

    def _result(self, bash: Bash, code: int | None, timeout: float, wall: float) -> ExecResult:
        ended = bash.job.promise.done()
        report = bash.job.promise.result() if ended else None
        for pump in bash.job.pumps.values():
            pump.drain()
        stdout, stdout_dropped = bash.job.captures["stdout"].result()
        stderr, stderr_dropped = bash.job.captures["stderr"].result()
        result = _ending(code, ended, report, bash.flooded, timeout, wall)
        if code is None and bash.job.overdrawn:
            said = "killed: the sandbox wrote more than it may"
            result = ExecResult(status="disk_limit", usage=result.usage, detail=said)
        notes = [result.detail, RESET if ended or self._replaced else ""]
        self._replaced = False
        if ended:
            self._discard(leave_running=report is not None and report.reason == trees.NATURAL)
        else:
            bash.fresh()
        return msgspec.structs.replace(
            result,
            detail="; ".join(filter(None, notes)),
            stdout=stdout,
            stderr=stderr,
            stdout_dropped=stdout_dropped,
            stderr_dropped=stderr_dropped,
        )

    def _discard(self, *, leave_running: bool = False) -> None:
        if self._bash is not None:
            self._bash.release(leave_running=leave_running)
            self._bash = None

    async def close(self) -> None:
        """Ends the shell and what runs in it."""
        self._closed = True
        bash, self._bash = self._bash, None
        self._opening.forget(self)
        if bash is not None:
            try:
                if not bash.job.promise.done():
                    await bash.job.abort()
            finally:
                bash.release()

    def drop(self) -> None:
        """Closes our ends, when the sandbox closes."""
        self._closed = True
        self._discard()


def _say(token: str) -> str:
    return f"builtin printf '%s %s\\n' {token} $? >&{WORD_FD}\n"


def _ending(
    code: int | None, ended: bool, report: Report | None, flooded: bool, timeout: float, wall: float
) -> ExecResult:
    usage = ExecUsage(wall=wall) if report is None else ExecUsage(wall, report.cpu, report.peak)
    if ended and report is None:
        return ExecResult(status="lost", detail="the sandbox's guard died while the script ran", usage=usage)
    if code is not None:
        return ExecResult(status="exited", exit_code=code, usage=usage)
    if flooded:
        return ExecResult(status="output_limit", usage=usage, detail="killed: the script wrote far too much")
    if report is not None and report.reason == trees.PROCESSES:
        return ExecResult(status="process_limit", usage=usage, detail="killed: too many processes")
    if report is not None and report.reason == trees.NATURAL:
        left = os.waitstatus_to_exitcode(report.status)
        said = "the script ended the shell"
        if left < 0:
            return ExecResult(status="signaled", signal=-left, usage=usage, detail=said)
        return ExecResult(status="exited", exit_code=left, usage=usage, detail=said)
    return ExecResult(status="time_limit", usage=usage, detail=f"killed after {timeout:g} s")
