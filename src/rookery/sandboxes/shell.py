"""A persistent bash in a sandbox. Runs in the process that owns the sandbox.

The bash itself runs in the sandbox, under its guard (the process that starts and kills the sandbox's commands).

Guarantees:
- working directory, variables, functions and background jobs persist from one script to the next;
- a script that exceeds its timeout is killed with everything it started, while the shell, its state and the
  background jobs of earlier scripts stay; only a shell that does not respond is replaced;
- if a script ends the shell (`exit`, `exec`, a signal), the next script gets a new one, and the result says that
  the state is lost;
- bash reports the end of a script on a separate file descriptor with a random token for each script, so that no
  output of a program can be mistaken for that report.

The bash is interactive, because only an interactive bash can abort a script and keep its state. It has a trap for
a real-time signal that raises SIGINT, which returns bash to its prompt; the guard sends the signal after it has
killed the script's processes. As a side effect bash announces background jobs (`[1] 4711`) on stderr.
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
from rookery.sandbox_runtime import guard_protocol, processes
from rookery.sandboxes.capture import Capture, PipeReader, PipeWriter, wait_for_first
from rookery.sandboxes.channel import CommandReport
from rookery.sandboxes.jobs import OUTPUT_KILL_FACTOR, Job

ARGV = ("bash", "--noprofile", "--norc", "--noediting", "-i")
STATUS_FD = 3
START_SECONDS = 20.0
RESPONSE_SECONDS = 10.0
MAX_STATUS_BYTES = 4096
INIT = (
    "PS1= PS2= PROMPT_COMMAND=; set +H; unset HISTFILE MAILCHECK; shopt -s expand_aliases; "
    f"trap 'trap - INT; kill -INT $BASHPID' RTMAX-{signal.SIGRTMAX - guard_protocol.INTERRUPT_SIGNAL}\n"
)
STATE_LOST = "the shell was replaced: its working directory, variables and functions are lost"


EXHAUSTION_STATUSES = ("memory_limit", "process_limit", "disk_limit")
"""Statuses that say that programs used up a limit of the sandbox, which can keep bash from starting."""


class BashNotStarted(Exception):  # noqa: N818
    """No bash can start, because the sandbox's programs have used up one of its limits. `result` says which."""

    def __init__(self, result: ExecResult) -> None:
        super().__init__(result.detail)
        self.result = result


class ShellHost(Protocol):
    """The operations of a sandbox that its shells use."""

    async def make_job(self) -> Job:
        """Return a job that will run a new bash. Raise `SandboxError` if the sandbox is closed or lost."""
        ...

    async def interrupt(self, job: Job, mark: str, ticks: int) -> None: ...

    def forget(self, shell: "GuardedShell") -> None: ...


