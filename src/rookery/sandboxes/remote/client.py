"""Sandboxes that a program on another machine runs (`remote.host`). Runs in the owner's process.

Guarantees:
- every call on a sandbox whose host is lost raises `HostLost` at once. If no program of the sandbox can end the
  host, the cause is `sandbox.host`, which never counts against the policy;
- a cancelled call has ended on the host, too, or the host is lost;
- files that arrive from a host are not trusted.
"""

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rookery import __version__
from rookery.core import ExecResult, SandboxError, SandboxSpec
from rookery.core.lifetimes import detached_context
from rookery.sandboxes import archives
from rookery.sandboxes.protocol import Command, EgressRecord, OnOutput, Stream
from rookery.sandboxes.remote.host import PROTOCOL, dump_command
from rookery.sandboxes.remote.link import CHUNK_BYTES, Call, Connection, HostLost, Link, copy_both_ways

T = TypeVar("T")
GRACE_SECONDS = 45.0
"""A host that has not answered this many seconds after the deadline of a call counts as lost."""
START_SECONDS = 30.0
"""Time limit for the start of a background process."""
MAX_CONNECTIONS = 512
"""Number of connections that the programs of one sandbox with the network `model` can have at the same time."""
OUTSIDE_SECONDS = 0.2
"""Interval at which a shell's host is told how many seconds do not count towards the script's timeout."""
_MAX_OVERHEAD = 64 << 20
"""Number of bytes that an archive may have for headers and padding, in addition to the content of its files."""
_INVALID_TEXT = ExecResult(
    status="exited", exit_code=126, detail="an argument or variable of the command is not valid text"
)


