"""The program that runs sandboxes for a process on another machine. Runs where the sandboxes are.

It opens one provider, normally `local`, and serves the calls that arrive on its standard input. Its sandboxes are
those of that provider, with the same limits and isolation.

Guarantees:
- when its user closes the connection, all sandboxes are closed and the program exits;
- when the connection breaks, commands go on, and its user can continue over another connection for a limited time;
- what a killed program left behind is removed by the next one that starts on the machine;
- of all programs of one user on a machine together, no more sandboxes are open than the configured capacity.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import hmac
import os
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from rookery import __version__
from rookery.core import ExecResult, SandboxError, SandboxSpec
from rookery.sandbox_runtime import syscalls
from rookery.sandboxes import reaper, transfers
from rookery.sandboxes.archives import extract_trusted, pack
from rookery.sandboxes.local.provider import LocalProvider
from rookery.sandboxes.protocol import (
    Command,
    Process,
    Provider,
    ProviderHome,
    Sandbox,
    Shell,
    SupportsEgressRecords,
    SupportsKillAll,
    SupportsLimitCounters,
    SupportsModelNetwork,
)
from rookery.sandboxes.remote.link import CHUNK_BYTES, EVENT, Call, Connection, Link, copy_both_ways
from rookery.sandboxes.remote.resumable import ResumableConnection
from rookery.sandboxes.subprocess_provider import SubprocessProvider, SubprocessSandbox

PROTOCOL = 2
"""Version of the calls. Both ends must have the same one."""
BACKLOG = 1024
ACCEPT_SECONDS = 5.0
MAX_OFFERS = 64
"""Number of programs that may be connected at the same time without having shown the token."""
ACCEPT_PAUSE_SECONDS = 0.1
"""Delay after a failed `accept`, for example because this program has no free file descriptor."""
SETTLE_SECONDS = 3.0
"""A broken SSH connection closes standard input and output within this time."""
FULL = "sandbox.quota"


class Slots:
    """A bounded number of places for sandboxes, shared by all programs of one user on this machine.

    A place is a lock on a file, which the kernel releases when its holder dies.
    """

    def __init__(self, directory: Path, capacity: int) -> None:
        self._directory = directory
        self._capacity = capacity

    def take(self) -> int:
        """Take a place and return the file descriptor that holds it. Raise `SandboxError` if all are taken."""
        if not self._capacity:
            return -1
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in range(self._capacity):
            fd = os.open(self._directory / f"slot-{number}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
            else:
                return fd
        raise SandboxError(f"all {self._capacity} places for sandboxes of this host are taken", cause=FULL)


class HostedSandbox:
    """A sandbox of the host's provider with what its remote user has open in it."""

    def __init__(self, sandbox: Sandbox, slot: int) -> None:
        self.sandbox = sandbox
        self.slot = slot
        self.shells: dict[int, Shell] = {}
        self.server: asyncio.Server | None = None
        self.counters: dict[str, Any] = {}
        """Limit counters and egress records that were last sent to the user."""
        # Checks of protocols are slow, and the counters are read after each command.
        self._limits = sandbox if isinstance(sandbox, SupportsLimitCounters) else None
        allows = sandbox.spec.network == "allow"
        self._egress = sandbox if allows and isinstance(sandbox, SupportsEgressRecords) else None

    def read_counters(self) -> dict[str, Any]:
        """Return the sandbox's current limit counters and egress records."""
        found: dict[str, Any] = {}
        if self._limits is not None:
            with contextlib.suppress(OSError):
                found["limits"] = self._limits.count_limit_hits()
        if self._egress is not None:
            found["egress"] = list(self._egress.egress())
        return found


