"""One command under a guard: its pipes, its output, how it ended.

Promises:
- a result is made of what was written up to the end of the command's first process; whoever it left
  running with the pipe in hand delays nothing, and goes on writing to nobody;
- whatever ends the waiting (deadline, cancellation, a callback that raises), the command's tree is dead
  and its descriptors are closed.

What the result can tell: `memory_limit` is a guess, made when a program that used at least 85% of its
limit came to a bad end; an allocation refused far below the limit looks like any other failure. Peak
memory is never below the guard's own few megabytes, which the kernel counts until the program starts.
Where control groups count, `memory_limit` and `process_limit` are no guess: a bad end, and the kernel refused or
ended something in this sandbox meanwhile. That may have been another command: the limits are the sandbox's.
"""

import asyncio
import errno
import os
import signal
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from rookery.core import ExecResult, ExecStatus, ExecUsage, SandboxError, boundary
from rookery.sandboxes import trees
from rookery.sandboxes.capture import Capture, Pump
from rookery.sandboxes.channel import Channel, Report
from rookery.sandboxes.local import groups
from rookery.sandboxes.protocol import OnOutput, Stream

HARD_OUTPUT = 64
"""A program that writes this many times what is kept of it is killed: it will not stop by itself."""
GRACE = 15.0
"""Seconds past its deadline after which a guard that has not answered counts as lost."""
EXHAUSTED = "the sandbox ran out of memory, and the kernel ended it: its processes are gone"
FULL = 64 << 10
"""Bytes that are free in a file system that counts as full."""
PROGRAM_ERRORS = frozenset(
    {errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.E2BIG}
    | {errno.ENAMETOOLONG, errno.EPERM, errno.ETXTBSY, errno.EINVAL, errno.ELIBBAD}
)


class Plan:
    """Everything about a command, resolved."""

    __slots__ = ("argc", "cpu", "memory", "output", "parts", "user", "wall", "warm")

    def __init__(
        self,
        parts: Sequence[bytes],
        argc: int,
        *,
        wall: float,
        cpu: float,
        memory: int,
        output: int,
        user: tuple[int, int] = (-1, -1),
        warm: bool = False,
    ) -> None:
        self.parts = parts
        self.argc = argc
        self.wall = wall
        self.cpu = cpu
        self.memory = memory
        self.output = output
        self.user = user
        """Id and group; -1 for the sandbox's own."""
        self.warm = warm


class OomWatch:
    """Tells whether the kernel's OOM killer ended a sandbox's guard.

    The guard counts as killed for want of memory if it died and the control group's count of OOM kills rose since
    the guard last proved to be alive.
    """

    def __init__(self, group: str) -> None:
        self.group = group
        """The directory of the control group that limits the sandbox's memory; empty where none does."""
        self._when_alive: int | None = None

    def count(self) -> int:
        """Return the number of OOM kills so far."""
        found = groups.oom_kills(self.group) if self.group else 0
        if self._when_alive is None:  # nothing has run in the sandbox yet
            self._when_alive = found
        return found

    def was_alive(self, count: int) -> None:
        """Note that the guard answered after `count` was read."""
        self._when_alive = max(count, self._when_alive or 0)

    def rose(self) -> bool:
        return self._when_alive is not None and self.count() > self._when_alive


