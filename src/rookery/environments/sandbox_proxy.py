"""A wrapper of sandboxes that counts the duration of every sandbox operation as the policy's time.

If the deadline of the run stage passes during such an operation, the rollout ends as Truncated(time) and not as a
failure of the environment; see `Context.charge_policy`. Runs in runner processes.
"""

import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from rookery.core import ExecResult, SandboxError, SandboxSpec
from rookery.sandboxes.protocol import (
    Command,
    OnOutput,
    Process,
    Sandbox,
    Shell,
    SupportsKillAll,
    SupportsModelNetwork,
)
from rookery.telemetry import catalogue

ChargePolicy: TypeAlias = Callable[[str, Awaitable[Any]], Awaitable[Any]]
"""Type of `Context.charge_policy`: takes the name of an activity and an awaitable, and awaits it."""


class SandboxProxy:
    """Implements `rookery.sandboxes.protocol.Sandbox` by forwarding to another sandbox.

    Every operation except `close` is awaited through `charge_policy`. Sandboxes created by `fork` are appended to
    `forks`, so that they can be closed when the attempt ends.
    """

    def __init__(self, inner: Sandbox, charge_policy: ChargePolicy, forks: list[Sandbox]) -> None:
        self._inner = inner
        self._charge_policy = charge_policy
        self._forks = forks
        self.id = inner.id
        self.spec = inner.spec

    async def exec(self, command: Command, *, on_output: OnOutput | None = None) -> ExecResult:
        result: ExecResult = await self._charge_policy("sandbox", self._inner.exec(command, on_output=on_output))
        catalogue.SANDBOX_COMMANDS.add(self.spec.provider, result.status)
        return result

    async def start(self, command: Command) -> Process:
        process: Process = await self._charge_policy("sandbox", self._inner.start(command))
        return process

    async def shell(self) -> Shell:
        return ShellProxy(await self._charge_policy("sandbox", self._inner.shell()), self._charge_policy)

    async def read(self, path: str, *, limit: int = 16 << 20, timeout: float = 30.0) -> bytes:
        data: bytes = await self._charge_policy("sandbox", self._inner.read(path, limit=limit, timeout=timeout))
        return data

    async def write(self, path: str, data: bytes, *, mode: int = 0o644, timeout: float = 30.0) -> None:
        await self._charge_policy("sandbox", self._inner.write(path, data, mode=mode, timeout=timeout))

    async def upload(
        self, source: Path, target: str, *, inside: Path | None = None, timeout: float = 120.0
    ) -> None:
        uploading = self._inner.upload(source, target, inside=inside, timeout=timeout)
        await self._charge_policy("sandbox", uploading)

    async def download(self, source: str, target: Path, *, limit: int = 1 << 30, timeout: float = 120.0) -> None:
        downloading = self._inner.download(source, target, limit=limit, timeout=timeout)
        await self._charge_policy("sandbox", downloading)

    async def snapshot(self, *, timeout: float = 60.0) -> str:
        name: str = await self._charge_policy("sandbox", self._inner.snapshot(timeout=timeout))
        return name

    async def fork(self, snapshot: str, *, timeout: float = 60.0, spec: SandboxSpec | None = None) -> Sandbox:
        forking = self._inner.fork(snapshot, timeout=timeout, spec=spec)
        fork: Sandbox = await self._charge_policy("sandbox", forking)
        self._forks.append(fork)
        return SandboxProxy(fork, self._charge_policy, self._forks)

    async def diff(self, snapshot: str, *, timeout: float = 60.0) -> Mapping[str, str]:
        diffing = self._inner.diff(snapshot, timeout=timeout)
        changes: Mapping[str, str] = await self._charge_policy("sandbox", diffing)
        return changes

    @property
    def inside_url(self) -> str:
        """URL at which programs in the sandbox reach the gateway; empty if the sandbox has no network `model`."""
        return self._inner.inside_url if isinstance(self._inner, SupportsModelNetwork) else ""

    def listener(self) -> socket.socket:
        if not isinstance(self._inner, SupportsModelNetwork):
            raise SandboxError(f"sandbox {self.id} does not have the network 'model'", cause="sandbox.refused")
        return self._inner.listener()

    def refuse_connections(self) -> None:
        if isinstance(self._inner, SupportsModelNetwork):
            self._inner.refuse_connections()

    async def kill_all(self, *, user: str | None = None, timeout: float = 30.0) -> None:
        if not isinstance(self._inner, SupportsKillAll):
            raise SandboxError(
                f"sandbox {self.id} does not support killing all processes", cause="sandbox.refused"
            )
        await self._charge_policy("sandbox", self._inner.kill_all(user=user, timeout=timeout))

    async def close(self) -> None:
        await self._inner.close()


class ShellProxy:
    """Implements `rookery.sandboxes.protocol.Shell` by forwarding to another shell through `charge_policy`."""

    def __init__(self, inner: Shell, charge_policy: ChargePolicy) -> None:
        self._inner = inner
        self._charge_policy = charge_policy

    async def run(self, script: str, *, timeout: float, outside: Callable[[], float] | None = None) -> ExecResult:
        running = self._inner.run(script, timeout=timeout, outside=outside)
        result: ExecResult = await self._charge_policy("sandbox", running)
        return result

    async def close(self) -> None:
        await self._inner.close()