class SandboxHost:
    """Serves the calls of one process that uses sandboxes."""

    def __init__(self, provider: Provider, slots: Slots, state: Path) -> None:
        self._provider = provider
        self._slots = slots
        self._state = state
        self._sandboxes: dict[str, HostedSandbox] = {}
        self._last_shell = 0
        self._port_server: asyncio.Server | None = None
        self.link: Link | None = None

    async def serve(self, call: Call, method: str, arguments: Any) -> Any:
        """Run one call and return its result."""
        if method == "hello":
            return {"version": __version__, "protocol": PROTOCOL, "python": sys.version.split()[0]}
        if method == "check":
            return await self._check(_load_spec(arguments))
        if method == "create":
            return await self._create(*arguments)
        if method == "open_port":
            return await self._open_port(arguments)
        hosted = self._find(arguments[0])
        result = await getattr(self, f"_do_{method}")(call, hosted, *arguments[1:])
        self._send_counters(hosted)
        return result

    async def _check(self, spec: SandboxSpec) -> str:
        """Create a sandbox, run a command in it and close it. Return what failed; empty on success."""
        try:
            sandbox = await self._provider.create(spec, attempt="check")
            try:
                result = await sandbox.exec(Command(argv=("true",)))
            finally:
                await sandbox.close()
        except SandboxError as error:
            return str(error)
        return "" if result.ok else f"a command in a sandbox ended with {result.status} {result.detail}"

    def _find(self, identity: str) -> HostedSandbox:
        if identity not in self._sandboxes:
            raise SandboxError(f"sandbox {identity} is closed or does not exist on this host")
        return self._sandboxes[identity]

    def _send_counters(self, hosted: HostedSandbox) -> None:
        """Send the sandbox's counters to its user if they have changed, before the next result or output."""
        found = hosted.read_counters()
        if found != hosted.counters and self.link is not None:
            hosted.counters = found
            self.link.send(EVENT, 0, (hosted.sandbox.id, found))

    # ---- life

    async def _create(self, spec: Any, attempt: str, timeout: float) -> dict[str, Any]:
        slot = self._slots.take()
        try:
            sandbox = await self._provider.create(_load_spec(spec), attempt=attempt, timeout=timeout)
        except BaseException:
            if slot >= 0:
                os.close(slot)
            raise
        return self._register(sandbox, slot)

    def _register(self, sandbox: Sandbox, slot: int) -> dict[str, Any]:
        self._sandboxes[sandbox.id] = HostedSandbox(sandbox, slot)
        return {
            "id": sandbox.id,
            "url": sandbox.inside_url if isinstance(sandbox, SupportsModelNetwork) else "",
            "shared": isinstance(sandbox, SupportsLimitCounters) and sandbox.memory_limit_is_shared,
        }

    async def _do_close(self, _: Call, hosted: HostedSandbox) -> None:
        self._send_counters(hosted)
        self._sandboxes.pop(hosted.sandbox.id, None)
        if hosted.server is not None:
            hosted.server.close()
        try:
            await hosted.sandbox.close()
        finally:
            if hosted.slot >= 0:
                os.close(hosted.slot)
                hosted.slot = -1

    # ---- commands

    async def _do_exec(self, call: Call, hosted: HostedSandbox, command: Any, stream: bool) -> ExecResult:
        def on_output(name: str, data: bytes) -> None:
            call.send_event((name, data))

        return await hosted.sandbox.exec(load_command(command), on_output=on_output if stream else None)

    async def _do_start(self, call: Call, hosted: HostedSandbox, command: Any) -> None:
        """Run a background process; return when it has ended and its output is sent, or the user lost interest."""
        process = await hosted.sandbox.start(load_command(command))
        wishes: asyncio.Queue[str] = asyncio.Queue()
        call.on_event = wishes.put_nowait
        call.send_event(("started", None))
        async with asyncio.TaskGroup() as tasks:
            workers = [tasks.create_task(_feed(call, process))]
            try:
                while (wish := await wishes.get()) != "forget":
                    if wish == "read":
                        workers.append(tasks.create_task(self._send_output(call, hosted, process)))
                        await asyncio.sleep(0)  # `wait` must see the reader
                    if wish in ("read", "wait"):
                        workers.append(tasks.create_task(self._report_end(call, hosted, process)))
                    elif wish == "kill":
                        await process.kill()
                        workers.append(tasks.create_task(self._report_end(call, hosted, process)))
            except asyncio.CancelledError:
                await process.kill()
                raise
            finally:
                for worker in workers:
                    worker.cancel()

    async def _send_output(self, call: Call, hosted: HostedSandbox, process: Process) -> None:
        with contextlib.suppress(BrokenPipeError):
            async for name, data in process.output():
                self._send_counters(hosted)
                for at in range(0, len(data), CHUNK_BYTES - 1):
                    await call.write((b"1" if name == "stdout" else b"2") + data[at : at + CHUNK_BYTES - 1])
        call.end_writing()

    async def _report_end(self, call: Call, hosted: HostedSandbox, process: Process) -> None:
        try:
            result = await process.wait(timeout=1e8)
        except SandboxError as error:
            result = ExecResult(status="lost", detail=str(error))
        self._send_counters(hosted)
        call.send_event(("ended", result))

    async def _do_shell(self, _: Call, hosted: HostedSandbox) -> int:
        shell = await hosted.sandbox.shell()
        self._last_shell += 1
        hosted.shells[self._last_shell] = shell
        return self._last_shell

    async def _do_run_script(
        self, call: Call, hosted: HostedSandbox, number: int, script: bytes, timeout: float
    ) -> ExecResult:
        outside = 0.0

        def on_event(value: float) -> None:
            nonlocal outside
            outside = value

        call.on_event = on_event
        if number not in hosted.shells:
            raise SandboxError("the shell is closed: open another one with Sandbox.shell()")
        text = script.decode("utf-8", "surrogateescape")
        return await hosted.shells[number].run(text, timeout=timeout, outside=lambda: outside)

    async def _do_close_shell(self, _: Call, hosted: HostedSandbox, number: int) -> None:
        shell = hosted.shells.pop(number, None)
        if shell is not None:
            await shell.close()

    async def _do_kill_all(self, _: Call, hosted: HostedSandbox, user: str | None, timeout: float) -> None:
        if not isinstance(hosted.sandbox, SupportsKillAll):
            raise SandboxError("this provider cannot kill all processes of a sandbox", cause="sandbox.refused")
        await hosted.sandbox.kill_all(user=user, timeout=timeout)

    # ---- files

    async def _do_read(self, call: Call, hosted: HostedSandbox, path: str, limit: int, timeout: float) -> None:
        await call.write(await hosted.sandbox.read(path, limit=limit, timeout=timeout))
        call.end_writing()

    async def _do_write(self, call: Call, hosted: HostedSandbox, path: str, mode: int, timeout: float) -> None:
        data = bytearray()
        while part := await call.read():
            data += part
        await hosted.sandbox.write(path, bytes(data), mode=mode, timeout=timeout)

    async def _do_upload(self, call: Call, hosted: HostedSandbox, target: str, timeout: float) -> None:
        with tempfile.TemporaryDirectory(dir=self._state) as staging, tempfile.TemporaryFile(dir=staging) as file:
            while part := await call.read():
                file.write(part)
            file.seek(0)
            await asyncio.to_thread(extract_trusted, file, Path(staging))
            await hosted.sandbox.upload(Path(staging) / "top", target, timeout=timeout)

    async def _do_download(
        self, call: Call, hosted: HostedSandbox, source: str, limit: int, timeout: float
    ) -> None:
        with tempfile.TemporaryDirectory(dir=self._state) as staging, tempfile.TemporaryFile(dir=staging) as file:
            top = Path(staging) / "top"
            await hosted.sandbox.download(source, top, limit=limit, timeout=timeout)
            await asyncio.to_thread(pack, file, top)
            file.seek(0)
            while part := file.read(CHUNK_BYTES):
                await call.write(part)
            call.end_writing()

    # ---- snapshots

    async def _do_snapshot(self, _: Call, hosted: HostedSandbox, timeout: float) -> str:
        return await hosted.sandbox.snapshot(timeout=timeout)

    async def _do_fork(
        self, _: Call, hosted: HostedSandbox, snapshot: str, timeout: float, spec: Any
    ) -> dict[str, Any]:
        slot = self._slots.take()
        try:
            wanted = None if spec is None else _load_spec(spec)
            return self._register(await hosted.sandbox.fork(snapshot, timeout=timeout, spec=wanted), slot)
        except BaseException:
            if slot >= 0:
                os.close(slot)
            raise

    async def _do_diff(self, _: Call, hosted: HostedSandbox, snapshot: str, timeout: float) -> dict[str, str]:
        return dict(await hosted.sandbox.diff(snapshot, timeout=timeout))

    # ---- connections to the user

    async def _do_listen(self, _: Call, hosted: HostedSandbox) -> None:
        """Accept connections of the sandbox's programs; each becomes a call to the sandbox's user."""
        if hosted.server is None and isinstance(hosted.sandbox, SupportsModelNetwork):
            hosted.server = await self._listen(hosted.sandbox.id, sock=hosted.sandbox.listener())

    async def _open_port(self, port: int) -> int:
        """Accept connections to a loopback port, 0 for any; each becomes a call to the user. Return the port."""
        self._port_server = await self._listen("", host="127.0.0.1", port=port)
        return int(self._port_server.sockets[0].getsockname()[1])

    async def _listen(self, identity: str, **address: Any) -> asyncio.Server:
        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            assert self.link is not None
            with contextlib.suppress(SandboxError, OSError):
                await self.link.call("connect", identity, use=lambda call: copy_both_ways(call, reader, writer))
            writer.close()

        return await asyncio.start_server(forward, backlog=BACKLOG, **address)

    async def _do_refuse(self, _: Call, hosted: HostedSandbox) -> None:
        if hosted.server is not None:
            hosted.server.close()
        if isinstance(hosted.sandbox, SupportsModelNetwork):
            hosted.sandbox.refuse_connections()