class BashProcess:
    """One bash process of a shell, and its pipes. A shell replaces it when it has ended."""

    def __init__(self, job: Job, output_limit: int) -> None:
        self.job = job
        job.max_output = 0  # counted for each script by `_on_output`
        self._output_limit = output_limit
        self._loop = asyncio.get_running_loop()
        self._status = bytearray()
        self._changed = asyncio.Event()
        self._scripts = 0
        job.on_output = self._on_output
        self.over_output_limit = False
        job.on_end = self._changed.set
        self._stdin: PipeWriter | None = None
        self._status_reader: PipeReader | None = None

    def _on_output(self, _stream: str, _data: bytes) -> None:
        if any(
            c.total > OUTPUT_KILL_FACTOR * max(self._output_limit, 1 << 16) for c in self.job.captures.values()
        ):
            self.over_output_limit = True
            self._changed.set()

    def _on_status(self, data: bytes) -> None:
        self._status += data
        del self._status[:-MAX_STATUS_BYTES]
        self._changed.set()

    async def open(self) -> None:
        """Start bash and wait until it responds. Raise `SandboxError` or `BashNotStarted` if it does not."""
        child_stdin, our_stdin = os.pipe2(os.O_CLOEXEC)
        self._stdin = PipeWriter(self._loop, our_stdin)
        our_status, child_status = os.pipe2(os.O_CLOEXEC)
        self._status_reader = PipeReader(self._loop, our_status, self._on_status)
        try:
            await self.job.begin(child_stdin, (child_status,))
        finally:
            os.close(child_stdin)
            os.close(child_status)
        token = secrets.token_hex(16)
        with contextlib.suppress(BrokenPipeError):
            await self._stdin.write(f"{INIT}{_report_command(token)}".encode())
        if await self.wait_for_token(token, START_SECONDS) is None:
            if self.job.ended.done():
                result = await self.job.explain_loss(self.job.collect(self.job.ended.result()))
                if result.status in EXHAUSTION_STATUSES:
                    raise BashNotStarted(result)
            raise SandboxError(f"bash did not start: {self.job.captures['stderr'].result()[0][:500]!r}")
        self.reset_output()

    def reset_output(self) -> None:
        """Start to collect the output of the next script, which includes what background jobs write before it."""
        self.job.captures["stdout"] = Capture(self._output_limit)
        self.job.captures["stderr"] = Capture(self._output_limit)
        self.over_output_limit = False

    def next_mark(self) -> str:
        self._scripts += 1
        return f"{self.job.number}.{self._scripts}"

    async def send(self, script: str, mark: str, token: str) -> None:
        assert self._stdin is not None
        line = (
            f"export {processes.COMMAND_VARIABLE}={mark}; eval {shlex.quote(script)} </dev/null {STATUS_FD}>&-\n"
        )
        with contextlib.suppress(BrokenPipeError):  # bash is dead, which `wait_for_token` notices
            await self._stdin.write((line + _report_command(token)).encode("utf-8", "surrogateescape"))

    async def wait_for_token(
        self, token: str, timeout: float, outside: Callable[[], float] | None = None
    ) -> int | None:
        """Wait until bash reports the end of the script with this token; return the script's exit code.

        None if bash ended, the output limit was exceeded, or `timeout` passed. `outside` returns seconds that do
        not count towards the timeout.
        """
        wanted = token.encode() + b" "
        end = time.monotonic() + timeout
        while True:
            for line in self._status.split(b"\n")[:-1]:
                if line.startswith(wanted) and line[len(wanted) :].isdigit():
                    self._status.clear()
                    return int(line[len(wanted) :])
            left = end - time.monotonic() + (outside() if outside is not None else 0.0)
            if self.job.ended.done() or self.over_output_limit or left <= 0:
                return None
            self._changed.clear()
            await wait_for_first(self._changed.wait(), self.job.ended, timeout=left)

    async def responds(self, timeout: float) -> bool:
        """Return whether bash responds within `timeout` seconds after a script was interrupted."""
        assert self._stdin is not None
        token = secrets.token_hex(16)
        over_output_limit, self.over_output_limit = self.over_output_limit, False
        try:
            async with asyncio.timeout(timeout):
                # Sent twice, because bash drops the line that it is reading when the signal arrives.
                await self._stdin.write(f"\n{_report_command(token)}\n{_report_command(token)}".encode())
                return await self.wait_for_token(token, timeout) is not None
        except (TimeoutError, BrokenPipeError):
            return False
        finally:
            self.over_output_limit = over_output_limit

    def release(self, *, leave_running: bool = False) -> None:
        self.job.release(leave_running=leave_running)
        if self._stdin is not None:
            self._stdin.close()
        if self._status_reader is not None:
            self._status_reader.close()