class Job:
    """A command that was started."""

    def __init__(self, channel: Channel, plan: Plan, number: int) -> None:
        self._channel = channel
        self._plan = plan
        self._loop = asyncio.get_running_loop()
        self.number = number
        self.captures: dict[Stream, Capture] = {"stdout": Capture(plan.output), "stderr": Capture(plan.output)}
        self.pumps: dict[Stream, Pump] = {}
        self.on_output: OnOutput | None = None
        self.on_end: Callable[[], None] | None = None
        self.error: BaseException | None = None
        self.flooded = False
        self.ceiling = HARD_OUTPUT * max(plan.output, 1 << 16)
        self.oom: OomWatch | None = None
        self.group = ""
        """The directory of the control group that limits the sandbox's memory, where one does."""
        self.exhausted: Callable[[], Awaitable[bool]] | None = None
        """Asked after the guard's death: whether the sandbox's own programs caused it by using up its memory."""
        self.top: Callable[[], int] | None = None
        """Tells a descriptor of the file system whose space is limited, where it is; -1 once that is gone."""
        self.overdrawn = False
        """Killed since the sandbox wrote more than it may, where that is seen from outside."""
        self._oom = self._refused = 0
        self._killers: set[asyncio.Task[None]] = set()
        self.promise: asyncio.Future[Report | None] = self._loop.create_future()

    async def begin(self, stdin: int, extra: Sequence[int] = ()) -> None:
        """Starts it; `stdin` and `extra` (the program's descriptors from 3 on) stay the caller's."""
        ends = []
        try:
            with boundary(SandboxError, "a command could not be started", OSError):
                for stream in ("stdout", "stderr"):
                    ours, theirs = os.pipe2(os.O_CLOEXEC)
                    ends.append(theirs)
                    self.pumps[stream] = Pump(self._loop, ours, self._sink(stream))
            plan = self._plan
            if self.group and self.oom is not None:
                self._oom = self.oom.count()
                self._refused = groups.forks_refused(groups.pids_folder(self.group))
            fds = (stdin, *ends, *extra)
            self.promise = await self._channel.start(
                self.number,
                plan.parts,
                plan.argc,
                fds,
                plan.wall,
                plan.cpu,
                plan.memory,
                plan.user,
                warm=plan.warm,
            )
        except BaseException:
            self.release()
            raise
        finally:
            for fd in ends:
                os.close(fd)

    def _sink(self, stream: Stream) -> Callable[[bytes], None]:
        def take(data: bytes) -> None:
            if not data:
                if self.on_end is not None:
                    self.on_end()
                return
            capture = self.captures[stream]
            capture.add(data)
            if self.on_output is not None and self.error is None:
                try:
                    self.on_output(stream, data)
                except Exception as error:  # noqa: BLE001  (raised again by whoever waits for the command)
                    self.error = error
                    self.kill_soon()
            if self.ceiling and capture.total > self.ceiling and not self.flooded:
                self.flooded = True
                self.kill_soon()

        return take

    def kill_soon(self) -> None:
        task = self._loop.create_task(self._channel.kill(self.number))
        self._killers.add(task)
        task.add_done_callback(self._killers.discard)

    async def report(self) -> Report | None:
        """Waits for the end. A guard that does not keep the deadline is ended itself."""
        if self._plan.wall > 0:
            done, _ = await asyncio.wait({self.promise}, timeout=self._plan.wall + GRACE)
            if not done:
                self._channel.kill_guard()
        return await asyncio.shield(self.promise)

    async def abort(self) -> None:
        """Kills the command and sees it dead, for a bounded time: the guard goes on if it takes longer."""
        await self._channel.kill(self.number)
        await asyncio.wait({self.promise}, timeout=GRACE)

    def collect(self, report: Report | None) -> ExecResult:
        """The result, from what the pipes hold at this moment."""
        for pump in self.pumps.values():
            pump.drain()
        if self.error is not None:
            raise self.error
        return self.result(report)

    def result(self, report: Report | None) -> ExecResult:
        stdout, stdout_dropped = self.captures["stdout"].result()
        stderr, stderr_dropped = self.captures["stderr"].result()
        status, code, number, detail = self._ending(report)
        usage = ExecUsage(report.wall, report.cpu, report.peak) if report else ExecUsage()
        return ExecResult(
            status=status,
            exit_code=code,
            signal=number,
            stdout=stdout,
            stderr=stderr,
            stdout_dropped=stdout_dropped,
            stderr_dropped=stderr_dropped,
            usage=usage,
            detail=detail,
        )

    def _ending(self, report: Report | None) -> tuple[ExecStatus, int | None, int | None, str]:
        if report is None:
            return "lost", None, None, "the sandbox's guard died while the command ran"
        if self.oom is not None:
            self.oom.was_alive(self._oom)
        if report.reason in (trees.NOT_STARTED, trees.NO_FOLDER):
            folder, program = (part.decode(errors="backslashreplace") for part in self._plan.parts[:2])
            if report.reason == trees.NO_FOLDER:
                text = f"the working folder {folder!r:.300} could not be used: {os.strerror(report.status)}"
            else:
                text = f"the program {program!r:.300} could not be started: {os.strerror(report.status)}"
            if self.group and report.status == errno.EAGAIN:
                return (
                    "process_limit",
                    None,
                    None,
                    "no process was left to start it with: the sandbox has all it may",
                )
            if self.group and report.status == errno.ENOMEM:
                return (
                    "memory_limit",
                    None,
                    None,
                    "no memory was left to start it with: the sandbox uses all it may",
                )
            if report.status not in PROGRAM_ERRORS:
                raise SandboxError(f"the sandbox could not start a process: {os.strerror(report.status)}")
            return "exited", 127 if report.status == errno.ENOENT else 126, None, text
        code = os.waitstatus_to_exitcode(report.status)
        ended = (code, None) if code >= 0 else (None, -code)
        left = f"; {report.survivors} processes would not die" if report.survivors else ""
        plan = self._plan
        if report.reason == trees.TIME:
            return "time_limit", *ended, f"killed after {plan.wall:g} s{left}"
        if report.reason == trees.PROCESSES:
            return "process_limit", *ended, f"killed: too many processes{left}"
        if self.overdrawn:
            return "disk_limit", *ended, f"killed: the sandbox wrote more than it may{left}"
        if self.flooded:
            return "output_limit", *ended, f"killed after writing {self.ceiling} bytes{left}"
        if plan.cpu and (-code == signal.SIGXCPU or (-code == signal.SIGKILL and report.cpu >= plan.cpu)):
            return "time_limit", *ended, f"used {plan.cpu:g} s of processor time"
        if -code == signal.SIGXFSZ:
            return "disk_limit", *ended, "a file grew over the limit"
        if code and self.group and groups.oom_kills(self.group) > self._oom:
            return (
                "memory_limit",
                *ended,
                "the sandbox ran out of memory, and the kernel ended what used most of it",
            )
        if code and self.group and groups.forks_refused(groups.pids_folder(self.group)) > self._refused:
            return (
                "process_limit",
                *ended,
                "the sandbox had as many processes as it may have, and was refused more",
            )
        if code and self.top is not None and _full(self.top()):
            return "disk_limit", *ended, "no space is left in the sandbox"
        if report.reason == trees.NATURAL and code and plan.memory and report.peak >= 0.85 * plan.memory:
            return "memory_limit", *ended, f"it used {report.peak} bytes, of {plan.memory} allowed, when it ended"
        return (
            ("exited" if code >= 0 else "signaled"),
            *ended,
            f"killed{left}" if report.reason == trees.ASKED else "",
        )

    async def explained(self, result: ExecResult) -> ExecResult:
        """Replace `lost` with `memory_limit` if the sandbox's programs used up the memory that its guard needs."""
        if result.status == "lost" and self.exhausted is not None and await self.exhausted():
            return msgspec.structs.replace(result, status="memory_limit", detail=EXHAUSTED)
        return result

    def release(self, *, leave_running: bool = False) -> None:
        """Closes the pipes; what still writes to them may go on, into nothing, with `leave_running`."""
        for pump in self.pumps.values():
            fd = pump.detach()
            if fd >= 0 and leave_running:
                self._channel.discard(fd)
            elif fd >= 0:
                os.close(fd)


def _full(top: int) -> bool:
    if top < 0:
        return False
    space = os.fstatvfs(top)
    return space.f_bavail * space.f_frsize < FULL or (space.f_files > 0 and space.f_favail == 0)


async def run_to_end(job: Job, stdin: int, on_output: OnOutput | None) -> ExecResult:
    """Starts a job, waits for it, and leaves nothing of it on any path."""
    job.on_output = on_output
    await job.begin(stdin)
    finished = False
    try:
        report = await job.report()
        finished = report is not None and report.reason == trees.NATURAL
        return await job.explained(job.collect(report))
    except asyncio.CancelledError:
        await job.abort()
        raise
    finally:
        job.release(leave_running=finished)
