"""Base class for sandboxes whose programs run under a guard process. Runs in the owner's process.

The guard is a small process that starts, reaps and kills commands and reports how they ended. Providers decide
where it runs and how it is confined; this module talks to it through a `GuardChannel`.

Guarantees:
- a call on a closed or lost sandbox raises at once and never hangs;
- arguments that cannot be passed to a program (a NUL byte, an invalid variable name) are a failed result, not an
  exception;
- `close` completes even if its caller is cancelled.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import msgspec

from rookery.core import ExecResult, SandboxError, SandboxSpec, SandboxUsage
from rookery.core.lifetimes import detached_context
from rookery.sandbox_runtime import processes
from rookery.sandboxes import shell, transfers, usage
from rookery.sandboxes.capture import create_memory_file
from rookery.sandboxes.channel import GuardChannel
from rookery.sandboxes.file_transfer import DirectTransfer, FileTransfer, RunningTransfers
from rookery.sandboxes.jobs import EXHAUSTED, Job, JobPlan, OomWatch, run_to_end
from rookery.sandboxes.process import GuardedProcess, start_process
from rookery.sandboxes.protocol import Command, OnOutput
from rookery.sandboxes.shell import GuardedShell

S = TypeVar("S", bound="GuardedSandbox")
CLOSE_SECONDS = 20.0
MIN_MEMORY = 1 << 20
MAX_SECONDS = 1e7
MAX_USER_ID = 65534
MAX_PASSWD_BYTES = 1 << 20
_PASSWD = "/etc/passwd"  # noqa: S105
_KNOWN_USERS = {"root": 0, "nobody": MAX_USER_ID}
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class CommandUser(NamedTuple):
    """The user that a command runs as."""

    uid: int
    gid: int
    name: str


DEFAULT_USER = CommandUser(-1, -1, "")
"""The user of commands that name none."""


async def find_user(user: str, read: Callable[[str], Awaitable[bytes]]) -> CommandUser:
    """Return the IDs of a user given by name or number. `read` reads a file of the sandbox.

    A number is taken as a user ID. A name is looked up in the sandbox's own /etc/passwd, which is untrusted. Raise
    `SandboxError(sandbox.refused)` if there is no such user or its IDs are not in the range from 0 to 65534.
    """
    if user.isascii() and user.isdecimal():
        if len(user) > 5 or int(user) > MAX_USER_ID:
            raise _refuse_user(user, f"user IDs are numbers from 0 to {MAX_USER_ID}")
        name = next((name for name, uid in _KNOWN_USERS.items() if uid == int(user)), user)
        return CommandUser(int(user), int(user), name)
    if user in _KNOWN_USERS:
        return CommandUser(_KNOWN_USERS[user], _KNOWN_USERS[user], user)
    try:
        data = await read(_PASSWD)
    except OSError as error:
        raise _refuse_user(user, f"{_PASSWD} cannot be read: {error.strerror or error}") from error
    for line in data.decode("utf-8", "replace").splitlines():
        fields = line.split(":")
        if fields[0] == user and len(fields) > 3:
            with contextlib.suppress(ValueError):
                uid, gid = int(fields[2]), int(fields[3])
                if 0 <= uid <= MAX_USER_ID and 0 <= gid <= MAX_USER_ID:
                    return CommandUser(uid, gid, user)
            raise _refuse_user(user, f"its entry in {_PASSWD} has no valid IDs")
    raise _refuse_user(user, f"{_PASSWD} has no such user")


def _refuse_user(user: str, reason: str) -> SandboxError:
    return SandboxError(f"a command cannot run as {user!r}: {reason}", cause="sandbox.refused")


class GuardedSandbox:
    """Base class of sandboxes: commands, shells and file transfers through a guard process.

    An instance is bound to the event loop on which it was created.
    """

    provider: str = ""
    memory_limit_is_shared = False
    """True if the memory limit applies to all processes of the sandbox together, not to each process."""

    def __init__(self, identity: str, spec: SandboxSpec, marker: str, on_closed: Callable[[Any], None]) -> None:
        self.id = identity
        self.spec = spec
        self._marker = marker
        self._on_closed = on_closed
        self._base_env: dict[str, str] = {}
        """Variables that every command gets."""
        self.channel: GuardChannel | None = None
        self._null = -1
        self._children: set[GuardedProcess | GuardedShell] = set()
        self._transfers = RunningTransfers()
        self._closing: asyncio.Task[None] | None = None
        self._created = time.monotonic()
        self._peaks_before = usage.Peaks()
        """The peaks of the sandbox's cgroup when the sandbox was created, because an earlier one may have had
        it."""
        self._usage: SandboxUsage | None = None
        """The resources that a closed sandbox has used."""
        self._oom = OomWatch("")
        self._exhausted: bool | None = None
        """True if the sandbox died because its programs used up its memory; None if that is not determined yet."""

    # ---- hooks for providers

    def get_root(self) -> transfers.SandboxRoot:
        """Return where the sandbox's files are on the host, for file transfers."""
        raise NotImplementedError

    def make_file_transfer(self) -> FileTransfer:
        """Return an object that copies files into and out of the sandbox."""
        return DirectTransfer(self.get_root(), self._transfers)

    def get_cwd(self, command: Command) -> str:
        """Return the directory in which a command runs."""
        raise NotImplementedError

    def is_default_user(self, user: str) -> bool:
        """Return whether `user` (a name or a number) is the user of commands that name none."""
        raise NotImplementedError

    async def resolve_user(self, user: str) -> CommandUser:
        """Return the user ID and group ID for a user's name or number.

        Raise `SandboxError(sandbox.refused)` if commands cannot run as this user.
        """
        if self.is_default_user(user):
            return DEFAULT_USER
        raise SandboxError(
            f"the {self.provider} provider cannot run commands as {user!r}", cause="sandbox.refused"
        )

    def get_default_uid(self) -> int:
        """Return the user ID of commands that name no user; -1 if the sandbox has a single user."""
        return -1

    def count_limit_hits(self) -> tuple[int, int]:
        """Return how many processes the OOM killer has killed and how many forks the kernel has refused."""
        return 0, 0

    def get_memory_cgroup(self) -> str:
        """Return the directory of the cgroup that counts the sandbox's memory; empty if there is none."""
        return ""

    def prepare_job(self, job: Job) -> Job:
        """Add the provider's settings to a job before it starts."""
        return job

    async def clean_up(self) -> None:
        """Remove what is left of the sandbox after its guard has ended, for example files and the lease."""

    async def guard_ran_out_of_memory(self) -> bool:
        """Return whether the OOM killer ended the guard because the sandbox used up its memory."""
        return self._oom.has_increased()

    # ---- commands

    def _require_channel(self) -> GuardChannel:
        """Return the connection to the guard. Raise `SandboxError` if the sandbox is closed or its guard died."""
        if self._closing is not None or self.channel is None:
            raise SandboxError(f"sandbox {self.id} is closed")
        if self.channel.dead.done():
            if self._exhausted:
                raise SandboxError(f"sandbox {self.id} is gone: {EXHAUSTED}", cause="sandbox.exhausted")
            raise SandboxError(f"sandbox {self.id} is lost: its guard died ({self.channel.dead.result()})")
        return self.channel

    async def _check_exhausted(self) -> bool:
        """Return whether the sandbox is dead because its own programs used up its memory. Caches the answer."""
        if self._closing is not None or self.channel is None or not self.channel.dead.done():
            return False
        if self._exhausted is None:
            self._exhausted = await self.guard_ran_out_of_memory()
        return self._exhausted

    async def _require_alive(self) -> GuardChannel:
        """Like `_require_channel`, but find out first why a dead sandbox died."""
        await self._check_exhausted()
        return self._require_channel()

    async def _resolve_command_user(self, command: Command) -> CommandUser:
        await self._require_alive()
        return DEFAULT_USER if command.user is None else await self.resolve_user(command.user)

    def _make_job(self, command: Command, user: CommandUser, *, wall: float) -> Job | ExecResult:
        """Return a job for the command, or a failed result if its arguments cannot be passed to a program."""
        channel = self._require_channel()
        if not command.argv or not command.argv[0]:
            return ExecResult(status="exited", exit_code=127, detail="the command names no program")
        spec = self.spec
        number = channel.reserve_number()
        named = {"USER": user.name} if user.name else {}
        env = {
            **self._base_env,
            **named,
            **command.env,
            processes.SANDBOX_VARIABLE: self._marker,
            processes.COMMAND_VARIABLE: str(number),
        }
        cwd = self.get_cwd(command)
        try:
            parts = [os.fsencode(p) for p in (cwd, *command.argv, *(f"{k}={v}" for k, v in env.items()))]
        except UnicodeEncodeError:
            return ExecResult(
                status="exited", exit_code=126, detail="an argument or variable of the command is not valid text"
            )
        if any(not name or "=" in name for name in env):
            return ExecResult(status="exited", exit_code=126, detail="a variable name is empty or contains '='")
        if any(b"\0" in part for part in parts):
            return ExecResult(status="exited", exit_code=126, detail="an argument or variable contains a NUL byte")
        # A limit on the whole sandbox is not applied to each process: many reserve memory that they never use.
        limits = (command.memory, None if self.memory_limit_is_shared else spec.memory)
        plan = JobPlan(
            parts,
            len(command.argv),
            wall=clamp_seconds(wall),
            cpu=clamp_seconds(command.cpu_seconds or spec.cpu_seconds or 0.0),
            memory=min((max(limit, MIN_MEMORY) for limit in limits if limit), default=0),
            output=spec.output if command.output is None else command.output,
            user=(user.uid, user.gid),
            warm=command.warm,
        )
        job = Job(channel, plan, number)
        job.oom, job.is_exhausted = self._oom, self._check_exhausted
        return self.prepare_job(job)

    async def exec(self, command: Command, *, on_output: OnOutput | None = None) -> ExecResult:
        wall = self.spec.wall if command.wall is None else command.wall
        user = await self._resolve_command_user(command)
        job = self._make_job(command, user, wall=wall if wall > 0 else 0.001)
        if isinstance(job, ExecResult):
            return job
        if not command.stdin:
            return await run_to_end(job, self._null, on_output)
        # A memory file has no size limit like a pipe, so nothing has to be written while the command runs.
        stdin = create_memory_file(command.stdin)
        try:
            return await run_to_end(job, stdin, on_output)
        finally:
            os.close(stdin)

    async def start(self, command: Command) -> GuardedProcess:
        job = self._make_job(command, await self._resolve_command_user(command), wall=command.wall or 0.0)
        if isinstance(job, ExecResult):
            raise SandboxError(f"the process cannot be started: {job.detail}", cause="sandbox.refused")
        process = await start_process(job, self._children.discard)
        self._children.add(process)
        try:
            if command.stdin:
                await process.send(command.stdin)
        except BrokenPipeError:
            pass  # the program does not read its input
        except BaseException:
            await process.kill()
            raise
        return process

    async def shell(self) -> GuardedShell:
        await self._require_alive()
        made = GuardedShell(_ShellHost(self), self.spec.output)
        self._children.add(made)
        return made

    async def kill_all(self, *, user: str | None = None, timeout: float = 30.0) -> None:
        """Kill every process in the sandbox, or those of one user, and return when all of them are gone.

        `user=""` means the user that commands run as by default. The guard kills the processes itself and starts
        none for that, so this also works when the sandbox has reached its process limit. Raise
        `SandboxError(sandbox.lost)` if a process does not end.
        """
        channel = await self._require_alive()
        uid = -1
        if user is not None:
            resolved = await self.resolve_user(user) if user else DEFAULT_USER
            uid = resolved.uid if resolved is not DEFAULT_USER else self.get_default_uid()
        try:
            async with asyncio.timeout(timeout):
                left = await channel.kill_all(uid)
        except TimeoutError as error:
            raise SandboxError(f"the processes of sandbox {self.id} did not end within {timeout:g} s") from error
        await self._require_alive()
        if left:
            raise SandboxError(f"{left} processes of sandbox {self.id} could not be killed")

    # ---- files

    async def read(self, path: str, *, limit: int = 16 << 20, timeout: float = 30.0) -> bytes:
        transfer = await self._open_transfer()
        return await transfer.read(path, limit=limit, timeout=timeout)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644, timeout: float = 30.0) -> None:
        transfer = await self._open_transfer()
        await transfer.write(path, data, mode=mode, timeout=timeout)

    async def upload(
        self, source: Path, target: str, *, inside: Path | None = None, timeout: float = 120.0
    ) -> None:
        transfer = await self._open_transfer()
        await transfer.upload(source, target, inside=inside, timeout=timeout)

    async def download(self, source: str, target: Path, *, limit: int = 1 << 30, timeout: float = 120.0) -> None:
        transfer = await self._open_transfer()
        await transfer.download(source, target, limit=limit, timeout=timeout)

    async def _open_transfer(self) -> FileTransfer:
        await self._require_alive()
        return self.make_file_transfer()

    async def snapshot(self, *, timeout: float = 60.0) -> str:  # noqa: ARG002
        self._refuse("take snapshots")

    async def fork(
        self,
        snapshot: str,
        *,
        timeout: float = 60.0,  # noqa: ARG002
        spec: SandboxSpec | None = None,  # noqa: ARG002
    ) -> "GuardedSandbox":
        self._refuse(f"fork {snapshot!r}")

    async def diff(self, snapshot: str, *, timeout: float = 60.0) -> Mapping[str, str]:  # noqa: ARG002
        self._refuse(f"compare with {snapshot!r}")

    def _refuse(self, action: str) -> NoReturn:
        raise SandboxError(f"the {self.provider} provider cannot {action}", cause="sandbox.refused")

    # ---- close

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close(), context=detached_context())
        await asyncio.shield(self._closing)

    def read_usage(self) -> SandboxUsage:
        """Return the resources that were used so far or, of a closed sandbox, until it was closed."""
        return self._usage or self._measure_usage()

    def _measure_usage(self) -> SandboxUsage:
        seconds = time.monotonic() - self._created
        channel = self.channel
        if channel is None:
            return SandboxUsage(self.id, self.provider, seconds)
        totals = None if channel.dead.done() else usage.read_process_totals(channel.pid)
        peaks, before = usage.read_peaks(self.get_memory_cgroup()), self._peaks_before
        running = totals.running if totals is not None else 0
        return SandboxUsage(
            self.id,
            self.provider,
            seconds,
            channel.started,
            max(channel.ended_cpu, totals.cpu if totals is not None else 0.0),
            peaks.memory if peaks.memory > before.memory else channel.peak_memory,
            peaks.processes if peaks.processes > before.processes else running,
        )

    async def _close(self) -> None:
        self._usage = self._measure_usage()
        try:
            if self.channel is not None:
                self.channel.hang_up()
                await self.channel.wait_closed(timeout=CLOSE_SECONDS)
            for child in list(self._children):
                child.detach()
            self._children.clear()
            if self._null >= 0:
                os.close(self._null)
                self._null = -1
            await self.clean_up()
        finally:
            self._on_closed(self)