class GuardedShell:
    """A persistent bash session that runs one script at a time; further scripts wait for their turn."""

    def __init__(self, host: ShellHost, output_limit: int) -> None:
        self._host = host
        self._output_limit = output_limit
        self._bash: BashProcess | None = None
        self._lock = asyncio.Lock()
        self._closed = False
        self._cancelled = False
        self._was_replaced = False

    async def run(self, script: str, *, timeout: float, outside: Callable[[], float] | None = None) -> ExecResult:
        async with self._lock:
            if self._closed:
                raise SandboxError("the shell is closed: open another one with Sandbox.shell()")
            try:
                script.encode("utf-8", "surrogateescape")
            except UnicodeEncodeError:
                return ExecResult(status="exited", exit_code=126, detail="the script is not valid Unicode text")
            if "\0" in script:
                return ExecResult(status="exited", exit_code=126, detail="the script contains a NUL byte")
            try:
                bash = await self._ensure_bash()
            except BashNotStarted as error:
                return error.result
            if self._cancelled:
                self._cancelled = False
                bash.reset_output()
            mark, token, ticks, began = (
                bash.next_mark(),
                secrets.token_hex(16),
                processes.now_ticks(),
                time.monotonic(),
            )
            finished = False
            try:
                async with asyncio.timeout(timeout):
                    await bash.send(script, mark, token)
                code = await bash.wait_for_token(token, max(0.0, began + timeout - time.monotonic()), outside)
                finished = code is not None
            except asyncio.CancelledError:
                self._cancelled = True
                raise
            except TimeoutError:
                code = None  # bash does not read the script: it is busy or stopped
            finally:
                if not finished and not bash.job.ended.done():
                    # Also on cancellation: what the script started dies, and the shell stays if possible.
                    await self._abort_script(bash, mark, ticks)
            return await bash.job.explain_loss(self._result(bash, code, timeout, time.monotonic() - began))

    async def _ensure_bash(self) -> BashProcess:
        if self._bash is None or self._bash.job.ended.done():
            self._was_replaced = self._bash is not None
            self._discard()
            bash = BashProcess(await self._host.make_job(), self._output_limit)
            try:
                await bash.open()
            except BaseException:
                await bash.job.abort()
                bash.release()
                raise
            self._bash = bash
        return self._bash

    async def _abort_script(self, bash: BashProcess, mark: str, ticks: int) -> None:
        try:
            await self._host.interrupt(bash.job, mark, ticks)
            back = await bash.responds(RESPONSE_SECONDS)
        except BaseException:
            bash.job.kill_soon()
            raise
        if not back:
            await bash.job.abort()

    def _result(self, bash: BashProcess, code: int | None, timeout: float, wall: float) -> ExecResult:
        ended = bash.job.ended.done()
        report = bash.job.ended.result() if ended else None
        for reader in bash.job.readers.values():
            reader.drain()
        stdout, stdout_dropped = bash.job.captures["stdout"].result()
        stderr, stderr_dropped = bash.job.captures["stderr"].result()
        result = _classify_end(code, ended, report, bash.over_output_limit, timeout, wall)
        if code is None and bash.job.over_disk_limit:
            detail = "killed: the sandbox exceeded its disk limit"
            result = ExecResult(status="disk_limit", usage=result.usage, detail=detail)
        state_lost = ended or self._was_replaced
        notes = [result.detail, STATE_LOST if state_lost else ""]
        self._was_replaced = False
        if ended:
            self._discard(leave_running=report is not None and report.reason == guard_protocol.EXITED)
        else:
            bash.reset_output()
        return msgspec.structs.replace(
            result,
            detail="; ".join(filter(None, notes)),
            state_lost=state_lost,
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
        """Close the shell and kill all processes that were started in it."""
        self._closed = True
        bash, self._bash = self._bash, None
        self._host.forget(self)
        if bash is not None:
            try:
                if not bash.job.ended.done():
                    await bash.job.abort()
            finally:
                bash.release()

    def detach(self) -> None:
        """Close the pipes, without a wait for bash. Called when the sandbox closes."""
        self._closed = True
        self._discard()


def _report_command(token: str) -> str:
    return f"builtin printf '%s %s\\n' {token} $? >&{STATUS_FD}\n"


def _classify_end(
    code: int | None,
    ended: bool,
    report: CommandReport | None,
    over_output_limit: bool,
    timeout: float,
    wall: float,
) -> ExecResult:
    usage = ExecUsage(wall=wall) if report is None else ExecUsage(wall, report.cpu, report.peak)
    if ended and report is None:
        return ExecResult(status="lost", detail="the sandbox's guard died while the script ran", usage=usage)
    if code is not None:
        return ExecResult(status="exited", exit_code=code, usage=usage)
    if over_output_limit:
        return ExecResult(
            status="output_limit", usage=usage, detail="killed: the script exceeded the output limit"
        )
    if report is not None and report.reason == guard_protocol.PROCESS_LIMIT:
        return ExecResult(
            status="process_limit", usage=usage, detail="killed: the sandbox exceeded its process limit"
        )
    if report is not None and report.reason == guard_protocol.EXITED:
        left = os.waitstatus_to_exitcode(report.status)
        detail = "the script ended the shell"
        if left < 0:
            return ExecResult(status="signaled", signal=-left, usage=usage, detail=detail)
        return ExecResult(status="exited", exit_code=left, usage=usage, detail=detail)
    return ExecResult(status="time_limit", usage=usage, detail=f"killed after {timeout:g} s")
