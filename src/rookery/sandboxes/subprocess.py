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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rookery.core import SandboxError, SandboxSpec
from rookery.sandboxes import leases, procs, transfers
from rookery.sandboxes.channel import Channel
from rookery.sandboxes.guarded import PATH, GuardedSandbox, close_all, opened
from rookery.sandboxes.protocol import Command, Home


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
        if spec.network == "allow" or spec.allow:
            from rookery.sandboxes import egress_rules  # slow to import, and few sandboxes name any

            said += egress_rules.problems(spec)
        if spec.network in ("model", "allow"):
            said.append("The subprocess provider cannot restrict the network to the model or to an allow-list.")
        if spec.gpus or spec.read_only or spec.mounts:
            said.append(
                "The subprocess provider can neither give out GPUs, nor mount folders, nor keep files from being "
                "changed."
            )
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
        return await opened(sandbox, sandbox.open(), timeout)

    async def close(self) -> None:
        await close_all(list(self._open))


class SubprocessSandbox(GuardedSandbox):
    """A folder, a lease, and a guard with what it started."""

    provider = SubprocessProvider.name

    def __init__(self, spec: SandboxSpec, home: Home, attempt: str, forget: Callable[[Any], None]) -> None:
        identity = f"s{secrets.token_hex(8)}"
        super().__init__(identity, spec, leases.marker(home.run, identity), forget)
        self._folder = home.folder.resolve()  # what a program's `pwd` says
        self.root = self._folder / self.id
        self._home = home
        self._attempt = attempt

    @property
    def work(self) -> Path:
        """Where commands run, and their HOME."""
        return self.root / "work"

    async def open(self) -> None:
        path = leases.write(
            self._folder, leases.lease(self.id, self._home.run, self._attempt, self.provider, self.root)
        )
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

    def place(self) -> transfers.Place:
        return transfers.Place(
            str(self.root), ("work",), {str(self.root / top): (top,) for top in ("work", "tmp")}
        )

    def folder_of(self, command: Command) -> str:
        return os.path.join(self.work, self.spec.workdir or "", command.cwd or "")  # noqa: PTH118  (a program's own text)

    def may_be(self, user: str) -> bool:
        return user == _user()

    async def clean(self) -> None:
        if self.root.exists() or leases.path_of(self._folder, self.id).exists():
            # The guard is dead, or never lived: it left the cleaning to us.
            left = await asyncio.to_thread(leases.destroy, self._folder, self.id, self._marker)
            if left:
                raise SandboxError(f"{left} processes of sandbox {self.id} would not die")


def _user() -> str:
    with contextlib.suppress(KeyError, OSError):
        return getpass.getuser()
    return str(os.getuid())


def _inside(path: str) -> bool:
    return not path.startswith("/") and ".." not in Path(path).parts
