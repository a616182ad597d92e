"""The interfaces that sandbox providers implement. `conformance` tests every provider against them.

Promises of every provider:
- every call takes a timeout in seconds; when it expires, everything that the call started is dead;
- `exec` does not raise for anything that the program does: the result says how it ended. `SandboxError` means that
  the sandbox is gone or cannot be used;
- output is bounded: head and tail are kept, and the dropped bytes are counted;
- killing a command kills its whole process tree, including daemons and processes that ignore SIGTERM;
- `close` is idempotent and leaves nothing behind.

`Sandbox` and `Provider` are mandatory. The protocols named `Supports…` are optional features of a sandbox, and the
others named `…Provider` are optional features of a provider.
"""

import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from rookery.core import ExecResult, SandboxSpec

if TYPE_CHECKING:
    from rookery.sandboxes.images.progress import OnProgress

Stream: TypeAlias = Literal["stdout", "stderr"]
OnOutput: TypeAlias = Callable[[Stream, bytes], None]


class Command(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One command for a sandbox. Fields that are None are taken from the sandbox's spec."""

    argv: tuple[str, ...]
    stdin: bytes = b""
    cwd: str | None = None
    env: dict[str, str] = {}
    user: str | None = None
    """Name or number of the user. Refused if the provider cannot run commands as another user."""
    wall: float | None = None
    cpu_seconds: float | None = None
    memory: int | None = None
    output: int | None = None
    warm: bool = False
    """`argv` is a `python3 …` command that may be forked from a prewarmed interpreter. It behaves like a newly
    started interpreter. A sandbox without a prewarmed interpreter starts a new one."""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A durable record that a sandbox exists. It survives a SIGKILL of its owner."""

    id: str
    run: str
    attempt: str
    owner_pid: int
    owner_started: int
    """Start time of the owner in clock ticks (field 22 of /proc/PID/stat), because PIDs are reused."""
    deadline: float
    """Unix time after which a reaper may remove the sandbox even if the owner is alive."""
    provider: str
    folder: str
    """The sandbox's directory on the host, which is removed with it."""


class ProviderHome(msgspec.Struct, frozen=True, kw_only=True):
    """Where a provider stores its files."""

    folder: Path
    """The only directory to which a provider may write."""
    run: str
    """The run that owns the leases."""


class Process(Protocol):
    """A command that runs in the background."""

    def output(self) -> AsyncIterator[tuple[Stream, bytes]]:
        """Yield chunks of output until both streams end. A slow reader blocks the program."""
        ...

    async def send(self, data: bytes, *, eof: bool = False) -> None: ...

    async def wait(self, *, timeout: float) -> ExecResult:
        """Wait for the end. `TimeoutError` if the process is still running; it continues."""
        ...

    async def kill(self) -> ExecResult: ...


class Shell(Protocol):
    """A persistent bash: directory, variables, functions and background jobs survive between calls."""

    async def run(self, script: str, *, timeout: float, outside: Callable[[], float] | None = None) -> ExecResult:
        """Run a script. `outside` returns the seconds so far that do not count towards the timeout."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class Sandbox(Protocol):
    """An isolated environment for untrusted programs."""

    id: str
    spec: SandboxSpec

    async def exec(self, command: Command, *, on_output: OnOutput | None = None) -> ExecResult:
        """Run a command to its end, for at most `command.wall` (or the spec's) seconds."""
        ...

    async def start(self, command: Command) -> Process: ...

    async def shell(self) -> Shell: ...

    async def read(self, path: str, *, limit: int = 16 << 20, timeout: float = 30.0) -> bytes: ...

    async def write(self, path: str, data: bytes, *, mode: int = 0o644, timeout: float = 30.0) -> None: ...

    async def upload(
        self, source: Path, target: str, *, inside: Path | None = None, timeout: float = 120.0
    ) -> None:
        """Copy a file or directory of the host into the sandbox, with its modes.

        Symbolic links in a directory are copied as links. No link is followed: a source that is a link raises
        `OSError`. With `inside`, the source must lie below that directory, and no link on the path to it is
        followed.
        """
        ...

    async def download(
        self, source: str, target: Path, *, limit: int = 1 << 30, timeout: float = 120.0
    ) -> None: ...

    async def snapshot(self, *, timeout: float = 60.0) -> str:
        """Save the current file system and return a name for it.

        `SandboxError(sandbox.refused)` if the provider has no snapshots.
        """
        ...

    async def fork(self, snapshot: str, *, timeout: float = 60.0, spec: SandboxSpec | None = None) -> "Sandbox":
        """Create another sandbox with the files of a snapshot.

        `spec` may change user, network, variables and limits; its image is ignored.
        """
        ...

    async def diff(self, snapshot: str, *, timeout: float = 60.0) -> Mapping[str, str]:
        """Return path → added | changed | removed since the snapshot."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class SupportsModelNetwork(Protocol):
    """A sandbox that supports the network `model`: its programs reach one address, which the owner serves."""

    inside_url: str
    """The address as programs in the sandbox use it, `http://127.0.0.1:PORT`; empty if the network is another."""

    def listener(self) -> socket.socket:
        """Return the bound socket behind `inside_url`, for example for `asyncio.start_server(sock=…)`.

        It is a duplicate that the caller closes, at the latest right after the sandbox, because it keeps the
        sandbox's network namespace alive. It does not listen yet: connections are refused until a server calls
        `listen` (a backlog of 1024 is reasonable). `SandboxError(sandbox.refused)` if the network is another.
        """
        ...

    def refuse_connections(self) -> None:
        """Refuse all connections from now on, including queued ones, after the last server has stopped.

        Otherwise programs wait for the next server. Must not be called while a server accepts connections.
        """
        ...


class EgressRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Connections that programs in a sandbox requested to one host and port, with equal outcome."""

    host: str
    """A name or an address; `…` collects the hosts beyond the limit of the log."""
    port: int
    verdict: Literal["allowed", "refused", "failed"]
    why: str = ""
    count: int = 1
    sent: int = 0
    """Bytes that the sandbox sent."""
    received: int = 0


@runtime_checkable
class SupportsEgressRecords(Protocol):
    """A sandbox that supports the network `allow` and records which connections were requested."""

    def egress(self) -> Sequence[EgressRecord]:
        """Return the records. They are available after the sandbox is closed, too."""
        ...


@runtime_checkable
class SupportsLimitCounters(Protocol):
    """A sandbox that counts how often its limits were hit."""

    memory_limit_is_shared: bool
    """Whether the spec's memory limit applies to all processes together."""

    def count_limit_hits(self) -> tuple[int, int]:
        """Return how many processes were killed for lack of memory, and how many forks were refused.

        Numbers that are unknown are 0.
        """
        ...


@runtime_checkable
class SupportsKillAll(Protocol):
    """A sandbox that can kill all its processes from outside, even if no further process can start in it."""

    async def kill_all(self, *, user: str | None = None, timeout: float = 30.0) -> None:
        """Kill every process, or every process of a user; "" is the user of ordinary commands.

        `SandboxError(sandbox.lost)` if one does not end, `sandbox.refused` if the provider cannot do it.
        """
        ...


class Provider(Protocol):
    """Creates sandboxes. Opening a provider starts nothing until the first `create`."""

    name: str
    isolated: bool
    """False if programs run as the user, with access to the user's files. Untrusted programs then need consent."""

    def check(self, spec: SandboxSpec) -> Sequence[str]:
        """Return sentences that say what of this spec the provider cannot provide on this machine."""
        ...

    async def create(self, spec: SandboxSpec, *, attempt: str, timeout: float = 60.0) -> Sandbox:
        """Create a sandbox. A failed or cancelled creation leaves nothing."""
        ...

    async def close(self) -> None:
        """Close every sandbox that is still open."""
        ...


@runtime_checkable
class KeeperProvider(Protocol):
    """A provider whose sandboxes are supervised by one process that all processes of a run share."""

    async def start_keeper(self) -> None:
        """Start that process for as long as this provider is open. Other providers with the same home find it."""
        ...


@runtime_checkable
class ImageFetchingProvider(Protocol):
    """A provider that fetches missing images."""

    on_image_progress: "OnProgress | None"
    """Callback for the progress of a fetch; must be set before the first `create`."""


@runtime_checkable
class PoolableProvider(Protocol):
    """A provider whose sandboxes take long to create, so that the engine prewarms some."""

    poolable: bool


class MachineCheck(msgspec.Struct, frozen=True):
    """One line of `rookery doctor`: a property of this machine that a provider depends on."""

    name: str
    """The provider's name marks its summary: with the status `info` or `missing` the provider cannot be used."""
    status: Literal["ok", "weaker", "missing", "info"]
    """`missing`: no sandbox can be created. `weaker`: sandboxes enforce less."""
    found: str
    fix: str = ""
    """The command or setting that would change it."""


@runtime_checkable
class DiagnosableProvider(Protocol):
    """A provider that contributes checks to `rookery doctor`."""

    def diagnose(self) -> Sequence[MachineCheck]:
        """Examine this machine without changing it, and return the findings."""
        ...


@runtime_checkable
class ReapableProvider(Protocol):
    """A provider whose sandboxes are not removed by killing their marked processes alone. All calls block."""

    def reap_home(self, *, force: bool) -> list[str]:
        """Remove what dead owners left in the home besides leased sandboxes; return names for a report.

        `force` includes live owners.
        """
        ...

    def destroy_leased(self, lease: Lease, *, owner_alive: bool) -> bool:
        """Remove the sandbox of a lease in this home, and the lease; False if that must be tried again later."""
        ...

    def reap_machine(self) -> list[str]:
        """Remove sandboxes of dead owners on this machine whose home may be gone; return their IDs."""
        ...
