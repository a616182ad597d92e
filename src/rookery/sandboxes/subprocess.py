"""The provider of last resort: plain processes of the same user, under a guard. It does not isolate.

Promises:
- all that a sandbox starts dies with it, with its owner, or at its deadline, whatever it does to hide;
- no variable of the host's environment reaches a program: it gets a small fixed set and what the spec says;
- nothing is written outside of the home folder;
- a failed or cancelled creation leaves nothing.

How limits are held, and how far: memory by RLIMIT_DATA for each process; processes by counting them, up to
once a second, and killing the biggest command; disk by RLIMIT_FSIZE for each file; processor time by
RLIMIT_CPU for each process, in whole seconds; wall time by the guard. The network is not restricted at all:
`none` is accepted because the provider says that it is not isolated. A command can lower its sandbox's
memory, never raise it. A background process has no wall limit unless its command says one.
"""

import asyncio
import contextlib
import getpass
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

from rookery.core import ExecResult, SandboxError, SandboxSpec
from rookery.sandboxes import leases, procs, shell, transfers
from rookery.sandboxes.capture import memory_file
from rookery.sandboxes.channel import Channel
from rookery.sandboxes.jobs import Job, Plan, run_to_end
from rookery.sandboxes.process import SubprocessProcess, start_process
from rookery.sandboxes.protocol import Command, Home, Lease, OnOutput
from rookery.sandboxes.shell import SubprocessShell

