"""The specification of a sandbox, and the result of a command in it."""

from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec

ExecStatus: TypeAlias = Literal[
    "exited", "signaled", "time_limit", "memory_limit", "output_limit", "process_limit", "disk_limit", "lost"
]
Network: TypeAlias = Literal["none", "model", "allow", "all"]

MB = 1 << 20


class Mount(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A directory of this machine that is mounted read-only in a sandbox."""

    source: str
    target: str
    """Absolute path in the sandbox; created if it does not exist."""


_LIMITS = ("memory", "cpus", "pids", "disk", "wall", "cpu_seconds", "output")


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """All settings of a sandbox: provider, image, limits, network and mounts. Immutable."""

    provider: str = ""
    """Name of the implementation of sandboxes, such as `docker`. Empty means the best provider that this machine
    has; one that does not isolate is then used only with `untrusted_ok`."""
    image: str | None = None
    memory: int | None = 1024 * MB
    """Memory limit in bytes for all processes of the sandbox together. A provider that cannot limit the total
    applies it to each process."""
    cpus: float | None = None
    pids: int | None = 256
    disk: int | None = None
    wall: float = 60.0
    """Default time limit of one command in seconds."""
    cpu_seconds: float | None = None
    output: int = MB
    """Maximum number of bytes that are kept of a command's stdout, and of its stderr. Of longer output, the head
    and the tail are kept."""
    network: Network = "none"
    allow: tuple[str, ...] = ()
    user: str | None = None
    env: dict[str, str] = {}
    workdir: str | None = None
    gpus: int | None = None
    read_only: bool = False
    """If True, programs can write only to the working directory and the directories for temporary files."""
    mounts: tuple[Mount, ...] = ()
    """Directories shared by many sandboxes, such as installed programs and data sets."""
    labels: dict[str, str] = {}
    """Labels of containers, for tools that list them. Ignored by providers without labels."""
    untrusted_ok: bool = False
    """True allows untrusted programs to run without isolation if this machine has no provider that isolates.

    Naming a provider that does not isolate in `provider` counts as consent too.
    """

    def __post_init__(self) -> None:
        for name in _LIMITS:
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and value > 0):
                raise ValueError(f"sandbox.{name} must be a number above 0, got {value!r}")

    def over(self, other: "SandboxSpec | None", named: Iterable[str] = ()) -> "SandboxSpec":
        """Return this spec, with the values of `other` for fields that are not set here.

        A field counts as set if its value differs from the default or if its name is in `named`. Fields that hold
        a dictionary or a tuple are replaced as a whole, not merged.
        """
        if other is None:
            return self
        names = {*named, *(name for name, default in _DEFAULTS.items() if getattr(self, name) != default)}
        return msgspec.structs.replace(other, **{name: getattr(self, name) for name in names})


MAX_MOUNTS = 16


def check_mounts(mounts: Iterable[Mount]) -> list[str]:
    """Return messages about invalid paths, duplicate targets and too many mounts. Valid mounts give an empty list.

    The checks are those that do not depend on the sandbox provider.
    """
    problems, targets = list[str](), set[str]()
    for number, mount in enumerate(mounts, 1):
        parts = mount.target.split("/")
        if not mount.target.startswith("/") or ".." in parts or not any(parts) or "\0" in mount.target:
            problems.append(f"The target of a mount must be an absolute path without '..', not {mount.target!r}.")
        if not mount.source.startswith("/") or "\0" in mount.source:
            problems.append(
                f"The source of a mount must be an absolute path of this machine, not {mount.source!r}."
            )
        if mount.target.rstrip("/") in targets:
            problems.append(f"Two mounts have the target {mount.target!r}.")
        targets.add(mount.target.rstrip("/"))
        if number == MAX_MOUNTS + 1:
            problems.append(f"A sandbox can have at most {MAX_MOUNTS} mounts.")
    return problems


_DEFAULTS = {name: getattr(SandboxSpec(), name) for name in SandboxSpec.__struct_fields__}


class ExecUsage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Resource usage of a command: seconds of wall and CPU time, peak memory in bytes."""

    wall: float = 0.0
    cpu: float = 0.0
    peak_memory: int = 0


class SandboxUsage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Resources that the programs in one sandbox used from its creation to its end."""

    id: str
    provider: str = ""
    seconds: float = 0.0
    """Time for which the sandbox was open, including the time in which it was prewarmed."""
    commands: int = 0
    """Number of commands, shells and workers that were started."""
    cpu: float = 0.0
    """CPU time in seconds."""
    peak_memory: int = 0
    """Peak memory in bytes: of the whole sandbox if its cgroup counts it, otherwise of its largest command. 0 if
    it is unknown."""
    peak_processes: int = 0
    """Highest number of processes at the same time, as the kernel counts it (cgroup v2, Linux 6.1). Otherwise the
    number of processes when the sandbox was closed."""


class ExecResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The end of a command in a sandbox, with its output and resource usage.

    Of long output, only the head and the tail are kept; `stdout_dropped` and `stderr_dropped` are the numbers of
    bytes that were left out in between.
    """

    status: ExecStatus
    exit_code: int | None = None
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_dropped: int = 0
    stderr_dropped: int = 0
    usage: ExecUsage = ExecUsage()
    detail: str = ""
    state_lost: bool = False
    """True if the shell was replaced, so that its working directory, variables and functions are lost."""

    @property
    def ok(self) -> bool:
        return self.status == "exited" and self.exit_code == 0
