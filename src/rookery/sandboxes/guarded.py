"""A sandbox whose programs run under a guard: what the providers of this machine share.

The guard is a small process that starts, reaps and kills commands and reports how they ended; where it lives and
what surrounds it is the provider's affair. Everything here speaks to it over one channel.

Promises:
- a call on a closed or lost sandbox says so, and never hangs;
- text that no program can be given (a NUL, an invalid name) is a result, not an error of ours;
- closing goes on to its end when whoever waits for it is cancelled.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from rookery.core import ExecResult, SandboxError, SandboxSpec
from rookery.core.apart import apart
from rookery.sandboxes import procs, shell, transfers
from rookery.sandboxes.capture import memory_file
from rookery.sandboxes.channel import Channel
from rookery.sandboxes.jobs import EXHAUSTED, Job, OomWatch, Plan, run_to_end
from rookery.sandboxes.process import GuardedProcess, start_process
from rookery.sandboxes.protocol import Command, OnOutput
from rookery.sandboxes.shell import GuardedShell

T = TypeVar("T")
S = TypeVar("S", bound="GuardedSandbox")
CLOSE_SECONDS = 20.0
LEAST_MEMORY = 1 << 20
MOST_SECONDS = 1e7
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class User(NamedTuple):
    """Whom a command runs as."""

    uid: int
    gid: int
    name: str


ANYONE = User(-1, -1, "")
"""Who commands are where nothing is said."""


class GuardedSandbox:
    """Commands, shells and files of one sandbox. Use it on the loop it was made on."""

    provider: str = ""
    held_together = False
    """Whether the spec's memory holds for all processes together."""

    def __init__(self, identity: str, spec: SandboxSpec, marker: str, forget: Callable[[Any], None]) -> None:
        self.id = identity
        self.spec = spec
        self._marker = marker
        self._forget = forget
        self._base: dict[str, str] = {}
        """Variables that every command gets."""
        self._channel: Channel | None = None
        self._null = -1
        self._parts: set[GuardedProcess | GuardedShell] = set()
        self._transfers: dict[asyncio.Future[Any], transfers.Clock] = {}
        self._closing: asyncio.Task[None] | None = None
        self._oom = OomWatch("")
        self._exhausted: bool | None = None
        """Whether its own programs ended it by using up the memory; None until that was asked after its death."""

    # ---- what a provider says

    def place(self) -> transfers.Place:
        """Where its files are, for transfers."""
        raise NotImplementedError

    def folder_of(self, command: Command) -> str:
        """Where a command runs."""
        raise NotImplementedError

    def may_be(self, user: str) -> bool:
        """Whether this is whom commands run as anyway."""
        raise NotImplementedError

    async def whom(self, user: str) -> "User":
        """Whom a command is to run as; `SandboxError(sandbox.refused)` where it may not."""
        if self.may_be(user):
            return ANYONE
        raise SandboxError(f"the {self.provider} provider cannot run as {user!r}", cause="sandbox.refused")

    def own_uid(self) -> int:
        """Return the user that commands run as if they name none, as the guard knows it; -1: there is only one."""
        return -1

    def struck(self) -> tuple[int, int]:
        """How many processes were ended for want of memory so far, and how many were refused."""
        return 0, 0

    def made(self, job: Job) -> Job:
        """The last word about a job before it starts."""
        return job

    async def clean(self) -> None:
        """After the guard is gone: what it could not remove itself."""

    async def guard_ran_out_of_memory(self) -> bool:
        """After the guard's death: whether the kernel killed it because the sandbox's memory was used up."""
        return self._oom.rose()

    # ---- commands

    def _live(self) -> Channel:
        if self._closing is not None or self._channel is None:
            raise SandboxError(f"sandbox {self.id} is closed")
        if self._channel.dead.done():
            if self._exhausted:
                raise SandboxError(f"sandbox {self.id} is gone: {EXHAUSTED}", cause="sandbox.exhausted")
            raise SandboxError(f"sandbox {self.id} is lost: its guard died ({self._channel.dead.result()})")
        return self._channel

    async def _is_exhausted(self) -> bool:
        """Whether the sandbox is dead because its own programs used up its memory."""
        if self._closing is not None or self._channel is None or not self._channel.dead.done():
            return False
        if self._exhausted is None:
            self._exhausted = await self.guard_ran_out_of_memory()
        return self._exhausted

    async def _user(self, command: Command) -> "User":
        await self._is_exhausted()
        self._live()
        return ANYONE if command.user is None else await self.whom(command.user)

    def _job(self, command: Command, user: "User", *, wall: float) -> Job | ExecResult:
        """A job, or what ends the command before it starts: text no program can be given."""
        channel = self._live()
        if not command.argv or not command.argv[0]:
            return ExecResult(status="exited", exit_code=127, detail="no program was named")
        spec = self.spec
        number = channel.reserve()
        named = {"USER": user.name} if user.name else {}
        env = {**self._base, **named, **command.env, procs.MARKER: self._marker, procs.COMMAND: str(number)}
        cwd = self.folder_of(command)
        try:
            parts = [os.fsencode(p) for p in (cwd, *command.argv, *(f"{k}={v}" for k, v in env.items()))]
        except UnicodeEncodeError:
            return ExecResult(status="exited", exit_code=126, detail="an argument is no valid text")
        if any(not name or "=" in name for name in env):
            return ExecResult(status="exited", exit_code=126, detail="a variable's name is empty or contains '='")
        if any(b"\0" in part for part in parts):
            return ExecResult(status="exited", exit_code=126, detail="an argument contains a NUL")
        # What holds for the whole sandbox anyway need not hold for each process: many reserve what they never use.
        each = (command.memory, None if self.held_together else spec.memory)
        memory = min((max(m, LEAST_MEMORY) for m in each if m), default=0)
        cpu = seconds(command.cpu_seconds or spec.cpu_seconds or 0.0)
        output = spec.output if command.output is None else command.output
        plan = Plan(
            parts,
            len(command.argv),
            wall=seconds(wall),
            cpu=cpu,
            memory=memory,
            output=output,
            user=(user.uid, user.gid),
            warm=command.warm,
        )
        job = Job(channel, plan, number)
        job.oom, job.exhausted = self._oom, self._is_exhausted
        return self.made(job)

    async def exec(self, command: Command, *, on_output: OnOutput | None = None) -> ExecResult:
        wall = self.spec.wall if command.wall is None else command.wall
        job = self._job(command, await self._user(command), wall=wall if wall > 0 else 0.001)
        if isinstance(job, ExecResult):
            return job
        if not command.stdin:
            return await run_to_end(job, self._null, on_output)
        # A file in memory: it can be as long as it likes, and nobody has to feed it.
        stdin = memory_file(command.stdin)
        try:
            return await run_to_end(job, stdin, on_output)
        finally:
            os.close(stdin)

    async def start(self, command: Command) -> GuardedProcess:
        job = self._job(command, await self._user(command), wall=command.wall or 0.0)
        if isinstance(job, ExecResult):
            raise SandboxError(f"the process cannot be started: {job.detail}", cause="sandbox.refused")
        process = await start_process(job, self._parts.discard)
        self._parts.add(process)
        try:
            if command.stdin:
                await process.send(command.stdin)
        except BrokenPipeError:
            pass  # it does not read its input: its own affair
        except BaseException:
            await process.kill()
            raise
        return process

    async def shell(self) -> GuardedShell:
        await self._is_exhausted()
        self._live()
        made = GuardedShell(_Opening(self), self.spec.output)
        self._parts.add(made)
        return made

    async def kill_all(self, *, user: str | None = None, timeout: float = 30.0) -> None:
        """Kill every process in the sandbox, or those of one user, and return when all of them are gone.

        `user=""` names the user that commands run as by default. The guard does it without a process of its own,
        so it also works when programs hold every process that the sandbox may have. `SandboxError(sandbox.lost)`
        if some process does not end.
        """
        await self._is_exhausted()
        channel = self._live()
        uid = -1
        if user is not None:
            who = await self.whom(user) if user else ANYONE
            uid = who.uid if who is not ANYONE else self.own_uid()
        try:
            async with asyncio.timeout(timeout):
                left = await channel.kill_all(uid)
        except TimeoutError as error:
            raise SandboxError(f"the processes of sandbox {self.id} did not end within {timeout:g} s") from error
        await self._is_exhausted()
        self._live()
        if left:
            raise SandboxError(f"{left} processes of sandbox {self.id} could not be killed")

    # ---- files

    async def read(self, path: str, *, limit: int = 16 << 20, timeout: float = 30.0) -> bytes:
        return await self._transfer(partial(transfers.read, path=path, limit=limit), timeout)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644, timeout: float = 30.0) -> None:
        await self._transfer(partial(transfers.write, path=path, data=data, mode=mode), timeout)

    async def upload(
        self, source: Path, target: str, *, inside: Path | None = None, timeout: float = 120.0
    ) -> None:
        await self._transfer(partial(transfers.upload, source=source, target=target, inside=inside), timeout)

    async def download(self, source: str, target: Path, *, limit: int = 1 << 30, timeout: float = 120.0) -> None:
        await self._transfer(partial(transfers.download, source=source, target=target, limit=limit), timeout)

    async def _transfer(self, work: "Callable[..., T]", timeout: float) -> T:
        await self._is_exhausted()
        self._live()
        place = self.place()
        clock = transfers.Clock(timeout)
        task = asyncio.get_running_loop().run_in_executor(None, partial(work, place, clock=clock))
        self._transfers[task] = clock
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            clock.stop.set()
            await asyncio.wait({task}, timeout=CLOSE_SECONDS)
            if task.done() and not task.cancelled():
                task.exception()  # looked at: that it was stopped is what we asked for
            raise
        finally:
            del self._transfers[task]

    async def _end_transfers(self) -> None:
        """So that nothing uses a descriptor that is closed next, and may be another's by then."""
        for clock in self._transfers.values():
            clock.stop.set()
        if self._transfers:
            await asyncio.wait(set(self._transfers), timeout=CLOSE_SECONDS)

    async def snapshot(self, *, timeout: float = 60.0) -> str:  # noqa: ARG002
        self._cannot("take snapshots")

    async def fork(
        self,
        snapshot: str,
        *,
        timeout: float = 60.0,  # noqa: ARG002
        spec: SandboxSpec | None = None,  # noqa: ARG002
    ) -> "GuardedSandbox":
        self._cannot(f"fork {snapshot!r}")

    async def diff(self, snapshot: str, *, timeout: float = 60.0) -> Mapping[str, str]:  # noqa: ARG002
        self._cannot(f"compare with {snapshot!r}")

    def _cannot(self, what: str) -> NoReturn:
        raise SandboxError(f"the {self.provider} provider cannot {what}", cause="sandbox.refused")

    # ---- the end

    async def close(self) -> None:
        """Goes on to its end when whoever waits for it is cancelled."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close(), context=apart())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            if self._channel is not None:
                self._channel.hang_up()
                await self._channel.gone(timeout=CLOSE_SECONDS)
            for part in list(self._parts):
                part.drop()
            self._parts.clear()
            if self._null >= 0:
                os.close(self._null)
                self._null = -1
            await self.clean()
        finally:
            self._forget(self)


async def opened(sandbox: S, opening: Coroutine[Any, Any, None], timeout: float) -> S:
    """The sandbox, once it is open; an opening that fails or is cancelled leaves nothing."""
    try:
        async with asyncio.timeout(timeout):
            await opening
    except BaseException as error:
        await sandbox.close()
        if isinstance(error, TimeoutError | OSError):
            raise SandboxError(f"a sandbox could not be made: {error!r}", cause="sandbox.create") from error
        raise
    return sandbox


async def close_all(sandboxes: Iterable[GuardedSandbox]) -> None:
    """All of them, each to its end; then what went wrong with one is raised."""
    results = await asyncio.gather(*(sandbox.close() for sandbox in sandboxes), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


class _Opening:
    """What a shell may ask of its sandbox."""

    def __init__(self, sandbox: GuardedSandbox) -> None:
        self._sandbox = sandbox

    async def job(self) -> Job:
        await self._sandbox._is_exhausted()
        job = self._sandbox._job(Command(argv=shell.ARGV), ANYONE, wall=0.0)
        assert isinstance(job, Job)
        return job

    async def interrupt(self, job: Job, mark: str, ticks: int) -> None:
        await self._sandbox._live().interrupt(job.number, mark, ticks)

    def forget(self, which: GuardedShell) -> None:
        self._sandbox._parts.discard(which)


def seconds(value: float) -> float:
    """A number the guard can wait for; 0 for none."""
    return min(value, MOST_SECONDS) if value > 0 else 0.0