T = TypeVar("T")
LEASE_SECONDS = 24 * 3600.0
CLOSE_SECONDS = 20.0
LEAST_MEMORY = 1 << 20
MOST_SECONDS = 1e7
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class SubprocessProvider:
    """Makes sandboxes that are folders and process trees."""

    name = "subprocess"
    isolated = False

    def __init__(self, home: Home) -> None:
        self._home = home
        self._open: set[SubprocessSandbox] = set()

    def check(self, spec: SandboxSpec) -> Sequence[str]:
        said = []
        if spec.image is not None:
            said.append(f"The subprocess provider has no images; it cannot give {spec.image!r}.")
        if spec.network in ("model", "allow") or spec.allow:
            said.append("The subprocess provider cannot restrict the network to the model or to an allow-list.")
        if spec.cpus is not None:
            said.append("The subprocess provider cannot limit the number of processors.")
        if spec.user is not None and spec.user not in (_user(), str(os.getuid())):
            said.append(f"The subprocess provider runs programs as the present user, not as {spec.user!r}.")
        if spec.workdir is not None and not _inside(spec.workdir):
            said.append(
                f"The subprocess provider has no folder {spec.workdir!r}: use a relative path without '..'."
            )
        if sys.platform != "linux":
            said.append("The subprocess provider needs Linux.")
        return said

    async def create(self, spec: SandboxSpec, *, attempt: str, timeout: float = 60.0) -> "SubprocessSandbox":
        problems = self.check(spec)
        if problems:
            raise SandboxError(" ".join(problems), cause="sandbox.refused")
        sandbox = SubprocessSandbox(spec, self._home, attempt, self._open.discard)
        self._open.add(sandbox)
        try:
            async with asyncio.timeout(timeout):
                await sandbox.open()
        except BaseException as error:
            await sandbox.close()
            if isinstance(error, TimeoutError | OSError):
                raise SandboxError(f"a sandbox could not be made: {error!r}", cause="sandbox.create") from error
            raise
        return sandbox

    async def close(self) -> None:
        results = await asyncio.gather(*(sandbox.close() for sandbox in list(self._open)), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result


class SubprocessSandbox:
    """A folder, a lease, and a guard with what it started. Use it on the loop it was made on."""

    def __init__(
        self, spec: SandboxSpec, home: Home, attempt: str, forget: "Callable[[SubprocessSandbox], None]"
    ) -> None:
        self.id = f"s{secrets.token_hex(8)}"
        self.spec = spec
        self._folder = home.folder.resolve()  # what a program's `pwd` says
        self.root = self._folder / self.id
        self._home = home
        self._attempt = attempt
        self._forget = forget
        self._marker = leases.marker(home.run, self.id)
        self._channel: Channel | None = None
        self._null = -1
        self._parts: set[SubprocessProcess | SubprocessShell] = set()
        self._closing: asyncio.Task[None] | None = None

    @property
    def work(self) -> Path:
        """Where commands run, and their HOME."""
        return self.root / "work"

    async def open(self) -> None:
        owner = os.getpid()
        lease = Lease(
            id=self.id,
            run=self._home.run,
            attempt=self._attempt,
            owner_pid=owner,
            owner_started=leases.start_ticks(owner) or 0,
            deadline=time.time() + LEASE_SECONDS,
            provider=SubprocessProvider.name,
            folder=str(self.root),
        )
        path = leases.write(self._folder, lease)
        self.root.mkdir(mode=0o700)
        for name in ("work", "tmp"):
            (self.root / name).mkdir()
        (self.work / (self.spec.workdir or ".")).mkdir(parents=True, exist_ok=True)
        self._null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._base = {
            "PATH": f"{PATH}:{Path(sys.base_prefix) / 'bin'}",
            "HOME": str(self.work),
            "TMPDIR": str(self.root / "tmp"),
            "LANG": "C.UTF-8",
            **self.spec.env,
            procs.MARKER: self._marker,
        }
        self._channel = Channel.launch(self.root, self._marker)
        numbers = (max(0, number or 0) for number in (self.spec.memory, self.spec.disk, self.spec.pids))
        await self._channel.hello((str(self.root), str(path), *map(str, numbers)))

    def _live(self) -> Channel:
        if self._closing is not None or self._channel is None:
            raise SandboxError(f"sandbox {self.id} is closed")
        if self._channel.dead.done():
            raise SandboxError(f"sandbox {self.id} is lost: its guard died ({self._channel.dead.result()})")
        return self._channel

    def _job(self, command: Command, *, wall: float) -> Job | ExecResult:
        """A job, or what ends the command before it starts: text no program can be given."""
        channel = self._live()
        if command.user is not None and command.user != _user():
            raise SandboxError(f"the subprocess provider cannot run as {command.user!r}", cause="sandbox.refused")
        if not command.argv or not command.argv[0]:
            return ExecResult(status="exited", exit_code=127, detail="no program was named")
        spec = self.spec
        number = channel.reserve()
        env = {**self._base, **command.env, procs.MARKER: self._marker, procs.COMMAND: str(number)}
        cwd = os.path.join(self.work, spec.workdir or "", command.cwd or "")  # noqa: PTH118  (a program's own text)
        try:
            parts = [os.fsencode(p) for p in (cwd, *command.argv, *(f"{k}={v}" for k, v in env.items()))]
        except UnicodeEncodeError:
            return ExecResult(status="exited", exit_code=126, detail="an argument is no valid text")
        if any(not name or "=" in name for name in env):
            return ExecResult(status="exited", exit_code=126, detail="a variable's name is empty or contains '='")
        if any(b"\0" in part for part in parts):
            return ExecResult(status="exited", exit_code=126, detail="an argument contains a NUL")
        memory = min((max(m, LEAST_MEMORY) for m in (command.memory, spec.memory) if m), default=0)
        cpu = _seconds(command.cpu_seconds or spec.cpu_seconds or 0.0)
        output = spec.output if command.output is None else command.output
        plan = Plan(parts, len(command.argv), wall=_seconds(wall), cpu=cpu, memory=memory, output=output)
        return Job(channel, plan, number)

    async def exec(self, command: Command, *, on_output: OnOutput | None = None) -> ExecResult:
        wall = self.spec.wall if command.wall is None else command.wall
        job = self._job(command, wall=wall if wall > 0 else 0.001)
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

    async def start(self, command: Command) -> SubprocessProcess:
        job = self._job(command, wall=command.wall or 0.0)
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

    async def shell(self) -> SubprocessShell:
        self._live()
        made = SubprocessShell(_Opening(self), self.spec.output)
        self._parts.add(made)
        return made

    async def read(self, path: str, *, limit: int = 16 << 20, timeout: float = 30.0) -> bytes:
        return await self._transfer(partial(transfers.read, self.root, path, limit), timeout)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644, timeout: float = 30.0) -> None:
        await self._transfer(partial(transfers.write, self.root, path, data, mode), timeout)

    async def upload(self, source: Path, target: str, *, timeout: float = 120.0) -> None:
        await self._transfer(partial(transfers.upload, self.root, source, target), timeout)

    async def download(self, source: str, target: Path, *, limit: int = 1 << 30, timeout: float = 120.0) -> None:
        await self._transfer(partial(transfers.download, self.root, source, target, limit), timeout)

    async def _transfer(self, work: "Callable[[transfers.Clock], T]", timeout: float) -> T:
        self._live()
        clock = transfers.Clock(timeout)
        task = asyncio.get_running_loop().run_in_executor(None, work, clock)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            clock.stop.set()
            await asyncio.wait({task}, timeout=CLOSE_SECONDS)
            raise

    async def snapshot(self) -> str:
        self._cannot("take snapshots")

    async def fork(self, snapshot: str) -> "SubprocessSandbox":
        self._cannot(f"fork {snapshot!r}")

    async def diff(self, snapshot: str) -> Mapping[str, str]:
        self._cannot(f"compare with {snapshot!r}")

    def _cannot(self, what: str) -> NoReturn:
        raise SandboxError(f"the subprocess provider cannot {what}", cause="sandbox.refused")

    async def close(self) -> None:
        """Goes on to its end when whoever waits for it is cancelled."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
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
            if self.root.exists() or leases.path_of(self._folder, self.id).exists():
                # The guard is dead, or never lived: it left the cleaning to us.
                left = await asyncio.to_thread(leases.destroy, self._folder, self.id, self._marker)
                if left:
                    raise SandboxError(f"{left} processes of sandbox {self.id} would not die")
        finally:
            self._forget(self)


class _Opening:
    """What a shell may ask of its sandbox."""

    def __init__(self, sandbox: SubprocessSandbox) -> None:
        self._sandbox = sandbox

    def job(self) -> Job:
        job = self._sandbox._job(Command(argv=shell.ARGV), wall=0.0)
        assert isinstance(job, Job)
        return job

    async def interrupt(self, job: Job, mark: str, ticks: int) -> None:
        await self._sandbox._live().interrupt(job.number, mark, ticks)

    def forget(self, which: SubprocessShell) -> None:
        self._sandbox._parts.discard(which)


def _user() -> str:
    with contextlib.suppress(KeyError, OSError):
        return getpass.getuser()
    return str(os.getuid())


def _seconds(value: float) -> float:
    """A number the guard can wait for; 0 for none."""
    return min(value, MOST_SECONDS) if value > 0 else 0.0


def _inside(path: str) -> bool:
    return not path.startswith("/") and ".." not in Path(path).parts
