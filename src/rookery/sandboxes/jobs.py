"""One command under a guard: its pipes, its output and how it ended. Runs in the owner's process.

Guarantees:
- a result contains what was written until the command's first process ended; a child that still holds the pipe
  delays nothing, and its later output is discarded;
- whatever ends the wait (deadline, cancellation, an exception in a callback), the process tree is dead and the
  descriptors are closed.

Without cgroups, `memory_limit` is a guess: a program that used at least 85% of its limit and failed. Peak memory
is at least the few megabytes of the guard, which the kernel counts until the program is executed. With cgroups,
`memory_limit` and `process_limit` mean that the command failed and the kernel refused or killed something in this
sandbox meanwhile. That may have been caused by another command, because the limits apply to the whole sandbox.
"""

import asyncio
import errno
import os
import signal
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from rookery.core import ExecResult, ExecStatus, ExecUsage, SandboxError, wrap_errors
from rookery.sandbox_runtime import cgroups, guard_protocol
from rookery.sandboxes.capture import Capture, PipeReader
from rookery.sandboxes.channel import CommandReport, GuardChannel
from rookery.sandboxes.protocol import OnOutput, Stream

OUTPUT_KILL_FACTOR = 64
"""A program that writes this many times the kept output is killed."""
GRACE_SECONDS = 15.0
"""Seconds after its deadline at which a guard that has not answered counts as lost."""
EXHAUSTED = "the sandbox ran out of memory and was killed by the kernel with all its processes"
FULL_DISK_BYTES = 64 << 10
"""A file system with fewer free bytes counts as full."""
PROGRAM_ERRORS = frozenset(
    {errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.E2BIG}
    | {errno.ENAMETOOLONG, errno.EPERM, errno.ETXTBSY, errno.EINVAL, errno.ELIBBAD}
)


class JobPlan:
    """The resolved parameters of a command."""

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
        """User and group ID; -1 for the sandbox's default."""
        self.warm = warm


class OomWatch:
    """Detects whether the kernel's OOM killer ended a sandbox's guard.

    That is assumed if the guard died and the cgroup's count of OOM kills has risen since the guard last answered.
    """

    def __init__(self, cgroup: str) -> None:
        self.cgroup = cgroup
        """Directory of the cgroup that limits the sandbox's memory; empty if there is none."""
        self._when_alive: int | None = None

    def count(self) -> int:
        """Return the number of OOM kills so far."""
        found = cgroups.count_oom_kills(self.cgroup) if self.cgroup else 0
        if self._when_alive is None:  # nothing has run in the sandbox yet
            self._when_alive = found
        return found

    def note_alive(self, count: int) -> None:
        """Record that the guard answered after `count` was read."""
        self._when_alive = max(count, self._when_alive or 0)

    def has_increased(self) -> bool:
        return self._when_alive is not None and self.count() > self._when_alive