class RemoteHost:
    """The connection to one program that runs sandboxes. Bound to the running event loop."""

    def __init__(self, connection: Connection, name: str, provider: str, *, cause: str = HostLost.cause) -> None:
        """Use `connection` to a host that is called `name` in messages, for the provider `provider`.

        `cause` is the cause of the error after the connection ended.
        """
        self.name = name
        self.provider = provider
        self.sandboxes: dict[str, RemoteSandbox] = {}
        self._background: set[asyncio.Task[None]] = set()
        self.link = Link(connection, self._serve, odd=True, name=name, on_event=self._on_counters, cause=cause)

    async def greet(self) -> str:
        """Check that the host's program matches this one; return its Python version."""
        found = await self.link.call("hello")
        if (found["version"], found["protocol"]) != (__version__, PROTOCOL):
            raise SandboxError(
                f"{self.name} runs Rookery {found['version']}, and this process runs {__version__}: both must be "
                "the same version",
                cause="sandbox.create",
            )
        return str(found["python"])

    async def check(self, spec: SandboxSpec) -> str:
        """Let the host create a sandbox for `spec` and close it. Return what failed; empty on success."""
        return str(await self.link.call("check", spec))

    async def create(self, spec: SandboxSpec, *, attempt: str, timeout: float) -> "RemoteSandbox":
        """Create a sandbox on the host. A failed or cancelled creation leaves nothing behind there."""
        work = self.link.call("create", (spec, attempt, timeout), on_unused=self.close_unused)
        return self.add(spec, await self.bounded(work, timeout))

    def close_unused(self, info: Mapping[str, Any]) -> None:
        """Close a sandbox that the host created while the creation was being cancelled."""

        async def close() -> None:
            with contextlib.suppress(SandboxError):  # a lost host closes its sandboxes itself
                await self.bounded(self.link.call("close", (info["id"],)), 60.0)

        task = asyncio.get_running_loop().create_task(close(), context=detached_context())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def add(self, spec: SandboxSpec, info: Mapping[str, Any]) -> "RemoteSandbox":
        sandbox = self.sandboxes[info["id"]] = RemoteSandbox(self, spec, info)
        return sandbox

    async def bounded(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """Await `work`, which the host ends after `timeout` seconds itself. A host that does not is given up."""
        try:
            async with asyncio.timeout(timeout + GRACE_SECONDS) as scope:
                return await work
        except TimeoutError:
            if scope.expired():
                raise HostLost(f"{self.name} did not answer within {timeout + GRACE_SECONDS:g} s") from None
            raise

    async def _serve(self, call: Call, method: str, identity: Any) -> None:
        """Serve a call of the host: a program in a sandbox connected to the address of the network `model`."""
        sandbox = self.sandboxes.get(identity)
        if method != "connect" or sandbox is None:
            raise SandboxError(f"unexpected call {method!r:.50}", cause="sandbox.refused")
        if sandbox.connections >= MAX_CONNECTIONS:
            raise SandboxError(f"sandbox {sandbox.id} has too many connections", cause="sandbox.quota")
        sandbox.connections += 1
        try:
            reader, writer = await asyncio.open_unix_connection(sandbox.listener_path)
            await copy_both_ways(call, reader, writer)
        finally:
            sandbox.connections -= 1

    def _on_counters(self, value: Any) -> None:
        identity, counters = value
        if identity in self.sandboxes:
            self.sandboxes[identity].set_counters(counters)

    async def close(self) -> None:
        """Close all sandboxes and the connection."""
        try:
            await asyncio.gather(*(sandbox.close() for sandbox in list(self.sandboxes.values())))
        finally:
            await self.link.close()
            if self._background:
                await asyncio.wait(self._background)


class RemoteSandbox:
    """A sandbox on another machine. Implements `Sandbox` and the optional protocols of local sandboxes."""

    def __init__(self, host: RemoteHost, spec: SandboxSpec, info: Mapping[str, Any]) -> None:
        self.id: str = info["id"]
        self.spec = spec
        self.provider = host.provider
        self.inside_url: str = info["url"]
        self.memory_limit_is_shared: bool = info["shared"]
        self.on_closed: Callable[[], Coroutine[Any, Any, None]] | None = None
        """Called once when the sandbox is closed, to free what belongs to it outside of its host."""
        self.connections = 0
        """Number of open connections of the sandbox's programs to the address of the network `model`."""
        self._host = host
        self._limits = (0, 0)
        self._egress: tuple[EgressRecord, ...] = ()
        self._listener: socket.socket | None = None
        self._listener_file = -1
        """File descriptor of the listener's socket file, which has no name."""
        self._refuses_connections = False
        self._processes: set[RemoteProcess] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._closing: asyncio.Task[None] | None = None

    def _require_open(self) -> Link:
        if self._closing is not None:
            raise SandboxError(f"sandbox {self.id} is closed")
        return self._host.link

    async def _call(
        self,
        method: str,
        *arguments: Any,
        timeout: float,
        use: "Callable[[Call], Coroutine[Any, Any, None]] | None" = None,
        on_event: Callable[[Any], None] | None = None,
        on_unused: Callable[[Any], None] | None = None,
    ) -> Any:
        link = self._require_open()
        work = link.call(method, (self.id, *arguments), use=use, on_event=on_event, on_unused=on_unused)
        return await self._host.bounded(work, timeout)

    # ---- commands

    async def exec(self, command: Command, *, on_output: OnOutput | None = None) -> ExecResult:
        errors: list[Exception] = []
        failed = asyncio.Event()

        def on_event(value: Any) -> None:
            if on_output is not None and not errors:
                try:
                    on_output(*value)
                except Exception as error:  # noqa: BLE001  (raised below)
                    errors.append(error)
                    failed.set()

        try:
            dumped = dump_command(command)
        except UnicodeEncodeError:
            self._require_open()
            return _INVALID_TEXT
        wall = self.spec.wall if command.wall is None else command.wall
        stream = on_output is not None
        work = self._call("exec", dumped, stream, timeout=max(wall, 0.0), on_event=on_event)
        if not stream:
            return _load_result(await work)
        running, stopping = asyncio.ensure_future(work), asyncio.ensure_future(failed.wait())
        try:
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if errors:
                raise errors[0]
            return _load_result(await running)
        finally:
            running.cancel()
            stopping.cancel()
            await asyncio.wait({running, stopping})

    async def start(self, command: Command) -> "RemoteProcess":
        try:
            dumped = dump_command(command)
        except UnicodeEncodeError:
            raise SandboxError(
                f"the process cannot be started: {_INVALID_TEXT.detail}", cause="sandbox.refused"
            ) from None
        process = RemoteProcess(self._require_open(), (self.id, dumped), self._processes.discard)
        await self._host.bounded(process.started(), START_SECONDS)
        self._processes.add(process)
        return process

    async def shell(self) -> "RemoteShell":
        return RemoteShell(self, await self._call("shell", timeout=30.0))

    async def run_script(
        self, shell: int, script: str, timeout: float, outside: Callable[[], float] | None
    ) -> ExecResult:
        """Run a script in one of the sandbox's shells."""
        try:
            text = script.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            return ExecResult(status="exited", exit_code=126, detail="the script is not valid Unicode text")
        if outside is None:
            return _load_result(await self._call("run_script", shell, text, timeout, timeout=timeout))

        async def report(call: Call) -> None:
            while not call.ended:
                call.send_event(outside())
                await asyncio.sleep(OUTSIDE_SECONDS)

        link = self._require_open()
        call = link.open_call("run_script", (self.id, shell, text, timeout))
        reporting = asyncio.ensure_future(report(call))
        try:
            return _load_result(await link.wait(call))
        finally:
            reporting.cancel()
            await asyncio.wait({reporting})

    async def close_shell(self, shell: int) -> None:
        if self._closing is None:
            await self._call("close_shell", shell, timeout=30.0)

    async def kill_all(self, *, user: str | None = None, timeout: float = 30.0) -> None:
        await self._call("kill_all", user, timeout, timeout=timeout)

    # ---- files

    async def read(self, path: str, *, limit: int = 16 << 20, timeout: float = 30.0) -> bytes:
        data = bytearray()

        async def receive(call: Call) -> None:
            while part := await call.read():
                data.extend(part)
                if len(data) > limit:
                    raise SandboxError(f"{self._host.name} sent more bytes than requested")

        await self._call("read", path, limit, timeout, timeout=timeout, use=receive)
        return bytes(data)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644, timeout: float = 30.0) -> None:
        async def send(call: Call) -> None:
            await call.write(data)
            call.end_writing()

        await self._call("write", path, mode, timeout, timeout=timeout, use=send)

    async def upload(
        self, source: Path, target: str, *, inside: Path | None = None, timeout: float = 120.0
    ) -> None:
        self._require_open()
        with tempfile.TemporaryFile() as file:
            await asyncio.to_thread(archives.pack, file, source, inside)
            file.seek(0)

            async def send(call: Call) -> None:
                while part := file.read(CHUNK_BYTES):
                    await call.write(part)
                call.end_writing()

            await self._call("upload", target, timeout, timeout=timeout, use=send)

    async def download(self, source: str, target: Path, *, limit: int = 1 << 30, timeout: float = 120.0) -> None:
        with tempfile.TemporaryFile() as file:

            async def receive(call: Call) -> None:
                while part := await call.read():
                    file.write(part)
                    if file.tell() > limit + _MAX_OVERHEAD:
                        raise SandboxError(f"{self._host.name} sent more bytes than requested")

            await self._call("download", source, limit, timeout, timeout=timeout, use=receive)
            file.seek(0)
            await asyncio.to_thread(archives.unpack, file, target, source, limit)

    # ---- snapshots

    async def snapshot(self, *, timeout: float = 60.0) -> str:
        return str(await self._call("snapshot", timeout, timeout=timeout))

    async def fork(
        self, snapshot: str, *, timeout: float = 60.0, spec: SandboxSpec | None = None
    ) -> "RemoteSandbox":
        unused = self._host.close_unused
        info = await self._call("fork", snapshot, timeout, spec, timeout=timeout, on_unused=unused)
        merged = msgspec.structs.replace(spec or self.spec, provider=self.spec.provider, image=self.spec.image)
        return self._host.add(merged, info)

    async def diff(self, snapshot: str, *, timeout: float = 60.0) -> Mapping[str, str]:
        return dict(await self._call("diff", snapshot, timeout, timeout=timeout))

    # ---- counters and networks

    def set_counters(self, value: Mapping[str, Any]) -> None:
        """Store the counters that the host sent."""
        self._limits = msgspec.convert(value.get("limits", self._limits), tuple[int, int])
        self._egress = msgspec.convert(value.get("egress", self._egress), tuple[EgressRecord, ...])

    def count_limit_hits(self) -> tuple[int, int]:
        return self._limits

    def egress(self) -> Sequence[EgressRecord]:
        return self._egress

    @property
    def listener_path(self) -> str:
        """Path of the Unix socket that receives the connections of the sandbox's programs."""
        if self._listener_file < 0 or self._refuses_connections:
            raise ConnectionRefusedError("no server listens for this sandbox")
        return f"/proc/self/fd/{self._listener_file}"

    def listener(self) -> socket.socket:
        self._require_open()
        if not self.inside_url:
            raise SandboxError(
                f"sandbox {self.id} has the network {self.spec.network!r}: only 'model' has a listener",
                cause="sandbox.refused",
            )
        if self._refuses_connections:
            raise SandboxError(
                f"the listener of sandbox {self.id} was closed by refuse_connections()", cause="sandbox.refused"
            )
        if self._listener is None:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            # Only this process can connect to a file without a name, and a killed process leaves none behind.
            with tempfile.TemporaryDirectory(prefix="rookery-model-") as folder:
                self._listener.bind(f"{folder}/socket")
                self._listener_file = os.open(f"{folder}/socket", os.O_PATH | os.O_CLOEXEC)
            self._call_soon("listen")
        return self._listener.dup()

    def refuse_connections(self) -> None:
        self._require_open()
        self._refuses_connections = True
        if self._listener is not None:
            with contextlib.suppress(OSError):  # not listening
                self._listener.shutdown(socket.SHUT_RD)
        self._call_soon("refuse")

    def _call_soon(self, method: str) -> None:
        async def call() -> None:
            with contextlib.suppress(SandboxError):  # the next call on the sandbox reports the loss
                await self._call(method, timeout=30.0)

        task = asyncio.get_running_loop().create_task(call(), context=detached_context())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # ---- close

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close(), context=detached_context())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            for process in list(self._processes):
                process.forget()
            with contextlib.suppress(HostLost):  # the host closes its sandboxes when it loses the connection
                await self._host.bounded(self._host.link.call("close", (self.id,)), 60.0)
        finally:
            self._host.sandboxes.pop(self.id, None)
            if self._listener is not None:
                self._listener.close()
            if self._listener_file >= 0:
                os.close(self._listener_file)
                self._listener_file = -1
            if self._background:
                await asyncio.wait(self._background, timeout=30.0)
            if self.on_closed is not None:
                await self.on_closed()


