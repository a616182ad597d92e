"""The interfaces that sandbox providers implement. `conformance` tests every provider against them.

Guarantees of every provider:
- every call has a time limit in seconds; when it expires, every process that the call started is killed;
- `exec` does not raise for anything that the program does: the result says how it ended. `SandboxError` means that
  the sandbox is gone or cannot be used;
- the kept output of a command is bounded: its head and its tail are kept, and the dropped bytes are counted;
- killing a command kills its whole process tree, including daemons and processes that ignore SIGTERM;
- `close` is idempotent and leaves no process, file or lease behind.

`Sandbox` and `Provider` are mandatory. The protocols named `Supports…` are optional features of a sandbox, and the
others named `…Provider` are optional features of a provider.
"""

import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from rookery.core import ExecResult, SandboxSpec, SandboxUsage

if TYPE_CHECKING:
    from rookery.sandboxes.images.progress import OnProgress

Stream: TypeAlias = Literal["stdout", "stderr"]
OnOutput: TypeAlias = Callable[[Stream, bytes], None]


class Command(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One command for a sandbox. For a field that is None, the value of the sandbox's spec is used."""

    argv: tuple[str, ...]
    stdin: bytes = b""
    cwd: str | None = None
    env: dict[str, str] = {}
    """Environment variables that are added to those of the sandbox's spec, or replace them."""
    user: str | None = None
    """Name or number of the user to run as. `SandboxError(sandbox.refused)` if the provider cannot do that."""
    wall: float | None = None
    """Limit of the elapsed time in seconds."""
    cpu_seconds: float | None = None
    memory: int | None = None
    """Memory limit in bytes."""
    output: int | None = None
    """Number of bytes of stdout and of stderr that are kept."""
    warm: bool = False
    """If True, `argv` is a `python3 …` command that may be forked from an interpreter that already runs, which is
    faster. The program sees no difference. A sandbox without such an interpreter starts a new one."""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A file that records that a sandbox exists and which process owns it.

    It survives a SIGKILL of the owner, so that a reaper can find and remove the sandbox.
    """

    id: str
    run: str
    attempt: str
    owner_pid: int
    owner_started: int
    """Start time of the owner in clock ticks (field 22 of /proc/PID/stat). It tells the owner from a later process
    with the same PID."""
    deadline: float
    """Unix time after which a reaper may remove the sandbox even if the owner is alive."""
    provider: str
    folder: str
    """The sandbox's directory on the host, which is removed with the sandbox."""


class ProviderHome(msgspec.Struct, frozen=True, kw_only=True):
    """The directory in which a provider stores its files, and the run that they belong to."""

    folder: Path
    """The only directory to which a provider may write."""
    run: str
    """Name of the run that the sandboxes belong to. It is recorded in their leases."""


class Process(Protocol):
    """A command that runs in the background of a sandbox."""

    def output(self) -> AsyncIterator[tuple[Stream, bytes]]:
        """Yield chunks of stdout and stderr until both streams end. A slow reader blocks the program."""
        ...

    async def send(self, data: bytes, *, eof: bool = False) -> None: ...

    async def wait(self, *, timeout: float) -> ExecResult:
        """Wait until the process has ended. If it has not after `timeout` seconds, raise `TimeoutError`.

        The process continues after a timeout.
        """
        ...

    async def kill(self) -> ExecResult: ...


class Shell(Protocol):
    """A persistent bash: working directory, variables, functions and background jobs survive between calls."""

    async def run(self, script: str, *, timeout: float, outside: Callable[[], float] | None = None) -> ExecResult:
        """Run a script and return its output and exit code.

        `outside` returns how many seconds so far do not count towards `timeout`, for example because the script
        waited for a model.
        """
        ...

    async def close(self) -> None: ...


@runtime_checkable
class Sandbox(Protocol):
    """An isolated environment for untrusted programs."""

    id: str
    spec: SandboxSpec

    async def exec(self, command: Command, *, on_output: OnOutput | None = None) -> ExecResult:
        """Run a command and return its result. It is killed after `command.wall` seconds (by default `spec.wall`).

        `on_output` is called with each chunk of output as it arrives.
        """
        ...

    async def start(self, command: Command) -> Process: ...

    async def shell(self) -> Shell: ...

    async def read(self, path: str, *, limit: int = 16 << 20, timeout: float = 30.0) -> bytes: ...

    async def write(self, path: str, data: bytes, *, mode: int = 0o644, timeout: float = 30.0) -> None: ...

    async def upload(
        self, source: Path, target: str, *, inside: Path | None = None, timeout: float = 120.0
    ) -> None:
        """Copy a file or directory of the host into the sandbox. File modes are preserved.

        Symbolic links in a directory are copied as links. No link is followed: a source that is a link raises
        `OSError`. With `inside`, the source must lie below that directory, and no link on the path to it is
        followed.
        """
        ...

    async def download(
        self, source: str, target: Path, *, limit: int = 1 << 30, timeout: float = 120.0
    ) -> None: ...

    async def snapshot(self, *, timeout: float = 60.0) -> str:
        """Save the current state of the sandbox's files and return a name for this snapshot.

        Raise `SandboxError(sandbox.refused)` if the provider does not support snapshots.
        """
        ...

    async def fork(self, snapshot: str, *, timeout: float = 60.0, spec: SandboxSpec | None = None) -> "Sandbox":
        """Create another sandbox whose files are those of a snapshot.

        The new sandbox has the spec of this one, or `spec` if it is given, which may have another user, network,
        environment and limits. The provider and image of `spec` are ignored.
        """
        ...

    async def diff(self, snapshot: str, *, timeout: float = 60.0) -> Mapping[str, str]:
        """Return the paths that differ from the snapshot, each with "added", "changed" or "removed"."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class SupportsModelNetwork(Protocol):
    """A sandbox that supports the network `model`: its programs reach one address and nothing else.

    The process that created the sandbox serves that address, for example to forward requests to a model.
    """

    inside_url: str
    """The address for programs in the sandbox, `http://127.0.0.1:PORT`; empty if `spec.network` is another one."""

    def listener(self) -> socket.socket:
        """Return the bound socket behind `inside_url`, for example for `asyncio.start_server(sock=…)`.

        The caller gets a duplicate and must close it, at the latest right after the sandbox is closed, because the
        open socket keeps the sandbox's network namespace alive. The socket does not listen yet: connections are
        refused until a server calls `listen` (a backlog of 1024 is reasonable). Raise
        `SandboxError(sandbox.refused)` if the sandbox has another network than `model`.
        """
        ...

    def refuse_connections(self) -> None:
        """Refuse all connections of programs from now on, including those in the backlog.

        To be called after the last server has stopped; without it, programs would wait for another server. Must
        not be called while a server accepts connections.
        """
        ...


class EgressRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All connections to one host and port that programs in a sandbox requested and that had the same outcome."""

    host: str
    """A host name or an IP address. When the log is full, further hosts are counted together as `…`."""
    port: int
    verdict: Literal["allowed", "refused", "failed"]
    reason: str = ""
    """The reason why the connections were refused or failed."""
    count: int = 1
    """Number of requested connections."""
    sent: int = 0
    """Bytes that the sandbox sent."""
    received: int = 0
    """Bytes that the sandbox received."""


@runtime_checkable
class SupportsEgressRecords(Protocol):
    """A sandbox that supports the network `allow` and records which connections were requested."""

    def egress(self) -> Sequence[EgressRecord]:
        """Return the records of requested connections. Also works after the sandbox is closed."""
        ...


@runtime_checkable
class SupportsUsage(Protocol):
    """A sandbox that measures the resources that its programs use."""

    def read_usage(self) -> SandboxUsage:
        """Return the resources that were used so far or, of a closed sandbox, until it was closed."""
        ...


@runtime_checkable
class SupportsLimitCounters(Protocol):
    """A sandbox that counts how often its memory and process limits were hit."""

    memory_limit_is_shared: bool
    """True if the memory limit applies to all processes of the sandbox together, not to each process."""

    def count_limit_hits(self) -> tuple[int, int]:
        """Return how many processes the OOM killer has killed and how many forks the kernel has refused.

        A number that is unknown is 0.
        """
        ...


@runtime_checkable
class SupportsKillAll(Protocol):
    """A sandbox that can kill all its processes from outside, even if no further process can start in it."""

    async def kill_all(self, *, user: str | None = None, timeout: float = 30.0) -> None:
        """Kill every process of the sandbox, or every process of one user, and wait until they are gone.

        `user=""` means the user of commands that name none. Raise `SandboxError(sandbox.lost)` if a process does
        not end, and `SandboxError(sandbox.refused)` if the provider cannot do this.
        """
        ...


class Provider(Protocol):
    """Creates sandboxes. A provider starts no process before the first `create`."""

    name: str
    isolated: bool
    """False if programs run as the current user, with access to that user's files. Such a provider is used only if
    a spec names it or has `untrusted_ok`."""

    def check(self, spec: SandboxSpec) -> Sequence[str]:
        """Return one sentence for each part of `spec` that the provider does not support on this machine."""
        ...

    async def create(self, spec: SandboxSpec, *, attempt: str, timeout: float = 60.0) -> Sandbox:
        """Create a sandbox for `attempt`, whose name is recorded in the lease.

        A failed or cancelled creation leaves no process, file or lease behind.
        """
        ...

    async def close(self) -> None:
        """Close every sandbox that is still open."""
        ...


@runtime_checkable
class KeeperProvider(Protocol):
    """A provider whose sandboxes are supervised by a keeper, a daemon that all processes of a run can share."""

    async def start_keeper(self) -> None:
        """Start keepers that run until this provider is closed. Providers with the same home connect to them."""
        ...


@runtime_checkable
class ImageFetchingProvider(Protocol):
    """A provider that downloads or builds the image of a spec if it is not on this machine."""

    on_image_progress: "OnProgress | None"
    """Called with the progress while an image is fetched; must be set before the first `create`."""


@runtime_checkable
class PoolableProvider(Protocol):
    """A provider that says whether its sandboxes should be created in advance, because creating one takes long."""

    poolable: bool


@runtime_checkable
class SeparateNetworkProvider(Protocol):
    """A provider that says whether `127.0.0.1` in a sandbox with the network `all` is another interface than the
    loopback interface of this machine. It is the same one for providers without this attribute."""

    own_loopback: bool


@runtime_checkable
class RemoteProvider(Protocol):
    """A provider that says whether its sandboxes are on other machines, which do not have this machine's files.

    Providers without this attribute create sandboxes on this machine.
    """

    remote: bool


class MachineCheck(msgspec.Struct, frozen=True):
    """One line of `rookery doctor`: a property of this machine that a provider depends on."""

    name: str
    """The checked property. A check named like the provider is its summary: if that has the status `info` or
    `missing`, the provider cannot be used."""
    status: Literal["ok", "weaker", "missing", "info"]
    """`missing`: no sandbox can be created. `weaker`: sandboxes isolate or limit less. `info`: neither."""
    found: str
    """The finding of the check."""
    fix: str = ""
    """The command or setting that would fix it."""


@runtime_checkable
class DiagnosableProvider(Protocol):
    """A provider that contributes checks to `rookery doctor`."""

    def diagnose(self) -> Sequence[MachineCheck]:
        """Examine this machine without changing it, and return the findings."""
        ...


@runtime_checkable
class ReapableProvider(Protocol):
    """A provider whose leftover sandboxes need more than killing their processes, for example removing containers.

    The owner of a sandbox is the process that created it. All methods block.
    """

    def reap_home(self, *, force: bool) -> list[str]:
        """Remove what dead owners left in the provider's home, except leased sandboxes; return names for a report.

        With `force`, also remove what belongs to live owners.
        """
        ...

    def destroy_leased(self, lease: Lease, *, owner_alive: bool) -> bool:
        """Remove the sandbox of a lease in the provider's home, and the lease.

        False if the sandbox could not be removed now. The lease then stays, so that it is tried again later.
        """
        ...

    def reap_machine(self) -> list[str]:
        """Remove all sandboxes of dead owners on this machine, even if their home is gone; return their IDs."""
        ...
