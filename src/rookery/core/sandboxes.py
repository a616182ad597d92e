"""What a sandbox is asked to be, and how a command in it ended."""

from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec

ExecStatus: TypeAlias = Literal[
    "exited", "signaled", "time_limit", "memory_limit", "output_limit", "process_limit", "disk_limit", "lost"
]
Network: TypeAlias = Literal["none", "model", "allow", "all"]

MB = 1 << 20


class Mount(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A folder of this machine that a sandbox has as its own, read-only: shared by all that name it."""

    source: str
    target: str
    """An absolute path in the sandbox; made where it is not there."""


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Everything about a sandbox, in one value that is passed along and never re-listed."""

    provider: str = ""
    """Empty: the best of this machine; one that does not isolate is then taken only with `untrusted_ok`."""
    image: str | None = None
    memory: int | None = 1024 * MB
    """Bytes, for everything in the sandbox together where the provider can, else per process."""
    cpus: float | None = None
    pids: int | None = 256
    disk: int | None = None
    wall: float = 60.0
    """Seconds for one command, unless the call says otherwise."""
    cpu_seconds: float | None = None
    output: int = MB
    """Bytes kept of each of stdout and stderr: the head and the tail."""
    network: Network = "none"
    allow: tuple[str, ...] = ()
    user: str | None = None
    env: dict[str, str] = {}
    workdir: str | None = None
    gpus: int | None = None
    read_only: bool = False
    """Whether programs may change nothing but the working folder and those for temporary files."""
    mounts: tuple[Mount, ...] = ()
    """Programs that were installed once for many sandboxes, data that many read."""
    labels: dict[str, str] = {}
    """For whoever looks at the provider's sandboxes from outside, where it keeps labels; else they say nothing."""
    untrusted_ok: bool = False
    """Explicit consent to run untrusted programs without isolation where nothing isolates.

    Naming a provider that does not isolate is such a consent too.
    """

    def over(self, other: "SandboxSpec | None", named: Iterable[str] = ()) -> "SandboxSpec":
        """What this spec says, and what `other` says about the rest. `named`: fields that count as said here even
        where they are the default."""
        if other is None:
            return self
        said = {*named, *(name for name, default in _DEFAULTS.items() if getattr(self, name) != default)}
        return msgspec.structs.replace(other, **{name: getattr(self, name) for name in said})


MAX_MOUNTS = 16


def check_mounts(mounts: Iterable[Mount]) -> list[str]:
    """What is wrong with them, whatever a provider can, in sentences."""
    said, targets = [], set[str]()
    for number, mount in enumerate(mounts, 1):
        parts = mount.target.split("/")
        if not mount.target.startswith("/") or ".." in parts or not any(parts) or "\0" in mount.target:
            said.append(f"A mount needs an absolute path in the sandbox, without '..': {mount.target!r} is none.")
        if not mount.source.startswith("/") or "\0" in mount.source:
            said.append(f"A mount needs an absolute path of this machine: {mount.source!r} is none.")
        if mount.target.rstrip("/") in targets:
            said.append(f"Two mounts go to {mount.target!r}.")
        targets.add(mount.target.rstrip("/"))
        if number == MAX_MOUNTS + 1:
            said.append(f"A sandbox has at most {MAX_MOUNTS} mounts.")
    return said


_DEFAULTS = {name: getattr(SandboxSpec(), name) for name in SandboxSpec.__struct_fields__}


class ExecUsage(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a command used: seconds and bytes."""

    wall: float = 0.0
    cpu: float = 0.0
    peak_memory: int = 0


class ExecResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a command ended. Output is the head and the tail; `dropped` counts the bytes between."""

    status: ExecStatus
    exit_code: int | None = None
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_dropped: int = 0
    stderr_dropped: int = 0
    usage: ExecUsage = ExecUsage()
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "exited" and self.exit_code == 0