class RemoteProcess:
    """A background process in a remote sandbox."""

    def __init__(self, link: Link, arguments: Any, on_end: "Callable[[RemoteProcess], None]") -> None:
        self._link = link
        self._on_end = on_end
        loop = asyncio.get_running_loop()
        self._has_started: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[ExecResult] = loop.create_future()
        self._input_closed = self._has_reader = False
        self._call = link.open_call("start", arguments, self._on_event)
        self._task = loop.create_task(link.wait(self._call), context=detached_context())
        self._task.add_done_callback(self._on_done)

    async def started(self) -> None:
        """Wait until the host has started the process. Raise `SandboxError` if it could not."""
        try:
            await self._has_started
        except BaseException:
            self._task.cancel()
            raise

    def _on_event(self, value: Any) -> None:
        kind, content = value
        if kind == "started":
            self._has_started.set_result(None)
        elif kind == "input closed":
            self._input_closed = True
        elif kind == "ended" and not self._ended.done():
            self._input_closed = True
            self._ended.set_result(_load_result(content))

    def _on_done(self, task: "asyncio.Task[Any]") -> None:
        error = None if task.cancelled() else task.exception()
        error = error or SandboxError("the sandbox of the process is closed")
        for future in (self._has_started, self._ended):
            if not future.done():
                future.set_exception(error)
                future.exception()  # retrieved, so that asyncio does not log it
        self._on_end(self)

    async def output(self) -> AsyncIterator[tuple[Stream, bytes]]:
        """Yield chunks of output until stdout and stderr are at their end or the process has ended."""
        if not self._has_reader:
            self._has_reader = True
            self._call.send_event("read")
        while data := await self._call.read():
            yield ("stdout" if data[:1] == b"1" else "stderr"), data[1:]

    async def send(self, data: bytes, *, eof: bool = False) -> None:
        """Write to the program's standard input. Raise `BrokenPipeError` if the program has closed it."""
        if self._input_closed:
            raise BrokenPipeError("the program has closed its standard input")
        await self._call.write(data)
        if eof:
            self._call.end_writing()

    async def wait(self, *, timeout: float) -> ExecResult:
        if not self._has_reader and not self._ended.done():
            self._call.send_event("wait")
        done, _ = await asyncio.wait({self._ended}, timeout=timeout)
        if not done:
            raise TimeoutError(f"the process is still running after {timeout:g} s")
        result = self._ended.result()
        if not self._has_reader:
            self.forget()
        return result

    async def kill(self) -> ExecResult:
        if not self._ended.done():
            self._call.send_event("kill")
        return await self.wait(timeout=GRACE_SECONDS)

    def forget(self) -> None:
        """Tell the host that nothing of the process is needed any more."""
        self._call.send_event("forget")


class RemoteShell:
    """A persistent bash in a remote sandbox."""

    def __init__(self, sandbox: RemoteSandbox, number: int) -> None:
        self._sandbox = sandbox
        self._number = number

    async def run(self, script: str, *, timeout: float, outside: Callable[[], float] | None = None) -> ExecResult:
        return await self._sandbox.run_script(self._number, script, timeout, outside)

    async def close(self) -> None:
        await self._sandbox.close_shell(self._number)


def _load_result(value: Any) -> ExecResult:
    return msgspec.convert(value, ExecResult)
