"""A sandbox whose calls the attempt's watch sees: time spent there is the policy's, not the environment's."""

import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from rookery.core import ExecResult, SandboxError, SandboxSpec
from rookery.sandboxes.protocol import Command, Listening, OnOutput, Process, Sandbox, Shell, Stopping


class WatchedSandbox:
    """Passes every call on; see `rookery.sandboxes.protocol.Sandbox`."""

    def __init__(
        self, inner: Sandbox, working: Callable[[str, Awaitable[Any]], Awaitable[Any]], forks: list[Sandbox]
    ) -> None:
        self._inner = inner
        self._working = working
        self._forks = forks
        """Where those of it go, for the attempt to close."""
        self.id = inner.id
        self.spec = inner.spec

    async def exec(self, command: Command, *, on_output: OnOutput | None = None) -> ExecResult:
        result: ExecResult = await self._working("sandbox", self._inner.exec(command, on_output=on_output))
        return result

    async def start(self, command: Command) -> Process:
        process: Process = await self._working("sandbox", self._inner.start(command))
        return process

    async def shell(self) -> Shell:
        return WatchedShell(await self._working("sandbox", self._inner.shell()), self._working)

    async def read(self, path: str, *, limit: int = 16 << 20, timeout: float = 30.0) -> bytes:
        data: bytes = await self._working("sandbox", self._inner.read(path, limit=limit, timeout=timeout))
        return data

    async def write(self, path: str, data: bytes, *, mode: int = 0o644, timeout: float = 30.0) -> None:
        await self._working("sandbox", self._inner.write(path, data, mode=mode, timeout=timeout))

    async def upload(
        self, source: Path, target: str, *, inside: Path | None = None, timeout: float = 120.0
    ) -> None:
        await self._working("sandbox", self._inner.upload(source, target, inside=inside, timeout=timeout))

    async def download(self, source: str, target: Path, *, limit: int = 1 << 30, timeout: float = 120.0) -> None:
        await self._working("sandbox", self._inner.download(source, target, limit=limit, timeout=timeout))

    async def snapshot(self, *, timeout: float = 60.0) -> str:
        name: str = await self._working("sandbox", self._inner.snapshot(timeout=timeout))
        return name

    async def fork(self, snapshot: str, *, timeout: float = 60.0, spec: SandboxSpec | None = None) -> Sandbox:
        fork: Sandbox = await self._working("sandbox", self._inner.fork(snapshot, timeout=timeout, spec=spec))
        self._forks.append(fork)
        return WatchedSandbox(fork, self._working, self._forks)

    async def diff(self, snapshot: str, *, timeout: float = 60.0) -> Mapping[str, str]:
        changes: Mapping[str, str] = await self._working("sandbox", self._inner.diff(snapshot, timeout=timeout))
        return changes

    @property
    def inside_url(self) -> str:
        """As `Listening` says; empty where the sandbox has no such address."""
        return self._inner.inside_url if isinstance(self._inner, Listening) else ""

    def listener(self) -> socket.socket:
        if not isinstance(self._inner, Listening):
            raise SandboxError(f"sandbox {self.id} has no network `model`", cause="sandbox.refused")
        return self._inner.listener()

    def unlisten(self) -> None:
        if isinstance(self._inner, Listening):
            self._inner.unlisten()

    async def kill_all(self, *, user: str | None = None, timeout: float = 30.0) -> None:
        if not isinstance(self._inner, Stopping):
            raise SandboxError(f"sandbox {self.id} cannot kill all of its processes", cause="sandbox.refused")
        await self._working("sandbox", self._inner.kill_all(user=user, timeout=timeout))

    async def close(self) -> None:
        await self._inner.close()


class WatchedShell:
    """Passes every call on; see `rookery.sandboxes.protocol.Shell`."""

    def __init__(self, inner: Shell, working: Callable[[str, Awaitable[Any]], Awaitable[Any]]) -> None:
        self._inner = inner
        self._working = working

    async def run(self, script: str, *, timeout: float, outside: Callable[[], float] | None = None) -> ExecResult:
        running = self._inner.run(script, timeout=timeout, outside=outside)
        result: ExecResult = await self._working("sandbox", running)
        return result

    async def close(self) -> None:
        await self._inner.close()
