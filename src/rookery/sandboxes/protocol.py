"""The protocol every provider implements; conformance is tested by one suite for all of them.

Promises, of every provider:
- every call takes a timeout in seconds, and when it passes, what the call started is dead;
- `exec` never raises for what the program did: the result says how it ended; `SandboxError` is for the
  sandbox being gone or unusable;
- output is bounded: head and tail are kept, what was dropped is counted;
- killing means the whole tree, setsid, double fork and TERM-ignorers included;
- `close` is idempotent, runs on every path, and leaves nothing behind.
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
    """One command for a sandbox. What is None comes from the sandbox's spec."""

    argv: tuple[str, ...]
    stdin: bytes = b""
    cwd: str | None = None
    env: dict[str, str] = {}
    user: str | None = None
    """A name or a number, where the sandbox has other users than its own; else it is refused."""
    wall: float | None = None
    cpu_seconds: float | None = None
    memory: int | None = None
    output: int | None = None
    warm: bool = False
    """`argv` is a `python3 …` command. Where the sandbox holds a warm interpreter, the command is forked from it
    instead of started anew, and sees what a new one would see; elsewhere it is started as any other."""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox's right to exist. It lies on disk, so that it outlives a SIGKILL of its owner."""

    id: str
    run: str
    attempt: str
    owner_pid: int
    owner_started: int
    """The owner's start time in clock ticks (field 22 of /proc/PID/stat): pids are used again, pairs are not."""
    deadline: float
    """Unix time after which a reaper may take it even from a live owner."""
    provider: str
    folder: str
    """The sandbox's own folder on the host; removed with it."""


class Process(Protocol):
    """A background command."""

    def output(self) -> AsyncIterator[tuple[Stream, bytes]]:
        """Chunks as they come, until both streams end; bounded: a slow reader blocks the program, not us."""
        ...

    async def send(self, data: bytes, *, eof: bool = False) -> None: ...

    async def wait(self, *, timeout: float) -> ExecResult:
        """Raises TimeoutError when it is still running; the process goes on."""
        ...

    async def kill(self) -> ExecResult: ...


