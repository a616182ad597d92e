"""One command of a sandbox: its pipes, its output and how it ended. Runs in the process that owns the sandbox.

The command itself is started, watched and killed by the sandbox's guard process.

Guarantees:
- a result contains what was written until the command's first process ended; a child that still holds the pipe
  delays nothing, and its later output is discarded;
- whatever ends the wait (deadline, cancellation, an exception in a callback), the process tree is dead and the
  descriptors are closed.

Without cgroups, the status `memory_limit` is a guess: the program failed after it had used at least 85% of its
limit. The reported peak memory is never below a few megabytes: the command starts as a copy of the guard, and the
kernel counts that, too. With cgroups, `memory_limit` and `process_limit` mean that the command failed and that the
kernel killed a process or refused a fork in this sandbox meanwhile. Another command may have caused that, because
the limits apply to the whole sandbox.
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
"""A program is killed when it has written this many times the number of output bytes that are kept."""
GRACE_SECONDS = 15.0
"""If the guard has not reported a command's end this many seconds after the command's deadline, it is killed."""
EXHAUSTED = "the sandbox ran out of memory and was killed by the kernel with all its processes"
FULL_DISK_BYTES = 64 << 10
"""A file system with fewer free bytes counts as full."""
PROGRAM_ERRORS = frozenset(
    {errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.E2BIG}
    | {errno.ENAMETOOLONG, errno.EPERM, errno.ETXTBSY, errno.EINVAL, errno.ELIBBAD}
)


class JobPlan(msgspec.Struct, frozen=True):
    """The parameters of a command, with the defaults of the sandbox's spec filled in."""

    parts: Sequence[bytes]
    argc: int
    wall: float
    cpu: float
    memory: int
    output: int
    user: tuple[int, int] = (-1, -1)
    """User and group ID; -1 for the sandbox's default."""
    warm: bool = False


class OomWatch:
    """Detects whether the kernel's OOM killer killed a sandbox's guard process.

    This is assumed if the guard died and the cgroup's count of OOM kills has risen since the guard last answered.
    """

    def __init__(self, cgroup: str) -> None:
        self.cgroup = cgroup
        """Directory of the cgroup that limits the sandbox's memory; empty if there is none."""
        self._kills_when_alive: int | None = None

    def count(self) -> int:
        """Return the number of OOM kills in the cgroup so far."""
        found = cgroups.count_oom_kills(self.cgroup) if self.cgroup else 0
        if self._kills_when_alive is None:  # nothing has run in the sandbox yet
            self._kills_when_alive = found
        return found

    def note_alive(self, count: int) -> None:
        """Record that the guard was alive when the cgroup had counted `count` OOM kills."""
        self._kills_when_alive = max(count, self._kills_when_alive or 0)

    def has_increased(self) -> bool:
        return self._kills_when_alive is not None and self.count() > self._kills_when_alive


