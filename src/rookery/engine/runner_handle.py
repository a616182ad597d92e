"""Handles through which the supervisor controls its runners: a child process, or the supervisor's own process.

- The death of a runner process is noticed at once, through its pidfd, with its exit status.
- A runner that is stopped gets a request first. It is killed after `STOP_SECONDS`, or if it stops sending
  messages.
- The output of a runner goes to its own log file, never to the terminal.
"""

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from rookery.core import CancelledReason, RookeryError
from rookery.core.child_processes import one_blas_thread
from rookery.engine.crash_attribution import DeathKind
from rookery.engine.executor import Executor
from rookery.engine.framing import FramedConnection
from rookery.engine.group_channel import GroupChannel
from rookery.engine.runner_protocol import (
    AttemptSpec,
    FromRunner,
    Hello,
    ImageUpdate,
    Ready,
    RunnerFailed,
    RunnerState,
    RunSettings,
    Stop,
    ToRunner,
    from_runner_decoder,
)
from rookery.engine.scheduler import OpenRollout
from rookery.environments import Environment
from rookery.gateway.client import GatewayAddress
from rookery.upstreams.pause import PauseCoordinator

STOP_SECONDS = 60.0
"""Seconds after which a runner that was asked to stop is killed. Until then its attempts can tear down."""
SILENT_SECONDS = 4.0
"""A runner that was asked to stop is killed if it sends no message for this many seconds."""
STACK_SECONDS = 0.3
"""Seconds that a blocked runner gets to write its stack to the log before it is killed."""
LOG_TAIL = 8_000
MAX_ALARM = 1 << 20


class Dispatch(msgspec.Struct, eq=False):
    """An attempt that was sent to a runner, with the rollout and the stream that it belongs to."""

    channel: GroupChannel
    rollout: OpenRollout
    spec: AttemptSpec

    @property
    def environment(self) -> str:
        """The name of the task's environment in a mixture; empty in other runs."""
        return self.rollout.group.task.environment


class RunnerListener(Protocol):
    """Receives the messages and the death of a runner. Implemented by `RunnerPool`."""

    def on_message(self, runner: "RunnerHandle", message: FromRunner) -> None: ...

    def on_death(self, runner: "RunnerHandle", death: DeathKind, detail: str) -> None: ...


class RunnerHandle:
    """The supervisor's view of a runner, with the methods to control it."""

    def __init__(self, name: str, listener: RunnerListener) -> None:
        self.name = name
        self.listener = listener
        self.running: dict[str, Dispatch] = {}
        """The attempts that were sent to the runner, by ID."""
        self.ready = False
        self.alone = False
        """True while it runs a single rollout that is suspected of crashing runners. It gets no other attempt."""
        self.retiring = False
        """True if it gets no more attempts and is stopped when it has none."""
        self.stopping = False
        self.spare = False
        """True if it was created only for rollouts that are suspected of crashing runners."""
        self.pause_number = 0
        """The number of the pause during which it was created, or 0 if the run was not paused."""
        self.prewarmed: list[tuple[str, int]] = []
        """The `counts` of the last `PrewarmRequest`: task IDs and numbers of rollouts."""
        self.planned = 0
        """Number of rollouts that are assigned to it and have not started, of which it prepares the sandboxes."""
        self.images: dict[str, ImageUpdate] = {}
        """The progress of the images that it is fetching, by image."""
        self.state = RunnerState()
        """The sandboxes and replicas that it reported with its last heartbeat."""
        self.last_message = 0.0
        self.blamed: str | None = None
        """ID of the attempt that was seen blocking the event loop, if it is known."""
        self.block_stack = ""
        self.node = ""
        """The name of the cluster node on which it runs; empty if the run has no cluster."""

    @property
    def is_process(self) -> bool:
        """True if the runner is a process of its own, which can be stopped and replaced."""
        return True

    @property
    def is_shared(self) -> bool:
        """True if the runner is ready and accepts any attempt."""
        return self.ready and not (self.retiring or self.alone or self.spare)

    async def open(self, pauses: PauseCoordinator, gateway: GatewayAddress | None) -> None:
        """Start the runner. It sends `Ready` when its environment is loaded."""
        raise NotImplementedError

    def send(self, message: ToRunner) -> None:
        raise NotImplementedError

    def read_state(self) -> RunnerState:
        """Return the sandboxes and replicas that the runner uses, as far as it has reported them."""
        return self.state

    def pids(self) -> list[int]:
        return []

    async def stop(self) -> None:
        raise NotImplementedError

    def kill(self, why: DeathKind) -> None:
        raise NotImplementedError


