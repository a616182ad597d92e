"""The `subprocess` provider: ordinary processes of the current user, without isolation.

The provider runs in the process that creates sandboxes. Each sandbox has a guard, a child process that starts and
kills the sandbox's commands (`sandbox_runtime.guard`).

Guarantees:
- every process that a sandbox starts, also a daemon, is killed when the sandbox is closed or its owner dies;
- no environment variable of the host reaches a program: it gets a small fixed set and those of the spec;
- a failed or cancelled creation leaves no process or file behind.

The provider itself writes only into its home directory.

How limits are enforced: memory by RLIMIT_DATA, per process; the number of processes by counting them up to once
a second and killing the command that has the most; disk by RLIMIT_FSIZE, per file; CPU time by RLIMIT_CPU, per
process and in whole seconds; wall time by the guard. The network is not restricted: a spec with the network `none`
is accepted, because the provider declares that it does not isolate. A `Command` can lower the memory limit of its
sandbox, never raise it. A background process has no wall limit unless its command sets one.
"""

import asyncio
import contextlib
import getpass
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rookery.core import SandboxError, SandboxSpec
from rookery.sandbox_runtime import processes
from rookery.sandboxes import leases, transfers
from rookery.sandboxes.channel import GuardChannel
from rookery.sandboxes.guarded_sandbox import DEFAULT_PATH, GuardedSandbox, close_all, open_or_close
from rookery.sandboxes.protocol import Command, ProviderHome


class SubprocessProvider:
    """Creates sandboxes that consist of a working directory and supervised processes, without isolation."""

    name = "subprocess"
    isolated = False
    sandbox_class: "type[SubprocessSandbox]"
    """The class of the sandboxes that `create` returns."""

    def __init__(self, home: ProviderHome) -> None:
        self._home = home
        self.open_sandboxes: set[SubprocessSandbox] = set()

    def check(self, spec: SandboxSpec) -> Sequence[str]:
        problems = []
        if spec.image is not None:
            problems.append(
                f"The subprocess provider has no images; use the local or docker provider for {spec.image!r}."
            )
        if spec.network == "allow" or spec.allow:
            from rookery.sandboxes.egress.rules import find_rule_problems  # slow to import, rarely needed

            problems += find_rule_problems(spec)
        if spec.network in ("model", "allow"):
            problems.append(
                "The subprocess provider cannot restrict the network to the model or to an allow-list."
            )
        if spec.gpus or spec.read_only or spec.mounts:
            problems.append("The subprocess provider supports no GPUs, no mounts and no read-only file systems.")
        if spec.cpus is not None:
            problems.append("The subprocess provider cannot limit the number of CPUs.")
        if spec.user is not None and spec.user not in (_user(), str(os.getuid())):
            problems.append(f"The subprocess provider runs programs as the current user, not as {spec.user!r}.")
        if spec.workdir is not None and not _inside(spec.workdir):
            problems.append(f"The working directory {spec.workdir!r} must be a relative path without '..'.")
        if sys.platform != "linux":
            problems.append("The subprocess provider needs Linux.")
        return problems

    async def create(self, spec: SandboxSpec, *, attempt: str, timeout: float = 60.0) -> "SubprocessSandbox":
        problems = self.check(spec)
        if problems:
            raise SandboxError(" ".join(problems), cause="sandbox.refused")
        sandbox = self.sandbox_class(spec, self._home, attempt, self.open_sandboxes.discard)
        self.open_sandboxes.add(sandbox)
        return await open_or_close(sandbox, sandbox.open(), timeout)

    async def close(self) -> None:
        await close_all(list(self.open_sandboxes))


class SubprocessSandbox(GuardedSandbox):
    """A sandbox without isolation: a directory, a lease, and a guard process that runs the commands."""

    provider = SubprocessProvider.name

    def __init__(self, spec: SandboxSpec, home: ProviderHome, attempt: str, forget: Callable[[Any], None]) -> None:
        identity = f"s{secrets.token_hex(8)}"
        super().__init__(identity, spec, leases.make_marker(home.run, identity), forget)
        self._folder = home.folder.resolve()  # what a program's `pwd` says
        self.root = self._folder / self.id
        self._home = home
        self._attempt = attempt

    @property
    def work(self) -> Path:
        """The directory on the host that is the default working directory of commands, and their HOME."""
        return self.root / "work"

    async def open(self) -> None:
        path = leases.write_lease(
            self._folder, leases.create_lease(self.id, self._home.run, self._attempt, self.provider, self.root)
        )
        self.root.mkdir(mode=0o700)
        for name in ("work", "tmp"):
            (self.root / name).mkdir()
        (self.work / (self.spec.workdir or ".")).mkdir(parents=True, exist_ok=True)
        self._null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._base_env = {
            "PATH": f"{DEFAULT_PATH}:{Path(sys.base_prefix) / 'bin'}",
            "HOME": str(self.work),
            "TMPDIR": str(self.root / "tmp"),
            "LANG": "C.UTF-8",
            **self.spec.env,
            processes.SANDBOX_VARIABLE: self._marker,
        }
        self.channel = GuardChannel.launch(self.root, self._marker)
        numbers = (max(0, number or 0) for number in (self.spec.memory, self.spec.disk, self.spec.pids))
        await self.channel.configure((str(self.root), str(path), *map(str, numbers)))

    def get_root(self) -> transfers.SandboxRoot:
        return transfers.SandboxRoot(
            str(self.root), ("work",), {str(self.root / top): (top,) for top in ("work", "tmp")}
        )

    def get_cwd(self, command: Command) -> str:
        return os.path.join(self.work, self.spec.workdir or "", command.cwd or "")  # noqa: PTH118  (a program's own text)

    def is_default_user(self, user: str) -> bool:
        return user == _user()

    async def clean_up(self) -> None:
        if self.root.exists() or leases.lease_path(self._folder, self.id).exists():
            # The guard died or never started, so we clean up.
            left = await asyncio.to_thread(leases.destroy_sandbox, self._folder, self.id, self._marker)
            if left:
                raise SandboxError(f"{left} processes of sandbox {self.id} could not be killed")


SubprocessProvider.sandbox_class = SubprocessSandbox


def _user() -> str:
    with contextlib.suppress(KeyError, OSError):
        return getpass.getuser()
    return str(os.getuid())


def _inside(path: str) -> bool:
    return not path.startswith("/") and ".." not in Path(path).parts