async def open_or_close(sandbox: S, opening: Coroutine[Any, Any, None], timeout: float) -> S:
    """Await `opening`, which sets the sandbox up, and return the sandbox.

    If that fails, takes longer than `timeout` seconds or is cancelled, the sandbox is closed first.
    """
    try:
        async with asyncio.timeout(timeout):
            await opening
    except BaseException as error:
        await sandbox.close()
        if isinstance(error, TimeoutError | OSError):
            raise SandboxError(f"the sandbox could not be created: {error!r}", cause="sandbox.create") from error
        raise
    return sandbox


async def close_all(sandboxes: Iterable[GuardedSandbox]) -> None:
    """Close all sandboxes, even if closing one of them fails; then raise the first error, if any."""
    results = await asyncio.gather(*(sandbox.close() for sandbox in sandboxes), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


@asynccontextmanager
async def limit_time(timeout: float, operation: str) -> AsyncIterator[None]:
    """Cancel the block after `timeout` seconds, and raise a `SandboxError` that names `operation`."""
    try:
        async with asyncio.timeout(timeout):
            yield
    except TimeoutError as error:
        raise SandboxError(f"{operation} took longer than {timeout:g} seconds", cause="sandbox.create") from error


def merge_fork_spec(parent: SandboxSpec, requested: SandboxSpec | None) -> SandboxSpec:
    """Return the spec of a fork: `requested` with the parent's provider and image, or by default the parent's."""
    if requested is None:
        return parent
    return msgspec.structs.replace(requested, provider=parent.provider, image=parent.image)


class _ShellHost:
    """The operations of a sandbox that its shells use: start a bash, interrupt a script, forget a closed shell."""

    def __init__(self, sandbox: GuardedSandbox) -> None:
        self._sandbox = sandbox

    async def make_job(self) -> Job:
        await self._sandbox._check_exhausted()
        job = self._sandbox._make_job(Command(argv=shell.ARGV), DEFAULT_USER, wall=0.0)
        assert isinstance(job, Job)
        return job

    async def interrupt(self, job: Job, mark: str, ticks: int) -> None:
        await self._sandbox._require_channel().interrupt(job.number, mark, ticks)

    def forget(self, closed: GuardedShell) -> None:
        self._sandbox._children.discard(closed)


def clamp_seconds(value: float) -> float:
    """Return `value`, limited to what the guard's timer can hold. 0 or less means no limit and becomes 0."""
    return min(value, MAX_SECONDS) if value > 0 else 0.0