class LocalRunner(RunnerHandle):
    """A runner in the supervisor's process (`runners=0`), for notebooks, debuggers and tests."""

    def __init__(
        self,
        name: str,
        listener: RunnerListener,
        settings: RunSettings,
        environment: Environment,
        gateway: GatewayAddress | None = None,
    ) -> None:
        super().__init__(name, listener)
        self._received: list[FromRunner] = []
        self._flush_scheduled = False
        self.executor = Executor(settings, environment, name, self._receive, gateway=gateway)

    @property
    def is_process(self) -> bool:
        return False

    async def open(self, pauses: PauseCoordinator, gateway: GatewayAddress | None) -> None:  # noqa: ARG002
        self._receive(Ready(os.getpid()))

    def _receive(self, message: FromRunner) -> None:
        self._received.append(message)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        try:
            self.executor.flush()
        except RookeryError as error:
            self._received = [RunnerFailed(str(error), "", disk=True)]
        received, self._received = self._received, []
        for message in received:
            self.listener.on_message(self, message)

    def send(self, message: ToRunner) -> None:
        self.executor.handle(message)

    def read_state(self) -> RunnerState:
        return self.executor.read_state()

    async def stop(self, reason: CancelledReason = "shutdown") -> None:
        await self.executor.close(reason)
        self._flush()


class SeparateRunner(RunnerHandle):
    """A runner process that is connected by a socket, on this machine or on a node of a cluster."""

    def __init__(self, name: str, listener: RunnerListener, settings: RunSettings) -> None:
        super().__init__(name, listener)
        self.settings = settings
        self._connection = FramedConnection(from_runner_decoder, self._on_message, self._on_lost)
        self._connected = False
        """True while there is a connection over which messages can be sent."""
        self._killed_for: DeathKind | None = None
        self._dead: asyncio.Event = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def _connect(
        self, sock: socket.socket, writer: str, pauses: PauseCoordinator, gateway: GatewayAddress | None
    ) -> None:
        """Attach the socket that leads to the process, and send `Hello`."""
        sock.setblocking(False)
        self.last_message = self._loop.time()
        await self._loop.create_connection(lambda: self._connection, sock=sock)
        self.pause_number = pauses.number if pauses.mode is not None else 0
        self._connection.send(Hello(self.settings, writer, pauses.mode, pauses.policy_version, gateway))
        self._connected = True

    def send(self, message: ToRunner) -> None:
        if self._connected:  # before that only `Pause` and `Resume` are sent, which `Hello` will contain
            self._connection.send(message)

    def _on_message(self, message: FromRunner) -> None:
        self.last_message = self._loop.time()
        self.listener.on_message(self, message)

    def on_alarm(self, frame: bytes) -> None:
        """Process an encoded `LoopBlocked` that the process sent over its own pipe."""
        try:
            message = from_runner_decoder.decode(frame)
        except msgspec.DecodeError:
            return  # a partial write of the watchdog; it reports again
        self.listener.on_message(self, message)

    def _on_lost(self, _: BaseException | None) -> None:
        # The end of the process is reported separately. A process without a connection is useless.
        self._connected = False
        if not self._dead.is_set() and not self.retiring:
            self._loop.call_later(0.5, self._kill_if_alive)

    def _kill_if_alive(self) -> None:
        if not self._dead.is_set():
            self.kill("crashed")

    def _on_dead(self, code: int, log_tail: str) -> None:
        """Report to the listener that the process has ended with this status."""
        self._connection.close()
        self._dead.set()
        death: DeathKind = self._killed_for or ("killed" if code == -signal.SIGKILL else "crashed")
        self.listener.on_death(self, death, f"runner {self.name} {_describe_exit(code)}{log_tail}")

    async def stop(self) -> None:
        """Ask the runner to cancel its attempts and exit. Kill it if it takes too long or sends no messages."""
        self.retiring = True
        if self._dead.is_set():
            return
        if self._connected:
            self.send(Stop())
        else:
            self.kill("killed")
        began = self._loop.time()
        try:
            while not self._dead.is_set():
                try:
                    async with asyncio.timeout(0.5):
                        await self._dead.wait()
                except TimeoutError:
                    now = self._loop.time()
                    if now - began > STOP_SECONDS or now - max(began, self.last_message) > SILENT_SECONDS:
                        self.kill("killed")
        except asyncio.CancelledError:
            self.kill("killed")
            raise