class Shell(Protocol):
    """A persistent bash: cwd, variables, functions and background jobs stay between calls."""

    async def run(self, script: str, *, timeout: float, outside: Callable[[], float] | None = None) -> ExecResult:
        """`outside` tells how many seconds so far do not count: those that the script spent waiting for us."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class Sandbox(Protocol):
    """The box untrusted programs run in."""

    id: str
    spec: SandboxSpec

    async def exec(self, command: Command, *, on_output: OnOutput | None = None) -> ExecResult:
        """Runs to the end, at most `command.wall` (or the spec's) seconds."""
        ...

    async def start(self, command: Command) -> Process: ...

    async def shell(self) -> Shell: ...

    async def read(self, path: str, *, limit: int = 16 << 20, timeout: float = 30.0) -> bytes: ...

    async def write(self, path: str, data: bytes, *, mode: int = 0o644, timeout: float = 30.0) -> None: ...

    async def upload(
        self, source: Path, target: str, *, inside: Path | None = None, timeout: float = 120.0
    ) -> None:
        """Copy a file or a folder of this machine into the sandbox, in one transfer, with its modes.

        Symbolic links in a folder are copied as links. No link is ever followed: a source that is one is an
        `OSError`. `inside`: a folder that holds the source; then no link is followed on the way to it either.
        """
        ...

    async def download(
        self, source: str, target: Path, *, limit: int = 1 << 30, timeout: float = 120.0
    ) -> None: ...

    async def snapshot(self, *, timeout: float = 60.0) -> str:
        """A name for the file system as it is now. Providers that cannot raise `SandboxError(sandbox.refused)`."""
        ...

    async def fork(self, snapshot: str, *, timeout: float = 60.0, spec: SandboxSpec | None = None) -> "Sandbox":
        """Another sandbox with the files of the snapshot. `spec`: where it differs in user, network, variables or
        limits; its image is the snapshot's, whatever that says."""
        ...

    async def diff(self, snapshot: str, *, timeout: float = 60.0) -> Mapping[str, str]:
        """Path → added | changed | removed, since the snapshot."""
        ...

    async def close(self) -> None: ...


class Provider(Protocol):
    """Makes sandboxes. One per process and provider; opening one starts nothing until the first `create`."""

    name: str
    isolated: bool
    """False: programs run as the user, on the user's files. Choosing it for untrusted work needs consent."""

    def check(self, spec: SandboxSpec) -> Sequence[str]:
        """What of this spec the provider cannot give on this machine, in sentences; empty when it can."""
        ...

    async def create(self, spec: SandboxSpec, *, attempt: str, timeout: float = 60.0) -> Sandbox:
        """A failed or cancelled creation leaves nothing."""
        ...

    async def close(self) -> None:
        """Closes every sandbox still open."""
        ...


@runtime_checkable
class Keeping(Protocol):
    """A provider whose sandboxes are held by a process that all processes of a run on this machine share."""

    async def keep(self) -> None:
        """Starts that process, for as long as this provider is open. Providers of the same home then find it."""
        ...


@runtime_checkable
class Listening(Protocol):
    """A sandbox that can have the network `model`: programs in it reach one address, and who serves that."""

    inside_url: str
    """The address, as programs in the sandbox write it: `http://127.0.0.1:PORT`. Empty where it has none."""

    def listener(self) -> socket.socket:
        """The socket behind that address, to be served from outside: by `aiohttp.web.SockSite`, by
        `asyncio.start_server(sock=…)`, or by another process that it is passed to.

        A duplicate, and the caller's to close, before or right after the sandbox: it keeps the sandbox's
        network. It is bound and does not listen: a program that connects is refused until a server listens on
        it, which both of those do (`backlog=1024` is a good number). `SandboxError(sandbox.refused)` where the
        network is another.
        """
        ...

    def unlisten(self) -> None:
        """Refuse programs from now on, for good, those in the queue too: for when the last server is gone. Without
        it they wait for the next one. Not while one serves: it would be told of an error without end."""
        ...


@runtime_checkable
class Fetching(Protocol):
    """A provider that fetches images that are not there yet."""

    on_image: "OnProgress | None"
    """Told how far that is; to be set before the first `create`."""


@runtime_checkable
class Pooled(Protocol):
    """A provider whose sandboxes take long to make: an engine makes some ahead of need."""

    pooled: bool


class Egress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What programs in a sandbox asked for of the network, and what came of it; the same things are counted."""

    host: str
    """A name or an address; `…` stands for those above a number that is kept one by one."""
    port: int
    verdict: Literal["allowed", "refused", "failed"]
    why: str = ""
    count: int = 1
    sent: int = 0
    """Bytes, by the sandbox."""
    received: int = 0


@runtime_checkable
class Reaching(Protocol):
    """A sandbox that can have the network `allow`: it keeps a bounded record, which outlives its closing."""

    def egress(self) -> Sequence[Egress]: ...


@runtime_checkable
class Counting(Protocol):
    """A sandbox that tells how often its limits struck, so that who was refused something knows by what."""

    held_together: bool
    """Whether the spec's memory holds for all processes together."""

    def struck(self) -> tuple[int, int]:
        """How many processes were ended for want of memory so far, and how many refused; 0 where not known."""
        ...


@runtime_checkable
class Stopping(Protocol):
    """A sandbox that can kill all of its processes from outside, also when no further process can start in it."""

    async def kill_all(self, *, user: str | None = None, timeout: float = 30.0) -> None:
        """Return when every process is gone, or every process of a user; "" is the user of ordinary commands.

        `SandboxError(sandbox.lost)` if one does not end, `sandbox.refused` if the provider cannot do it."""
        ...


class Home(msgspec.Struct, frozen=True, kw_only=True):
    """Where a provider may write: below `folder` and nowhere else; `run` names the owner of its leases."""

    folder: Path
    run: str