class Job:
    """A started command."""

    def __init__(self, channel: GuardChannel, plan: JobPlan, number: int) -> None:
        self._channel = channel
        self._plan = plan
        self._loop = asyncio.get_running_loop()
        self.number = number
        self.captures: dict[Stream, Capture] = {"stdout": Capture(plan.output), "stderr": Capture(plan.output)}
        self.pumps: dict[Stream, PipeReader] = {}
        self.on_output: OnOutput | None = None
        self.on_end: Callable[[], None] | None = None
        self.error: BaseException | None = None
        self.over_output_limit = False
        self.max_output = OUTPUT_KILL_FACTOR * max(plan.output, 1 << 16)
        self.oom: OomWatch | None = None
        self.cgroup = ""
        """Directory of the cgroup that limits the sandbox's memory, if there is one."""
        self.is_exhausted: Callable[[], Awaitable[bool]] | None = None
        """Called after the guard's death: whether the sandbox's own programs caused it by using up its memory."""
        self.get_disk_fd: Callable[[], int] | None = None
        """Returns a descriptor of the file system whose space is limited; -1 when it is closed."""
        self.over_disk_limit = False
        """Whether it was killed because the sandbox exceeded a disk limit that is polled."""
        self._oom_count = self._refused_forks = 0
        self._killers: set[asyncio.Task[None]] = set()
        self.ended: asyncio.Future[CommandReport | None] = self._loop.create_future()

    async def begin(self, stdin: int, extra: Sequence[int] = ()) -> None:
        """Start the command. `stdin` and `extra` (its descriptors from 3 on) stay the caller's."""
        child_ends = []
        try:
            with wrap_errors(SandboxError, "a command could not be started", OSError):
                for stream in ("stdout", "stderr"):
                    our_end, child_end = os.pipe2(os.O_CLOEXEC)
                    child_ends.append(child_end)
                    self.pumps[stream] = PipeReader(self._loop, our_end, self._make_reader_callback(stream))
            plan = self._plan
            if self.cgroup and self.oom is not None:
                self._oom_count = self.oom.count()
                self._refused_forks = cgroups.count_refused_forks(cgroups.find_pids_directory(self.cgroup))
            fds = (stdin, *child_ends, *extra)
            self.ended = await self._channel.start(
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
            for fd in child_ends:
                os.close(fd)

    def _make_reader_callback(self, stream: Stream) -> Callable[[bytes], None]:
        def on_data(data: bytes) -> None:
            if not data:
                if self.on_end is not None:
                    self.on_end()
                return
            capture = self.captures[stream]
            capture.add(data)
            if self.on_output is not None and self.error is None:
                try:
                    self.on_output(stream, data)
                except Exception as error:  # noqa: BLE001  (raised by `collect`)
                    self.error = error
                    self.kill_soon()
            if self.max_output and capture.total > self.max_output and not self.over_output_limit:
                self.over_output_limit = True
                self.kill_soon()

        return on_data

    def kill_soon(self) -> None:
        task = self._loop.create_task(self._channel.kill(self.number))
        self._killers.add(task)
        task.add_done_callback(self._killers.discard)

    async def report(self) -> CommandReport | None:
        """Wait for the end. A guard that does not enforce the deadline is killed."""
        if self._plan.wall > 0:
            done, _ = await asyncio.wait({self.ended}, timeout=self._plan.wall + GRACE_SECONDS)
            if not done:
                self._channel.kill_guard()
        return await asyncio.shield(self.ended)

    async def abort(self) -> None:
        """Kill the command and wait for its end, for a bounded time."""
        await self._channel.kill(self.number)
        await asyncio.wait({self.ended}, timeout=GRACE_SECONDS)

    def collect(self, report: CommandReport | None) -> ExecResult:
        """Return the result, with what the pipes contain at this moment."""
        for pump in self.pumps.values():
            pump.drain()
        if self.error is not None:
            raise self.error
        return self.result(report)

    def result(self, report: CommandReport | None) -> ExecResult:
        stdout, stdout_dropped = self.captures["stdout"].result()
        stderr, stderr_dropped = self.captures["stderr"].result()
        status, code, number, detail = self._classify_end(report)
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

    def _classify_end(self, report: CommandReport | None) -> tuple[ExecStatus, int | None, int | None, str]:
        if report is None:
            return "lost", None, None, "the sandbox's guard died while the command ran"
        if self.oom is not None:
            self.oom.note_alive(self._oom_count)
        if report.reason in (guard_protocol.NOT_STARTED, guard_protocol.NO_DIRECTORY):
            folder, program = (part.decode(errors="backslashreplace") for part in self._plan.parts[:2])
            if report.reason == guard_protocol.NO_DIRECTORY:
                text = f"the working directory {folder!r:.300} cannot be used: {os.strerror(report.status)}"
            else:
                text = f"the program {program!r:.300} could not be started: {os.strerror(report.status)}"
            if self.cgroup and report.status == errno.EAGAIN:
                return (
                    "process_limit",
                    None,
                    None,
                    "it could not be started: the sandbox has reached its process limit",
                )
            if self.cgroup and report.status == errno.ENOMEM:
                return (
                    "memory_limit",
                    None,
                    None,
                    "it could not be started: the sandbox has reached its memory limit",
                )
            if report.status not in PROGRAM_ERRORS:
                raise SandboxError(f"the sandbox could not start a process: {os.strerror(report.status)}")
            return "exited", 127 if report.status == errno.ENOENT else 126, None, text
        code = os.waitstatus_to_exitcode(report.status)
        ended = (code, None) if code >= 0 else (None, -code)
        survivors = f"; {report.survivors} processes would not die" if report.survivors else ""
        plan = self._plan
        if report.reason == guard_protocol.TIME_LIMIT:
            return "time_limit", *ended, f"killed after {plan.wall:g} s{survivors}"
        if report.reason == guard_protocol.PROCESS_LIMIT:
            return "process_limit", *ended, f"killed: too many processes{survivors}"
        if self.over_disk_limit:
            return "disk_limit", *ended, f"killed: the sandbox exceeded its disk limit{survivors}"
        if self.over_output_limit:
            return "output_limit", *ended, f"killed after writing {self.max_output} bytes{survivors}"
        if plan.cpu and (-code == signal.SIGXCPU or (-code == signal.SIGKILL and report.cpu >= plan.cpu)):
            return "time_limit", *ended, f"used {plan.cpu:g} s of processor time"
        if -code == signal.SIGXFSZ:
            return "disk_limit", *ended, "a file grew over the limit"
        if code and self.cgroup and cgroups.count_oom_kills(self.cgroup) > self._oom_count:
            return (
                "memory_limit",
                *ended,
                "the sandbox ran out of memory, and the kernel killed its largest process",
            )
        if (
            code
            and self.cgroup
            and cgroups.count_refused_forks(cgroups.find_pids_directory(self.cgroup)) > self._refused_forks
        ):
            return (
                "process_limit",
                *ended,
                "the sandbox reached its process limit, and further forks were refused",
            )
        if code and self.get_disk_fd is not None and _is_full(self.get_disk_fd()):
            return "disk_limit", *ended, "no space is left in the sandbox"
        if report.reason == guard_protocol.EXITED and code and plan.memory and report.peak >= 0.85 * plan.memory:
            return "memory_limit", *ended, f"it failed after using {report.peak} of {plan.memory} allowed bytes"
        return (
            ("exited" if code >= 0 else "signaled"),
            *ended,
            f"killed{survivors}" if report.reason == guard_protocol.KILLED else "",
        )

    async def explain_loss(self, result: ExecResult) -> ExecResult:
        """Replace `lost` with `memory_limit` if the sandbox's programs used up the memory that its guard needs."""
        if result.status == "lost" and self.is_exhausted is not None and await self.is_exhausted():
            return msgspec.structs.replace(result, status="memory_limit", detail=EXHAUSTED)
        return result

    def release(self, *, leave_running: bool = False) -> None:
        """Close the pipes. With `leave_running`, surviving children may continue to write, and the output is
        discarded.
        """
        for pump in self.pumps.values():
            fd = pump.detach()
            if fd >= 0 and leave_running:
                self._channel.delegate_pipe(fd)
            elif fd >= 0:
                os.close(fd)


def _is_full(top: int) -> bool:
    if top < 0:
        return False
    space = os.fstatvfs(top)
    return space.f_bavail * space.f_frsize < FULL_DISK_BYTES or (space.f_files > 0 and space.f_favail == 0)


async def run_to_end(job: Job, stdin: int, on_output: OnOutput | None) -> ExecResult:
    """Run a job to its end. Nothing of it is left on any path."""
    job.on_output = on_output
    await job.begin(stdin)
    finished = False
    try:
        report = await job.report()
        finished = report is not None and report.reason == guard_protocol.EXITED
        return await job.explain_loss(job.collect(report))
    except asyncio.CancelledError:
        await job.abort()
        raise
    finally:
        job.release(leave_running=finished)