class ProcessRunner(SeparateRunner):
    """A runner process on this machine. A pipe carries its reports of a blocked event loop."""

    def __init__(self, name: str, listener: RunnerListener, settings: RunSettings) -> None:
        super().__init__(name, listener, settings)
        self.log = Path(settings.folder) / "logs" / f"{name}.log"
        self.process: RunnerProcess | None = None

    async def open(self, pauses: PauseCoordinator, gateway: GatewayAddress | None) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.process = RunnerProcess(theirs, self.log, self.on_alarm, self._on_exit)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        await self._connect(ours, self.name, pauses, gateway)

    def pids(self) -> list[int]:
        return [self.process.pid] if self.process is not None and not self._dead.is_set() else []

    def _on_exit(self, code: int) -> None:
        self._on_dead(code, read_log_tail(self.log))

    def kill(self, why: DeathKind) -> None:
        if self._dead.is_set() or self.process is None:
            return
        self._killed_for = self._killed_for or why
        self.process.kill(stack=why == "blocked")

    async def stop(self) -> None:
        if self.process is None:
            self.retiring = True
            return
        await super().stop()


class RunnerProcess:
    """The operating system process of a runner, watched by the process that started it.

    `channel` is the runner's socket to the supervisor. `on_alarm` is called with each encoded `LoopBlocked` that
    the runner sends over its pipe, and `on_exit` once with the exit status.
    """

    def __init__(
        self,
        channel: socket.socket,
        log: Path,
        on_alarm: Callable[[bytes], None],
        on_exit: Callable[[int], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_alarm = on_alarm
        self._on_exit = on_exit
        self._alarm_data = bytearray()
        self._alarm, alarm_in = os.pipe()
        log.parent.mkdir(parents=True, exist_ok=True)
        log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        command = [sys.executable, "-m", "rookery.engine.runner"]
        try:
            self._process = subprocess.Popen(
                [*command, str(channel.fileno()), str(alarm_in), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log_fd,
                stderr=log_fd,
                pass_fds=(channel.fileno(), alarm_in),
                start_new_session=True,  # Ctrl-C is for the supervisor, which stops the runners
                # The embedded policy computes here: a BLAS thread pool in every runner would oversubscribe the
                # cores.
                env={**os.environ, **one_blas_thread(os.environ)},
            )
        except BaseException:
            os.close(self._alarm)
            raise
        finally:
            os.close(alarm_in)
            os.close(log_fd)
        self.pid = self._process.pid
        os.set_blocking(self._alarm, False)
        self._loop.add_reader(self._alarm, self._read_alarm)
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._on_ended)

    def _read_alarm(self) -> None:
        try:
            data = os.read(self._alarm, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._alarm)
            return
        self._alarm_data += data
        while len(self._alarm_data) >= 4:
            (length,) = struct.unpack_from("<I", self._alarm_data)
            if length > MAX_ALARM:
                self._alarm_data.clear()
                return
            if len(self._alarm_data) < 4 + length:
                return
            frame = bytes(self._alarm_data[4 : 4 + length])
            del self._alarm_data[: 4 + length]
            self._on_alarm(frame)

    def _on_ended(self) -> None:
        code = self._process.wait()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._loop.remove_reader(self._alarm)
        os.close(self._alarm)
        self._on_exit(code)

    def kill(self, *, stack: bool = False) -> None:
        """Send SIGKILL. With `stack`, the process first gets `STACK_SECONDS` to write its stack to its log."""
        if self._process.returncode is not None:
            return
        if stack:
            # faulthandler writes the stack, even if the event loop is stuck in C code with the GIL.
            os.kill(self.pid, signal.SIGUSR1)
            self._loop.call_later(STACK_SECONDS, self._process.kill)
        else:
            self._process.kill()


def read_log_tail(log: Path) -> str:
    """Return the end of a runner's log, where a crash leaves its stack, as text for an error message."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_TAIL))
            tail = file.read(LOG_TAIL).decode(errors="replace").strip()
    except OSError:
        return ""
    return f"; the end of its log:\n{tail}" if tail else ""


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