class MachineSandbox(SubprocessSandbox):
    """The machine on which this program runs, as one sandbox. Whoever created the machine isolates it."""

    provider = "machine"
    inside_url = ""
    _socket: socket.socket | None = None

    async def open(self) -> None:
        if self.spec.network == "model":
            self._socket = socket.socket()
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(("127.0.0.1", 0))
            self.inside_url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        await super().open()

    def get_root(self) -> transfers.SandboxRoot:
        work = Path(self.get_cwd(Command(argv=())))
        return transfers.SandboxRoot("/", work.parts[1:], {"/": ()}, hidden=("proc", "dev", "sys"))

    def listener(self) -> socket.socket:
        if self._socket is None:
            raise SandboxError("only a sandbox with the network 'model' has a listener", cause="sandbox.refused")
        return self._socket.dup()

    def refuse_connections(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # not listening
                self._socket.shutdown(socket.SHUT_RD)

    async def clean_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
        await super().clean_up()


class MachineProvider(SubprocessProvider):
    """Offers the machine on which this program runs as a sandbox."""

    name = "machine"
    sandbox_class = MachineSandbox

    def check(self, spec: SandboxSpec) -> Sequence[str]:
        return super().check(msgspec.structs.replace(spec, network="all", allow=(), workdir=None))


async def _feed(call: Call, process: Process) -> None:
    """Write what arrives for a process to its standard input."""
    try:
        while data := await call.read():
            await process.send(data)
        await process.send(b"", eof=True)
    except BrokenPipeError:
        call.send_event(("input closed", None))
        while await call.read():
            pass


PROVIDERS: dict[str, Callable[[ProviderHome], Provider]] = {
    "local": LocalProvider,
    "machine": MachineProvider,
    "subprocess": SubprocessProvider,
}
"""The providers that a host can open, by name."""


def _load_spec(value: Any) -> SandboxSpec:
    return msgspec.convert(value, SandboxSpec)


def dump_command(command: Command) -> dict[str, Any]:
    """Return a command with its texts as bytes, because they need not be valid Unicode."""
    value: dict[str, Any] = {name: getattr(command, name) for name in command.__struct_fields__}
    value["argv"] = [os.fsencode(word) for word in command.argv]
    value["env"] = [(os.fsencode(name), os.fsencode(text)) for name, text in command.env.items()]
    value["cwd"] = None if command.cwd is None else os.fsencode(command.cwd)
    return value


def load_command(value: dict[str, Any]) -> Command:
    """Return the command that `dump_command` encoded."""
    value["argv"] = tuple(os.fsdecode(word) for word in value["argv"])
    value["env"] = {os.fsdecode(name): os.fsdecode(text) for name, text in value["env"]}
    value["cwd"] = None if value["cwd"] is None else os.fsdecode(value["cwd"])
    return Command(**value)


class PipeConnection:
    """The standard input and output of this program, or those that another program handed over."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        source: asyncio.BaseTransport,
        writer: asyncio.StreamWriter,
        eof_ends: bool,
    ) -> None:
        self._reader = reader
        self._source = source
        self._writer = writer
        self._eof_ends = eof_ends
        self.ended = False
        """True if the user has closed standard input, so that the connection is not broken but at its end."""
        self.control: socket.socket | None = None
        """Closed with the connection. The program that handed the files over ends then."""

    @classmethod
    async def open(cls, stdin: BinaryIO, stdout: BinaryIO, *, eof_ends: bool) -> "PipeConnection":
        """Use two files. With `eof_ends`, an end of `stdin` alone is the user's end, not a broken connection."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=1 << 20)
        source, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), stdin)
        try:
            transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, stdout)
        except BaseException:
            source.close()
            raise
        return cls(reader, source, asyncio.StreamWriter(transport, protocol, None, loop), eof_ends)

    async def read(self) -> bytes:
        data = await self._reader.read(1 << 18)
        if not data and self._eof_ends:
            await asyncio.sleep(SETTLE_SECONDS)
            self.ended = not self._writer.is_closing()
        return data

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def close(self) -> None:
        self._source.close()
        if not self._writer.is_closing():
            self._writer.transport.abort()
        if self.control is not None:
            self.control.close()