class Job:
    """One command in a sandbox: started by `begin`, killed by `abort`, turned into a result by `collect`."""

    def __init__(self, channel: GuardChannel, plan: JobPlan, number: int) -> None:
        self._channel = channel
        self._plan = plan
        self._loop = asyncio.get_running_loop()
        self.number = number
        self.captures: dict[Stream, Capture] = {"stdout": Capture(plan.output), "stderr": Capture(plan.output)}
        self.readers: dict[Stream, PipeReader] = {}
        self.on_output: OnOutput | None = None
        self.on_end: Callable[[], None] | None = None
        self.error: BaseException | None = None
        self.over_output_limit = False
        self.max_output = OUTPUT_KILL_FACTOR * max(plan.output, 1 << 16)
        self.oom: OomWatch | None = None
        self.cgroup = ""
        """Directory of the cgroup that limits the sandbox's memory; empty if there is none."""
        self.is_exhausted: Callable[[], Awaitable[bool]] | None = None
        """Called after the guard's death; returns whether the sandbox's programs caused it by using up memory."""
        self.get_disk_fd: Callable[[], int] | None = None
        """Returns a descriptor of a directory on the sandbox's disk, whose size is limited; -1 if it is closed."""
        self.over_disk_limit = False
        """True if the command was killed because polling found that the sandbox exceeded its disk limit."""
        self._oom_count = self._refused_forks = 0
        self._killers: set[asyncio.Task[None]] = set()
        self.ended: asyncio.Future[CommandReport | None] = self._loop.create_future()

    async def begin(self, stdin: int, extra: Sequence[int] = ()) -> None:
        """Start the command.

        `stdin` is the descriptor of its standard input; `extra` become its descriptors 3, 4 and so on. The caller
        closes its own copies.
        """
        child_ends = []
        try:
            with wrap_errors(SandboxError, "a command could not be started", OSError):
                for stream in ("stdout", "stderr"):
                    our_end, child_end = os.pipe2(os.O_CLOEXEC)
                    child_ends.append(child_end)
                    self.readers[stream] = PipeReader(self._loop, our_end, self._make_reader_callback(stream))
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
        """Wait until the command has ended; return the guard's report, or None if the guard died.

        A guard that does not enforce the command's deadline is killed, `GRACE_SECONDS` later.
        """
        if self._plan.wall > 0:
            done, _ = await asyncio.wait({self.ended}, timeout=self._plan.wall + GRACE_SECONDS)
            if not done:
                self._channel.kill_guard()
        return await asyncio.shield(self.ended)

    async def abort(self) -> None:
        """Kill the command and wait until it has ended, at most `GRACE_SECONDS`."""
        await self._channel.kill(self.number)
        await asyncio.wait({self.ended}, timeout=GRACE_SECONDS)

    def collect(self, report: CommandReport | None) -> ExecResult:
        """Read what the pipes contain at this moment and return the result.

        Raise the exception of the output callback if it raised one.
        """
        for reader in self.readers.values():
            reader.drain()
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
                    "the command could not be started: the sandbox has reached its process limit",
                )
            if self.cgroup and report.status == errno.ENOMEM:
                return (
                    "memory_limit",
                    None,
                    None,
                    "the command could not be started: the sandbox has reached its memory limit",
                )
            if report.status not in PROGRAM_ERRORS:
                raise SandboxError(f"the sandbox could not start a process: {os.strerror(report.status)}")
            return "exited", 127 if report.status == errno.ENOENT else 126, None, text
        code = os.waitstatus_to_exitcode(report.status)
        ended = (code, None) if code >= 0 else (None, -code)
        survivors = f"; {report.survivors} of its processes could not be killed" if report.survivors else ""
        plan = self._plan
        if report.reason == guard_protocol.TIME_LIMIT:
            return "time_limit", *ended, f"killed after {plan.wall:g} s{survivors}"
        if report.reason == guard_protocol.PROCESS_LIMIT:
            return "process_limit", *ended, f"killed: the sandbox exceeded its process limit{survivors}"
        if self.over_disk_limit:
            return "disk_limit", *ended, f"killed: the sandbox exceeded its disk limit{survivors}"
        if self.over_output_limit:
            return "output_limit", *ended, f"killed after writing {self.max_output} bytes{survivors}"
        if plan.cpu and (-code == signal.SIGXCPU or (-code == signal.SIGKILL and report.cpu >= plan.cpu)):
            return "time_limit", *ended, f"killed: the command used its limit of {plan.cpu:g} s of CPU time"
        if -code == signal.SIGXFSZ:
            return "disk_limit", *ended, "killed: the command wrote a file that is larger than the disk limit"
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
            return "disk_limit", *ended, "the command failed, and no space is left on the sandbox's disk"
        if report.reason == guard_protocol.EXITED and code and plan.memory and report.peak >= 0.85 * plan.memory:
            return (
                "memory_limit",
                *ended,
                f"the command failed after using {report.peak} of {plan.memory} allowed bytes of memory",
            )
        return (
            ("exited" if code >= 0 else "signaled"),
            *ended,
            f"killed{survivors}" if report.reason == guard_protocol.KILLED else "",
        )

    async def explain_loss(self, result: ExecResult) -> ExecResult:
        """Change a result's status from `lost` to `memory_limit` if lack of memory killed the sandbox's guard.

        That is the case if the sandbox's own programs had used up its memory.
        """
        if result.status == "lost" and self.is_exhausted is not None and await self.is_exhausted():
            return msgspec.structs.replace(result, status="memory_limit", detail=EXHAUSTED)
        return result

    def release(self, *, leave_running: bool = False) -> None:
        """Close the pipes of the command. With `leave_running`, the guard takes them over and discards what the
        command's surviving children write; otherwise these get SIGPIPE.
        """
        for reader in self.readers.values():
            fd = reader.detach()
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
    """Start a command, wait for its end and return its result.

    Its processes are dead and its pipes closed on every path, also on cancellation, except children that it left
    in the background when it ended by itself.
    """
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
