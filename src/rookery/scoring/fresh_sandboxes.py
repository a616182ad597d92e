"""Fresh sandboxes for graders and for programs outside of any run, and helpers that execute commands in them.

Guarantees:
- A provider is opened once and stays open until `SharedProviders.close`, which leaves no sandbox behind.
- If a sandbox fails, the job runs in another one, in at most `MAX_TRIES` sandboxes. A spec that the provider
  refuses is not tried again.
- However a job in a sandbox ends, even by cancellation, the sandbox is closed before control returns. After a
  cancellation, this wait is at most `CLOSE_SECONDS`.
"""

import asyncio
import contextlib
import errno
import logging
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from rookery.core import ExecResult, SandboxError, SandboxSpec
from rookery.core.errors import describe
from rookery.sandboxes import Command, Provider, ProviderHome, Sandbox, open_provider, resolve_spec
from rookery.sandboxes.reaper import reap_scratch, scratch_home
from rookery.scoring.programs import ProgramLimits

log = logging.getLogger("rookery.scoring")

MAX_TRIES: Final = 3
"""Maximum number of sandboxes in which a job is tried before its failure is reported."""
LOST_AFTER_SECONDS: Final = 45.0
"""A sandbox counts as lost if it returns no result this many seconds after the time limit of a command."""

CLOSE_SECONDS: Final = 30.0
SANDBOX_LIMITS: Final = ("wall", "memory", "output", "pids", "disk")
"""Fields of `ProgramLimits` that are also fields of `SandboxSpec`."""

OpenSandbox = Callable[[SandboxSpec], Awaitable[Sandbox]]
"""Create a fresh sandbox from a spec; raise `SandboxError` if that fails."""


class SandboxGate(Protocol):
    """Async context manager that limits how many sandboxes are open at once, such as an `asyncio.Semaphore`."""

    async def __aenter__(self) -> Any: ...

    async def __aexit__(self, *details: Any) -> Any: ...


class FreshRun(NamedTuple):
    """The result of a job, and the number of sandboxes in which it was tried."""

    result: ExecResult
    tries: int


class SharedProviders:
    """Sandbox providers of this process for programs outside of any run.

    Each provider is opened on first use and stays open until `close`. All methods must be called on one event
    loop.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._home: ProviderHome | None = None
        self._open: dict[str, Provider] = {}
        self._resolved: dict[bytes, SandboxSpec] = {}
        self._lock = asyncio.Lock()

    async def resolve(self, spec: SandboxSpec) -> SandboxSpec:
        """Return `spec` with its provider filled in.

        Raise `SandboxError(sandbox.refused)` if `spec` names no provider and none on this machine can isolate
        programs, or if the provider cannot create sandboxes with this spec.
        """
        key = msgspec.msgpack.encode(spec)
        async with self._lock:
            if key not in self._resolved:
                resolved, refusal = await asyncio.to_thread(resolve_spec, spec)
                if refusal:
                    raise SandboxError(refusal, cause="sandbox.refused")
                provider = self._provider(resolved.provider)
                if problems := await asyncio.to_thread(provider.check, resolved):
                    raise SandboxError(" ".join(problems), cause="sandbox.refused")
                self._resolved[key] = resolved
            return self._resolved[key]

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Create a sandbox, which the caller must close."""
        return await self._provider(spec.provider).create(spec, attempt="code")

    def _provider(self, name: str) -> Provider:
        if name not in self._open:
            if self._home is None:
                with contextlib.suppress(OSError):  # leftovers of other processes must not fail this one
                    reap_scratch(now=time.time())
                self._home = self._stack.enter_context(scratch_home(f"code-{os.getpid()}"))
            self._open[name] = open_provider(name, self._home)
        return self._open[name]

    async def close(self) -> None:
        """Close all providers with their sandboxes and daemons, and remove their scratch directory."""
        try:
            for provider in list(self._open.values()):
                await provider.close()
        finally:
            self._open.clear()
            self._home = None
            self._stack.close()


async def run_in_fresh_sandbox(
    open_sandbox: OpenSandbox,
    spec: SandboxSpec,
    job: Callable[[Sandbox], Awaitable[ExecResult]],
    gate: SandboxGate,
) -> FreshRun:
    """Run a job in a fresh sandbox. If the sandbox fails, try again in another one, `MAX_TRIES` times in all.

    `gate` limits how many sandboxes are open at once. Raise the last `SandboxError` if no try succeeds. A spec
    that the provider refuses is not tried again.
    """
    tries = 0
    while True:
        tries += 1
        try:
            async with gate:
                sandbox = await open_sandbox(spec)
                try:
                    result = await job(sandbox)
                finally:
                    await close_sandbox(sandbox)
            if result.status != "lost":
                return FreshRun(result, tries)
            raise SandboxError(
                f"sandbox {sandbox.id} was lost while it ran a program: {result.detail or 'no detail'}"
            )
        except SandboxError as error:
            if error.code == "sandbox.refused" or error.fault != "infra" or tries >= MAX_TRIES:
                raise
            log.warning("a sandbox failed; running the program again in a new sandbox: %s", error)


async def close_sandbox(sandbox: Sandbox) -> None:
    """Close a sandbox and wait until it is closed.

    If this task is cancelled meanwhile, wait at most `CLOSE_SECONDS` and raise the cancellation. Other errors are
    logged and not raised, because the result of the program is already known.
    """
    closing = asyncio.ensure_future(sandbox.close())
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        await asyncio.wait({closing}, timeout=CLOSE_SECONDS)
        raise
    except (SandboxError, OSError) as error:  # the reaper later removes what is left, using its lease
        log.warning("sandbox %s did not close cleanly: %s", sandbox.id, describe(error))


async def write_files(sandbox: Sandbox, files: dict[str, bytes], *, executable: str = "") -> None:
    """Write files into a sandbox and make the file with the path `executable` executable.

    Raise `SandboxError` if a file cannot be written.
    """
    for path, data in files.items():
        try:
            await sandbox.write(path, data, mode=0o755 if path == executable else 0o644)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise SandboxError(
                    f"the program's files do not fit into the sandbox ({describe(error)}): raise limits.disk",
                    cause="sandbox.refused",
                ) from error
            raise SandboxError(f"cannot write the program's file {path!r:.200}: {describe(error)}") from error


async def exec_with_deadline(sandbox: Sandbox, command: Command) -> ExecResult:
    """Run a command. Raise `SandboxError` if there is no result `LOST_AFTER_SECONDS` after its time limit."""
    wall = sandbox.spec.wall if command.wall is None else command.wall
    try:
        async with asyncio.timeout(wall + LOST_AFTER_SECONDS):
            return await sandbox.exec(command)
    except TimeoutError as error:
        raise SandboxError(
            f"sandbox {sandbox.id} did not respond within {LOST_AFTER_SECONDS:g} s after the command's "
            f"time limit of {wall:g} s"
        ) from error


def apply_limits(spec: SandboxSpec, limits: ProgramLimits) -> SandboxSpec:
    """Return `spec` with these limits. A limit that is None keeps the value in `spec`."""
    values = {name: value for name in SANDBOX_LIMITS if (value := getattr(limits, name)) is not None}
    return msgspec.structs.replace(spec, **values)