class ResumeListener:
    """Accepts new connections of the process that uses the sandboxes. Only that process knows the token.

    Any program of the machine can connect, too. Such programs can neither delay others nor use up descriptors.
    """

    def __init__(self, token: str, first: PipeConnection, *, eof_ends: bool) -> None:
        self._token = token.encode()
        self._latest = first
        self._eof_ends = eof_ends
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # The name is visible to all programs of the machine, so it must not reveal the token.
        self._socket.bind(b"\0rookery-host-" + hashlib.sha256(self._token).hexdigest().encode())
        self._socket.listen(8)
        self._socket.setblocking(False)
        self._arrived: asyncio.Queue[PipeConnection] = asyncio.Queue()

    async def get(self) -> Connection | None:
        """Wait for the next connection and return it. None if the user has ended the latest one."""
        if self._latest.ended and self._arrived.empty():
            return None
        self._latest = await self._arrived.get()
        return self._latest

    async def serve(self, stream: ResumableConnection) -> None:
        """Let `stream` continue on each connection that arrives, until cancelled."""
        loop = asyncio.get_running_loop()
        offers: dict[asyncio.Task[None], None] = {}  # the oldest first
        async with asyncio.TaskGroup() as tasks:
            while True:
                try:
                    control, _ = await loop.sock_accept(self._socket)
                except OSError:
                    await asyncio.sleep(ACCEPT_PAUSE_SECONDS)
                    continue
                if len(offers) >= MAX_OFFERS:
                    oldest = next(iter(offers))
                    del offers[oldest]
                    oldest.cancel()
                offer = tasks.create_task(self._take_offer(control, stream))
                offers[offer] = None
                offer.add_done_callback(lambda ended: offers.pop(ended, None))
                await asyncio.sleep(0)  # `sock_accept` does not let other tasks run while programs connect

    async def _take_offer(self, control: socket.socket, stream: ResumableConnection) -> None:
        """Use the files that the program at the other end of `control` sends, if it may use this host."""
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, ValueError):
            stack.callback(control.close)
            files = await self._receive_files(control)
            if files is None:
                return
            for file in files:
                stack.callback(file.close)
            connection = await PipeConnection.open(*files, eof_ends=self._eof_ends)
            connection.control = control
            stack.pop_all()
            while not self._arrived.empty():
                await self._arrived.get_nowait().close()
            self._arrived.put_nowait(connection)
            stream.disconnect()

    async def _receive_files(self, control: socket.socket) -> tuple[BinaryIO, BinaryIO] | None:
        """Return the files that the program at the other end of `control` sends, or None if it may not."""
        _, user, _ = struct.unpack("3i", control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.geteuid():
            return None
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(control, readable.set)
        try:
            async with asyncio.timeout(ACCEPT_SECONDS):
                await readable.wait()
        finally:
            loop.remove_reader(control)
        token, fds, _, _ = socket.recv_fds(control, 2 * len(self._token), 2, socket.MSG_CMSG_CLOEXEC)
        if len(fds) != 2 or not hmac.compare_digest(token, self._token):
            for fd in fds:
                os.close(fd)
            return None
        return os.fdopen(fds[0], "rb", 0), os.fdopen(fds[1], "wb", 0)

    def close(self) -> None:
        self._socket.close()
        while not self._arrived.empty():
            self._arrived.get_nowait()


async def run(settings: dict[str, Any]) -> None:
    """Serve the process at the other end of standard input and output until it closes the connection."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        if os.getpid() == 1:  # without a handler, programs of the sandbox cannot end PID 1 with a signal
            signal.signal(number, signal.SIG_DFL)
        else:
            loop.add_signal_handler(number, stopping.set)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it may come with the end of a connection
    eof_ends = settings["eof_ends"]
    first = await PipeConnection.open(sys.stdin.buffer, sys.stdout.buffer, eof_ends=eof_ends)
    listener = ResumeListener(settings["token"], first, eof_ends=eof_ends)
    stream = ResumableConnection(first, listener.get, seconds=settings["resume_seconds"])
    await asyncio.to_thread(reaper.reap_scratch, now=time.time())
    with contextlib.closing(listener), reaper.scratch_home(settings["run"]) as home:
        provider = PROVIDERS[settings["provider"]](home)
        slots = Slots(Path(settings["state"]) / "slots", settings["capacity"])
        host = SandboxHost(provider, slots, home.folder)
        link = host.link = Link(stream, host.serve, odd=False, name="the process that uses the sandboxes")
        tasks: list[asyncio.Future[Any]] = [
            loop.create_task(work) for work in (listener.serve(stream), stopping.wait())
        ]
        try:
            await asyncio.wait({link.lost, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            try:
                await link.close()
            finally:
                await provider.close()


def main() -> None:
    """Run the program. Its first argument is the number of a file descriptor with the settings, a JSON object."""
    syscalls.set_dumpable(False)  # other programs of the same user must not read the token from its memory
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        settings = msgspec.json.decode(file.read())
    asyncio.run(run(settings))


if __name__ == "__main__":
    main()
