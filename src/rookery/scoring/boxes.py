"""Fresh sandboxes for programs that belong to no run, and what is done in one of them.

Promises:
- providers are opened once and stay warm until they are closed; nothing is left of them then;
- a sandbox that fails is replaced, up to a budget; one that the provider cannot give is not asked for again;
- however the work in a sandbox ends, cancelled too, the sandbox is closed when that returns.
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
from rookery.sandboxes import Command, Home, Provider, Sandbox, open_provider, settle
from rookery.sandboxes.reaper import reap_scratch, scratch
from rookery.scoring.programs import ProgramLimits

log = logging.getLogger("rookery.scoring")

TRIES: Final = 3
"""Sandboxes for one run before its failure is told."""
LATE: Final = 45.0
"""Seconds past a command's limit after which the sandbox counts as lost: it promised to have ended it."""

CLOSE_SECONDS: Final = 30.0
SPECIFIED: Final = ("wall", "memory", "output", "pids", "disk")
"""Limits that are a sandbox's own."""

OpenBox = Callable[[SandboxSpec], Awaitable[Sandbox]]
"""Makes a fresh sandbox of a spec; raises `SandboxError`."""


class Gate(Protocol):
    """A bound on how many sandboxes are open at once."""

    async def __aenter__(self) -> Any: ...

    async def __aexit__(self, *details: Any) -> Any: ...


class Ran(NamedTuple):
    """How a command ended, and in which try."""

    result: ExecResult
    tries: int


class Providers:
    """Sandbox providers of this process that belong to no run: opened once, kept warm. Bound to one event loop."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._home: Home | None = None
        self._open: dict[str, Provider] = {}
        self._settled: dict[bytes, SandboxSpec] = {}
        self._lock = asyncio.Lock()

    async def settle(self, spec: SandboxSpec) -> SandboxSpec:
        """The spec with its provider; `SandboxError(sandbox.refused)` where nothing isolates and nobody
        consented."""
        key = msgspec.msgpack.encode(spec)
        async with self._lock:
            if key not in self._settled:
                found, why_not = await asyncio.to_thread(settle, spec)
                if why_not:
                    raise SandboxError(why_not, cause="sandbox.refused")
                provider = self._provider(found.provider)
                if problems := await asyncio.to_thread(provider.check, found):
                    raise SandboxError(" ".join(problems), cause="sandbox.refused")
                self._settled[key] = found
            return self._settled[key]

    async def create(self, spec: SandboxSpec) -> Sandbox:
        return await self._provider(spec.provider).create(spec, attempt="code")

    def _provider(self, name: str) -> Provider:
        if name not in self._open:
            if self._home is None:
                with contextlib.suppress(OSError):  # what another process left is not worth a failure of ours
                    reap_scratch(now=time.time())
                self._home = self._stack.enter_context(scratch(f"code-{os.getpid()}"))
            self._open[name] = open_provider(name, self._home)
        return self._open[name]

    async def close(self) -> None:
        """Ends every sandbox and keeper; the home is gone after it."""
        try:
            for provider in list(self._open.values()):
                await provider.close()
        finally:
            self._open.clear()
            self._home = None
            self._stack.close()


async def in_fresh_box(
    open_box: OpenBox, spec: SandboxSpec, work: Callable[[Sandbox], Awaitable[ExecResult]], gate: Gate
) -> Ran:
    """`work` in a sandbox that nobody used before; one that fails is replaced, up to a budget.

    A provider that cannot give the spec is not asked again.
    """
    tries = 0
    while True:
        tries += 1
        try:
            async with gate:
                box = await open_box(spec)
                try:
                    result = await work(box)
                finally:
                    await closed(box)
            if result.status != "lost":
                return Ran(result, tries)
            raise SandboxError(f"sandbox {box.id} was lost under a program: {result.detail or 'no detail'}")
        except SandboxError as error:
            if error.code == "sandbox.refused" or error.fault != "infra" or tries >= TRIES:
                raise
            log.warning("a sandbox failed, the program is tried in another one: %s", error)


async def closed(box: Sandbox) -> None:
    """Returns when the sandbox is gone, cancelled or not; a result stands, whatever its sandbox does at its
    end."""
    closing = asyncio.ensure_future(box.close())
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        await asyncio.wait({closing}, timeout=CLOSE_SECONDS)
        raise
    except (SandboxError, OSError) as error:  # the lease and the reaper have what is left
        log.warning("sandbox %s did not close well: %s", box.id, describe(error))


async def write_files(box: Sandbox, files: dict[str, bytes], *, executable: str = "") -> None:
    for path, data in files.items():
        try:
            await box.write(path, data, mode=0o755 if path == executable else 0o644)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise SandboxError(
                    f"the program's files do not fit into the sandbox: raise limits.disk ({describe(error)})",
                    cause="sandbox.refused",
                ) from error
            raise SandboxError(f"the program's file {path!r:.200} cannot be written: {describe(error)}") from error


async def bounded_exec(box: Sandbox, command: Command) -> ExecResult:
    """A sandbox that does not keep its own deadline is lost."""
    wall = box.spec.wall if command.wall is None else command.wall
    try:
        async with asyncio.timeout(wall + LATE):
            return await box.exec(command)
    except TimeoutError as error:
        raise SandboxError(
            f"sandbox {box.id} did not answer within {LATE:g} s after its {wall:g} s limit"
        ) from error


def limited(spec: SandboxSpec, limits: ProgramLimits) -> SandboxSpec:
    """The spec with these limits; what they leave open stays the spec's."""
    said = {name: value for name in SPECIFIED if (value := getattr(limits, name)) is not None}
    return msgspec.structs.replace(spec, **said)
